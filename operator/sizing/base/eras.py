"""What of the engine's memory changed between its versions."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Final

from specdecode_operator.sizing.base.datafiles import read_data
from specdecode_operator.sizing.base.errors import SizingError
from specdecode_operator.sizing.base.units import gib_to_bytes
from specdecode_operator.sizing.base.versions import release

NEWEST_VERSION: Final = "0.32.0"
"""Newest vLLM whose source was read. Newer ones are sized like it."""

OLDEST_VERSION: Final = "0.17"
"""Oldest vLLM whose rules are known."""


class Runner(StrEnum):
    """Model runner of the engine."""

    V1 = "V1"
    V2 = "V2"


class Sampler(StrEnum):
    """What the profiling run samples with."""

    TRITON = "triton"
    FLASHINFER = "flashinfer"
    NONE = "none"


_ONLY_ON_V2: Final = "dspark"
"""The method that brings V2 with it, whatever the target."""

_STATES_CACHED_FROM: Final = "0.28"


@dataclass(frozen=True)
class ModelTraits:
    """What of a model decides which model runner serves it.

    Attributes
    ----------
    architecture
        First entry of ``architectures`` in config.json.
    has_experts, has_states
        Whether any layer is a mixture of experts, or keeps a state instead of keys and values.
    quantized
        Whether its weights are.
    """

    architecture: str
    has_experts: bool = False
    has_states: bool = False
    quantized: bool = False


DENSE_MODEL: Final = ModelTraits("")
"""A model that no rule names: dense, with attention in each layer, not quantized."""


@dataclass(frozen=True)
class Era:
    """Versions that take memory by the same rules under one model runner.

    Attributes
    ----------
    runner, sampler
        What runs the model and the profiling run's sampler.
    charges_graphs
        Whether the estimate for CUDA graphs is taken from the KV cache.
    charges_state
        Whether buffers that stand before the profiling run are.
    copies_logits_to_float32
        Whether the profiling run's sampler does.
    profiles_encoder
        Whether the profiling run runs the encoder of images.
    experts_scratch_in_kernel
        Whether unquantized experts take their workspace inside the kernel, for a moment, instead of keeping it.
    peaks_in_pieces
        Whether the forward pass is counted as logs show it: with what the attention returned, cuBLAS's workspace and
        the buffer that kernel tuning flushes the L2 cache with. Else as its rows alone.
    default_memory_utilization_percent
        Share of the GPU where the user names none.
    margin_bytes
        By how much the terms together may err.
    calibrated
        Whether public logs of these versions on Hopper confirm the terms.
    """

    runner: Runner
    sampler: Sampler
    charges_graphs: bool
    charges_state: bool
    copies_logits_to_float32: bool
    profiles_encoder: bool
    experts_scratch_in_kernel: bool
    peaks_in_pieces: bool
    default_memory_utilization_percent: int
    margin_bytes: int
    calibrated: bool


@cache
def find_era(version: str, method: str = "none", model: ModelTraits = DENSE_MODEL) -> Era:
    """Return the rules of a vLLM version such as ``0.19.1``; newer ones than are known follow the newest.

    Raises
    ------
    SizingError
        For what is no version, or one that is older than the rules known.
    """
    wanted = release(version)
    if wanted < release(OLDEST_VERSION):
        raise SizingError("vllm_version", version, f"memory rules are known from {OLDEST_VERSION} on")
    runner = Runner.V2 if _runs_on_v2(wanted, method, model) else Runner.V1
    eras = [entry for entry in read_data("memory.json")["eras"] if entry["runner"] == runner]
    entry = _newest(eras, wanted)
    if entry is None:
        raise LookupError(f"data/memory.json has no era of runner {runner} for {version}")
    return Era(
        runner=runner,
        sampler=Sampler(entry["sampler"]),
        charges_graphs=entry["charges_graphs"],
        charges_state=entry["charges_state"],
        copies_logits_to_float32=entry["copies_logits_to_float32"],
        profiles_encoder=entry["profiles_encoder"],
        experts_scratch_in_kernel=entry["experts_scratch_in_kernel"],
        peaks_in_pieces=entry["peaks_in_pieces"],
        default_memory_utilization_percent=entry["default_memory_utilization_percent"],
        margin_bytes=gib_to_bytes(entry["margin_gib"]),
        calibrated=entry["calibrated"],
    )


def _runs_on_v2(wanted: tuple[int, int], method: str, model: ModelTraits) -> bool:
    """Whether vLLM chooses model runner V2 by itself (config/vllm.py, use_v2_model_runner).

    Left out are features that the operator does not set, and EAGLE-3 on
    several pipeline stages, which ran on V1 up to 0.29.
    """
    rule = _newest(read_data("memory.json")["model_runner_v2"], wanted)
    if rule is None or method not in rule["methods"] or (model.quantized and not rule["quantized"]):
        return False
    if model.architecture in rule["architectures"] or method == _ONLY_ON_V2:
        return True
    dense = not model.has_experts and not model.has_states
    return rule["others"] == "all" or (rule["others"] == "dense" and dense)


def _newest(entries: list[dict[str, Any]], wanted: tuple[int, int]) -> dict[str, Any] | None:
    """Return the last entry that holds for a version already; None before the first."""
    fitting = [entry for entry in entries if release(entry["since"]) <= wanted]
    return fitting[-1] if fitting else None


def caches_prefixes(version: str) -> bool:
    """Whether models with states cache prefixes by default; others always do.

    engine/arg_utils.py, _set_default_chunked_prefill_and_prefix_caching_args: off for hybrids up to 0.27.
    """
    return release(version) >= release(_STATES_CACHED_FROM)
