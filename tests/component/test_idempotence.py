"""Nothing is written a second time: neither by a second apply of an example, nor by a second look of the operator."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from devcluster.cluster import Cluster
from specdecode_operator.api.deployment import KIND
from tests.support.conditions import condition
from tests.support.golden import FLEET
from tests.support.kubectl import Kubectl
from tests.support.objects import Body
from tests.support.operator_process import OperatorProcess
from tests.support.rest import Rest
from tests.support.waiting import eventually


def deployments_in(path: Path) -> list[Body]:
    return [body for body in yaml.safe_load_all(path.read_text()) if body["kind"] == KIND]


EXAMPLES = [path for path in sorted((Path(__file__).parents[2] / "examples").glob("*.yaml")) if deployments_in(path)]
OURS = "--selector=app.kubernetes.io/managed-by=specdecode-operator"
CHILD_KINDS = "deployments,services,configmaps,poddisruptionbudgets,jobs"
SETTLED = ("Unschedulable", "WaitingForVolume", "WaitingForSecret", "DownloadingModels", "LeaderWorkerSetMissing")
"""Reasons of Ready once everything was done that can be done in a cluster without a kubelet."""


@pytest.fixture(autouse=True)
def _running(operator: OperatorProcess) -> None:
    pass


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


def apply(kubectl: Kubectl, body: Body) -> None:
    kubectl.must("apply", "--server-side", "--filename=-", stdin=json.dumps(body))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_second_apply_and_a_second_reconcile_change_nothing(kubectl: Kubectl, rest: Rest, example: Path) -> None:
    (body,) = deployments_in(example)
    name = body["metadata"]["name"]
    apply(kubectl, body)
    eventually(lambda: condition(kubectl, name, "Ready")[1] in SETTLED, f"{name} is launched")
    rest.reach()
    version = kubectl.object("sdd", name)["metadata"]["resourceVersion"]
    apply(kubectl, body)
    assert kubectl.object("sdd", name)["metadata"]["resourceVersion"] == version, "a second apply"
    # A label makes the operator look again.
    kubectl.must("label", "sdd", name, "touched=1")
    for child in kubectl.objects(CHILD_KINDS, OURS):
        kubectl.must("label", child["kind"], child["metadata"]["name"], "touched=1")
    rest.settle()
    assert rest.changes() == [], "a second reconcile"
