"""Wire up one operator process: cache, queue, reconcilers and the resync loop.

`OperatorState` is the composition root that kopf handlers receive as memo. A standby replica keeps its cache up to
date and writes nothing, so it can take over immediately.
"""

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Final

from prometheus_client.registry import Collector

from specdecode_operator.api import capture, deployment, training
from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.capture.decision import capture_attention
from specdecode_operator.capture.gpu_sharing import borrows
from specdecode_operator.capture.observation import has_ended, read_capture
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster, ClusterError
from specdecode_operator.cluster.clock import ServerTime
from specdecode_operator.cluster.engine_probe import EngineProbe
from specdecode_operator.cluster.nodes import NodesFrom
from specdecode_operator.cluster.resources import POD
from specdecode_operator.deployment.requeue import Requeue
from specdecode_operator.handlers.leadership import Claims, Leadership
from specdecode_operator.handlers.metrics import OperatorMetrics
from specdecode_operator.handlers.queue import Work, WorkQueue
from specdecode_operator.handlers.reconcile_capture import CaptureReconciler
from specdecode_operator.handlers.reconcile_deployment import Reconciler
from specdecode_operator.handlers.reconcile_job import Servings, Shared
from specdecode_operator.handlers.reconcile_training import TrainingReconciler
from specdecode_operator.handlers.resync import Relist, ResyncOrder, WatchProgress
from specdecode_operator.handlers.settings import Settings
from specdecode_operator.training.observation import read_training
from specdecode_operator.training.status import training_attention

IMAGE_VARIABLE = "SPECDECODE_OPERATOR_IMAGE"
"""Environment variable with the operator's image, for use outside a pod or if pods pull it from elsewhere."""

_CONTAINER = "operator"


async def own_image(cluster: Cluster) -> str | None:
    """Return the image from the environment, or that of the operator's own pod; None if both are missing."""
    if image := os.environ.get(IMAGE_VARIABLE):
        return image
    namespace, name = os.environ.get("POD_NAMESPACE"), os.environ.get("POD_NAME")
    pod = await cluster.get(POD, namespace, name) if namespace and name else None
    if pod is None:
        return None
    return {each["name"]: each["image"] for each in pod["spec"]["containers"]}.get(_CONTAINER)


_STUCK_S = 300.0
_BEAT_S = 1.0
_SETTLED_AFTER_S = 5.0
"""Delay after which a new leader reconciles objects whose spec has not changed."""
RESYNC_S = 15.0
"""Interval between scrapes of an engine, if there are few engines."""
_PARTS_OF_ROUND: Final = 5
"""Parts into which a round is split. Reconciles of one part follow each other directly. With warm processor caches,
they take half of the CPU time of separate reconciles."""

_logger = logging.getLogger(__name__)


class OperatorStuckError(Exception):
    """The operator hangs and must be restarted."""


