"""The client of an engine."""

import asyncio
import os
import resource
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devcluster.cluster import pki
from specdecode_operator.capture.job.answer_checks import CheckRequests, NotAnsweredError
from specdecode_operator.capture.load import engine_client, engine_ready, runner
from specdecode_operator.capture.load.datasets import BadDatasetError
from specdecode_operator.capture.load.engine_client import (
    _UNREADABLE,
    CompletionRequest,
    CompletionStream,
    EngineClient,
    HttpResponse,
    UnreadableStreamError,
    error_text,
    server_of,
)
from specdecode_operator.capture.load.engine_ready import EngineMonitor, NoMetrics
from specdecode_operator.capture.load.prompts import Prompt
from specdecode_operator.capture.load.run_settings import InvalidSettingsError, tls_of
from specdecode_operator.capture.load.runner import LoadResult, run_load
from specdecode_operator.capture.load.shutdown import Stop, stop_on_signals
from tests.support.completion_server import (
    LAST_CHUNK,
    OK_HEAD,
    Answer,
    CompletionServer,
    Received,
    answer_in_full,
    answer_with,
    chunk,
    completion_server,
    event,
    never_answer,
    rejection,
    token_event,
    usage_event,
)
from tests.support.driven_clock import DrivenClock
from tests.support.load_runs import CLOSED, FAST, names_in, run, settings_for, until

BODY = token_event([5, 6]) + token_event([7]) + usage_event(3, 3) + b"data: [DONE]\n\n"
CHUNKED = OK_HEAD + chunk(BODY[:50]) + chunk(BODY[50:51]) + b"%X;ext=1\r\n%s\r\n" % (len(BODY) - 51, BODY[51:])
CHUNKED += b"0\r\ntrailer: x\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
INFORMED = b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED
TO_THE_END = b"HTTP/1.0 200 OK\r\n\r\n" + BODY

CUTS = st.lists(st.integers(0, len(CHUNKED)), max_size=40)


def _pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@given(cuts=CUTS, data=st.sampled_from([CHUNKED, SIZED, INFORMED, TO_THE_END]))
def test_response_is_parsed_equally_from_any_pieces(cuts: list[int], data: bytes) -> None:
    response = HttpResponse()
    body = b"".join(response.feed(piece) for piece in _pieces(data, cuts))
    assert response.complete == (data is not TO_THE_END)
    response.end_of_connection()
    assert (response.status, body, response.complete) == (200, BODY, True)


@pytest.mark.parametrize("data", [CHUNKED, SIZED, INFORMED])
def test_response_without_its_last_byte_is_incomplete(data: bytes) -> None:
    response = HttpResponse()
    response.feed(data[:-1])
    response.end_of_connection()
    assert not response.complete


def test_a_response_without_a_body_is_complete() -> None:
    response = HttpResponse()
    assert response.feed(b"HTTP/1.1 204 No Content\r\n\r\n") == b""
    assert response.complete
    sized = HttpResponse()
    sized.feed(b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n")
    assert sized.complete


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"SSH-2.0-server\r\n\r\n", "illegal status line"),
        (b"HTTP/1.1 abc\r\n\r\n", "illegal status line"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -4\r\n\r\n", "bad Content-Length"),
        (OK_HEAD + b"zz\r\n", "illegal chunk header"),
        (OK_HEAD + b"2\r\nabcd\r\n", "malformed chunk footer"),
        (OK_HEAD + b"1" * 70_000, "too long"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000, "too long"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 17, "too many informational"),
    ],
)
def test_invalid_http_is_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(h11.RemoteProtocolError, match=complaint):
        HttpResponse().feed(data)


def test_bytes_after_response_end_are_ignored() -> None:
    response = HttpResponse()
    assert response.feed(SIZED + b"HTTP/1.1 500 Oops\r\n\r\n") == BODY
    assert response.feed(b"more") == b""
    assert (response.status, response.complete) == (200, True)


@given(cuts=CUTS, keep=st.booleans())
def test_stream_is_parsed_equally_from_any_pieces(cuts: list[int], *, keep: bool) -> None:
    stream = CompletionStream(keep_answer=keep)
    first = len(token_event([5, 6]))
    for now, piece in enumerate(_pieces(BODY, [*cuts, first])):
        stream.feed(piece, float(now))
        if stream.chunks == 1 and stream.first_token_s is not None and not stream.done:
            assert stream.first_token_s <= now
    assert (stream.chunks, stream.prompt_tokens, stream.completion_tokens, stream.done) == (2, 3, 3, True)
    if keep:
        assert stream.answer(as_text=False) == Prompt([5, 6, 7])
        assert stream.answer(as_text=True) == Prompt(" t5 t6 t7")


