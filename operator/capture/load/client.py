"""Sends completion requests to the engine and says how each ended."""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from specdecode_operator.capture.load.exchange import Exchange
from specdecode_operator.capture.load.prompts import Prompt
from specdecode_operator.capture.load.workload import EngineAddress, InvalidSettingsError
from specdecode_operator.problems import Problem

_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True)
class CompletionRequest:
    """One request, ready to be sent."""

    request_id: str  # goes as X-Request-Id, and so into the engine's own records
    prompt: Prompt
    max_tokens: int
    temperature: float
    ignore_eos: bool  # the answer is ``max_tokens`` long whatever the model says
    keep_answer: bool = False  # for the next turn of a conversation

    def body(self, model: str) -> bytes:
        """Return the document that /v1/completions takes."""
        document = {
            "model": model,
            "prompt": self.prompt.content,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
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

    def __init__(self, engine: EngineAddress, timeout_s: float, environment: Mapping[str, str] = os.environ) -> None:
        url = urlsplit(engine.url)
        assert url.hostname and url.port  # noqa: S101, PT018 - the settings' pattern
        self._host, self._port = url.hostname, url.port
        self._model = engine.model
        self._timeout_s = timeout_s
        self._headers = _headers(url.netloc, _api_key(engine, environment))
        self._open: set[Exchange] = set()
        self._cancelled: str | None = None

    @property
    def in_flight(self) -> int:
        """How many requests were sent and have not ended."""
        return sum(exchange.sent_s is not None for exchange in self._open)

    def prepare(self, request: CompletionRequest) -> bytes:
        """Return the bytes of a request, made before its time so that making them does not delay it."""
        body = request.body(self._model)
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
            await exchange.run(self._host, self._port)
        finally:
            timer.cancel()
            self._open.discard(exchange)
        return exchange

    def cancel_all(self, reason: str) -> None:
        """End every open request as cancelled; requests after it do not leave."""
        self._cancelled = reason
        for exchange in list(self._open):
            exchange.end("cancelled", reason)


def _headers(host: str, api_key: str | None) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", f"Host: {host}", "Content-Type: application/json", "Connection: close"]
    if api_key is not None:
        lines.append(f"Authorization: Bearer {api_key}")
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
