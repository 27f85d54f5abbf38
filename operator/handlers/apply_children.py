"""Apply, scale and delete the children of an object; back off when another writer contests a repair.

`Children` finds the children by the operator's label and the owner's UID, and never takes over an object of another
owner. `SharedConfigMaps` does the same for the ConfigMaps that the objects of a namespace share. `Repairs` repairs
drift immediately, and backs off if the same field changes again after each repair.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Final

from specdecode_operator.api import base, capture, training
from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.cache import Cache, is_shared, slim
from specdecode_operator.cluster.client import (
    Cluster,
    ClusterError,
    ConflictError,
    ForbiddenError,
    InvalidObjectError,
    RefusedForNowError,
)
from specdecode_operator.cluster.drift import (
    Identity,
    changed_fields,
    content_digest,
    foreign_managers,
    identity,
    is_owned,
    is_same_wish,
    needs_apply,
    wish_of,
    without_kept_fields,
)
from specdecode_operator.cluster.manifests import with_new_hash
from specdecode_operator.cluster.resources import (
    BESIDE_ENGINES,
    CHILDREN,
    CONFIG_MAP,
    DEPLOYMENT,
    EXPOSING,
    HORIZONTAL_POD_AUTOSCALER,
    HTTP_ROUTE,
    INFERENCE_POOL,
    JOB,
    LEADER_WORKER_SET,
    PERSISTENT_VOLUME_CLAIM,
    POD,
    RECORDER_NAME,
    RESOURCE_CLAIM_TEMPLATE,
    SCALED_OBJECT,
    SERVICE,
    Resource,
    plan_name,
    written_resource,
)
from specdecode_operator.deployment.attestation.attest import Seen, attestation_name, attested
from specdecode_operator.deployment.autoscaler import KEDA_MISSING, wanted_autoscaler
from specdecode_operator.deployment.children import PLAN_ENTRY, wanted_replicas
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.configmap_digests import child_entry, children_proofs
from specdecode_operator.deployment.desired_state import DesiredState, Launch, NotLaunched, Outcome
from specdecode_operator.deployment.expose import KIND_MISSING, REFUSED_HINT, leads_to, wanted_kinds
from specdecode_operator.deployment.live_recorder import (
    DRAFT_ENTRY,
    recorder_config_map,
    recorder_digest,
    starts_recorder,
)
from specdecode_operator.deployment.models.model_facts import CONFIG_MAP_NAME, facts_config_map
from specdecode_operator.deployment.models.model_locations import (
    claim_fields,
    claim_not_shared,
    image_fields,
    image_volumes_missing,
)
from specdecode_operator.deployment.observed.observation import Observation, rollout_of
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment
from specdecode_operator.deployment.resource_claim import requested, template_name
from specdecode_operator.deployment.rollout.blocked_pods import backs_off, rejections, running_pods
from specdecode_operator.deployment.rollout.canary import is_canary
from specdecode_operator.deployment.rollout.engine_workload import (
    TEMPLATE_KINDS,
    WORKLOAD_KINDS,
    canary_name,
    engine_pods,
    pod_templates,
)
from specdecode_operator.deployment.rollout.readiness import Readiness, readiness_of, stalled, working
from specdecode_operator.deployment.rollout.rollout_progress import (
    NO_GROUP_HISTORY,
    GroupHistory,
    current_pods,
    serving_hash,
)
from specdecode_operator.enums import RolloutStrategy
from specdecode_operator.handlers.status_writer import Reporter
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.untrusted import mapping, objects, texts

if TYPE_CHECKING:
    # Importing cryptography takes 8 MB, and only signing needs it.
    from specdecode_operator.deployment.attestation.keys import SigningKey

_BESIDE_ENGINES: Final = tuple(each.kind for each in BESIDE_ENGINES)
_NOT_SERVED: Final = {**KIND_MISSING, SCALED_OBJECT.kind: KEDA_MISSING}
_REFUSED_HINTS: Final = {each.kind: REFUSED_HINT for each in EXPOSING}
_SURGE_STRATEGY: Final = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def objects_to_apply(desired: DesiredState, live: Collection[Body], kept_managers: Collection[str] = ()) -> list[Body]:
    """Return the children to apply; during a pause, without a workload that would replace one of another kind."""
    workload = desired.workload
    children = [child for child in desired.children if child is not workload]
    if workload is not None and _paused_workload(desired, live) is None:
        running = next((child for child in live if identity(child) == identity(workload)), None)
        children.append(_guarded(workload, running, kept_managers))
    # The Service first: of all names, a user's object most likely has its name, and then nothing else is created. The
    # plan last: engines take longer to start than this write, and their sidecars wait for its entries.
    return sorted(children, key=lambda child: (_has_plan(child), child["kind"] != SERVICE.kind))


def _has_plan(child: Body) -> bool:
    return PLAN_ENTRY in (child.get("data") or {})


def _guarded(workload: Body, live: Body | None, kept_managers: Collection[str]) -> Body:
    """Return a Deployment with a strategy that stops no serving engine, unless a rollout is in progress.

    Without this, a manual edit of the image would stop an engine immediately, and reverting it would cost another
    start. The rendered strategy applies while a template is rolled out, whether it was changed by the operator, by
    `kubectl rollout restart` or by a manager whose fields are kept.
    """
    if workload["kind"] != DEPLOYMENT.kind:
        return workload
    guarded = with_new_hash({**workload, "spec": {**workload["spec"], "strategy": _SURGE_STRATEGY}})
    if live is None:  # created with this strategy, so that no second write is needed after the first rollout
        return guarded
    if serving_hash(workload) != serving_hash(live):
        return workload
    status, is_guarded = live.get("status", {}), live["spec"].get("strategy") == _SURGE_STRATEGY
    is_settled = status.get("observedGeneration", 0) >= live["metadata"].get("generation", 0)
    if is_settled and not foreign_managers(live, kept_managers):
        is_guarded = status.get("replicas", 0) <= status.get("updatedReplicas", 0)
    return guarded if is_guarded else workload


def with_draft_order(key: Key, desired: DesiredState) -> DesiredState:
    """Return the desired state with the order to load another head in the ConfigMap with the plan."""
    if not desired.draft_order:
        return desired
    children = list(desired.children)
    for index, child in enumerate(children):
        if identity(child) == (CONFIG_MAP.kind, plan_name(key.name)):
            data = {**mapping(child, "data"), DRAFT_ENTRY: desired.draft_order}
            children[index] = with_new_hash({**child, "data": data})
    return replace(desired, children=children)


def resting(
    desired: DesiredState, live: Body | None, pods: list[Body], groups: GroupHistory, now_s: float
) -> DesiredState:
    """Return the desired state, scaled down to the running engines while a back-off after pod rejections lasts.

    ``live`` is the live workload of the wanted kind, ``pods`` are the pods of its template, ``now_s`` is Unix time.
    """
    workload = desired.workload
    if workload is None or live is None or serving_hash(workload) != serving_hash(live):
        return desired
    running = running_pods(pods)
    if workload["kind"] == DEPLOYMENT.kind:
        holds = backs_off(pods, now_s)
    else:
        # Scaling down keeps the groups with the lowest indexes, even if others serve: only do it if none does.
        holds = groups.rests(now_s) and not live.get("status", {}).get("readyReplicas")
        running = 0
    replicas = min(running, workload["spec"]["replicas"])
    if not holds or replicas == workload["spec"]["replicas"]:
        return desired
    held = with_new_hash({**workload, "spec": {**workload["spec"], "replicas": replicas}})
    return replace(desired, children=[held if child is workload else child for child in desired.children])


def workloads_to_scale(
    parent: ParsedDeployment, desired: DesiredState, live: Collection[Body]
) -> list[tuple[Body, int]]:
    """Return live workloads to scale without an apply, each with its number of replicas."""
    if desired.workload is not None and (paused := _paused_workload(desired, live)) is not None:
        return [(paused, desired.workload["spec"]["replicas"])]
    if isinstance(desired.outcome, NotLaunched) and parent.wants_no_engine:
        return [(child, 0) for child in live if child["kind"] in WORKLOAD_KINDS]
    return []


def objects_to_delete(
    desired: DesiredState, live: Iterable[Body], successor: Body | None, pods: list[Body]
) -> list[Body]:
    """Return the live children to delete; ``successor`` is the live workload of the wanted kind.

    Without a launch, the workload of an earlier spec stays with its objects. Only Jobs for models and a canary, which
    cannot be judged then, are deleted.
    """
    outcome = desired.outcome
    # A dependency is missing for now, such as nodes. Keep running downloads rather than restart them later.
    if isinstance(outcome, NotLaunched) and outcome.readiness.reconciling and not desired.children:
        return []
    wanted = {identity(child) for child in desired.children}
    # The object's Service always has the object's name and is garbage-collected with it. Never delete another one.
    # The others are deleted if the spec does not ask for them, with or without a launch.
    # ResourceClaimTemplates are deleted when no pod can refer to them (`EngineChildren`).
    kept = (SERVICE.kind, *_BESIDE_ENGINES, RESOURCE_CLAIM_TEMPLATE.kind)
    unwanted = [child for child in live if identity(child) not in wanted and child["kind"] not in kept]
    if isinstance(outcome, NotLaunched):
        return [child for child in unwanted if child["kind"] == JOB.kind or is_canary(child)]
    # With strategy Surge, delete a workload of the other kind when its successor serves; otherwise immediately.
    may_replace, strategy = not outcome.facts.spec.rollout.paused, outcome.facts.spec.rollout.strategy
    surges = strategy is not RolloutStrategy.REPLACE and wanted_replicas(outcome.facts) > 0
    if may_replace and surges:
        may_replace = rollout_of(outcome, Observation(successor, current_pods(pods, successor))).complete
    return [child for child in unwanted if child["kind"] not in WORKLOAD_KINDS or is_canary(child) or may_replace]


def _paused_workload(desired: DesiredState, live: Iterable[Body]) -> Body | None:
    outcome, workload = desired.outcome, desired.workload
    if not isinstance(outcome, Launch) or workload is None or not outcome.facts.spec.rollout.paused:
        return None
    running = {child["kind"]: child for child in live if child["kind"] in WORKLOAD_KINDS and not is_canary(child)}
    return None if workload["kind"] in running else next(iter(running.values()), None)


def _claims_of(workload: Body) -> set[str]:
    volumes = chain.from_iterable(objects(pod["spec"], "volumes") for pod in pod_templates(workload))
    return {str(mapping(each, "persistentVolumeClaim").get("claimName")) for each in volumes}


def _pod_on_image(children: Iterable[Body]) -> Body | None:
    """Return the first pod template of the children that has an image volume."""
    pods = chain.from_iterable(pod_templates(child) for child in children if child["kind"] in TEMPLATE_KINDS)
    return next((pod for pod in pods if any("image" in each for each in pod["spec"].get("volumes") or [])), None)


_AT_ONCE: Final = 3
"""Repairs without backoff, because a person may be trying something out."""

_CONTESTED: Final = 5
_REMEMBERED_S: Final = 1800.0
_LONGEST_WAIT_S: Final = 300.0


@dataclass
class _Repaired:
    times_s: list[float] = field(default_factory=list)
    what: str = ""

    def recent(self, now_s: float) -> list[float]:
        return [each for each in self.times_s if now_s - each < _REMEMBERED_S]


class Repairs:
    """Repairs of the children of one object, by UID; times are on a monotonic clock."""

    def __init__(self) -> None:
        self._repaired: defaultdict[str, _Repaired] = defaultdict(_Repaired)
        self._untold: list[str] = []

    def may_repair(self, uid: str, now_s: float) -> bool:
        """Return whether an object may be repaired now; after the first repairs, the backoff is exponential."""
        times_s = self._repaired[uid].recent(now_s) if uid in self._repaired else []
        return len(times_s) < _AT_ONCE or now_s - times_s[-1] >= min(2.0 ** len(times_s), _LONGEST_WAIT_S)

    def record(self, uid: str, what: str, now_s: float) -> None:
        """Record a repair; ``what`` names the object, the fields and their writer."""
        for old in [each for each, repaired in self._repaired.items() if not repaired.recent(now_s)]:
            del self._repaired[old]
        self._repaired[uid] = _Repaired([*self._repaired[uid].recent(now_s), now_s], what)
        self._untold.append(what)

    def untold(self) -> list[str]:
        """Return the repairs since the last call."""
        told, self._untold = self._untold, []
        return told

    def contested(self, now_s: float) -> list[str]:
        """Return the repairs that another writer keeps undoing."""
        return [each.what for each in self._repaired.values() if len(each.recent(now_s)) >= _CONTESTED]

    def forget(self, uid: str) -> None:
        """Drop the history of a deleted object."""
        self._repaired.pop(uid, None)


class BlockedError(Exception):
    """The cluster does not accept the desired state."""

    def __init__(self, blocked: Blocked) -> None:
        super().__init__(blocked.message)
        self.blocked = blocked


class ChildNameTakenError(BlockedError):
    """Another owner's object has the name of a child, or of a ConfigMap that a namespace shares."""

    def __init__(self, kind: str, name: str, *, leaving: bool = False, shared: bool = False) -> None:
        if leaving:
            message = f"{kind} {name} of an earlier object of this name is still being removed"
        else:
            owner, fix = ("the operator", "") if shared else ("this object", ", or rename this object")
            message = (
                f"{kind} {name} exists and does not belong to {owner}; it is left untouched: delete or rename it{fix}"
            )
        super().__init__(
            Blocked("WaitingForCleanup" if leaving else "ChildNameConflict", message, permanent=not leaving)
        )