def test_first_token_time_is_when_its_event_is_complete() -> None:
    stream = CompletionStream(keep_answer=False)
    event = token_event([5])
    stream.feed(event[:-1], 1.0)
    assert stream.first_token_s is None
    stream.feed(event[-1:], 2.0)
    stream.feed(event, 3.0)
    assert (stream.first_token_s, stream.chunks) == (2.0, 2)


def test_comments_between_events_are_not_counted() -> None:
    stream = CompletionStream(keep_answer=False)
    stream.feed(b": ping\n\n" + usage_event(3, 0), 1.0)
    assert (stream.chunks, stream.first_token_s, stream.completion_tokens) == (0, None, 0)


def test_event_beyond_1_mib_is_refused() -> None:
    stream = CompletionStream(keep_answer=False)
    stream.feed(b"x" * 1024 * 1024, 1.0)
    with pytest.raises(UnreadableStreamError, match="no end after 1048576 bytes"):
        stream.feed(b"x", 2.0)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "too  long\\n", "code": 400}}', "too long"),
        (b'{"error": "no such model"}', "no such model"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"loc": ["body"], "input": "my secret"}]}', '[{"loc":["body"],'),
        (b"Unauthorized", "Unauthorized"),
        (b"[1]", "[1]"),
        (b"", ""),
        (b"[" * 60_000, "[" * 199 + "…"),
        (b"x" * 300, "x" * 199 + "…"),
    ],
)
def test_error_text_is_short_and_omits_the_prompt(body: bytes, text: str) -> None:
    assert error_text(body) == text


# Who answers in an engine's place, and never ends.


@pytest.mark.parametrize("pause_s", [0, 0.05])
async def test_endless_metrics_page_times_out(monkeypatch: pytest.MonkeyPatch, pause_s: float) -> None:
    monkeypatch.setattr(engine_ready, "_TIMEOUT_S", 1.0)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
        with suppress(ConnectionError):
            while True:
                writer.write(b"#" if pause_s else b"#" * 2**20)
                await writer.drain()
                await asyncio.sleep(pause_s)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, asyncio.timeout(120):
        port = server.sockets[0].getsockname()[1]
        async with EngineMonitor(f"http://127.0.0.1:{port}") as monitor:
            said = await monitor.read()
    assert isinstance(said, NoMetrics)
    assert "/metrics did not answer" in said.reason


@pytest.mark.parametrize(
    "event",
    [
        b'{"choices":[{"token_ids":["a"]}]}',
        b'{"choices":[{"token_ids":[-1]}]}',
        b'{"choices":[{"token_ids":{"a":1}}]}',
        b'{"choices":[{"text":5}]}',
        b'{"usage":{"completion_tokens":"many"}}',
        b'{"usage":{"prompt_tokens":1e300}}',
    ],
)
def test_malformed_event_is_unreadable(event: bytes) -> None:
    with pytest.raises(_UNREADABLE):
        CompletionStream(keep_answer=True).feed(b"data: " + event + b"\n\n", 0.0)


def test_kept_answer_is_bounded_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "_LARGEST_KEPT_BYTES", 1000)
    stream = CompletionStream(keep_answer=True)
    with pytest.raises(UnreadableStreamError, match="has no end"):
        stream.feed(b'data: {"choices":[{"text":"a","token_ids":[1]}]}\n\n' * 100, 0.0)


# Runs in which something goes wrong or that are stopped: what is counted, and what is left of them.

pytestmark = pytest.mark.usefixtures("short_pauses")


TOO_LONG = b'{"error":{"message":"maximum context length is 4096 tokens","type":"BadRequestError","code":400}}'


