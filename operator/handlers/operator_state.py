"""Wire up one operator process: settings, cache, queue, reconcilers and the resync loop.

`Settings` holds the command-line options. `OperatorState` is the composition root that kopf handlers receive as
memo. A replica without the Lease keeps its cache current and writes nothing, so it can take over immediately.
"""

import asyncio
import itertools
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.registry import Collector

from specdecode_operator.api import capture, deployment
from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.attestation.keys import SigningKey
from specdecode_operator.capture.gpu_sharing import borrows
from specdecode_operator.capture.observation import has_ended, read_capture
from specdecode_operator.capture.status import capture_attention
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster, ClusterError
from specdecode_operator.cluster.clock import ServerTime
from specdecode_operator.cluster.engine_probe import EngineProbe
from specdecode_operator.cluster.nodes import NodeFacts, NodesFrom
from specdecode_operator.cluster.observed_figures import FiguresReader, Prometheus
from specdecode_operator.cluster.resources import POD
from specdecode_operator.deployment.models.model_facts import SiteFacts
from specdecode_operator.deployment.pod_security import NONE_ALLOWED
from specdecode_operator.deployment.requeue import Requeue
from specdecode_operator.handlers.leadership import Claims, Leadership, LeaseName
from specdecode_operator.handlers.metrics import (
    CaptureCollector,
    DeploymentCollector,
    EndedCaptures,
    PolicyDecisions,
    ReconcileTimes,
    ResidualCollector,
)
from specdecode_operator.handlers.mounted_files import CalibrationFile, FactsFolder
from specdecode_operator.handlers.queue import Work, WorkQueue
from specdecode_operator.handlers.reconcile_capture import CaptureReconciler
from specdecode_operator.handlers.reconcile_deployment import Reconciler
from specdecode_operator.handlers.resync import Relist, ResyncOrder, WatchProgress
from specdecode_operator.sizing.calibration import Calibration


def own_name() -> str:
    """Return the name of this pod, or of this process where it runs elsewhere."""
    return os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"


@dataclass(frozen=True)
class Webhook:
    """How admission reviews are answered, also while another replica leads."""

    port: int
    certificate: Path
    """Folder with tls.crt and tls.key, which may come later and change."""

    refuses_what_does_not_fit: bool = False


@dataclass(frozen=True)
class Settings:
    """What one operator serves, and by which terms; the ports of its process are not among it."""

    calibration: Path | None = None
    """File that corrects estimates; it may come, change and go at any time."""

    facts: FactsFolder | None = None
    """Facts about models that the catalogue lacks; its files may come, change and go at any time."""

    host_paths: tuple[str, ...] = ()
    """Directories of nodes that objects may have their models in."""

    pod_template: frozenset[str] = NONE_ALLOWED
    """What podTemplate of objects may ask for beyond the policy."""

    prometheus: Prometheus | None = None
    """Asked for figures, in place of engines."""

    webhook: Webhook | None = None

    lease: LeaseName | None = None
    """Held while it works; absent: it works alone."""

    namespaces: tuple[str, ...] = ()
    """Those that it serves; none: all."""

    nodes: tuple[NodeFacts, ...] | None = None
    """Those to plan for where namespaces are named: then nothing is asked of the cluster as a whole."""

    signing_key: SigningKey | None = None
    """Signs what is attested of each rollout."""

    reconciles_told_from_s: float | None = None
    """Reconciles that take so long are told in the log."""

    @property
    def identity(self) -> str:
        """By what operators know each other: the replicas of one installation are one."""
        if self.lease is not None:
            return f"{self.lease.namespace}/{self.lease.name}"
        return own_name()

    @property
    def nodes_from(self) -> NodesFrom:
        """Where nodes to plan for are known from."""
        if not self.namespaces:
            return NodesFrom.CLUSTER
        return NodesFrom.NOWHERE if self.nodes is None else NodesFrom.FILE


IMAGE_VARIABLE = "SPECDECODE_OPERATOR_IMAGE"
"""Names the image where the operator runs in no pod, or other pods shall take it from elsewhere."""

_CONTAINER = "operator"


async def own_image(cluster: Cluster) -> str | None:
    """Return the image that the environment names, or else that of the operator's own pod; None without both.

    Its pod knows best: whoever installs it names the image in one place, whatever the tool.

    Raises
    ------
    ClusterError
        When the pod cannot be read.
    """
    if image := os.environ.get(IMAGE_VARIABLE):
        return image
    namespace, name = os.environ.get("POD_NAMESPACE"), os.environ.get("POD_NAME")
    pod = await cluster.get(POD, namespace, name) if namespace and name else None
    if pod is None:
        return None
    containers = {each["name"]: each["image"] for each in pod["spec"]["containers"]}
    return containers.get(_CONTAINER)


