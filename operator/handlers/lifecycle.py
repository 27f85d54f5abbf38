"""Start, stop and health of the operator process."""

import asyncio
import signal
from collections.abc import Iterator
from http import HTTPStatus
from itertools import repeat
from typing import Any, Final

import kopf

from specdecode_operator.cluster.errors import ClusterError
from specdecode_operator.handlers.leadership.leadership import Leadership
from specdecode_operator.handlers.login import login
from specdecode_operator.handlers.state import OperatorState, OperatorStuckError
from specdecode_operator.http_server import BoundedHandler, BoundedServer
from specdecode_operator.kube.labels import OWNED_SELECTOR
from specdecode_operator.kube.resources import WATCHED

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


def register(registry: kopf.OperatorRegistry) -> None:
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
    message = "the API server does not answer requests for the Lease; this replica writes nothing"
    return HTTPStatus.SERVICE_UNAVAILABLE, message
