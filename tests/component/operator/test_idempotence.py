"""Nothing is written a second time: neither by a second apply of an example, nor by a second look of the operator."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from devcluster.cluster.cluster import Cluster
from specdecode_operator.api.deployment import KIND
from tests.component.operator.test_schedules import NOT_TODAY
from tests.support.conditions import condition
from tests.support.golden import FLEET
from tests.support.kubectl import Kubectl
from tests.support.objects import Body
from tests.support.operator_process import OperatorProcess
from tests.support.rest import Rest
from tests.support.waiting import eventually

EXAMPLES = Path(__file__).parents[3] / "examples"
NAMESPACE = "examples"
OURS = "--selector=app.kubernetes.io/managed-by=specdecode-operator"
CHILD_KINDS = "deployments,services,configmaps,poddisruptionbudgets,jobs"
SETTLED = (
    *("Unschedulable", "WaitingForVolume", "WaitingForSecret", "DownloadingModels", "LeaderWorkerSetMissing"),
    *("DeviceClassNotFound", "ImageVolumesMissing"),
)
"""Reasons of Ready once everything was done that can be done in a cluster without a kubelet."""


def examples() -> dict[str, Body]:
    """The SpecDecodeDeployments of all examples by their names."""
    bodies = [body for path in EXAMPLES.glob("*.yaml") for body in yaml.safe_load_all(path.read_text())]
    deployments = [body for body in bodies if body["kind"] == KIND]
    for schedule in (each for body in deployments for each in body["spec"].get("captures", ())):
        schedule["schedule"] = NOT_TODAY  # what is due while the tests run would be written
    found = {body["metadata"]["name"]: body for body in deployments}
    assert len(found) == len(deployments) > 5, "they share a namespace here"
    return found


@pytest.fixture(scope="module", autouse=True)
def _fleet(crds: Cluster) -> Iterator[None]:
    """Nodes that the examples may be planned for."""
    kubectl = Kubectl(crds.kubeconfig)
    try:
        for node in FLEET:
            kubectl.add_node(node.name, node.product, node.gpus)
        yield
    finally:
        kubectl.must("delete", "node", "--ignore-not-found", *(node.name for node in FLEET))


@pytest.fixture(scope="module")
def settled(crds: Cluster, operator_process: OperatorProcess) -> Iterator[Kubectl]:
    """kubectl where all examples are applied and launched."""
    kubectl = Kubectl(crds.kubeconfig, NAMESPACE)
    kubectl.must("create", "namespace", NAMESPACE)
    operator_process.ensure()
    apply_examples(kubectl)
    for name in examples():
        eventually(lambda name=name: condition(kubectl, name, "Ready")[1] in SETTLED, f"{name} is launched")
    yield kubectl
    kubectl.must("delete", "sdd", "--all", "--wait=false")


def apply_examples(kubectl: Kubectl) -> None:
    kubectl.must("apply", "--server-side", "--filename=-", stdin=yaml.safe_dump_all(examples().values()))


def test_second_apply_of_examples_changes_nothing(settled: Kubectl) -> None:
    def versions() -> dict[str, str]:
        return {body["metadata"]["name"]: body["metadata"]["resourceVersion"] for body in settled.objects("sdd")}

    Rest(settled).reach()
    before = versions()
    apply_examples(settled)
    assert versions() == before


def test_second_reconcile_of_examples_writes_nothing(settled: Kubectl) -> None:
    rest = Rest(settled)
    rest.reach()
    # A label makes the operator look again.
    settled.must("label", "sdd", "--all", "touched=1")
    for kind in CHILD_KINDS.split(","):
        settled.must("label", kind, OURS, "touched=1")
    rest.settle()
    assert rest.changes() == []
