"""Apply, scale and delete children, and report what blocks a write."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from itertools import count, zip_longest
from typing import Any, cast

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import (
    Cluster,
    ClusterError,
    ConflictError,
    ForbiddenError,
    InvalidObjectError,
    NotFoundError,
    RefusedForNowError,
)
from specdecode_operator.cluster.clock import ServerTime
from specdecode_operator.cluster.manifests import owned
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.cluster.resources import CHILDREN, SERVICE
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.models.model_facts import facts_config_map
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.rollout.blocked_pods import POD_REJECTED
from specdecode_operator.deployment.rollout.rollout_progress import NO_GROUP_HISTORY, GroupHistory
from specdecode_operator.handlers.apply_children import (
    BlockedError,
    ChildNameTakenError,
    Children,
    EngineChildren,
    SharedConfigMaps,
    what_blocks,
)
from tests.support.decisions import desired_state
from tests.support.model_caches import cached
from tests.support.objects import parent
from tests.unit.deployment.group_pods import WIDE, spec_at
from tests.unit.deployment.test_groups import FOUR_H100

KEY = Key("team", "llama")


class FakeCluster:
    """Gives a new UID to each object that is made."""

    def __init__(self) -> None:
        self._numbers = count()
        self.has_deleted = True
        self.live: Body | None = None
        self.old: Body | None = None
        """What the API server has in memory, which may be late."""
        self.may_be_old: deque[bool] = deque(maxlen=4)
        """Whether that would do, of each look."""
        self.is_counting = False
        self.named: deque[str | None] = deque(maxlen=4)
        """UIDs that were applied, None where an object was made."""
        self.taken_over: list[str] = []

    async def take_over_fields(self, body: Body, _: Any) -> None:
        self.taken_over.append(body["metadata"]["uid"])

    async def get(self, *_: Any, may_be_old: bool = False) -> Body | None:
        self.may_be_old.append(may_be_old)
        return self.old if may_be_old else self.live

    async def apply_new(self, body: Body) -> Body:
        if self.live is not None or self.is_counting:
            raise ConflictError("the object has been modified")
        return await self.apply(body)

    async def apply(self, body: Body) -> Body:
        uid = body["metadata"].get("uid")
        if self.is_counting:
            raise ConflictError("the quota is being counted")
        if self.live is not None and uid not in (None, self.live["metadata"]["uid"]):
            raise ConflictError("the UID is another")
        self.named.append(uid)
        return {**body, "metadata": {**body["metadata"], "uid": f"{next(self._numbers):036}", "resourceVersion": "1"}}

    async def delete(self, _: Body) -> bool:
        return self.has_deleted


async def test_missing_child_is_forgotten_after_a_delete() -> None:
    """It went between two lists of a start, of which no watch tells: its deletion was asked for every 15 s."""
    inventory = Children(cast("Cluster", cluster := FakeCluster()), Cache(), KEY, "uid-1", [SERVICE])
    child: Any = owned({"kind": "Service", "metadata": {"name": "llama"}, "spec": {}}, KEY, "uid-1")
    await inventory.apply([child])
    await inventory.delete(inventory.owned()["Service", "llama"])
    assert inventory.owned(), "it may take its time to go"
    cluster.has_deleted = False
    await inventory.delete(inventory.owned()["Service", "llama"])
    assert not inventory.owned()


async def test_drift_repair_requires_the_uid_of_the_drifted_child() -> None:
    inventory = Children(cast("Cluster", cluster := FakeCluster()), cache := Cache(), KEY, "uid-1", [SERVICE])
    child: Any = owned({"kind": "Service", "metadata": {"name": "llama"}, "spec": {}}, KEY, "uid-1")
    await inventory.apply([child])
    (ours,) = cache.children_of(KEY, "Service")
    theirs = [{"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:spec": {"f:sessionAffinity": {}}}}]
    drifted = {**ours, "spec": {"sessionAffinity": "ClientIP"}, "kind": "Service"}
    drifted["metadata"] = {**ours["metadata"], "resourceVersion": "2", "managedFields": theirs}
    cache.put("Service", drifted)
    cluster.live = {**drifted, "metadata": {**drifted["metadata"], "uid": "another"}}
    await inventory.apply([child])
    assert cluster.taken_over == [ours["metadata"]["uid"]]


def made(body: Any, uid: str) -> Any:
    """Return an object as the API server has it."""
    return {**body, "metadata": {**body["metadata"], "uid": uid, "resourceVersion": "3"}}


def service(owner_uid: str, of: str = KEY.name, port: int = 80) -> Any:
    """Return a Service of the child's name."""
    body: Any = {"kind": "Service", "metadata": {"name": "llama"}, "spec": {"ports": [{"port": port}]}}
    return owned(body, Key("team", of), owner_uid)