@dataclass
class _Applied:
    """Content of a child as the API server returned it for the last apply."""

    digest: str
    version: str = ""
    """Latest resourceVersion that is known to have this content."""
    wish: str | None = None
    """Hash of the desired object; None if another process applied it."""


class Children(Reporter):
    """Finds, creates, repairs and deletes the children of one SpecDecodeDeployment or SpecDecodeCapture.

    Writes raise `ClusterError`, and `ChildNameTakenError` if another owner's object has the name of a child.
    """

    def __init__(self, cluster: Cluster, cache: Cache, key: Key, uid: str, kinds: Sequence[Resource]) -> None:
        super().__init__(cluster, cache, key, uid)
        self._kinds = kinds
        self._applied: dict[Identity, _Applied] = {}
        self.repairs = Repairs()

    def owned(self) -> dict[Identity, Body]:
        """Return the children of the object with this UID, by kind and name."""
        return {
            (resource.kind, child["metadata"]["name"]): {**child, "kind": resource.kind}
            for resource in self._kinds
            for child in self.cache.children_of(self.key, resource.kind)
            if is_owned(child, self.uid)
        }

    def believe(self, proofs: Mapping[Identity, str]) -> None:
        """Use the digests that an earlier operator process stored, unless this process has applied a child."""
        if not self._applied:
            self._applied = {child: _Applied(digest) for child, digest in proofs.items()}

    def digests(self) -> dict[Identity, str]:
        """Return the digests of the children after their last apply, for the next operator process."""
        return {child: self._applied[child].digest for child in self.owned() if child in self._applied}

    async def check_names(self, missing: Iterable[Body]) -> None:
        """Reject names that another owner's object has, before other writes."""
        for child in missing:
            if await self._live(child, may_be_old=True) is not None:
                await self._own(child)

    async def apply(self, children: Collection[Body], kept_managers: Collection[str] = ()) -> bool:
        """Apply children that are missing or drifted, and remove fields that other writers added.

        A name that is taken stops at that child. The workload comes after all that its pods need. Fields of
        ``kept_managers`` stay. Returns False if the repair of a contested child was postponed.
        """
        owned = self.owned()
        return all([await self._keep(child, owned.get(identity(child)), kept_managers) for child in children])

    async def _keep(self, child: Body, live: Body | None, kept_managers: Collection[str]) -> bool:
        if live is not None:
            return await self._repair(child, live, kept_managers)
        await self.create(child, kept_managers)
        return True

    async def create(self, child: Body, kept_managers: Collection[str] = ()) -> None:
        """Create a child, unless another owner's object has its name."""
        try:
            self._store(child, await self.cluster.apply_new(child))
        except ConflictError:  # An earlier try may have created it, and its response was lost.
            live = await self._own(child)
            if live is None:
                raise
            await self._apply_to(child, live, kept_managers)

    async def _repair(self, child: Body, live: Body, kept_managers: Collection[str]) -> bool:
        uid, managers, now_s = live["metadata"]["uid"], foreign_managers(live, kept_managers), time.monotonic()
        applied = self._applied.get(identity(child))
        # `kubectl rollout undo` also restores the hash of an earlier desired object.
        is_drift = is_same_wish(child, live) or (applied is not None and applied.wish == wish_of(child))
        if applied is not None and not managers:
            version = live["metadata"]["resourceVersion"]
            if is_drift if version == applied.version else not needs_apply(child, live, applied.digest):
                applied.version = version
                return True
        if is_drift and not self.repairs.may_repair(uid, now_s):
            return False
        if is_drift and (managers or applied):
            # Changes since the last event are also reverted and reported. A child without a known digest is applied
            # only once, because children rarely drift.
            now = await self._live(live)
            if now is not None and now["metadata"]["uid"] == uid:
                live = slim(live["kind"], now)
            managers = foreign_managers(live, kept_managers)
        if managers:
            await self.cluster.take_over_fields(live, kept_managers)
        try:
            answer = await self._apply_to(child, live, kept_managers)
        except ConflictError:
            now = await self._live(child)
            if now is not None and now["metadata"]["uid"] == uid:
                raise
            self.cache.drop(child["kind"], live)  # It was deleted, but no watch event arrived.
            await self.create(child, kept_managers)
            return True
        if is_drift and (fields := changed_fields(live, answer)):
            by = f" (written by {', '.join(managers)})" if managers else ""
            self.repairs.record(uid, f"{child['kind']} {child['metadata']['name']}: {fields}{by}", now_s)
        return True

    async def _apply_to(self, child: Body, live: Body, kept_managers: Collection[str]) -> Body:
        """Apply a child to the live object with this UID, without the fields of kept managers."""
        wanted = without_kept_fields(child, live, kept_managers)
        named = {**wanted, "metadata": {**wanted["metadata"], "uid": live["metadata"]["uid"]}}
        return self._store(wanted, await self.cluster.apply(named))

    def _store(self, child: Body, answer: Body) -> Body:
        # Live objects come from the cache, which drops fields, so the same fields of the response are dropped.
        slimmed = slim(child["kind"], answer)
        version = answer["metadata"]["resourceVersion"]
        self._applied[identity(child)] = _Applied(content_digest(slimmed, child), version, wish_of(child))
        self.cache.put(child["kind"], answer)
        return slimmed

    async def delete(self, child: Body) -> None:
        """Delete a child."""
        if not await self.cluster.delete(child):  # It was deleted, but no watch event arrived.
            self.cache.drop(child["kind"], child)
        self._applied.pop(identity(child), None)
        self.repairs.forget(child["metadata"]["uid"])

    async def _own(self, child: Body) -> Body | None:
        """Return the live child, if it exists; raise if another owner's object has its name."""
        live = await self._live(child)
        if live is not None and not is_owned(live, self.uid):
            # If an earlier object with this name owned it, the garbage collector is about to delete it.
            leaving = any(
                (owner["kind"], owner["name"]) == (self.key.kind, self.key.name)
                and owner["apiVersion"].startswith(f"{base.GROUP}/")
                for owner in live["metadata"].get("ownerReferences") or []
            )
            raise ChildNameTakenError(*identity(child), leaving=leaving)
        return live

    async def _live(self, child: Body, *, may_be_old: bool = False) -> Body | None:
        kind, name = identity(child)
        return await self.cluster.get(written_resource(kind), self.key.namespace, name, may_be_old=may_be_old)


