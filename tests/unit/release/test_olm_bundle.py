"""The OLM bundle keeps the rules of `operator-sdk bundle validate`, and installs the objects of `manifests/`.

The rules come from github.com/operator-framework/api, pkg/validation: the CSV, its examples and install modes, the
owned CRDs, and the annotations. operator-sdk itself does not run.
"""

import copy
import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import yaml

from devcluster import chart
from devcluster.images import operator_image
from devcluster.release.olm_bundle import bundle
from devcluster.release.tarball import tarball
from specdecode_operator.version import __version__

IMAGE = f"registry.example.com/team/specdecode-operator@sha256:{'a' * 64}"
CSV = "manifests/specdecode-operator.clusterserviceversion.yaml"
CAPABILITIES = {"Basic Install", "Seamless Upgrades", "Full Lifecycle", "Deep Insights", "Auto Pilot"}
KINDS = {
    "ClusterRole",
    "ClusterRoleBinding",
    "ConfigMap",
    "CustomResourceDefinition",
    "ClusterServiceVersion",
    "PodDisruptionBudget",
    "PriorityClass",
    "Role",
    "RoleBinding",
    "Secret",
    "Service",
    "ServiceAccount",
    "ServiceMonitor",
    "PodMonitor",
    "PrometheusRule",
}
"""Kinds that OLM accepts in a bundle, as far as this chart has them."""
REQUIRED = {
    "mediatype.v1": "registry+v1",
    "manifests.v1": "manifests/",
    "metadata.v1": "metadata/",
    "package.v1": "specdecode-operator",
    "channels.v1": "alpha",
    "channel.default.v1": "alpha",
}
PREFIX = "operators.operatorframework.io.bundle."
LARGEST_BYTES = 4 * 2**20

Files = dict[str, Any]


@cache
def _parsed() -> Files:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return {path: yaml.load(text, loader) if path.endswith(".yaml") else text for path, text in bundle(IMAGE).items()}


def parsed() -> Files:
    """The files of a bundle, parsed, to change."""
    return copy.deepcopy(_parsed())


def problems(files: Files) -> list[str]:
    """Return what operator-sdk would report as errors, and as warnings that we do not want."""
    manifests = [body for path, body in files.items() if path.startswith("manifests/")]
    found = [f"kind {body['kind']}" for body in manifests if body["kind"] not in KINDS]
    versions = [body for body in manifests if body["kind"] == "ClusterServiceVersion"]
    if len(versions) != 1:
        return [*found, f"{len(versions)} ClusterServiceVersions"]
    (csv,) = versions
    crds = [body for body in manifests if body["kind"] == "CustomResourceDefinition"]
    return [*found, *_csv(csv), *_examples(csv), *_crds(csv, crds), *_accounts(csv, manifests), *_metadata(files)]


def _csv(csv: Any) -> list[str]:
    spec, found = csv["spec"], []
    if not re.fullmatch(r"[a-z0-9-]{1,63}\.v\d+\.\d+\.\d+(-rc\.\d+)?", csv["metadata"]["name"]):
        found.append("metadata.name")
    if csv["metadata"]["name"].partition(".v")[2] != spec["version"]:
        found.append("spec.version")
    required = ("displayName", "description", "provider", "maturity", "keywords", "minKubeVersion", "install")
    found += [f"spec.{name}" for name in required if not spec.get(name)]
    if not re.fullmatch(r"\d+\.\d+\.\d+", spec["minKubeVersion"]):
        found.append("spec.minKubeVersion")
    if csv["metadata"]["annotations"]["capabilities"] not in CAPABILITIES:
        found.append("capabilities")
    modes = [mode["type"] for mode in spec["installModes"]]
    if sorted(modes) != ["AllNamespaces", "MultiNamespace", "OwnNamespace", "SingleNamespace"]:
        found.append("spec.installModes")
    if not any(mode["supported"] for mode in spec["installModes"]):
        found.append("none of InstallModeTypes are supported")
    if spec["install"]["strategy"] != "deployment" or not spec["install"]["spec"]["deployments"]:
        found.append("spec.install")
    return found


def _examples(csv: Any) -> list[str]:
    owned = csv["spec"]["customresourcedefinitions"]["owned"]
    provided = {(f"{each['name'].partition('.')[2]}/{each['version']}", each["kind"]) for each in owned}
    examples = json.loads(csv["metadata"]["annotations"]["alm-examples"])
    shown = {(each["apiVersion"], each["kind"]) for each in examples}
    return [] if shown == provided else ["alm-examples"]


