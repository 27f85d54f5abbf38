"""Run the operator process: kopf settings, login, start, stop and health.

`run_operator` implements `specdecode operator`. It serves /livez, /readyz and /metrics on separate threads, and kopf
runs the watches. The login session has another response class, because kopf's own fails on objects that are too large
or too deeply nested.

Each event of a watch updates the cache and queues the objects to reconcile. No handler keeps state in kopf, so kopf
writes neither annotations nor finalizers. Create, update, resume and child events all trigger the same reconcile.
"""

import asyncio
import gc
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from http import HTTPStatus
from itertools import repeat
from typing import Any, Final

import aiohttp
import kopf
from prometheus_client.registry import Collector

from specdecode_operator.api import base, capture, deployment, training
from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.capture.gpu_sharing import borrows
from specdecode_operator.cluster.cache import is_model_facts
from specdecode_operator.cluster.client import ClusterError
from specdecode_operator.cluster.resources import MANAGED_BY_LABEL, MANAGER, NODE, OWNED_SELECTOR, WATCHED
from specdecode_operator.handlers.admission_findings import Terms
from specdecode_operator.handlers.http_server import BoundedHandler, BoundedServer
from specdecode_operator.handlers.leadership import LeaderCollector, Leadership, end_at_once, holding
from specdecode_operator.handlers.metrics import AdmissionCollector, serve_metrics
from specdecode_operator.handlers.operator_state import OperatorState, OperatorStuckError
from specdecode_operator.handlers.settings import Settings
from specdecode_operator.handlers.webhook import VALIDATE, answer, serve_admission
from specdecode_operator.handlers.webhook_certificate import CertificateFolder
from specdecode_operator.problems import OneLine
from specdecode_operator.untrusted import bounded_event, read_answer


async def on_deployment(event: kopf.RawEvent, memo: OperatorState, **_: Any) -> None:
    """Queue a SpecDecodeDeployment that was created, changed or deleted, and its captures."""
    is_echo = memo.cache.knows_parent(deployment.KIND, dict(event["object"]))
    key = _store(event, deployment.KIND, memo)
    if key is not None:
        ask = memo.queue.add_soon if is_echo else _queueing(event, memo)
        ask(key)  # Also if it was deleted, so that the reconciler drops its state.
        memo.add_related(key, ask)


async def on_capture(event: kopf.RawEvent, memo: OperatorState, **_: Any) -> None:
    """Queue a SpecDecodeCapture that was created, changed or deleted, and the deployment that may lend it GPUs."""
    key = _store(event, capture.KIND, memo)
    if key is None:
        return
    ask, spec = _queueing(event, memo), event["object"].get("spec") or {}
    ask(key)  # Also if it was deleted.
    if name := spec.get("deployment"):
        memo.add_related(Key(key.namespace, name), ask)
    if borrows(spec):
        memo.add_keeping_captures()  # They wait while engines have lent GPUs or need them back.


async def on_training(event: kopf.RawEvent, memo: OperatorState, **_: Any) -> None:
    """Queue a SpecDecodeTraining that was created, changed or deleted, and those that may wait for its claim."""
    key = _store(event, training.KIND, memo)
    if key is None:
        return
    ask = _queueing(event, memo)
    ask(key)  # Also if it was deleted.
    if name := (event["object"].get("spec") or {}).get("deployment"):
        for body in memo.cache.trainings_of(Key(key.namespace, name)):
            ask(Key(key.namespace, body["metadata"]["name"], training.KIND))


def _store(event: kopf.RawEvent, kind: str, memo: OperatorState) -> Key | None:
    """Store a parent; return its key, or None if a list returns a known version."""
    memo.relist.watched.add(kind)
    body = _body(event, kind, memo)
    if event["type"] is None and memo.cache.knows_parent(kind, body):
        return None
    if event["type"] != "DELETED":
        return memo.cache.put_parent(kind, body)
    key = memo.cache.drop_parent(kind, body)
    memo.queue.forget(key)
    return key


def _body(event: kopf.RawEvent, kind: str, memo: OperatorState) -> dict[str, Any]:
    """Return the object of an event, and record the progress of its watch."""
    body: dict[str, Any] = dict(event["object"])
    memo.progress.brings(kind, body)
    if event["type"] is None:  # The watch restarted with a list, which lacks deleted objects.
        memo.relist.due.add(kind)
    return body


def _queueing(event: kopf.RawEvent, memo: OperatorState) -> Callable[[Key], None]:
    """Return the function that queues the object; a listed object is not urgent, because it may be unchanged."""
    return memo.queue.add_calmly if event["type"] is None else memo.queue.add


