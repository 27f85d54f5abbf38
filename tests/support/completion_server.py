"""A real HTTP server on the loopback that answers like vLLM's API server, as well or as badly as a test wants."""

import asyncio
import contextlib
import json
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support.waiting import DEADLINE_S

OK_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"


@dataclass
class Received:
    """A request for a completion, as it arrived."""

    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def id(self) -> str:
        return self.headers["x-request-id"]


Answer = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def token_event(tokens: list[int]) -> bytes:
    text = "".join(f" t{token}" for token in tokens)
    return event({"id": "cmpl-x", "choices": [{"index": 0, "text": text, "token_ids": tokens, "finish_reason": None}]})


def usage_event(prompt_tokens: int, completion_tokens: int) -> bytes:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event({"id": "cmpl-x", "choices": [], "usage": usage})


def answered_tokens(request: Received) -> list[int]:
    """The tokens of a whole answer: 1000, 1001, ..."""
    return list(range(1000, 1000 + request.body["max_tokens"]))


async def answer_in_full(request: Received, writer: asyncio.StreamWriter) -> None:
    """Two tokens an event, then the usage, then the end."""
    tokens = answered_tokens(request)
    writer.write(OK_HEAD)
    for start in range(0, len(tokens), 2):
        writer.write(chunk(token_event(tokens[start : start + 2])))
    prompt = request.body["prompt"]
    length = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
    writer.write(chunk(usage_event(length, len(tokens))) + chunk(b"data: [DONE]\n\n") + LAST_CHUNK)


def answer_with(raw: bytes) -> Answer:
    """Just these bytes, then the end of the connection."""

    async def answer(_request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)

    return answer


def rejection(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d Refused\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (status, len(body), body)


def document(content: dict[str, Any]) -> bytes:
    """An answer that does not stream."""
    body = json.dumps(content).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (len(body), body)


async def never_answer(_request: Received, writer: asyncio.StreamWriter) -> None:
    """One token, and then nothing until the client leaves."""
    writer.write(OK_HEAD + chunk(token_event([1000])))
    await writer.drain()
    await asyncio.Event().wait()


@dataclass
class CompletionServer:
    """What the server received, and what it answers."""

    port: int = 0
    tls: bool = False
    answer: Answer = answer_in_full
    pages: dict[str, tuple[int, str]] = field(default_factory=dict)
    received: list[Received] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)
    connections: int = 0
    handlers: set[asyncio.Task[None]] = field(default_factory=set)
    in_flight: int = 0
    most_in_flight: int = 0
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    def request(self, request_id: str) -> Received:
        return next(request for request in self.received if request.id == request_id)

    async def wait_for_requests(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S), self.arrived:
            await self.arrived.wait_for(lambda: len(self.received) >= count)

    async def wait_for_connections(self, count: int) -> None:
        """Wait until so many connections were made in all."""
        async with asyncio.timeout(DEADLINE_S), self.arrived:
            await self.arrived.wait_for(lambda: self.connections >= count)

    async def close_connections(self) -> None:
        """End every connection without a word."""
        for task in list(self.handlers):
            task.cancel()
        await asyncio.gather(*self.handlers, return_exceptions=True)

    async def wait_for_page(self, path: str, times: int) -> None:
        """Wait until a page was asked for so many times from now on."""
        before = self.served[path]
        async with asyncio.timeout(DEADLINE_S), self.arrived:
            await self.arrived.wait_for(lambda: self.served[path] >= before + times)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            try:
                async with self.arrived:
                    self.connections += 1
                    self.arrived.notify_all()
                await self._handle(reader, writer)
                await writer.drain()
            finally:
                writer.close()
                await writer.wait_closed()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        request_line, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        path = request_line.split()[1]
        if path not in {"/v1/completions", "/v1/chat/completions"} or path in self.pages:
            async with self.arrived:
                self.served[path] += 1
                self.arrived.notify_all()
            status, text = self.pages.get(path, (404, "not found"))
            writer.write(rejection(status, text.encode()))
            return
        received = Received(headers, json.loads(await reader.readexactly(int(headers["content-length"]))))
        async with self.arrived:
            self.received.append(received)
            self.arrived.notify_all()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await self.answer(received, writer)
        finally:
            self.in_flight -= 1


@contextlib.asynccontextmanager
async def completion_server(tls: ssl.SSLContext | None = None, port: int = 0) -> AsyncIterator[CompletionServer]:
    """Serve on a port of the loopback, a free one unless it is given."""
    state = CompletionServer(tls=tls is not None)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(state.handle(reader, writer))
        state.handlers.add(task)
        task.add_done_callback(state.handlers.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", port, backlog=1024, ssl=tls)
    state.port = server.sockets[0].getsockname()[1]
    try:
        yield state
    finally:
        server.close()
        await state.close_connections()
