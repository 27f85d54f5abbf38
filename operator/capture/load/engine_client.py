"""Stream completions from the engine over HTTP/1.1, one connection per request.

If the time of a request is known, its connection is opened before that time, because opening hundreds together takes
over 100 ms.

Why not httpx: it takes 90 µs per event of a stream, and its pool overhead grows with the number of connections.
With httpx, 300 streams at 30 events/s use a whole core, which the engine's API server in the same pod needs. The
client then lags by up to seconds. An asyncio Protocol takes about 30 µs per event, half of it in h11.
"""

import asyncio
import os
import resource
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Final
from urllib.parse import urlsplit

import h11
import msgspec
from msgspec import Meta, Struct

from specdecode_operator.capture.files.formats import Outcome, Word
from specdecode_operator.capture.load.prompts import Prompt
from specdecode_operator.capture.load.run_settings import EngineAddress, InvalidSettingsError, tls_of
from specdecode_operator.problems import Problem
from specdecode_operator.redaction import clip

_EVENT_END = b"\n\n"
_DATA = b"data: "
_DONE = b"[DONE]"
_ERROR = b'{"error"'
_USAGE = b'"usage"'
_LONGEST_ERROR = 200
_LONGEST_EVENT_BYTES = 1024 * 1024
_LARGEST_KEPT_BYTES: Final = 2**27  # limit of a kept answer's events, above an engine's longest answers

_Count = Annotated[int, Meta(ge=0, le=2**53)]


