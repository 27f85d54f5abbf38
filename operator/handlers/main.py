"""Run the operator process: kopf settings, login, start, stop and health.

`run_operator` implements `specdecode operator`. It serves /livez, /readyz and /metrics on separate threads, and kopf
runs the watches (`watched_objects`).

Each event of a watch updates the cache and queues the objects to reconcile. kopf never gets the objects, so it writes
neither annotations nor finalizers. Create, update, resume and child events all trigger the same reconcile.
"""

import asyncio
import ctypes
import gc
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from itertools import repeat
from typing import Any, Final

import aiohttp
import kopf
from prometheus_client.registry import Collector

from specdecode_operator.api import base, capture, deployment, training
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
from specdecode_operator.cluster.resources import (
    CONFIG_MAP,
    MANAGED_BY_LABEL,
    MANAGER,
    NODE,
    OUR_KINDS,
    OWNED_SELECTOR,
    POD,
    RECORDER_NAME,
    SHARED_CONFIG_MAPS,
    SPECDECODE_DEPLOYMENT,
    WATCHED,
)
from specdecode_operator.deployment.live_recorder import is_recorder
from specdecode_operator.deployment.requeue import Requeue
from specdecode_operator.handlers.admission_findings import Terms
from specdecode_operator.handlers.http_server import BoundedHandler, BoundedServer
from specdecode_operator.handlers.leadership import Claims, LeaderCollector, Leadership, end_at_once, holding
from specdecode_operator.handlers.metrics import AdmissionCollector, OperatorMetrics, serve_metrics
from specdecode_operator.handlers.queue import WorkQueue
from specdecode_operator.handlers.reconcile_capture import CaptureReconciler
from specdecode_operator.handlers.reconcile_deployment import Reconciler
from specdecode_operator.handlers.reconcile_job import Servings, Shared
from specdecode_operator.handlers.reconcile_training import TrainingReconciler
from specdecode_operator.handlers.resync import Relist, ResyncOrder, WatchProgress
from specdecode_operator.handlers.settings import Settings
from specdecode_operator.handlers.snapshot import Snapshot
from specdecode_operator.handlers.watched_objects import WatchedObjects
from specdecode_operator.handlers.webhook import VALIDATE, answer, serve_admission
from specdecode_operator.handlers.webhook_certificate import CertificateFolder
from specdecode_operator.problems import OneLine
from specdecode_operator.training.observation import read_training
from specdecode_operator.training.status import training_attention
from specdecode_operator.untrusted import mapping

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


