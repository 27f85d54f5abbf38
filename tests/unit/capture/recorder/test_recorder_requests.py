"""What is recorded of a request, whatever way it takes."""

from typing import Any

import pytest

from tests.support.engine_standins import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    OlderOutputProcessor,
    OutputProcessor,
    PrefillStats,
    SamplingParams,
    SchedulerStats,
    chunk,
    last_chunk,
)
from tests.unit.capture.conftest import Recorder


def event(kind: str, stamp_s: float) -> EngineCoreEvent:
    return EngineCoreEvent(EngineCoreEventType[kind], stamp_s)


async def test_every_chunk_has_its_stamp_and_size(recorder: Recorder) -> None:
    server = recorder.server
    server.add("a", sampling_params=SamplingParams(temperature=0.7))
    stamps = [
        await server.step(chunk("a", 1)),
        await server.step(chunk("a", 5)),
        await server.step(chunk("a", 3)),
        await server.step(last_chunk("a", 2)),
    ]
    record = recorder.requests()["a"]
    assert record.chunk_s == stamps
    assert record.chunk_tokens == [1, 5, 3, 2]
    assert (record.finish_reason, record.ended_by, record.stop_reason) == ("length", "engine", None)
    assert (record.prompt_tokens, record.temperature, record.external_id, record.engine) == (3, 0.7, "a", 0)
    assert record.arrival_wall_s == 1_700_000_000.0
    assert record.kept_tokens is None
    assert record.token_ids is None


async def test_a_finished_request_is_written_while_others_run(recorder: Recorder) -> None:
    recorder.server.add("a")
    recorder.server.add("b")
    await recorder.server.step(last_chunk("a"), chunk("b"))
    recorder.writer.turn()
    assert [line.id for line in recorder.lines("request")] == ["a"]


async def test_concurrency_counts_the_request_itself(recorder: Recorder) -> None:
    server = recorder.server
    server.add("a")
    server.add("b")
    await server.step(last_chunk("a"), chunk("b"))
    server.add("c")
    records = recorder.requests()
    assert [records[name].concurrency for name in "abc"] == [1, 2, 2]


async def test_batch_of_each_chunk(recorder: Recorder) -> None:
    server = recorder.server
    server.add("a", [1] * 10)
    server.add("b", [1] * 20)
    server.add("c", [1] * 30)
    await server.step(chunk("a"), running=3)
    await server.step(chunk("a"), chunk("b"), chunk("c"), running=3)
    await server.step(chunk("a"), last_chunk("b"), last_chunk("c"), running=1)
    await server.step(last_chunk("a"), running=0)
    records = recorder.requests()
    assert records["a"].prefill_tokens == [10, 50, 0, 0]
    assert records["c"].prefill_tokens == [50, 0]
    # The engine counts after the step: of the last one nothing runs any more.
    assert records["a"].num_running == [3, 3, 1, 1]


async def test_without_statistics_the_own_requests_are_what_runs(recorder: Recorder) -> None:
    recorder.server.add("a")
    recorder.server.add("b")
    await recorder.server.step(chunk("a"), running=None)
    assert recorder.requests()["a"].num_running == [2]
    assert recorder.lines("step") == []


async def test_first_token_in_a_later_slice_counts_in_the_step_of_all(recorder: Recorder) -> None:
    names = [f"r{number}" for number in range(130)]
    for name in names:
        recorder.server.add(name, [1] * 2)
    await recorder.server.step(*(last_chunk(name) for name in names), running=0)
    records = recorder.requests()
    assert len(records) == 130
    assert {tuple(record.prefill_tokens) for record in records.values()} == {(260,)}


async def test_prompt_of_another_engine_is_no_prefill(recorder: Recorder) -> None:
    moved = SamplingParams(extra_args={"kv_transfer_params": {"do_remote_prefill": True}})
    recorder.server.add("a", [1] * 8, sampling_params=moved)
    await recorder.server.step(last_chunk("a"))
    record = recorder.requests()["a"]
    assert (record.prompt_tokens, record.prefill_tokens) == (8, [0])


