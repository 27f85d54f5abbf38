"""Runs in which something goes wrong or that are stopped: what is counted, and what is left of them."""

import asyncio
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.capture.load import runner
from specdecode_operator.capture.load.datasets import BadDatasetError
from specdecode_operator.capture.load.engine_client import CompletionRequest, EngineClient, server_of
from specdecode_operator.capture.load.prompts import Prompt
from specdecode_operator.capture.load.run_settings import InvalidSettingsError
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
)
from tests.support.driven_clock import DrivenClock
from tests.support.load_runs import CLOSED, FAST, names_in, run, settings_for, until

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
async def test_what_goes_wrong_is_an_outcome(
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


async def test_one_that_takes_too_long_is_timed_out(
    server: CompletionServer, tmp_path: Path, clock: DrivenClock
) -> None:
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


async def test_without_an_engine_nothing_is_sent(tmp_path: Path) -> None:
    async with completion_server() as gone:
        settings = settings_for(gone, phases=[CLOSED, FAST])
    result, lines = await run(settings, tmp_path)
    assert result.outcomes == {"not_sent": 25}
    assert all("no connection" in line["error"] for line in lines)
    assert "/metrics did not answer" in result.metrics.reason


@pytest.mark.parametrize("phase", [{**CLOSED, "concurrency": 4, "requests": 100}, {**FAST, "requests": 10_000}])
async def test_a_stop_cancels_and_leaves_a_complete_file(
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


async def test_what_was_to_be_sent_just_as_a_run_is_stopped_is_not(server: CompletionServer) -> None:
    client = EngineClient(server_of(settings_for(server).engine), timeout_s=120)
    request = CompletionRequest("demo-one-0", Prompt([9]), max_tokens=2, temperature=0.0, ignore_eos=True)
    assert (await client.send(client.prepare(request), due_s=0)).outcome == "completed"
    client.cancel_all("SIGTERM received")
    late = await client.send(client.prepare(request), due_s=0)
    assert (late.outcome, late.error, late.sent_s, late.withdrawn) == ("not_sent", "SIGTERM received", None, False)
    assert len(server.received) == 1


async def test_what_was_not_due_when_a_run_is_stopped_is_no_request_at_all(
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


async def test_an_engine_that_leaves_before_a_request_is_due_did_not_get_it(
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


async def test_lines_are_on_the_volume_before_the_run_ends(server: CompletionServer, tmp_path: Path) -> None:
    """The fourth answer comes only when the lines of the three before can be read."""

    async def lines_first(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.id.endswith("-3"):
            file = tmp_path / "client.jsonl.part"
            await until(lambda: file.read_bytes().count(b"\n") == 3)
        await answer_in_full(request, writer)

    server.answer = lines_first
    result, _ = await run(settings_for(server, phases=[{**CLOSED, "concurrency": 1, "requests": 4}]), tmp_path)
    assert result.outcomes == {"completed": 4}


async def test_an_earlier_runs_file_is_never_touched(server: CompletionServer, tmp_path: Path) -> None:
    (tmp_path / "client.jsonl.part").write_text("earlier\n")
    with pytest.raises(FileExistsError):
        await run(settings_for(server, phases=[CLOSED]), tmp_path)
    assert (tmp_path / "client.jsonl.part").read_text() == "earlier\n"
    assert not server.received


@pytest.mark.parametrize(("limit_bytes", "requests"), [(2000, 100_000), (100, 1)])
async def test_a_volume_that_takes_no_more_ends_the_run(
    server: CompletionServer, tmp_path: Path, limit_bytes: int, requests: int
) -> None:
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


async def test_a_bad_dataset_ends_the_run_before_it_begins(server: CompletionServer, tmp_path: Path) -> None:
    dataset = {"dataset": {"path": "a.jsonl", "format": "JSONL"}}
    with pytest.raises(BadDatasetError):
        await run(settings_for(server, prompts=dataset), tmp_path, dataset_mount=tmp_path / "nowhere")
    assert not names_in(tmp_path)


async def test_a_key_that_is_not_there_ends_the_run_before_it_begins(
    server: CompletionServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ENGINE_KEY", raising=False)
    with pytest.raises(InvalidSettingsError, match="ENGINE_KEY: is not set in this container"):
        await run(settings_for(server, key="ENGINE_KEY"), tmp_path)
    assert not names_in(tmp_path)