class Reconcilers:
    """The reconcilers of all kinds."""

    def __init__(
        self, cluster: Cluster, cache: Cache, probe: EngineProbe, metrics: OperatorMetrics, settings: Settings
    ) -> None:
        self._cache = cache
        self.deployments = Reconciler(cluster, cache, probe, metrics, settings)
        shared = Shared(cluster, cache, self.deployments, metrics, settings, Servings(cache))
        self._runs: dict[str, CaptureReconciler | TrainingReconciler] = {
            capture.KIND: CaptureReconciler(shared),
            training.KIND: TrainingReconciler(shared),
        }

    async def reconcile(self, key: Key) -> Requeue:
        """Reconcile an object; return when to requeue it."""
        if key.kind == deployment.KIND:
            return await self.deployments.reconcile(key)
        await self._runs[key.kind].reconcile(key)
        body = self._cache.parent(key)
        if body is None:
            return Requeue(is_close=False)
        if key.kind == training.KIND:
            return training_attention(read_training(body))
        return capture_attention(read_capture(body))

    def forget(self, key: Key) -> None:
        """Drop the in-memory state of an object."""
        (self.deployments if key.kind == deployment.KIND else self._runs[key.kind]).forget(key)


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
        kinds = {each.kind for each in (NODE, *WATCHED, *OUR_KINDS.values())}
        self.objects = WatchedObjects(kinds, self._has_listed, self._has_written, self.handle)
        self.time = ServerTime()
        self.queue = WorkQueue()
        self.queue.is_open = leadership is None
        nodes = None if self.settings.nodes_from is NodesFrom.CLUSTER else self.settings.nodes or ()
        self.relist = Relist(self.cache, self.namespaces, nodes, self.queue.add_calmly)
        self.turns = ResyncOrder(RESYNC_S)
        self.metrics = OperatorMetrics(self.cache, self.settings.reconciles_told_from_s)
        self._tasks: list[asyncio.Task[None]] = []
        self.settled = set[Key]()
        """Objects that an earlier process has settled, and that this one has not reconciled."""
        self.may_log_in_s = 0.0
        """Earliest time of the next login, on the clock of the event loop."""
        self._inputs: object = None
        """Unwatched inputs as of the last resync round; a change queues all deployments."""
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
        reconcilers = Reconcilers(cluster, self.cache, probe, self.metrics, settings)
        snapshot = Snapshot(cluster, settings.lease, self.cache, settings) if settings.lease else None
        self._beat()
        self._tasks = [
            asyncio.create_task(self._work(claims, reconcilers, snapshot)),
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

    def watch_brings(self, kind: str, body: Body, *, is_listed: bool) -> None:
        """Record that a watch works; ``is_listed`` if it restarted with a list, which lacks deleted objects."""
        self.progress.brings(kind, body)
        if kind in OUR_KINDS:
            self.relist.watched.add(kind)
        if is_listed:
            self.relist.due.add(kind)

    def _has_listed(self, kind: str, body: Body) -> bool:
        """Return whether the cache has an object of a list that kopf requested."""
        if kind == NODE.kind:
            return False
        is_known = self.cache.knows_parent(kind, body) if kind in OUR_KINDS else self.cache.knows(kind, body)
        if is_known:
            self.watch_brings(kind, body, is_listed=True)
        return is_known

    def _has_written(self, kind: str, body: Body) -> bool:
        """Return whether an event shows a version that the cache has, usually from the response to a write.

        What follows from the version is queued.
        """
        if kind == deployment.KIND and self.cache.knows_parent(kind, body):
            self.watch_brings(kind, body, is_listed=False)
            metadata = body["metadata"]
            # The operator wrote the status, so only others may act on it.
            self.add_runs(Key(metadata["namespace"], metadata["name"]), self.queue.add_soon)
            return True
        if kind in (NODE.kind, *OUR_KINDS) or _may_be_shared(kind, body) or not self.cache.knows(kind, body):
            return False
        self.watch_brings(kind, body, is_listed=False)
        self.add_owners([self.cache.owner(kind, body)], is_listed=False)
        return True

    def handle(self, type_: str | None, body: Body) -> None:
        """Update the cache for an object, and queue the objects that depend on it.

        ``type_`` is the event type, or None for an object of a list that kopf requested.
        """
        kind = body["kind"]
        try:
            self.watch_brings(kind, body, is_listed=type_ is None)
            if kind in OUR_KINDS:
                self._parent_changed(type_, kind, body)
            elif kind == NODE.kind:
                self._node_changed(type_, body)
            else:
                self._child_changed(type_, kind, body)
        except Exception:
            # kopf would end the operator. The next list reads the object again.
            metadata = mapping(body, "metadata")
            _logger.exception(
                "failed to handle an event of %s %s/%s", kind, metadata.get("namespace"), metadata.get("name")
            )
            self.relist.due.add(kind)

    def _parent_changed(self, type_: str | None, kind: str, body: Body) -> None:
        """Store or drop a custom resource, and queue it and the objects that may wait for it.

        A deleted object is queued too, so that its reconciler drops its state.
        """
        if type_ == "DELETED":
            key = self.cache.drop_parent(kind, body)
            self.queue.forget(key)
        else:
            key = self.cache.put_parent(kind, body)
        # A listed object is not urgent, because it may be unchanged.
        ask = self.queue.add_calmly if type_ is None else self.queue.add
        ask(key)
        spec = body.get("spec") or {}
        if kind == deployment.KIND:
            self.add_runs(key, ask)
        elif name := spec.get("deployment"):
            self.add_related(Key(key.namespace, str(name)), ask)
        if kind == capture.KIND and borrows(spec):
            self.add_keeping_captures()  # They wait while engines have lent GPUs or need them back.

    def _node_changed(self, type_: str | None, body: Body) -> None:
        """Queue all deployments if the GPUs of the cluster changed."""
        if self.cache.drop_node(body) if type_ == "DELETED" else self.cache.put_node(body):
            self.add_all()

    def _child_changed(self, type_: str | None, kind: str, body: Body) -> None:
        owners = [self.cache.drop(kind, body)] if type_ == "DELETED" else self.cache.put(kind, body)
        self.add_owners(owners, is_listed=type_ is None)
        if _may_be_shared(kind, body) and (type_ == "DELETED" or not is_recorder(body)):
            self.add_all(body["metadata"]["namespace"])

    def add_owners(self, owners: Iterable[Key | None], *, is_listed: bool) -> None:
        """Queue the owners of a child or a pod."""
        for key in owners:
            if key is None or self.cache.parent(key) is None:
                continue
            if key.kind == deployment.KIND:
                self.add_related(key, self.queue.add_calmly if is_listed else self.queue.add_soon)
            else:
                (self.queue.add_calmly if is_listed else self.queue.add)(key)

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

    def _add_namespaces(self, namespaces: Collection[str]) -> None:
        """Queue all objects in namespaces that this operator has started or stopped serving."""
        for key in self.cache.parents():
            if key.namespace in namespaces:
                self.queue.add_calmly(key)

    def add_related(self, key: Key, ask: Callable[[Key], None]) -> None:
        """Queue a SpecDecodeDeployment, its captures and its trainings, because they wait for each other."""
        self.add_runs(key, ask)
        if self.cache.parent(key) is not None:
            ask(key)

    def add_runs(self, key: Key, ask: Callable[[Key], None]) -> None:
        """Queue the captures and trainings of a SpecDecodeDeployment."""
        for body in self.cache.captures_of(key):
            ask(Key(key.namespace, body["metadata"]["name"], capture.KIND))
        for body in self.cache.trainings_of(key):
            ask(Key(key.namespace, body["metadata"]["name"], training.KIND))

    def add_keeping_captures(self) -> None:
        """Queue all captures that have not ended and do not borrow the GPUs of their deployment."""
        for key in self.cache.parents(capture.KIND):
            body = self.cache.parent(key)
            if body is not None and not borrows(body.get("spec") or {}) and not has_ended(body):
                self.queue.add_calmly(key)

    async def _work(self, claims: Claims, reconcilers: Reconcilers, snapshot: Snapshot | None) -> None:
        """Process the queue when this replica leads: first objects with a changed spec, then the rest."""
        if self._leadership is not None:
            await self._leadership.led()
        self._leads = self.queue.is_open = True
        self._connections.push_async_callback(claims.release)
        if self.namespaces:  # Otherwise `_resync` has read the claims while waiting.
            await claims.look()
        if snapshot is not None:
            self.settled = await snapshot.settled(self.cache.parents(deployment.KIND))
            for key in self.settled:
                self.turns.looked(key, Requeue())
        for key in self.cache.parents():
            body: Body = self.cache.parent(key) or {}
            if body and (body.get("status") or {}).get("observedGeneration") != body["metadata"]["generation"]:
                self.queue.add(key)
        if self._leadership is None:
            self._add_everything()
        else:  # Reconciling the unchanged objects at once would delay the changed ones.
            asyncio.get_running_loop().call_later(_SETTLED_AFTER_S, self._add_everything)
        try:
            work = partial(self._reconcile, claims, reconcilers)
            await self.queue.run(work, partial(self._needs_reconcile, reconcilers.deployments))
        finally:
            if snapshot is not None:
                # If an input changed after the last resync round, some decisions are out of date.
                is_current = self._inputs == self._unwatched_inputs()
                settled = {*self.settled, *reconcilers.deployments.settled()} if is_current else set()
                await snapshot.keep([key for key in settled if not self.queue.is_pending(key)])

    async def _reconcile(self, claims: Claims, reconcilers: Reconcilers, key: Key) -> None:
        """Reconcile an object, or drop its state if another operator serves its namespace."""
        self.settled.discard(key)
        if not claims.serves(key.namespace):
            reconcilers.forget(key)
            self._end_turn(key, Requeue(is_close=False))
            return
        await self.settings.facts.look()
        requeue = Requeue()
        try:
            with self.metrics.measured(key):
                requeue = await reconcilers.reconcile(key)
        finally:  # Also after a failure; otherwise the object would stay first in the resync order.
            self._end_turn(key, requeue)
        if requeue.is_due:
            self.queue.add_soon(key)

    def _end_turn(self, key: Key, requeue: Requeue) -> None:
        """Put an object into the resync order again, unless it was deleted."""
        if self.cache.parent(key) is None:
            self.turns.forget(key)
        else:
            self.turns.looked(key, requeue)

    async def _needs_reconcile(self, reconciler: Reconciler, key: Key, is_turn: bool) -> bool:
        """Return whether a queued object must be reconciled. It is queued for its resync turn or after an event.

        In its turn, a settled object is only polled. Events of the operator's own writes, and most events of starting
        engines, need no reconcile.
        """
        if key.kind != deployment.KIND:
            return True
        if not is_turn:
            return reconciler.needs_reconcile(key)
        requeue = await self.metrics.measured_poll(reconciler.look(key))
        if requeue is not None:
            self.turns.looked(key, requeue)
        return requeue is None

    def _add_everything(self) -> None:
        """Queue all objects except those that an earlier process has settled, whose engines are scraped in turn."""
        for key in self.cache.parents():
            if key not in self.settled:
                self.queue.add_calmly(key)
        served = {key.namespace for key in self.cache.parents(deployment.KIND)}
        for namespace in self.cache.namespaces_with(RECORDER_NAME) - served:
            # As for its last object, which was deleted while no operator ran.
            if self.relist.has_listed(SPECDECODE_DEPLOYMENT, namespace):
                self.queue.add_calmly(Key(namespace, RECORDER_NAME))

    def _beat(self) -> None:
        """Record that the event loop is running."""
        self._last_beat_s = time.monotonic()
        self._next_beat = asyncio.get_running_loop().call_later(_BEAT_S, self._beat)

    def _unwatched_inputs(self) -> object:
        """Return the inputs of decisions that no watch reports, as they were last read."""
        return self.settings.calibration.known, self.settings.facts.known, self.cache.optional_kinds

    async def _resync(self, cluster: Cluster, claims: Claims) -> None:
        """Resync all objects in one task, because kopf's timers and daemons would add finalizers."""
        loop = asyncio.get_running_loop()
        await self.settings.read_files()
        self._inputs = self._unwatched_inputs()
        for round_ in itertools.count():
            await asyncio.sleep(RESYNC_S)
            if self._leads or not self.namespaces:
                self._add_namespaces(await claims.look())
            try:
                await self.relist.in_round(round_, cluster)
            except ClusterError as error:
                _logger.warning("listing failed, will retry: %s", error)
            if round_ % _ROUNDS_TO_TRIM == 0:
                _return_free_memory()
            await self.settings.read_files()
            if self._inputs != (now := self._unwatched_inputs()):
                self.add_all()
            self._inputs = now
            # Spread over the round, so that other changes need not wait for all of these objects.
            keys = self.turns.next(self.cache.parents(), self.time.now().timestamp()) if self._leads else []
            for number, key in enumerate(keys):
                part = number * _PARTS_OF_ROUND // len(keys)
                loop.call_later(RESYNC_S * part / _PARTS_OF_ROUND, self.queue.add_turn, key)


async def on_event(**_: Any) -> None:
    """Do nothing. kopf watches only kinds that have a handler; `OperatorState.handle` gets their objects."""


def _may_be_shared(kind: str, body: Body) -> bool:
    return kind == CONFIG_MAP.kind and body["metadata"]["name"] in SHARED_CONFIG_MAPS


def register_watches(registry: kopf.OperatorRegistry, *, nodes: bool) -> None:
    """Make kopf watch custom resources, children and pods, and nodes if the operator may list them."""
    for plural in (deployment.PLURAL, capture.PLURAL, training.PLURAL):
        kopf.on.event(base.GROUP, base.VERSION, plural, registry=registry)(on_event)
    if nodes:
        kopf.on.event("nodes", registry=registry)(on_event)
    for resource in WATCHED:
        names = filter(None, [resource.group, resource.api_version.rpartition("/")[2], resource.plural])
        kopf.on.event(*names, labels={MANAGED_BY_LABEL: MANAGER}, registry=registry)(on_event)


async def login(memo: OperatorState, **kwargs: Any) -> kopf.AiohttpSession | None:
    """Log in as the pod's service account, or with KUBECONFIG outside a cluster."""
    # After HTTP 401, kopf logs in again at once, even if the new session gets it, too.
    loop = asyncio.get_running_loop()
    await asyncio.sleep(memo.may_log_in_s - loop.time())
    memo.may_log_in_s = loop.time() + _RETRY_S
    info = kopf.login_with_service_account(**kwargs)
    if info is not None:
        # Use the address, as client libraries do, because kopf's host name needs a cluster DNS.
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        info = replace(info, server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")
    else:
        info = kopf.login_with_kubeconfig(**kwargs)
    if info is None:
        return None
    return kopf.AiohttpSession(
        server=info.server,
        priority=info.priority,
        default_namespace=info.default_namespace,
        expiration=info.expiration,
        aiohttp_session=aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
            headers={**info.as_http_headers(), "Accept-Encoding": "identity"},  # as in `Cluster.connect`
            proxy=info.proxy_url,
            trust_env=info.trust_env,
            response_class=memo.objects.response_class(),
        ),
    )


_RETRY_S = 5
_LAST_S: Final = 10.0
"""Exit timeout after a task of kopf failed, because other tasks may wait forever for a closed session."""
_HEALTH_PATHS = ("/livez", "/readyz", "/healthz")


async def start(settings: kopf.OperatorSettings, memo: OperatorState, **_: Any) -> None:
    """Configure kopf, connect, and start the work."""
    configure(settings)
    # Avoids cluster-wide requests if namespaces are named. Kinds that are installed later are listed, not watched.
    settings.scanning.disabled = bool(memo.namespaces)
    try:
        await memo.start()
    except ClusterError as error:
        raise kopf.TemporaryError(str(error), delay=_RETRY_S) from error
    # kopf's own handlers end watches and workers first, and meanwhile another replica would wait for the Lease.
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, memo.end)


