"""Check the internal classes of vLLM that the recorder uses, and read facts about the engine.

The classes are not a public interface. Everything that the hooks use, including types, is checked before the hooks
are set. The result of the check decides, not the version: an untested vLLM is recorded if it looks like the tested
ones, and its segments record that. Only this module and plugin.py import vllm.
"""

import dataclasses
import inspect
import os
import re
import socket
import time
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .segment_format import EMULATED, RECORDER_VERSION, SCHEMA, EngineConfig, Header, Settings, Speculative

OLDEST, NEWEST = (0, 28), (0, 33)
"""Tested versions.

For the hooks they differ only in process_outputs: in 0.32 and newer it has one more parameter, and trims tokens after
a stop string.
"""

TRIED = " to ".join(".".join(map(str, each)) for each in (OLDEST, NEWEST))
_ANYTHING = ""  # a type that is not checked
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
"""Parameter and return types that the hooks use."""

_EVENTS = {"QUEUED": 1, "SCHEDULED": 2, "PREEMPTED": 3}
_FINISH_REASONS = ["stop", "length", "abort", "error", "repetition"]


@dataclass(frozen=True)
class EngineClasses:
    """Classes of vLLM that the recorder depends on."""

    output_processor: Any
    client: Any
    messages: dict[str, type]  # classes whose fields are read, by name
    event_type: Any
    finish_reason: Any


def is_tried(version: str) -> bool:
    """Return whether the recorder was tested with a version of vLLM."""
    found = re.match(r"(\d+)\.(\d+)\.", version)
    return found is not None and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST


def unknown_shapes(classes: EngineClasses) -> list[str]:
    """Return the differences from the classes that the hooks require; empty for a known engine of any version."""
    problems = []
    for name, fields in _FIELDS.items():
        found = _field_types(classes.messages[name])
        problems += [f"{name} has no {field}" for field in sorted(fields.keys() - found.keys())]
        problems += _type_problems(f"{name}.", found, fields)
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


def _field_types(kind: type) -> dict[str, Any]:
    if dataclasses.is_dataclass(kind):
        return {field.name: field.type for field in dataclasses.fields(kind)}
    annotations: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        annotations |= inspect.get_annotations(base)
    return {name: annotations.get(name) for name in getattr(kind, "__struct_fields__", ())}


def _type_problems(prefix: str, found: dict[str, Any], wanted: dict[str, str]) -> list[str]:
    return [
        f"{prefix}{name} is {written}, not {kind}"
        for name, kind in wanted.items()
        if name in found and kind != _ANYTHING
        # The order of alternatives does not matter.
        if set((written := _written(found[name])).split(" | ")) != set(kind.split(" | "))
    ]


def _written(kind: Any) -> str:
    """Return a type in source notation, without modules."""
    if isinstance(kind, str):
        return re.sub(r"[\w.]+\.", "", kind.strip("\"'"))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " | ".join(map(_written, typing.get_args(kind)))
    if arguments := typing.get_args(kind):
        return f"{_written(typing.get_origin(kind))}[{', '.join(map(_written, arguments))}]"
    return "None" if kind in (None, type(None)) else str(getattr(kind, "__name__", kind))


def _method_problems(owner: type, name: str) -> list[str]:
    function, wanted, where = getattr(owner, name, None), _PARAMETERS[name], f"{owner.__name__}.{name}"
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
        return [f"{where} is not a plain method"]
    found = list(inspect.signature(function).parameters)
    if found[: len(wanted)] != wanted:
        return [f"{where} takes {', '.join(found)}"]
    return _type_problems(f"{where}: ", inspect.get_annotations(function), _MESSAGES[name])


def _client_problems(client: type) -> list[str]:
    name = "get_output_async"
    function, where = getattr(client, name, None), f"{client.__name__}.{name}"
    if function is None or not inspect.iscoroutinefunction(function):
        return [f"{where} is not a coroutine"]
    parameters = list(inspect.signature(function).parameters)
    problems = [] if parameters == _PARAMETERS[name] else [f"{where} takes {', '.join(parameters)}"]
    problems += _type_problems(f"{where}: ", inspect.get_annotations(function), _MESSAGES[name])
    # The clients of data parallel engines inherit it; an override would not be hooked.
    return problems + [f"{each.__name__} has its own {name}" for each in _descendants(client) if name in vars(each)]


def _descendants(kind: type) -> list[type]:
    children: list[type] = kind.__subclasses__()
    return [found for child in children for found in (child, *_descendants(child))]


_PROCESSES = Path("/proc")
# Field 22 of /proc/PID/stat (proc(5)), counted from the third, because the name before it may contain spaces.
_STARTED = 19


def find_classes() -> EngineClasses:
    """Import the classes that are hooked and read; raise ImportError if vLLM has moved one."""
    from vllm.v1.engine import (  # noqa: PLC0415 (only inside an engine)
        EngineCoreEvent,
        EngineCoreEventType,
        EngineCoreOutput,
        EngineCoreOutputs,
        EngineCoreRequest,
        FinishReason,
    )
    from vllm.v1.engine.core_client import AsyncMPClient  # noqa: PLC0415
    from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput  # noqa: PLC0415
    from vllm.v1.metrics.stats import PrefillStats, SchedulerStats  # noqa: PLC0415
    from vllm.v1.spec_decode.metrics import SpecDecodingStats  # noqa: PLC0415

    read = (
        EngineCoreEvent,
        EngineCoreOutput,
        EngineCoreOutputs,
        EngineCoreRequest,
        OutputProcessorOutput,
        PrefillStats,
        SchedulerStats,
        SpecDecodingStats,
    )
    return EngineClasses(
        output_processor=OutputProcessor,
        client=AsyncMPClient,
        messages={each.__name__: each for each in read},
        event_type=EngineCoreEventType,
        finish_reason=FinishReason,
    )


