"""Engines are asked over HTTP or HTTPS, as they serve."""

import asyncio
import gzip
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path

import pytest

from devcluster.cluster.pki import Identity, create
from specdecode_operator.cluster import engine_probe
from specdecode_operator.cluster.engine_probe import EngineProbe
from specdecode_operator.stats.figures import SampleBuffer
from specdecode_operator.vllm.engine_metrics import EngineReading, Unreachable
from specdecode_operator.vllm.profiles import find_profile
from tests.support.http_server import Quiet, serving
from tests.support.objects import Body
from tests.unit.cluster.test_figures_source import Clock

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


async def test_an_engine_without_a_certificate_is_asked_over_http(plain_port: int) -> None:
    assert isinstance(await ask(plain_port, tls=False), EngineReading)


async def test_an_engine_with_a_certificate_is_asked_over_https(tls_port: int) -> None:
    assert isinstance(await ask(tls_port, tls=True), EngineReading)


async def test_http_to_an_engine_with_a_certificate_is_told_as_silence(tls_port: int) -> None:
    assert isinstance(await ask(tls_port, tls=False), Unreachable)


async def test_what_an_engine_says_is_kept_for_figures(plain_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks, probe = Clock(), SampleBuffer(), EngineProbe()
    monkeypatch.setattr(engine_probe, "time", clock)
    try:
        began_s = clock.now_s
        for clock.now_s in (began_s, began_s + 30, began_s + 60, began_s + 90):
            assert isinstance(
                (await probe.read_all([ready_pod()], plain_port, PROFILE, looks))["llama-1"], EngineReading
            )
    finally:
        await probe.close()
    found = looks.figures(clock.now_s)
    assert found is not None
    assert found[1] == 60, "what came between was read for no figures"


async def test_an_engine_with_unreadable_figures_answers_all_the_same() -> None:
    page = SCRAPE.read_bytes() + b'vllm:time_to_first_token_seconds_bucket{le="1" 3\n'
    looks = SampleBuffer()
    assert isinstance((await answered(response(page), looks=looks))[0][0], EngineReading)
    assert looks.names_due("None", time.monotonic()), "nothing was kept of what could not be read"


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


async def test_nothing_that_an_engine_sends_is_unpacked() -> None:
    ((found,), _) = await answered(response(gzip.compress(SCRAPE.read_bytes()), b"Content-Encoding: gzip"))
    assert isinstance(found, Unreachable)


async def test_no_engine_sends_the_operator_elsewhere(plain_port: int) -> None:
    elsewhere = f"Location: http://127.0.0.1:{plain_port}/metrics".encode()
    ((found,), _) = await answered(response(b"", elsewhere, status=b"302 Found"))
    assert found == Unreachable("/metrics answered 302")


async def test_what_is_longer_than_an_engine_says_is_not_read_on() -> None:
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
async def test_an_engine_says_its_version_or_nothing_that_counts(page: bytes | None, version: str | None) -> None:
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


async def test_the_version_is_asked_for_once_a_start_until_it_is_said() -> None:
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


async def test_an_engine_that_is_slow_to_say_its_version_holds_up_no_other() -> None:
    asked, all_asked = 0, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        line = (await reader.readuntil(b"\r\n\r\n")).splitlines()[0]
        asked += b"/metrics" in line
        if asked == 5:
            all_asked.set()
        if b"/version" in line:
            await all_asked.wait()
        writer.write(response(b'{"version":"0.33.0"}' if b"/version" in line else SCRAPE.read_bytes()))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    probe = EngineProbe()
    pods = [{**ready_pod(), "metadata": {"name": f"llama-{number}"}} for number in range(5)]
    readings = await probe.read_all(pods, server.sockets[0].getsockname()[1], PROFILE)
    await probe.close()
    server.close()
    assert [reading.version for reading in readings.values()] == ["0.33.0"] * 5


async def test_few_engines_of_an_object_are_read_at_the_same_time() -> None:
    found, most = await answered(response(SCRAPE.read_bytes()), pods=9)
    assert all(isinstance(each, EngineReading) for each in found)
    assert most == 4
