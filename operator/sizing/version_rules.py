"""Memory rules of vLLM that differ between versions: model runner, sampler, defaults, prefix caching."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final

from specdecode_operator.sizing.arithmetic import gib_to_bytes
from specdecode_operator.sizing.devices import memory_coefficients
from specdecode_operator.sizing.errors import SizingError
from specdecode_operator.sizing.result_cache import MEMO_SIZE
from specdecode_operator.vllm.versions import SIZED_VERSIONS, release, version_facts

NEWEST_VERSION: Final = f"{SIZED_VERSIONS[-1]}.0"
"""Newest vLLM whose source was read. Newer ones are sized like it."""


class Runner(StrEnum):
    """Model runner of the engine."""

    V1 = "V1"
    V2 = "V2"


class Sampler(StrEnum):
    """Sampler of the profiling run."""

    TRITON = "triton"
    FLASHINFER = "flashinfer"
    NONE = "none"


@dataclass(frozen=True)
class ModelTraits:
    """Traits of a model that decide its model runner."""

    architecture: str  # First entry of ``architectures`` in config.json
    has_experts: bool = False
    has_states: bool = False
    quantized: bool = False


_DENSE_MODEL: Final = ModelTraits("")


@dataclass(frozen=True)
class VersionRules:
    """Versions that take memory by the same rules under one model runner."""

    runner: Runner
    sampler: Sampler
    charges_graphs: bool  # Whether the estimate for CUDA graphs is taken from the KV cache
    charges_state: bool  # Whether buffers that exist before the profiling run are, too
    copies_logits_to_float32: bool  # Of the profiling run's sampler
    profiles_encoder: bool  # Whether the profiling run includes the encoder of images
    experts_scratch_in_kernel: bool  # Whether unquantized experts do not keep their workspace
    # Whether the forward pass is counted as logs show it: with the output of the attention, cuBLAS's workspace and the
    # buffer that kernel tuning flushes the L2 cache with. Else as its rows alone.
    peaks_in_pieces: bool
    cublas_before_snapshot: bool  # Whether cuBLAS has its workspace before the first snapshot, outside the budget
    default_memory_utilization_percent: int
    margin_bytes: int  # Maximum error of all terms together
    calibrated: bool  # Whether public logs of these versions on Hopper confirm the terms


def sizing_facts(version: str) -> Mapping[str, Any]:
    """Return the table of a vLLM version such as ``0.19.1``, or raise SizingError for an invalid version."""
    try:
        return version_facts(version)
    except ValueError:
        raise SizingError("vllm_version", version, "write it as 0.32.0") from None


@lru_cache(maxsize=MEMO_SIZE)
def find_version_rules(
    version: str, method: str = "none", model: ModelTraits = _DENSE_MODEL, *, drafts_on_v1: bool = False
) -> VersionRules:
    """Return the rules of a vLLM version such as ``0.19.1``; newer ones follow the newest, with more margin.

    ``drafts_on_v1``: whether model runner V2 lacks its way to draft. Raise SizingError for an invalid version, or one
    that is older than the known rules.
    """
    facts = sizing_facts(version)
    if release(version) < release(SIZED_VERSIONS[0]):
        raise SizingError("vllm_version", version, f"memory rules are known from {SIZED_VERSIONS[0]} on")
    by_itself = _runs_on_v2(facts.get("model_runner_v2"), method, model)
    runner = Runner.V2 if by_itself and not drafts_on_v1 else Runner.V1
    rules = dict(facts["memory"][runner])
    margin_bytes = gib_to_bytes(rules.pop("margin_gib"))
    if release(version) > release(SIZED_VERSIONS[-1]):
        margin_bytes += memory_coefficients().unknown_version_margin_bytes
        rules["calibrated"] = False
    return VersionRules(
        runner=runner,
        sampler=Sampler(rules.pop("sampler")),
        margin_bytes=margin_bytes,
        default_memory_utilization_percent=facts["default_memory_utilization_percent"],
        **rules,
    )


def _runs_on_v2(rule: Mapping[str, Any] | None, method: str, model: ModelTraits) -> bool:
    """Return whether vLLM chooses model runner V2 by default (config/vllm.py, use_v2_model_runner).

    It omits features that the operator does not set, and EAGLE-3 on several pipeline stages, which ran on V1 up to
    0.29.
    """
    if rule is None or not rule["methods"].get(method) or (model.quantized and not rule["quantized"]):
        return False
    # dspark needs V2 with any target.
    if model.architecture in rule["architectures"] or method == "dspark":
        return True
    dense = not model.has_experts and not model.has_states
    return rule["others"] == "all" or (rule["others"] == "dense" and dense)


def caches_prefixes(version: str) -> bool:
    """Return whether models with states cache prefixes by default; others always do."""
    return bool(sizing_facts(version)["prefix_caching_of_states"])


def multiplies_yarn(version: str) -> bool:
    """Return whether a version takes YaRN's original length times its factor for a model's longest sequence."""
    return bool(sizing_facts(version)["multiplies_yarn"])