class _Usage(Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None


class _Choice(Struct):
    text: str | None = None
    token_ids: list[Word] | None = None


class _Event(Struct):
    usage: _Usage | None = None
    choices: list[_Choice] | None = None


_EVENT: Final = msgspec.json.Decoder(_Event)


class UnreadableStreamError(Exception):
    """The response is not a stream of events."""


class CompletionStream:
    """Server-sent events of one answer.

    Events with tokens are only counted unless the answer is kept: parsing hundreds of streams would delay the load.
    """

    def __init__(self, *, keep_answer: bool) -> None:
        self.chunks = 0  # events with tokens
        # Arrival of the first and the last of them, on the monotonic clock.
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        # From the engine's usage report at the end.
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.done = False
        self.error: str | None = None  # an error that the engine reported after it began to answer
        self._keep_answer = keep_answer
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._kept_bytes = 0
        self._tail = bytearray()  # incomplete event

    def feed(self, data: bytes, now_s: float) -> None:
        """Process received bytes.

        Raises
        ------
        UnreadableStreamError
            An event, or a kept answer, exceeds its size limit.
        msgspec.DecodeError, UnicodeDecodeError, RecursionError
            An event has the wrong form.
        """
        # Only new bytes are searched, without copies: an event may arrive in many pieces.
        searched = max(len(self._tail) - len(_EVENT_END) + 1, 0)
        self._tail += data
        if self._tail.find(_EVENT_END, searched) < 0:
            if len(self._tail) > _LONGEST_EVENT_BYTES:
                raise UnreadableStreamError(f"an event has no end after {_LONGEST_EVENT_BYTES} bytes")
            return
        *events, self._tail = self._tail.split(_EVENT_END)
        for event in events:
            if event.startswith(_DATA):
                self._read(event[len(_DATA) :], now_s)

    def answer(self, *, as_text: bool) -> Prompt:
        """Return the answer of a stream that keeps it."""
        return Prompt("".join(self._texts) if as_text else self._ids)

    def _read(self, payload: bytearray, now_s: float) -> None:
        if payload == _DONE:
            self.done = True
        elif payload.startswith(_ERROR):
            self.error = error_text(payload)
        elif self._keep_answer or _USAGE in payload:
            self._read_document(payload, now_s)
        else:
            self._count_chunk(now_s)

    def _read_document(self, payload: bytearray, now_s: float) -> None:
        if self._keep_answer:
            self._kept_bytes += len(payload)
            if self._kept_bytes > _LARGEST_KEPT_BYTES:
                raise UnreadableStreamError(f"the answer has no end after {_LARGEST_KEPT_BYTES} bytes")
        event = _EVENT.decode(payload)
        if event.usage is not None:
            self.prompt_tokens = event.usage.prompt_tokens
            self.completion_tokens = event.usage.completion_tokens
        for choice in event.choices or ():
            self._count_chunk(now_s)
            if self._keep_answer:
                self._ids += choice.token_ids or ()
                self._texts.append(choice.text or "")

    def _count_chunk(self, now_s: float) -> None:
        self.chunks += 1
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s


def error_text(body: bytes | bytearray) -> str:
    """Return the reason in an engine's error document, shortened and without input that it may echo."""
    # vLLM returns ``{"error": {"message": ...}}``, FastAPI ``{"detail": ...}``. A validation error of FastAPI ends with
    # the input of the invalid field.
    try:
        document = msgspec.json.decode(body)
        if isinstance(document, dict):
            error = document.get("error", document.get("detail", document))
            document = error.get("message", error) if isinstance(error, dict) else error
        return _shortened(document if isinstance(document, str) else msgspec.json.encode(document).decode())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # not JSON, or nested too deep
        return _shortened(body.decode(errors="replace"))


def _shortened(text: str) -> str:
    for mark in ("'input'", '"input"'):
        text = text.partition(mark)[0]
    return clip(" ".join(text.split()), _LONGEST_ERROR)


LONGEST_HEAD_BYTES: Final = 64 * 1024  # limit of a response's head, and of the line before a chunk
# Limit of responses like ``100 Continue`` before the response itself; an engine sends one at most.
_MOST_INFORMATIONAL: Final = 16
# h11 needs a request to parse a response. The real ones are encoded before their time (`EngineClient`).
_ASKED: Final = h11.Request(
    method="POST", target="/", headers=[("Host", "engine"), ("Content-Length", "0"), ("Connection", "close")]
)


class HttpResponse:
    """Incremental parser of a response."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.complete = False  # the body has ended
        self._informational = 0
        self._connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=LONGEST_HEAD_BYTES)
        self._connection.send(_ASKED)
        self._connection.send(h11.EndOfMessage())

    def feed(self, data: bytes) -> bytes:
        """Return the bytes of the body in received data.

        Raises
        ------
        h11.RemoteProtocolError
            It is not HTTP, or has too many informational responses.
        """
        if data:  # h11 takes empty data as the end of the connection
            self._connection.receive_data(data)
        body = []
        while not self.complete and (event := self._connection.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Data):
                body.append(event.data)
            elif isinstance(event, h11.InformationalResponse):
                self._informational += 1
                if self._informational > _MOST_INFORMATIONAL:
                    raise h11.RemoteProtocolError("too many informational responses")
            elif isinstance(event, h11.Response):
                self.status = event.status_code
            elif isinstance(event, h11.EndOfMessage):
                self.complete = True
        return b"".join(body)

    def end_of_connection(self) -> None:
        """Note the end of the connection, which completes only a body without a length."""
        with suppress(h11.RemoteProtocolError):
            self._connection.receive_data(b"")
            self.feed(b"")


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
    """A request that is sent at its time or once it is connected, and its answer.

    ``due_s`` is on the monotonic clock, which is also the event loop's. A past time means immediately.
    """

    def __init__(self, request: bytes, due_s: float, *, keep_answer: bool) -> None:
        self.stream = CompletionStream(keep_answer=keep_answer)
        self.sent_s: float | None = None  # when the request was written to its connection
        self.finished_s = 0.0
        self.outcome: Outcome | None = None
        self.error: str | None = None
        self.withdrawn = False  # cancelled before its time, so it does not count as a request
        self._request = request
        self._due_s = due_s
        self._response = HttpResponse()
        self._rejection = bytearray()
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()

    @property
    def http_status(self) -> int | None:
        """Status of the answer, if it arrived."""
        return self._response.status

    async def run(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        """Connect, send, and wait for the end. Failures become outcomes, not exceptions."""
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
        """End the exchange unless it has ended; the outcome of an unsent request is always ``not_sent``."""
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
        """Schedule the request."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what create_connection makes
        self._transport = transport
        if self._ended.done():
            transport.abort()
        else:
            self._loop.call_at(self._due_s, self._send)

    def _send(self) -> None:
        assert self._transport is not None  # noqa: S101 - there is a connection
        if not self._transport.is_closing():
            # Taken before writing, since on a loopback the engine may answer before the call returns.
            self.sent_s = time.monotonic()
            self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Process a piece of the answer."""
        now_s = time.monotonic()
        try:
            body = self._response.feed(data)
            if self._response.status == _OK:
                self.stream.feed(body, now_s)
            elif len(self._rejection) < _MOST_ERROR_BYTES:
                self._rejection += body
        except _UNREADABLE as error:
            # The error of h11 contains the whole line.
            self.end("disconnected", f"unreadable answer: {_shortened(str(error))}")
        else:
            if self._response.complete:
                self._end_of_response()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the exchange; the end of the connection may complete the answer."""
        self._response.end_of_connection()
        if self._response.complete:
            self._end_of_response()
        else:
            self._end_when_due("disconnected", str(exc) if exc else "the engine closed the connection")

    def _end_when_due(self, outcome: Outcome, error: str) -> None:
        """End the exchange, but not before its time: a stopped run withdraws it until then."""
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


_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, kw_only=True)
class Server:
    """Address of an OpenAI-compatible server."""

    host: str
    port: int
    model: str
    path: str = "/v1"  # prefix of its paths
    api_key: str | None = None
    tls: ssl.SSLContext | None = None  # None: plain HTTP


