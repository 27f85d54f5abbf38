"""Answers of the server that replays a capture."""

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from specdecode_operator.capture.files.formats import ABORTED, STEP_STATS, TRACE
from specdecode_operator.capture.files.validate import validate_capture
from specdecode_operator.capture.recorder.block_hashes import block_hashes
from specdecode_operator.capture.trace_reader import read_recording
from specdecode_operator.replay.clocks import TimerClock, VirtualClock
from specdecode_operator.replay.drafting import AcceptanceSchedule
from specdecode_operator.replay.engine import Burst, Incoming, Load, Sink, Submission
from specdecode_operator.replay.fit import fit
from specdecode_operator.replay.model_file import encode_model
from specdecode_operator.replay.recorded_engine import Matching, StepsEngine, StepsSettings, Unmatched, matcher
from specdecode_operator.replay.server import served_answers
from specdecode_operator.replay.server.completion_answers import Engines, Whole
from specdecode_operator.replay.server.completion_requests import read_completion
from specdecode_operator.replay.server.playback_source import Mode, ServeError, SourceSettings, play, read_source
from specdecode_operator.replay.server.served_answers import Answer, Meter
from specdecode_operator.vllm.engine_metrics import read_metrics
from specdecode_operator.vllm.profiles import find_profile
from tests.support.replay_server import events, replay_server, texts
from tests.support.synthetic import Truth
from tests.support.traces import record, write_trace

QUICK = {"ttft_ms": 1.0, "itl_ms": [1.0, 1.0]}
PLAIN_META = {"model": "tiny"}


async def metrics(client: Any) -> Any:
    return read_metrics((await client.get("/metrics")).text, find_profile("0.32"))


async def test_burst_is_one_event_with_all_its_tokens(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**QUICK)]) as client:
        found = await events(client)
    assert [len(text) for text in texts(found)] == [4, 12, 8]
    assert [event["choices"][0]["finish_reason"] for event in found] == [None, None, "length"]
    assert {event["object"] for event in found} == {"text_completion"}
    assert {event["model"] for event in found} == {"tiny"}


async def test_stream_takes_at_least_its_recorded_time(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with replay_server(tmp_path, [record(ttft_ms=50.0, itl_ms=[0.0, 80.0])]) as client:
        began_s = loop.time()
        await events(client)
    assert loop.time() - began_s >= 0.13


async def test_usage_comes_last_or_with_every_event_on_request(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**QUICK, cached_tokens=16)] * 2) as client:
        found = await events(client, prompt="four" * 20, stream_options={"include_usage": True})
        assert all("usage" not in event for event in found[:-1])
        assert found[-1]["choices"] == []
        assert found[-1]["usage"] == {
            "prompt_tokens": 20,
            "completion_tokens": 6,
            "total_tokens": 26,
            "prompt_tokens_details": {"cached_tokens": 16},
        }
        found = await events(client, stream_options={"include_usage": True, "continuous_usage_stats": True})
        assert [event["usage"]["completion_tokens"] for event in found] == [1, 4, 6, 6]


async def test_completion_without_streaming_is_one_document(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**QUICK)]) as client:
        body = {"prompt": [1, 2, 3], "max_tokens": 50, "return_token_ids": True}
        answer = (await client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})).json()
    (choice,) = answer["choices"]
    assert answer["id"] == "cmpl-mine"
    assert len(choice["text"]) == 24
    assert len(choice["token_ids"]) == 6
    assert choice["prompt_token_ids"] == [1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 6


async def test_answer_has_as_many_tokens_in_the_next_prompt(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**QUICK)] * 2) as client:
        first = (await client.post("/v1/completions", json={"prompt": "abcd", "max_tokens": 50})).json()
        text = "abcd" + first["choices"][0]["text"]
        second = (await client.post("/v1/completions", json={"prompt": text})).json()
    assert second["usage"]["prompt_tokens"] == 7


async def test_recorded_token_ids_are_returned(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**QUICK, output_token_ids=[9, 8, 7, 6, 5, 4])]) as client:
        found = await events(client, return_token_ids=True, prompt=[3, 4])
    assert [event["choices"][0]["token_ids"] for event in found] == [[9], [8, 7, 6], [5, 4]]
    assert [event["choices"][0]["prompt_token_ids"] for event in found] == [[3, 4], None, None]


