import asyncio
import errno
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdecode_operator.capture.files.formats import ABORTED, STEP_STATS, TRACE
from specdecode_operator.capture.files.validate import validate_capture
from specdecode_operator.capture.trace_reader import read_recording
from specdecode_operator.replay.clocks import VirtualClock
from specdecode_operator.replay.engine import Incoming
from specdecode_operator.replay.recorded_engine import Matching, StepsEngine, StepsSettings, matcher
from specdecode_operator.replay.server import served_answers
from specdecode_operator.replay.server.playback_source import ServeError
from specdecode_operator.replay.server.served_answers import Answer, Meter
from tests.support.replay_server import events, replay_server
from tests.support.traces import record, write_trace

QUICK = {"ttft_ms": 5.0, "itl_ms": [5.0, 5.0]}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def faults(folder: Path) -> list[str]:
    """Return what is wrong, but for gaps that were short as this machine was late."""
    return [each.message for each in validate_capture(folder).problems if each.file != "short_gap_share"]


async def begin(client: httpx.AsyncClient, **body: Any) -> None:
    async with client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True} | body) as response:
        await anext(response.aiter_lines())


async def test_what_is_served_is_a_capture_that_can_be_trusted_and_replayed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    async with replay_server(tmp_path, [record(**QUICK, cached_tokens=2)] * 3, record=out) as client:
        for _ in range(3):
            await events(client, prompt="four" * 5)
        assert list(out.glob("*.part")), "whole files have their names at the end"
    assert faults(out) == []
    assert validate_capture(out).gates["step_counters"].value == 0
    recording = read_recording(out)
    assert recording.meta.source == "replay"
    assert recording.num_speculative_tokens == 4
    assert [list(each.chunk_tokens) for each in recording.requests] == [[1, 3, 2]] * 3
    assert [(each.prompt_tokens, each.cached_tokens) for each in recording.requests] == [(5, 2)] * 3
    caches = [line["scheduler"]["prefix_cache_stats"] for line in lines(out / STEP_STATS)]
    assert [sum(cache[name] for cache in caches) for name in ("requests", "queries", "hits")] == [3, 3 * 5, 3 * 2]


async def test_what_waited_has_waited_as_long_in_what_is_recorded_of_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    waiting = record(arrival_ms=100.0, scheduled_ms=120.0, ttft_ms=30.0)
    async with replay_server(tmp_path, [waiting], record=out, time_scale=0.5) as client:
        await events(client)
        page = (await client.get("/metrics")).text
    (line,) = lines(out / TRACE)[1:]
    assert line["scheduled_ms"] - line["arrival_ms"] == pytest.approx(10.0, abs=0.001)
    queued_s = page.partition('vllm:request_queue_time_seconds_sum{engine="0",model_name="tiny"} ')[2].split()[0]
    assert float(queued_s) == pytest.approx(0.01)


async def test_a_step_has_the_counters_of_all_that_went_out_in_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    async with replay_server(tmp_path, [record(**QUICK)], record=out) as client:
        await events(client, prompt="four" * 7)
    steps = [line["scheduler"] for line in lines(out / STEP_STATS)]
    speculation = [step["spec_decoding_stats"] for step in steps]
    assert speculation[0] is None
    assert [each["num_accepted_tokens_per_pos"] for each in speculation[1:]] == [[1, 1, 0, 0], [1, 0, 0, 0]]
    assert [step["num_running_reqs"] for step in steps] == [1, 1, 0]
    assert sum(step["prefix_cache_stats"]["queries"] for step in steps) == 7


async def test_a_step_prefills_all_prompts_that_have_their_first_token_in_it(tmp_path: Path) -> None:
    records = [record(ttft_ms=5.0, itl_ms=[45.0, 10.0]), record(ttft_ms=50.0), record(ttft_ms=50.0)]
    recording = read_recording(write_trace(tmp_path / "trace.jsonl", records))
    clock, out = VirtualClock(), tmp_path / "out"
    engine = StepsEngine(recording, clock, matcher(Matching.ARRIVAL, recording.requests), StepsSettings())
    written = served_answers.CaptureRecorder(out, recording.meta, engine, 4)
    meter = Meter(clock, 4, written)
    for tokens in (7, 20, 30):
        Answer(meter, engine, Incoming(request_id=str(tokens), prompt_tokens=tokens, max_tokens=99), lambda _: None)
    for moment_ms in (5, 50, 60, 80):
        clock.run(until_ms=moment_ms)
        await asyncio.sleep(0)
    written.close()
    found = {line["prompt_tokens"]: line["itl_ctx"]["prefill_tokens"] for line in lines(out / TRACE)[1:]}
    assert found == {7: [50, 0], 20: [0, 0], 30: [0, 0]}


async def test_two_steps_in_one_turn_of_a_late_event_loop_have_a_moment_each(tmp_path: Path) -> None:
    recording = read_recording(write_trace(tmp_path / "trace.jsonl", [record(ttft_ms=5.0, itl_ms=[45.0, 10.0])]))
    clock, out = VirtualClock(), tmp_path / "out"
    engine = StepsEngine(recording, clock, matcher(Matching.ARRIVAL, recording.requests), StepsSettings())
    written = served_answers.CaptureRecorder(out, recording.meta, engine, 4)
    Answer(Meter(clock, 4, written), engine, Incoming(request_id="a", prompt_tokens=7, max_tokens=99), lambda _: None)
    clock.run(until_ms=80)
    await asyncio.sleep(0)
    written.close()
    (line,) = lines(out / TRACE)[1:]
    assert (line["ttft_ms"], line["itl_ms"]) == (5.0, [45.0, 10.0])


async def test_every_end_is_recorded_as_what_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out"
    endless = record(ttft_ms=1.0, itl_ms=[60_000.0, 1.0])
    silent = record(ttft_ms=60_000.0)
    async with replay_server(tmp_path, [endless, record(**QUICK), silent], record=out) as client:
        await begin(client)
        await events(client, stop=" bad")
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/completions", json={"prompt": "a"}, timeout=httpx.Timeout(120, read=1))
    ended = {line["ended_by"]: line for line in lines(out / TRACE)[1:]}
    assert ended["abort"]["output_tokens"] == 1
    assert ended["stop_string"]["stop_reason"] == " bad"
    assert [line["ended_by"] for line in lines(out / ABORTED)] == ["abort"]
    assert faults(out) == []


async def test_blocks_of_a_diffusion_model_are_recorded_as_such(tmp_path: Path) -> None:
    out = tmp_path / "out"
    blocks = record(output_tokens=96, ttft_ms=1.0, itl_ms=[5.0, 5.0], itl_tokens=[32, 32])
    async with replay_server(tmp_path, [blocks], None, record=out) as client:
        await events(client)
    assert faults(out) == []
    assert read_recording(out).num_speculative_tokens == 0


async def test_who_is_served_notices_nothing_of_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    out, found = tmp_path / "out", list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    async with replay_server(tmp_path, [record(**QUICK)], record=out) as client:
        await events(client)
        with monkeypatch.context() as patched:
            patched.setattr(served_answers, "encode", full)
            assert len(await events(client)) == 3
        assert len(await events(client)) == 3
    assert not found
    assert {path.name for path in out.iterdir()} == {"trace.jsonl.part", "step-stats.jsonl.part"}
    assert len(lines(out / "trace.jsonl.part")) == 2, "nothing follows what is missing"


async def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_trace(tmp_path / "out" / TRACE, [record()])
    with pytest.raises(ServeError, match="--record"):
        async with replay_server(tmp_path, [record()], record=tmp_path / "out"):
            pass