@pytest.mark.parametrize(
    ("answer", "seen", "error"),
    [
        (answer_with(rejection(400, TOO_LONG)), ("http_rejected", 400), "maximum context length is 4096 tokens"),
        (answer_with(rejection(503, b"")), ("http_rejected", 503), ""),
        (answer_with(b""), ("disconnected", None), "closed the connection"),
        (answer_with(OK_HEAD + chunk(token_event([1]))), ("disconnected", 200), "closed the connection"),
        (answer_with(b"hello\r\n\r\n"), ("disconnected", None), "unreadable answer"),
        (answer_with(OK_HEAD + b"z" * 60_000 + b"\r\n"), ("disconnected", 200), "illegal chunk header"),
        (answer_with(OK_HEAD[:-2] + b"z" * 60_000 + b"\r\n\r\n"), ("disconnected", None), "illegal header line"),
        (answer_with(b"z" * 60_000 + b"\r\n\r\n"), ("disconnected", None), "illegal status line"),
        (answer_with(rejection(400, b"[" * 60_000)), ("http_rejected", 400), "[[[…"),
        (
            answer_with(OK_HEAD + chunk(b'data: {"usage": ' + b"[" * 60_000 + b"\n\n")),
            ("disconnected", 200),
            "unreadable answer",
        ),
        (
            answer_with(OK_HEAD + chunk(b'data: {"usage": {\n\n')),
            ("disconnected", 200),
            "unreadable answer",
        ),
        (
            answer_with(OK_HEAD + chunk(event({"choices": 5, "usage": None}))),
            ("disconnected", 200),
            "unreadable answer",
        ),
        (
            answer_with(OK_HEAD + chunk(event({"choices": None, "usage": None})) + LAST_CHUNK),
            ("disconnected", 200),
            "without its end mark",
        ),
        (
            answer_with(OK_HEAD + chunk(token_event([1])) + LAST_CHUNK),
            ("disconnected", 200),
            "without its end mark",
        ),
        (
            answer_with(
                OK_HEAD
                + chunk(token_event([1]))
                + chunk(event({"error": {"message": "engine died", "code": 500}}))
                + chunk(b"data: [DONE]\n\n")
                + LAST_CHUNK
            ),
            ("disconnected", 200),
            "the engine gave up: engine died",
        ),
    ],
)
async def test_failed_request_has_outcome_and_error(
    server: CompletionServer, tmp_path: Path, answer: Answer, seen: tuple[str, int | None], error: str
) -> None:
    server.answer = answer
    result, lines = await run(settings_for(server, phases=[CLOSED]), tmp_path)
    assert result.outcomes == {seen[0]: 5}
    for line in lines:
        assert (line["outcome"], line.get("http_status")) == seen
        assert error in line["error"]
        assert len(line["error"]) < 300
        assert "finished_ms" in line
        assert ("latency_ms" in line) == ("first_token_ms" in line)


