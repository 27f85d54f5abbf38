"""Hooks of the recorder."""

from collections.abc import Callable
from dataclasses import dataclass, make_dataclass, replace
from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any, Optional

import msgspec
import pytest

from specdecode_operator.capture.recorder.block_hashes import block_hashes
from specdecode_operator.capture.recorder.collector import TOO_MANY_ERRORS
from specdecode_operator.capture.recorder.hooks import Hooks
from specdecode_operator.capture.recorder.vllm_internals import EngineClasses, is_tried, unknown_shapes
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS
from tests.support.engine_standins import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutputs,
    FinishReason,
    OlderOutputProcessor,
    OutputProcessor,
    OutputProcessorOutput,
    PrefillStats,
    SamplingParams,
    SchedulerStats,
    chunk,
    engine_classes,
    last_chunk,
)
from tests.unit.capture.conftest import Recorder


def event(kind: str, stamp_s: float) -> EngineCoreEvent:
    return EngineCoreEvent(EngineCoreEventType[kind], stamp_s)


async def test_chunk_times_and_sizes_are_recorded(recorder: Recorder) -> None:
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


async def test_batch_context_of_each_chunk_is_recorded(recorder: Recorder) -> None:
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


async def test_running_count_without_statistics_is_number_of_own_requests(recorder: Recorder) -> None:
    recorder.server.add("a")
    recorder.server.add("b")
    await recorder.server.step(chunk("a"), running=None)
    assert recorder.requests()["a"].num_running == [2]
    assert recorder.lines("step") == []


async def test_prefill_tokens_cover_all_slices_of_a_step(recorder: Recorder) -> None:
    names = [f"r{number}" for number in range(130)]
    for name in names:
        recorder.server.add(name, [1] * 2)
    await recorder.server.step(*(last_chunk(name) for name in names), running=0)
    records = recorder.requests()
    assert len(records) == 130
    assert {tuple(record.prefill_tokens) for record in records.values()} == {(260,)}


async def test_remote_prefill_is_not_counted(recorder: Recorder) -> None:
    moved = SamplingParams(extra_args={"kv_transfer_params": {"do_remote_prefill": True}})
    recorder.server.add("a", [1] * 8, sampling_params=moved)
    await recorder.server.step(last_chunk("a"))
    record = recorder.requests()["a"]
    assert (record.prompt_tokens, record.prefill_tokens) == (8, [0])


@pytest.mark.parametrize("given", ["x", ["do_remote_prefill"], 1, {}])
async def test_clients_arguments_are_no_errors_of_the_recorder(recorder: Recorder, given: Any) -> None:
    for number in range(TOO_MANY_ERRORS):
        moved = SamplingParams(extra_args={"kv_transfer_params": given})
        recorder.server.add(f"{number}", [1] * 8, sampling_params=moved)
        await recorder.server.step(last_chunk(f"{number}"))
    records = recorder.requests().values()
    assert [record.prefill_tokens for record in records] == [[8]] * TOO_MANY_ERRORS


async def test_queue_times_and_preemptions_are_recorded(recorder: Recorder) -> None:
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


async def test_engine_index_is_recorded(recorder: Recorder) -> None:
    server = recorder.server
    server.add("a")
    server.add("b")
    await server.step(last_chunk("a"), engine=0)
    await server.step(last_chunk("b"), engine=1)
    records = recorder.requests()
    assert (records["a"].engine, records["b"].engine) == (0, 1)
    assert [line.engine for line in recorder.lines("step")] == [0, 1]


async def test_aborted_request_is_recorded_without_late_output(recorder: Recorder) -> None:
    server = recorder.server
    server.add("a")
    server.add("b")
    await server.step(chunk("a", 2))
    server.abort("a", "unknown")
    await server.step(chunk("a", 3), chunk("b"))
    record = recorder.requests()["a"]
    assert (record.finish_reason, record.ended_by, record.chunk_tokens) == ("abort", "abort", [2])


