"""Reconcile captures: names that are taken, image notes, dry runs, quotas and which engines serve."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from random import Random
from typing import Any

import pytest

from specdecode_operator.api import deployment
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import KIND
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import (
    ClusterError,
    ConflictError,
    ForbiddenError,
    RefusedForNowError,
    UntriableError,
)
from specdecode_operator.cluster.clock import ServerTime
from specdecode_operator.cluster.manifests import child_labels
from specdecode_operator.cluster.resources import CAPTURE_LABEL, CONFIG_MAP, DEPLOYMENT_LABEL, POD, Resource
from specdecode_operator.deployment.desired_state import DesiredState
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment, parse_deployment
from specdecode_operator.handlers.decision_cache import DecisionCache
from specdecode_operator.handlers.metrics import OperatorMetrics
from specdecode_operator.handlers.reconcile_capture import (
    CaptureReconciler,
    has_room_without,
    quantity,
    quota_usage,
)
from specdecode_operator.handlers.reconcile_job import Servings, Shared
from specdecode_operator.handlers.settings import Settings
from tests.support.captures import (
    JOB_UID,
    KEY,
    capture,
    capture_pod,
    capture_spec,
    golden,
    job,
    live_spec,
    running,
    serving,
)
from tests.support.decisions import desired_state
from tests.support.objects import parent, tiny_cpu

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

    def post_event(self, *_: Any) -> None:
        pass


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


def reconciler(cluster: Any, cache: Cache, deployments: Any = None) -> CaptureReconciler:
    """Return a reconciler that writes into a made-up cluster."""
    settings = Settings(operator_image="operator:1")
    metrics = OperatorMetrics(Cache())
    return CaptureReconciler(Shared(cluster, cache, deployments, metrics, settings, Servings(cache)))


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
    looked_at = reconciler(cluster, cache)
    for _ in range(times):
        asyncio.run(looked_at.reconcile(KEY))
    assert cluster.status["phase"] == "Loading"


def test_capture_continues_if_the_image_note_cannot_be_written(cluster: FakeCluster) -> None:
    cluster.refuses = ForbiddenError("exceeded quota: count/configmaps")
    reconcile(cluster)
    assert cluster.config_map is None


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
    """Decides on CPU."""

    def desired_state_of(self, body: Body) -> tuple[ParsedDeployment, DesiredState]:
        owner = parse_deployment(body)
        return owner, desired_state(owner, ())

    def in_force(self, body: Body) -> Body:
        return body

    def decider_of_arms(self, namespace: str) -> Callable[[Body, DecisionCache], DesiredState]:
        assert namespace == "default"
        return lambda body, _: self.desired_state_of(body)[1]


@pytest.mark.parametrize(("late", "written"), [(False, []), (True, ["PersistentVolumeClaim"])])
def test_job_of_other_owner_is_not_changed_and_reported_as_conflict(late: bool, written: list[str]) -> None:
    cluster = Taken(late=late)
    asyncio.run(reconciler(cluster, to_start(), Deployments()).reconcile(KEY))
    (ready,) = (each for each in cluster.status["conditions"] if each["type"] == "Ready")
    assert (ready["reason"], cluster.written) == ("ChildNameConflict", written)


@pytest.mark.parametrize("spec", [{}, {"deploymentDuringCapture": "Suspend"}])
def test_own_job_with_removed_labels_gets_them_back(spec: Body) -> None:
    owner = {"apiVersion": "specdecode.io/v1alpha1", "kind": KIND, "name": "demo", "uid": "capture-uid"}
    own = {**THEIRS, "metadata": {**THEIRS["metadata"], "ownerReferences": [owner]}, "spec": {"suspend": False}}
    cluster = Unlabelled(own)
    status = (
        {"job": "demo-capture", "borrow": {"since": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"}}
        if spec
        else {"job": "demo-capture"}
    )
    cache = to_start(status=status, **spec)
    asyncio.run(reconciler(cluster, cache, Deployments()).reconcile(KEY))
    (change,) = cluster.changes
    assert change == {"metadata": {"labels": child_labels(KEY)}}
    (ready,) = (each for each in cluster.status["conditions"] if each["type"] == "Ready")
    assert ready["reason"] == "WaitingForPod"
    assert not cluster.applied


class Orders(FakeCluster):
    """Has one ConfigMap of a name, and records writes and deletions."""

    def __init__(self, order: Body | None = None) -> None:
        super().__init__()
        self.order = order
        self.written: list[Body] = []
        self.deleted: list[str] = []

    async def get(self, resource: Resource, _namespace: str, name: str, **__: bool) -> Body | None:
        return self.order if resource == CONFIG_MAP and name == ORDER else None

    async def apply(self, body: Body) -> Body:
        self.written.append(body)
        return {**body, "metadata": {**body["metadata"], "uid": f"{body['kind']}-uid", "resourceVersion": "1"}}

    async def delete(self, body: Body) -> bool:
        self.deleted.append(body["metadata"]["name"])
        return True

    async def apply_status(self, _resource: Any, body: Body) -> Body:
        self.status = body["status"]
        return {**capture(live_spec()), "status": self.status}


class AnswersLost(Orders):
    """Answers no creation of a Job."""

    async def apply(self, body: Body) -> Body:
        answer = await super().apply(body)
        if body["kind"] == "Job":
            raise RefusedForNowError("no answer")
        return answer


ORDER = "llama-live-order"


def order_of(owner: Body | None) -> Body:
    """The order ConfigMap of a capture, or of somebody else."""
    metadata = {"namespace": "default", "name": ORDER, "uid": "order-uid", "resourceVersion": "1"}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**metadata, "labels": LABELS, "ownerReferences": [owner] if owner else []},
        "data": {"order.json": "{}"},
    }


def live_cache(*captures: Body, **status: Any) -> Cache:
    """A cache with a deployment that serves, and live captures of it."""
    cache, body = Cache(), parent(tiny_cpu())
    cache.put_parent(deployment.KIND, {**body, "metadata": {**body["metadata"], "resourceVersion": "1"}})
    for pod in serving().pods:
        labels = {**pod["metadata"]["labels"], "app.kubernetes.io/managed-by": "specdecode-operator"}
        metadata = {"uid": pod["metadata"]["name"], "resourceVersion": "1", "labels": labels}
        cache.put("Pod", {**pod, "metadata": {**pod["metadata"], **metadata}})
    for each in captures or (capture(live_spec(), status=status),):
        cache.put_parent(KIND, each)
    return cache


def recording(cluster: Orders, **pod: Any) -> Cache:
    """A cache with a live capture whose collector runs; the Job is the one that the reconciler created."""
    cache = live_cache()
    asyncio.run(reconciler(cluster, cache, Deployments()).reconcile(KEY))
    (created,) = (each for each in cluster.written if each["kind"] == "Job")
    cache.put("Job", {**created, "metadata": {**created["metadata"], "uid": JOB_UID, "resourceVersion": "2"}})
    status = {"podIP": "10.1.2.3", "containerStatuses": [running("collect")], **pod}
    cache.put("Pod", labelled(capture_pod(**status), "pod-uid"))
    cluster.written.clear()
    return cache


def ready_of(cluster: FakeCluster) -> tuple[str, str]:
    (ready,) = (each for each in cluster.status["conditions"] if each["type"] == "Ready")
    return ready["reason"], ready["message"]


class TestLiveOrder:
    def test_order_is_written_once_the_collector_runs(self) -> None:
        cluster = Orders()
        cache = recording(cluster)
        asyncio.run(reconciler(cluster, cache, Deployments()).reconcile(KEY))
        (order,) = cluster.written
        assert order["metadata"]["name"] == ORDER
        (job,) = cache.children_of(KEY, "Job")
        (container,) = job["spec"]["template"]["spec"]["containers"]
        token = json.loads(order["data"]["order.json"])["token"]
        assert re.fullmatch("[0-9a-f]{64}", token)
        assert any(token in each.get("value", "") for each in container["env"])
        assert ready_of(cluster)[0] == "Recording"

    def test_each_job_has_its_own_token_that_a_retry_keeps(self) -> None:
        jobs = []
        for _ in range(2):
            cluster = AnswersLost()
            looked_at = reconciler(cluster, live_cache(), Deployments())
            for _ in range(2):
                asyncio.run(looked_at.reconcile(KEY))
            first, again = (each["spec"] for each in cluster.written if each["kind"] == "Job")
            assert first == again
            jobs.append(first)
        assert jobs[0] != jobs[1]

    @pytest.mark.parametrize(
        "pod",
        [{"containerStatuses": [{"name": "collect", "state": {"terminated": {"exitCode": 0}}}]}, {"podIP": None}],
    )
    def test_order_without_collector_is_deleted(self, pod: Body) -> None:
        cluster = Orders()
        cache = recording(cluster, **pod)
        cache.put("ConfigMap", order_of(OWNER))
        asyncio.run(reconciler(cluster, cache, Deployments()).reconcile(KEY))
        assert cluster.deleted == [ORDER]
        assert cluster.written == []

    def test_order_of_ended_capture_is_deleted(self) -> None:
        cluster = Orders()
        cache = live_cache(golden("demo", of=live_spec(), claim="demo-capture"))
        cache.put("ConfigMap", order_of({**OWNER, "uid": "demo-uid"}))
        asyncio.run(reconciler(cluster, cache, Deployments()).reconcile(KEY))
        assert cluster.deleted == [ORDER]

    @pytest.mark.parametrize(
        ("owner", "reason"),
        [
            (None, "ChildNameConflict"),
            ({"kind": "Deployment", "name": "web", "uid": "theirs"}, "ChildNameConflict"),
            ({"kind": KIND, "name": "earlier", "uid": "theirs"}, "WaitingForCleanup"),
        ],
    )
    def test_existing_order_of_other_owner_blocks_the_capture(self, owner: Body | None, reason: str) -> None:
        cluster = Orders(order_of(owner))
        asyncio.run(reconciler(cluster, live_cache(), Deployments()).reconcile(KEY))
        assert cluster.written == []
        assert ready_of(cluster)[0] == reason
        assert ORDER in ready_of(cluster)[1]

    def test_order_created_meanwhile_by_other_owner_is_not_changed(self) -> None:
        cluster = Orders()
        cache = recording(cluster)
        cluster.order = order_of({"kind": KIND, "name": "other", "uid": "theirs"})
        asyncio.run(reconciler(cluster, cache, Deployments()).reconcile(KEY))
        assert cluster.written == []
        assert ready_of(cluster)[0] == "WaitingForCleanup"

    def test_younger_live_capture_waits_until_the_older_one_ends(self) -> None:
        cluster = Orders()
        older = capture(live_spec(), name="older", uid="older-uid", creationTimestamp="2026-01-01T00:00:00Z")
        own = capture(live_spec(), creationTimestamp="2026-01-01T00:01:00Z")
        looked_at = reconciler(cluster, cache := live_cache(older, own), Deployments())
        asyncio.run(looked_at.reconcile(KEY))
        assert cluster.written == []
        reason, message = ready_of(cluster)
        assert reason == "WaitingForDeployment"
        assert "older" in message
        ended = golden("older", of=live_spec())
        cache.put_parent(KIND, {**ended, "metadata": {**older["metadata"], "resourceVersion": "2"}})
        asyncio.run(looked_at.reconcile(KEY))
        assert [each["kind"] for each in cluster.written] == ["PersistentVolumeClaim", "Job"]


QUOTA = "exceeded quota: small, requested: pods=1, used: pods={}, limited: pods=2"


class Asked(FakeCluster):
    """Answers a dry run with an error, and lists no StorageClasses if it may not."""

    def __init__(self, answer: Exception | None, *, may_list: bool = True) -> None:
        super().__init__()
        self.answer, self.may_list = answer, may_list
        self.tried: list[Body] = []
        self.written: list[str] = []

    async def try_create(self, resource: Resource, body: Body) -> None:
        assert resource == POD
        self.tried.append(body)
        if self.answer is not None:
            raise self.answer

    async def list(self, *_: Any) -> tuple[list[Body], int]:
        if not self.may_list:
            raise ForbiddenError("the operator may not list storageclasses.storage.k8s.io")
        marked = {"annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}
        return [{"metadata": {"name": "fast", **marked}, "volumeBindingMode": "WaitForFirstConsumer"}], 1

    async def get(self, *_: Any, **__: bool) -> Body | None:
        return None

    async def apply_new(self, body: Body) -> Body:
        self.written.append(body["kind"])
        return {**body, "metadata": {**body["metadata"], "uid": "new", "resourceVersion": "1"}}


def looked(cluster: Asked) -> Body:
    """The conditions of a capture after one look."""
    cache = to_start(deploymentDuringCapture="Suspend")
    cache.put("Deployment", engines())
    asyncio.run(reconciler(cluster, cache, Deployments()).reconcile(KEY))
    return {each["type"]: each for each in cluster.status["conditions"]}


def engines() -> Body:
    """The Deployment of one engine."""
    labels = {"specdecode.io/deployment": "llama", "app.kubernetes.io/managed-by": "specdecode-operator"}
    metadata = {"namespace": "default", "name": "llama", "uid": "e", "resourceVersion": "1", "labels": labels}
    template = {"spec": {"containers": [{"name": "engine"}]}}
    return {"metadata": metadata, "spec": {"replicas": 1, "template": template}, "status": {"replicas": 1}}


@pytest.mark.parametrize(
    "answer",
    [
        None,
        ForbiddenError("the operator may not create pods"),
        UntriableError('admission webhook "w" does not support dry run'),
        RefusedForNowError(QUOTA.format(2)),
        RefusedForNowError("status unknown for quota: small, resources: pods"),
    ],
    ids=str,
)
@pytest.mark.parametrize("may_list", [True, False])
def test_unknown_dry_run_results_and_freed_quota_do_not_refuse(answer: ClusterError | None, *, may_list: bool) -> None:
    cluster = Asked(answer, may_list=may_list)
    assert looked(cluster)["Accepted"]["status"] == "True"
    assert cluster.written == ["PersistentVolumeClaim", "Job"]


RUNNING, ENDED = {"phase": "Running"}, {"phase": "Failed"}


def body(name: str, version: int, labels: dict[str, str] | None = None, **parts: Any) -> Body:
    metadata = {"namespace": "default", "name": name, "uid": name, "resourceVersion": str(version)}
    return {"metadata": metadata | {"labels": labels or {}}, **parts}


def made_anew(body: Body, times: int) -> Body:
    """Return an object as the one after so many of its name."""
    return {**body, "metadata": {**body["metadata"], "uid": f"{body['metadata']['name']}-{times}"}}


class World:
    """A cache in which objects come, change and go."""

    def __init__(self) -> None:
        self.cache = Cache()
        self._version = 0
        self._gone: Counter[str] = Counter()

    def step(self, draw: Random) -> None:
        """Do one thing at random."""
        self._version += 1
        name, other = (f"{draw.choice('abc')}" for _ in range(2))
        labels = draw.choice([{DEPLOYMENT_LABEL: name}, {CAPTURE_LABEL: f"capture-{name}"}])
        pod = body(f"pod-{name}-{other}", self._version, labels, status=draw.choice([RUNNING, ENDED]))
        lends = body(f"capture-{name}", self._version, spec={"deployment": other, "suspend": draw.random() < 0.5})
        serves = body(name, self._version, spec={"replicas": draw.randrange(3)})
        goes = draw.random() < 0.3
        put, drop = self.cache.put_parent, self.cache.drop_parent
        kind, seen = draw.choice([(POD.kind, pod), (KIND, lends), (deployment.KIND, serves)])
        seen = made_anew(seen, self._gone[seen["metadata"]["name"]])
        if kind == POD.kind:
            put, drop = self.cache.put, self.cache.drop  # type: ignore[assignment]
        (drop if goes else put)(kind, seen)
        self._gone[seen["metadata"]["name"]] += goes


@pytest.mark.parametrize("seed", range(5))
def test_incremental_servings_equal_a_full_recalculation(seed: int) -> None:
    draw, world = Random(seed), World()
    servings = Servings(world.cache)
    for _ in range(300):
        world.step(draw)
        note = world.cache.on_change
        anew = Servings(world.cache).now()
        world.cache.on_change = note
        assert sorted(servings.now(), key=lambda each: each.key) == sorted(anew, key=lambda each: each.key)


REFUSAL = 'pods "demo-x" is forbidden: exceeded quota: gpus, requested: {}, used: {}, limited: {}'
GPUS = "requests.nvidia.com/gpu"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("250m", Decimal("0.25")),
        ("1Gi", 2**30),
        ("1.5k", 1500),
        ("2e3", 2000),
        (3, 3),
        ("1X", None),
        ("", None),
        ("9" * 5000, None),
        ("1..2", None),
        (None, None),
    ],
)
def test_quantity_parses_kubernetes_quantities(text: object, value: object) -> None:
    assert quantity(text) == value


def test_quota_usage_of_a_pod() -> None:
    engine = {"resources": {"limits": {"nvidia.com/gpu": "2", "memory": "8Gi"}, "requests": {"memory": "4Gi"}}}
    beside = {"resources": {"requests": {"memory": "1Gi"}}}
    found = quota_usage({"containers": [engine, beside]})
    assert found[GPUS] == 2
    assert (found["requests.memory"], found["limits.memory"]) == (5 * 2**30, 8 * 2**30)
    assert found["memory"] == found["requests.memory"]
    assert found["pods"] == found["count/pods"] == 1


@pytest.mark.parametrize(
    ("requested", "used", "limited", "room"),
    [
        (f"{GPUS}=4", f"{GPUS}=8", f"{GPUS}=8", True),
        (f"{GPUS}=5", f"{GPUS}=8", f"{GPUS}=8", False),
        (f"{GPUS}=4,pods=1", f"{GPUS}=8,pods=10", f"{GPUS}=8,pods=10", True),
        (f"{GPUS}=4,pods=1", f"{GPUS}=8,pods=11", f"{GPUS}=8,pods=10", True),
        (f"{GPUS}=4,pods=1", f"{GPUS}=8,pods=12", f"{GPUS}=8,pods=10", False),
        ("requests.memory=1Gi", "requests.memory=9Gi", "requests.memory=9Gi", False),
        (f"{GPUS}=4", f"{GPUS}=8", "", None),
        (f"{GPUS}=many", f"{GPUS}=8", f"{GPUS}=8", None),
    ],
)
def test_quota_room_without_the_engines(requested: str, used: str, limited: str, room: bool | None) -> None:
    freed = {GPUS: Decimal(4), "pods": Decimal(2)}
    assert has_room_without(REFUSAL.format(requested, used, limited), freed) is room


def test_other_refusal_messages_give_no_quota_room() -> None:
    assert has_room_without("namespace team is being terminated", {}) is None
