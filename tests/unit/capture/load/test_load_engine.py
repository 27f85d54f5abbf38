"""Waiting for the engine, and what its own counters say of a run."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

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
from tests.support.completion_server import CompletionServer, Received, answer_in_full, completion_server

VERSION = (200, '{"version": "0.32.0+cpu"}')


@pytest.fixture
async def server() -> AsyncIterator[CompletionServer]:
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


async def test_it_waits_until_health_is_good(server: CompletionServer) -> None:
    server.pages["/health"] = (503, "loading")
    async with EngineMonitor(server.url) as monitor:
        waiting = asyncio.create_task(monitor.wait_until_ready(30, Stop()))
        await server.wait_for_page("/health", 2)
        assert not waiting.done()
        server.pages["/health"] = (200, "")
        await waiting
        assert await monitor.version() == "0.32.0+cpu"


async def test_an_engine_that_is_not_ready_in_time(server: CompletionServer) -> None:
    server.pages["/health"] = (503, "loading")
    async with EngineMonitor(server.url) as monitor:
        with pytest.raises(EngineNotReadyError, match=r"not ready after 0.01 s: /health answered 503; see the engine"):
            await monitor.wait_until_ready(0.01, Stop())


async def test_an_engine_that_is_not_there() -> None:
    async with completion_server() as gone:
        url = gone.url
    async with EngineMonitor(url) as monitor:
        with pytest.raises(EngineNotReadyError, match="/health did not answer"):
            await monitor.wait_until_ready(0.01, Stop())
        with pytest.raises(EngineNotReadyError, match="/version gave no version"):
            await monitor.version()


@pytest.mark.parametrize("page", ['{"version":32}', "0.32.0", '{"version":"a b"}', "[" * 9999])
async def test_what_answers_and_is_no_engine_says_no_version(server: CompletionServer, page: str) -> None:
    server.pages["/version"] = (200, page)
    async with EngineMonitor(server.url) as monitor:
        with pytest.raises(EngineNotReadyError, match="/version gave no version"):
            await monitor.version()


async def test_a_stop_ends_the_waiting(server: CompletionServer) -> None:
    stop = Stop()
    stop.set("SIGTERM received")
    async with EngineMonitor(server.url) as monitor:
        with pytest.raises(EngineNotReadyError, match="stopped before the engine was ready: SIGTERM received"):
            await monitor.wait_until_ready(30, stop)


async def test_it_waits_for_the_last_request_to_leave_the_engine(server: CompletionServer) -> None:
    server.pages["/metrics"] = _metrics(5, running=1)
    async with EngineMonitor(server.url) as monitor:
        assert await monitor.read_when_idle(0.01) == NoMetrics(
            "1 requests still ran 0.01 s after the last one had ended"
        )
        reading = asyncio.create_task(monitor.read_when_idle(30))
        await server.wait_for_page("/metrics", 2)
        assert not reading.done()
        server.pages["/metrics"] = _metrics(9)
        idle = await reading
    assert not isinstance(idle, NoMetrics)
    assert idle.speculation is not None
    assert idle.speculation.drafts == 9


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ((404, "not found"), "/metrics did not answer"),
        ((200, "python_gc_objects_total 5\n"), "vllm:generation_tokens_total and all like it are missing"),
        ((200, "vllm:num_requests_running{\n"), "not in Prometheus format"),
    ],
)
async def test_metrics_that_cannot_be_read_are_no_failure(
    server: CompletionServer, page: tuple[int, str], reason: str
) -> None:
    server.pages["/metrics"] = page
    async with EngineMonitor(server.url) as monitor:
        reading = await monitor.read_when_idle()
    assert isinstance(reading, NoMetrics)
    assert reason in reading.reason
    assert metrics_delta(reading, reading) == reading


@pytest.mark.parametrize(("drafts_before", "drafts_after"), [(9, 2), (None, None)])
async def test_counters_that_went_back_say_that_the_engine_was_restarted(
    server: CompletionServer, drafts_before: int | None, drafts_after: int | None
) -> None:
    async with EngineMonitor(server.url) as monitor:
        server.pages["/metrics"] = _metrics(drafts_before, tokens=50)
        before = await monitor.read()
        server.pages["/metrics"] = _metrics(drafts_after, tokens=10)
        delta = metrics_delta(before, await monitor.read())
    assert isinstance(delta, NoMetrics)
    assert "restarted" in delta.reason


@pytest.mark.parametrize("speculates", [True, False])
async def test_the_counters_of_a_run_are_those_of_its_measured_requests(
    server: CompletionServer, tmp_path: Path, *, speculates: bool
) -> None:
    """Each request drafts ten times and gives six tokens: 4 for warm-up, which do not count, and 5."""

    async def count(request: Received, writer: asyncio.StreamWriter) -> None:
        drafts = 10 * len(server.received) if speculates else None
        server.pages["/metrics"] = _metrics(drafts, tokens=6 * len(server.received))
        await answer_in_full(request, writer)

    server.pages["/metrics"] = _metrics(0 if speculates else None)
    server.answer = count
    settings = {
        "namespace": "n",
        "capture": "c",
        "seed": 1,
        "engine": {"url": server.url, "model": "m", "max_model_len": 99, "vocab_size": 999},
        "workload": {"phases": [{"name": "one", "pattern": "Closed", "concurrency": 1, "requests": 5}]},
    }
    result = await run_load(read_settings(json.dumps(settings)), tmp_path, Stop())
    speculation = SpeculationReading(
        drafts=50, draft_tokens=200, accepted_tokens=100, accepted_per_position=(50, 50, 0, 0)
    )
    assert result.metrics == MetricsDelta(30, speculation if speculates else None, 70, 1120)
