"""Scrape engines over HTTP and HTTPS, within bounds of size and time."""

import asyncio
import gzip
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path

import pytest

from devcluster.cluster.pki import Identity, create
from specdecode_operator.cluster.engine_probe import EngineProbe
from specdecode_operator.stats.figures import SampleBuffer
from specdecode_operator.vllm.engine_metrics import EngineReading, Unreachable
from specdecode_operator.vllm.profiles import find_profile
from tests.support.http_server import Quiet, serving
from tests.support.objects import Body

SCRAPE = Path(__file__).parents[1] / "vllm/data/metrics-draft-model.txt"
PROFILE = find_profile("0.32")


class Metrics(Quiet, BaseHTTPRequestHandler):
    """Answers with what a real engine said."""

    def do_GET(self) -> None:
        content = SCRAPE.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def serve(context: ssl.SSLContext | None) -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Metrics)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    with serving(server):
        yield server.server_port


@pytest.fixture
def plain_port() -> Iterator[int]:
    yield from serve(None)


@pytest.fixture
def tls_port(tmp_path: Path) -> Iterator[int]:
    """An engine with a certificate for its Service, of an authority that the operator does not know."""
    create(tmp_path / "pki", [Identity("engine", "llama", names=("llama.default.svc",))])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pki/engine.crt", tmp_path / "pki/engine.key")
    yield from serve(context)


def ready_pod() -> Body:
    return {
        "metadata": {"name": "llama-1"},
        "status": {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
    }


async def ask(port: int, *, tls: bool) -> object:
    probe = EngineProbe()
    try:
        return (await probe.read_all([ready_pod()], port, PROFILE, tls=tls))["llama-1"]
    finally:
        await probe.close()


async def test_engine_without_tls_is_scraped_over_http(plain_port: int) -> None:
    assert isinstance(await ask(plain_port, tls=False), EngineReading)


async def test_engine_with_tls_is_scraped_over_https(tls_port: int) -> None:
    assert isinstance(await ask(tls_port, tls=True), EngineReading)


async def answered(answer: bytes, pods: int = 1, looks: SampleBuffer | None = None) -> tuple[list[object], int]:
    """What is read of engines that all answer so, and how many of them were asked at the same time."""
    asked, most = 0, 0
    enough = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked, most
        await reader.readuntil(b"\r\n\r\n")
        asked += 1
        most = max(most, asked)
        if asked == min(pods, 4):
            for _ in range(500):  # whoever else is let in comes before that
                await asyncio.sleep(0)
            enough.set()
        await enough.wait()
        asked -= 1
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    probe = EngineProbe()
    try:
        port = server.sockets[0].getsockname()[1]
        named = [{**ready_pod(), "metadata": {"name": f"llama-{number}"}} for number in range(pods)]
        return [*(await probe.read_all(named, port, PROFILE, looks)).values()], most
    finally:
        await probe.close()
        server.close()


def response(content: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    return b"\r\n".join([b"HTTP/1.1 " + status, *headers, b"Connection: close", b"", content])


async def test_compressed_response_is_not_decompressed() -> None:
    ((found,), _) = await answered(response(gzip.compress(SCRAPE.read_bytes()), b"Content-Encoding: gzip"))
    assert isinstance(found, Unreachable)


async def test_redirects_are_not_followed(plain_port: int) -> None:
    elsewhere = f"Location: http://127.0.0.1:{plain_port}/metrics".encode()
    ((found,), _) = await answered(response(b"", elsewhere, status=b"302 Found"))
    assert found == Unreachable("/metrics answered 302")


async def test_too_long_page_is_unreachable() -> None:
    ((found,), _) = await answered(response(b"vllm:x 1\n" * 2**18))
    assert isinstance(found, Unreachable)
    assert "longer" in found.reason


def paged(pages: dict[str, bytes]) -> Iterator[int]:
    """Serve pages by path; the others are not there, and one that is empty never ends."""
    gone = threading.Event()

    class Pages(Quiet, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = pages.get(self.path)
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"") or 9))
            self.end_headers()
            self.wfile.write(content or b"")
            if content == b"":
                gone.wait()

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Pages)) as server:
        yield server.server_port
        gone.set()


@pytest.mark.parametrize(
    ("page", "version"),
    [
        (b'{"version":"0.33.0"}', "0.33.0"),
        (b'{"version":"0.33.1.dev5+g1234.cu130"}', "0.33.1.dev5+g1234.cu130"),
        (None, None),
        (b"", None),
        (b"0.33.0", None),
        (b'{"version":33}', None),
        (b'["0.33.0"]', None),
        (b'{"version":"0.33.0\\n"}', None),
        (b'{"version":"' + b"9" * 65 + b'"}', None),
        (b" " * 4096 + b'{"version":"0.33.0"}', None),
        (b"[" * 4000, None),
    ],
    ids=repr,
)
async def test_invalid_version_response_is_ignored(page: bytes | None, version: str | None) -> None:
    pages = {"/metrics": SCRAPE.read_bytes()} | ({} if page is None else {"/version": page})
    with contextmanager(paged)(pages) as port:
        found = await ask(port, tls=False)
    assert isinstance(found, EngineReading)
    assert found.version == version


def started(container: str) -> Body:
    pod = ready_pod()
    pod["metadata"]["uid"] = "1234"
    pod["status"]["containerStatuses"] = [{"name": "engine", "containerID": container}]
    return pod


async def test_version_is_requested_once_per_container_start_until_known() -> None:
    pages = {"/metrics": SCRAPE.read_bytes()}
    probe = EngineProbe()

    async def version(container: str) -> object:
        return (await probe.read_all([started(container)], port, PROFILE))["llama-1"].version

    with contextmanager(paged)(pages) as port:
        said = [await version("a")]
        pages["/version"] = b'{"version":"0.32.0"}'
        said.append(await version("a"))
        pages["/version"] = b'{"version":"0.33.0"}'
        said += [await version("a"), await version("b"), await version("b")]
    await probe.close()
    assert said == [None, "0.32.0", "0.32.0", "0.33.0", "0.33.0"]


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
async def test_excess_protocol_bytes_end_the_read(once: bytes, again: bytes) -> None:
    engine = Engine(once, again * (2**14 // len(again) + 1))
    assert await engine.read() == TOO_MUCH
    assert engine.sent_bytes < MOST_BYTES


async def test_engine_that_sends_before_the_request_is_unreachable() -> None:
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
async def test_common_response_encodings_are_read(answer: bytes) -> None:
    assert isinstance(await Engine(answer).read(), EngineReading)


@pytest.mark.parametrize(("beside", "found"), [(2**14, EngineReading), (2**14 + 1, Unreachable)])
async def test_bytes_besides_the_page_are_limited(beside: int, found: type) -> None:
    content = page(2**16)
    early = EARLY * ((beside - 1000) // len(EARLY))
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nX: %s\r\n\r\n"
    rest = beside - len(early) - len(head % (len(content), b""))
    assert isinstance(await Engine(early + head % (len(content), b"x" * rest) + content).read(), found)
