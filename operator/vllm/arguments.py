"""Build the engine's command line from its settings, and list flags that the operator reserves."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Final

from specdecode_operator.enums import Platform
from specdecode_operator.vllm.profiles import EngineProfile
from specdecode_operator.vllm.settings import AdapterSettings, EngineSettings, FieldPath, NodeGroup
from specdecode_operator.vllm.speculative_config import speculative_config

TLS_PATH = "/etc/specdecode-tls"

COMPILATION_CONFIG = "--compilation-config"

HF_OVERRIDES = "--hf-overrides"

SPECULATIVE_OPTION = "--speculative-config"

SERVING: Final = "spec.serving."
ADAPTERS: Final = "spec.adapters"

Values = tuple[str, ...] | None
"""Values that follow a flag: ``()`` for a switch, None to leave the flag out."""


@dataclass(frozen=True)
class Argument:
    """One flag that the operator writes."""

    flag: str
    field: str | None
    """Field that sets the flag, from which `specdecode import` maps it back; None if no field does."""
    computed: Callable[[EngineSettings, EngineProfile], Values] | None = None
    """Its values; None if a field of ``spec.serving`` is passed on unchanged."""
    says_more: bool = False
    """Whether the flag expresses more than the field, so that users may write it if the field is not set."""

    def values(self, settings: EngineSettings, profile: EngineProfile) -> Values:
        """Return what follows the flag."""
        if self.computed is not None:
            return self.computed(settings, profile)
        value = self._path.value_in(settings.serving)
        return _switch(on=value) if isinstance(value, bool) else _one(value)

    @cached_property
    def _path(self) -> FieldPath:
        return FieldPath((self.field or "").removeprefix(SERVING))


def _one(value: str | float | None) -> Values:
    return None if value is None else (str(value),)


def _switch(*, on: bool) -> Values:
    return () if on else None


def _several(ranks: int) -> Values:
    """Return a number of ranks; no flag for one rank, which is the default of every version."""
    return _one(ranks) if ranks > 1 else None


def _in_group(value: Callable[[NodeGroup], Values]) -> Callable[[EngineSettings, EngineProfile], Values]:
    """Return the values of an argument that only engines on several nodes have."""
    return lambda settings, _: None if settings.group is None else value(settings.group)


def _memory_utilization(settings: EngineSettings, _: EngineProfile) -> Values:
    """Return 92 percent as 0.92; the CPU backend has a KV cache size instead."""
    share = Decimal(settings.serving.gpu_memory_utilization_percent).scaleb(-2)
    return None if settings.platform is Platform.CPU else (str(share),)


def _executor(settings: EngineSettings, _: EngineProfile) -> Values:
    """Return the multiprocessing executor, because vLLM would choose Ray in an image that has it."""
    several = settings.tensor_parallel_size * settings.pipeline_parallel_size > 1 or settings.group is not None
    return ("mp",) if several else None


def _of_adapters(value: Callable[[AdapterSettings], Values]) -> Callable[[EngineSettings, EngineProfile], Values]:
    """Return the values of an argument that only engines with adapters have."""
    return lambda settings, _: None if settings.adapters is None else value(settings.adapters)


def _adapter_modules(adapters: AdapterSettings) -> Values:
    """Return each adapter as JSON, because a name may contain =."""
    return tuple(json.dumps({"name": name, "path": path}, separators=(",", ":")) for name, path in adapters.paths)


def _tls_file(name: str) -> Callable[[EngineSettings, EngineProfile], Values]:
    return lambda settings, _: _one(f"{TLS_PATH}/{name}" if settings.tls else None)


ARGUMENTS: tuple[Argument, ...] = (
    Argument("--served-model-name", "spec.serving.servedModelNames", lambda s, _: s.served_model_names),
    Argument("--host", None, lambda _s, _p: ("0.0.0.0",)),  # noqa: S104 (the pod's own network)
    Argument("--port", "spec.serving.port"),
    Argument("--ssl-certfile", "spec.serving.tlsSecret", _tls_file("tls.crt")),
    Argument("--ssl-keyfile", "spec.serving.tlsSecret", _tls_file("tls.key")),
    # Reload a renewed certificate without a restart.
    Argument("--enable-ssl-refresh", "spec.serving.tlsSecret", lambda s, _: _switch(on=s.tls)),
    Argument(HF_OVERRIDES, "spec.target.ropeScaling", lambda s, _: _one(s.hf_overrides), says_more=True),
    Argument("--dtype", "spec.serving.dtype", lambda s, _: _one(s.dtype)),
    Argument(
        "--quantization",
        "spec.target.quantization",
        lambda s, p: _one(s.online_quantization and p.online_quantization[s.online_quantization]),
    ),
    Argument("--tensor-parallel-size", "spec.parallelism.tensor", lambda s, _: _one(s.tensor_parallel_size)),
    Argument("--pipeline-parallel-size", "spec.parallelism.pipeline", lambda s, _: _several(s.pipeline_parallel_size)),
    Argument("--data-parallel-size", "spec.parallelism.data", lambda s, _: _several(s.data_parallel_size)),
    Argument("--enable-expert-parallel", "spec.parallelism.expert", lambda s, _: _switch(on=s.expert_parallel)),
    Argument("--distributed-executor-backend", None, _executor),
    # Each node derives its ranks, including data-parallel ones, from its number.
    Argument("--nnodes", "spec.parallelism", _in_group(lambda group: _one(group.nodes))),
    Argument("--node-rank", None, _in_group(lambda group: (group.rank,))),
    Argument("--master-addr", None, _in_group(lambda group: (group.leader_address,))),
    Argument("--distributed-timeout-seconds", None, _in_group(lambda group: _one(group.meeting_timeout_s))),
    Argument("--headless", None, _in_group(lambda group: None if group.leads else ())),
    Argument("--max-model-len", "spec.serving.maxModelLen", lambda s, _: _one(s.max_model_len)),
    Argument("--max-num-seqs", "spec.serving.maxNumSeqs", lambda s, _: _one(s.max_num_seqs)),
    Argument(
        "--max-num-batched-tokens", "spec.serving.maxNumBatchedTokens", lambda s, _: _one(s.max_num_batched_tokens)
    ),
    Argument("--kv-cache-dtype", "spec.serving.kvCacheDtype"),
    Argument("--block-size", "spec.serving.blockSize", lambda s, _: _one(s.block_size)),
    Argument("--gpu-memory-utilization", "spec.serving.gpuMemoryUtilizationPercent", _memory_utilization),
    Argument("--enforce-eager", "spec.serving.enforceEager"),
    # One key of a JSON value: users may set other keys in extraArgs.
    Argument(f"{COMPILATION_CONFIG}.cudagraph_mode", "spec.serving.cudagraphMode"),
    Argument("--max-cudagraph-capture-size", "spec.serving.maxCudagraphCaptureSize"),
    Argument(SPECULATIVE_OPTION, "spec.speculation", lambda s, p: _one(speculative_config(s, p))),
    # Without adapters, users may set these flags themselves.
    Argument("--enable-lora", ADAPTERS, _of_adapters(lambda _: ()), says_more=True),
    Argument("--max-loras", ADAPTERS, _of_adapters(lambda each: _one(each.gpu_slots)), says_more=True),
    Argument("--max-lora-rank", ADAPTERS, _of_adapters(lambda each: _one(each.max_rank)), says_more=True),
    Argument("--max-cpu-loras", ADAPTERS, _of_adapters(lambda each: _one(each.host_slots)), says_more=True),
    Argument("--lora-target-modules", ADAPTERS, _of_adapters(lambda each: each.target_modules or None), says_more=True),
    Argument("--lora-modules", ADAPTERS, _of_adapters(_adapter_modules), says_more=True),
    Argument("--shutdown-timeout", None, lambda s, _: _one(s.shutdown_timeout_s)),
)
"""Flags that the operator writes, in order. A flag is left out only if all versions and devices have the same default.

