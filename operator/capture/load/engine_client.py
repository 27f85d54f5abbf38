"""One request on a connection of its own, from connecting to its end.

The connection is made before the request's time, if that is known, because
hundreds of connections at once take a tenth of a second and more.

Why not httpx: it costs 90 microseconds for each event of a stream, and its
connection pool more, the more connections it has. 300 streams with 30 events a
second each take it a whole core, which the engine's own API server beside it
needs, and it is up to seconds late. A protocol that the event loop calls with
the bytes takes about 30 microseconds, half of them in h11. A connection of its own for each request lets
the kernel spread requests over several API servers, and no request can meet a
kept connection that the server is just closing.
"""

import asyncio
import ssl
import time

import h11
import msgspec

from specdecode_operator.capture.files.formats import Outcome
from specdecode_operator.capture.load.completion_stream import (
    CompletionStream,
    UnreadableStreamError,
    error_text,
    shortened,
)
from specdecode_operator.capture.load.http_response import HttpResponse

_OK = 200
_MOST_ERROR_BYTES = 64 * 1024
_UNREADABLE = (
    h11.RemoteProtocolError,
    UnreadableStreamError,
    msgspec.DecodeError,
    UnicodeDecodeError,
    RecursionError,
)


class Exchange(asyncio.Protocol):
    """A request that is sent at its time, or as soon as there is a connection, and its answer.

    ``due_s`` is on the monotonic clock, which is also the event loop's; a time that is over means at once.
    """

    def __init__(self, request: bytes, due_s: float, *, keep_answer: bool) -> None:
        self.stream = CompletionStream(keep_answer=keep_answer)
        # When the request was written to its connection, on the monotonic clock; None before.
        self.sent_s: float | None = None
        self.finished_s = 0.0  # when it ended, whatever the outcome
        # How it ended, and why if it did not complete.
        self.outcome: Outcome | None = None
        self.error: str | None = None
        self.withdrawn = False  # it was cancelled before its time, so there never was such a request
        self._request = request
        self._due_s = due_s
        self._response = HttpResponse()
        self._rejection = bytearray()
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()

    @property
    def http_status(self) -> int | None:
        """The answer's status; None if none arrived."""
        return self._response.status

    async def run(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        """Connect, send, and wait for the end; what goes wrong is an outcome, never an exception."""
        connecting = self._loop.create_task(self._loop.create_connection(lambda: self, host, port, ssl=tls))
        try:
            await asyncio.wait([connecting, self._ended], return_when=asyncio.FIRST_COMPLETED)
            if connecting.done() and (error := connecting.exception()):
                self._end_when_due("not_sent", f"no connection: {error}")
            await self._ended
        finally:
            connecting.cancel()
            self.end("cancelled", "the load generator stopped")

    def end(self, outcome: Outcome, error: str | None = None) -> None:
        """End it now, unless it has ended; a request that never left is ``not_sent`` whatever ends it."""
        if self._ended.done():
            return
        self.outcome = outcome if self.sent_s is not None else "not_sent"
        self.error = error
        self.finished_s = time.monotonic()
        self.withdrawn = outcome == "cancelled" and self.sent_s is None and self.finished_s < self._due_s
        self._ended.set_result(None)
        if self._transport:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request, or let it be sent when its time comes."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what create_connection makes
        self._transport = transport
        if self._ended.done():
            transport.abort()
        else:
            self._loop.call_at(self._due_s, self._send)

    def _send(self) -> None:
        assert self._transport is not None  # noqa: S101 - there is a connection
        if not self._transport.is_closing():
            # Taken before writing: on a loopback the engine may answer before the call returns.
            self.sent_s = time.monotonic()
            self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Take a piece of the answer."""
        now_s = time.monotonic()
        try:
            body = self._response.feed(data)
            if self._response.status == _OK:
                self.stream.feed(body, now_s)
            elif len(self._rejection) < _MOST_ERROR_BYTES:
                self._rejection += body
        except _UNREADABLE as error:
            # h11 repeats the whole line that it cannot read.
            self.end("disconnected", f"unreadable answer: {shortened(str(error))}")
        else:
            if self._response.complete:
                self._end_of_response()

    def connection_lost(self, exc: Exception | None) -> None:
        """Take the connection's end for the answer's, if it can be."""
        self._response.end_of_connection()
        if self._response.complete:
            self._end_of_response()
        else:
            self._end_when_due("disconnected", str(exc) if exc else "the engine closed the connection")

    def _end_when_due(self, outcome: Outcome, error: str) -> None:
        """End it, but not before its time: until then it is not late, and a run that is stopped does without it."""
        if time.monotonic() < self._due_s:
            self._loop.call_at(self._due_s, self.end, outcome, error)
        else:
            self.end(outcome, error)

    def _end_of_response(self) -> None:
        if self.http_status != _OK:
            self.end("http_rejected", error_text(bytes(self._rejection)))
        elif self.stream.error is not None:
            self.end("disconnected", f"the engine gave up: {self.stream.error}")
        elif not self.stream.done:
            self.end("disconnected", "the stream ended without its end mark")
        else:
            self.end("completed")
