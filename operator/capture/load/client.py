"""Sends completion requests to the engine and says how each ended."""

import asyncio
import os
import resource
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from specdecode_operator.capture.load.exchange import Exchange
from specdecode_operator.capture.load.prompts.prompt import Prompt
from specdecode_operator.capture.load.trust import tls_of
from specdecode_operator.capture.load.workload import EngineAddress, InvalidSettingsError
from specdecode_operator.problems import Problem

_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where completions come from."""

    host: str
    port: int
    model: str
    path: str = "/v1"  # what the names of its paths begin with
    api_key: str | None = None
    tls: ssl.SSLContext | None = None  # None: plain HTTP


@dataclass(frozen=True)
class CompletionRequest:
    """One request, ready to be sent."""

    request_id: str  # goes as X-Request-Id, and so into the engine's own records
    prompt: Prompt
    max_tokens: int
    temperature: float | None  # None: the server's own
    ignore_eos: bool  # the answer is ``max_tokens`` long whatever the model says
    keep_answer: bool = False  # for the next turn of a conversation

    def body(self, model: str) -> bytes:
        """Return the document that /v1/completions takes."""
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
    """Sends requests, each on a connection of its own, as many at a time as it is asked to."""

    def __init__(self, server: Server, timeout_s: float) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._headers = _headers(server)
        self._open: set[Exchange] = set()
        self._cancelled: str | None = None

    @property
    def in_flight(self) -> int:
        """How many requests were sent and have not ended."""
        return sum(exchange.sent_s is not None for exchange in self._open)

    def prepare(self, request: CompletionRequest) -> bytes:
        """Return the bytes of a request, made before its time so that making them does not delay it."""
        body = request.body(self._server.model)
        own = f"X-Request-Id: {request.request_id}\r\nContent-Length: {len(body)}\r\n\r\n"
        return self._headers + own.encode() + body

    async def send(self, prepared: bytes, due_s: float, *, keep_answer: bool = False) -> Exchange:
        """Return the ended exchange of a prepared request, sent at its time or, if that is over, at once."""
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
        """End every open request as cancelled; requests after it do not leave."""
        self._cancelled = reason
        for exchange in list(self._open):
            exchange.end("cancelled", reason)


def server_of(engine: EngineAddress, environment: Mapping[str, str] = os.environ) -> Server:
    """Return the engine of a capture.

    Raises
    ------
    InvalidSettingsError
        Its key is not in the environment, or its certificates are not in their folder.
    """
    url = urlsplit(engine.url)
    assert url.hostname and url.port  # noqa: S101, PT018 - the settings' pattern
    key = _api_key(engine, environment)
    return Server(host=url.hostname, port=url.port, model=engine.model, api_key=key, tls=tls_of(engine))


def allow_many_connections() -> None:
    """Use as many file descriptors as this process may: every request in flight has one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _headers(server: Server) -> bytes:
    host = f"[{server.host}]" if ":" in server.host else server.host
    lines = [
        f"POST {server.path}/completions HTTP/1.1",
        f"Host: {host}:{server.port}",
        "Content-Type: application/json",
        "Connection: close",
    ]
    if server.api_key is not None:
        lines.append(f"Authorization: Bearer {server.api_key}")
    return "".join(f"{line}\r\n" for line in lines).encode()


def _api_key(engine: EngineAddress, environment: Mapping[str, str]) -> str | None:
    if engine.api_key_variable is None:
        return None
    key = environment.get(engine.api_key_variable)
    if not key:
        raise InvalidSettingsError(
            Problem("settings.engine.api_key_variable", engine.api_key_variable, "is not set in this container: set it")
        )
    return key.strip()
