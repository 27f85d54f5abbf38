"""HTTP as uvicorn reads it, with bounds on connections, headers, pipelined requests and the time to send one."""

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from specdecode_operator.replay.server.wire import ABANDON

_LARGEST_HEAD_BYTES: Final = 64 * 2**10
"""Bytes of a request's line and headers, or between and after the chunks of its body; h11 has the same limit."""

_MOST_HEADERS: Final = 100
"""Headers of one request, as in Python's http.client: 64 KiB of the shortest headers take 1.8 MiB of memory."""

_MOST_PIPELINED: Final = 8
"""Requests of a connection that wait for the answer to an earlier one: each takes 300 times the memory of its text."""

_ARRIVES_WITHIN_S: Final = 60.0
"""Seconds that a request may take from the connection, or from its first byte on a reused one, to its last byte."""

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
        """Parse what a client sent."""
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
        self.logger.warning("A connection was closed whose client had %s bytes to read and did not.", unread_bytes)
        self.transport.abort()