_STUCK_S = 300.0
_BEAT_S = 1.0
_SETTLED_AFTER_S = 5.0
"""When a replica that takes over looks at what was in order before."""
RESYNC_S = 15.0
"""How often engines are asked what they do, while there are few."""
_PARTS_OF_ROUND = 5
"""Looks of a part come one after the other, which takes half of the CPU time of looks far apart: the caches of the
processor have what they need."""

_logger = logging.getLogger(__name__)


class OperatorStuckError(Exception):
    """The process must be started anew."""


class OperatorState:
    """Cache, queue and connections, from start-up to clean-up.

    A replica that waits for the Lease sees everything and does nothing about it: when it leads, it begins at once.
    """

    def __init__(self, settings: Settings | None = None, leadership: Leadership | None = None) -> None:
        self._settings = settings or Settings()
        self._leadership = leadership
        self._leads = False
        """Whether it has had the Lease, or needs none; whether it may write now the client asks before each write."""
        self.ended = asyncio.Event()
        """Set when the work has ended and the process is to end, too."""
        self.cache = Cache()
        self.progress = WatchProgress(by_namespace=bool(self._settings.namespaces))
        self.cache.on_seen = self.progress.knows
        self.calibration = CalibrationFile(self._settings.calibration)
        self.facts = self._settings.facts or FactsFolder()
        self.figures = FiguresReader(self._settings.prometheus)
        self.time = ServerTime()
        self.queue = WorkQueue()
        self.queue.is_open = leadership is None
        nodes = None if self._settings.nodes_from is NodesFrom.CLUSTER else self._settings.nodes or ()
        self.relist = Relist(self.cache, self.namespaces, nodes, self.queue.add_calmly)
        self.turns = ResyncOrder(RESYNC_S)
        self.residuals = ResidualCollector()
        self.ended_captures = EndedCaptures()
        self.policy_decisions = PolicyDecisions()
        self.reconcile_times = ReconcileTimes(self._settings.reconciles_told_from_s)
        self._tasks: list[asyncio.Task[None]] = []
        self._last_beat_s = 0.0
        """When the event loop turned last, on the monotonic clock."""
        self._next_beat: asyncio.TimerHandle | None = None
        self._connections = AsyncExitStack()
        self._end: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect, see everything, and begin to work or to wait for the Lease.

        Raises
        ------
        ClusterError
            When the cluster cannot be reached or looked at; may be called again.
        """
        await self._connections.aclose()
        may_write = (lambda: True) if self._leadership is None else self._leadership.may_write
        cluster = await Cluster.connect(may_write, self.time)
        self._connections.push_async_callback(cluster.close)
        probe = EngineProbe()
        self._connections.push_async_callback(probe.close)
        claims = Claims(cluster, self.namespaces, self._settings.identity)
        if not self.namespaces:
            await claims.look()
        await self.relist.everything(cluster)
        image = await own_image(cluster)
        reconciler = Reconciler(
            cluster,
            self.cache,
            probe,
            self.residuals,
            self.calibration,
            facts=self.facts,
            policy_decisions=self.policy_decisions,
            clock=self.time,
            host_paths=self._settings.host_paths,
            pod_template=self._settings.pod_template,
            operator_image=image,
            figures=self.figures,
            nodes_from=self._settings.nodes_from,
            signing_key=self._settings.signing_key,
        )
        captures = CaptureReconciler(
            cluster,
            self.cache,
            reconciler,
            self.ended_captures,
            image,
            clock=self.time,
            clusterwide=not self.namespaces,
        )

        async def reconcile(key: Key) -> None:
            if not claims.serves(key.namespace):
                return
            await self.facts.look()
            asked = Requeue()
            try:
                with self.reconcile_times.measured(key):
                    if key.kind == deployment.KIND:
                        asked = await reconciler.reconcile(key)
                    else:
                        await captures.reconcile(key)
                        asked = self._asked_by_capture(key)
            finally:  # also of a look that failed: first in the line, it would keep others from their turn
                if self.cache.parent(key) is None:
                    self.turns.forget(key)
                else:
                    self.turns.looked(key, asked)

        self._beat()
        self._tasks = [
            asyncio.create_task(self._work(claims, reconcile)),
            asyncio.create_task(self._resync(cluster, claims)),
        ]

    def end(self) -> None:
        """Begin to end: first the work and the Lease, for which another waits, then the process."""

        async def end() -> None:
            try:
                await self.stop()
            finally:
                self.ended.set()

        self._end = self._end or asyncio.create_task(end())

    async def stop(self) -> None:
        """End the work, give claims and Lease back, and close all connections; twice is once."""
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
        """Return all that is said at /metrics."""
        of_objects = (CaptureCollector(self.cache), DeploymentCollector(self.cache))
        return (
            self.residuals,
            self.ended_captures,
            self.policy_decisions,
            self.reconcile_times,
            self.turns,
            *of_objects,
        )

    def check(self) -> None:
        """Raise when a background task has ended or hangs: the operator is of no use then.

        Any thread may ask.
        """
        if any(task.done() for task in self._tasks):
            raise OperatorStuckError("a background task of the operator has ended")
        if self._tasks and time.monotonic() - self._last_beat_s > _STUCK_S:
            raise OperatorStuckError(f"the event loop has not turned for more than {_STUCK_S:.0f} s")
        if stalled := self.progress.stalled():
            raise OperatorStuckError(stalled)
        # A long queue that gets shorter is work.
        if min(self.queue.longest_wait_s(), self.queue.idle_s()) > _STUCK_S:
            raise OperatorStuckError(f"an object has waited for more than {_STUCK_S:.0f} s, and nothing was done")

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Those that it serves; none: all."""
        return self._settings.namespaces

    @property
    def has_started(self) -> bool:
        """Whether it has connected and seen everything."""
        return bool(self._tasks)

    def add_all(self, namespace: str | None = None) -> None:
        """Ask for a look at every SpecDecodeDeployment, or at every one of a namespace."""
        for key in self.cache.parents(deployment.KIND):
            if namespace in (None, key.namespace):
                self.queue.add_calmly(key)

    def add_related(self, key: Key, ask: Callable[[Key], None]) -> None:
        """Ask for a look at a SpecDecodeDeployment and its captures: they wait for each other."""
        for body in self.cache.captures_of(key):
            ask(Key(key.namespace, body["metadata"]["name"], capture.KIND))
        if self.cache.parent(key) is not None:
            ask(key)

    def add_keeping_captures(self) -> None:
        """Ask for a look at every capture that keeps its deployment's engines, and has not ended."""
        for key in self.cache.parents(capture.KIND):
            body = self.cache.parent(key)
            if body is not None and not borrows(body.get("spec") or {}) and not has_ended(body):
                self.queue.add_calmly(key)

    async def _work(self, claims: Claims, work: Work) -> None:
        """Work off the queue once this replica leads: first what nobody has looked at as it is now, then the rest."""
        if self._leadership is not None:
            await self._leadership.led()
        self._leads = self.queue.is_open = True
        self._connections.push_async_callback(claims.release)
        if self.namespaces:  # else it has looked while it waited, for that is no write
            await claims.look()
        for key in self.cache.parents():
            body = self.cache.parent(key)
            if body is not None and not _is_settled(body):
                self.queue.add(key)
        if self._leadership is None:
            self._add_everything()
        else:  # the others are as they were told to be: their first looks, all at once, would only hold up these
            asyncio.get_running_loop().call_later(_SETTLED_AFTER_S, self._add_everything)
        await self.queue.run(work)

    def _add_everything(self) -> None:
        for key in self.cache.parents():
            self.queue.add_calmly(key)

    def _beat(self) -> None:
        """Show that the event loop turns."""
        self._last_beat_s = time.monotonic()
        self._next_beat = asyncio.get_running_loop().call_later(_BEAT_S, self._beat)

    async def _resync(self, cluster: Cluster, claims: Claims) -> None:
        """One task for all objects: kopf's timers and daemons would put finalizers on them."""
        shared = await self._shared()
        for round_ in itertools.count():
            await asyncio.sleep(RESYNC_S)
            if self._leads or not self.namespaces:
                await claims.look()
            try:
                await self.relist.in_round(round_, cluster)
            except ClusterError as error:
                _logger.warning("a list is put off: %s", error)
            before, shared = shared, await self._shared()
            if before != shared:
                self.add_all()
            # In parts through the round: what others change meanwhile need not wait for all of them.
            keys, loop = self._next_keys() if self._leads else [], asyncio.get_running_loop()
            for number, key in enumerate(keys):
                part = number * _PARTS_OF_ROUND // len(keys)
                loop.call_later(RESYNC_S * part / _PARTS_OF_ROUND, self.queue.add_unless_failing, key)

    def _next_keys(self) -> list[Key]:
        return self.turns.next(self.cache.parents(), self.time.now().timestamp())

    async def _shared(self) -> tuple[Calibration, Mapping[str, SiteFacts], bool]:
        """Return what decisions depend on and no watch tells of."""
        await self.facts.look()
        return self.calibration.read(), self.facts.known, self.cache.has_groups

    def _asked_by_capture(self, key: Key) -> Requeue:
        """Return when a capture is to be looked at again without an event."""
        body = self.cache.parent(key)
        return Requeue(is_close=False) if body is None else capture_attention(read_capture(body))


def _is_settled(body: Body) -> bool:
    """Whether the status of an object speaks of its spec as it is now."""
    return bool((body.get("status") or {}).get("observedGeneration") == body["metadata"]["generation"])