A new field of ``spec.serving`` that is passed on unchanged takes one row here, with its flag and its path.
"""


def command_line(settings: EngineSettings, profile: EngineProfile) -> list[str]:
    """Return the engine container's command; ``extra_args``, checked by `extra_args_problems`, come last."""
    given = ((argument.flag, argument.values(settings, profile)) for argument in ARGUMENTS)
    written = [word for flag, values in given if values is not None for word in (flag, *values)]
    return ["vllm", "serve", settings.model, *written, *settings.extra_args]


_SPLIT = "use spec.parallelism and spec.replicas; the plan needs the GPUs and the nodes of a replica"
_KV_CACHE = (
    "use spec.serving.gpuMemoryUtilizationPercent, or spec.accelerator.kvCacheGiB on CPU; the plan depends on them"
)
_HTTP = "remove it; the Service and the probes use HTTP on spec.serving.port"
_CLIENT_CERTIFICATES = (
    "remove it; the kubelet's probes present no client certificate, so the engine would never be ready"
)

_REJECTED = {
    "--model": "use spec.target.model",
    "--spec-method": "use spec.speculation.method",
    "--spec-model": "use spec.speculation.draft.model",
    "--spec-tokens": "use spec.speculation.numSpeculativeTokens",
    "--revision": "use spec.target.revision, at which the plan reads config.json",
    "--quantization-config": "use spec.target.quantization",
    "--api-key": "use spec.serving.apiKeySecret, which keeps the key out of this object",
    "--hf-token": "use spec.models.hubTokenSecret, which keeps the token out of this object",
    "--download-dir": "use spec.models",
    "--config": "use the field of each setting, or its flag in spec.engine.extraArgs; the operator cannot check a file",
    "--kv-cache-memory-bytes": _KV_CACHE,
    "--num-gpu-blocks-override": _KV_CACHE,
    "--decode-context-parallel-size": _SPLIT,
    "--prefill-context-parallel-size": _SPLIT,
    f"{COMPILATION_CONFIG}.max_cudagraph_capture_size": "use spec.serving.maxCudagraphCaptureSize",
    "--master-port": _SPLIT,
    "--grpc": _HTTP,
    "--uds": _HTTP,
    "--ssl-cert-reqs": _CLIENT_CERTIFICATES,
    "--ssl-ca-certs": _CLIENT_CERTIFICATES,
    "--disable-log-stats": "remove it; without statistics the operator cannot see whether the engine drafts",
    "--help": "remove it; the engine would print its help and exit",
}


def reserved_flag_problem(flag: str) -> str | None:
    """Return what to use instead of a flag, or of a key of its JSON value; None if extraArgs may contain it."""
    for argument in ARGUMENTS:
        if argument.flag == flag and not argument.says_more:
            return "remove it; the operator sets it" if argument.field is None else f"use {argument.field}"
    return _SPLIT if flag.startswith("--data-parallel-") else _REJECTED.get(flag)
