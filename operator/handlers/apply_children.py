"""Apply, scale and delete the children of an object; back off when another writer contests a repair.

`Inventory` finds the children by the operator's label and the owner's UID, and never takes over an object of
another owner. `Repairs` repairs drift at once, and backs off if the same field changes again after each repair.
"""

import time
from collections import defaultdict
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from specdecode_operator.api import base
from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.attestation.attest import Seen, attestation_name, attested
from specdecode_operator.attestation.keys import SigningKey
from specdecode_operator.cluster.cache import Cache, is_model_facts, slim
from specdecode_operator.cluster.client import (
    Cluster,
    ClusterError,
    ConflictError,
    ForbiddenError,
    InvalidObjectError,
    RefusedForNowError,
)
from specdecode_operator.cluster.clock import ServerTime
from specdecode_operator.cluster.drift import (
    Identity,
    changed_fields,
    content_digest,
    foreign_managers,
    identity,
    is_owned,
    is_same_wish,
    needs_apply,
    without_kept_fields,
)
from specdecode_operator.cluster.resources import (
    CHILDREN,
    CONFIG_MAP,
    LEADER_WORKER_SET,
    POD,
    Resource,
    written_resource,
)
from specdecode_operator.deployment.child_changes import (
    objects_to_apply,
    objects_to_delete,
    resting,
    workloads_to_scale,
)
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.desired_state import DesiredState, Outcome
from specdecode_operator.deployment.models.model_facts import CONFIG_MAP_NAME, facts_config_map
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment
from specdecode_operator.deployment.rollout.blocked_pods import rejections
from specdecode_operator.deployment.rollout.engine_workload import WORKLOAD_KINDS
from specdecode_operator.deployment.rollout.readiness import Readiness, readiness_of, stalled, working
from specdecode_operator.deployment.rollout.rollout_progress import NO_GROUP_HISTORY, GroupHistory, current_pods
from specdecode_operator.deployment.tamper_check import child_entry, children_proofs

_AT_ONCE: Final = 3
"""Repairs without a wait: hands that try something out."""

_CONTESTED: Final = 5
_REMEMBERED_S: Final = 1800.0
_LONGEST_WAIT_S: Final = 300.0


@dataclass
class _Repaired:
    times_s: list[float] = field(default_factory=list)
    what: str = ""


class Repairs:
    """The repairs of the children of one object, by UID, with the times on a monotonic clock."""

    def __init__(self) -> None:
        self._repaired: defaultdict[str, _Repaired] = defaultdict(_Repaired)
        self._untold: list[str] = []

    def may_repair(self, uid: str, now_s: float) -> bool:
        """Whether an object may be repaired now: after the first times ever more slowly."""
        times_s = self._recent(uid, now_s)
        if len(times_s) < _AT_ONCE:
            return True
        return now_s - times_s[-1] >= min(2.0 ** len(times_s), _LONGEST_WAIT_S)

    def record(self, uid: str, what: str, now_s: float) -> None:
        """Remember a repair; ``what`` names object, fields and who wrote them."""
        for each in [uid for uid in self._repaired if not self._recent(uid, now_s)]:
            del self._repaired[each]
        repaired = self._repaired[uid]
        repaired.times_s, repaired.what = [*self._recent(uid, now_s), now_s], what
        self._untold.append(what)

    def untold(self) -> list[str]:
        """Return the repairs since the last call of this."""
        told, self._untold = self._untold, []
        return told

    def contested(self, now_s: float) -> list[str]:
        """Return what somebody writes again after each repair."""
        return [
            repaired.what for uid, repaired in self._repaired.items() if len(self._recent(uid, now_s)) >= _CONTESTED
        ]

    def forget(self, uid: str) -> None:
        """Drop what is remembered of an object that is gone."""
        self._repaired.pop(uid, None)

    def _recent(self, uid: str, now_s: float) -> list[float]:
        repaired = self._repaired.get(uid)
        return [] if repaired is None else [each for each in repaired.times_s if now_s - each < _REMEMBERED_S]


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


class ModelFactsFullError(BlockedError):
    """The ConfigMap with facts of models takes no more."""

    def __init__(self, namespace: str) -> None:
        message = (
            f"ConfigMap {CONFIG_MAP_NAME} in namespace {namespace} takes no more (1 MiB): delete entries of models"
            " that are no longer served, or all of it; what is needed is read again"
        )
        super().__init__(Blocked("ModelFactsFull", message, permanent=True))


@dataclass(frozen=True)
class _InLine:
    """For what there was nothing to write at the last look, and nothing to wait for."""

    outcome: Outcome
    """Of one decision: what is desired is what it was."""

    kept_managers: frozenset[str]
    workload: Identity | None
    """Which one is to run the engines: the decision has it packed."""

    children: Sequence[Body]
    """All that carry the object's label, pods too."""