async def test_object_created_after_the_name_check_is_not_taken_over() -> None:
    """By server-side apply with force, what a stranger made in between was taken over."""
    inventory = Children(cast("Cluster", cluster := FakeCluster()), Cache(), KEY, "uid-1", [SERVICE])
    cluster.live = service("uid-2", of="strangers")
    with pytest.raises(ChildNameTakenError, match="Service llama exists and does not belong to this object"):
        await inventory.apply([service("uid-1")])
    assert not cluster.named


async def test_existing_child_missing_from_the_cache_is_applied() -> None:
    """An earlier try made it, and its answer was lost."""
    inventory = Children(cast("Cluster", cluster := FakeCluster()), Cache(), KEY, "uid-1", [SERVICE])
    cluster.live = made(service("uid-1"), "the child's")
    assert await inventory.apply([service("uid-1")])
    assert list(cluster.named) == ["the child's"], "this very object, and none that takes its name now"


async def test_stale_read_does_not_report_a_free_name_as_taken() -> None:
    """What the API server has in memory may be late."""
    inventory = Children(cast("Cluster", cluster := FakeCluster()), Cache(), KEY, "uid-1", [SERVICE])
    cluster.old = service("uid-2", of="strangers")
    assert await inventory.apply([service("uid-1")])
    assert list(cluster.named) == [None]


async def test_stale_read_of_deleted_child_does_not_take_over_its_successor() -> None:
    """The child was deleted, and a stranger's object made in its place, before memory had either."""
    inventory = Children(cast("Cluster", cluster := FakeCluster()), Cache(), KEY, "uid-1", [SERVICE])
    cluster.old = made(service("uid-1"), "the child's")
    cluster.live = made(service("uid-2", of="strangers"), "strangers'")
    with pytest.raises(ChildNameTakenError):
        await inventory.apply([service("uid-1")])
    assert not cluster.named


async def test_child_replaced_by_other_owner_is_not_applied_by_name() -> None:
    """Any change of the spec brings an apply; by name it would be written into the stranger's object."""
    inventory = Children(cast("Cluster", cluster := FakeCluster()), cache := Cache(), KEY, "uid-1", [SERVICE])
    await inventory.apply([service("uid-1")])
    cluster.live = made(service("uid-2", of="strangers"), "strangers'")
    cluster.named.clear()
    with pytest.raises(ChildNameTakenError):
        await inventory.apply([service("uid-1", port=81)])
    assert not cluster.named
    assert not cache.children_of(KEY, "Service"), "it is gone"


async def test_conflict_from_quota_counting_does_not_lead_to_apply_by_name() -> None:
    """A quota that is being counted is told as a conflict, too."""
    inventory = Children(cast("Cluster", cluster := FakeCluster()), Cache(), KEY, "uid-1", [SERVICE])
    cluster.is_counting = True
    with pytest.raises(ConflictError):
        await inventory.apply([service("uid-1")])
    assert not cluster.named


async def test_conflict_on_update_does_not_drop_the_child_from_the_cache() -> None:
    inventory = Children(cast("Cluster", cluster := FakeCluster()), cache := Cache(), KEY, "uid-1", [SERVICE])
    await inventory.apply([service("uid-1")])
    (cluster.live,) = cache.children_of(KEY, "Service")
    cluster.is_counting = True
    with pytest.raises(ConflictError):
        await inventory.apply([service("uid-1", port=81)])
    assert cache.children_of(KEY, "Service")


OWNER = (Key("default", "llama"), "uid-1")