async def what_blocks(writing: Awaitable[object], *, hint: str = "", status_is_current: bool) -> Readiness | None:
    """Write to the cluster; return what blocks the object, or None.

    Parameters
    ----------
    writing
        The writes.
    hint
        Fix to add if the API server rejects an object.
    status_is_current
        Whether the status describes the current spec. If it does, a `ClusterError` is raised and the queue retries.
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


_RECORDER: Final[Identity] = (CONFIG_MAP.kind, RECORDER_NAME)


class SharedConfigMaps(Children):
    """The ConfigMaps that the objects of one namespace share: the recorder, and facts about models.

    Objects of a namespace are reconciled at the same time, so writes wait for each other.
    """

    def __init__(self, cluster: Cluster, cache: Cache, namespace: str) -> None:
        super().__init__(cluster, cache, Key(namespace, ""), "", (CONFIG_MAP,))
        self._writing = asyncio.Lock()

    @property
    def has_recorder(self) -> bool:
        """Whether the recorder is in the namespace, and has not changed since it was compared or written."""
        live, applied = self._live_recorder(), self._applied.get(_RECORDER)
        return live is not None and applied is not None and live["metadata"]["resourceVersion"] == applied.version

    def owned(self) -> dict[Identity, Body]:
        """Return the recorder. Model facts are merged, and never compared with a desired content."""
        live = self._live_recorder()
        return {} if live is None else {_RECORDER: {**live, "kind": CONFIG_MAP.kind}}

    async def keep_recorder(self) -> bool:
        """Create, update or repair the recorder; return False if the repair of a contested one was postponed."""
        if self.has_recorder and not self._writing.locked():  # Objects do not wait for each other.
            return True
        async with self._writing:
            if self.has_recorder:
                return True
            self.believe({_RECORDER: recorder_digest()})
            return await self.apply([recorder_config_map(self.key.namespace)])

    async def drop_recorder(self) -> None:
        """Delete the recorder, because the namespace has no SpecDecodeDeployment."""
        async with self._writing:
            if live := self.owned().get(_RECORDER):
                await self.delete(live)
                self.cache.drop(CONFIG_MAP.kind, live)  # A new object must not rely on it until the watch reports this.

    async def add_model_facts(self, entries: Mapping[str, str]) -> None:
        """Add facts about models."""
        body = facts_config_map(self.key.namespace, entries)
        async with self._writing:
            live = await self._own(body)
            try:
                answer = await (self.cluster.create(body) if live is None else self.cluster.merge(live, body))
            except InvalidObjectError as error:
                raise ModelFactsFullError(self.key.namespace) from error
            self.cache.put(CONFIG_MAP.kind, answer)

    def _live_recorder(self) -> Body | None:
        return self.cache.shared_config_map(self.key.namespace, RECORDER_NAME)

    async def _own(self, child: Body) -> Body | None:
        live = await self._live(child)
        if live is not None and not is_shared(CONFIG_MAP.kind, live):
            raise ChildNameTakenError(*identity(child), shared=True)
        return live


class ModelFactsFullError(BlockedError):
    """The ConfigMap with facts of models is full."""

    def __init__(self, namespace: str) -> None:
        message = (
            f"ConfigMap {CONFIG_MAP_NAME} in namespace {namespace} is full (1 MiB): delete the entries of models that"
            " are no longer served, or the ConfigMap; the operator reads missing facts again"
        )
        super().__init__(Blocked("ModelFactsFull", message, permanent=True))


def _wanted_beside(parent: ParsedDeployment) -> frozenset[str]:
    """Return the kinds of the children in a spec that engines do not depend on."""
    if (autoscaling := wanted_autoscaler(parent)) is None:
        return wanted_kinds(parent)
    autoscaler = HORIZONTAL_POD_AUTOSCALER if autoscaling.keda is None else SCALED_OBJECT
    return wanted_kinds(parent) | {autoscaler.kind}


@dataclass(frozen=True)
class _InLine:
    """Inputs of the last reconcile without writes and waits."""

    outcome: Outcome
    draft_order: str
    kept_managers: frozenset[str]
    workload: Identity | None
    """Kind and name of the desired workload. The workload itself is packed in the decision."""
    has_recorder: bool
    """Whether engines carry the recorder."""
    children: Mapping[Identity, Body]
    """All objects with the object's label, including pods."""
    removals: int
    """`Cache.removals`"""


