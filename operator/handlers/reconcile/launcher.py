"""Writes to the cluster what is desired for one SpecDecodeDeployment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdecode_operator.api.base import Body
from specdecode_operator.api.key import Key
from specdecode_operator.attestation.attest import Seen, attestation_name, attested
from specdecode_operator.attestation.keys import SigningKey
from specdecode_operator.cluster.cache import Cache, is_model_facts
from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.errors import InvalidObjectError
from specdecode_operator.cluster.server_time import ServerTime
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.deployment.changes import (
    objects_to_apply,
    objects_to_delete,
    resting,
    workloads_to_scale,
)
from specdecode_operator.deployment.desired_state import DesiredState, Outcome
from specdecode_operator.deployment.kept import child_entry, children_proofs
from specdecode_operator.deployment.models.model_facts import CONFIG_MAP_NAME, facts_config_map
from specdecode_operator.deployment.objects.workload import WORKLOAD_KINDS
from specdecode_operator.deployment.pods.group_history import UNSEEN, GroupHistory
from specdecode_operator.deployment.pods.rejected_pods import rejections
from specdecode_operator.deployment.pods.rollout import current_pods
from specdecode_operator.deployment.spec.parent import Parent
from specdecode_operator.handlers.reconcile.inventory import BlockedError, ChildNameTakenError, Inventory
from specdecode_operator.kube.drift import Identity, identity
from specdecode_operator.kube.repairs import Repairs
from specdecode_operator.kube.resources import CHILDREN, CONFIG_MAP, LEADER_WORKER_SET, POD


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

    def owned(self, parent: Parent) -> dict[Identity, Body]:
        """Children of this very object, by kind and name."""
        return self._inventory.owned(parent.key, parent.uid)

    async def carry_out(self, parent: Parent, desired: DesiredState, groups: GroupHistory = UNSEEN) -> None:
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

    def is_in_line(self, parent: Parent, desired: DesiredState) -> bool:
        """Whether there was nothing to write for an object, and all that this depends on is as it was."""
        last = self._in_line.get(parent.key)
        if last is None or last.outcome is not desired.outcome or last.kept_managers != parent.kept_managers:
            return False
        return last.children == self._cache.all_children(parent.key)

    def _attested(self, parent: Parent, desired: DesiredState, owned: Mapping[Identity, Body]) -> DesiredState:
        """Return the desired state with what is attested of it, where there is a key to sign with."""
        if self._signing_key is None:
            return desired
        kept = (owned.get((CONFIG_MAP.kind, attestation_name(parent.key))) or {}).get("data") or {}
        pods, captures = self._cache.children_of(parent.key, POD.kind), self._cache.captures_of(parent.key)
        return attested(parent, desired, Seen(kept, pods, captures), self._signing_key, self._clock.now())

    def workloads(self, parent: Parent, desired: DesiredState | None) -> tuple[Body | None, Body | None]:
        """Return the live workload that is desired, and one of the other kind that ran the engines before it.

        With none desired it is the one of before.
        """
        wanted = None if desired is None else self._wanted(parent, desired)
        live = {key: child for key, child in self.owned(parent).items() if key[0] in WORKLOAD_KINDS}
        if wanted is None:
            return next(iter(live.values()), None), None
        return live.pop(wanted, None), next(iter(live.values()), None)

    def _wanted(self, parent: Parent, desired: DesiredState) -> Identity | None:
        """Return which workload is desired."""
        last = self._in_line.get(parent.key)
        if last is not None and last.outcome is desired.outcome:
            return last.workload
        return None if desired.workload is None else identity(desired.workload)

    async def keep(self, parent: Parent, child: Body) -> None:
        """Apply one child that is no part of the desired state.

        Raises
        ------
        ChildNameTakenError
            Before anything was written, unless a name was taken in that very moment.
        ClusterError
            When the API server refuses or cannot be reached.
        """
        await self._inventory.apply(parent.key, parent.uid, [child], parent.kept_managers)

    def proofs(self, parent: Parent) -> dict[str, str]:
        """Return the digests of the children as they were left, as the status holds them."""
        return {child_entry(child): digest for child, digest in self._inventory.proofs(parent.key, parent.uid).items()}

    def repairs(self, parent: Parent) -> Repairs:
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
