"""What is remembered of children that were applied."""

import time
import tracemalloc
from collections import deque
from itertools import count
from typing import Any, cast

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster import cache as shared_texts
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster, ConflictError
from specdecode_operator.cluster.manifests import owned
from specdecode_operator.cluster.resources import SERVICE
from specdecode_operator.handlers.apply_children import ChildNameTakenError, Children

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


async def test_a_child_that_turns_out_to_be_gone_is_deleted_once() -> None:
    """It went between two lists of a start, of which no watch tells: its deletion was asked for every 15 s."""
    inventory = Children(cast("Cluster", cluster := FakeCluster()), Cache(), KEY, "uid-1", [SERVICE])
    child: Any = owned({"kind": "Service", "metadata": {"name": "llama"}, "spec": {}}, KEY, "uid-1")
    await inventory.apply([child])
    await inventory.delete(inventory.owned()["Service", "llama"])
    assert inventory.owned(), "it may take its time to go"
    cluster.has_deleted = False
    await inventory.delete(inventory.owned()["Service", "llama"])
    assert not inventory.owned()


async def test_of_children_that_were_deleted_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object lives for years; a Job of it, for each model that is read, for minutes."""
    monkeypatch.setattr(shared_texts, "_MOST_BYTES", 0)  # their UIDs are known for a while, up to a bound
    inventory = Children(cast("Cluster", FakeCluster()), cache := Cache(), KEY, "uid-1", [SERVICE])
    child: Any = owned({"kind": "Service", "metadata": {"name": "llama"}, "spec": {}}, KEY, "uid-1")

    async def live() -> None:
        await inventory.apply([child])
        await inventory.delete(cache.children_of(KEY, "Service")[0])

    await live()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(500):
            await live()
        grown_bytes = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown_bytes < 500 * 50, "a digest is a hundred bytes"


async def test_what_was_applied_counts_and_not_what_the_status_of_before_says_of_it() -> None:
    """A look may begin with an object as it was before the last write of its status."""
    inventory = Children(cast("Cluster", FakeCluster()), Cache(), KEY, "uid-1", [SERVICE])
    child: Any = owned({"kind": "Service", "metadata": {"name": "llama"}, "spec": {}}, KEY, "uid-1")
    inventory.believe({("Service", "llama"): "of an earlier operator"})
    await inventory.apply([child])
    applied = inventory.digests()
    inventory.believe({("Service", "llama"): "of before"})
    assert inventory.digests() == applied
    assert "of" not in str(applied)


async def test_another_object_that_took_the_name_meanwhile_is_not_taken_for_the_child_that_drifted() -> None:
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


async def test_a_name_that_is_taken_after_it_was_looked_at_is_left_to_who_has_it() -> None:
    """By server-side apply with force, what a stranger made in between was taken over."""
    inventory = Children(cast("Cluster", cluster := FakeCluster()), Cache(), KEY, "uid-1", [SERVICE])
    cluster.live = service("uid-2", of="strangers")
    with pytest.raises(ChildNameTakenError, match="Service llama exists and does not belong to this object"):
        await inventory.apply([service("uid-1")])
    assert not cluster.named


async def test_a_child_of_which_no_watch_has_told_yet_is_applied() -> None:
    """An earlier try made it, and its answer was lost."""
    inventory = Children(cast("Cluster", cluster := FakeCluster()), Cache(), KEY, "uid-1", [SERVICE])
    cluster.live = made(service("uid-1"), "the child's")
    assert await inventory.apply([service("uid-1")])
    assert list(cluster.named) == ["the child's"], "this very object, and none that takes its name now"


async def test_a_name_that_is_free_again_is_not_told_as_taken() -> None:
    """What the API server has in memory may be late."""
    inventory = Children(cast("Cluster", cluster := FakeCluster()), Cache(), KEY, "uid-1", [SERVICE])
    cluster.old = service("uid-2", of="strangers")
    assert await inventory.apply([service("uid-1")])
    assert list(cluster.named) == [None]


async def test_what_has_the_name_of_a_child_that_is_still_in_memory_is_not_taken_over() -> None:
    """The child was deleted, and a stranger's object made in its place, before memory had either."""
    inventory = Children(cast("Cluster", cluster := FakeCluster()), Cache(), KEY, "uid-1", [SERVICE])
    cluster.old = made(service("uid-1"), "the child's")
    cluster.live = made(service("uid-2", of="strangers"), "strangers'")
    with pytest.raises(ChildNameTakenError):
        await inventory.apply([service("uid-1")])
    assert not cluster.named


async def test_a_child_whose_name_somebody_took_unseen_is_not_applied_by_name() -> None:
    """Any change of the spec brings an apply; by name it would be written into the stranger's object."""
    inventory = Children(cast("Cluster", cluster := FakeCluster()), cache := Cache(), KEY, "uid-1", [SERVICE])
    await inventory.apply([service("uid-1")])
    cluster.live = made(service("uid-2", of="strangers"), "strangers'")
    cluster.named.clear()
    with pytest.raises(ChildNameTakenError):
        await inventory.apply([service("uid-1", port=81)])
    assert not cluster.named
    assert not cache.children_of(KEY, "Service"), "it is gone"


async def test_a_refusal_of_another_kind_is_no_reason_to_apply_by_name() -> None:
    """A quota that is being counted is told as a conflict, too."""
    inventory = Children(cast("Cluster", cluster := FakeCluster()), Cache(), KEY, "uid-1", [SERVICE])
    cluster.is_counting = True
    with pytest.raises(ConflictError):
        await inventory.apply([service("uid-1")])
    assert not cluster.named


async def test_a_child_whose_change_is_refused_for_now_is_not_taken_for_gone() -> None:
    inventory = Children(cast("Cluster", cluster := FakeCluster()), cache := Cache(), KEY, "uid-1", [SERVICE])
    await inventory.apply([service("uid-1")])
    (cluster.live,) = cache.children_of(KEY, "Service")
    cluster.is_counting = True
    with pytest.raises(ConflictError):
        await inventory.apply([service("uid-1", port=81)])
    assert cache.children_of(KEY, "Service")


async def test_the_look_for_a_free_name_does_not_ask_etcd() -> None:
    inventory = Children(cast("Cluster", cluster := FakeCluster()), Cache(), KEY, "uid-1", [SERVICE])
    await inventory.apply([service("uid-1")])
    assert list(cluster.may_be_old) == [True]


async def test_of_a_child_that_was_deleted_no_contest_is_told() -> None:
    inventory = Children(cast("Cluster", FakeCluster()), cache := Cache(), KEY, "uid-1", [SERVICE])
    await inventory.apply([service("uid-1")])
    (child,) = cache.children_of(KEY, "Service")
    repairs, now_s = inventory.repairs, time.monotonic()
    for _ in range(5):
        repairs.record(child["metadata"]["uid"], "Service llama", now_s)
    assert repairs.contested(now_s)
    await inventory.delete({**child, "kind": "Service"})
    assert not repairs.contested(now_s)