async def stop(memo: OperatorState, **_: Any) -> None:
    """Stop the work."""
    await memo.stop()


def register_lifecycle(registry: kopf.OperatorRegistry) -> None:
    """Register start, stop and login."""
    kopf.on.startup(registry=registry)(start)
    kopf.on.cleanup(registry=registry)(stop)
    kopf.on.login(registry=registry)(login)


def configure(settings: kopf.OperatorSettings) -> None:
    """Set the kopf settings that the handlers rely on."""
    settings.posting.enabled = False  # The operator posts its own Events about conditions.
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 30
    settings.watching.chunk_size = 100  # A chunk is in memory as text and as parsed values.
    settings.watching.reconnect_backoff = 1.0
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = _Backoffs()
    settings.process.ultimate_exiting_timeout = _LAST_S
    # Watch only objects with our label, because clusters have many other pods.
    for resource in WATCHED:
        settings.watching.label_selectors[resource.group, resource.plural] = OWNED_SELECTOR


class _Backoffs:
    """Endless backoff, in seconds, of a list or a watch that fails.

    After the last one, kopf would end the operator, even if the operator lost its rights only in one namespace.
    """

    def __iter__(self) -> Iterator[float]:
        yield from (1, 1, 2, 3, 5, 8, 13)
        yield from repeat(21)


