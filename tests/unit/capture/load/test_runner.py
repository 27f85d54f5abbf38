"""The run of a load."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.api.capture import Phase
from specdecode_operator.capture.load.engine_ready import (
    EngineMonitor,
    EngineNotReadyError,
    MetricsDelta,
    NoMetrics,
    metrics_delta,
)
from specdecode_operator.capture.load.run_settings import read_settings
from specdecode_operator.capture.load.runner import run_load
from specdecode_operator.capture.load.shutdown import Stop
from specdecode_operator.vllm.engine_metrics import SpeculationReading
from tests.support.completion_server import (
    LAST_CHUNK,
    OK_HEAD,
    CompletionServer,
    Received,
    answer_in_full,
    answer_with,
    answered_tokens,
    chunk,
    completion_server,
    rejection,
    token_event,
    usage_event,
)
from tests.support.driven_clock import DrivenClock
from tests.support.load_runs import CLOSED, FAST, run, settings_for, until
from tests.support.recordings import Recording, Scenario

pytestmark = pytest.mark.usefixtures("short_pauses")


async def test_request_body_and_client_line_have_all_fields(
    server: CompletionServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "secret\n")
    one = {**CLOSED, "concurrency": 1, "requests": 1}
    result, [line] = await run(settings_for(server, key="ENGINE_KEY", phases=[one]), tmp_path)

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
    in_order = ("scheduled_ms", "sent_ms", "first_token_ms", "last_token_ms", "finished_ms")
    assert [0, *(times[name] for name in in_order)] == sorted([0, *(times[name] for name in in_order)])
    assert times["late_ms"] == pytest.approx(times["sent_ms"] - times["scheduled_ms"], abs=0.002)
    assert times["ttft_ms"] == pytest.approx(times["first_token_ms"] - times["sent_ms"], abs=0.002)
    assert times["latency_ms"] == pytest.approx(times["last_token_ms"] - times["sent_ms"], abs=0.002)
    assert result.outcomes == {"completed": 1}
    assert result.stop_reason is None


async def test_latency_ends_at_last_token(server: CompletionServer, tmp_path: Path, clock: DrivenClock) -> None:
    """As with vLLM's own benchmark: usage and end mark of a busy frontend come when the tokens are long there."""

    async def late_tail(_request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(OK_HEAD + chunk(token_event([1, 2])))
        await clock.let_arrive()
        clock.advance(10)
        writer.write(chunk(usage_event(12, 2)) + chunk(b"data: [DONE]\n\n") + LAST_CHUNK)

    server.answer = late_tail
    _, [line] = await run(settings_for(server, phases=[{**CLOSED, "requests": 1}]), tmp_path)
    assert line["finished_ms"] - line["last_token_ms"] >= 10_000
    assert line["latency_ms"] == pytest.approx(line["last_token_ms"] - line["sent_ms"], abs=0.002)
    assert line["latency_ms"] < line["finished_ms"] - line["sent_ms"] - 9_999
    assert line["completion_tokens"] == 2


@pytest.mark.parametrize(
    "phase",
    [
        CLOSED,
        FAST,
        {"name": "p", "pattern": "Poisson", "requestsPerSecond": "300", "requests": 20},
        {"name": "p", "pattern": "Burst", "burstSize": 16, "burstIntervalSeconds": 1, "requests": 20},
        {
            "name": "p",
            "pattern": "Staircase",
            "requestsPerSecond": "10",
            "stepSeconds": 1,
            "stepRequestsPerSecond": "10",
            "requests": 20,
        },
        {"name": "p", "pattern": "Multiturn", "concurrency": 2, "turns": 3, "requests": 11},
    ],
    ids=lambda phase: phase["pattern"],
)
async def test_every_pattern_sends_exactly_its_requests(
    server: CompletionServer, tmp_path: Path, phase: dict[str, Any]
) -> None:
    result, lines = await run(settings_for(server, phases=[phase]), tmp_path)
    count = phase["requests"]
    assert sorted(line["index"] for line in lines) == list(range(count))
    assert {request.id for request in server.received} == {line["id"] for line in lines}
    assert result.outcomes == {"completed": count}


async def test_lines_are_in_the_order_of_sending(server: CompletionServer, tmp_path: Path) -> None:
    """The first request ends last; its line is the first nevertheless."""

    async def first_waits(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.id.endswith("-0"):
            await server.wait_for_requests(20)
        await answer_in_full(request, writer)

    server.answer = first_waits
    _, lines = await run(settings_for(server, phases=[FAST]), tmp_path)
    assert [line["index"] for line in lines] == list(range(20))
    assert max(lines, key=lambda line: line["finished_ms"])["index"] == 0


async def test_an_open_loop_does_not_wait_for_answers(server: CompletionServer, tmp_path: Path) -> None:
    """Nobody is answered before all have been sent: a closed loop would never end here."""

    async def after_all(request: Received, writer: asyncio.StreamWriter) -> None:
        await server.wait_for_requests(20)
        await answer_in_full(request, writer)

    server.answer = after_all
    result, lines = await run(settings_for(server, phases=[FAST]), tmp_path)
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
    await run(settings_for(server, phases=[{**CLOSED, "concurrency": 3, "requests": 12}]), tmp_path)
    assert server.most_in_flight == 3


async def test_burst_of_300_requests_is_in_flight_at_once(server: CompletionServer, tmp_path: Path) -> None:
    """Nobody is answered before all have arrived: a limit on connections anywhere would end in time-outs."""

    async def after_all(request: Received, writer: asyncio.StreamWriter) -> None:
        await server.wait_for_requests(300)
        await answer_in_full(request, writer)

    server.answer = after_all
    burst = {"name": "p", "pattern": "Burst", "burstSize": 300, "burstIntervalSeconds": 1, "requests": 300}
    result, lines = await run(settings_for(server, phases=[burst]), tmp_path)
    assert result.outcomes == {"completed": 300}
    assert server.most_in_flight == 300
    assert {line["scheduled_ms"] for line in lines} == {lines[0]["scheduled_ms"]}


async def test_phase_with_duration_completes_requests_in_flight(
    server: CompletionServer, tmp_path: Path, clock: DrivenClock
) -> None:
    """What is in flight then still ends: each answer takes 20 s, and the third is begun after 40 s."""

    async def answer_late(request: Received, writer: asyncio.StreamWriter) -> None:
        clock.advance(20)
        await answer_in_full(request, writer)

    server.answer = answer_late
    phase = {"name": "short", "pattern": "Closed", "concurrency": 1, "durationSeconds": 50}
    _, lines = await run(settings_for(server, phases=[phase]), tmp_path)
    assert [line["outcome"] for line in lines] == ["completed"] * 3


async def test_warmup_is_sent_first_and_not_counted(server: CompletionServer, tmp_path: Path) -> None:
    result, lines = await run(settings_for(server, warmupRequests=3, phases=[CLOSED, FAST]), tmp_path)
    assert [line["phase"] for line in lines] == ["warmup"] * 3 + ["one"] * 5 + ["fast"] * 20
    assert [line["warmup"] for line in lines] == [True] * 3 + [False] * 25
    assert result.outcomes == {"completed": 25}


async def test_requests_depend_on_seed(server: CompletionServer, tmp_path: Path) -> None:
    mix = [{"temperature": "0.0", "sharePercent": 40}, {"temperature": "0.7", "sharePercent": 60}]

    async def asked(name: str, seed: int) -> dict[str, Any]:
        server.received.clear()
        (tmp_path / name).mkdir()
        await run(settings_for(server, seed=seed, temperatures=mix, phases=[CLOSED, FAST]), tmp_path / name)
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
    _, lines = await run(settings_for(server, phases=[phase]), tmp_path)
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


async def test_conversation_prompts_do_not_depend_on_concurrency(server: CompletionServer, tmp_path: Path) -> None:
    async def opened(concurrency: int) -> dict[int, list[int]]:
        """The first prompt of each conversation."""
        server.received.clear()
        folder = tmp_path / str(concurrency)
        folder.mkdir()
        phase = {"name": "talk", "pattern": "Multiturn", "concurrency": concurrency, "turns": 3, "requests": 12}
        _, lines = await run(settings_for(server, phases=[phase]), folder)
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
    _, lines = await run(settings_for(server, phases=[phase]), tmp_path)
    turns = [(line["session"], line["turn"], line["outcome"]) for line in lines]
    once = [(0, "completed"), (1, "completed"), (2, "http_rejected")]
    assert turns == [(session, *part) for session in (0, 1) for part in once] + [(2, 0, "completed")]


async def test_prompts_of_a_dataset_are_sent_as_text(server: CompletionServer, tmp_path: Path) -> None:
    mount = tmp_path / "dataset"
    mount.mkdir()
    (mount / "a.jsonl").write_text("".join(f'{{"prompt": "question {number} ?"}}\n' for number in range(8)))
    dataset = {"dataset": {"path": "a.jsonl", "format": "JSONL", "configMap": {"name": "x"}, "outputTokens": 4}}
    talk = {"name": "talk", "pattern": "Multiturn", "concurrency": 1, "turns": 2, "requests": 2}
    folder = tmp_path / "attempt"
    folder.mkdir()
    settings = settings_for(server, prompts=dataset, phases=[CLOSED, talk])
    result, lines = await run(settings, folder, dataset_mount=mount)
    assert result.outcomes == {"completed": 7}
    bodies = [server.request(line["id"]).body for line in lines]
    assert all(body["prompt"].startswith("question ") for body in bodies)
    assert {(body["max_tokens"], body["ignore_eos"]) for body in bodies} == {(4, False)}
    assert [line["prompt_tokens"] for line in lines] == [len(body["prompt"].split()) for body in bodies]
    first, second = (body["prompt"] for body in bodies[-2:])
    assert second.startswith(f"{first}\n t1000 t1001 t1002 t1003\nquestion ")


async def test_prompts_of_a_dataset_may_be_token_ids(server: CompletionServer, tmp_path: Path) -> None:
    mount = tmp_path / "dataset"
    mount.mkdir()
    (mount / "a.jsonl").write_text("".join(f'{{"prompt": {[number, 5, 6]}}}\n' for number in range(8)))
    dataset = {"dataset": {"path": "a.jsonl", "format": "JSONL", "configMap": {"name": "x"}, "outputTokens": 4}}
    talk = {"name": "talk", "pattern": "Multiturn", "concurrency": 1, "turns": 2, "requests": 2}
    folder = tmp_path / "attempt"
    folder.mkdir()
    settings = settings_for(server, prompts=dataset, phases=[CLOSED, talk])
    result, lines = await run(settings, folder, dataset_mount=mount)
    assert result.outcomes == {"completed": 7}
    bodies = [server.request(line["id"]).body for line in lines]
    assert all(body["prompt"][1:3] == [5, 6] for body in bodies)
    assert {(body["max_tokens"], body["ignore_eos"]) for body in bodies} == {(4, False)}
    first, second = (body["prompt"] for body in bodies[-2:])
    assert second[: len(first) + 4] == [*first, 1000, 1001, 1002, 1003]


async def test_phases_of_a_sweep_differ_in_temperature_and_lengths(server: CompletionServer, tmp_path: Path) -> None:
    cold = {"name": "cold", "pattern": "Closed", "concurrency": 1, "requests": 2, "temperature": "0.0"}
    warm = {**cold, "name": "warm", "temperature": "0.8", "promptTokens": 30, "outputTokens": 3}
    mixed = {"name": "mixed", "pattern": "Closed", "concurrency": 1, "requests": 2}
    shares = [{"temperature": "0.4", "sharePercent": 50}, {"temperature": "1.0", "sharePercent": 50}]
    _, lines = await run(settings_for(server, temperatures=shares, phases=[cold, warm, mixed]), tmp_path)
    asked = [(line["phase"], line["temperature"], line["prompt_tokens"], line["max_tokens"]) for line in lines]
    assert asked[:4] == [("cold", 0.0, 12, 6)] * 2 + [("warm", 0.8, 30, 3)] * 2
    assert sorted(asked[4:]) == [("mixed", 0.4, 12, 6), ("mixed", 1.0, 12, 6)]
    assert [server.request(line["id"]).body["temperature"] for line in lines[:4]] == [0.0, 0.0, 0.8, 0.8]


async def test_recorded_traffic_is_sent_at_recorded_times(server: CompletionServer, tmp_path: Path) -> None:
    mount, folder = tmp_path / "dataset", tmp_path / "attempt"
    mount.mkdir()
    folder.mkdir()
    records = [{"prompt_tokens": 20 + n, "output_tokens": 1 + n, "arrival_ms": 50.0 * n * n} for n in range(4)]
    (mount / "trace.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    dataset = {"dataset": {"path": "trace.jsonl", "format": "Trace", "persistentVolumeClaim": {"claimName": "x"}}}
    phase = {"name": "again", "pattern": "Recorded", "requests": 4}
    settings = settings_for(server, prompts=dataset, phases=[phase])
    result, lines = await run(settings, folder, dataset_mount=mount)
    assert result.outcomes == {"completed": 4}
    lines.sort(key=lambda line: line["index"])
    assert [(line["prompt_tokens"], line["max_tokens"]) for line in lines] == [(20, 1), (21, 2), (22, 3), (23, 4)]
    due_ms = [line["scheduled_ms"] - lines[0]["scheduled_ms"] for line in lines]
    assert due_ms == pytest.approx([0, 50, 200, 450], abs=0.01)
    assert all(server.request(line["id"]).body["ignore_eos"] for line in lines)


async def test_progress_line_has_counts_rate_and_eta(
    server: CompletionServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first request is answered when a line of progress has told of it."""
    lines: list[dict[str, Any]] = []

    def two_sent() -> bool:
        lines.extend(map(json.loads, capsys.readouterr().out.splitlines()))
        return any(line["sent"] == 2 for line in lines)

    async def after_two_ticks(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.id.endswith("one-1"):
            await until(two_sent)
        await answer_in_full(request, writer)

    server.answer = after_two_ticks
    Recording(Scenario(requests=3, warmup=0)).write_segments(tmp_path / "segments")
    settings = settings_for(server, phases=[{**CLOSED, "concurrency": 1}, {**FAST, "requests": 21}])
    await run_load(settings, tmp_path, Stop())
    line = next(line for line in lines if line["sent"] == 2)
    assert list(line) == ["phase", "sent", "recorded", "completed", "failed", "rate", "eta_s"]
    assert (line["phase"], line["recorded"], line["completed"], line["failed"]) == ("one", 3, 1, 0)
    assert line["rate"] > 0
    # The rate is told with two digits: on a slow machine that is little.
    soonest_s, latest_s = (4 / max(line["rate"] + error, 0.001) + 0.1 for error in (0.006, -0.006))
    assert soonest_s - 0.1 <= line["eta_s"] <= latest_s + 0.1


async def test_around_phase_context_wraps_each_phase(server: CompletionServer, tmp_path: Path) -> None:
    happened: list[str] = []

    @asynccontextmanager
    async def around(phase: Phase) -> AsyncIterator[None]:
        happened.append(f"{phase.name} begins after {len(server.received)}")
        yield
        happened.append(f"{phase.name} has ended after {len(server.received)}")

    phases = [{**CLOSED, "requests": 2}, {**FAST, "requests": 3}]
    settings = settings_for(server, phases=phases, warmupRequests=1)
    await run_load(settings, tmp_path, Stop(), around_phase=around)
    assert happened == [
        "warmup begins after 0",
        "warmup has ended after 1",
        f"{CLOSED['name']} begins after 1",
        f"{CLOSED['name']} has ended after 3",
        f"{FAST['name']} begins after 3",
        f"{FAST['name']} has ended after 6",
    ]


# Waiting for the engine, and what its own counters say of a run.

VERSION = (200, '{"version": "0.32.0+cpu"}')


@pytest.fixture
async def engine() -> AsyncIterator[CompletionServer]:
    async with completion_server() as running:
        running.pages["/version"] = VERSION
        yield running


def _metrics(drafts: int | None, *, tokens: int = 0, running: int = 0) -> tuple[int, str]:
    """As vLLM says it: 4 tokens a draft, of which the first two are accepted; None without speculation."""
    values = {"num_requests_running": running, "num_requests_waiting": 0, "generation_tokens_total": tokens}
    if drafts is not None:
        values |= {
            "spec_decode_num_drafts_total": drafts,
            "spec_decode_num_draft_tokens_total": 4 * drafts,
            "spec_decode_num_accepted_tokens_total": 2 * drafts,
        }
    lines = [f'vllm:{name}{{engine="0"}} {value}' for name, value in values.items()]
    lines.append('vllm:cache_config_info{engine="0",num_gpu_blocks="70",kv_cache_size_tokens="1120"} 1')
    for position, accepted in enumerate([drafts, drafts, 0, 0] if drafts is not None else []):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines.append(f'{name}{{engine="0",position="{position}"}} {accepted}')
    return 200, "\n".join(lines) + "\n"


async def test_engine_is_ready_once_health_answers_200(engine: CompletionServer) -> None:
    engine.pages["/health"] = (503, "loading")
    async with EngineMonitor(engine.url) as monitor:
        waiting = asyncio.create_task(monitor.wait_until_ready(30, Stop()))
        await engine.wait_for_page("/health", 2)
        assert not waiting.done()
        engine.pages["/health"] = (200, "")
        await waiting
        assert await monitor.version() == "0.32.0+cpu"


async def test_unready_engine_times_out(engine: CompletionServer) -> None:
    engine.pages["/health"] = (503, "loading")
    async with EngineMonitor(engine.url) as monitor:
        with pytest.raises(EngineNotReadyError, match=r"not ready after 0.01 s: /health answered 503; see the engine"):
            await monitor.wait_until_ready(0.01, Stop())


async def test_unreachable_engine_is_not_ready() -> None:
    async with completion_server() as gone:
        url = gone.url
    async with EngineMonitor(url) as monitor:
        with pytest.raises(EngineNotReadyError, match="/health did not answer"):
            await monitor.wait_until_ready(0.01, Stop())
        with pytest.raises(EngineNotReadyError, match="/version gave no version"):
            await monitor.version()


@pytest.mark.parametrize("page", ['{"version":32}', "0.32.0", '{"version":"a b"}', "[" * 9999])
async def test_invalid_version_page_is_refused(engine: CompletionServer, page: str) -> None:
    engine.pages["/version"] = (200, page)
    async with EngineMonitor(engine.url) as monitor:
        with pytest.raises(EngineNotReadyError, match="/version gave no version"):
            await monitor.version()


async def test_stop_ends_wait_for_engine(engine: CompletionServer) -> None:
    stop = Stop()
    stop.set("SIGTERM received")
    async with EngineMonitor(engine.url) as monitor:
        with pytest.raises(EngineNotReadyError, match="stopped before the engine was ready: SIGTERM received"):
            await monitor.wait_until_ready(30, stop)


async def test_metrics_are_read_once_engine_is_idle(engine: CompletionServer) -> None:
    engine.pages["/metrics"] = _metrics(5, running=1)
    async with EngineMonitor(engine.url) as monitor:
        assert await monitor.read_when_idle(0.01) == NoMetrics(
            "1 requests still ran 0.01 s after the last one had ended"
        )
        reading = asyncio.create_task(monitor.read_when_idle(30))
        await engine.wait_for_page("/metrics", 2)
        assert not reading.done()
        engine.pages["/metrics"] = _metrics(9)
        idle = await reading
    assert not isinstance(idle, NoMetrics)
    assert idle.speculation is not None
    assert idle.speculation.drafts == 9


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ((404, "not found"), "/metrics did not answer"),
        ((200, "python_gc_objects_total 5\n"), "vllm:generation_tokens_total is missing"),
        ((200, "vllm:num_requests_running{\n"), "not in Prometheus format"),
    ],
)
async def test_unreadable_metrics_are_returned_as_no_metrics_with_reason(
    engine: CompletionServer, page: tuple[int, str], reason: str
) -> None:
    engine.pages["/metrics"] = page
    async with EngineMonitor(engine.url) as monitor:
        reading = await monitor.read_when_idle()
    assert isinstance(reading, NoMetrics)
    assert reason in reading.reason
    assert metrics_delta(reading, reading) == reading


@pytest.mark.parametrize(("drafts_before", "drafts_after"), [(9, 2), (None, None)])
async def test_decreasing_counters_are_an_engine_restart(
    engine: CompletionServer, drafts_before: int | None, drafts_after: int | None
) -> None:
    async with EngineMonitor(engine.url) as monitor:
        engine.pages["/metrics"] = _metrics(drafts_before, tokens=50)
        before = await monitor.read()
        engine.pages["/metrics"] = _metrics(drafts_after, tokens=10)
        delta = metrics_delta(before, await monitor.read())
    assert isinstance(delta, NoMetrics)
    assert "restarted" in delta.reason


@pytest.mark.parametrize("speculates", [True, False])
async def test_engine_counters_cover_measured_requests_only(
    engine: CompletionServer, tmp_path: Path, *, speculates: bool
) -> None:
    """Each request drafts ten times and gives six tokens: 4 for warm-up, which do not count, and 5."""

    async def count(request: Received, writer: asyncio.StreamWriter) -> None:
        drafts = 10 * len(engine.received) if speculates else None
        engine.pages["/metrics"] = _metrics(drafts, tokens=6 * len(engine.received))
        await answer_in_full(request, writer)

    engine.pages["/metrics"] = _metrics(0 if speculates else None)
    engine.answer = count
    settings = {
        "namespace": "n",
        "capture": "c",
        "seed": 1,
        "engine": {"url": engine.url, "model": "m", "max_model_len": 99, "vocab_size": 999},
        "workload": {"phases": [{"name": "one", "pattern": "Closed", "concurrency": 1, "requests": 5}]},
    }
    result = await run_load(read_settings(json.dumps(settings)), tmp_path, Stop())
    speculation = SpeculationReading(
        drafts=50, draft_tokens=200, accepted_tokens=100, accepted_per_position=(50, 50, 0, 0)
    )
    assert result.metrics == MetricsDelta(30, speculation if speculates else None, 70, 1120)