async def test_request_aborted_before_first_token_is_recorded(recorder: Recorder) -> None:
    recorder.server.add("a")
    recorder.server.abort("a")
    record = recorder.requests()["a"]
    assert (record.ended_by, record.engine, record.chunk_s, record.cached_tokens) == ("abort", None, [], None)


@pytest.mark.parametrize(("processor", "kept"), [(OutputProcessor, 2), (OlderOutputProcessor, None)])
async def test_stop_string_found_by_frontend_ends_the_record(
    make_recorder: Any, processor: type, kept: int | None
) -> None:
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


async def test_stop_string_in_last_step_is_recorded(recorder: Recorder) -> None:
    server = recorder.server
    server.add("a", sampling_params=SamplingParams(stop=["END", "FIN"]))
    server.processor.stop_at["a"] = 2
    await server.step(last_chunk("a", 5))
    record = recorder.requests()["a"]
    assert (record.finish_reason, record.ended_by, record.kept_tokens) == ("stop", "stop_string", 2)
    assert record.chunk_tokens == [5]
    assert record.stop_reason is None  # which of the two, is not known


async def test_stop_token_is_recorded_as_end_by_engine(recorder: Recorder) -> None:
    recorder.server.add("a")
    await recorder.server.step(chunk("a", 2, finish_reason=FinishReason.STOP, stop_reason=1234))
    record = recorder.requests()["a"]
    assert (record.finish_reason, record.stop_reason, record.ended_by) == ("stop", 1234, "engine")


async def test_token_ids_include_those_after_stop_string(make_recorder: Any) -> None:
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


async def test_step_statistics_are_recorded(recorder: Recorder) -> None:
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


async def test_steps_can_be_disabled(make_recorder: Any) -> None:
    recorder = make_recorder(steps=False)
    recorder.server.add("a")
    await recorder.server.step(last_chunk("a"), running=3)
    assert recorder.requests()["a"].num_running == [3]
    assert recorder.lines("step") == []


# The engine never notices the recorder: not what it returns, not what it raises, not what the recorder does wrong.


async def test_unexpected_objects_are_counted_as_errors(recorder: Recorder) -> None:
    server = recorder.server
    server.add("a")
    server.add("b")
    strange = SimpleNamespace(request_id="b", new_token_ids=[1], finish_reason=None)
    await server.deliver(EngineCoreOutputs(0, [strange], None, 1.0))  # type: ignore[list-item]
    server.add("c", sampling_params=SamplingParams(stop=3))  # type: ignore[arg-type]
    await server.step(last_chunk("a", 2))
    record = recorder.requests()["a"]
    assert record.chunk_tokens == [2]
    closed = recorder.lines()[-1]
    assert (closed.errors, closed.dropped) == (2, 2)
    assert closed.first_error == "AttributeError: 'types.SimpleNamespace' object has no attribute 'events'"


