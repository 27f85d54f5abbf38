"""A real Prometheus that scrapes a replayed engine as the chart says: it knows what the engine's own page says."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from bench.documents.monitoring import FOLDER
from devcluster.cluster.settings import free_ports
from devcluster.host.packages import which
from specdecode_operator.api.deployment import Key
from specdecode_operator.api.deployment_status import FiguresSource
from specdecode_operator.cli.main import app
from specdecode_operator.cluster.observed_figures import FiguresReader, Prometheus
from specdecode_operator.stats.figures import FIGURES, SampleBuffer
from specdecode_operator.stats.measures import Gauge, Page, Rate, growth_between, read_page
from tests.support import plain_http
from tests.support.figure_cases import hear
from tests.support.prometheus import OLDEST, promtool, provide
from tests.support.replay_process import replaying
from tests.support.synthetic import Truth
from tests.support.waiting import eventually

REQUESTS = 6
WINDOW_S = 300  # as the recording rules
NAMES = frozenset().union(*(figure.measure.series() for figure in FIGURES))


def test_prometheus_is_at_least_the_documented_version() -> None:
    said = re.search(r"version (\d+)\.(\d+)", promtool("--version").stdout)
    assert said
    assert [int(part) for part in said.groups()] >= [int(part) for part in OLDEST.split(".")]


def target(url: str, deployment: str, port: str = "http") -> dict[str, Any]:
    """What discovery in Kubernetes would say of a pod's port; Debian builds Prometheus without it."""
    said = {
        "namespace": "models",
        "pod_name": f"{deployment}-0",
        "pod_container_port_name": port,
        "pod_label_app_kubernetes_io_managed_by": "specdecode-operator",
        "pod_label_specdecode_io_deployment": deployment,
    }
    return {
        "targets": [url.removeprefix("http://")],
        "labels": {f"__meta_kubernetes_{name}": value for name, value in said.items()},
    }


