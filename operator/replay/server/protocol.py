"""HTTP as uvicorn reads it, with bounds on connections, on headers and on the time for a request to arrive."""

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from specdecode_operator.replay.server.wire import ABANDON

_LARGEST_HEAD_BYTES: Final = 64 * 2**10
"""Bytes of a request's line and headers, or between and after the chunks of its body; h11 has the same limit."""

_ARRIVES_WITHIN_S: Final = 60.0
"""Seconds that a request may take from the connection, or from its first byte on a reused one, to its last byte."""

_BUSY: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: 20\r\nretry-after: 1\r\nconnection: close\r\n\r\ntoo many connections"
)


class BoundedHttp(HttpToolsProtocol):
    """Rejects connections over the limit, and closes those whose request does not end in time or in size."""

    def __init__(self, *args: Any, most_connections: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most_connections = most_connections
        self._unread_bytes = 0
        self._too_slow: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or answer 503 if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._most_connections:
            transport.write(_BUSY)
            transport.close()
            return
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        self._request_arrived()
        super().connection_lost(exc)

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

    def on_headers_complete(self) -> None:
        """Take the end of headers."""
        self._unread_bytes = 0
        self.scope["extensions"] = {ABANDON: {"close": self._abandon}}
        super().on_headers_complete()

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
        self._too_slow = None
        self.logger.warning("A connection was closed: its request did not arrive within %g s.", _ARRIVES_WITHIN_S)
        self.transport.abort()

    def _abandon(self, unread_bytes: int) -> None:
        self.logger.warning("A connection was closed whose client had %s bytes to read and did not.", unread_bytes)
        self.transport.abort()