async def test_unexpected_results_are_returned_and_counted_as_errors(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.hooks.remove()
    processor = type(recorder.server.processor)
    monkeypatch.setattr(processor, "process_outputs", lambda *_: "no output")
    monkeypatch.setattr(processor, "abort_requests", lambda *_, **__: None)
    Hooks(_classes_of(recorder), recorder.collector).install()
    assert recorder.server.processor.process_outputs([], None, None) == "no output"
    assert recorder.server.processor.abort_requests(["a"], internal=True) is None
    assert recorder.collector.errors == 2


def _classes_of(recorder: Recorder) -> Any:
    return replace(
        engine_classes(), output_processor=type(recorder.server.processor), client=type(recorder.server.client)
    )


async def test_recorder_turns_off_after_many_errors(recorder: Recorder) -> None:
    recorder.server.add("a")
    for _ in range(TOO_MANY_ERRORS):
        await recorder.server.deliver(SimpleNamespace(outputs=[], timestamp=1.0))
    await recorder.server.step(last_chunk("a"))
    recorder.writer.turn()
    *_, off, closed = recorder.lines()
    assert "the hooks failed: AttributeError" in off.reason
    assert (closed.reason, closed.errors, closed.unfinished) == ("unknown_shape", TOO_MANY_ERRORS, 1)
    assert closed.dropped > TOO_MANY_ERRORS
    assert recorder.writer.is_closed


async def test_engine_errors_are_raised_and_not_counted(recorder: Recorder) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        recorder.server.processor.add_request(
            type("Request", (), {"request_id": [], "sampling_params": None, "prompt_token_ids": []})(), None
        )
    recorder.hooks.remove()
    client = type(recorder.server.client)

    async def dead(_: Any) -> None:
        raise ConnectionError("engine is dead")

    client.get_output_async = dead
    Hooks(_classes_of(recorder), recorder.collector).install()
    with pytest.raises(ConnectionError, match="dead"):
        await recorder.server.client.get_output_async()
    assert recorder.collector.errors == 0


async def test_hooks_do_not_change_arguments_or_results(recorder: Recorder) -> None:
    processor = recorder.server.processor
    recorder.server.add("a")
    outputs = [last_chunk("a")]
    result = processor.process_outputs(
        engine_core_outputs=outputs, engine_core_timestamp=1.0, iteration_stats=None, weight_version="v"
    )
    assert result.reqs_to_abort == []
    recorder.server.add("b")
    assert processor.abort_requests(request_ids=["b", "c"], internal=False) == ["b"]


async def test_message_after_hook_removal_is_not_recorded(recorder: Recorder) -> None:
    server = recorder.server
    server.add("a")
    await server.step(chunk("a"))
    recorder.writer.close("ordered")
    recorder.hooks.remove()
    await server.step(last_chunk("a"))
    assert recorder.lines("request")[0].chunk_tokens == [1]


# Block hashes, against the recipe written down plainly.


def fnv1a(data: bytes) -> int:
    state = 14695981039346656037
    for byte in data:
        state = ((state ^ byte) * 1099511628211) % 2**64
    return state


def plainly(token_ids: list[int], block_size: int) -> list[int]:
    hashes: list[int] = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        previous = hashes[-1] if hashes else 14695981039346656037
        block = b"".join(token.to_bytes(4, "little") for token in token_ids[end - block_size : end])
        hashes.append(fnv1a(previous.to_bytes(8, "little") + block))
    return hashes


@pytest.mark.parametrize("scale", [1, 255, 256, 65_535, 65_536, 16_777_215, 16_777_216, 4_294_967_295 // 39])
@pytest.mark.parametrize("length", [0, 3, 4, 7, 8, 40])
def test_block_hashes_match_reference_implementation(scale: int, length: int) -> None:
    token_ids = [position * scale for position in range(length)]
    assert block_hashes(token_ids, 4, lambda: None) == plainly(token_ids, 4)


def test_equal_prefixes_have_equal_hashes() -> None:
    one = block_hashes([1, 2, 3, 4, 5, 6, 7, 8], 2, lambda: None)
    other = block_hashes([1, 2, 3, 4, 9, 6, 7, 8], 2, lambda: None)
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])


# Engines whose inside is not as the hooks need it.


@pytest.mark.parametrize("version", [*(f"{each}.0" for each in KNOWN_VERSIONS), "0.30.1", "0.33.1.dev5+g1234.cu130"])
def test_known_vllm_versions_count_as_tested(version: str) -> None:
    assert is_tried(version)


@dataclass
class FewFields:
    request_id: str


class FewStructFields(msgspec.Struct):
    request_id: str


class OtherTypes(msgspec.Struct):
    """As in a version that packs its tokens, with its fields written in all ways."""

    request_id: str
    new_token_ids: bytes
    finish_reason: FinishReason | None
    stop_reason: str | int | None  # the same, in another order
    events: "list[EngineCoreEvent] | None"  # not evaluated
    prefill_stats: Optional[PrefillStats]  # noqa: UP045  as older code writes it
    added: int = 0


class Reasons(IntEnum):
    STOP = 0


class Events(Enum):
    QUEUED = 1
    SCHEDULED = 3
    PREEMPTED = 2


def more_needed(self: Any, request: Any, surprise: Any, prompt: Any = None) -> None: ...


def in_batches(
    self: Any, engine_core_outputs: dict[str, Any], engine_core_timestamp: float, iteration_stats: Any
) -> OutputProcessorOutput: ...


def counting(self: Any, request_ids: Any, internal: bool) -> int: ...


async def turned_async(self: Any, request_ids: Any, internal: Any) -> None: ...


async def answering_in_lists(self: Any) -> list[Any]: ...


def turned_sync(self: Any) -> None: ...


def with_message(name: str, kind: type) -> Callable[[EngineClasses], EngineClasses]:
    return lambda classes: replace(classes, messages=classes.messages | {name: kind})


def with_method(owner: str, name: str, method: Any) -> Callable[[EngineClasses], EngineClasses]:
    def change(classes: EngineClasses) -> EngineClasses:
        setattr(getattr(classes, owner), name, method)
        return classes

    return change


def with_own_client(classes: EngineClasses) -> EngineClasses:
    class Between(classes.client): ...

    class DPClient(Between):
        async def get_output_async(self) -> Any: ...

    # Alive as long as its base is.
    classes.client.keep = DPClient
    return classes


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (with_message("EngineCoreOutput", FewFields), "EngineCoreOutput has no events"),
        (with_message("EngineCoreRequest", FewStructFields), "EngineCoreRequest has no arrival_time"),
        (with_message("EngineCoreEvent", int), "EngineCoreEvent has no timestamp"),
        (
            with_method("output_processor", "add_request", more_needed),
            "OutputProcessor.add_request takes self, request, s",
        ),
        (
            with_method("output_processor", "abort_requests", turned_async),
            "OutputProcessor.abort_requests is not a plain",
        ),
        (
            with_method("output_processor", "process_outputs", None),
            "OutputProcessor.process_outputs is not a plain method",
        ),
        (with_method("client", "get_output_async", turned_sync), "AsyncMPClient.get_output_async is not a coroutine"),
        (
            with_method("client", "get_output_async", turned_async),
            "AsyncMPClient.get_output_async takes self, request_ids",
        ),
        (
            with_method("output_processor", "process_outputs", in_batches),
            "OutputProcessor.process_outputs: engine_core_outputs is dict[str, Any], not list[EngineCoreOutput]",
        ),
        (
            with_method("output_processor", "abort_requests", counting),
            "OutputProcessor.abort_requests: return is int, not list[str]",
        ),
        (
            with_method("client", "get_output_async", answering_in_lists),
            "AsyncMPClient.get_output_async: return is list[Any], not EngineCoreOutputs",
        ),
        (with_own_client, "DPClient has its own get_output_async"),
        (lambda classes: replace(classes, finish_reason=Reasons), "FinishReason is ['0']"),
        (lambda classes: replace(classes, event_type=Events), "EngineCoreEventType is {'QUEUED': 1, 'SCHEDULED': 3"),
    ],
)
def test_changed_engine_class_is_reported(change: Callable[[EngineClasses], EngineClasses], problem: str) -> None:
    problems = unknown_shapes(change(engine_classes()))
    assert any(each.startswith(problem) for each in problems), problems


def test_changed_field_type_is_reported_but_equivalent_types_are_not() -> None:
    problems = unknown_shapes(with_message("EngineCoreOutput", OtherTypes)(engine_classes()))
    assert problems == ["EngineCoreOutput.new_token_ids is bytes, not list[int]"]


UNREAD = {
    "EngineCoreRequest": {"client_index", "prompt_embeds"},
    "OutputProcessorOutput": {"request_outputs"},
    "SchedulerStats": {"kv_connector_stats", "num_waiting_reqs"},
}


def test_type_of_every_field_read_is_checked() -> None:
    classes = engine_classes()
    for name, kind in classes.messages.items():
        fields = kind.__dataclass_fields__ if hasattr(kind, "__dataclass_fields__") else kind.__struct_fields__
        other = make_dataclass(name, [(field, complex) for field in fields])
        problems = unknown_shapes(with_message(name, other)(classes))
        told = {each.partition(" is complex")[0].removeprefix(f"{name}.") for each in problems}
        assert told == set(fields) - UNREAD.get(name, set())
