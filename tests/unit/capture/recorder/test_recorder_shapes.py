"""Engines whose inside is not as the hooks need it."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass, replace
from enum import Enum, IntEnum
from typing import Any, Optional

import msgspec
import pytest

from specdecode_operator.capture.recorder.vllm_internals import EngineClasses, is_tried, unknown_shapes
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS
from tests.support.engine_standins import (
    EngineCoreEvent,
    FinishReason,
    OlderOutputProcessor,
    OutputProcessor,
    OutputProcessorOutput,
    PrefillStats,
    engine_classes,
)


@pytest.mark.parametrize("processor", [OutputProcessor, OlderOutputProcessor])
def test_known_engines(processor: type[OlderOutputProcessor]) -> None:
    assert unknown_shapes(engine_classes(processor)) == []


@pytest.mark.parametrize("version", [*(f"{each}.0" for each in KNOWN_VERSIONS), "0.30.1", "0.33.1.dev5+g1234.cu130"])
def test_versions_that_it_was_tried_with(version: str) -> None:
    assert is_tried(version)


@pytest.mark.parametrize("version", ["0.27.1", "0.34.0", "1.0.0", "0.1.dev3", "dev", ""])
def test_versions_that_nobody_tried(version: str) -> None:
    assert not is_tried(version)


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
        (with_method("output_processor", "abort_requests", turned_async), "OutputProcessor.abort_requests is no plain"),
        (
            with_method("output_processor", "process_outputs", None),
            "OutputProcessor.process_outputs is no plain method",
        ),
        (with_method("client", "get_output_async", turned_sync), "AsyncMPClient.get_output_async is no coroutine"),
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
def test_what_is_not_as_it_should_be_is_named(change: Callable[[EngineClasses], EngineClasses], problem: str) -> None:
    problems = unknown_shapes(change(engine_classes()))
    assert any(each.startswith(problem) for each in problems), problems


def test_a_changed_type_is_named_and_other_spellings_and_further_fields_are_none() -> None:
    problems = unknown_shapes(with_message("EngineCoreOutput", OtherTypes)(engine_classes()))
    assert problems == ["EngineCoreOutput.new_token_ids is bytes, not list[int]"]


UNREAD = {
    "EngineCoreRequest": {"client_index", "prompt_embeds"},
    "OutputProcessorOutput": {"request_outputs"},
    "SchedulerStats": {"kv_connector_stats", "num_waiting_reqs"},
}


def test_the_type_of_every_field_that_is_read_matters() -> None:
    classes = engine_classes()
    for name, kind in classes.messages.items():
        fields = kind.__dataclass_fields__ if hasattr(kind, "__dataclass_fields__") else kind.__struct_fields__
        other = make_dataclass(name, [(field, complex) for field in fields])
        problems = unknown_shapes(with_message(name, other)(classes))
        told = {each.partition(" is complex")[0].removeprefix(f"{name}.") for each in problems}
        assert told == set(fields) - UNREAD.get(name, set())


def test_stand_ins_are_as_strict_as_vllm() -> None:
    assert list(inspect.signature(OutputProcessor.process_outputs).parameters)[-1] == "weight_version"
