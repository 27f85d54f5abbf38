"""Hash the engine's configuration, to tell whether two traces are of the same engine."""

import hashlib
import re
from typing import Any, Final

import msgspec

from specdecode_operator.capture.recorder.segment_format import EMULATED, EngineConfig, Header

_V3: Final = "config-fingerprint-v3"
_ENGINE: Final = "specdecode-engine-v1"
_GPU_NAME: Final = re.compile(r"(?<![^\W_])(?:RTX (?:PRO )?A?\d{4}|(?:GB|GH|MI|[ABHLPTV])\d{1,4}[A-Z]?)(?![^\W_])")
"""Accelerators by their makers' names: ``H200``, ``L4``, ``MI300X``, ``RTX 6000``, without the memory."""
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_VERSION: Final = re.compile(r"\d+\.\d+\.\d+(?:rc\d+)?")


def gpu_label(name: str | None) -> str:
    """Return the short name in traces: ``H200`` for ``NVIDIA H200``, ``cpu`` without a GPU.

    The name of an emulated GPU keeps its prefix: ``emulated H200``.
    """
    if name is None:
        return "cpu"
    if name.startswith(f"{EMULATED} "):
        return f"{EMULATED} {gpu_label(name.removeprefix(f'{EMULATED} '))}"
    found = _GPU_NAME.search(name)
    return found.group() if found else name


def version_tag(version: str) -> str:
    """Return the release behind a version that an engine reports: ``v0.32.0`` for ``0.32.0+cpu``."""
    found = _VERSION.match(version)
    return f"v{found.group() if found else version}"


def speculative_label(config: EngineConfig) -> str:
    """Return ``none`` or ``<method>-k<K>``; vllm-vcr itself only writes it for ngram."""
    speculative = config.speculative
    return f"{speculative.method}-k{speculative.num_speculative_tokens}" if speculative else "none"


def engine_config(model: str | None, config: EngineConfig) -> str:
    """Return the nine settings of scheme v3 as ``name=value;...``, sorted (gen-capture-jobs.py)."""
    settings: dict[str, Any] = {
        "block_size": config.block_size,
        "enable_prefix_caching": config.enable_prefix_caching,
        "enforce_eager": config.enforce_eager,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "model": model,
        "speculative": speculative_label(config),
        "tensor_parallel": config.tensor_parallel,
    }
    written = {name: str(each).lower() if isinstance(each, bool) else str(each) for name, each in settings.items()}
    return ";".join(f"{name}={written[name]}" for name in sorted(written))


def config_hash(gpu: str, vllm_tag: str, config: str) -> str:
    """Return the SHA-256 of scheme v3: four lines, each with its end (config_hash.rs)."""
    text = f"{_V3}\ngpu={gpu}\nvllm_tag={vllm_tag}\nengine_config={config}\n"
    return hashlib.sha256(text.encode()).hexdigest()


def header_hash(header: Header) -> str:
    """Return the v3 hash of the engine that a recorder described."""
    config = engine_config(header.model, header.config)
    return config_hash(gpu_label(header.gpu), version_tag(header.vllm), config)


def engine_hash(header: Header, context: dict[str, Any], image_id: str | None = None) -> str:
    """Return a SHA-256 over everything that the engine runs with, excluding who recorded it and where.

    In addition to the settings of v3: the GPU's full name, the reported version, every other resolved setting, the
    draft model, the engine's command and the flags added to it, and its image.

    ``context`` comes from the operator. The digest in ``image_id``, of the image that the node runs, replaces the name
    in the context.
    """
    parts = {
        "scheme": _ENGINE,
        "gpu": header.gpu,
        "vllm": header.vllm,
        "model": header.model,
        "config": msgspec.to_builtins(header.config),
        "image": image_digest(image_id) or context.get("image"),
        "command": context.get("command"),
        "recording_flags": context.get("recording_flags"),
    }
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()


def image_digest(image_id: str | None) -> str | None:
    """Return the digest in a container's image id: the same image from another registry has the same."""
    found = _DIGEST.search(image_id or "")
    return found.group() if found else None
