"""The engine's ``--speculative-config``: one JSON object for all of speculation."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from specdecode_operator.api.values import METHODS_WITH_LAYERS
from specdecode_operator.engine.profiles import EngineProfile
from specdecode_operator.engine.settings import EngineSettings, ScheduleRange, SpeculationSettings

Value = Callable[[EngineSettings, SpeculationSettings, EngineProfile], Any]
"""What a key says for given settings; None leaves it out."""


@dataclass(frozen=True)
class SpeculativeKey:
    """One key that the operator writes."""

    key: str
    field: str
    """Field of the SpecDecodeDeployment that decides it."""
    value: Value


def _schedule(settings: EngineSettings, speculation: SpeculationSettings, _: EngineProfile) -> list[list[int]] | None:
    if not speculation.schedule:
        return None
    parts = complete_schedule(speculation, settings.max_num_seqs)
    return [[part.first, part.last, part.num_speculative_tokens] for part in parts]


def _draft_quantization(_: EngineSettings, speculation: SpeculationSettings, profile: EngineProfile) -> str | None:
    quantization = speculation.draft_online_quantization
    return None if quantization is None else profile.online_quantization[quantization]


def _draft_tensor_parallel_size(
    settings: EngineSettings, speculation: SpeculationSettings, _: EngineProfile
) -> int | None:
    """Return what is asked for, or the target's; nothing for methods whose draft has no layers."""
    if speculation.method not in METHODS_WITH_LAYERS:
        return None
    return speculation.draft_tensor_parallel_size or settings.tensor_parallel_size


def _suffix(name: str) -> Value:
    """Return how a key reads a whole number of method suffix."""
    return lambda _s, d, _p: None if d.suffix is None else getattr(d.suffix, name)


def _suffix_share(name: str) -> Value:
    """Return how a key reads a percentage of method suffix, as a fraction."""

    def share(_: EngineSettings, speculation: SpeculationSettings, _profile: EngineProfile) -> float | None:
        percent = None if speculation.suffix is None else getattr(speculation.suffix, name)
        return None if percent is None else percent / 100

    return share


_SPECULATION = "spec.speculation"
DRAFT_HEAD_KEY = "draft_lm_head_quantization"
XPRESS_KEY = "xpress_topc"
FLY_KEY = "fly_window_size"
"""Versions with it have rejectionSampling fly. Not written: vLLM takes min(6, K - 1) tokens, and entropies from
0.3 on, of the 3 likeliest."""

SPECULATIVE_KEYS: tuple[SpeculativeKey, ...] = (
    SpeculativeKey("method", f"{_SPECULATION}.method", lambda _s, d, _p: d.method.value),
    SpeculativeKey(
        "num_speculative_tokens", f"{_SPECULATION}.numSpeculativeTokens", lambda _s, d, _p: d.num_speculative_tokens
    ),
    SpeculativeKey(
        "num_speculative_tokens_per_batch_size", f"{_SPECULATION}.numSpeculativeTokensByBatchSize", _schedule
    ),
    SpeculativeKey("model", f"{_SPECULATION}.draft.model", lambda _s, d, _p: d.draft_model),
    SpeculativeKey(
        "parallel_drafting", f"{_SPECULATION}.draft.model", lambda _s, d, _p: True if d.drafts_in_parallel else None
    ),
    SpeculativeKey(
        "use_heterogeneous_vocab",
        f"{_SPECULATION}.useHeterogeneousVocab",
        lambda _s, d, _p: True if d.maps_vocabulary else None,
    ),
    SpeculativeKey("quantization", f"{_SPECULATION}.draft.quantization", _draft_quantization),
    SpeculativeKey("max_model_len", f"{_SPECULATION}.draft.maxModelLen", lambda _s, d, _p: d.draft_max_model_len),
    SpeculativeKey("draft_tensor_parallel_size", "spec.parallelism.draftTensor", _draft_tensor_parallel_size),
    SpeculativeKey("prompt_lookup_min", f"{_SPECULATION}.ngram.promptLookupMin", lambda _s, d, _p: d.prompt_lookup_min),
    SpeculativeKey("prompt_lookup_max", f"{_SPECULATION}.ngram.promptLookupMax", lambda _s, d, _p: d.prompt_lookup_max),
    SpeculativeKey("suffix_decoding_max_tree_depth", f"{_SPECULATION}.suffix.maxTreeDepth", _suffix("max_tree_depth")),
    SpeculativeKey(
        "suffix_decoding_max_cached_requests",
        f"{_SPECULATION}.suffix.maxCachedRequests",
        _suffix("max_cached_requests"),
    ),
    SpeculativeKey(
        "suffix_decoding_max_spec_factor",
        f"{_SPECULATION}.suffix.maxSpecFactorPercent",
        _suffix_share("max_spec_factor_percent"),
    ),
    SpeculativeKey(
        "suffix_decoding_min_token_prob",
        f"{_SPECULATION}.suffix.minTokenProbabilityPercent",
        _suffix_share("min_token_probability_percent"),
    ),
    SpeculativeKey(
        "rejection_sample_method", f"{_SPECULATION}.rejectionSampling", lambda _s, d, _p: d.rejection_sampling
    ),
    SpeculativeKey("draft_sample_method", f"{_SPECULATION}.draftSampling", lambda _s, d, _p: d.draft_sampling),
    SpeculativeKey(
        "enable_adaptive_verification",
        f"{_SPECULATION}.adaptiveVerification",
        lambda _s, d, _p: d.adaptive_verification,
    ),
    SpeculativeKey(
        DRAFT_HEAD_KEY, f"{_SPECULATION}.draftLmHeadQuantization", lambda _s, d, _p: d.draft_head_quantization
    ),
    SpeculativeKey(XPRESS_KEY, f"{_SPECULATION}.xpressTopC", lambda _s, d, _p: d.xpress_top_c),
)
"""Every key that the operator writes."""

SPOKEN_KEYS: Final = tuple(key.key for key in SPECULATIVE_KEYS if key.key != "model")
"""Those that an engine says at /metrics: where its files lie is nobody's business."""


def speculative_config(settings: EngineSettings, profile: EngineProfile) -> str | None:
    """Return the value of ``--speculative-config``, or None without speculation.

    Compact and with sorted keys, so that equal settings give equal pods.
    """
    speculation = settings.speculation
    if speculation is None:
        return None
    config = {key.key: key.value(settings, speculation, profile) for key in SPECULATIVE_KEYS}
    given = {key: value for key, value in config.items() if value is not None}
    # The keys of a field are refused there (engine/rules/extra_config.py).
    given |= json.loads(speculation.extra_config or "{}")
    return json.dumps(given, sort_keys=True, separators=(",", ":"))


def complete_schedule(speculation: SpeculationSettings, max_num_seqs: int) -> list[ScheduleRange]:
    """Return ranges that cover 1 to ``max_num_seqs`` without a gap.

    Where the user gave no range, the general K holds. The engine would carry
    the K of the range before into a gap and past the end, and refuses a first
    range that does not start at 1 (vllm/v1/spec_decode/dynamic/utils.py).
    """
    general = speculation.num_speculative_tokens
    complete: list[ScheduleRange] = []
    next_uncovered = 1
    for part in sorted(speculation.schedule, key=lambda part: part.first):
        if part.first > next_uncovered:
            complete.append(ScheduleRange(next_uncovered, part.first - 1, general))
        complete.append(part)
        next_uncovered = part.last + 1
    if next_uncovered <= max_num_seqs:
        complete.append(ScheduleRange(next_uncovered, max_num_seqs, general))
    return complete
