"""Run the operator process: kopf settings, login, start, stop and health.

`run_operator` is the entry of `specdecode operator`. It serves /livez, /readyz and /metrics on their own threads
and hands watches and signals to kopf. The login session replaces kopf's response class, because kopf's own fails on
objects that are nested too deeply or are too large.

Each event of a watch updates the cache and queues the objects to reconcile. No handler keeps state in kopf, so kopf
writes neither annotations nor finalizers. Create, update, resume and child events all trigger the same reconcile.
"""

import asyncio
import dataclasses
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

from specdecode_operator.api import base, capture, deployment
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
    """Look at an object that appeared, changed or went away."""
    is_echo = memo.cache.knows_parent(deployment.KIND, dict(event["object"]))
    key = _seen(event, deployment.KIND, memo)
    if key is not None:
        ask = memo.queue.add_soon if is_echo else _asking(event, memo)
        ask(key)  # also for one that is gone, so that the reconciler forgets it
        memo.add_related(key, ask)


async def on_capture(event: kopf.RawEvent, memo: OperatorState, **_: Any) -> None:
    """Look at a capture that appeared, changed or went away, and at the deployment that may lend it its GPUs."""
    key = _seen(event, capture.KIND, memo)
    if key is None:
        return
    _asking(event, memo)(key)  # also for one that is gone
    name = (event["object"].get("spec") or {}).get("deployment")
    if name:
        memo.add_related(Key(key.namespace, name), _asking(event, memo))
    if borrows(event["object"].get("spec") or {}):
        memo.add_keeping_captures()  # they make room for engines that lend their GPUs, and for their coming back


def _seen(event: kopf.RawEvent, kind: str, memo: OperatorState) -> Key | None:
    """Remember an object of ours as it is now; return its key, or None where it was listed already as it is."""
    memo.relist.watched.add(kind)
    body = _brought(event, kind, memo)
    if event["type"] is None and memo.cache.knows_parent(kind, body):
        return None
    if event["type"] == "DELETED":
        key = memo.cache.drop_parent(kind, body)
        memo.queue.forget(key)
    else:
        key = memo.cache.put_parent(kind, body)
    return key


def _brought(event: kopf.RawEvent, kind: str, memo: OperatorState) -> dict[str, Any]:
    """Return what a watch has brought, and note that it did."""
    body: dict[str, Any] = dict(event["object"])
    memo.progress.brings(kind, body)
    if event["type"] is None:  # it began anew, and listed what there is
        memo.relist.due.add(kind)
    return body


def _asking(event: kopf.RawEvent, memo: OperatorState) -> Callable[[Key], None]:
    """Return how to ask for a look: of what is only listed, such as at the start, nothing need have changed."""
    return memo.queue.add_calmly if event["type"] is None else memo.queue.add


async def on_node(event: kopf.RawEvent, memo: OperatorState, **_: Any) -> None:
    """Plan anew when the GPUs of the cluster changed."""
    body = _brought(event, NODE.kind, memo)
    if memo.cache.drop_node(body) if event["type"] == "DELETED" else memo.cache.put_node(body):
        memo.add_all()


async def on_child(event: kopf.RawEvent, resource: kopf.Resource, memo: OperatorState, **_: Any) -> None:
    """Look at the object that a child or a pod belongs to, or at all that share what is known of models."""
    body = _brought(event, resource.kind or "", memo)
    if event["type"] is None and memo.cache.knows(resource.kind or "", body):
        return
    if event["type"] == "DELETED":
        owner = memo.cache.drop(resource.kind or "", body)
        owners = [] if owner is None else [owner]
    else:
        owners = memo.cache.put(resource.kind or "", body)
    for key in owners:
        if memo.cache.parent(key) is None:
            continue
        if key.kind == deployment.KIND:
            memo.add_related(key, memo.queue.add_calmly if event["type"] is None else memo.queue.add_soon)
        else:
            _asking(event, memo)(key)
    if is_model_facts(resource.kind or "", body):
        memo.add_all(body["metadata"]["namespace"])


def register_watches(registry: kopf.OperatorRegistry, *, nodes: bool) -> None:
    """Have all of them called; of nodes where they may be looked at."""
    kopf.on.event(base.GROUP, base.VERSION, deployment.PLURAL, registry=registry)(on_deployment)
    kopf.on.event(base.GROUP, base.VERSION, capture.PLURAL, registry=registry)(on_capture)
    if nodes:
        kopf.on.event("nodes", registry=registry)(on_node)
    for resource in WATCHED:
        names = filter(None, [resource.group, resource.api_version.rpartition("/")[2], resource.plural])
        kopf.on.event(*names, labels={MANAGED_BY_LABEL: MANAGER}, registry=registry)(on_child)


_ERROR: Final = b'{"type":"ERROR"'
_LIST_ANEW: Final = b'{"type":"ERROR","object":{"code":410}}'
"""The one error after which kopf lists and watches anew; at any other its watch ends, and with it the operator."""


async def login(**kwargs: Any) -> kopf.AiohttpSession | None:
    """Log in as the pod's service account, or as KUBECONFIG says outside a cluster."""
    account = kopf.login_with_service_account(**kwargs)
    if account is None:
        person = kopf.login_with_kubeconfig(**kwargs)
        return None if person is None else _session(person)
    # By address, as every client library does: kopf's name for it needs a cluster DNS.
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return _session(dataclasses.replace(account, server=server))