class OperatorState:
    """Holds the cache, the queue and the connections of one process."""

    def __init__(self, settings: Settings | None = None, leadership: Leadership | None = None) -> None:
        self.settings = settings or Settings()
        self._leadership = leadership
        self._leads = False
        """Whether this process has held the Lease or needs none. Each write checks the Lease again."""
        self.ended = asyncio.Event()
        """Set when the work has stopped and the process must end."""
        self.cache = Cache()
        self.progress = WatchProgress(by_namespace=bool(self.namespaces))
        self.cache.on_seen = self.progress.knows
        self.time = ServerTime()
        self.queue = WorkQueue()
        self.queue.is_open = leadership is None
        nodes = None if self.settings.nodes_from is NodesFrom.CLUSTER else self.settings.nodes or ()
        self.relist = Relist(self.cache, self.namespaces, nodes, self.queue.add_calmly)
        self.turns = ResyncOrder(RESYNC_S)
        self.metrics = OperatorMetrics(self.cache, self.settings.reconciles_told_from_s)
        self._tasks: list[asyncio.Task[None]] = []
        self._last_beat_s = 0.0
        self._next_beat: asyncio.TimerHandle | None = None
        self._connections = AsyncExitStack()
        self._end: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect, list all kinds, and start to work or to wait for the Lease.

        Raises
        ------
        ClusterError
            If the cluster cannot be listed. The caller may try again.
        """
        await self._connections.aclose()
        may_write = (lambda: True) if self._leadership is None else self._leadership.may_write
        cluster = await Cluster.connect(may_write, self.time)
        self._connections.push_async_callback(cluster.close)
        probe = EngineProbe()
        self._connections.push_async_callback(probe.close)
        claims = Claims(cluster, self.namespaces, self.settings.identity)
        if not self.namespaces:
            await claims.look()
        await self.relist.everything(cluster)
        settings = replace(self.settings, operator_image=await own_image(cluster))
        reconciler = Reconciler(cluster, self.cache, probe, self.metrics, settings)
        shared = Shared(cluster, self.cache, reconciler, self.metrics, settings, Servings(self.cache))
        captures, trainings = CaptureReconciler(shared), TrainingReconciler(shared)

        async def reconcile(key: Key) -> None:
            if not claims.serves(key.namespace):
                return
            await settings.facts.look()
            requeue = Requeue()
            try:
                with self.metrics.measured(key):
                    if key.kind == deployment.KIND:
                        requeue = await reconciler.reconcile(key)
                    elif key.kind == training.KIND:
                        await trainings.reconcile(key)
                        body = self.cache.parent(key)
                        requeue = Requeue(is_close=False) if body is None else training_attention(read_training(body))
                    else:
                        await captures.reconcile(key)
                        body = self.cache.parent(key)
                        requeue = Requeue(is_close=False) if body is None else capture_attention(read_capture(body))
            finally:  # Also after a failure: the object would stay first in the resync order and block others.
                if self.cache.parent(key) is None:
                    self.turns.forget(key)
                else:
                    self.turns.looked(key, requeue)

        self._beat()
        self._tasks = [
            asyncio.create_task(self._work(claims, reconcile)),
            asyncio.create_task(self._resync(cluster, claims)),
        ]

    def end(self) -> None:
        """Start the shutdown: stop work and release the Lease first, because another replica waits for it."""

        async def end() -> None:
            try:
                await self.stop()
            finally:
                self.ended.set()

        self._end = self._end or asyncio.create_task(end())

    async def stop(self) -> None:
        """Stop the work, release claims and Lease, and close all connections; idempotent."""
        if self._next_beat is not None:
            self._next_beat.cancel()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._connections.aclose()
        if self._leadership is not None:
            await asyncio.to_thread(self._leadership.stop)

    def collectors(self) -> tuple[Collector, ...]:
        """Return the collectors for /metrics."""
        return self.metrics, self.turns

    def check(self) -> None:
        """Raise if a background task has ended or hangs, so that a restart is needed; thread-safe."""
        if any(task.done() for task in self._tasks):
            raise OperatorStuckError("a background task of the operator has ended")
        if self._tasks and time.monotonic() - self._last_beat_s > _STUCK_S:
            raise OperatorStuckError(f"the event loop has been blocked for more than {_STUCK_S:.0f} s")
        if stalled := self.progress.stalled():
            raise OperatorStuckError(stalled)
        # The operator is not stuck while a long queue gets shorter.
        if min(self.queue.longest_wait_s(), self.queue.idle_s()) > _STUCK_S:
            raise OperatorStuckError(f"the work queue has made no progress for more than {_STUCK_S:.0f} s")

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Namespaces to serve; empty for all."""
        return self.settings.namespaces

    @property
    def has_started(self) -> bool:
        """Whether the operator has connected and listed all kinds."""
        return bool(self._tasks)

    def add_all(self, namespace: str | None = None) -> None:
        """Queue all SpecDecodeDeployments, or those of one namespace."""
        for key in self.cache.parents(deployment.KIND):
            if namespace in (None, key.namespace):
                self.queue.add_calmly(key)

    def add_related(self, key: Key, ask: Callable[[Key], None]) -> None:
        """Queue a SpecDecodeDeployment, its captures and its trainings, because they wait for each other."""
        for body in self.cache.captures_of(key):
            ask(Key(key.namespace, body["metadata"]["name"], capture.KIND))
        for body in self.cache.trainings_of(key):
            ask(Key(key.namespace, body["metadata"]["name"], training.KIND))
        if self.cache.parent(key) is not None:
            ask(key)

    def add_keeping_captures(self) -> None:
        """Queue all captures that have not ended and do not borrow the GPUs of their deployment."""
        for key in self.cache.parents(capture.KIND):
            body = self.cache.parent(key)
            if body is not None and not borrows(body.get("spec") or {}) and not has_ended(body):
                self.queue.add_calmly(key)

    async def _work(self, claims: Claims, work: Work) -> None:
        """Process the queue when this replica leads: first objects with a changed spec, then the rest."""
        if self._leadership is not None:
            await self._leadership.led()
        self._leads = self.queue.is_open = True
        self._connections.push_async_callback(claims.release)
        if self.namespaces:  # Otherwise `_resync` has read the claims while waiting.
            await claims.look()
        for key in self.cache.parents():
            body: Body = self.cache.parent(key) or {}
            if body and (body.get("status") or {}).get("observedGeneration") != body["metadata"]["generation"]:
                self.queue.add(key)
        if self._leadership is None:
            self._add_everything()
        else:  # Reconciling the unchanged objects at once would delay the changed ones.
            asyncio.get_running_loop().call_later(_SETTLED_AFTER_S, self._add_everything)
        await self.queue.run(work)

    def _add_everything(self) -> None:
        for key in self.cache.parents():
            self.queue.add_calmly(key)

    def _beat(self) -> None:
        """Record that the event loop is running."""
        self._last_beat_s = time.monotonic()
        self._next_beat = asyncio.get_running_loop().call_later(_BEAT_S, self._beat)

    async def _resync(self, cluster: Cluster, claims: Claims) -> None:
        """Resync all objects in one task, because kopf's timers and daemons would add finalizers."""
        facts, calibration, loop = self.settings.facts, self.settings.calibration, asyncio.get_running_loop()

        async def shared() -> object:
            """Return the inputs of decisions that no watch reports."""
            await facts.look()
            return calibration.read(), facts.known, self.cache.optional_kinds

        before = await shared()
        for round_ in itertools.count():
            await asyncio.sleep(RESYNC_S)
            if self._leads or not self.namespaces:
                await claims.look()
            try:
                await self.relist.in_round(round_, cluster)
            except ClusterError as error:
                _logger.warning("listing failed, will retry: %s", error)
            now = await shared()
            if before != now:
                self.add_all()
            before = now
            # Spread over the round, so that other changes need not wait for all of these objects.
            keys = self.turns.next(self.cache.parents(), self.time.now().timestamp()) if self._leads else []
            for number, key in enumerate(keys):
                part = number * _PARTS_OF_ROUND // len(keys)
                loop.call_later(RESYNC_S * part / _PARTS_OF_ROUND, self.queue.add_unless_failing, key)