def live_problems(classes: EngineClasses) -> list[str]:
    """Return what a live capture needs besides and cannot find."""
    code = getattr(classes.output_processor.__init__, "__code__", None)
    if code is not None and "request_states" in code.co_names:
        return []
    return [f"{classes.output_processor.__name__} has no request_states"]


_COUNTERS = {
    "requests_finished": "vllm:request_success_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "drafts": "vllm:spec_decode_num_drafts_total",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}


def read_counters() -> dict[str, float]:
    """Return vLLM's own counters of this process, summed over labels; a counter that it lacks is left out."""
    # Also of this process alone if several API servers share a folder (PROMETHEUS_MULTIPROC_DIR): only the collector
    # of that folder, which is in another registry, adds up processes.
    from prometheus_client import REGISTRY  # noqa: PLC0415 (only inside an engine)

    found: dict[str, float] = {}
    for metric in REGISTRY.restricted_registry(_COUNTERS.values()).collect():
        for sample in metric.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return {key: found[name] for key, name in _COUNTERS.items() if name in found}


def header(vllm_config: Any, engines: list[int], boot: str, settings: Settings) -> Header:
    """Return the first line of the segment; settings that vLLM lacks are null."""
    parallel = getattr(vllm_config, "parallel_config", None)
    config = _config(vllm_config)
    client_count = getattr(parallel, "_api_process_count", 1)
    import vllm  # noqa: PLC0415 (only inside an engine)

    version = str(vllm.__version__)
    return Header(
        schema=SCHEMA,
        recorder=RECORDER_VERSION,
        vllm=version,
        recorder_tried=is_tried(version),
        boot=boot,
        host=socket.gethostname(),
        pid=os.getpid(),
        # The client sets EngineCoreRequest.client_index to the same value later.
        client_index=getattr(parallel, "_api_process_rank", 0),
        client_count=client_count,
        engines=list(engines),
        wall_s=time.time(),
        monotonic_s=time.monotonic(),
        model=getattr(getattr(vllm_config, "model_config", None), "model", None),
        config=config,
        gpu=_gpu(),
        token_ids=settings.token_ids,
        steps=settings.steps,
        start=start_id(client_count),
        gpu_uuids=_gpu_uuids(config),
    )


_CONFIG = {
    "max_num_seqs": ("scheduler_config", "max_num_seqs"),
    "block_size": ("cache_config", "block_size"),
    "max_model_len": ("model_config", "max_model_len"),
    "max_num_batched_tokens": ("scheduler_config", "max_num_batched_tokens"),
    "tensor_parallel": ("parallel_config", "tensor_parallel_size"),
    "pipeline_parallel": ("parallel_config", "pipeline_parallel_size"),
    "data_parallel": ("parallel_config", "data_parallel_size"),
    "gpu_memory_utilization": ("cache_config", "gpu_memory_utilization"),
    "enforce_eager": ("model_config", "enforce_eager"),
    "enable_prefix_caching": ("cache_config", "enable_prefix_caching"),
    "async_scheduling": ("scheduler_config", "async_scheduling"),
}


def _config(vllm_config: Any) -> EngineConfig:
    found = {name: getattr(getattr(vllm_config, part, None), field, None) for name, (part, field) in _CONFIG.items()}
    speculation = getattr(vllm_config, "speculative_config", None)
    if not speculation:
        return EngineConfig(**found)
    speculative = {field: getattr(speculation, field, None) for field in Speculative.__struct_fields__}
    return EngineConfig(**found, speculative=Speculative(**speculative))


def _gpu() -> str | None:
    from vllm.platforms import current_platform  # noqa: PLC0415 (only inside an engine)

    try:
        # An emulated engine (replay/emulated) sets this attribute.
        if emulated := vars(type(current_platform)).get("specdecode_emulated"):
            return f"{EMULATED} {emulated}"
        return None if current_platform.is_cpu() else str(current_platform.get_device_name())
    except Exception:  # noqa: BLE001 (whatever a driver raises: it is one word in the header)
        return None


def _gpu_uuids(config: EngineConfig) -> list[str]:
    """Return the driver's UUIDs of the engine's GPUs by rank; empty if unknown."""
    from vllm.platforms import current_platform  # noqa: PLC0415 (only inside an engine)

    try:
        if current_platform.is_cpu():
            return []
        gpus = (config.tensor_parallel or 0) * (config.pipeline_parallel or 0) * (config.data_parallel or 0)
        return [str(current_platform.get_device_uuid(rank)) for rank in range(gpus)]
    except Exception:  # noqa: BLE001 (whatever a driver raises: it is a remark in the header)
        return []


def start_id(api_servers: int, processes: Path = _PROCESSES) -> str | None:
    """Return PID and start time of the engine's first process, in ticks of this host; None if unknown."""
    # Several API servers are children of one process (vllm/v1/utils.py APIServerProcessManager); a single one is that
    # process itself. A restarted container reuses its PID, but not its start time.
    process = os.getppid() if api_servers > 1 else os.getpid()
    try:
        fields = (processes / str(process) / "stat").read_text().rpartition(")")[2].split()
        return f"{process}-{fields[_STARTED]}"
    except (OSError, IndexError, UnicodeDecodeError):
        return None
