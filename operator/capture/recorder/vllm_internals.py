"""Whether an engine is one whose inside the recorder knows.

The classes are vLLM's own and no public interface: everything that the hooks use is looked at before they are set, its
types, too. What is found decides, not the version: one that nobody tried is recorded where all of it is as in those
that were, and its segments say so.
"""

import dataclasses
import inspect
import re
import types
import typing
from dataclasses import dataclass
from typing import Any

OLDEST, NEWEST = (0, 28), (0, 33)
"""Versions that were looked into and tried.

They differ, for the hooks, in this alone: process_outputs of 0.32 and newer has one more parameter, and trims what
follows a stop string.
"""

TRIED = " to ".join(".".join(map(str, each)) for each in (OLDEST, NEWEST))

_ANYTHING = ""
"""A type that does not matter."""

_FIELDS = {
    "EngineCoreOutputs": {
        "engine_index": "int",
        "outputs": "list[EngineCoreOutput]",
        "scheduler_stats": "SchedulerStats | None",
        "timestamp": "float",
    },
    "EngineCoreOutput": {
        "request_id": "str",
        "new_token_ids": "list[int]",
        "finish_reason": "FinishReason | None",
        "stop_reason": "int | str | None",
        "events": "list[EngineCoreEvent] | None",
        "prefill_stats": "PrefillStats | None",
    },
    "EngineCoreRequest": {
        "request_id": "str",
        "external_req_id": "str | None",
        "prompt_token_ids": "list[int] | None",
        "prompt_embeds": _ANYTHING,
        "sampling_params": "SamplingParams | None",
        "arrival_time": "float",
    },
    "EngineCoreEvent": {"type": "EngineCoreEventType", "timestamp": "float"},
    "OutputProcessorOutput": {"reqs_to_abort": "list[str]"},
    "SchedulerStats": {"num_running_reqs": "int", "spec_decoding_stats": "SpecDecodingStats | None"},
    "SpecDecodingStats": {
        "num_spec_tokens": "int",
        "num_drafts": "int",
        "num_draft_tokens": "int",
        "num_accepted_tokens": "int",
        "num_accepted_tokens_per_pos": "list[int]",
    },
    "PrefillStats": {"num_cached_tokens": "int"},
}
_PARAMETERS = {
    "add_request": ["self", "request", "prompt", "parent_req", "request_index", "queue"],
    "process_outputs": ["self", "engine_core_outputs", "engine_core_timestamp", "iteration_stats"],
    "abort_requests": ["self", "request_ids", "internal"],
    "get_output_async": ["self"],
}
_MESSAGES = {
    "add_request": {"request": "EngineCoreRequest"},
    "process_outputs": {"engine_core_outputs": "list[EngineCoreOutput]", "return": "OutputProcessorOutput"},
    "abort_requests": {"return": "list[str]"},
    "get_output_async": {"return": "EngineCoreOutputs"},
}
"""Types of what the methods take and return, as far as the hooks read it."""

_EVENTS = {"QUEUED": 1, "SCHEDULED": 2, "PREEMPTED": 3}
_FINISH_REASONS = ["stop", "length", "abort", "error", "repetition"]


@dataclass(frozen=True)
class EngineClasses:
    """The classes of vLLM that the recorder depends on."""

    output_processor: Any
    client: Any
    messages: dict[str, type]  # those whose fields are read, by name
    event_type: Any
    finish_reason: Any


def is_tried(version: str) -> bool:
    """Whether the recorder was tried with a version of vLLM."""
    found = re.match(r"(\d+)\.(\d+)\.", version)
    return found is not None and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST


def unknown_shapes(classes: EngineClasses) -> list[str]:
    """Return what is not as the hooks need it; nothing for an engine that is known, whatever its version."""
    problems = []
    for name, fields in _FIELDS.items():
        problems += _field_problems(classes.messages[name], name, fields)
    for name in ("add_request", "process_outputs", "abort_requests"):
        problems += _method_problems(classes.output_processor, name)
    problems += _client_problems(classes.client)
    events = {member.name: member.value for member in classes.event_type}
    if not _EVENTS.items() <= events.items():
        problems.append(f"EngineCoreEventType is {events}")
    reasons = [str(member) for member in classes.finish_reason]
    if reasons != _FINISH_REASONS:
        problems.append(f"FinishReason is {reasons}")
    return problems


def _field_problems(kind: type, name: str, wanted: dict[str, str]) -> list[str]:
    found = _field_types(kind)
    missing = [f"{name} has no {field}" for field in sorted(wanted.keys() - found.keys())]
    return missing + _type_problems(f"{name}.", found, wanted)


def _field_types(kind: type) -> dict[str, Any]:
    if dataclasses.is_dataclass(kind):
        return {field.name: field.type for field in dataclasses.fields(kind)}
    annotations: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        annotations |= inspect.get_annotations(base)
    return {name: annotations.get(name) for name in getattr(kind, "__struct_fields__", ())}


def _type_problems(prefix: str, found: dict[str, Any], wanted: dict[str, str]) -> list[str]:
    return [
        f"{prefix}{name} is {_written(found[name])}, not {kind}"
        for name, kind in wanted.items()
        if name in found and kind != _ANYTHING and _alternatives(_written(found[name])) != _alternatives(kind)
    ]


def _alternatives(written: str) -> set[str]:
    return set(written.split(" | "))


def _written(kind: Any) -> str:
    """Return a type as people write it, without modules."""
    if isinstance(kind, str):
        return re.sub(r"[\w.]+\.", "", kind.strip("\"'"))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " | ".join(map(_written, typing.get_args(kind)))
    if arguments := typing.get_args(kind):
        return f"{_written(typing.get_origin(kind))}[{', '.join(map(_written, arguments))}]"
    return "None" if kind in (None, type(None)) else str(getattr(kind, "__name__", kind))


def _method_problems(owner: type, name: str) -> list[str]:
    function, wanted = getattr(owner, name, None), _PARAMETERS[name]
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
        return [f"{owner.__name__}.{name} is no plain method"]
    found = list(inspect.signature(function).parameters)
    if found[: len(wanted)] != wanted:
        return [f"{owner.__name__}.{name} takes {', '.join(found)}"]
    return _message_problems(owner, name)


def _client_problems(client: type) -> list[str]:
    name = "get_output_async"
    if not inspect.iscoroutinefunction(getattr(client, name, None)):
        return [f"{client.__name__}.{name} is no coroutine"]
    parameters = list(inspect.signature(getattr(client, name)).parameters)
    problems = [] if parameters == _PARAMETERS[name] else [f"{client.__name__}.{name} takes {', '.join(parameters)}"]
    problems += _message_problems(client, name)
    # The clients of data parallel engines inherit it; one with its own would not be seen.
    return problems + [f"{each.__name__} has its own {name}" for each in _descendants(client) if name in vars(each)]


def _message_problems(owner: type, name: str) -> list[str]:
    found = inspect.get_annotations(getattr(owner, name))
    return _type_problems(f"{owner.__name__}.{name}: ", found, _MESSAGES[name])


def _descendants(kind: type) -> list[type]:
    children: list[type] = kind.__subclasses__()
    return [found for child in children for found in (child, *_descendants(child))]
