"""What the recorder needs of the vLLM that it runs in; the only module beside the plugin that imports it."""

import os
import socket
import time
from pathlib import Path
from typing import Any

from .lines import EMULATED, RECORDER_VERSION, SCHEMA, EngineConfig, Header, Speculative
from .settings import Settings
from .shapes import EngineClasses, is_tried

_PROCESSES = Path("/proc")
_STARTED = 19
"""Field 22 of /proc/PID/stat, counted from the third: the name before may hold spaces (proc(5))."""


def find_classes() -> EngineClasses:
    """Return the classes that are hooked and read; fails where vLLM has moved one."""
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


def header(vllm_config: Any, engines: list[int], boot: str, settings: Settings) -> Header:
    """Return the first line of the segment; what the configuration does not have is null."""
    parallel = getattr(vllm_config, "parallel_config", None)
    config = _config(vllm_config)
    client_count = getattr(parallel, "_api_process_count", 1)
    version = engine_version()
    return Header(
        schema=SCHEMA,
        recorder=RECORDER_VERSION,
        vllm=version,
        recorder_tried=is_tried(version),
        boot=boot,
        host=socket.gethostname(),
        pid=os.getpid(),
        # EngineCoreRequest.client_index is set later, by the client, to the same.
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


def engine_version() -> str:
    """Return what vLLM says of itself."""
    import vllm  # noqa: PLC0415 (only inside an engine)

    return str(vllm.__version__)


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
    """Return the settings that a trace is read with, as the engine resolved them."""
    found = {name: getattr(getattr(vllm_config, part, None), field, None) for name, (part, field) in _CONFIG.items()}
    speculation = getattr(vllm_config, "speculative_config", None)
    if not speculation:
        return EngineConfig(**found)
    fields = Speculative.__struct_fields__
    return EngineConfig(
        **found, speculative=Speculative(**{field: getattr(speculation, field, None) for field in fields})
    )


def _gpu() -> str | None:
    """Return the product's name, which vLLM asks the driver for; None where there is none or it does not tell."""
    from vllm.platforms import current_platform  # noqa: PLC0415 (only inside an engine)

    try:
        # An emulated engine (replay/emulated) says so of itself; of other platforms the name is unknown.
        if emulated := vars(type(current_platform)).get("specdecode_emulated"):
            return f"{EMULATED} {emulated}"
        return None if current_platform.is_cpu() else str(current_platform.get_device_name())
    except Exception:  # noqa: BLE001 (whatever a driver raises: it is one word in the header)
        return None


def _gpu_uuids(config: EngineConfig) -> list[str]:
    """Return what the driver calls the engine's GPUs, by their rank; nothing where it does not tell."""
    from vllm.platforms import current_platform  # noqa: PLC0415 (only inside an engine)

    try:
        if current_platform.is_cpu():
            return []
        gpus = (config.tensor_parallel or 0) * (config.pipeline_parallel or 0) * (config.data_parallel or 0)
        return [str(current_platform.get_device_uuid(rank)) for rank in range(gpus)]
    except Exception:  # noqa: BLE001 (whatever a driver raises: it is a remark in the header)
        return []


def start_id(api_servers: int, processes: Path = _PROCESSES) -> str | None:
    """Return the process that began it and when, in ticks of this host; None where that cannot be told.

    Several API servers are children of one process (vllm/v1/utils.py APIServerProcessManager); a single one is that
    process itself. In a container that was started anew it has the same number as before, and another time.
    """
    process = os.getppid() if api_servers > 1 else os.getpid()
    try:
        fields = (processes / str(process) / "stat").read_text().rpartition(")")[2].split()
        return f"{process}-{fields[_STARTED]}"
    except (OSError, IndexError, UnicodeDecodeError):
        return None