@contextmanager
def prometheus(folder: Path, targets: list[dict[str, Any]]) -> Iterator[str]:
    """Run one with the chart's files; yields its URL."""
    provide()
    shutil.copytree(FOLDER, folder)
    config = yaml.safe_load((FOLDER / "scrape.yaml").read_text())
    for job in config["scrape_configs"]:
        del job["kubernetes_sd_configs"]
        job["static_configs"] = targets if job["job_name"] == "specdecode-engines" else []
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (folder / "scrape.yaml").write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    options = (f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [str(which("prometheus")), f"--config.file={folder / 'scrape.yaml'}", *options], stderr=log
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


@dataclass(frozen=True)
class Watched:
    """A Prometheus that has seen an engine answer, and the engine's own pages."""

    url: str
    before: Page
    after: Page
    pages: tuple[str, str]

    def ask(self, query: str) -> dict[str, float]:
        """Return the values of a query, by position or pod."""
        return asked(self.url, query)


def asked(url: str, query: str) -> dict[str, float]:
    """Return the values of a query, by position or pod; nothing while it does not answer."""
    try:
        answer = plain_http.get(f"{url}/api/v1/query", params={"query": query}, timeout=60).json()
    except httpx.TransportError:
        return {}
    series = answer["data"]["result"]
    return {each["metric"].get("position") or each["metric"].get("pod", ""): float(each["value"][1]) for each in series}


def look(url: str) -> tuple[str, Page]:
    """Read an engine's page."""
    text = plain_http.get(f"{url}/metrics", timeout=60).text
    return text, read_page(text, NAMES, time.monotonic())


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """An engine that rests, answers some requests and rests again, while a Prometheus looks."""
    folder = tmp_path_factory.mktemp("watched")
    Truth().make(folder / "made", "constant:100", REQUESTS)
    with replaying(folder / "made" / "trace.jsonl") as engine:
        targets = [
            target(engine, "llama"),
            target(engine, "other"),
            target(engine, "sidecar", "web"),
            target(engine, "secure", "https"),
        ]
        with prometheus(folder / "prometheus", targets) as url:
            series = 'vllm:generation_tokens_total{specdecode_deployment="llama"}'
            eventually(lambda: asked(url, f"count_over_time({series}[1h]) > 1"), "it has seen the engine at rest")
            text_before, before = look(engine)
            for _ in range(REQUESTS):
                body = {"prompt": "a", "max_tokens": 500}
                plain_http.post(f"{engine}/v1/completions", json=body, timeout=60).raise_for_status()
            text_after, after = look(engine)
            (tokens,) = (value for (name, _), value in after.counters.items() if f"{name}{{" in series)
            eventually(lambda: asked(url, series).get("llama-0") == tokens, "it has seen what the engine says")
            yield Watched(url, before, after, (text_before, text_after))


def figures(watched: Watched, name: str = "llama") -> dict[str, Any]:
    """What the command says as that Prometheus knows it."""
    options = ("-n", "models", "--prometheus", watched.url, "--over", str(WINDOW_S), "-o", "json")
    done = CliRunner().invoke(app, ["metrics", name, *options])
    assert done.exit_code == 0, done.output
    return {each["name"]: each for each in json.loads(done.stdout)["figures"]}


def test_figures_from_prometheus_match_the_engine_metrics(watched: Watched) -> None:
    growth = growth_between([(watched.before, watched.after)])
    # Counted first: more of them leave less that may be counted on.
    seen = f'vllm:generation_tokens_total{{specdecode_deployment="llama"}}[{WINDOW_S}s]'
    scrapes = watched.ask(f"count_over_time({seen})")["llama-0"]
    told = figures(watched)
    seconds = watched.after.at_s - watched.before.at_s
    compared = 0
    for figure in FIGURES:
        if not figure.levels or isinstance(figure.measure, Gauge):
            continue
        own = figure.measure.values(growth)
        said = told[figure.name]["by_position"] or {"": told[figure.name]["value"]}
        if figure.unit.endswith("/s"):
            # It counts on for up to a scrape beyond the last one that it has seen.
            counted, grown = said[""] * WINDOW_S, own[""] * seconds
            assert grown * 0.999 <= counted <= grown * (1 + 1.2 / (scrapes - 1)), figure.name
        else:
            assert said == pytest.approx(own, rel=1e-6), figure.name
        compared += bool(own and any(own.values()))
    assert compared > 8
    assert told["mean_acceptance_length"]["value"] > 1


async def test_operator_reads_equal_figures_from_pods_and_prometheus(watched: Watched) -> None:
    """Shares, lengths and quantiles: what is told a second depends on when each looked first."""
    looks, key, now_s = SampleBuffer(), Key("models", "llama"), time.monotonic()
    for text, at_s in zip(watched.pages, (now_s - WINDOW_S, now_s), strict=True):
        hear(looks, "llama-0", text, at_s)
    of_pods = await FiguresReader().read(key, looks)
    of_prometheus = await FiguresReader(Prometheus(watched.url)).read(key, SampleBuffer())
    assert of_pods is not None
    assert of_prometheus is not None
    assert (of_pods.source, of_prometheus.source) == (FiguresSource.PODS, FiguresSource.PROMETHEUS)
    alike = {each.name for each in FIGURES if not each.unit.endswith("/s") and not isinstance(each.measure, Gauge)}
    pods, prometheus = (
        {each.name: each.value for each in told.values if each.name in alike} for told in (of_pods, of_prometheus)
    )
    assert pods == prometheus
    assert len(pods) > 5


def test_prometheus_evaluates_every_rule_of_the_chart(watched: Watched) -> None:
    def evaluated() -> bool:
        groups = plain_http.get(f"{watched.url}/api/v1/rules", timeout=60).json()["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert not [rule.get("lastError") for rule in rules if rule["health"] == "err"]
        return bool(rules) and all(rule["health"] == "ok" for rule in rules)

    eventually(evaluated, "all rules were evaluated")
    told = figures(watched)
    names = [each.recorded() for each in FIGURES if each.levels and isinstance(each.measure, Rate | Gauge)]
    # They may have been evaluated before the engine was seen twice.
    eventually(
        lambda: all(watched.ask(f'{name}{{specdecode_deployment="llama"}}') for name in names), "all are recorded"
    )
    ratio = 'specdecode_deployment:mean_acceptance_length:5m{specdecode_deployment="llama"}'
    length = pytest.approx(told["mean_acceptance_length"]["value"], rel=1e-6)
    # Rules may have been evaluated before the last scrape.
    eventually(lambda: watched.ask(ratio)[""] == length, "the rule tells what the command tells")


def test_scraped_series_are_labelled_by_deployment(watched: Watched) -> None:
    running = 'vllm:num_requests_running{specdecode_deployment!=""}'
    eventually(lambda: set(watched.ask(running)) == {"llama-0", "other-0"}, "a port of another name is not asked")
    up = 'up{job="specdecode-engines"}'
    eventually(lambda: set(watched.ask(up)) == {"llama-0", "other-0", "secure-0"}, "a port of either name is")
    options = ("-n", "elsewhere", "--prometheus", watched.url)
    done = CliRunner().invoke(app, ["metrics", "llama", *options])
    assert done.exit_code == 2
    assert "no series with namespace=elsewhere and specdecode_deployment=llama" in " ".join(done.output.split())