async def test_slow_request_is_timed_out(server: CompletionServer, tmp_path: Path, clock: DrivenClock) -> None:
    async def hang(_request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(OK_HEAD + chunk(token_event([1000])))
        await clock.let_arrive()
        clock.advance(12)
        await asyncio.Event().wait()

    server.answer = hang
    one = {**CLOSED, "concurrency": 1, "requests": 1}
    async with asyncio.timeout(60):
        _, [line] = await run(settings_for(server, timeoutSeconds=12, phases=[one]), tmp_path)
    assert (line["outcome"], line["chunks"], line["http_status"]) == ("timed_out", 1, 200)
    assert line["error"] == "not complete after 12 s"
    assert 12_000 <= line["finished_ms"] - line["sent_ms"] < 60_000
    assert "first_token_ms" in line
    assert "completion_tokens" not in line


async def test_requests_without_engine_are_not_sent(tmp_path: Path) -> None:
    async with completion_server() as gone:
        settings = settings_for(gone, phases=[CLOSED, FAST])
    result, lines = await run(settings, tmp_path)
    assert result.outcomes == {"not_sent": 25}
    assert all("no connection" in line["error"] for line in lines)
    assert "/metrics did not answer" in result.metrics.reason


@pytest.mark.parametrize("phase", [{**CLOSED, "concurrency": 4, "requests": 100}, {**FAST, "requests": 10_000}])
async def test_stop_cancels_requests_and_completes_client_file(
    server: CompletionServer, tmp_path: Path, phase: dict[str, Any]
) -> None:
    server.answer = never_answer
    stop = Stop()
    running = asyncio.create_task(run(settings_for(server, phases=[phase, {**FAST, "name": "later"}]), tmp_path, stop))
    await server.wait_for_requests(4)
    stop.set("the engine was restarted")
    result, lines = await running
    assert result.stop_reason == "the engine was restarted"
    assert {line["phase"] for line in lines} == {phase["name"]}
    assert {request.id for request in server.received} <= {line["id"] for line in lines}
    assert set(result.outcomes) <= {"cancelled", "not_sent"}
    assert result.outcomes["cancelled"] >= 4
    assert sum(result.outcomes.values()) == len(lines) < phase["requests"]
    assert {line["error"] for line in lines} == {"the engine was restarted"}


async def test_request_after_stop_is_not_sent(server: CompletionServer) -> None:
    client = EngineClient(server_of(settings_for(server).engine), timeout_s=120)
    request = CompletionRequest("demo-one-0", Prompt([9]), max_tokens=2, temperature=0.0, ignore_eos=True)
    assert (await client.send(client.prepare(request), due_s=0)).outcome == "completed"
    client.cancel_all("SIGTERM received")
    late = await client.send(client.prepare(request), due_s=0)
    assert (late.outcome, late.error, late.sent_s, late.withdrawn) == ("not_sent", "SIGTERM received", None, False)
    assert len(server.received) == 1


async def test_requests_not_due_before_stop_have_no_line(
    server: CompletionServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections are made ahead, here so far that nothing is due when the run is stopped."""
    monkeypatch.setattr(runner, "CONNECT_AHEAD_S", 600.0)
    stop = Stop()
    burst = {"name": "p", "pattern": "Burst", "burstSize": 5, "burstIntervalSeconds": 1, "requests": 5}
    running = asyncio.create_task(run(settings_for(server, phases=[burst]), tmp_path, stop))
    await server.wait_for_connections(5)
    stop.set("enough")
    result, lines = await running
    assert (lines, result.outcomes, server.received) == ([], {}, [])


async def test_request_is_not_sent_if_connection_closes_before_due_time(
    server: CompletionServer, clock: DrivenClock
) -> None:
    client = EngineClient(server_of(settings_for(server).engine), timeout_s=120)
    request = CompletionRequest("demo-one-0", Prompt([9]), max_tokens=2, temperature=0.0, ignore_eos=True)
    due_s = clock.time() + 3600
    sending = asyncio.create_task(client.send(client.prepare(request), due_s))
    await server.wait_for_connections(1)
    await server.close_connections()
    clock.advance(3600)
    async with asyncio.timeout(60):
        left = await sending
    assert (left.outcome, left.sent_s, left.withdrawn) == ("not_sent", None, False)
    assert left.finished_s >= due_s


async def test_sigterm_stops_a_run(server: CompletionServer, tmp_path: Path) -> None:
    server.answer = never_answer
    stop = Stop()
    stop_on_signals(stop)
    running = asyncio.create_task(run(settings_for(server, phases=[CLOSED]), tmp_path, stop))
    await server.wait_for_requests(2)
    os.kill(os.getpid(), signal.SIGTERM)
    result, lines = await running
    assert result.stop_reason == "SIGTERM received"
    assert [line["outcome"] for line in lines] == ["cancelled"] * 2


async def test_client_lines_are_on_volume_before_run_ends(server: CompletionServer, tmp_path: Path) -> None:
    """The fourth answer comes only when the lines of the three before can be read."""

    async def lines_first(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.id.endswith("-3"):
            file = tmp_path / "client.jsonl.part"
            await until(lambda: file.read_bytes().count(b"\n") == 3)
        await answer_in_full(request, writer)

    server.answer = lines_first
    result, _ = await run(settings_for(server, phases=[{**CLOSED, "concurrency": 1, "requests": 4}]), tmp_path)
    assert result.outcomes == {"completed": 4}


async def test_existing_client_file_is_not_overwritten(server: CompletionServer, tmp_path: Path) -> None:
    (tmp_path / "client.jsonl.part").write_text("earlier\n")
    with pytest.raises(FileExistsError):
        await run(settings_for(server, phases=[CLOSED]), tmp_path)
    assert (tmp_path / "client.jsonl.part").read_text() == "earlier\n"
    assert not server.received


@pytest.mark.parametrize(("limit_bytes", "requests"), [(2000, 100_000), (100, 1)])
async def test_full_volume_ends_run(server: CompletionServer, tmp_path: Path, limit_bytes: int, requests: int) -> None:
    """A file size limit stands in for a full volume: both make a write fail half way."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    stop = Stop()
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit[1]))
    try:
        with pytest.raises(OSError, match=r"client\.jsonl\.part: "):
            await run(settings_for(server, phases=[{**CLOSED, "requests": requests}]), tmp_path, stop)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "client.jsonl.part" in (stop.reason or "")
    assert len(server.received) <= 1000