def _session(info: kopf.ConnectionInfo) -> kopf.AiohttpSession:
    """Return what kopf would make of it, but that it reads objects of any depth and size, at which it would end."""
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
    """An answer of the API server, as kopf reads them: an object or a list at once, and watches line by line."""

    async def start(self, connection: Any) -> "_Answer":
        await super().start(connection)
        self.content = _Lines(self.content)  # type: ignore[assignment]  # as far as kopf uses it
        return self

    async def json(self, **_: Any) -> Any:
        return read_answer(await self.read())


class _Lines:
    """A stream of watch events that anybody can read as JSON."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Yield whole lines, whatever their length; what a connection that ends leaves of one says nothing."""
        rest = bytearray()
        async for chunk in self._content.iter_chunked(size):
            rest += chunk
            if b"\n" in chunk:
                *lines, tail = bytes(rest).split(b"\n")
                rest = bytearray(tail)
                yield b"".join(_event(line) + b"\n" for line in lines)


def _event(line: bytes) -> bytes:
    return _LIST_ANEW if line.startswith(_ERROR) else bounded_event(line)


_RETRY_S = 5
_LAST_S: Final = 10.0
"""After a task of kopf has failed: others of its may wait for ever for a session that it has closed."""
_HEALTH_PATHS = ("/livez", "/readyz", "/healthz")


async def start(settings: kopf.OperatorSettings, memo: OperatorState, **_: Any) -> None:
    """Set up kopf, connect and begin to work."""
    configure(settings)
    # In named namespaces nothing is asked of the cluster as a whole: kinds that come later are listed, not watched.
    settings.scanning.disabled = bool(memo.namespaces)
    try:
        await memo.start()
    except ClusterError as error:
        raise kopf.TemporaryError(str(error), delay=_RETRY_S) from error
    # In place of kopf's own, which it has set by now: it ends watches and workers first, and somebody waits.
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, memo.end)


async def stop(memo: OperatorState, **_: Any) -> None:
    """End the work."""
    await memo.stop()


def register_lifecycle(registry: kopf.OperatorRegistry) -> None:
    """Have all of them called."""
    kopf.on.startup(registry=registry)(start)
    kopf.on.cleanup(registry=registry)(stop)
    kopf.on.login(registry=registry)(login)


def configure(settings: kopf.OperatorSettings) -> None:
    """Set what the handlers rely on."""
    # Should a handler ever keep its progress, it lies in the status: metadata stays as Git has it.
    settings.persistence.finalizer = "specdecode.io/kopf"
    settings.persistence.progress_storage = kopf.StatusProgressStorage(field="status.kopf.progress")
    settings.persistence.diffbase_storage = _NothingCompared()
    settings.posting.enabled = False  # our own Events speak of conditions
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 30
    settings.watching.chunk_size = 100  # each is held as text and as values at once
    settings.watching.reconnect_backoff = 1.0
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = _Backoffs()
    settings.process.ultimate_exiting_timeout = _LAST_S
    # A worker of kopf holds its object until then; after a start there is one for each object and child.
    settings.queueing.idle_timeout = 0.1
    # Only what carries our label is watched: clusters have many other pods.
    for resource in WATCHED:
        settings.watching.label_selectors[resource.group, resource.plural] = OWNED_SELECTOR


class _Backoffs:
    """Seconds between tries of a list or a watch that is refused or fails, without an end.

    After the last one kopf would end the operator: for all namespaces, should it lose its rights in one of them.
    """

    def __iter__(self) -> Iterator[float]:
        yield from (1, 1, 2, 3, 5, 8, 13)
        yield from repeat(21)


class _NothingCompared(kopf.DiffBaseStorage):
    """No handler asks what changed of an object: kopf would copy each one for it, twice an event."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return None

    def store(self, **_: Any) -> None:
        pass


def serve_health(port: int, state: OperatorState, leadership: Leadership | None = None) -> None:
    """Answer the kubelet from a thread of its own, from the first moment on, until the process ends.

    kopf would answer in the event loop, after the start: a loop that plans for hundreds of objects, or a process that
    the machine leaves little time, would look like one that hangs, and be killed for it again and again.
    """

    class Answers(BoundedHandler):
        def do_GET(self) -> None:
            """Answer /livez, whether the process hangs, and /readyz and /healthz, whether it works."""
            self.keep_place()
            status, words = (
                _health(state, leadership) if self.path in _HEALTH_PATHS else (HTTPStatus.NOT_FOUND, "no such path")
            )
            if self.path == "/livez" and status is HTTPStatus.SERVICE_UNAVAILABLE:
                status = HTTPStatus.OK  # It starts, or the API server is down: a restart would not help.
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
    return HTTPStatus.SERVICE_UNAVAILABLE, "the API server does not answer about the Lease; this replica writes nothing"


_CHATTY_LOGGERS = ("kopf.objects", "aiohttp.access", "httpx")
"""They speak of every watch event and every request; what changed is logged by the reconciler."""

_GARBAGE_THRESHOLDS = (700, 10, 100)
"""As `gc.set_threshold` takes them. The last is 10 by itself: so many collections of what is young are followed by one
that looks through all that is kept. With 1,000 deployments that took a quarter of a second, in which nothing else is
done, and a fifth of the CPU time of an idle operator (Python 3.11)."""


def run_operator(settings: Settings, *, health_port: int, metrics_port: int, verbose: bool = False) -> None:
    """Serve what the settings name until SIGTERM; /livez, /readyz and /metrics answer on their ports."""
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
            # kopf would ask for the name of the process's user, which a container need not have.
            identity="specdecode-operator",  # type: ignore[arg-type]  # its type is private to kopf
            memo=state,
            stop_flag=state.ended,
        )


def _serve_webhook(settings: Settings, state: OperatorState) -> tuple[Collector, ...]:
    """Answer the API server's reviews, if asked to, with the terms of the reconcile; return what is said of them."""
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