async def test_chat_completions_have_chat_format(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    async with replay_server(tmp_path, [record(**QUICK)] * 2) as client:
        found = await events(client, "/v1/chat/completions", messages=messages, max_tokens=None)
        body = {"messages": messages, "max_completion_tokens": 2}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [len(text) for text in texts(found)] == [0, 4, 12, 8]
    assert found[-1]["choices"][0]["finish_reason"] == "length"
    assert ["stop_reason" in each["choices"][0] for each in found] == [False, False, False, True]
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] == 2


async def test_each_of_several_answers_uses_its_own_record(tmp_path: Path) -> None:
    records = [record(**QUICK), record(**QUICK, output_tokens=9, arrival_ms=1.0, itl_tokens=[4, 4])] * 2
    async with replay_server(tmp_path, records) as client:
        body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 99}
        answer = (await client.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [len(choice["text"]) // 4 for choice in answer["choices"]] == [6, 6, 9, 9]
    assert answer["usage"]["completion_tokens"] == 30


# The first burst has four letters.
@pytest.mark.parametrize(("stream", "place"), [(True, 10), (False, 10), (True, 1)])
async def test_answer_ends_before_stop_string(tmp_path: Path, stream: bool, place: int) -> None:
    async with replay_server(tmp_path, [record(**QUICK)] * 2) as client:
        whole = "".join(texts(await events(client)))
        stop = whole[place : place + 4]
        if stream:
            found = await events(client, stop=["never", stop])
            text, choice = "".join(texts(found)), found[-1]["choices"][0]
        else:
            body = {"prompt": "a", "max_tokens": 99, "stop": stop}
            choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
            text = choice["text"]
    assert text == whole[:place]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


async def test_speculation_metrics_are_readable_by_operator(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**QUICK)], kv_cache_tokens=4096) as client:
        await events(client)
        reading = await metrics(client)
    assert reading.speculation.drafts == 2
    assert reading.speculation.draft_tokens == 8
    assert reading.speculation.accepted_tokens == 3
    assert reading.speculation.accepted_per_position == (2, 1, 0, 0)
    assert reading.generation_tokens == 6
    assert (reading.kv_cache_tokens, reading.block_size, reading.num_gpu_blocks) == (4096, 16, 256)
    assert (reading.requests_running, reading.requests_waiting) == (0, 0)


async def test_merged_chunks_count_at_most_k_accepted_tokens(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**QUICK | {"output_tokens": 20, "itl_tokens": [9, 9]})]) as client:
        assert [len(text) // 4 for text in texts(await events(client))] == [2, 9, 9]
        assert (await metrics(client)).speculation.accepted_per_position == (3, 2, 2, 2)


async def test_engine_without_speculation_has_no_speculation_metrics(tmp_path: Path) -> None:
    plain = record(ttft_ms=1.0, output_tokens=3, itl_ms=[1.0, 1.0], itl_tokens=None)
    async with replay_server(tmp_path, [plain], PLAIN_META) as client:
        await events(client)
        reading = await metrics(client)
    assert reading.speculation is None
    assert reading.generation_tokens == 3


async def test_client_disconnect_aborts_its_request(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(itl_ms=[10.0, 60_000.0])]) as client:
        async with client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
            await anext(response.aiter_lines())
            assert (await metrics(client)).requests_running == 1
        async with asyncio.timeout(120):
            while (await metrics(client)).requests_running:
                pass
        page = (await client.get("/metrics")).text
    assert 'finished_reason="abort",model_name="tiny"} 1.0' in page


async def test_many_streams_at_once_are_all_answered(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(ttft_ms=100.0)] * 50) as client:
        found = await asyncio.gather(*[events(client) for _ in range(50)])
    assert [len(each) for each in found] == [3] * 50


