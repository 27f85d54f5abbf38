"""What the chart brings for Prometheus and Grafana: rules that fire when they should, and expressions that hold."""

import json
import re
import shutil
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.documents.monitoring import FOLDER, files
from devcluster import chart
from devcluster.host.errors import ClusterError
from specdecode_operator.handlers.leadership import LeaderCollector
from specdecode_operator.handlers.main import OperatorState
from specdecode_operator.handlers.metrics import AdmissionCollector
from specdecode_operator.stats.figures import FIGURES
from specdecode_operator.vllm.settings_watch import METRIC
from tests.component.admission.test_install import NAME, helm
from tests.support.documents import ROOT, relative
from tests.support.prometheus import promtool

DATA = Path(__file__).parent / "data"
RUNBOOKS = [ROOT / "docs/operate" / name for name in ("alerts.md", "check-answers.md", "operator-health.md")]
CASES = sorted(DATA.glob("*-test.yaml"))
OFFERED = ("prometheusRule", "dashboard", "enginePodMonitor")
_SERIES = re.compile(
    r"\b(?:vllm|specdecode|specdecode_deployment|specdecode_pod):[\w:]+|\bspecdecode_(?!deployment\b)\w+"
)


def rules(name: str) -> list[dict[str, Any]]:
    """Rules of a file of the chart."""
    return [rule for group in yaml.safe_load((FOLDER / name).read_text())["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    found: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
    return found


def panels() -> list[dict[str, Any]]:
    """Panels of the dashboard that show something."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def dashboard_expressions() -> list[str]:
    """All that the dashboard asks of Prometheus."""
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def series_of_the_operator() -> set[str]:
    """Names of all series that the operator publishes."""
    collectors = (*OperatorState().collectors(), LeaderCollector(), AdmissionCollector(lambda: None))
    families = list(chain.from_iterable(collector.collect() for collector in collectors))
    return {each.name for each in families} | {sample.name for each in families for sample in each.samples}


@pytest.mark.parametrize("name", files())
def test_generated_monitoring_files_are_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text() == files()[name], f"{name} is stale: run ./just docs"


@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_rules_pass_their_promtool_cases(cases: Path, tmp_path: Path) -> None:
    for file in (*FOLDER.glob("*.yaml"), cases):
        shutil.copy(file, tmp_path)
    done = promtool("test", "rules", tmp_path / cases.name)
    assert done.returncode == 0, done.stdout


def test_every_recording_rule_and_alert_has_cases() -> None:
    groups = [group for path in CASES for group in yaml.safe_load(path.read_text())["tests"]]
    asked = " ".join(each["expr"] for group in groups for each in group.get("promql_expr_test", ()))
    recorded = [rule["record"] for rule in rules("recording-rules.yaml")]
    assert [name for name in recorded if f"({name}," not in asked] == []
    alerts = [each for group in groups for each in group.get("alert_rule_test", ())]
    firing, silent = (
        {each["alertname"] for each in alerts if bool(each["exp_alerts"]) is fires} for fires in (True, False)
    )
    assert firing == silent == {rule["alert"] for rule in rules("alerts.yaml")}


def test_promtool_fails_if_an_alert_does_not_fire(tmp_path: Path) -> None:
    for file in (*FOLDER.glob("*.yaml"), DATA / "alerts-test.yaml"):
        shutil.copy(file, tmp_path)
    changed = (tmp_path / "alerts.yaml").read_text().replace("> 0.05", "> 0.5")
    (tmp_path / "alerts.yaml").write_text(changed)
    done = promtool("test", "rules", tmp_path / "alerts-test.yaml")
    assert done.returncode != 0
    assert "SpecDecodePreemptions" in done.stdout


def test_every_alert_links_to_its_runbook_section() -> None:
    alerts = {page: re.findall(r"^### (SpecDecode\w+)$", page.read_text(), re.MULTILINE) for page in RUNBOOKS}
    sections = {alert: f"{relative(page)}#{alert.lower()}" for page in RUNBOOKS for alert in alerts[page]}
    assert sections == {rule["alert"]: rule["annotations"]["runbook"] for rule in rules("alerts.yaml")}
    assert list(sections) == [rule["alert"] for rule in rules("alerts.yaml")], "in their order"


def test_every_series_in_rules_and_dashboard_exists() -> None:
    expressions = [rule["expr"] for rule in (*rules("alerts.yaml"), *rules("recording-rules.yaml"))]
    named = set(_SERIES.findall(" ".join([*expressions, *dashboard_expressions()])))
    engines = frozenset().union(*(figure.measure.series() for figure in FIGURES))
    recorded = {rule["record"] for rule in rules("recording-rules.yaml")}
    # That engines have theirs is asked of vLLM: tests/engine/test_contract.py.
    assert named - engines - recorded - series_of_the_operator() == {METRIC}, "which the operator brings into engines"
    assert named > recorded


def test_dashboard_expressions_are_valid_promql(tmp_path: Path) -> None:
    asked = [{"record": f"a{place}", "expr": expr} for place, expr in enumerate(dashboard_expressions())]
    (tmp_path / "asked.yaml").write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": asked}]}))
    done = promtool("check", "rules", tmp_path / "asked.yaml")
    assert f"SUCCESS: {len(asked)} rules found" in done.stdout, done.stdout


def test_dashboard_layout_and_variables_are_consistent() -> None:
    board = dashboard()
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time"} <= board.keys()
    assert set(Counter(panel["id"] for panel in board["panels"]).values()) == {1}
    taken = Counter(
        (x, y)
        for place in (panel["gridPos"] for panel in board["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    )
    assert set(taken.values()) == {1}, "no panel lies on another"
    assert max(x for x, _ in taken) < 24
    for panel in panels():
        assert [target["refId"] for target in panel["targets"]] == list("ABCD"[: len(panel["targets"])])
        assert {"title", "description", "fieldConfig", "datasource"} <= panel.keys()
    defined = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board))) - {"__all"}
    assert used == defined
    shown = " ".join(dashboard_expressions())
    assert [figure.name for figure in FIGURES if figure.levels and figure.recorded() not in shown] == []


def test_chart_adds_rules_and_dashboard_only_if_enabled() -> None:
    plain = helm()
    assert not {kind for kind, _ in plain} & {"PodMonitor", "ServiceMonitor", "PrometheusRule"}, (
        "clusters without their CRDs refuse them"
    )
    asked = [f"--set=metrics.{name}.enabled=true" for name in OFFERED]
    objects = helm(*asked, "--set=metrics.prometheusRule.labels.release=prometheus")
    rule = objects["PrometheusRule", NAME]
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    given = [each for group in rule["spec"]["groups"] for each in group["rules"]]
    assert given == [*rules("recording-rules.yaml"), *rules("alerts.yaml")], (
        "templates of alerts are Prometheus', not Helm's"
    )
    board = objects["ConfigMap", f"{NAME}-dashboard"]
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(board["data"]["specdecode.json"]) == dashboard()


def test_monitors_set_a_sample_limit_and_the_job_label_used_by_alerts() -> None:
    monitors = helm(*(f"--set=metrics.{name}.enabled=true" for name in ("podMonitor", "enginePodMonitor")))
    jobs = yaml.safe_load((FOLDER / "scrape.yaml").read_text())["scrape_configs"]
    limits = [monitors["PodMonitor", name]["spec"]["sampleLimit"] for name in (NAME, f"{NAME}-engines")]
    assert limits == [each["sample_limit"] for each in jobs] == [20_000] * 2
    (endpoint,) = monitors["PodMonitor", NAME]["spec"]["podMetricsEndpoints"]
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": jobs[0]["job_name"]}]
    of_operator = [each["expr"] for each in rules("alerts.yaml") if "specdecode_deployment:" not in each["expr"]]
    for expression in (*of_operator, *dashboard_expressions()):
        for selector in re.findall(
            r"\bspecdecode_(?:deployments|plans|captures|reconcile|budget|leader|admission)\w*(\S*)", expression
        ):
            assert selector.startswith(f'{{job="{jobs[0]["job_name"]}"'), expression


def test_service_monitor_equals_pod_monitor_and_excludes_it() -> None:
    objects = helm("--set=metrics.serviceMonitor.enabled=true", "--set=metrics.serviceMonitor.labels.release=p")
    monitor, service = objects["ServiceMonitor", NAME], objects["Service", f"{NAME}-metrics"]
    assert monitor["metadata"]["labels"]["release"] == "p"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    of_pods = helm("--set=metrics.podMonitor.enabled=true")["PodMonitor", NAME]["spec"]
    assert (monitor["spec"]["sampleLimit"], endpoint) == (of_pods["sampleLimit"], of_pods["podMetricsEndpoints"][0])
    with pytest.raises(ClusterError, match=r"metrics\.serviceMonitor: metrics\.podMonitor is also enabled"):
        chart.template("--set=metrics.serviceMonitor.enabled=true", "--set=metrics.podMonitor.enabled=true")


def test_service_monitor_does_not_select_the_webhook_service() -> None:
    objects = helm("--set=metrics.serviceMonitor.enabled=true", "--set=webhook.enabled=true")
    wanted = objects["ServiceMonitor", NAME]["spec"]["selector"]["matchLabels"].items()
    services = {name: body["metadata"]["labels"] for (kind, name), body in objects.items() if kind == "Service"}
    assert [name for name, labels in services.items() if wanted <= labels.items()] == [f"{NAME}-metrics"]
    assert len(services) == 2


def test_engine_pod_monitor_matches_engine_labels_and_ports() -> None:
    monitor = helm("--set=metrics.enginePodMonitor.enabled=true")["PodMonitor", f"{NAME}-engines"]
    golden = list(yaml.safe_load_all((ROOT / "tests/golden/llama-70b.yaml").read_text()))
    (engine,) = [each["spec"]["template"] for each in golden if each["kind"] == "Deployment"]
    labels = engine["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (expression,) = monitor["spec"]["selector"]["matchExpressions"]
    assert expression["key"] in labels
    ports = {port["name"] for container in engine["spec"]["containers"] for port in container.get("ports", ())}
    endpoints = {each["port"]: each["scheme"] for each in monitor["spec"]["podMetricsEndpoints"]}
    assert endpoints == {"http": "http", "https": "https"}
    assert ports & endpoints.keys()
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        (relabeling,) = endpoint["relabelings"]
        (source,) = relabeling["sourceLabels"]
        assert source == "__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", expression["key"])
        assert relabeling["targetLabel"] == "specdecode_deployment"
        assert "metricRelabelings" not in endpoint


def test_engine_pod_monitor_selects_only_watched_namespaces() -> None:
    options = ("--set=metrics.enginePodMonitor.enabled=true", "--set=watchNamespaces={team-a,team-b}")
    monitor = helm(*options)["PodMonitor", f"{NAME}-engines"]
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["team-a", "team-b"]}
    everywhere = helm(options[0])["PodMonitor", f"{NAME}-engines"]
    assert everywhere["spec"]["namespaceSelector"] == {"any": True}


def test_figures_only_keeps_every_series_used_by_rules_and_dashboard() -> None:
    monitor = helm(*(f"--set=metrics.enginePodMonitor.{each}=true" for each in ("enabled", "figuresOnly")))
    folder = ROOT / "charts/specdecode-operator/files"
    texts = [(folder / name).read_text() for name in ("recording-rules.yaml", "alerts.yaml", "dashboard.json")]
    read = {name for text in texts for name in re.findall(r"\b(?:vllm|specdecode):[a-z_]+", text)}
    assert len(read) > 15
    for endpoint in monitor["PodMonitor", f"{NAME}-engines"]["spec"]["podMetricsEndpoints"]:
        (rule,) = endpoint["metricRelabelings"]
        assert (rule["sourceLabels"], rule["action"]) == (["__name__"], "keep")
        kept = re.compile(rule["regex"])
        series = {f"{name}_bucket" if name.endswith("_seconds") else name for name in read}
        assert {name for name in series if not kept.fullmatch(name)} == set()
        assert not kept.fullmatch("vllm:e2e_request_latency_seconds_bucket")


def test_plain_prometheus_accepts_the_scrape_and_rule_files(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    config = yaml.safe_load((FOLDER / "scrape.yaml").read_text())
    for job in config["scrape_configs"]:
        # Debian builds it without discovery in Kubernetes.
        assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    (tmp_path / "scrape.yaml").write_text(yaml.safe_dump(config))
    done = promtool("check", "config", tmp_path / "scrape.yaml")
    assert done.returncode == 0, done.stdout
