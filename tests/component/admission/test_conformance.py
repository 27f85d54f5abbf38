"""Everything that is rendered or shipped is what the API server's own schemas say, field by field."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import yaml

from devcluster import chart
from devcluster.builds import binaries
from devcluster.cluster.cluster import Cluster
from tests.support.conformance import complaints, write_schemas
from tests.support.kubectl import Kubectl, program

ROOT = Path(__file__).parents[3]
FOLDERS = ("tests/golden", "examples", "crds")
FILES = sorted(
    path for folder in FOLDERS for path in (ROOT / folder).glob("*.yaml") if path.name != "kustomization.yaml"
)
GROUPS = any("kind: LeaderWorkerSet" in path.read_text() for path in FILES)
"""Whether an example spreads a replica over several nodes."""

CHART = (
    *("helm", "template", "specdecode-operator", "charts/specdecode-operator", "--namespace=specdecode-system"),
    f"--values={chart.DEVELOPMENT}",
)
COMMANDS = {
    "manifests": ("kubectl", "kustomize", "manifests"),
    "crds": ("kubectl", "kustomize", "crds"),
    "chart": CHART,
    "monitoring": (*CHART, "--values=charts/specdecode-operator/examples/monitoring.yaml"),
    "service monitor": (*CHART, "--set=metrics.serviceMonitor.enabled=true"),
}


@pytest.fixture(scope="module")
def schemas(crds: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kubectl = Kubectl(crds.kubeconfig)
    with leader_worker_sets(kubectl) if GROUPS else nullcontext(), prometheus_operator(kubectl), gateways(kubectl):
        return write_schemas(kubectl, tmp_path_factory.mktemp("schemas"))


@contextmanager
def leader_worker_sets(kubectl: Kubectl) -> Iterator[None]:
    """Their kind, for a while: other tests want an API server without it."""
    (file,) = (binaries.lws_sources() / "crd/bases").glob("*.yaml")
    with installed(kubectl, f"--filename={file}"):
        yield


@contextmanager
def prometheus_operator(kubectl: Kubectl) -> Iterator[None]:
    """The kinds of the Prometheus operator that the chart makes objects of, for a while."""
    folder = binaries.prometheus_operator_crds()
    kinds = ("podmonitors", "servicemonitors", "prometheusrules")
    with installed(kubectl, *(f"--filename={folder}/monitoring.coreos.com_{each}.yaml" for each in kinds)):
        yield


@contextmanager
def gateways(kubectl: Kubectl) -> Iterator[None]:
    """The kinds of the Gateway API and its Inference Extension that the operator creates, for a while."""
    route = binaries.gateway_api_crds() / "gateway.networking.k8s.io_httproutes.yaml"
    pool = binaries.inference_extension_crds() / "inference.networking.k8s.io_inferencepools.yaml"
    with installed(kubectl, f"--filename={route}", f"--filename={pool}"):
        yield


@contextmanager
def installed(kubectl: Kubectl, *files: str) -> Iterator[None]:
    try:
        kubectl.must("apply", "--server-side", *files)
        yield
    finally:
        # An API server that has only just begun to serve a kind may take minutes to see that it has no objects.
        kubectl.must("delete", "--ignore-not-found", *files, timeout_s=300)


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_conform_to_api_schemas(schemas: Path, file: Path) -> None:
    text = file.read_text()
    if "<<:" in text:
        # kubeconform takes a merged key that is set otherwise beside the merge for one that is there twice.
        text = yaml.safe_dump_all(yaml.safe_load_all(text))
    assert complaints(schemas, text) == []


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_install_manifests_conform_to_api_schemas(schemas: Path, command: tuple[str, ...]) -> None:
    name, *arguments = command
    manifest = subprocess.check_output([program(name), *arguments], text=True, cwd=ROOT)
    assert "kind: " in manifest
    assert complaints(schemas, manifest) == []


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("clusterIP: None", "clusterIPP: None", "clusterIPP"),
        ("port: 80", "port: eighty", "port"),
        ("kind: Service", "kind: Servise", "could not find schema"),
    ],
)
def test_schema_violation_is_reported(schemas: Path, old: str, new: str, word: str) -> None:
    service = "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {clusterIP: None, ports: [{port: 80}]}\n"
    assert complaints(schemas, service) == []
    (said,) = complaints(schemas, service.replace(old, new))
    assert word in said
