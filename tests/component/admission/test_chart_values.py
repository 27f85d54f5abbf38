"""The chart with values that people give: what comes of the files in its examples, and what each value is for."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster import chart
from devcluster.host.errors import ClusterError
from devcluster.images import operator_image
from specdecode_operator.api.crd_validation import evaluator
from specdecode_operator.version import __version__
from tests.support.facts_files import facts_text
from tests.support.kubectl import program

NAME = chart.RELEASE
EXAMPLES = sorted(chart.EXAMPLES.glob("*.yaml"))
DIGEST = f"sha256:{'a' * 64}"
Objects = dict[tuple[str, str], dict[str, Any]]


def objects(*options: str) -> Objects:
    """Objects of the chart, by kind and name."""
    bodies = filter(None, yaml.safe_load_all(chart.template(*options)))
    return {(body["kind"], body["metadata"]["name"]): body for body in bodies}


def pod(found: Objects) -> dict[str, Any]:
    template: dict[str, Any] = found["Deployment", NAME]["spec"]["template"]
    return template


def test_rendered_values_examples_match_the_golden_files() -> None:
    found = {file.name: file.read_text() for file in chart.GOLDEN.iterdir()}
    assert found == chart.of_examples(), "look at the difference: ./just manifests writes it anew"


@pytest.mark.parametrize("values", EXAMPLES, ids=lambda file: str(file.stem))
def test_values_examples_keep_the_operator_security_context(values: Path) -> None:
    found, default = (pod(objects(*options))["spec"] for options in ([f"--values={values}"], []))
    assert found["securityContext"] == default["securityContext"]
    for changed, own in zip(found["containers"], default["containers"], strict=True):
        assert changed["securityContext"] == own["securityContext"]


@pytest.mark.parametrize("values", [None, *EXAMPLES], ids=lambda file: file.stem if file else "none")
def test_helm_lint_reports_nothing(values: Path | None) -> None:
    options = [f"--values={values}"] if values else []
    command = [program("helm"), "lint", "--strict", str(chart.CHART), *options]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "[WARNING]" not in answer.stdout


@pytest.mark.parametrize("values", EXAMPLES, ids=lambda file: str(file.stem))
def test_every_object_has_extra_labels_and_annotations(values: Path) -> None:
    found = objects(f"--values={values}", "--set=extraLabels.team=serving", "--set=extraAnnotations.owner=me")
    for key, body in found.items():
        assert body["metadata"]["labels"]["team"] == "serving", key
        assert body["metadata"]["annotations"]["owner"] == "me", key
        assert body["metadata"]["labels"]["app.kubernetes.io/part-of"] == "specdecode", key
    assert pod(found)["metadata"]["labels"]["team"] == "serving"
    assert pod(found)["metadata"]["annotations"]["owner"] == "me"


def test_own_labels_and_annotations_override_extra_ones() -> None:
    """A key twice would be no YAML."""
    given = ["extraLabels.release=all", "extraAnnotations.a=all", "podAnnotations.a=own", "podLabels.release=own"]
    given += ["metrics.podMonitor.enabled=true", "metrics.podMonitor.labels.release=own"]
    found = objects(*(f"--set={each}" for each in given))
    assert found["PodMonitor", NAME]["metadata"]["labels"]["release"] == "own"
    assert found["Deployment", NAME]["metadata"]["labels"]["release"] == "all"
    assert pod(found)["metadata"]["labels"]["release"] == "own"
    assert pod(found)["metadata"]["annotations"]["a"] == "own"


def test_spread_budget_and_metrics_service_select_operator_pods() -> None:
    ours = {"matchLabels": {"app.kubernetes.io/name": NAME, "app.kubernetes.io/instance": NAME}}
    found = objects(f"--values={chart.EXAMPLES / 'ha.yaml'}", "--set=metrics.service.enabled=true")
    assert ours["matchLabels"].items() <= pod(found)["metadata"]["labels"].items()
    constraints = pod(found)["spec"]["topologySpreadConstraints"]
    assert [each["labelSelector"] for each in constraints] == [ours, ours]
    assert found["PodDisruptionBudget", NAME]["spec"]["selector"] == ours
    service = found["Service", f"{NAME}-metrics"]["spec"]
    assert service["selector"] == ours["matchLabels"]
    (container,) = pod(found)["spec"]["containers"]
    assert service["ports"][0]["targetPort"] in {port["name"] for port in container["ports"]}


def test_topology_constraint_keeps_its_own_label_selector() -> None:
    constraint = "maxSkew=1,topologySpreadConstraints[0].topologyKey=zone"
    constraint += ",topologySpreadConstraints[0].whenUnsatisfiable=DoNotSchedule"
    constraint += ",topologySpreadConstraints[0].labelSelector.matchLabels.a=b"
    (given,) = pod(objects(f"--set=topologySpreadConstraints[0].{constraint}"))["spec"]["topologySpreadConstraints"]
    assert given["labelSelector"] == {"matchLabels": {"a": "b"}}


def test_image_digest_takes_precedence_over_tag() -> None:
    digest = "sha256:" + "0" * 64
    (container,) = pod(objects("--set=image.repository=r.example/o", f"--set=image.digest={digest}"))["spec"][
        "containers"
    ]
    assert container["image"] == f"r.example/o@{digest}"


def test_only_public_key_of_the_former_key_secret_is_mounted() -> None:
    former = ["--set=attestation.formerKeySecret=old,attestation.formerKey=a.pub"]
    found = pod(objects("--set=attestation.signingKeySecret=new", *former))["spec"]
    (container,) = found["containers"]
    (argument,) = (each for each in container["args"] if each.startswith("--former-key="))
    (volume,) = (each for each in found["volumes"] if each.get("secret", {}).get("secretName") == "old")
    (item,) = volume["secret"]["items"]
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == volume["name"])
    assert (item["key"], argument) == ("a.pub", f"--former-key={mount['mountPath']}/{item['path']}")
    with pytest.raises(ClusterError, match=r"attestation\.formerKeySecret: .* set both or neither"):
        objects(*former)


def test_facts_files_are_mounted_where_the_operator_reads_them(tmp_path: Path) -> None:
    """Those of a ConfigMap that comes later, and those of the values, which come first."""
    text = facts_text("site/tiny")
    file = tmp_path / "facts.json"
    file.write_text(text)
    found = objects("--set=modelFacts.configMap=ours", f"--set-file=modelFacts.files.site-tiny\\.json={file}")
    made = found["ConfigMap", f"{NAME}-facts"]
    assert made["data"] == {"site-tiny.json": text}
    (container,) = pod(found)["spec"]["containers"]
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == "facts")
    assert f"--facts={mount['mountPath']}" in container["args"]
    (volume,) = (each for each in pod(found)["spec"]["volumes"] if each["name"] == "facts")
    theirs, own = (each["configMap"] for each in volume["projected"]["sources"])
    assert theirs == {"name": "ours", "optional": True}
    assert own == {"name": made["metadata"]["name"]}
    assert ("ConfigMap", f"{NAME}-facts") not in objects()


def test_invalid_or_conflicting_facts_values_are_refused() -> None:
    with pytest.raises(ClusterError, match="files"):
        objects("--set=modelFacts.files.a=7")
    with pytest.raises(ClusterError, match="files"):
        objects("--set=modelFacts.files.a/b=text")
    with pytest.raises(ClusterError, match=rf"modelFacts\.configMap: {NAME}-facts: .* choose another name"):
        objects("--set=modelFacts.files.a=text", f"--set=modelFacts.configMap={NAME}-facts")


def test_longest_release_name_gives_valid_object_names() -> None:
    printed = chart.template("--set=webhook.enabled=true", release="a" * 53)
    most = {"CronJob": 52, "Job": 63, "Service": 63}
    found = [body for body in yaml.safe_load_all(printed) if body and body["kind"] in most]
    assert {body["kind"] for body in found} == set(most)
    for body in found:
        assert len(body["metadata"]["name"]) <= most[body["kind"]], body["metadata"]["name"]


def test_cert_manager_certificate_is_mounted_and_injected() -> None:
    found = objects("--set=webhook.enabled=true", "--set=webhook.certificate.from=CertManager")
    certificate = found["Certificate", f"{NAME}-webhook"]
    place = certificate["metadata"]["namespace"]
    configuration = found["ValidatingWebhookConfiguration", NAME]
    asked_of = configuration["webhooks"][0]["clientConfig"]["service"]
    assert configuration["metadata"]["annotations"] == {"cert-manager.io/inject-ca-from": f"{place}/{NAME}-webhook"}
    assert f"{asked_of['name']}.{asked_of['namespace']}.svc" in certificate["spec"]["dnsNames"]
    (mounted,) = (each for each in pod(found)["spec"]["volumes"] if each["name"] == "webhook-certificate")
    assert mounted["secret"]["secretName"] == certificate["spec"]["secretName"]
    issuer = certificate["spec"]["issuerRef"]
    assert (issuer["kind"], issuer["name"]) in found
    named = objects(
        "--set=webhook.enabled=true",
        "--set=webhook.certificate.from=CertManager",
        "--set=webhook.certificate.issuerRef.name=ours",
    )
    assert named["Certificate", f"{NAME}-webhook"]["spec"]["issuerRef"] == {"name": "ours"}
    assert ("Issuer", f"{NAME}-webhook") not in named


def test_webhook_selects_only_the_watched_namespaces() -> None:
    found = objects("--set=webhook.enabled=true", "--set=watchNamespaces={team-a,team-b}")
    (webhook,) = found["ValidatingWebhookConfiguration", NAME]["webhooks"]
    (only,) = webhook["namespaceSelector"]["matchExpressions"]
    assert only == {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["team-a", "team-b"]}


def test_guard_checks_the_deprecated_service_account_field() -> None:
    # Only of kinds of its own the API server makes one of the two: groups of pods are another's.
    policy = objects("--set=operatorGuard.enabled=true")["ValidatingAdmissionPolicy", f"{NAME}-guard"]
    (rule,) = (each["expression"] for each in policy["spec"]["validations"] if "as another account" in each["message"])
    for pods, holds in (([{}], True), ([{"serviceAccount": "default"}], True), ([{"serviceAccount": "b"}], False)):
        assert evaluator(None, variables={"pods": pods})(rule) is holds


def of_another_type(values: Any) -> Any:
    """Values with one of another type in each place; Helm itself passes over what stands where a table was."""
    match values:
        case dict():
            return {name: of_another_type(value) for name, value in values.items() if value != {}}
        case bool() | int() | list():
            return "yes please"
        case _:
            return ["yes please"]


def places(values: Any, where: str = "") -> Iterator[str]:
    """Paths of all values, as Helm writes them."""
    if not isinstance(values, dict):
        yield where
    else:
        for name, value in values.items():
            yield from places(value, f"{where}/{name}")


def test_every_value_of_wrong_type_is_refused_by_name(tmp_path: Path) -> None:
    given = of_another_type(yaml.safe_load((chart.CHART / "values.yaml").read_text()))
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(given))
    with pytest.raises(ClusterError) as refused:
        chart.template(f"--values={tmp_path / 'values.yaml'}")
    named = set(re.findall(r"at '([^']+)': got \w+, want \w+", str(refused.value)))
    named |= set(re.findall(r"at '([^']+)': value must be one of", str(refused.value)))
    wanted = {*places(given)}
    assert len(wanted) > 60
    assert wanted - named == set(), refused.value


def test_unknown_value_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"additional properties 'replica' not allowed"):
        chart.template("--set=replica=2")


def test_missing_image_repository_is_refused_with_the_value_to_set() -> None:
    """The development image exists in development clusters only: an installation with it could never start."""
    answer = subprocess.run(
        [program("helm"), "template", NAME, str(chart.CHART)], capture_output=True, text=True, check=False
    )
    assert answer.returncode != 0
    assert "image.repository: not set" in answer.stderr
    assert "--set image.repository=" in answer.stderr


@pytest.mark.parametrize(
    ("values", "image"),
    [
        ("image.repository=r.example/operator,image.tag=", f"r.example/operator:{__version__}"),
        ("image.repository=r.example/operator,image.tag=1.0-rc", "r.example/operator:1.0-rc"),
        (f"image.repository=r.example/operator,image.digest={DIGEST}", f"r.example/operator@{DIGEST}"),
    ],
)
def test_image_tag_defaults_to_the_chart_version(values: str, image: str) -> None:
    (container,) = pod(objects(f"--set={values}"))["spec"]["containers"]
    assert container["image"] == image


def test_development_clusters_run_the_image_that_they_build() -> None:
    (container,) = pod(objects())["spec"]["containers"]
    assert container["image"] == operator_image.REFERENCE