class StoringCluster:
    """Stores what is written; one version and one UID for each object."""

    clock = ServerTime()

    def __init__(self) -> None:
        self.stored: dict[tuple[str, str], Body] = {}
        self.merges = 0

    async def get(self, resource: Any, _namespace: str, name: str, **_: bool) -> Body | None:
        return self.stored.get((resource.kind, name))

    async def apply_new(self, body: Body) -> Body:
        return await self.apply(body)

    async def apply(self, body: Body) -> Body:
        return self._store(body)

    async def merge(self, body: Body, change: Body) -> Body:
        self.merges += 1
        return self._store({**body, "spec": {**body["spec"], **change["spec"]}})

    async def delete(self, body: Body) -> bool:
        return self.stored.pop((body["kind"], body["metadata"]["name"]), None) is not None

    def jobs(self) -> int:
        """How many Jobs there are."""
        return sum(kind == "Job" for kind, _ in self.stored)

    def engines(self) -> dict[str, int]:
        """How many engines each kind starts."""
        kinds = {"Deployment", "LeaderWorkerSet"}
        return {kind: body["spec"]["replicas"] for (kind, _), body in self.stored.items() if kind in kinds}

    def _store(self, body: Body) -> Body:
        name = f"{body['kind']}/{body['metadata']['name']}"
        metadata = {**body["metadata"], "uid": name, "resourceVersion": "1"}
        self.stored[body["kind"], body["metadata"]["name"]] = {**body, "metadata": metadata}
        return {**body, "metadata": metadata}


@pytest.fixture
def cluster() -> StoringCluster:
    return StoringCluster()


def launch(cluster: StoringCluster, *specs: Body, nodes: Sequence[tuple[NodeFacts, ...]] = ()) -> None:
    """Launch one spec after the other, each on its nodes."""
    cache = Cache()
    launcher = EngineChildren(SharedConfigMaps(cast("Cluster", cluster), cache, "default"), *OWNER)
    for spec, present in zip_longest(specs, nodes, fillvalue=FOUR_H100):
        owner = parse_deployment(parent(cast("Body", spec)))
        asyncio.run(
            launcher.carry_out(
                owner, desired_state(owner, cast("tuple[NodeFacts, ...]", present), has_leader_worker_sets=True)
            )
        )
        for resource in CHILDREN:
            live = [body for (kind, _), body in cluster.stored.items() if kind == resource.kind]
            cache.retain(resource.kind, [body["metadata"]["uid"] for body in live], 1)


ONE_NODE = spec_at({"tensor": 4}, replicas=1)


@pytest.mark.parametrize(("changes", "engines"), [({"replicas": 3}, 3), ({"suspend": True}, 0), ({"replicas": 0}, 0)])
def test_paused_rollout_still_follows_replicas_and_suspend(
    cluster: StoringCluster, changes: Body, engines: int
) -> None:
    launch(cluster, ONE_NODE, spec_at(WIDE, rollout={"paused": True}, **changes))
    assert cluster.engines() == {"Deployment": engines}


def test_workload_kind_changes_after_the_pause(cluster: StoringCluster) -> None:
    launch(cluster, ONE_NODE, spec_at(WIDE, rollout={"paused": True}), spec_at(WIDE))
    assert cluster.engines() == {"LeaderWorkerSet": 1}


def test_rejected_groups_are_stopped_and_restarted_without_plan_change(
    cluster: StoringCluster,
) -> None:
    owner, asked = parse_deployment(parent(spec_at(WIDE))), []
    desired = desired_state(owner, FOUR_H100, has_leader_worker_sets=True)
    launcher = EngineChildren(SharedConfigMaps(cast("Cluster", cluster), Cache(), "default"), *OWNER)
    crashed = frozenset(("0", "0", str(number)) for number in range(3))
    refused = GroupHistory(crashed=crashed, blocked=Blocked(POD_REJECTED, "no"), rejected_s=time.time())
    for groups in (NO_GROUP_HISTORY, NO_GROUP_HISTORY, NO_GROUP_HISTORY, refused, NO_GROUP_HISTORY):
        asyncio.run(launcher.carry_out(owner, desired, groups))
        asked.append(cluster.engines())
    assert [each["LeaderWorkerSet"] for each in asked] == [1, 1, 1, 0, 1]


DOWNLOADED = cached(parallelism={"tensor": 4})