class Launcher:
    """Applies, scales and deletes the children of SpecDecodeDeployments."""

    def __init__(
        self, cluster: Cluster, cache: Cache, clock: ServerTime, signing_key: SigningKey | None = None
    ) -> None:
        self._clock = clock
        self._signing_key = signing_key
        self._cluster = cluster
        self._cache = cache
        self._inventory = Inventory(cluster, cache, CHILDREN)
        self._in_line: dict[Key, _InLine] = {}

    def owned(self, parent: ParsedDeployment) -> dict[Identity, Body]:
        """Children of this very object, by kind and name."""
        return self._inventory.owned(parent.key, parent.uid)

    async def carry_out(
        self, parent: ParsedDeployment, desired: DesiredState, groups: GroupHistory = NO_GROUP_HISTORY
    ) -> None:
        """Apply what is missing or drifted; remove what is no longer wanted.

        ``groups`` is what was seen of engines on several nodes.

        Raises
        ------
        ChildNameTakenError
            Before anything was written, unless a name was taken in that very moment.
        ClusterError
            When the API server refuses or cannot be reached.
        """
        self._inventory.believe(parent.key, children_proofs(parent.status.kept))
        if self.is_in_line(parent, desired):
            return
        before, decided = self._cache.all_children(parent.key), desired.outcome
        owned = self.owned(parent)
        desired = self._attested(parent, desired, owned)
        (live, _), pods = self.workloads(parent, desired), self._cache.children_of(parent.key, POD.kind)
        desired = resting(desired, live, current_pods(pods, live), groups, self._clock.now().timestamp())
        children = objects_to_apply(desired, owned.values(), parent.kept_managers)
        is_all = await self._inventory.apply(parent.key, parent.uid, children, parent.kept_managers)
        for workload, replicas in workloads_to_scale(parent, desired, owned.values()):
            await self._scale(workload, replicas)
        # What was just applied counts: engines of the other kind end when those of the new template serve.
        (successor, _), pods = self.workloads(parent, desired), self._cache.children_of(parent.key, POD.kind)
        unwanted = objects_to_delete(desired, owned.values(), successor, pods)
        for child in unwanted:
            await self._inventory.delete(parent.key, child)
        is_group = desired.workload is not None and desired.workload["kind"] == LEADER_WORKER_SET.kind
        waits = not is_all or unwanted or self._signing_key is not None or is_group or rejections(pods)
        # What has changed meanwhile would be out of line at the next look: to keep it would only take memory.
        if not waits and before == self._cache.all_children(parent.key):
            wanted = self._wanted(parent, desired)
            self._in_line[parent.key] = _InLine(decided, parent.kept_managers, wanted, before)
        else:
            self._in_line.pop(parent.key, None)

    def is_in_line(self, parent: ParsedDeployment, desired: DesiredState) -> bool:
        """Whether there was nothing to write for an object, and all that this depends on is as it was."""
        last = self._in_line.get(parent.key)
        if last is None or last.outcome is not desired.outcome or last.kept_managers != parent.kept_managers:
            return False
        return last.children == self._cache.all_children(parent.key)

    def _attested(
        self, parent: ParsedDeployment, desired: DesiredState, owned: Mapping[Identity, Body]
    ) -> DesiredState:
        """Return the desired state with what is attested of it, where there is a key to sign with."""
        if self._signing_key is None:
            return desired
        kept = (owned.get((CONFIG_MAP.kind, attestation_name(parent.key))) or {}).get("data") or {}
        pods, captures = self._cache.children_of(parent.key, POD.kind), self._cache.captures_of(parent.key)
        return attested(parent, desired, Seen(kept, pods, captures), self._signing_key, self._clock.now())

    def workloads(self, parent: ParsedDeployment, desired: DesiredState | None) -> tuple[Body | None, Body | None]:
        """Return the live workload that is desired, and one of the other kind that ran the engines before it.

        With none desired it is the one of before.
        """
        wanted = None if desired is None else self._wanted(parent, desired)
        live = {key: child for key, child in self.owned(parent).items() if key[0] in WORKLOAD_KINDS}
        if wanted is None:
            return next(iter(live.values()), None), None
        return live.pop(wanted, None), next(iter(live.values()), None)

    def _wanted(self, parent: ParsedDeployment, desired: DesiredState) -> Identity | None:
        """Return which workload is desired."""
        last = self._in_line.get(parent.key)
        if last is not None and last.outcome is desired.outcome:
            return last.workload
        return None if desired.workload is None else identity(desired.workload)

    async def keep(self, parent: ParsedDeployment, child: Body) -> None:
        """Apply one child that is no part of the desired state.

        Raises
        ------
        ChildNameTakenError
            Before anything was written, unless a name was taken in that very moment.
        ClusterError
            When the API server refuses or cannot be reached.
        """
        await self._inventory.apply(parent.key, parent.uid, [child], parent.kept_managers)

    def proofs(self, parent: ParsedDeployment) -> dict[str, str]:
        """Return the digests of the children as they were left, as the status holds them."""
        return {child_entry(child): digest for child, digest in self._inventory.proofs(parent.key, parent.uid).items()}

    def repairs(self, parent: ParsedDeployment) -> Repairs:
        """Return what was repaired of the children of an object."""
        return self._inventory.repairs(parent.key)

    async def keep_model_facts(self, namespace: str, entries: Mapping[str, str]) -> None:
        """Add what was read of models to what the objects of a namespace share.

        Raises
        ------
        ChildNameTakenError
            When a ConfigMap that is not ours has its name.
        ModelFactsFullError
            When it would be too large.
        ClusterError
            When the API server refuses or cannot be reached.
        """
        live = await self._cluster.get(CONFIG_MAP, namespace, CONFIG_MAP_NAME)
        if live is not None and not is_model_facts(CONFIG_MAP.kind, live):
            raise ChildNameTakenError(CONFIG_MAP.kind, CONFIG_MAP_NAME, leaving=False)
        body = facts_config_map(namespace, entries)
        try:
            answer = await (self._cluster.create(body) if live is None else self._cluster.merge(live, body))
        except InvalidObjectError as error:
            raise ModelFactsFullError(namespace) from error
        self._cache.put(CONFIG_MAP.kind, answer)

    async def _scale(self, workload: Body, replicas: int) -> None:
        """Set how many engines are started, and leave all else as it is."""
        if workload["spec"].get("replicas", 1) != replicas:
            answer = await self._cluster.merge(workload, {"spec": {"replicas": replicas}})
            self._cache.put(workload["kind"], answer)

    def forget(self, key: Key) -> None:
        """Drop what is remembered of the children of an object that is gone."""
        self._inventory.forget(key)
        self._in_line.pop(key, None)