def _crds(csv: Any, crds: list[Any]) -> list[str]:
    owned = [
        (each["name"], each["version"], each["kind"], bool(each["displayName"] and each["description"]))
        for each in csv["spec"]["customresourcedefinitions"]["owned"]
    ]
    known = [
        (crd["metadata"]["name"], version["name"], crd["spec"]["names"]["kind"], True)
        for crd in crds
        for version in crd["spec"]["versions"]
    ]
    return [] if sorted(owned) == sorted(known) else ["owned CRDs"]


def _accounts(csv: Any, manifests: list[Any]) -> list[str]:
    install = csv["spec"]["install"]["spec"]
    used = {each["spec"]["template"]["spec"]["serviceAccountName"] for each in install["deployments"]}
    granted = {each["serviceAccountName"] for each in (*install["permissions"], *install["clusterPermissions"])}
    found = [] if used == granted else ["service accounts"]
    own = {body["metadata"]["name"] for body in manifests if body["kind"] == "ServiceAccount"}
    return [*found, *(f"invalid service account {name} in bundle" for name in own & used)]


def _metadata(files: Files) -> list[str]:
    annotations = files["metadata/annotations.yaml"]["annotations"]
    found = [name for name, value in REQUIRED.items() if annotations.get(f"{PREFIX}{name}") != value]
    labels = dict(re.findall(r"^LABEL (\S+?)=(\S+)$", files["bundle.Dockerfile"], re.MULTILINE))
    return found if labels == annotations else [*found, "labels of bundle.Dockerfile"]


def test_bundle_passes_the_validation_rules() -> None:
    assert problems(parsed()) == []
    assert len(tarball(bundle(IMAGE))) < LARGEST_BYTES


def csv_of(files: Files) -> Any:
    return files[CSV]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda files: csv_of(files)["metadata"].update(name="specdecode-operator"), "metadata.name"),
        (lambda files: csv_of(files)["spec"].update(version="9.9.9"), "spec.version"),
        (lambda files: csv_of(files)["spec"].update(displayName=""), "spec.displayName"),
        (lambda files: csv_of(files)["spec"]["installModes"].pop(), "spec.installModes"),
        (lambda files: csv_of(files)["metadata"]["annotations"].update({"alm-examples": "[]"}), "alm-examples"),
        (lambda files: csv_of(files)["spec"]["customresourcedefinitions"]["owned"].pop(), "owned CRDs"),
        (
            lambda files: csv_of(files)["spec"]["install"]["spec"].update(permissions=[], clusterPermissions=[]),
            "service accounts",
        ),
        (lambda files: files["metadata/annotations.yaml"]["annotations"].clear(), "package.v1"),
        (lambda files: files.update({"bundle.Dockerfile": "FROM scratch\n"}), "labels of bundle.Dockerfile"),
        (
            lambda files: files.update({"manifests/x.yaml": {"kind": "Namespace", "metadata": {"name": "x"}}}),
            "kind Namespace",
        ),
    ],
)
def test_problem_in_a_bundle_is_found(change: Callable[[Files], object], problem: str) -> None:
    files = parsed()
    change(files)
    assert problem in problems(files)


def test_bundle_installs_the_objects_of_the_manifests() -> None:
    bodies = [
        body
        for file in chart.MANIFESTS.glob("*.yaml")
        if file.name not in chart.BY_HAND
        for body in yaml.safe_load_all(file.read_text())
    ]
    by_kind = {(body["kind"], body["metadata"]["name"]): body for body in bodies}
    files = parsed()
    install = csv_of(files)["spec"]["install"]["spec"]
    (deployment,) = install["deployments"]
    text = yaml.safe_dump(by_kind["Deployment", deployment["name"]]["spec"])
    assert deployment["spec"] == yaml.safe_load(text.replace(operator_image.REFERENCE, IMAGE))
    assert install["clusterPermissions"][0]["rules"] == by_kind["ClusterRole", "specdecode-operator"]["rules"]
    assert install["permissions"][0]["rules"] == by_kind["Role", "specdecode-operator-own"]["rules"]
    others = {(body["kind"], body["metadata"]["name"]) for path, body in files.items() if path.startswith("manifests/")}
    assert {name for kind, name in others if kind == "ClusterRole"} == {
        "specdecode-operator-view",
        "specdecode-operator-edit",
    }
    assert csv_of(files)["spec"]["version"] == __version__


def test_bundle_examples_use_only_crd_fields() -> None:
    files = parsed()
    manifests = [body for path, body in files.items() if path.startswith("manifests/")]
    crds = {body["spec"]["names"]["kind"]: body for body in manifests if body["kind"] == "CustomResourceDefinition"}
    for example in json.loads(csv_of(files)["metadata"]["annotations"]["alm-examples"]):
        schema = crds[example["kind"]]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        assert set(example["spec"]) <= set(schema["properties"])


def test_bundle_is_reproducible() -> None:
    assert tarball(bundle(IMAGE)) == tarball(bundle(IMAGE))
