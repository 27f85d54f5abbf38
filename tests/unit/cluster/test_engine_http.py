"""An engine may send what it likes around its page: it is not read for long, and what servers do send is read."""

import asyncio
import socket
from contextlib import suppress
from dataclasses import dataclass

import pytest

from specdecode_operator.vllm.engine_metrics import EngineReading, Unreachable
from tests.unit.cluster.test_engine_probe import SCRAPE, ask

TOO_MUCH = Unreachable("/metrics has more than 16384 bytes beside its page")
MOST_BYTES = 2 * 2**20
EARLY = b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Engine:
    """Sends some bytes, and others again and again for as long as they are taken."""

    once: bytes
    again: bytes = b""
    asked: bool = True
    sent_bytes: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.asked:
            await reader.readuntil(b"\r\n\r\n")
        with suppress(ConnectionError):
            writer.write(self.once)
            while self.again:
                await writer.drain()
                writer.write(self.again)
                self.sent_bytes += len(self.again)
        writer.close()

    async def read(self) -> object:
        """What is read of it. What it can send that nobody takes is bounded by the buffer of its socket."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
            async with await asyncio.start_server(self.serve, sock=listening):
                return await ask(listening.getsockname()[1], tls=False)


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


def chunked(content: bytes, size: int) -> bytes:
    parts = [content[at : at + size] for at in range(0, len(content), size)]
    return CHUNKED + b"".join(map(chunk, [*parts, b""]))


def page(size: int) -> bytes:
    """As an engine says it, made longer by comments."""
    said, line = SCRAPE.read_bytes(), b"#" * 63 + b"\n"
    return (said + line * (size // len(line)))[: size - 1] + b"\n"


def with_length(content: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)


@pytest.mark.parametrize(
    ("once", "again"),
    [
        (b"", EARLY),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (CHUNKED, chunk(b"#")),
        (CHUNKED, b"1;" + b"e" * 60 + b"\r\n#\r\n"),
        (CHUNKED, b"1;" + b"e" * 60_000),
        (CHUNKED + chunk(page(2**20)), chunk(b"#")),
        (CHUNKED, chunk(b"#" * 2**13) + chunk(b"#") * 500),
        (CHUNKED + chunk(page(2**16)) + b"0\r\n", b"a: b\r\n" * 100),
    ],
    ids=[
        "early hints",
        "continue",
        "chunks of a byte",
        "and extensions",
        "one extension",
        "after much of a page",
        "among much of it",
        "trailers",
    ],
)
async def test_an_engine_that_sends_anything_but_a_page_is_not_read_on(once: bytes, again: bytes) -> None:
    engine = Engine(once, again * (2**14 // len(again) + 1))
    assert await engine.read() == TOO_MUCH
    assert engine.sent_bytes < MOST_BYTES


async def test_an_engine_that_does_not_wait_to_be_asked_is_unreachable() -> None:
    engine = Engine(b"", EARLY * 400, asked=False)
    assert isinstance(await engine.read(), Unreachable)
    assert engine.sent_bytes < MOST_BYTES


@pytest.mark.parametrize(
    "answer",
    [
        with_length(page(MOST_BYTES)),
        chunked(page(MOST_BYTES), 4096),
        chunked(page(2**20), 512),
        EARLY + with_length(page(2**16)),
        b"HTTP/1.0 200 OK\r\n\r\n" + page(MOST_BYTES),
    ],
    ids=["of a length", "chunks of 4 KiB", "many small chunks", "one early hint", "until the end"],
)
async def test_what_servers_send_is_read(answer: bytes) -> None:
    assert isinstance(await Engine(answer).read(), EngineReading)


@pytest.mark.parametrize(("beside", "found"), [(2**14, EngineReading), (2**14 + 1, Unreachable)])
async def test_so_much_and_no_more_may_stand_beside_a_page(beside: int, found: type) -> None:
    content = page(2**16)
    early = EARLY * ((beside - 1000) // len(EARLY))
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nX: %s\r\n\r\n"
    rest = beside - len(early) - len(head % (len(content), b""))
    assert isinstance(await Engine(early + head % (len(content), b"x" * rest) + content).read(), found)


async def test_a_page_with_too_much_after_it_is_not_read() -> None:
    assert await Engine(with_length(page(2**15)) + with_length(b"") * 500).read() == TOO_MUCH


async def test_each_question_has_a_connection_of_its_own_and_asks_for_nothing_packed() -> None:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            asked.append(b"")
            while True:
                asked[-1] += await reader.readuntil(b"\r\n\r\n")
                writer.write(with_length(SCRAPE.read_bytes()))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        assert isinstance(await ask(server.sockets[0].getsockname()[1], tls=False), EngineReading)
    assert [request.split()[1] for request in asked] == [b"/metrics", b"/version"]
    assert [request.count(b"HTTP/1.1") for request in asked] == [1, 1]
    assert all(b"Accept-Encoding: identity\r\n" in request for request in asked)