def test_download_continues_without_matching_nodes(cluster: StoringCluster) -> None:
    """An autoscaler takes idle nodes away, and engines come only after the download."""
    launch(cluster, DOWNLOADED, DOWNLOADED, nodes=[FOUR_H100, ()])
    assert cluster.jobs() == 2


class Facts:
    """Has the ConfigMap of what was read of models, or none, and notes how it is written."""

    def __init__(self, there: Body | None) -> None:
        self.there = there
        self.written: list[tuple[str, str | None]] = []

    async def get(self, *_: Any, **__: bool) -> Body | None:
        return self.there

    async def create(self, body: Body) -> Body:
        self.written.append(("create", None))
        return {**body, "metadata": {**body["metadata"], "uid": "new", "resourceVersion": "1"}}

    async def merge(self, body: Body, patch: Body) -> Body:
        self.written.append(("merge", body["metadata"]["uid"]))
        return {**body, **patch, "metadata": {**body["metadata"], **patch["metadata"], "resourceVersion": "2"}}


@pytest.mark.parametrize("is_known", [False, True])
def test_model_facts_are_merged_into_the_seen_config_map_or_a_new_one(is_known: bool) -> None:
    ours = facts_config_map("default", {"a": "{}"})
    ours["metadata"] |= {"uid": "seen", "resourceVersion": "1"}
    for there, written in ((None, ("create", None)), (ours, ("merge", "seen"))):
        cache, cluster = Cache(), Facts(there)
        if is_known:  # by a watch that is late
            cache.put("ConfigMap", {**ours, "metadata": {**ours["metadata"], "uid": "of before"}})
        asyncio.run(SharedConfigMaps(cast("Cluster", cluster), cache, "default").add_model_facts({"b": "{}"}))
        assert cluster.written == [written]


def test_config_map_of_other_owner_is_not_written_despite_a_stale_cache() -> None:
    ours = facts_config_map("default", {"a": "{}"})
    ours["metadata"] |= {"uid": "of before", "resourceVersion": "1"}
    cache, cluster = Cache(), Facts({"metadata": {**ours["metadata"], "uid": "theirs", "labels": {}}})
    cache.put("ConfigMap", ours)
    with pytest.raises(ChildNameTakenError):
        asyncio.run(SharedConfigMaps(cast("Cluster", cluster), cache, "default").add_model_facts({"b": "{}"}))
    assert not cluster.written


WAITS, STOPS = ("Unknown", True, False), ("False", False, True)


async def fail(error: Exception | None) -> None:
    if error is not None:
        raise error


@pytest.mark.parametrize("status_is_current", [False, True])
@pytest.mark.parametrize(
    ("error", "reason", "outcome"),
    [
        (ForbiddenError("may not"), "Forbidden", WAITS),
        (RefusedForNowError("quota"), "RefusedForNow", WAITS),
        (InvalidObjectError("wrong"), "ChildRefused", STOPS),
        (BlockedError(Blocked("ModelFactsFull", "full", permanent=True)), "ModelFactsFull", STOPS),
        (ChildNameTakenError("Service", "llama", leaving=True), "WaitingForCleanup", WAITS),
        (ChildNameTakenError("Service", "llama", leaving=False), "ChildNameConflict", STOPS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_errors_about_the_object_are_reported_each_time(
    error: Exception, reason: str, outcome: tuple[str, bool, bool], *, status_is_current: bool
) -> None:
    found = await what_blocks(fail(error), hint="; see podTemplate", status_is_current=status_is_current)
    assert found is not None
    assert (found.reason, (found.status, found.reconciling, found.stalled)) == (reason, outcome)
    assert found.message == str(error) + ("; see podTemplate" if reason == "ChildRefused" else "")


@pytest.mark.parametrize("kind", [ClusterError, ConflictError, NotFoundError])
async def test_api_server_errors_are_reported_once_per_spec(kind: type[ClusterError]) -> None:
    found = await what_blocks(fail(kind("etcd is slow")), status_is_current=False)
    assert found is not None
    assert (found.reason, found.message, found.reconciling) == ("ApiServerError", "etcd is slow", True)
    with pytest.raises(kind):
        await what_blocks(fail(kind("etcd is slow")), status_is_current=True)
