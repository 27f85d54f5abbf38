"""A capture that keeps its deployment's engines leaves the line for engines, as the reconcile carries it out."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specdecode_operator.api import deployment
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import KIND
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.handlers.metrics import OperatorMetrics
from specdecode_operator.handlers.reconcile_capture import CaptureReconciler
from specdecode_operator.handlers.settings import Settings
from tests.support.captures import JOB_UID, KEY, capture, capture_pod, job
from tests.support.decisions import desired_state
from tests.support.objects import parent, tiny_cpu
from tests.unit.capture.test_gpu_sharing import borrowing
from tests.unit.handlers.reconcile.test_image_note import OWNER, FakeCluster, labelled

UNPLACED: Body = {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "message": "full"}]}


class Jobs(FakeCluster):
    """Notes what is written into the Job."""

    def __init__(self) -> None:
        super().__init__()
        self.suspended: list[bool] = []

    async def merge(self, body: Body, change: Body) -> Body:
        self.suspended.append(change["spec"]["suspend"])
        return {**body, "spec": {**body["spec"], **change["spec"]}}


@pytest.fixture
def cluster() -> Jobs:
    return Jobs()


def reconcile(cluster: Jobs, pod: Body, *, lent: bool, placed: bool = True, suspended: bool = False) -> str:
    """Look at a capture beside a deployment with one engine; return the reason of its state."""
    cache = Cache()
    body = parent(tiny_cpu())
    cache.put_parent(deployment.KIND, {**body, "metadata": {**body["metadata"], "resourceVersion": "1"}})
    engine = {"metadata": {"namespace": "default", "name": "e", "uid": "e", "resourceVersion": "1"}}
    engine["metadata"]["labels"] = {"specdecode.io/deployment": "llama"}
    if placed:
        cache.put("Pod", {**engine, "status": {"phase": "Running"}})
    cache.put_parent(KIND, capture())
    if lent:
        other = borrowing()
        cache.put_parent(KIND, {**other, "metadata": {**other["metadata"], "name": "other", "uid": "other"}})
    cache.put("Job", labelled(job(suspend=suspended), JOB_UID, ownerReferences=[OWNER]))
    cache.put("Pod", labelled(pod, "pod-uid"))
    owner = parse_deployment(body)
    states = SimpleNamespace(desired_state_of=lambda _: (owner, desired_state(owner, ())))
    reconciler = CaptureReconciler(
        cast("Cluster", cluster),
        cache,
        cast("Any", states),
        OperatorMetrics(Cache()),
        Settings(operator_image="operator:1"),
    )
    asyncio.run(reconciler.reconcile(KEY))
    (ready,) = (each for each in cluster.status["conditions"] if each["type"] == "Ready")
    return str(ready["reason"])


def test_in_line_it_is_withdrawn_while_engines_are_to_come_back(cluster: Jobs) -> None:
    assert reconcile(cluster, capture_pod(**UNPLACED), lent=False) == "WaitingForGPUs"
    assert cluster.suspended == []
    assert reconcile(cluster, capture_pod(**UNPLACED), lent=True, placed=False) == "WaitingForDeployment"
    assert reconcile(cluster, capture_pod(**UNPLACED), lent=False, placed=False) == "WaitingForDeployment"
    assert cluster.suspended == [True, True]


def test_withdrawn_it_starts_when_all_have_their_place_and_not_before(cluster: Jobs) -> None:
    """Also where an earlier attempt failed, whose pod stays."""
    for pod in (capture_pod(phase="Failed"), capture_pod(**UNPLACED)):
        assert reconcile(cluster, pod, lent=False, placed=False, suspended=True) == "WaitingForDeployment"
    assert cluster.suspended == []
    assert reconcile(cluster, capture_pod(phase="Failed"), lent=False, suspended=True) == "Starting"
    assert cluster.suspended == [False]


def test_with_its_place_it_goes_on(cluster: Jobs) -> None:
    assert reconcile(cluster, capture_pod(), lent=True, placed=False) == "Starting"
    assert cluster.suspended == []
