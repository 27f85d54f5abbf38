"""What the handlers of one operator process share."""

import asyncio
from contextlib import AsyncExitStack

from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.engine_probe import EngineProbe
from specdecode_operator.cluster.resources import CHILDREN, NODE, POD
from specdecode_operator.handlers.queue import WorkQueue
from specdecode_operator.handlers.reconciler import Reconciler
from specdecode_operator.labels import OWNED_SELECTOR

_RESYNC_S = 15.0
"""How often engines are asked what they do, and everything is looked at again."""


class OperatorState:
    """Cache, queue and connections, from start-up to clean-up."""

    def __init__(self) -> None:
        self.cache = Cache()
        self.queue = WorkQueue()
        self._tasks: list[asyncio.Task[None]] = []
        self._connections = AsyncExitStack()

    async def start(self) -> None:
        """Connect, and begin to work."""
        cluster = await Cluster.connect()
        self._connections.push_async_callback(cluster.close)
        probe = EngineProbe()
        self._connections.push_async_callback(probe.close)
        await self._prime(cluster)
        reconciler = Reconciler(cluster, self.cache, probe)
        self._tasks = [
            asyncio.create_task(self.queue.run(reconciler.reconcile)),
            asyncio.create_task(self._resync()),
        ]

    async def stop(self) -> None:
        """End the work and close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._connections.aclose()

    def check(self) -> None:
        """Raise when a background task has ended: the operator is of no use then."""
        for task in self._tasks:
            if task.done():
                msg = "a background task of the operator has ended"
                raise RuntimeError(msg)

    def add_all(self) -> None:
        """Ask for a look at every object."""
        for key in self.cache.deployments():
            self.queue.add(key)

    async def _prime(self, cluster: Cluster) -> None:
        """See nodes, children and pods before the first object is judged.

        The watches bring them in any order: without this, a serving object
        would look like one whose nodes and engines are gone.
        """
        for node in await cluster.list(NODE):
            self.cache.put_node(node)
        for resource in (*CHILDREN, POD):
            for body in await cluster.list(resource, OWNED_SELECTOR):
                self.cache.put(resource.kind, body)

    async def _resync(self) -> None:
        """One task for all objects: kopf's timers and daemons would put finalizers on them."""
        while True:
            await asyncio.sleep(_RESYNC_S)
            self.add_all()
