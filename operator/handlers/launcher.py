"""Brings the children of one SpecDecodeDeployment in line with what is decided."""

from collections.abc import Mapping

from specdecode_operator.api.base import Body
from specdecode_operator.api.key import Key
from specdecode_operator.cluster.cache import Cache, is_model_facts
from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.errors import InvalidObjectError
from specdecode_operator.deployment.desired_state import Intent, Obstacle
from specdecode_operator.deployment.objects.workload import STARTERS
from specdecode_operator.deployment.replacement import may_end, staying, wanted_now
from specdecode_operator.deployment.spec.model_sources import CONFIG_MAP_NAME, facts_config_map
from specdecode_operator.deployment.spec.parent import Parent
from specdecode_operator.handlers.inventory import ChildNameTakenError, HinderedError, Identity, Inventory, identity
from specdecode_operator.kube.resources import CHILDREN, CONFIG_MAP, JOB, POD


class ModelFactsFullError(HinderedError):
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

    async def launch(self, parent: Parent, intent: Intent) -> None:
        """Apply what is missing or drifted; remove what is no longer wanted, Jobs that read models above all.

        Raises
        ------
        ChildNameTakenError
            Before anything was written.
        ClusterError
            When the API server refuses or cannot be reached.
        """
        owned = self.owned(parent)
        children = wanted_now(intent, owned.values())
        # All names are checked before the first write, so that nothing is half-created.
        await self._inventory.check_names(parent.key, parent.uid, children, owned)
        for child in children:
            await self._inventory.apply(parent.key, child, owned.get(identity(child)))
        if intent.starter is not None and (running := staying(intent, owned.values())) is not None:
            await self._scale(running, intent.starter["spec"]["replicas"])
        launched = not isinstance(intent.course, Obstacle)
        if not launched:
            await self._stop_unwanted_engines(parent, owned)
        wanted = {identity(child) for child in intent.children}
        for (kind, name), child in owned.items():
            if (kind, name) in wanted or (kind in STARTERS and not self._may_end_others(parent, intent)):
                continue
            # Without a launch the engines of an earlier spec stay, with all that is theirs.
            if launched or (kind == JOB.kind and not _only_waits(intent)):
                await self._inventory.delete(parent.key, child)

    def _may_end_others(self, parent: Parent, intent: Intent) -> bool:
        """Whether what starts engines of the other kind may go."""
        successor = self.starter(parent, intent)
        return may_end(intent, successor, self._cache.belongings(parent.key, POD.kind))

    def starter(self, parent: Parent, intent: Intent) -> Body | None:
        """Return what starts the engines that are wanted; with none wanted, what starts those of before."""
        owned = self.owned(parent)
        if intent.starter is not None:
            return owned.get(identity(intent.starter))
        return next((child for (kind, _), child in owned.items() if kind in STARTERS), None)

    def predecessor(self, parent: Parent, intent: Intent) -> Body | None:
        """Return what started engines before those that are wanted and is still there, as another kind."""
        if intent.starter is None:
            return None
        wanted = identity(intent.starter)
        return next((child for key, child in self.owned(parent).items() if key[0] in STARTERS and key != wanted), None)

    async def keep(self, parent: Parent, child: Body) -> None:
        """Apply one child beside those of the intent.

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
        for (kind, _), starter in owned.items():
            if kind in STARTERS:
                await self._scale(starter, 0)

    async def _scale(self, starter: Body, replicas: int) -> None:
        """Set how many engines are started, and leave all else as it is."""
        if starter["spec"].get("replicas", 1) != replicas:
            answer = await self._cluster.change(starter, {"spec": {"replicas": replicas}})
            self._cache.put(starter["kind"], answer)

    def forget(self, key: Key) -> None:
        """Drop what is remembered of the children of an object that is gone."""
        self._inventory.forget(key)


def _only_waits(intent: Intent) -> bool:
    """Whether something is away that was there, such as nodes: a download that goes on is not begun anew for that."""
    return isinstance(intent.course, Obstacle) and intent.course.summary.reconciling and not intent.children
