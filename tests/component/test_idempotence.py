"""Nothing is written a second time: neither by a second apply of an example, nor by a second look of the operator."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from devcluster.cluster import Cluster
from specdecode_operator.api.base import API_VERSION
from specdecode_operator.api.deployment import KIND
from tests.support.conditions import condition
from tests.support.golden import FLEET
from tests.support.kubectl import Kubectl
from tests.support.objects import Body, tiny_cpu
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
OURS = "--selector=app.kubernetes.io/managed-by=specdecode-operator"
CHILD_KINDS = "deployments,services,configmaps,poddisruptionbudgets,jobs,controllerrevisions"
SETTLED = ("Unschedulable", "WaitingForVolume", "WaitingForSecret", "DownloadingModels", "LeaderWorkerSetMissing")
"""Reasons of Ready once everything was done that can be done in a cluster without a kubelet."""

_numbers = itertools.count(1)
Versions = dict[tuple[str, str], tuple[str, int]]


@pytest.fixture(autouse=True)
def _running(operator: OperatorProcess) -> None:
    pass


@pytest.fixture(scope="module", autouse=True)
def _fleet(crds: Cluster) -> Iterator[None]:
    """Nodes that the examples may be planned for."""
    kubectl = Kubectl(crds.kubeconfig)
    for node in FLEET:
        labels = {"nvidia.com/gpu.product": node.product}
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node.name, "labels": labels}}
        kubectl.must("create", "--filename=-", stdin=json.dumps(body))
        gpus = {"nvidia.com/gpu": str(node.gpus)}
        status = json.dumps({"status": {"capacity": gpus, "allocatable": gpus}})
        kubectl.must("patch", "node", node.name, "--subresource=status", "--type=merge", f"--patch={status}")
    yield
    kubectl.must("delete", "node", *(node.name for node in FLEET))


def versions(kubectl: Kubectl) -> Versions:
    """Version and generation of the object and of all its children."""
    bodies = [*kubectl.objects("sdd"), *kubectl.objects(CHILD_KINDS, OURS)]
    return {
        (body["kind"], body["metadata"]["name"]): (
            body["metadata"]["resourceVersion"],
            body["metadata"].get("generation", 0),
        )
        for body in bodies
    }


def apply(kubectl: Kubectl, body: Body) -> None:
    kubectl.must("apply", "--server-side", "--filename=-", stdin=json.dumps(body))


def settle(kubectl: Kubectl) -> None:
    """Wait until the operator has worked off what came before: it takes objects in their order."""
    name, spec = f"zz-{next(_numbers)}", tiny_cpu(suspend=True)
    apply(kubectl, {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec})
    eventually(lambda: condition(kubectl, name, "Ready")[1] == "Suspended", f"{name} was looked at")


def at_rest(kubectl: Kubectl, name: str) -> Versions | None:
    """Versions of an example's objects, once controllers have said what they have to say of them."""
    before = of_example(versions(kubectl), name)
    settle(kubectl)
    return before if of_example(versions(kubectl), name) == before else None


def of_example(found: Versions, name: str) -> Versions:
    return {key: value for key, value in found.items() if key[1].startswith(name)}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_second_apply_and_a_second_reconcile_change_nothing(kubectl: Kubectl, example: Path) -> None:
    bodies = [body for body in yaml.safe_load_all(example.read_text()) if body["kind"] == KIND]
    if not bodies:
        pytest.skip("has no SpecDecodeDeployment")
    (body,) = bodies
    name = body["metadata"]["name"]
    apply(kubectl, body)
    eventually(lambda: condition(kubectl, name, "Ready")[1] in SETTLED, f"{name} is launched")
    before = eventually(lambda: at_rest(kubectl, name), f"{name} is at rest")
    apply(kubectl, body)
    assert of_example(versions(kubectl), name) == before, "a second apply"
    # A label makes the operator look again: on a child, where there is one.
    touched = next((key for key in before if key[0] != KIND), (KIND, name))
    kubectl.must("label", *touched, "touched=1")
    settle(kubectl)
    after = of_example(versions(kubectl), name)
    assert {**after, touched: before[touched]} == before, "a second reconcile"
