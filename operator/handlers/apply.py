"""The inventory of one object, which is what it owns in the cluster by our label and its UID, and how it is written.

Nothing is taken over that belongs to somebody else.
"""

import time
from collections import defaultdict
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from specdecode_operator.api import base
from specdecode_operator.api.base import Body
from specdecode_operator.api.key import Key
from specdecode_operator.cluster.cache import Cache, slim
from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.errors import (
    ClusterError,
    ConflictError,
    ForbiddenError,
    InvalidObjectError,
    RefusedForNowError,
)
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.deployment.pods.readiness import Readiness, readiness_of, stalled, working
from specdecode_operator.kube.drift import (
    Identity,
    changed_fields,
    content_digest,
    identity,
    is_owned,
    is_same_wish,
    needs_apply,
)
from specdecode_operator.kube.field_managers import foreign_managers, without_kept_fields
from specdecode_operator.kube.repairs import Repairs
from specdecode_operator.kube.resources import Resource, written_resource


class BlockedError(Exception):
    """Something in the cluster keeps what is desired from being written."""

    def __init__(self, blocked: Blocked) -> None:
        super().__init__(blocked.message)
        self.blocked = blocked


class ChildNameTakenError(BlockedError):
    """An object that is not ours has the name of a child."""

    def __init__(self, kind: str, name: str, *, leaving: bool) -> None:
        if leaving:
            message = f"{kind} {name} of an earlier object of this name is still being removed"
        else:
            message = (
                f"{kind} {name} exists and does not belong to this object; it is left untouched:"
                " delete or rename it, or rename this object"
            )
        super().__init__(
            Blocked("WaitingForCleanup" if leaving else "ChildNameConflict", message, permanent=not leaving)
        )


@dataclass
class _Applied:
    """What the API server made of a child when it was applied last."""

    digest: str
    version: str = ""
    """The latest version that was seen to have it."""

    def needs_another(self, child: Body, live: Body) -> bool:
        """Whether applying the child again would change the live one."""
        version = live["metadata"]["resourceVersion"]
        if version == self.version:
            return not is_same_wish(child, live)
        if needs_apply(child, live, self.digest):
            return True
        self.version = version
        return False


