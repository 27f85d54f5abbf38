"""What the operator stands on goes away for a while, and what engines stand on: all comes back to what it was."""

import json
import os
import signal
from collections.abc import Iterator, Sequence

import pytest

from devcluster.cluster.cluster import Cluster
from tests.component.operator.conftest import STORAGE_CLASS
from tests.component.operator.test_captures import capture
from tests.component.operator.test_lifecycle import apply, be_guarded, engines, report, serve
from tests.support.conditions import condition, current, wait_for, wait_for_all
from tests.support.faults.end_state import CHILD_KINDS, OURS
from tests.support.kubectl import Kubectl
from tests.support.kubernetes import MINOR
from tests.support.objects import H100
from tests.support.operator_process import OperatorProcess
from tests.support.played_node import bind
from tests.support.rest import Rest
from tests.support.waiting import eventually

RUNS = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}


@pytest.fixture(autouse=True)
def _serving(kubectl: Kubectl, operator: OperatorProcess) -> None:
    """Two engines of one object serve, and may be disrupted one at a time."""
    eventually(operator.health, "it works")
    apply(kubectl, replicas=2)
    serve(kubectl, 2)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    be_guarded(kubectl)


def children(kubectl: Kubectl) -> dict[str, str]:
    """The children by their UIDs: one that was made anew has another."""
    bodies = kubectl.objects(CHILD_KINDS, OURS)
    return {body["metadata"]["uid"]: f"{body['kind']} {body['metadata']['name']}" for body in bodies}


@pytest.mark.long
@pytest.mark.parametrize("killed", [["etcd"], ["kube-apiserver"], ["etcd", "kube-apiserver"]], ids="+".join)
def test_operator_survives_killed_control_plane_components(
    crds: Cluster, operator: OperatorProcess, kubectl: Kubectl, killed: Sequence[str]
) -> None:
    before, process = children(kubectl), operator.pid
    for component in killed:
        pid = crds.component_pid(component)
        assert pid
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not operator.health(), "it cannot renew its Lease, and says that it writes nothing")
    crds.up("none", MINOR)
    eventually(operator.health, "it goes on")
    apply(kubectl, replicas=3)
    serve(kubectl, 3)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    assert children(kubectl) == before
    assert operator.pid == process, "it is the same process"
    assert operator.ended() is None


def evict(kubectl: Kubectl, pod: str) -> str:
    """Ask for the end of a pod as `kubectl drain` does; return why it may not go, if it may not."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    path = f"/api/v1/namespaces/{kubectl.namespace}/pods/{pod}/eviction"
    return kubectl("create", f"--raw={path}", "--filename=-", stdin=json.dumps(body)).stderr


def test_evicted_engines_are_replaced_one_at_a_time(kubectl: Kubectl) -> None:
    before, (first, second) = children(kubectl), engines(kubectl, 2)
    eventually(lambda: not evict(kubectl, first), "its budget lets one go")
    eventually(lambda: first not in engines(kubectl, 2), "another takes its place")
    assert "disruption budget" in evict(kubectl, second)
    serve(kubectl, 2)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    # A node that runs out of something asks nobody.
    kubectl.patch_pod_status(second, {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory"})
    eventually(lambda: second not in engines(kubectl, 2), "another takes its place")
    serve(kubectl, 2)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    assert children(kubectl) == before


def test_out_of_memory_engine_is_reported_and_serves_again(kubectl: Kubectl) -> None:
    before, (first, _) = children(kubectl), engines(kubectl, 2)
    killed = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    waits = {"waiting": {"reason": "CrashLoopBackOff"}}
    report(kubectl, first, ready=False, state={"state": waits, "lastState": killed})
    body = wait_for_all(kubectl, "tiny", Ready=("False", "ReplicasLost"), Available=("True", "SomeEnginesServe"))
    # The watch of its Deployment may come before that of the pod, which has the reason.
    eventually(lambda: "exceeded its memory limit" in condition(kubectl, "tiny", "Ready")[2], "the message says why")
    assert current(body, "Stalled")[0] == "False"
    report(kubectl, first, ready=True, state={"state": RUNS, "lastState": killed})
    wait_for(kubectl, "tiny", "Ready", "Serving")
    assert children(kubectl) == before
    assert first in engines(kubectl, 2), "it is the same pod"


def test_engine_on_lost_node_is_reported_and_replaced(kubectl: Kubectl) -> None:
    """The controllers of nodes, which do not run here, say that its pods are not ready, and delete them in the end."""
    before, pods = children(kubectl), engines(kubectl, 2)
    eventually(lambda: not evict(kubectl, pods[0]), "its budget lets one go")
    (moved,) = eventually(lambda: {*engines(kubectl, 2)} - {*pods}, "another takes its place")
    bind(kubectl, moved, "lost")
    serve(kubectl, 2)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    report(kubectl, moved, ready=False, state={"state": RUNS})
    assert "1 of 2 engines ready" in wait_for(kubectl, "tiny", "Ready", "ReplicasLost")
    kubectl.must("delete", "pod", moved, "--wait=false")
    eventually(lambda: moved not in engines(kubectl, 2), "another takes its place")
    serve(kubectl, 2)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    assert children(kubectl) == before
    assert "deletionTimestamp" in kubectl.object("pod", moved)["metadata"], "no kubelet ends it"


@pytest.fixture
def room(kubectl: Kubectl) -> Iterator[None]:
    """A node that takes any pod whose volumes are there; it goes before other tests have pods of theirs."""
    kubectl.add_node("roomy", H100)
    room = {"cpu": "64", "memory": "1Ti", "pods": "100"}
    patch = json.dumps({"status": {"capacity": room, "allocatable": room}})
    kubectl.must("patch", "node", "roomy", "--subresource=status", "--type=merge", f"--patch={patch}")
    yield
    kubectl.must("delete", "node", "roomy")


@pytest.mark.usefixtures("room")
def test_capture_with_unbound_claim_reports_it_and_writes_nothing_more(kubectl: Kubectl, rest: Rest) -> None:
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "tiny-models"}}
    # Played engines answer nobody, which is told after half a minute: none is asked for here.
    apply(kubectl, suspend=True)
    wait_for(kubectl, "tiny", "Ready", "Suspended")
    never = {**STORAGE_CLASS, "metadata": {"name": "never"}, "volumeBindingMode": "Immediate"}
    assert kubectl.write(json.dumps(never)).returncode == 0
    size = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    assert kubectl.write(json.dumps({**claim, "spec": {**size, "storageClassName": "never"}})).returncode == 0
    capture(kubectl)
    wait_for(kubectl, "demo", "Ready", "WaitingForVolume", kind="sdc")
    # The scheduler may have heard of the pod before it heard of its claim.
    eventually(lambda: "unbound" in condition(kubectl, "demo", "Ready", kind="sdc")[2], "it says why")
    rest.reach()
    kubectl.must("label", "sdc", "demo", "touched=1")
    rest.settle()
    assert rest.changes() == []