async def test_events_and_preemptions(recorder: Recorder) -> None:
    server = recorder.server
    server.add("a")
    first = [event("QUEUED", 1.0), event("SCHEDULED", 2.0)]
    await server.step(chunk("a", events=first, prefill_stats=PrefillStats(48)))
    await server.step(chunk("a", 3))
    # Taken off and computed anew: vLLM tells with the next token, and none was lost or doubled.
    again = [event("PREEMPTED", 3.0), event("SCHEDULED", 4.0), event("PREEMPTED", 5.0), event("SCHEDULED", 6.0)]
    await server.step(chunk("a", 2, events=again, prefill_stats=PrefillStats(999)))
    await server.step(last_chunk("a"))
    record = recorder.requests()["a"]
    assert (record.queued_s, record.scheduled_s, record.preemptions, record.cached_tokens) == (1.0, 2.0, 2, 48)
    assert record.chunk_tokens == [1, 3, 2, 1]
    assert record.prefill_tokens == [3, 0, 0, 0]


async def test_each_of_several_answers_is_a_record(recorder: Recorder) -> None:
    server = recorder.server
    server.add("0_cmpl-x")
    server.add("1_cmpl-x")
    await server.step(chunk("0_cmpl-x", 2), last_chunk("1_cmpl-x", 1))
    await server.step(last_chunk("0_cmpl-x", 4))
    records = recorder.requests()
    assert records["0_cmpl-x"].chunk_tokens == [2, 4]
    assert records["1_cmpl-x"].chunk_tokens == [1]


async def test_engines_are_told_apart(recorder: Recorder) -> None:
    server = recorder.server
    server.add("a")
    server.add("b")
    await server.step(last_chunk("a"), engine=0)
    await server.step(last_chunk("b"), engine=1)
    records = recorder.requests()
    assert (records["a"].engine, records["b"].engine) == (0, 1)
    assert [line.engine for line in recorder.lines("step")] == [0, 1]


async def test_aborted_request_is_kept_and_its_late_output_is_not(recorder: Recorder) -> None:
    server = recorder.server
    server.add("a")
    server.add("b")
    await server.step(chunk("a", 2))
    server.abort("a", "unknown")
    await server.step(chunk("a", 3), chunk("b"))
    record = recorder.requests()["a"]
    assert (record.finish_reason, record.ended_by, record.chunk_tokens) == ("abort", "abort", [2])


async def test_request_that_left_before_its_first_token(recorder: Recorder) -> None:
    recorder.server.add("a")
    recorder.server.abort("a")
    record = recorder.requests()["a"]
    assert (record.ended_by, record.engine, record.chunk_s, record.cached_tokens) == ("abort", None, [], None)


@pytest.mark.parametrize(("processor", "kept"), [(OutputProcessor, 2), (OlderOutputProcessor, None)])
async def test_stop_string_that_only_the_frontend_sees(make_recorder: Any, processor: type, kept: int | None) -> None:
    recorder = make_recorder(processor=processor)
    server = recorder.server
    server.add("a", sampling_params=SamplingParams(stop=["END"]))
    server.processor.stop_at["a"] = 3
    await server.step(chunk("a", 1))
    await server.step(chunk("a", 5))
    await server.step(chunk("a", 4))  # the engine had gone on
    record = recorder.requests()["a"]
    assert record.chunk_tokens == [1, 5]
    assert (record.finish_reason, record.stop_reason, record.ended_by) == ("stop", "END", "stop_string")
    assert record.kept_tokens == kept


async def test_stop_string_in_the_step_in_which_the_engine_ended(recorder: Recorder) -> None:
    server = recorder.server
    server.add("a", sampling_params=SamplingParams(stop=["END", "FIN"]))
    server.processor.stop_at["a"] = 2
    await server.step(last_chunk("a", 5))
    record = recorder.requests()["a"]
    assert (record.finish_reason, record.ended_by, record.kept_tokens) == ("stop", "stop_string", 2)
    assert record.chunk_tokens == [5]
    assert record.stop_reason is None  # which of the two, is not known