@dataclass(frozen=True)
class CompletionRequest:
    """A completion request."""

    request_id: str  # sent as X-Request-Id, which the engine records
    prompt: Prompt
    max_tokens: int
    temperature: float | None  # None: the server's default
    ignore_eos: bool  # always generate ``max_tokens``
    keep_answer: bool = False  # for the next turn of a conversation

    def body(self, model: str) -> bytes:
        """Return the JSON body for /v1/completions."""
        document = {
            "model": model,
            "prompt": self.prompt.content,
            "max_tokens": self.max_tokens,
            **({} if self.temperature is None else {"temperature": self.temperature}),
            "n": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": self.ignore_eos,
        }
        if self.keep_answer:
            document["return_token_ids"] = True
        return _ENCODER.encode(document)


class EngineClient:
    """Client that sends each request on its own connection, without a limit of concurrent ones."""

    def __init__(self, server: Server, timeout_s: float) -> None:
        self._server = server
        self._timeout_s = timeout_s
        host = f"[{server.host}]" if ":" in server.host else server.host
        lines = [
            f"POST {server.path}/completions HTTP/1.1",
            f"Host: {host}:{server.port}",
            "Content-Type: application/json",
            "Connection: close",
            *([] if server.api_key is None else [f"Authorization: Bearer {server.api_key}"]),
        ]
        self._headers = "".join(f"{line}\r\n" for line in lines).encode()
        self._open: set[Exchange] = set()
        self._cancelled: str | None = None

    @property
    def in_flight(self) -> int:
        """Number of requests that were sent and have not ended."""
        return sum(exchange.sent_s is not None for exchange in self._open)

    def prepare(self, request: CompletionRequest) -> bytes:
        """Return the bytes of a request, encoded ahead so that encoding does not delay it."""
        body = request.body(self._server.model)
        own = f"X-Request-Id: {request.request_id}\r\nContent-Length: {len(body)}\r\n\r\n"
        return self._headers + own.encode() + body

    async def send(self, prepared: bytes, due_s: float, *, keep_answer: bool = False) -> Exchange:
        """Send a prepared request at its time, or immediately if it is late; return the ended exchange."""
        exchange = Exchange(prepared, due_s, keep_answer=keep_answer)
        if self._cancelled is not None:
            exchange.end("cancelled", self._cancelled)
        self._open.add(exchange)
        loop = asyncio.get_running_loop()
        timer = loop.call_at(
            max(due_s, loop.time()) + self._timeout_s,
            exchange.end,
            "timed_out",
            f"not complete after {self._timeout_s:g} s",
        )
        try:
            await exchange.run(self._server.host, self._server.port, self._server.tls)
        finally:
            timer.cancel()
            self._open.discard(exchange)
        return exchange

    def cancel_all(self, reason: str) -> None:
        """End every open request as cancelled, and send no more."""
        self._cancelled = reason
        for exchange in list(self._open):
            exchange.end("cancelled", reason)


def server_of(engine: EngineAddress, environment: Mapping[str, str] = os.environ) -> Server:
    """Return the engine of a capture."""
    url = urlsplit(engine.url)
    assert url.hostname and url.port  # noqa: S101, PT018 - the settings' pattern
    key = None
    if engine.api_key_variable is not None:
        key = environment.get(engine.api_key_variable)
        if not key:
            raise InvalidSettingsError(
                Problem(
                    "settings.engine.api_key_variable", engine.api_key_variable, "is not set in this container: set it"
                )
            )
    return Server(host=url.hostname, port=url.port, model=engine.model, api_key=key and key.strip(), tls=tls_of(engine))


def allow_many_connections() -> None:
    """Raise the limit of file descriptors, because each connection has one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