class EngineChildren(Children):
    """Children of one SpecDecodeDeployment."""

    def __init__(self, shared: SharedConfigMaps, key: Key, uid: str, signing_key: "SigningKey | None" = None) -> None:
        super().__init__(shared.cluster, shared.cache, key, uid, CHILDREN)
        self.shared = shared
        self._signing_key = signing_key
        self._in_line: _InLine | None = None
        self._shared_claims = set[tuple[str, str]]()
        self.blocked_beside: dict[str, Readiness] = {}
        """Why children that engines do not depend on could not be written or deleted, by kind."""
        self._postponed_beside = set[str]()
        self.is_done = True
        """Whether the last reconcile left no write blocked or postponed."""

    async def carry_out(
        self, parent: ParsedDeployment, desired: DesiredState, groups: GroupHistory = NO_GROUP_HISTORY
    ) -> None:
        """Apply children that are missing or drifted; scale workloads; delete unwanted children.

        ``groups`` is the history of engines on several nodes.
        """
        self.believe(children_proofs(parent.status.kept))
        if self.is_in_line(parent, desired):
            return
        before, removals = self.cache.all_children(self.key), self.cache.removals(self.key)
        outcome, owned = desired.outcome, self.owned()
        if self._signing_key is not None:
            kept = (owned.get((CONFIG_MAP.kind, attestation_name(self.key))) or {}).get("data") or {}
            seen = Seen(kept, self.engine_pods(), self.cache.captures_of(self.key))
            desired = attested(parent, desired, seen, self._signing_key, self.cluster.clock.now())
        (live, _), pods = self.workloads(desired), self.engine_pods()
        desired = with_draft_order(self.key, desired)
        desired = resting(desired, live, current_pods(pods, live), groups, self.cluster.clock.now().timestamp())
        children = objects_to_apply(desired, owned.values(), parent.kept_managers)
        others = [child for child in children if child["kind"] not in _BESIDE_ENGINES]
        beside = {child["kind"]: child for child in children if child["kind"] in _BESIDE_ENGINES}
        await self._check_claims(parent, desired, owned.values())
        await self._check_image_volumes(parent, others, owned.values())
        is_all = await self.apply(others, parent.kept_managers)
        for workload, replicas in workloads_to_scale(parent, desired, owned.values()):
            if workload["spec"].get("replicas", 1) != replicas:
                scaled = await self.cluster.merge(workload, {"spec": {"replicas": replicas}})
                self.cache.put(workload["kind"], scaled)
        # Includes the child that was just applied: engines of the other kind stop when those of the new template serve.
        (successor, _), pods = self.workloads(desired), self.engine_pods()
        unwanted = [*objects_to_delete(desired, owned.values(), successor, pods), *self._unused_claims(desired)]
        for child in unwanted:
            await self.delete(child)
        await self._keep_beside(parent, beside)
        is_group = desired.workload is not None and desired.workload["kind"] == LEADER_WORKER_SET.kind
        self.is_done = is_all and not self.blocked_beside and not self._postponed_beside
        waits = not self.is_done or unwanted or self._signing_key is not None or is_group or rejections(pods)
        # If the object has changed meanwhile, the next reconcile could not use this record, so it is not kept.
        is_at_rest = not waits and before == self.cache.all_children(self.key)
        wanted, has_recorder = self._wanted(desired), any(map(starts_recorder, others))
        self._in_line = (
            _InLine(outcome, desired.draft_order, parent.kept_managers, wanted, has_recorder, before, removals)
            if is_at_rest
            else None
        )

    async def _keep(self, child: Body, live: Body | None, kept_managers: Collection[str]) -> bool:
        is_done = not starts_recorder(child) or await self.shared.keep_recorder()
        return await super()._keep(child, live, kept_managers) and is_done

    def _unused_claims(self, desired: DesiredState) -> list[Body]:
        """Return the ResourceClaimTemplates to which no workload, Job or pod refers.

        ReplicaSets of an earlier template start pods until a rollout is complete.
        """
        live = {name: child for name, child in self.owned().items() if name[0] == RESOURCE_CLAIM_TEMPLATE.kind}
        outcome = desired.outcome
        if not live or isinstance(outcome, NotLaunched):
            return []
        # Objects of lists have no kind.
        runs = {capture.KIND: self.cache.captures_of(self.key), training.KIND: self.cache.trainings_of(self.key)}
        names = [(each["metadata"]["name"], kind) for kind, found in runs.items() for each in found]
        keys = [Key(self.key.namespace, name, kind) for name, kind in names]
        jobs = [job["spec"]["template"] for key in keys for job in self.cache.children_of(key, JOB.kind)]
        workloads = [child for child in self.owned().values() if child["kind"] in WORKLOAD_KINDS]
        pods = [*self.cache.children_of(self.key, POD.kind), *jobs, *chain.from_iterable(map(pod_templates, workloads))]
        requests = filter(None, (requested(mapping(pod, "metadata")) for pod in pods))
        used = {template_name(self.key, request) for request in requests}
        wanted = {identity(child) for child in desired.children}
        return [child for name, child in live.items() if name not in wanted and name[1] not in used]

    async def _check_claims(self, parent: ParsedDeployment, desired: DesiredState, live: Iterable[Body]) -> None:
        """Raise if a replica runs on several nodes and a claim of the spec cannot be mounted on all of them.

        Some storage does not enforce access modes, so claims of replicas that serve are accepted.
        """
        plan = desired.outcome.plan_status
        if isinstance(parent.spec, InvalidSpecError) or plan is None or (plan.nodes_per_replica or 1) == 1:
            return
        groups = [child for child in live if child["kind"] == LEADER_WORKER_SET.kind]
        serving = [child for child in groups if mapping(child, "status").get("readyReplicas")]
        served = {claim for child in serving for claim in _claims_of(child)}
        for field_, name in claim_fields(parent.spec).items():
            if (field_, name) in self._shared_claims or name in served:
                continue
            claim = await self.cluster.get(PERSISTENT_VOLUME_CLAIM, self.key.namespace, name, may_be_old=True)
            if claim is None:
                continue  # Its pods wait and report it.
            modes = texts(mapping(claim, "spec"), "accessModes")
            if blocked := claim_not_shared(field_, name, modes, plan.nodes_per_replica):
                raise BlockedError(blocked)
            self._shared_claims.add((field_, name))

    async def _check_image_volumes(
        self, parent: ParsedDeployment, children: Iterable[Body], live: Iterable[Body]
    ) -> None:
        """Raise if the API server does not support image volumes and would drop them from the pods.

        A live child with such a volume shows that it does, so an object needs one dry run.
        """
        fields = [] if isinstance(parent.spec, InvalidSpecError) else image_fields(parent.spec)
        pod = _pod_on_image(children)
        if not fields or pod is None or _pod_on_image(live) is not None:
            return
        metadata = {**pod["metadata"], "generateName": f"{self.key.name}-", "namespace": self.key.namespace}
        body = {"apiVersion": POD.api_version, "kind": POD.kind, "metadata": metadata, "spec": pod["spec"]}
        try:
            stored = await self.cluster.try_create(POD, body)
        except ClusterError:
            return  # The write of the child or its controller reports the same.
        if not any("image" in each for each in stored["spec"].get("volumes") or []):
            raise BlockedError(image_volumes_missing(fields))

    async def _keep_beside(self, parent: ParsedDeployment, rendered: Mapping[str, Body]) -> None:
        """Apply the children that engines do not depend on, by kind; delete those that are not in the spec.

        A route never refers to a missing pool: it is applied after the pool, and the pool is deleted after the route.
        """
        self.blocked_beside, self._postponed_beside = {}, set()
        pool = INFERENCE_POOL.kind
        for kind in sorted(_BESIDE_ENGINES, key=lambda kind: kind == pool and kind not in rendered):
            is_waiting = kind == HTTP_ROUTE.kind and kind in rendered
            if is_waiting and (pool in self.blocked_beside or pool in self._postponed_beside):
                continue
            writing = self._keep_one_beside(parent, kind, rendered.get(kind))
            blocked = await what_blocks(writing, hint=_REFUSED_HINTS.get(kind, ""), status_is_current=False)
            if blocked is not None:
                self.blocked_beside[kind] = blocked

    async def _keep_one_beside(self, parent: ParsedDeployment, kind: str, rendered: Body | None) -> None:
        live, wanted = self.owned().get((kind, self.key.name)), _wanted_beside(parent)
        is_unwanted = kind not in wanted and not isinstance(parent.spec, InvalidSpecError)
        # A route that was just deleted may still be in the cache.
        is_routed = HTTP_ROUTE.kind in wanted or HTTP_ROUTE.kind in self.blocked_beside
        route = self.beside(HTTP_ROUTE) if is_routed else None
        if live is not None and is_unwanted and (route is None or not leads_to(route, live)):
            await self.delete(live)
        if rendered is None:
            return
        if kind in _NOT_SERVED and kind not in self.cache.optional_kinds:
            raise BlockedError(_NOT_SERVED[kind])
        if not await self.apply([rendered], parent.kept_managers):
            self._postponed_beside.add(kind)

    def is_in_line(self, parent: ParsedDeployment, desired: DesiredState) -> bool:
        """Return whether the last reconcile of the same inputs made no writes."""
        last = self._in_line
        return (
            last is not None
            and last.outcome is desired.outcome
            and last.draft_order == desired.draft_order
            and last.kept_managers == parent.kept_managers
            and (self.shared.has_recorder or not last.has_recorder)
            and last.removals == self.cache.removals(self.key)
            and last.children == self.cache.all_children(self.key)
        )

    def with_own_writes(self, before: Mapping[Identity, Body]) -> Mapping[Identity, Body]:
        """Return ``before``, with the current version of each child that was since applied or found in sync.

        Children with `managedFields` are left out: the next reconcile must remove fields of other writers from them.
        """
        own = {}
        for name, body in self.cache.all_children(self.key).items():
            applied, metadata = self._applied.get(name), body["metadata"]
            if applied and applied.version == metadata["resourceVersion"] and not metadata.get("managedFields"):
                own[name] = body
        return {**before, **own}

    def workloads(self, desired: DesiredState | None) -> tuple[Body | None, Body | None]:
        """Return the live workload that is desired, and the workload of the other kind that ran the engines before.

        If no workload is desired, the first one is the earlier workload.
        """
        wanted = None if desired is None else self._wanted(desired)
        live = {
            name: child for name, child in self.owned().items() if name[0] in WORKLOAD_KINDS and not is_canary(child)
        }
        if wanted is None:
            return next(iter(live.values()), None), None
        return live.pop(wanted, None), next(iter(live.values()), None)

    def beside(self, *resources: Resource) -> Body | None:
        """Return the live child of the first of these kinds; None without one."""
        owned = self.owned()
        found = (owned.get((resource.kind, self.key.name)) for resource in resources)
        return next((child for child in found if child is not None), None)

    def engine_pods(self) -> list[Body]:
        """Return the pods of all workloads of this object."""
        return engine_pods(self.cache.children_of(self.key, POD.kind), self.key)

    def canary(self) -> Body | None:
        """Return the live Deployment of the canary; None without one."""
        return self.owned().get((DEPLOYMENT.kind, canary_name(self.key)))

    def _wanted(self, desired: DesiredState) -> Identity | None:
        if self._in_line is not None and self._in_line.outcome is desired.outcome:
            return self._in_line.workload
        return None if desired.workload is None else identity(desired.workload)

    def proofs(self) -> dict[str, str]:
        """Return the digests of the children after their last apply, in the form of the status."""
        return {child_entry(child): digest for child, digest in self.digests().items()}