async def test_stop_string_at_the_end_of_a_chunk_cuts_nothing(recorder: Recorder) -> None:
    recorder.server.add("a", sampling_params=SamplingParams(stop=["END"]))
    recorder.server.processor.stop_at["a"] = 3
    await recorder.server.step(chunk("a", 3))
    record = recorder.requests()["a"]
    assert (record.ended_by, record.kept_tokens) == ("stop_string", None)


async def test_stop_token_is_the_engines_own_end(recorder: Recorder) -> None:
    recorder.server.add("a")
    await recorder.server.step(chunk("a", 2, finish_reason=FinishReason.STOP, stop_reason=1234))
    record = recorder.requests()["a"]
    assert (record.finish_reason, record.stop_reason, record.ended_by) == ("stop", 1234, "engine")


async def test_end_without_a_token_makes_no_chunk(recorder: Recorder) -> None:
    recorder.server.add("a")
    await recorder.server.step(chunk("a", 2))
    await recorder.server.step(last_chunk("a", 0, FinishReason.ERROR))
    record = recorder.requests()["a"]
    assert (record.chunk_tokens, record.finish_reason, record.ended_by) == ([2], "error", "engine")


async def test_more_input_of_a_request_is_the_same_request(recorder: Recorder) -> None:
    recorder.server.add("a")
    await recorder.server.step(chunk("a", 2))
    recorder.server.add("a")
    await recorder.server.step(last_chunk("a", 1))
    assert recorder.requests()["a"].chunk_tokens == [2, 1]


async def test_token_ids_only_when_asked_for(make_recorder: Any) -> None:
    recorder = make_recorder(token_ids=True)
    recorder.server.add("a", [7, 8, 9])
    recorder.server.processor.stop_at["a"] = 3
    await recorder.server.step(chunk("a", 2))
    await recorder.server.step(chunk("a", 4))
    # As the engine made them: as many as the chunks say, although the client got fewer.
    assert recorder.requests()["a"].token_ids == [0, 1, 0, 1, 2, 3]


async def test_prompts_are_never_recorded(make_recorder: Any) -> None:
    recorder = make_recorder(token_ids=True)
    recorder.server.add("a", [424242] * 9)
    await recorder.server.step(last_chunk("a"))
    assert len(recorder.requests()["a"].block_hashes) == 2
    assert b"424242" not in recorder.path.read_bytes()


async def test_prompt_given_as_embeddings(recorder: Recorder) -> None:
    embedded = EngineCoreRequest("a", None, SamplingParams(), "a", prompt_embeds=[[0.1], [0.2]])
    recorder.server.processor.add_request(embedded, None)
    await recorder.server.step(last_chunk("a"))
    record = recorder.requests()["a"]
    assert (record.prompt_tokens, record.block_hashes) == (2, [])


async def test_steps_are_whole(recorder: Recorder) -> None:
    details = {"iteration_index": 4, "elapsed_ms": 1.5}
    stats = SchedulerStats(2, 1, details, float("nan"))
    await recorder.server.deliver(EngineCoreOutputs(1, [], stats, 7.25))
    recorder.writer.close("ordered")
    (step,) = recorder.lines("step")
    assert (step.engine, step.t) == (1, 7.25)
    assert step.scheduler == {
        "num_running_reqs": 2,
        "num_waiting_reqs": 1,
        "spec_decoding_stats": details,
        "kv_connector_stats": None,
    }


async def test_steps_may_be_left_out(make_recorder: Any) -> None:
    recorder = make_recorder(steps=False)
    recorder.server.add("a")
    await recorder.server.step(last_chunk("a"), running=3)
    assert recorder.requests()["a"].num_running == [3]
    assert recorder.lines("step") == []