class Inventory:
    """Children of the objects of one of our kinds, and how they are written."""

    def __init__(self, cluster: Cluster, cache: Cache, kinds: Sequence[Resource]) -> None:
        self._cluster = cluster
        self._cache = cache
        self._kinds = kinds
        self._applied: defaultdict[Key, dict[Identity, _Applied]] = defaultdict(dict)
        """What the API server made of the children when they were last applied."""
        self._repairs: defaultdict[Key, Repairs] = defaultdict(Repairs)

    def owned(self, key: Key, uid: str) -> dict[Identity, Body]:
        """Children of this very object, by kind and name."""
        return {
            (resource.kind, child["metadata"]["name"]): {**child, "kind": resource.kind}
            for resource in self._kinds
            for child in self._cache.children_of(key, resource.kind)
            if is_owned(child, uid)
        }

    def believe(self, key: Key, proofs: Mapping[Identity, str]) -> None:
        """Take over what an earlier operator knew of the children of an object: digests of them as it left them."""
        if key not in self._applied:
            self._applied[key] = {child: _Applied(digest) for child, digest in proofs.items()}

    def proofs(self, key: Key, uid: str) -> dict[Identity, str]:
        """Return the digests of the children as they were left, for the next operator."""
        applied = self._applied.get(key, {})
        return {child: applied[child].digest for child in self.owned(key, uid) if child in applied}

    async def check_names(self, key: Key, uid: str, missing: Iterable[Body]) -> dict[Identity, Body]:
        """Make sure that no child of which nothing is known has the name of something else; return those that exist.

        Raises
        ------
        ChildNameTakenError
            When one has.
        ClusterError
            When the API server refuses or cannot be reached.
        """
        there = {}
        for child in missing:
            is_there = await self._live(key, child, may_be_old=True) is not None
            if is_there and (live := await self._own(key, uid, child)):
                there[identity(child)] = live
        return there

    async def apply(self, key: Key, uid: str, children: Collection[Body], kept_managers: Collection[str] = ()) -> bool:
        """Apply children where they are missing or drifted, and remove what others added to them.

        ``kept_managers`` are the field managers whose fields stay. Returns whether all are as they should be now; of
        those that somebody writes again and again some are left for later.

        Raises
        ------
        ChildNameTakenError
            Before anything was written: nothing is half-created, unless a name was taken in that very moment.
        ClusterError
            When the API server refuses or cannot be reached.
        """
        owned = self.owned(key, uid)
        there = await self.check_names(key, uid, [child for child in children if identity(child) not in owned])
        done = []
        for child in children:
            if live := owned.get(identity(child)):
                done.append(await self._bring_in_line(key, uid, child, live, kept_managers))
            elif live := there.get(identity(child)):
                await self._apply_to(key, child, live, kept_managers)
            else:
                await self.create(key, uid, child, kept_managers)
        return all(done)

    async def create(self, key: Key, uid: str, child: Body, kept_managers: Collection[str] = ()) -> None:
        """Create a child whose name was free a moment ago.

        Raises
        ------
        ChildNameTakenError
            When something else has it now.
        ClusterError
            When the API server refuses or cannot be reached.
        """
        try:
            self._remember(key, child, await self._cluster.apply_new(child))
        except ConflictError:  # it may be ours: the answer to an earlier try was lost
            live = await self._own(key, uid, child)
            if live is None:
                raise
            await self._apply_to(key, child, live, kept_managers)

    async def _bring_in_line(
        self, key: Key, owner_uid: str, child: Body, live: Body, kept_managers: Collection[str]
    ) -> bool:
        uid, managers, now_s = live["metadata"]["uid"], foreign_managers(live, kept_managers), time.monotonic()
        applied = self._applied[key].get(identity(child))
        if not managers and applied is not None and not applied.needs_another(child, live):
            return True
        is_drift = is_same_wish(child, live)
        if is_drift and not self._repairs[key].may_repair(uid, now_s):
            return False
        if is_drift and (managers or applied):  # what nobody knows is applied once, and hardly any has changed
            live = await self._read_again(key, live)
            managers = foreign_managers(live, kept_managers)
        if managers:
            await self._cluster.take_over_fields(live, kept_managers)
        try:
            answer = await self._apply_to(key, child, live, kept_managers)
        except ConflictError:
            now = await self._live(key, child)
            if now is not None and now["metadata"]["uid"] == uid:
                raise
            self._cache.drop(child["kind"], live)  # it is gone, and no watch has told
            await self.create(key, owner_uid, child, kept_managers)
            return True
        if is_drift and (fields := changed_fields(live, answer)):
            by = f" (written by {', '.join(managers)})" if managers else ""
            self._repairs[key].record(uid, f"{child['kind']} {child['metadata']['name']}: {fields}{by}", now_s)
        return True

    async def _apply_to(self, key: Key, child: Body, live: Body, kept_managers: Collection[str]) -> Body:
        """Apply a child to this very object, but for fields of others that stay; return what came of it."""
        wanted = without_kept_fields(child, live, kept_managers)
        named = {**wanted, "metadata": {**wanted["metadata"], "uid": live["metadata"]["uid"]}}
        return self._remember(key, wanted, await self._cluster.apply(named))

    async def _read_again(self, key: Key, seen: Body) -> Body:
        """Return a child as it is now: what others wrote since it was seen is set back with the rest, and told too."""
        live = await self._live(key, seen)
        return seen if live is None or live["metadata"]["uid"] != seen["metadata"]["uid"] else slim(seen["kind"], live)

    def repairs(self, key: Key) -> Repairs:
        """Return what was repaired of the children of an object."""
        return self._repairs[key]

    async def delete(self, key: Key, child: Body) -> None:
        """Delete a child.

        Raises
        ------
        ClusterError
            When the API server refuses or cannot be reached.
        """
        if not await self._cluster.delete(child):  # it went in a moment of which no watch tells
            self._cache.drop(child["kind"], child)
        self._applied[key].pop(identity(child), None)
        self._repairs[key].forget(child["metadata"]["uid"])

    def forget(self, key: Key) -> None:
        """Drop what is remembered of the children of an object that is gone."""
        self._applied.pop(key, None)
        self._repairs.pop(key, None)

    def _remember(self, key: Key, child: Body, answer: Body) -> Body:
        """Keep what the API server made of a child that was applied, and return it."""
        # The live object comes from the cache, so what it is compared with must be as slim.
        slimmed = slim(child["kind"], answer)
        self._applied[key][identity(child)] = _Applied(
            content_digest(slimmed, child), answer["metadata"]["resourceVersion"]
        )
        self._cache.put(child["kind"], answer)
        return slimmed

    async def _own(self, key: Key, uid: str, child: Body) -> Body | None:
        """Return a child as it is now, if it is there; raise where something else has its name."""
        live = await self._live(key, child)
        if live is not None and not is_owned(live, uid):
            raise ChildNameTakenError(*identity(child), leaving=is_leaving(live, key))
        return live

    async def _live(self, key: Key, child: Body, *, may_be_old: bool = False) -> Body | None:
        kind, name = identity(child)
        return await self._cluster.get(written_resource(kind), key.namespace, name, may_be_old=may_be_old)


def is_leaving(live: Body, key: Key) -> bool:
    """Whether an object belonged to an earlier one of ours of this name, and goes with it."""
    return any(
        owner["kind"] == key.kind and owner["apiVersion"].startswith(f"{base.GROUP}/") and owner["name"] == key.name
        for owner in live["metadata"].get("ownerReferences") or []
    )


async def what_blocks(writing: Awaitable[None], *, hint: str = "", status_is_current: bool) -> Readiness | None:
    """Write to the cluster; return what blocks the object then, or None.

    Parameters
    ----------
    writing
        What is to be done.
    hint
        What helps where the API server refuses an object as it is.
    status_is_current
        Whether the status already speaks of the present spec: then what it says still holds.

    Raises
    ------
    ClusterError
        When the cluster fails and the status need not change: the queue tries again.
    """
    try:
        await writing
    except BlockedError as error:
        return readiness_of(error.blocked)
    except ForbiddenError as error:
        return working("Forbidden", str(error))
    except RefusedForNowError as error:
        return working("RefusedForNow", str(error))
    except InvalidObjectError as error:
        return stalled("ChildRefused", f"{error}{hint}")
    except ClusterError as error:
        if status_is_current:
            raise
        return working("ApiServerError", str(error))
    return None