async def test_modelled_engine_answers_in_bursts_of_at_most_k_plus_one(tmp_path: Path) -> None:
    records = [record(arrival_ms=100.0 * place, itl_ctx=None) for place in range(20)]
    async with replay_server(tmp_path, records, mode=Mode.MODELLED, acceptance=AcceptanceSchedule.parse("1")) as client:
        found = await events(client, max_tokens=21)
        reading = await metrics(client)
    assert [len(text) // 4 for text in texts(found)] == [1, 5, 5, 5, 5]
    assert reading.speculation.accepted_per_position == (4, 4, 4, 4)


async def test_modelled_engine_runs_at_most_max_num_seqs_requests(tmp_path: Path) -> None:
    records = [record(arrival_ms=100.0 * place, itl_ctx=None) for place in range(20)]
    body = {"prompt": "a", "stream": True, "max_tokens": 10_000, "ignore_eos": True}
    async with (
        replay_server(tmp_path, records, mode=Mode.MODELLED, max_num_seqs=1) as client,
        client.stream("POST", "/v1/completions", json=body) as first,
    ):
        lines = first.aiter_lines()  # kept: the request ends with it
        await anext(lines)
        async with client.stream("POST", "/v1/completions", json=body):
            reading = await metrics(client)
    assert (reading.requests_running, reading.requests_waiting) == (1, 1)


def test_modelled_mode_without_kv_cache_tokens_is_noted(tmp_path: Path) -> None:
    records = [record(arrival_ms=100.0 * place, itl_ctx=None) for place in range(20)]
    settings = SourceSettings(traces=[write_trace(tmp_path / "trace.jsonl", records)], mode=Mode.MODELLED)
    assert "--kv-cache-tokens" in read_source(settings).notes[-1]
    assert not read_source(replace(settings, kv_cache_tokens=1000)).notes
    assert "--kv-cache-tokens" not in str(read_source(replace(settings, mode=Mode.STEPS)).notes)


async def test_modelled_engine_serves_requests_beyond_records(tmp_path: Path) -> None:
    records = [record(**QUICK, arrival_ms=100.0 * place) for place in range(20)]
    async with replay_server(tmp_path, records, unmatched=Unmatched.MODELLED) as client:
        found = [texts(await events(client, max_tokens=50, ignore_eos=True)) for _ in range(21)]
    assert all(len("".join(each)) == 24 for each in found[:20])
    assert len("".join(found[20])) == 200


async def test_model_of_merged_chunks_has_acceptance_of_k_positions(tmp_path: Path) -> None:
    merged = [record(arrival_ms=100.0 * n, ttft_ms=1.0, output_tokens=40, itl_tokens=[19, 20]) for n in range(20)]
    async with replay_server(tmp_path, merged, mode=Mode.MODELLED) as client:
        found = await events(client, max_tokens=40, ignore_eos=True)
        reading = await metrics(client)
    assert sum(len(text) // 4 for text in texts(found)) == 40
    assert len(reading.speculation.accepted_per_position) == 4


async def test_request_id_like_template_placeholder_is_kept(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**QUICK)]) as client:
        client.headers["X-Request-Id"] = r"a\u0000b"
        assert {event["id"] for event in await events(client)} == {r"cmpl-a\u0000b"}


# Long prompts hold up nobody.


class Engine:
    """Keeps what comes to it."""

    def __init__(self) -> None:
        self.found: list[Incoming] = []

    def submit(self, request: Incoming, sink: Sink) -> Submission:
        self.found.append(request)
        return SimpleNamespace(cancel=lambda: None, waited_ms=lambda: None)

    def load(self) -> Load:
        return Load()


async def begun(engines: Engines, prompt: str | Sequence[int]) -> bool:
    """Submit a prompt of a client that stays."""
    whole = Whole(engines, read_completion(json.dumps({"prompt": prompt}).encode()), "tiny", None)
    return await whole.begin(asyncio.Event().wait)  # type: ignore[arg-type]


async def test_hashing_long_prompt_does_not_block_and_keeps_order() -> None:
    engine, ids = Engine(), [*range(200_000)]
    engines = Engines(engine=engine, meter=Meter(VirtualClock(), 0), hash_blocks_of=16)
    long, short = (asyncio.create_task(begun(engines, prompt)) for prompt in (ids, "four" * 20))
    turns = 0
    while not long.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 20, "the loop could do something else"
    await short
    assert [each.prompt_tokens for each in engine.found] == [200_000, 20]
    assert engine.found[0].block_hashes == block_hashes(ids, 16, lambda: None)