async def on_node(event: kopf.RawEvent, memo: OperatorState, **_: Any) -> None:
    """Queue all deployments if the GPUs of the cluster changed."""
    body = _body(event, NODE.kind, memo)
    if memo.cache.drop_node(body) if event["type"] == "DELETED" else memo.cache.put_node(body):
        memo.add_all()


async def on_child(event: kopf.RawEvent, resource: kopf.Resource, memo: OperatorState, **_: Any) -> None:
    """Queue the owner of a child or a pod, or the deployments of a namespace if its model facts changed."""
    kind = resource.kind or ""
    body = _body(event, kind, memo)
    if event["type"] is None and memo.cache.knows(kind, body):
        return
    owners = [memo.cache.drop(kind, body)] if event["type"] == "DELETED" else memo.cache.put(kind, body)
    for key in owners:
        if key is None or memo.cache.parent(key) is None:
            continue
        if key.kind == deployment.KIND:
            memo.add_related(key, memo.queue.add_calmly if event["type"] is None else memo.queue.add_soon)
        else:
            _queueing(event, memo)(key)
    if is_model_facts(kind, body):
        memo.add_all(body["metadata"]["namespace"])


def register_watches(registry: kopf.OperatorRegistry, *, nodes: bool) -> None:
    """Register the event handlers; the handler of nodes only if the operator may list them."""
    kopf.on.event(base.GROUP, base.VERSION, deployment.PLURAL, registry=registry)(on_deployment)
    kopf.on.event(base.GROUP, base.VERSION, capture.PLURAL, registry=registry)(on_capture)
    kopf.on.event(base.GROUP, base.VERSION, training.PLURAL, registry=registry)(on_training)
    if nodes:
        kopf.on.event("nodes", registry=registry)(on_node)
    for resource in WATCHED:
        names = filter(None, [resource.group, resource.api_version.rpartition("/")[2], resource.plural])
        kopf.on.event(*names, labels={MANAGED_BY_LABEL: MANAGER}, registry=registry)(on_child)


_ERROR: Final = b'{"type":"ERROR"'
_RELIST: Final = b'{"type":"ERROR","object":{"code":410}}'
"""The only error after which kopf lists and watches again. After any other error, kopf ends the operator."""


async def login(**kwargs: Any) -> kopf.AiohttpSession | None:
    """Log in as the pod's service account, or with KUBECONFIG outside a cluster."""
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
            headers=info.as_http_headers(),
            proxy=info.proxy_url,
            trust_env=info.trust_env,
            response_class=_Answer,
        ),
    )


class _Answer(aiohttp.ClientResponse):
    """Response for kopf: JSON with limits on depth and size, or the lines of a watch."""

    async def start(self, connection: Any) -> "_Answer":
        await super().start(connection)
        self.content = _Lines(self.content)  # type: ignore[assignment]  # Has what kopf uses
        return self

    async def json(self, **_: Any) -> Any:
        return read_answer(await self.read())


class _Lines:
    """Stream of watch events within the limits of kopf's JSON parser."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Yield complete lines of any length; drop an incomplete line at the end of a connection."""
        rest = bytearray()
        async for chunk in self._content.iter_chunked(size):
            rest += chunk
            if b"\n" in chunk:
                *lines, tail = bytes(rest).split(b"\n")
                rest = bytearray(tail)
                events = (_RELIST if line.startswith(_ERROR) else bounded_event(line) for line in lines)
                yield b"".join(event + b"\n" for event in events)


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
    # If kopf stores progress, it goes to the status, so that metadata stays the same as in Git.
    settings.persistence.finalizer = "specdecode.io/kopf"
    settings.persistence.progress_storage = kopf.StatusProgressStorage(field="status.kopf.progress")
    settings.persistence.diffbase_storage = _NothingCompared()
    settings.posting.enabled = False  # The operator posts its own Events about conditions.
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 30
    settings.watching.chunk_size = 100  # A chunk is in memory as text and as parsed values.
    settings.watching.reconnect_backoff = 1.0
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = _Backoffs()
    settings.process.ultimate_exiting_timeout = _LAST_S
    # kopf's workers hold their object for this time. After a start, each object and child has a worker.
    settings.queueing.idle_timeout = 0.1
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


class _NothingCompared(kopf.DiffBaseStorage):
    """Disables diffs, because kopf would copy each object twice per event for them."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return None

    def store(self, **_: Any) -> None:
        pass


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