def serve_health(port: int, state: OperatorState, leadership: Leadership | None = None) -> None:
    """Answer /livez, /readyz and /healthz from a separate thread until the process ends.

    kopf would answer in the event loop, after the start. The probes would then fail while the loop plans hundreds of
    objects or the process gets little CPU, and the kubelet would restart the operator each time.
    """

    class Answers(BoundedHandler):
        def do_GET(self) -> None:
            """Answer /livez (whether the process hangs), /readyz and /healthz (whether it works)."""
            self.keep_place()
            status, words = HTTPStatus.NOT_FOUND, "no such path"
            if self.path in _HEALTH_PATHS:
                status, words = _health(state, leadership)
            if self.path == "/livez" and status is HTTPStatus.SERVICE_UNAVAILABLE:
                status = HTTPStatus.OK  # The process starts, or the API server is down. A restart would not help.
            self.send_response(status)
            self.end_headers()
            self.wfile.write(words.encode())

    BoundedServer(port, Answers).serve("health")


def _health(state: OperatorState, leadership: Leadership | None) -> tuple[HTTPStatus, str]:
    try:
        state.check()
    except OperatorStuckError as error:
        return HTTPStatus.INTERNAL_SERVER_ERROR, str(error)
    if not state.has_started:
        return HTTPStatus.SERVICE_UNAVAILABLE, "not connected to the API server yet"
    if leadership is None or leadership.may_write():
        return HTTPStatus.OK, "ok"
    if leadership.stands_by:
        return HTTPStatus.OK, "ok: standby; another replica holds the Lease"
    return HTTPStatus.SERVICE_UNAVAILABLE, "cannot read the lease from the API server; writes are paused"