async def test_prompt_is_not_hashed_unless_requested() -> None:
    engine = Engine()
    await begun(Engines(engine=engine, meter=Meter(VirtualClock(), 0)), [1] * 64)
    assert engine.found[0].block_hashes == ()


# What is played heeds its settings: seeds, and the size of the KV cache.


def tokens(settings: SourceSettings) -> list[int]:
    clock, found = VirtualClock(), list[Burst]()
    engine = play(settings, read_source(settings), clock).engine
    engine.submit(Incoming(request_id="a", prompt_tokens=300, max_tokens=100, ignore_eos=True), found.append)
    clock.run()
    return [burst.tokens for burst in found]


@pytest.mark.parametrize(
    "more", [{"mode": Mode.MODELLED}, {"acceptance": AcceptanceSchedule.parse("0.5")}], ids=["modelled", "acceptance"]
)
def test_bursts_depend_on_seed(tmp_path: Path, more: dict[str, Any]) -> None:
    made = Truth().make(tmp_path / "made", "closed:4", 40)
    one, same, other = (tokens(SourceSettings(traces=[made.folder], seed=seed, **more)) for seed in (1, 1, 2))
    assert one == same != other


def test_kv_cache_size_of_model_is_in_tokens(tmp_path: Path) -> None:
    records = [record(arrival_ms=100.0 * place) for place in range(20)]
    model = fit([read_recording(write_trace(tmp_path / "trace.jsonl", records))])
    limits = msgspec.structs.replace(model.origin.limits, num_gpu_blocks=100, block_size=32)
    path = tmp_path / "model.json"
    origin = msgspec.structs.replace(model.origin, limits=limits)
    path.write_bytes(encode_model(msgspec.structs.replace(model, origin=origin)))
    assert read_source(SourceSettings(traces=[path], mode=Mode.MODELLED)).kv_cache_tokens == 3200


@pytest.mark.parametrize(("burst", "told"), [(5, False), (6, True)])
def test_bursts_above_k_plus_one_tokens_are_noted(tmp_path: Path, burst: int, told: bool) -> None:
    records = [record(output_tokens=3 + burst, itl_tokens=[burst, 2])]
    notes = read_source(SourceSettings(traces=[write_trace(tmp_path / "trace.jsonl", records)])).notes
    assert any("largest burst" in note for note in notes) == told


@pytest.fixture
async def clock() -> AsyncIterator[TimerClock]:
    made = TimerClock(asyncio.get_running_loop())
    yield made
    made.stop()


async def until(clock: TimerClock, when_ms: float) -> None:
    reached = asyncio.Event()
    clock.call_at(when_ms, reached.set)
    async with asyncio.timeout(120):
        await reached.wait()


async def test_timers_fire_in_order_and_not_early(clock: TimerClock) -> None:
    seen: list[tuple[str, float]] = []
    begin_ms = clock.now_ms()
    for name, after_ms in (("second", 20.0), ("first", 10.0), ("third", 20.0)):
        clock.call_at(begin_ms + after_ms, lambda name=name: seen.append((name, clock.now_ms() - begin_ms)))
    await until(clock, begin_ms + 30)
    assert [name for name, _ in seen] == ["first", "second", "third"]
    assert all(at_ms >= least_ms - 0.1 for (_, at_ms), least_ms in zip(seen, (10, 20, 20), strict=True))


async def test_cancelled_timer_and_stopped_clock_fire_nothing(clock: TimerClock) -> None:
    seen: list[str] = []
    clock.call_at(clock.now_ms() + 1, lambda: seen.append("cancelled")).cancel()
    await until(clock, clock.now_ms() + 5)
    clock.call_at(clock.now_ms() + 1, lambda: seen.append("before"))
    clock.stop()
    clock.stop()
    clock.call_at(0.0, lambda: seen.append("after"))
    other = TimerClock(asyncio.get_running_loop())
    await until(other, other.now_ms() + 5)
    other.stop()
    assert seen == []


QUICK_RECORDER = {"ttft_ms": 5.0, "itl_ms": [5.0, 5.0]}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def faults(folder: Path) -> list[str]:
    """Return what is wrong, but for gaps that were short as this machine was late."""
    return [each.message for each in validate_capture(folder).problems if each.file != "short_gap_share"]


