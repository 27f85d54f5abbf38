"""Brings the children of one SpecDecodeDeployment in line with what is decided."""

from collections.abc import Mapping

from specdecode_operator.api.base import Body
from specdecode_operator.api.key import Key
from specdecode_operator.cluster.cache import Cache, is_model_facts
from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.errors import InvalidObjectError
from specdecode_operator.deployment.desired_state import DesiredState, NotLaunched
from specdecode_operator.deployment.models.model_facts import CONFIG_MAP_NAME, facts_config_map
from specdecode_operator.deployment.objects.workload import WORKLOAD_KINDS
from specdecode_operator.deployment.replacement import may_end, staying, wanted_now
from specdecode_operator.deployment.spec.parent import Parent
from specdecode_operator.handlers.inventory import BlockedError, ChildNameTakenError, Identity, Inventory, identity
from specdecode_operator.kube.resources import CHILDREN, CONFIG_MAP, JOB, POD


class ModelFactsFullError(BlockedError):
    """What was read of a model finds no place."""

    def __init__(self, namespace: str) -> None:
        message = (
            f"ConfigMap {CONFIG_MAP_NAME} in namespace {namespace} takes no more (1 MiB): delete entries of models"
            " that are no longer served, or all of it; what is needed is read again"
        )
        super().__init__("ModelFactsFull", message, permanent=True)


class Launcher:
    """Applies and removes children by inventory: our label and our UID."""

    def __init__(self, cluster: Cluster, cache: Cache) -> None:
        self._cluster = cluster
        self._cache = cache
        self._inventory = Inventory(cluster, cache, CHILDREN)

    def owned(self, parent: Parent) -> dict[Identity, Body]:
        """Children of this very object, by kind and name."""
        return self._inventory.owned(parent.key, parent.uid)

    async def launch(self, parent: Parent, desired: DesiredState) -> None:
        """Apply what is missing or drifted; remove what is no longer wanted, Jobs that read models above all.

        Raises
        ------
        ChildNameTakenError
            Before anything was written.
        ClusterError
            When the API server refuses or cannot be reached.
        """
        owned = self.owned(parent)
        children = wanted_now(desired, owned.values())
        # All names are checked before the first write, so that nothing is half-created.
        await self._inventory.check_names(parent.key, parent.uid, children, owned)
        for child in children:
            await self._inventory.apply(parent.key, child, owned.get(identity(child)))
        if desired.workload is not None and (running := staying(desired, owned.values())) is not None:
            await self._scale(running, desired.workload["spec"]["replicas"])
        launched = not isinstance(desired.outcome, NotLaunched)
        if not launched:
            await self._stop_unwanted_engines(parent, owned)
        wanted = {identity(child) for child in desired.children}
        for (kind, name), child in owned.items():
            if (kind, name) in wanted or (kind in WORKLOAD_KINDS and not self._may_end_others(parent, desired)):
                continue
            # Without a launch the engines of an earlier spec stay, with all that is theirs.
            if launched or (kind == JOB.kind and not _only_waits(desired)):
                await self._inventory.delete(parent.key, child)

    def _may_end_others(self, parent: Parent, desired: DesiredState) -> bool:
        """Whether what starts engines of the other kind may go."""
        successor = self.workload(parent, desired)
        return may_end(desired, successor, self._cache.children_of(parent.key, POD.kind))

    def workload(self, parent: Parent, desired: DesiredState) -> Body | None:
        """Return what starts the engines that are wanted; with none wanted, what starts those of before."""
        owned = self.owned(parent)
        if desired.workload is not None:
            return owned.get(identity(desired.workload))
        return next((child for (kind, _), child in owned.items() if kind in WORKLOAD_KINDS), None)

    def replaced_workload(self, parent: Parent, desired: DesiredState) -> Body | None:
        """Return what started engines before those that are wanted and is still there, as another kind."""
        if desired.workload is None:
            return None
        wanted = identity(desired.workload)
        return next(
            (child for key, child in self.owned(parent).items() if key[0] in WORKLOAD_KINDS and key != wanted), None
        )

    async def keep(self, parent: Parent, child: Body) -> None:
        """Apply one child beside those of the desired.

        Raises
        ------
        ChildNameTakenError
            Before anything was written.
        ClusterError
            When the API server refuses or cannot be reached.
        """
        owned = self.owned(parent)
        await self._inventory.check_names(parent.key, parent.uid, [child], owned)
        await self._inventory.apply(parent.key, child, owned.get(identity(child)))

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
        if not self._cache.model_facts(namespace):
            live = await self._cluster.get(CONFIG_MAP, namespace, CONFIG_MAP_NAME)
            if live is not None and not is_model_facts(live):
                raise ChildNameTakenError(CONFIG_MAP.kind, CONFIG_MAP_NAME, leaving=False)
        try:
            answer = await self._cluster.lay_over(facts_config_map(namespace, entries))
        except InvalidObjectError as error:
            raise ModelFactsFullError(namespace) from error
        self._cache.put(CONFIG_MAP.kind, answer)

    async def _stop_unwanted_engines(self, parent: Parent, owned: dict[Identity, Body]) -> None:
        """Stop the engines of an earlier spec when the present one wants none, whatever else is wrong with it."""
        if parent.spec.get("suspend") is not True and parent.spec.get("replicas") != 0:
            return
        for (kind, _), workload in owned.items():
            if kind in WORKLOAD_KINDS:
                await self._scale(workload, 0)

    async def _scale(self, workload: Body, replicas: int) -> None:
        """Set how many engines are started, and leave all else as it is."""
        if workload["spec"].get("replicas", 1) != replicas:
            answer = await self._cluster.change(workload, {"spec": {"replicas": replicas}})
            self._cache.put(workload["kind"], answer)

    def forget(self, key: Key) -> None:
        """Drop what is remembered of the children of an object that is gone."""
        self._inventory.forget(key)


def _only_waits(desired: DesiredState) -> bool:
    """Whether something is away that was there, such as nodes: a download that goes on is not begun anew for that."""
    return isinstance(desired.outcome, NotLaunched) and desired.outcome.summary.reconciling and not desired.children
