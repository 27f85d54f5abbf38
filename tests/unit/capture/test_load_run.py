"""Whole runs against a real HTTP server: what is sent, and what is written of it."""

import asyncio
import json
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.capture.load import phases
from specdecode_operator.capture.load.client import CompletionRequest, EngineClient
from specdecode_operator.capture.load.datasets import BadDatasetError
from specdecode_operator.capture.load.prompts import Prompt
from specdecode_operator.capture.load.runner import LoadResult, run_load
from specdecode_operator.capture.load.stop import Stop, stop_on_signals
from specdecode_operator.capture.load.workload import InvalidSettingsError, RunSettings, read_settings
from tests.support.completion_server import (
    LAST_CHUNK,
    OK_HEAD,
    Answer,
    CompletionServer,
    Received,
    answer_in_full,
    answer_with,
    answered_tokens,
    chunk,
    completion_server,
    event,
    never_answer,
    rejection,
    token_event,
)
from tests.support.recordings import Recording, Scenario

SHORT = {"synthetic": {"promptTokens": 12, "outputTokens": 6, "sharedPrefixTokens": 4}}
CLOSED = {"name": "one", "pattern": "Closed", "concurrency": 2, "requests": 5}
FAST = {"name": "fast", "pattern": "Constant", "requestsPerSecond": "200", "requests": 20}


@pytest.fixture
async def server() -> AsyncIterator[CompletionServer]:
    async with completion_server() as running:
        yield running


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "FAILURE_PAUSE_S", 0.0)
    monkeypatch.setattr(phases, "CONNECT_AHEAD_S", 0.05)


def _settings(server: CompletionServer, seed: int = 7, key: str | None = None, **workload: Any) -> RunSettings:
    engine = {"url": server.url, "model": "demo", "max_model_len": 4096, "vocab_size": 32000, "api_key_variable": key}
    document = {
        "namespace": "n",
        "capture": "demo",
        "seed": seed,
        "engine": engine,
        "workload": {"prompts": SHORT, "warmupRequests": 0, "timeoutSeconds": 30, **workload},
    }
    return read_settings(json.dumps(document))


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - a thread and a clock change it, and tell nobody
            await asyncio.sleep(0.01)


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def _run(
    settings: RunSettings, folder: Path, stop: Stop | None = None, **options: Any
) -> tuple[LoadResult, list[dict[str, Any]]]:
    result = await run_load(settings, folder, stop or Stop(), **{"emit": lambda _line: None, **options})
    assert result.client_file == folder / "client.jsonl.part"
    assert _names(folder) == ["client.jsonl.part"]
    return result, [json.loads(line) for line in result.client_file.read_text().splitlines()]