async def begin(client: httpx.AsyncClient, **body: Any) -> None:
    async with client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True} | body) as response:
        await anext(response.aiter_lines())


async def test_recorded_replay_is_a_valid_capture(tmp_path: Path) -> None:
    out = tmp_path / "out"
    async with replay_server(tmp_path, [record(**QUICK_RECORDER, cached_tokens=2)] * 3, record=out) as client:
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


async def test_queue_time_is_recorded_and_scaled(tmp_path: Path) -> None:
    out = tmp_path / "out"
    waiting = record(arrival_ms=100.0, scheduled_ms=120.0, ttft_ms=30.0)
    async with replay_server(tmp_path, [waiting], record=out, time_scale=0.5) as client:
        await events(client)
        page = (await client.get("/metrics")).text
    (line,) = lines(out / TRACE)[1:]
    assert line["scheduled_ms"] - line["arrival_ms"] == pytest.approx(10.0, abs=0.001)
    queued_s = page.partition('vllm:request_queue_time_seconds_sum{engine="0",model_name="tiny"} ')[2].split()[0]
    assert float(queued_s) == pytest.approx(0.01)


async def test_recorded_steps_have_speculation_and_cache_counters(tmp_path: Path) -> None:
    out = tmp_path / "out"
    async with replay_server(tmp_path, [record(**QUICK_RECORDER)], record=out) as client:
        await events(client, prompt="four" * 7)
    steps = [line["scheduler"] for line in lines(out / STEP_STATS)]
    speculation = [step["spec_decoding_stats"] for step in steps]
    assert speculation[0] is None
    assert [each["num_accepted_tokens_per_pos"] for each in speculation[1:]] == [[1, 1, 0, 0], [1, 0, 0, 0]]
    assert [step["num_running_reqs"] for step in steps] == [1, 1, 0]
    assert sum(step["prefix_cache_stats"]["queries"] for step in steps) == 7


async def test_prefill_tokens_sum_prompts_with_first_token_in_the_step(tmp_path: Path) -> None:
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


async def test_abort_and_stop_string_are_recorded_as_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    endless = record(ttft_ms=1.0, itl_ms=[60_000.0, 1.0])
    silent = record(ttft_ms=60_000.0)
    async with replay_server(tmp_path, [endless, record(**QUICK_RECORDER), silent], record=out) as client:
        await begin(client)
        await events(client, stop=" bad")
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/completions", json={"prompt": "a"}, timeout=httpx.Timeout(120, read=1))
    ended = {line["ended_by"]: line for line in lines(out / TRACE)[1:]}
    assert ended["abort"]["output_tokens"] == 1
    assert ended["stop_string"]["stop_reason"] == " bad"
    assert [line["ended_by"] for line in lines(out / ABORTED)] == ["abort"]
    assert faults(out) == []


async def test_diffusion_blocks_are_recorded_without_speculation(tmp_path: Path) -> None:
    out = tmp_path / "out"
    blocks = record(output_tokens=96, ttft_ms=1.0, itl_ms=[5.0, 5.0], itl_tokens=[32, 32])
    async with replay_server(tmp_path, [blocks], None, record=out) as client:
        await events(client)
    assert faults(out) == []
    assert read_recording(out).num_speculative_tokens == 0


async def test_full_disk_stops_recording_but_not_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    out, found = tmp_path / "out", list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    async with replay_server(tmp_path, [record(**QUICK_RECORDER)], record=out) as client:
        await events(client)
        with monkeypatch.context() as patched:
            patched.setattr(served_answers, "encode", full)
            assert len(await events(client)) == 3
        assert len(await events(client)) == 3
    assert not found
    assert {path.name for path in out.iterdir()} == {"trace.jsonl.part", "step-stats.jsonl.part"}
    assert len(lines(out / "trace.jsonl.part")) == 2, "nothing follows what is missing"


async def test_existing_recording_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_trace(tmp_path / "out" / TRACE, [record()])
    with pytest.raises(ServeError, match="--record"):
        async with replay_server(tmp_path, [record()], record=tmp_path / "out"):
            pass
