"""HTTP under the server: bounds on connections, headers and request time; answers without a task each."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

ABANDON: Final = "specdecode.abandon"
"""Extension of the ASGI scope that closes the connection immediately, and logs the number of unread bytes."""

_SENT_AT_ONCE_BYTES: Final = 2**16
MOST_UNREAD_BYTES: Final = 2**28


class Unread:
    """Bytes that clients have not read yet; above the limit, the slowest client is disconnected."""

    def __init__(self) -> None:
        self._bytes = 0
        self._of: dict[Wire, int] = {}

    def tell(self, wire: "Wire", unread_bytes: int) -> None:
        """Set the unread bytes of one client."""
        self._bytes += unread_bytes - self._of.pop(wire, 0)
        if unread_bytes:
            self._of[wire] = unread_bytes
        while self._bytes > MOST_UNREAD_BYTES:
            max(self._of, key=self._of.__getitem__).give_up()


class Wire:
    """The body of one HTTP response. Each write is one message, until a client reads slower than the server writes.

    ``send`` of an ASGI server is a coroutine that waits only if the connection is full. It is started inline, and
    continues in a task if it waits; later writes are kept, and follow in large pieces.
    """

    def __init__(self, send: Send, unread: Unread, abandon: Callable[[int], None]) -> None:
        """Write with ``send``; ``abandon`` ends a connection whose client leaves too many bytes unread."""
        self._send = send
        self._unread = unread
        self._abandon: Callable[[int], None] | None = abandon
        # Writes that wait for the connection; None if it can take more.
        self._kept: bytearray | None = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last = False

    async def open(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Start the response, and send earlier writes."""
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._catch_up(None)

    def write(self, data: bytes) -> None:
        """Write one message."""
        if self._kept is not None:
            if self._abandon is not None:
                self._kept += data
                self._unread.tell(self, len(self._kept))
            return
        sending: Any = self._send({"type": "http.response.body", "body": data, "more_body": True})
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return
        except OSError:  # the client has disconnected, which is handled elsewhere
            return
        self._kept = bytearray()
        self._task = asyncio.get_running_loop().create_task(self._catch_up(_Begun(sending, waits_for)))

    def end(self) -> None:
        """End the body."""
        self._last = True
        if self._kept is None and not self._closed.done():
            self._closed.set_result(None)

    def drop(self) -> None:
        """Discard further writes: the client has disconnected."""
        if not self._closed.done():
            self._closed.set_result(None)

    def give_up(self) -> None:
        """Close the connection of a client that does not read."""
        abandon, kept = self._abandon, self._kept
        self._abandon, self._kept = None, bytearray()
        self._unread.tell(self, 0)
        if abandon is not None:
            abandon(len(kept or ()))

    async def closed(self) -> None:
        """Wait until all writes are sent or dropped."""
        try:
            await self._closed
        finally:
            if self._task is not None:
                self._task.cancel()
            self._abandon = None
            self._unread.tell(self, 0)
        if self._last:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _catch_up(self, begun: "_Begun | None") -> None:
        if begun is not None:
            await begun
        while self._kept:
            # Send whole events, or everything if one event is longer.
            end = self._kept.rfind(b"\n", 0, _SENT_AT_ONCE_BYTES) + 1 or len(self._kept)
            piece = bytes(self._kept[:end])
            del self._kept[:end]
            self._unread.tell(self, len(self._kept))
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        self._kept = None
        if self._last:
            self.end()


class _Begun:
    """A coroutine that has run up to its first wait."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        yield self._waits_for
        yield from self._coroutine.__await__()


# Of a request's line and headers, or between and after the chunks of its body; h11 has the same limit.
_LARGEST_HEAD_BYTES: Final = 64 * 2**10
# As in Python's http.client: 64 KiB of the shortest headers take 1.8 MiB of memory.
_MOST_HEADERS: Final = 100
# Requests of a connection that wait for an earlier answer: each takes 300 times the memory of its text.
_MOST_PIPELINED: Final = 8
# From the connection, or from the first byte on a reused one, to the last byte of a request.
_ARRIVES_WITHIN_S: Final = 60.0

_BUSY: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: 20\r\nretry-after: 1\r\nconnection: close\r\n\r\ntoo many connections"
)


class _TooManyError(Exception):
    """A request has too many headers, or too many requests wait on one connection."""


class BoundedHttp(HttpToolsProtocol):
    """Rejects connections over the limit, and closes those whose request does not end in time or in size."""

    def __init__(self, *args: Any, most_connections: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most_connections = most_connections
        self._unread_bytes = 0
        self._too_slow: asyncio.TimerHandle | None = None
        self._open: list[RequestResponseCycle] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or answer 503 if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._most_connections:
            transport.write(_BUSY)
            transport.close()
            return
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection, and tell the requests on it that the client is gone."""
        self._request_arrived()
        super().connection_lost(exc)
        # uvicorn tells the newest request only; an earlier one may be being answered.
        for cycle in self._open:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Parse the bytes that a client sent."""
        if self.transport.is_closing():
            return
        self._unread_bytes += len(data)
        before = self._unread_bytes
        super().data_received(data)
        if before > _LARGEST_HEAD_BYTES and self._unread_bytes and not self.transport.is_closing():
            self.logger.warning("A request was rejected: its headers have more than %s bytes.", _LARGEST_HEAD_BYTES)
            self.send_400_response("The headers of the request are too large.")

    def on_message_begin(self) -> None:
        """Begin a request; on a reused connection its time starts here."""
        super().on_message_begin()
        if self._too_slow is None:
            self._expect_request()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        if len(self.headers) >= _MOST_HEADERS:
            raise _TooManyError  # uvicorn answers errors of callbacks with 400, and closes the connection
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Take the end of headers."""
        if len(self.pipeline) >= _MOST_PIPELINED:
            raise _TooManyError
        self._unread_bytes = 0
        self.scope["extensions"] = {ABANDON: {"close": self._abandon}}
        super().on_headers_complete()
        self._open = [*(each for each in self._open if not each.response_complete), self.cycle]

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Take the end of a request."""
        self._unread_bytes = 0
        self._request_arrived()
        super().on_message_complete()

    def _expect_request(self) -> None:
        self._too_slow = self.loop.call_later(_ARRIVES_WITHIN_S, self._close_slow)

    def _request_arrived(self) -> None:
        if self._too_slow is not None:
            self._too_slow.cancel()
            self._too_slow = None

    def _close_slow(self) -> None:
        if self.flow.read_paused:  # an earlier request is being answered: the client cannot send more yet
            self._expect_request()
            return
        self._too_slow = None
        self.logger.warning("A connection was closed: its request did not arrive within %g s.", _ARRIVES_WITHIN_S)
        self.transport.abort()

    def _abandon(self, unread_bytes: int) -> None:
        self.logger.warning("A connection was closed because its client left %s bytes unread.", unread_bytes)
        self.transport.abort()
