"""What image the engine of a capture runs is written for its load generator, unless something is in the way."""

import asyncio
from typing import Any, cast

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import KIND
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster, ForbiddenError
from specdecode_operator.cluster.clock import ServerTime
from specdecode_operator.handlers.metrics import OperatorMetrics
from specdecode_operator.handlers.reconcile_capture import CaptureReconciler
from specdecode_operator.handlers.settings import Settings
from tests.support.captures import JOB_UID, KEY, capture, capture_pod, job, running

LABELS = {"specdecode.io/capture": "demo"}
OWNER = {"kind": KIND, "name": "demo", "uid": "capture-uid"}


class FakeCluster:
    """Holds the ConfigMap of the capture's name, and the last status."""

    clock = ServerTime()

    def __init__(self) -> None:
        self.config_map: Body | None = None
        self.applied = 0
        self.refuses: Exception | None = None
        self.status: Body = {}

    async def get(self, *_: Any, **__: bool) -> Body | None:
        return self.config_map

    async def apply_new(self, body: Body) -> Body:
        return await self.apply(body)

    async def apply(self, body: Body) -> Body:
        if self.refuses:
            raise self.refuses
        self.applied += 1
        self.config_map = {**body, "metadata": {**body["metadata"], "uid": "note-uid", "resourceVersion": "1"}}
        return self.config_map

    async def apply_status(self, _resource: Any, body: Body) -> Body:
        self.status = body["status"]
        return {**capture(), "status": self.status}

    async def post_event(self, *_: Any) -> None:
        pass


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


def labelled(body: Body, uid: str, **metadata: Any) -> Body:
    known = {"labels": LABELS, "uid": uid, "resourceVersion": "1", **metadata}
    return {**body, "metadata": {**body["metadata"], **known}}


def reconcile(cluster: FakeCluster, *, times: int = 1) -> None:
    """Look at a capture whose load is under way."""
    cache = Cache()
    cache.put_parent(KIND, capture())
    cache.put("Job", labelled(job(), JOB_UID, ownerReferences=[OWNER]))
    engine = {**running("engine"), "imageID": "i@sha256:1"}
    pod = capture_pod(initContainerStatuses=[engine], containerStatuses=[running("load")])
    cache.put("Pod", labelled(pod, "pod-uid"))
    reconciler = CaptureReconciler(
        cast("Cluster", cluster),
        cache,
        cast("Any", None),
        OperatorMetrics(Cache()),
        Settings(operator_image="operator:1"),
    )
    for _ in range(times):
        asyncio.run(reconciler.reconcile(KEY))
    assert cluster.status["phase"] == "Loading"


def test_it_is_written_once(cluster: FakeCluster) -> None:
    reconcile(cluster, times=3)
    assert cluster.config_map is not None
    assert cluster.config_map["data"] == {"engine-image-id": "pod-uid i@sha256:1\n"}
    assert cluster.applied == 1


def test_a_strangers_config_map_is_left_alone(cluster: FakeCluster) -> None:
    cluster.config_map = {"kind": "ConfigMap", "metadata": {"name": "demo-capture", "uid": "theirs"}, "data": {"a": ""}}
    reconcile(cluster)
    assert cluster.config_map["data"] == {"a": ""}


def test_a_capture_goes_on_where_it_cannot_be_written(cluster: FakeCluster) -> None:
    cluster.refuses = ForbiddenError("exceeded quota: count/configmaps")
    reconcile(cluster)
    assert cluster.config_map is None