_CHATTY_LOGGERS = ("kopf.objects", "aiohttp.access", "httpx")
"""Loggers of every watch event and every request."""

_GARBAGE_THRESHOLDS = (700, 10, 100)
"""For `gc.set_threshold`. With the default of 10 as the last, full collections with 1,000 deployments paused the
operator for 0.25 s each, and took a fifth of the CPU time of an idle one (Python 3.11)."""

_ROUNDS_TO_TRIM: Final = 4
"""Rounds of the resync from one return of free memory to the next: a minute."""
_TRIM: Final = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""None without glibc."""


def _return_free_memory() -> None:
    """Return free pages of the C library's heap to the system.

    By itself, glibc returns only the end of its heap. Lists and events leave free pages elsewhere: 9 of 132 MB after
    300 deployments were created.
    """
    if _TRIM is not None:
        _TRIM(0)


def run_operator(settings: Settings, *, health_port: int, metrics_port: int, verbose: bool = False) -> None:
    """Run the operator until SIGTERM; serve /livez, /readyz and /metrics on these ports."""
    kopf.configure(verbose=verbose)
    for handler in logging.getLogger().handlers:
        handler.addFilter(OneLine())
    if not verbose:
        for name in _CHATTY_LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
    gc.set_threshold(*_GARBAGE_THRESHOLDS)
    leadership = Leadership(settings.lease, end_at_once) if settings.lease else None
    state = OperatorState(settings, leadership)
    registry = kopf.OperatorRegistry()
    register_lifecycle(registry)
    register_watches(registry, nodes=not settings.namespaces)
    leader = LeaderCollector(leadership, "Namespaced" if settings.namespaces else "Cluster")
    serve_health(health_port, state, leadership)
    port = serve_metrics(metrics_port, leader, *state.collectors(), *_serve_webhook(settings, state))
    logging.getLogger(__name__).info("/metrics is served on port %d", port)
    with holding(leadership):
        kopf.run(
            registry=registry,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            standalone=True,
            # By default, kopf looks up the name of the process's user, which may not exist in a container.
            identity="specdecode-operator",  # type: ignore[arg-type]  # Its type is private to kopf.
            memo=state,
            stop_flag=state.ended,
        )


def _serve_webhook(settings: Settings, state: OperatorState) -> tuple[Collector, ...]:
    """Start the admission webhook, if it is configured; return its collector."""
    webhook = settings.webhook
    if webhook is None:
        return ()
    terms = Terms(
        settings.host_paths,
        settings.pod_template,
        nodes=settings.nodes or None,
        does_not_fit=not webhook.refuses_what_does_not_fit,
    )
    certificate = CertificateFolder(webhook.certificate)
    collector = AdmissionCollector(lambda: certificate.expires)

    def validate(review: object) -> Body:
        now = replace(
            terms,
            calibration=settings.calibration.read(),
            site_facts=settings.facts.read(),
            storage_classes=state.relist.storage_classes,
        )
        return answer(review, now)

    port = serve_admission(webhook.port, certificate, {VALIDATE: validate}, collector)
    logging.getLogger(__name__).info("%s is served on port %d", VALIDATE, port)
    return (collector,)
