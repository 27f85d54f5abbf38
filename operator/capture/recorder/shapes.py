"""Whether an engine is one whose inside the recorder knows.

The classes are vLLM's own and no public interface: everything that the hooks use is looked at before
they are set. Known: 0.28 to 0.32, which differ, for the hooks, in this alone: process_outputs of 0.32
has one more parameter, and trims what follows a stop string.
"""

import dataclasses
import inspect
import re
from dataclasses import dataclass
from typing import Any

OLDEST, NEWEST = (0, 28), (0, 32)
"""Versions that were looked into and tried."""

_FIELDS = {
    "EngineCoreOutputs": {"engine_index", "outputs", "scheduler_stats", "timestamp"},
    "EngineCoreOutput": {"request_id", "new_token_ids", "finish_reason", "stop_reason", "events", "prefill_stats"},
    "EngineCoreRequest": {
        "request_id",
        "external_req_id",
        "prompt_token_ids",
        "prompt_embeds",
        "sampling_params",
        "arrival_time",
    },
    "EngineCoreEvent": {"type", "timestamp"},
    "OutputProcessorOutput": {"reqs_to_abort"},
    "SchedulerStats": {"num_running_reqs"},
    "PrefillStats": {"num_cached_tokens"},
}
_PARAMETERS = {
    "add_request": ["self", "request", "prompt", "parent_req", "request_index", "queue"],
    "process_outputs": ["self", "engine_core_outputs", "engine_core_timestamp", "iteration_stats"],
    "abort_requests": ["self", "request_ids", "internal"],
}
_EVENTS = {"QUEUED": 1, "SCHEDULED": 2, "PREEMPTED": 3}
_FINISH_REASONS = ["stop", "length", "abort", "error", "repetition"]


@dataclass(frozen=True)
class EngineClasses:
    """The classes of vLLM that the recorder depends on."""

    version: str
    output_processor: Any
    client: Any
    messages: dict[str, type]  # those whose fields are read, by name
    event_type: Any
    finish_reason: Any


def unknown_shapes(classes: EngineClasses) -> list[str]:
    """Return what is not as the hooks need it; nothing for an engine that is known."""
    problems = _version_problems(classes.version)
    for name, fields in _FIELDS.items():
        missing = sorted(fields - _field_names(classes.messages[name]))
        problems += [f"{name} has no {field}" for field in missing]
    for name, wanted in _PARAMETERS.items():
        problems += _parameter_problems(classes.output_processor, name, wanted)
    problems += _client_problems(classes.client)
    events = {member.name: member.value for member in classes.event_type}
    if not _EVENTS.items() <= events.items():
        problems.append(f"EngineCoreEventType is {events}")
    reasons = [str(member) for member in classes.finish_reason]
    if reasons != _FINISH_REASONS:
        problems.append(f"FinishReason is {reasons}")
    return problems


def _version_problems(version: str) -> list[str]:
    found = re.match(r"(\d+)\.(\d+)\.", version)
    if found and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        return []
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
    return [f"vLLM is {version}, this recorder is made for {oldest} to {newest}"]


def _field_names(kind: type) -> set[str]:
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    return set(getattr(kind, "__struct_fields__", ()))


def _parameter_problems(owner: type, name: str, wanted: list[str]) -> list[str]:
    function = getattr(owner, name, None)
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
        return [f"{owner.__name__}.{name} is no plain method"]
    found = list(inspect.signature(function).parameters)
    return [] if found[: len(wanted)] == wanted else [f"{owner.__name__}.{name} takes {', '.join(found)}"]


def _client_problems(client: type) -> list[str]:
    name = "get_output_async"
    if not inspect.iscoroutinefunction(getattr(client, name, None)):
        return [f"{client.__name__}.{name} is no coroutine"]
    parameters = list(inspect.signature(getattr(client, name)).parameters)
    problems = [] if parameters == ["self"] else [f"{client.__name__}.{name} takes {', '.join(parameters)}"]
    # The clients of data parallel engines inherit it; one with its own would not be seen.
    return problems + [f"{each.__name__} has its own {name}" for each in _descendants(client) if name in vars(each)]


def _descendants(kind: type) -> list[type]:
    children: list[type] = kind.__subclasses__()
    return [found for child in children for found in (child, *_descendants(child))]
