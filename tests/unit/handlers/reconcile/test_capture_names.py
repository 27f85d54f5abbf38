"""A capture before it starts: a Job of its name is left to who has it, and of one that goes then nothing is kept."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from specdecode_operator.api import deployment
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import KIND
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster, ConflictError
from specdecode_operator.cluster.manifests import child_labels
from specdecode_operator.cluster.resources import Resource
from specdecode_operator.deployment.desired_state import DesiredState
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment, parse_deployment
from specdecode_operator.handlers.decision_cache import DecisionCache
from specdecode_operator.handlers.metrics import OperatorMetrics
from specdecode_operator.handlers.reconcile_capture import CaptureReconciler
from specdecode_operator.handlers.settings import Settings
from tests.support.captures import KEY, capture, capture_spec, golden
from tests.support.decisions import desired_state
from tests.support.objects import parent, tiny_cpu
from tests.unit.handlers.reconcile.test_image_note import FakeCluster

THEIRS: Body = {"kind": "Job", "metadata": {"name": "demo-capture", "namespace": "default", "uid": "theirs"}}


class Taken(FakeCluster):
    """Somebody has a Job of the name, from a look on or from right after it."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.job = None if late else THEIRS
        self.written: list[str] = []

    async def get(self, resource: Resource, *_: Any, **__: bool) -> Body | None:
        return self.job if resource.kind == "Job" else None

    async def apply_new(self, body: Body) -> Body:
        if body["kind"] == "Job":
            self.job = THEIRS
            raise ConflictError("the object has been modified")
        return await self.apply(body)

    async def apply(self, body: Body) -> Body:
        self.written.append(body["kind"])
        return {**body, "metadata": {**body["metadata"], "uid": "new", "resourceVersion": "1"}}


class Unlabelled(FakeCluster):
    """Has a Job of the capture, of which no watch tells."""

    def __init__(self, job: Body) -> None:
        super().__init__()
        self.job = job
        self.changes: list[Body] = []
        self.asked: list[str] = []

    async def get(self, resource: Resource, *_: Any, **__: bool) -> Body | None:
        self.asked.append(resource.kind)
        return self.job if resource.kind == "Job" else None

    async def merge(self, body: Body, change: Body) -> Body:
        assert body["metadata"]["uid"] == self.job["metadata"]["uid"]
        self.changes.append(change)
        return {**body, "metadata": {**body["metadata"], **change["metadata"], "resourceVersion": "2"}}


def to_start(status: Body | None = None, **spec: Any) -> Cache:
    """Return a cache with a capture that nothing but a name keeps from its start."""
    cache, body = Cache(), parent(tiny_cpu())
    cache.put_parent(deployment.KIND, {**body, "metadata": {**body["metadata"], "resourceVersion": "1"}})
    engine = {"namespace": "default", "name": "e", "uid": "e", "resourceVersion": "1"}
    labels = {"specdecode.io/deployment": "llama"}
    cache.put("Pod", {"metadata": {**engine, "labels": labels}, "status": {"phase": "Running"}})
    cache.put_parent(KIND, capture(capture_spec(arms=[{"name": "a"}, {"name": "b"}], **spec), status=status))
    return cache


class Deployments:
    """Decides on CPU, and notes which caches it is given for arms."""

    def __init__(self) -> None:
        self.given: weakref.WeakSet[DecisionCache] = weakref.WeakSet()

    def desired_state_of(self, body: Body) -> tuple[ParsedDeployment, DesiredState]:
        owner = parse_deployment(body)
        return owner, desired_state(owner, ())

    def decider_of_arms(self, namespace: str) -> Callable[[Body, DecisionCache], DesiredState]:
        assert namespace == "default"

        def decide(body: Body, decisions: DecisionCache) -> DesiredState:
            self.given.add(decisions)
            return self.desired_state_of(body)[1]

        return decide


@pytest.mark.parametrize(("late", "written"), [(False, []), (True, ["PersistentVolumeClaim"])])
def test_a_strangers_job_is_left_alone_and_before_it_nothing_is_written(late: bool, written: list[str]) -> None:
    cluster = Taken(late=late)
    reconciler = CaptureReconciler(
        cast("Cluster", cluster),
        to_start(),
        Deployments(),
        OperatorMetrics(Cache()),
        Settings(operator_image="operator:1"),
    )
    asyncio.run(reconciler.reconcile(KEY))
    (ready,) = (each for each in cluster.status["conditions"] if each["type"] == "Ready")
    assert (ready["reason"], cluster.written) == ("ChildNameConflict", written)


@pytest.mark.parametrize("spec", [{}, {"deploymentDuringCapture": "Suspend"}])
def test_a_job_of_its_own_whose_labels_were_taken_off_gets_them_back_and_runs_on(spec: Body) -> None:
    owner = {"apiVersion": "specdecode.io/v1alpha1", "kind": KIND, "name": "demo", "uid": "capture-uid"}
    own = {**THEIRS, "metadata": {**THEIRS["metadata"], "ownerReferences": [owner]}, "spec": {"suspend": False}}
    cluster = Unlabelled(own)
    status = (
        {"job": "demo-capture", "borrow": {"since": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"}}
        if spec
        else {"job": "demo-capture"}
    )
    cache = to_start(status=status, **spec)
    reconciler = CaptureReconciler(cast("Cluster", cluster), cache, Deployments(), OperatorMetrics(Cache()), Settings())
    asyncio.run(reconciler.reconcile(KEY))
    (change,) = cluster.changes
    assert change == {"metadata": {"labels": child_labels(KEY)}}
    (ready,) = (each for each in cluster.status["conditions"] if each["type"] == "Ready")
    assert ready["reason"] == "WaitingForPod"
    assert not cluster.applied


def test_a_strangers_job_that_a_status_names_gets_no_labels() -> None:
    cluster = Unlabelled(THEIRS)
    cache = to_start(status={"job": "demo-capture"})
    reconciler = CaptureReconciler(
        cast("Cluster", cluster), cache, Deployments(), OperatorMetrics(Cache()), Settings(operator_image="operator:1")
    )
    asyncio.run(reconciler.reconcile(KEY))
    assert "Job" in cluster.asked
    assert (cluster.changes, cluster.applied) == ([], 0)


def test_the_job_of_a_capture_that_ended_is_not_asked_for() -> None:
    cluster, cache, done = Unlabelled(THEIRS), to_start(), golden(job="golden-capture")
    cache.put_parent(KIND, done)
    reconciler = CaptureReconciler(
        cast("Cluster", cluster), cache, Deployments(), OperatorMetrics(Cache()), Settings(operator_image="operator:1")
    )
    asyncio.run(reconciler.reconcile(Key("default", "golden", KIND)))
    assert cluster.asked == []


def test_of_a_capture_that_went_before_it_started_no_decisions_are_kept() -> None:
    cluster, cache, deployments = cast("Cluster", Taken(late=False)), to_start(), Deployments()
    reconciler = CaptureReconciler(
        cluster, cache, deployments, OperatorMetrics(Cache()), Settings(operator_image="operator:1")
    )
    asyncio.run(reconciler.reconcile(KEY))
    gc.collect()
    assert len(deployments.given) == 2, "one for each arm"
    cache.drop_parent(KIND, capture())
    asyncio.run(reconciler.reconcile(KEY))
    gc.collect()
    assert not deployments.given