async def test_a_request_is_what_vllm_takes_and_its_line_says_what_became_of_it(
    server: CompletionServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "secret\n")
    one = {**CLOSED, "concurrency": 1, "requests": 1}
    result, [line] = await _run(_settings(server, key="ENGINE_KEY", phases=[one]), tmp_path)

    [request] = server.received
    prompt = request.body.pop("prompt")
    assert len(prompt) == 12
    assert request.body == {
        "model": "demo",
        "max_tokens": 6,
        "temperature": 0.0,
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert request.id == "demo-one-0"
    assert request.headers["authorization"] == "Bearer secret"

    times = {name: line.pop(name) for name in tuple(line) if name.endswith("_ms")}
    assert line == {
        "id": "demo-one-0",
        "phase": "one",
        "index": 0,
        "outcome": "completed",
        "warmup": False,
        "http_status": 200,
        "prompt_tokens": 12,
        "max_tokens": 6,
        "completion_tokens": 6,
        "chunks": 3,
        "temperature": 0.0,
        "n": 1,
    }
    assert 0 <= times["scheduled_ms"] <= times["sent_ms"] <= times["first_token_ms"] <= times["finished_ms"]
    assert times["late_ms"] == pytest.approx(times["sent_ms"] - times["scheduled_ms"], abs=0.002)
    assert times["ttft_ms"] == pytest.approx(times["first_token_ms"] - times["sent_ms"], abs=0.002)
    assert times["latency_ms"] == pytest.approx(times["finished_ms"] - times["sent_ms"], abs=0.002)
    assert result.outcomes == {"completed": 1}
    assert result.stop_reason is None


@pytest.mark.parametrize(
    "phase",
    [
        CLOSED,
        FAST,
        {"name": "p", "pattern": "Poisson", "requestsPerSecond": "300", "requests": 20},
        {"name": "p", "pattern": "Burst", "burstSize": 8, "burstIntervalSeconds": 0.05, "requests": 20},
        {
            "name": "p",
            "pattern": "Staircase",
            "requestsPerSecond": "100",
            "stepSeconds": 0.05,
            "stepRequestsPerSecond": "100",
            "requests": 20,
        },
        {"name": "p", "pattern": "Multiturn", "concurrency": 2, "turns": 3, "requests": 11},
    ],
    ids=lambda phase: phase["pattern"],
)
async def test_every_pattern_sends_exactly_its_requests(
    server: CompletionServer, tmp_path: Path, phase: dict[str, Any]
) -> None:
    result, lines = await _run(_settings(server, phases=[phase]), tmp_path)
    count = phase["requests"]
    assert sorted(line["index"] for line in lines) == list(range(count))
    assert {request.id for request in server.received} == {line["id"] for line in lines}
    assert result.outcomes == {"completed": count}
    [part] = result.phases
    assert (part.name, part.requests, part.planned) == (phase["name"], count, count)


async def test_lines_are_in_the_order_of_sending(server: CompletionServer, tmp_path: Path) -> None:
    """The first request ends last; its line is the first nevertheless."""

    async def first_waits(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.id.endswith("-0"):
            await server.wait_for_requests(20)
        await answer_in_full(request, writer)

    server.answer = first_waits
    _, lines = await _run(_settings(server, phases=[FAST]), tmp_path)
    assert [line["index"] for line in lines] == list(range(20))
    assert max(lines, key=lambda line: line["finished_ms"])["index"] == 0


async def test_an_open_loop_does_not_wait_for_answers(server: CompletionServer, tmp_path: Path) -> None:
    """Nobody is answered before all have been sent: a closed loop would never end here."""

    async def after_all(request: Received, writer: asyncio.StreamWriter) -> None:
        await server.wait_for_requests(20)
        await answer_in_full(request, writer)

    server.answer = after_all
    result, lines = await _run(_settings(server, phases=[FAST]), tmp_path)
    assert result.outcomes == {"completed": 20}
    distances = [lines[index]["scheduled_ms"] - lines[0]["scheduled_ms"] for index in range(20)]
    assert distances == pytest.approx([5 * index for index in range(20)], abs=0.002)
    for line in lines:
        assert line["late_ms"] == pytest.approx(line["sent_ms"] - line["scheduled_ms"], abs=0.002)


async def test_a_closed_loop_keeps_its_concurrency(server: CompletionServer, tmp_path: Path) -> None:
    async def in_threes(request: Received, writer: asyncio.StreamWriter) -> None:
        number = server.received.index(request)
        await server.wait_for_requests(number - number % 3 + 3)
        await answer_in_full(request, writer)

    server.answer = in_threes
    await _run(_settings(server, phases=[{**CLOSED, "concurrency": 3, "requests": 12}]), tmp_path)
    assert server.most_in_flight == 3


async def test_three_hundred_at_once(server: CompletionServer, tmp_path: Path) -> None:
    """Nobody is answered before all have arrived: a limit on connections anywhere would end in time-outs."""

    async def after_all(request: Received, writer: asyncio.StreamWriter) -> None:
        await server.wait_for_requests(300)
        await answer_in_full(request, writer)

    server.answer = after_all
    burst = {"name": "p", "pattern": "Burst", "burstSize": 300, "burstIntervalSeconds": 1, "requests": 300}
    result, lines = await _run(_settings(server, phases=[burst]), tmp_path)
    assert result.outcomes == {"completed": 300}
    assert server.most_in_flight == 300
    assert {line["scheduled_ms"] for line in lines} == {lines[0]["scheduled_ms"]}


async def test_a_phase_with_a_duration_ends(server: CompletionServer, tmp_path: Path) -> None:
    phase = {"name": "short", "pattern": "Closed", "concurrency": 2, "durationSeconds": 0.2}
    result, lines = await _run(_settings(server, phases=[phase]), tmp_path)
    assert lines
    assert result.phases[0].planned is None
    assert all(line["scheduled_ms"] <= result.phases[0].started_ms + 200 for line in lines)


async def test_warm_up_comes_first_and_apart(server: CompletionServer, tmp_path: Path) -> None:
    result, lines = await _run(_settings(server, warmupRequests=3, phases=[CLOSED, FAST]), tmp_path)
    assert [line["phase"] for line in lines] == ["warmup"] * 3 + ["one"] * 5 + ["fast"] * 20
    assert [line["warmup"] for line in lines] == [True] * 3 + [False] * 25
    assert result.outcomes == {"completed": 25}
    assert [phase.name for phase in result.phases] == ["warmup", "one", "fast"]


async def test_the_same_seed_asks_the_same(server: CompletionServer, tmp_path: Path) -> None:
    mix = [{"temperature": "0.0", "sharePercent": 40}, {"temperature": "0.7", "sharePercent": 60}]

    async def asked(name: str, seed: int) -> dict[str, Any]:
        server.received.clear()
        (tmp_path / name).mkdir()
        await _run(_settings(server, seed=seed, temperatures=mix, phases=[CLOSED, FAST]), tmp_path / name)
        return {request.id: request.body for request in server.received}

    first = await asked("a", 7)
    assert await asked("b", 7) == first
    assert await asked("c", 8) != first
    temperatures = Counter(body["temperature"] for body in first.values())
    assert temperatures == {0.0: 10, 0.7: 15}
    prefixes = {tuple(body["prompt"][:4]) for body in first.values()}
    assert len(prefixes) == 1


async def test_conversations_grow_by_answer_and_message(server: CompletionServer, tmp_path: Path) -> None:
    phase = {"name": "talk", "pattern": "Multiturn", "concurrency": 2, "turns": 3, "requests": 12}
    _, lines = await _run(_settings(server, phases=[phase]), tmp_path)
    by_turn = {(line["session"], line["turn"]): line["id"] for line in lines}
    assert sorted(by_turn) == [(session, turn) for session in range(4) for turn in range(3)]
    for session in range(4):
        requests = [server.request(by_turn[session, turn]) for turn in range(3)]
        prompts = [request.body["prompt"] for request in requests]
        assert [len(prompt) for prompt in prompts] == [12, 12 + 6 + 8, 12 + 2 * (6 + 8)]
        for request, prompt, longer in zip(requests, prompts, prompts[1:], strict=False):
            assert request.body["return_token_ids"] is True
            said = prompt + answered_tokens(request)
            assert longer[: len(said)] == said
    assert len({tuple(server.request(by_turn[session, 0]).body["prompt"][:4]) for session in range(4)}) == 1


async def test_what_a_conversation_says_does_not_depend_on_who_was_free_first(
    server: CompletionServer, tmp_path: Path
) -> None:
    async def opened(concurrency: int) -> dict[int, list[int]]:
        """The first prompt of each conversation."""
        server.received.clear()
        folder = tmp_path / str(concurrency)
        folder.mkdir()
        phase = {"name": "talk", "pattern": "Multiturn", "concurrency": concurrency, "turns": 3, "requests": 12}
        _, lines = await _run(_settings(server, phases=[phase]), folder)
        first = [line for line in lines if line["turn"] == 0]
        return {line["session"]: server.request(line["id"]).body["prompt"] for line in first}

    assert await opened(1) == await opened(4)


async def test_a_conversation_ends_where_a_turn_fails(server: CompletionServer, tmp_path: Path) -> None:
    """As when it has outgrown the model: the next turn would be longer still."""

    async def short_only(request: Received, writer: asyncio.StreamWriter) -> None:
        short = len(request.body["prompt"]) <= 26
        await (answer_in_full if short else answer_with(rejection(400, b'{"error":"long"}')))(request, writer)

    server.answer = short_only
    phase = {"name": "talk", "pattern": "Multiturn", "concurrency": 1, "turns": 5, "requests": 7}
    _, lines = await _run(_settings(server, phases=[phase]), tmp_path)
    turns = [(line["session"], line["turn"], line["outcome"]) for line in lines]
    once = [(0, "completed"), (1, "completed"), (2, "http_rejected")]
    assert turns == [(session, *part) for session in (0, 1) for part in once] + [(2, 0, "completed")]


TOO_LONG = b'{"error":{"message":"maximum context length is 4096 tokens","type":"BadRequestError","code":400}}'


@pytest.mark.parametrize(
    ("answer", "seen", "error"),
    [
        (answer_with(rejection(400, TOO_LONG)), ("http_rejected", 400), "maximum context length is 4096 tokens"),
        (answer_with(rejection(503, b"")), ("http_rejected", 503), ""),
        (answer_with(b""), ("disconnected", None), "closed the connection"),
        (answer_with(OK_HEAD + chunk(token_event([1]))), ("disconnected", 200), "closed the connection"),
        (answer_with(b"hello\r\n\r\n"), ("disconnected", None), "unreadable answer"),
        (
            answer_with(OK_HEAD + chunk(b'data: {"usage": {\n\n')),
            ("disconnected", 200),
            "unreadable answer",
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
    result, lines = await _run(_settings(server, phases=[CLOSED]), tmp_path)
    assert result.outcomes == {seen[0]: 5}
    for line in lines:
        assert (line["outcome"], line.get("http_status")) == seen
        assert error in line["error"]
        assert "finished_ms" in line


async def test_one_that_takes_too_long_is_timed_out(server: CompletionServer, tmp_path: Path) -> None:
    server.answer = never_answer
    one = {**CLOSED, "concurrency": 1, "requests": 1}
    _, [line] = await _run(_settings(server, timeoutSeconds=0.2, phases=[one]), tmp_path)
    assert (line["outcome"], line["chunks"], line["http_status"]) == ("timed_out", 1, 200)
    assert line["error"] == "not complete after 0.2 s"
    assert "first_token_ms" in line
    assert "completion_tokens" not in line


async def test_without_an_engine_nothing_is_sent(tmp_path: Path) -> None:
    async with completion_server() as gone:
        settings = _settings(gone, phases=[CLOSED, FAST])
    result, lines = await _run(settings, tmp_path)
    assert result.outcomes == {"not_sent": 25}
    assert all("no connection" in line["error"] for line in lines)
    assert "/metrics did not answer" in result.metrics.reason


@pytest.mark.parametrize("phase", [{**CLOSED, "concurrency": 4, "requests": 100}, {**FAST, "requests": 10_000}])
async def test_a_stop_cancels_and_leaves_a_complete_file(
    server: CompletionServer, tmp_path: Path, phase: dict[str, Any]
) -> None:
    server.answer = never_answer
    stop = Stop()
    running = asyncio.create_task(_run(_settings(server, phases=[phase, {**FAST, "name": "later"}]), tmp_path, stop))
    await server.wait_for_requests(4)
    stop.set("the engine was restarted")
    result, lines = await running
    assert result.stop_reason == "the engine was restarted"
    assert [part.name for part in result.phases] == [phase["name"]]
    assert {request.id for request in server.received} <= {line["id"] for line in lines}
    assert set(result.outcomes) <= {"cancelled", "not_sent"}
    assert result.outcomes["cancelled"] >= 4
    assert sum(result.outcomes.values()) == len(lines) < phase["requests"]
    assert {line["error"] for line in lines} == {"the engine was restarted"}


async def test_what_was_to_be_sent_just_as_a_run_is_stopped_is_not(server: CompletionServer) -> None:
    client = EngineClient(_settings(server).engine, timeout_s=30)
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
    monkeypatch.setattr(phases, "CONNECT_AHEAD_S", 600.0)
    stop = Stop()
    burst = {"name": "p", "pattern": "Burst", "burstSize": 5, "burstIntervalSeconds": 1, "requests": 5}
    running = asyncio.create_task(_run(_settings(server, phases=[burst]), tmp_path, stop))
    await server.wait_for_connections(5)
    stop.set("enough")
    result, lines = await running
    assert (lines, result.outcomes, server.received) == ([], {}, [])


async def test_an_engine_that_leaves_before_a_request_is_due_did_not_get_it(server: CompletionServer) -> None:
    client = EngineClient(_settings(server).engine, timeout_s=30)
    request = CompletionRequest("demo-one-0", Prompt([9]), max_tokens=2, temperature=0.0, ignore_eos=True)
    due_s = time.monotonic() + 0.3
    sending = asyncio.create_task(client.send(client.prepare(request), due_s))
    await server.wait_for_connections(1)
    await server.close_connections()
    left = await sending
    assert (left.outcome, left.sent_s, left.withdrawn) == ("not_sent", None, False)
    assert left.finished_s >= due_s


async def test_sigterm_stops_a_run(server: CompletionServer, tmp_path: Path) -> None:
    server.answer = never_answer
    stop = Stop()
    stop_on_signals(stop)
    running = asyncio.create_task(_run(_settings(server, phases=[CLOSED]), tmp_path, stop))
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
            await _until(lambda: file.read_bytes().count(b"\n") == 3)
        await answer_in_full(request, writer)

    server.answer = lines_first
    result, _ = await _run(_settings(server, phases=[{**CLOSED, "concurrency": 1, "requests": 4}]), tmp_path)
    assert result.outcomes == {"completed": 4}


async def test_an_earlier_runs_file_is_never_touched(server: CompletionServer, tmp_path: Path) -> None:
    (tmp_path / "client.jsonl.part").write_text("earlier\n")
    with pytest.raises(FileExistsError):
        await _run(_settings(server, phases=[CLOSED]), tmp_path)
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
            await _run(_settings(server, phases=[{**CLOSED, "requests": requests}]), tmp_path, stop)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "client.jsonl.part" in (stop.reason or "")
    assert len(server.received) <= 1000


async def test_prompts_of_a_dataset_are_sent_as_text(server: CompletionServer, tmp_path: Path) -> None:
    mount = tmp_path / "dataset"
    mount.mkdir()
    (mount / "a.jsonl").write_text("".join(f'{{"prompt": "question {number} ?"}}\n' for number in range(8)))
    dataset = {"dataset": {"path": "a.jsonl", "format": "JSONL", "configMap": {"name": "x"}, "outputTokens": 4}}
    talk = {"name": "talk", "pattern": "Multiturn", "concurrency": 1, "turns": 2, "requests": 2}
    folder = tmp_path / "attempt"
    folder.mkdir()
    settings = _settings(server, prompts=dataset, phases=[CLOSED, talk])
    result, lines = await _run(settings, folder, dataset_mount=mount)
    assert result.dataset_prompts == 8
    assert result.outcomes == {"completed": 7}
    bodies = [server.request(line["id"]).body for line in lines]
    assert all(body["prompt"].startswith("question ") for body in bodies)
    assert {(body["max_tokens"], body["ignore_eos"]) for body in bodies} == {(4, False)}
    assert [line["prompt_tokens"] for line in lines] == [len(body["prompt"].split()) for body in bodies]
    first, second = (body["prompt"] for body in bodies[-2:])
    assert second.startswith(f"{first}\n t1000 t1001 t1002 t1003\nquestion ")


async def test_a_bad_dataset_ends_the_run_before_it_begins(server: CompletionServer, tmp_path: Path) -> None:
    dataset = {"dataset": {"path": "a.jsonl", "format": "JSONL"}}
    with pytest.raises(BadDatasetError):
        await _run(_settings(server, prompts=dataset), tmp_path, dataset_mount=tmp_path / "nowhere")
    assert not _names(tmp_path)


async def test_a_key_that_is_not_there_ends_the_run_before_it_begins(
    server: CompletionServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ENGINE_KEY", raising=False)
    with pytest.raises(InvalidSettingsError, match="ENGINE_KEY: is not set in this container"):
        await _run(_settings(server, key="ENGINE_KEY"), tmp_path)
    assert not _names(tmp_path)


async def test_progress_says_what_was_sent_and_ends_at_nothing_left(server: CompletionServer, tmp_path: Path) -> None:
    """The first request is answered when a line of progress has told of it."""
    lines: list[dict[str, Any]] = []

    async def after_two_ticks(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.id.endswith("one-1"):
            await _until(lambda: any(line["sent"] == 2 for line in lines))
        await answer_in_full(request, writer)

    server.answer = after_two_ticks
    Recording(Scenario(requests=3, warmup=0)).write_segments(tmp_path / "segments")
    settings = _settings(server, phases=[{**CLOSED, "concurrency": 1}, {**FAST, "requests": 21}])
    await run_load(settings, tmp_path, Stop(), emit=lambda line: lines.append(json.loads(line)))
    line = next(line for line in lines if line["sent"] == 2)
    assert list(line) == ["phase", "sent", "recorded", "completed", "failed", "rate", "eta_s"]
    assert (line["phase"], line["recorded"], line["completed"], line["failed"]) == ("one", 3, 1, 0)
    assert line["rate"] > 0
    assert line["eta_s"] == pytest.approx(4 / line["rate"] + 0.1, rel=0.05)