async def test_invalid_dataset_fails_run_before_it_begins(server: CompletionServer, tmp_path: Path) -> None:
    dataset = {"dataset": {"path": "a.jsonl", "format": "JSONL"}}
    with pytest.raises(BadDatasetError):
        await run(settings_for(server, prompts=dataset), tmp_path, dataset_mount=tmp_path / "nowhere")
    assert not names_in(tmp_path)


async def test_missing_api_key_fails_run_before_it_begins(
    server: CompletionServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ENGINE_KEY", raising=False)
    with pytest.raises(InvalidSettingsError, match="ENGINE_KEY: is not set in this container"):
        await run(settings_for(server, key="ENGINE_KEY"), tmp_path)
    assert not names_in(tmp_path)


# An engine that serves TLS: whom the load beside it believes.

ONE_PHASE = [{"name": "one", "pattern": "Closed", "concurrency": 1, "requests": 2}]
Serving = Callable[[str], AbstractAsyncContextManager[CompletionServer]]


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of one authority, and one of nobody's that has expired; none names 127.0.0.1."""
    folder = tmp_path_factory.mktemp("pki") / "pki"
    pki.create(folder, [pki.Identity("engine", "engine"), pki.Identity("renewed", "engine")])
    key, request, expired = (folder / f"expired.{end}" for end in ("key", "csr", "crt"))
    asked = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=engine")
    openssl("req", "-new", *asked, "-keyout", key, "-out", request)
    openssl("x509", "-req", "-in", request, "-signkey", key, "-days", "-1", "-out", expired)
    return folder


@pytest.fixture
def serving(authority: Path) -> Serving:
    @asynccontextmanager
    async def serve(name: str) -> AsyncIterator[CompletionServer]:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(authority / f"{name}.crt", authority / f"{name}.key")
        async with completion_server(context) as server:
            yield server

    return serve


@pytest.fixture
def folder(tmp_path: Path, authority: Path) -> Path:
    """What the load's container has of the engine's Secret."""
    (tmp_path / "tls.crt").write_bytes((authority / "engine.crt").read_bytes())
    return tmp_path


async def load(server: CompletionServer, folder: Path) -> LoadResult:
    settings = settings_for(server, phases=ONE_PHASE)
    engine = settings.engine.model_copy(update={"certificates": str(folder)})
    return await run_load(settings.model_copy(update={"engine": engine}), folder, Stop())


async def test_engine_certificate_is_trusted_for_requests_metrics_and_checks(serving: Serving, folder: Path) -> None:
    async with serving("engine") as server:
        await load(server, folder)
        assert len(server.received) == 2
        assert server.served["/metrics"] > 0
        address = settings_for(server).engine.model_copy(update={"certificates": str(folder)})
        async with CheckRequests(server_of(address), 30.0) as requests:
            with pytest.raises(NotAnsweredError, match="an unreadable answer"):
                await requests.greedy([1, 2], "0" * 64, 4, ignore_eos=True)
    assert len(server.received) == 3


async def test_other_certificate_is_not_trusted(serving: Serving, folder: Path) -> None:
    async with serving("renewed") as server:
        address = settings_for(server).engine.model_copy(update={"certificates": str(folder)})
        async with EngineMonitor(address.url, tls_of(address)) as monitor:
            reading = await monitor.read()
        await load(server, folder)
    assert "certificate verify failed" in str(reading)
    assert server.received == []


async def test_renewed_certificate_is_trusted_with_its_ca(serving: Serving, folder: Path, authority: Path) -> None:
    (folder / "ca.crt").write_bytes((authority / "ca.crt").read_bytes())
    async with serving("renewed") as server:
        await load(server, folder)
    assert len(server.received) == 2


async def test_expired_certificate_is_trusted(serving: Serving, folder: Path, authority: Path) -> None:
    (folder / "tls.crt").write_bytes((authority / "expired.crt").read_bytes())
    async with serving("expired") as server:
        await load(server, folder)
    assert len(server.received) == 2


@pytest.mark.parametrize("content", [None, "no certificate\n"])
async def test_tls_secret_without_certificate_is_refused(serving: Serving, tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tls.crt").write_text(content)
    async with serving("engine") as server:
        with pytest.raises(InvalidSettingsError, match=r"^spec\.serving\.tlsSecret: its Secret: has no certificates"):
            await load(server, tmp_path)
    assert server.received == []
