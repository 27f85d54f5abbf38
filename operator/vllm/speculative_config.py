"""Build vLLM's `--speculative-config`, and check keys of `spec.speculation.extraConfig`.

vLLM parses the value with pydantic in lax mode, which accepts numbers and booleans as strings; `read_lax` does the
same.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Final

from specdecode_operator.enums import METHODS_WITH_LAYERS
from specdecode_operator.problems import Problem, shown
from specdecode_operator.vllm.profiles import EngineProfile
from specdecode_operator.vllm.settings import EngineSettings, FieldPath, ScheduleRange, SpeculationSettings
from specdecode_operator.vllm.versions import FLY_KEY

WHOLE_KEYS: Final = frozenset(
    {
        "draft_tensor_parallel_size", "dspark_draft_topk", "fly_entropy_top_k", "fly_window_size", "max_model_len",
        "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_tree_depth", "xpress_topc",
    }
)  # fmt: skip
REAL_KEYS: Final = frozenset(
    {"fly_entropy_threshold", "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"}
)
SWITCH_KEYS: Final = frozenset(
    {
        "disable_eagle_block_drop", "disable_lookahead_block_hashes", "disable_padded_drafter_batch",
        "enable_adaptive_verification", "enforce_eager", "index_share_for_mtp_iteration", "parallel_drafting",
        "use_heterogeneous_vocab", "use_local_argmax_reduction",
    }
)  # fmt: skip
_ON: Final = frozenset({"1", "on", "t", "true", "y", "yes"})
_OFF: Final = frozenset({"0", "off", "f", "false", "n", "no"})
_NUMBER: Final = re.compile(r"\s*([+-]?\d{1,18})(?:\.0{1,18})?\s*")


def read_lax(key: str, value: Any) -> Any:
    """Return a value as vLLM's SpeculativeConfig, a pydantic dataclass, reads it; unchanged if vLLM would reject it."""
    text = str(value).strip()
    if key in WHOLE_KEYS and isinstance(value, str | float):
        match = _NUMBER.fullmatch(text)
        return int(match[1]) if match else value
    if key in REAL_KEYS and isinstance(value, str):
        with suppress(ValueError):
            number = float(text)
            return number if math.isfinite(number) else value
    if key in SWITCH_KEYS and isinstance(value, str | int | float) and not isinstance(value, bool):
        word = "1" if value == 1 else "0" if value == 0 else text.lower()
        return True if word in _ON else False if word in _OFF else value
    return value


_SPECULATION: Final = "spec.speculation."

Value = Callable[[EngineSettings, SpeculationSettings, EngineProfile], Any]


@dataclass(frozen=True)
class SpeculativeKey:
    """One key that the operator writes."""

    key: str
    field: str
    computed: Value | None = None
    """Its value; None if a field of ``spec.speculation`` is passed on unchanged."""

    def value(self, settings: EngineSettings, speculation: SpeculationSettings, profile: EngineProfile) -> Any:
        """Return the key's value; None leaves the key out."""
        if self.computed is not None:
            return self.computed(settings, speculation, profile)
        return self._path.value_in(speculation.spec)

    @cached_property
    def _path(self) -> FieldPath:
        return FieldPath(self.field.removeprefix(_SPECULATION))


def _schedule(settings: EngineSettings, speculation: SpeculationSettings, _: EngineProfile) -> list[list[int]] | None:
    parts = complete_schedule(speculation, settings.max_num_seqs) if speculation.schedule else []
    return [[part.first, part.last, part.num_speculative_tokens] for part in parts] or None


def _draft_split(settings: EngineSettings, speculation: SpeculationSettings, _: EngineProfile) -> int | None:
    if speculation.method not in METHODS_WITH_LAYERS:
        return None
    return speculation.draft_tensor_parallel_size or settings.tensor_parallel_size


def _share(key: str, field: str) -> SpeculativeKey:
    """Return the row of a percentage, which vLLM takes as a fraction."""
    path = FieldPath(field)

    def value(_: EngineSettings, speculation: SpeculationSettings, _profile: EngineProfile) -> float | None:
        percent = path.value_in(speculation.spec)
        return None if percent is None else percent / 100

    return _key(key, field, value)


def _key(key: str, field: str, value: Value | None = None) -> SpeculativeKey:
    return SpeculativeKey(key, f"{_SPECULATION}{field}", value)


DRAFT_HEAD_KEY = "draft_lm_head_quantization"
XPRESS_KEY = "xpress_topc"

SPECULATIVE_KEYS: tuple[SpeculativeKey, ...] = (
    _key("method", "method"),
    _key("num_speculative_tokens", "numSpeculativeTokens", lambda _s, d, _p: d.num_speculative_tokens),
    _key("num_speculative_tokens_per_batch_size", "numSpeculativeTokensByBatchSize", _schedule),
    _key("model", "draft.model", lambda _s, d, _p: d.draft_model),
    _key("parallel_drafting", "draft.model", lambda _s, d, _p: d.drafts_in_parallel or None),
    _key("use_heterogeneous_vocab", "useHeterogeneousVocab", lambda _s, d, _p: d.maps_vocabulary or None),
    _key(
        "quantization",
        "draft.quantization",
        lambda _s, d, p: d.draft_online_quantization and p.online_quantization[d.draft_online_quantization],
    ),
    _key("max_model_len", "draft.maxModelLen"),
    SpeculativeKey("draft_tensor_parallel_size", "spec.parallelism.draftTensor", _draft_split),
    _key("prompt_lookup_min", "ngram.promptLookupMin"),
    _key("prompt_lookup_max", "ngram.promptLookupMax"),
    _key("suffix_decoding_max_tree_depth", "suffix.maxTreeDepth"),
    _key("suffix_decoding_max_cached_requests", "suffix.maxCachedRequests"),
    _share("suffix_decoding_max_spec_factor", "suffix.maxSpecFactorPercent"),
    _share("suffix_decoding_min_token_prob", "suffix.minTokenProbabilityPercent"),
    _key("rejection_sample_method", "rejectionSampling"),
    _key("draft_sample_method", "draftSampling"),
    _key("enable_adaptive_verification", "adaptiveVerification"),
    _key(DRAFT_HEAD_KEY, "draftLmHeadQuantization"),
    _key(XPRESS_KEY, "xpressTopC"),
)
"""Keys of ``--speculative-config`` that the operator writes.

A new field of ``spec.speculation`` that is passed on unchanged takes one row here, with vLLM's name and its path.
"""

SPOKEN_KEYS: Final = tuple(key.key for key in SPECULATIVE_KEYS if key.key != "model")
"""Keys that an engine reports at /metrics. Paths of its files stay in the pod."""


def speculative_config(settings: EngineSettings, profile: EngineProfile) -> str | None:
    """Return the value of ``--speculative-config``; None without speculation.

    The JSON is compact with sorted keys, so that equal settings give equal pods.
    """
    speculation = settings.speculation
    if speculation is None:
        return None
    config = {key.key: key.value(settings, speculation, profile) for key in SPECULATIVE_KEYS}
    given = {key: value for key, value in config.items() if value is not None}
    # `extra_config_problems` rejects keys that have a field.
    given |= json.loads(speculation.extra_config or "{}")
    return json.dumps(given, sort_keys=True, separators=(",", ":"))


def complete_schedule(speculation: SpeculationSettings, max_num_seqs: int) -> list[ScheduleRange]:
    """Return ranges that cover 1 to ``max_num_seqs`` without a gap; the general K fills the gaps.

    The engine would carry the K of the previous range into a gap and past the end, and rejects a first range that does
    not start at 1 (vllm/v1/spec_decode/dynamic/utils.py).
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


EXTRA_CONFIG: Final = "spec.speculation.extraConfig"

_SYNTHETIC: Final = "remove it; the engine would accept drafted tokens at random instead of checking them"
_REJECTED: Final = {
    **{key.key: f"use {key.field}" for key in SPECULATIVE_KEYS},
    "parallel_drafting": "remove it; the operator sets it if the draft's config.json needs it",
    # vllm/config/speculative.py, _verify_args: the key exists only to be rejected.
    "tensor_parallel_size": "use spec.parallelism.draftTensor",
    "synthetic_acceptance_rates": _SYNTHETIC,
    "synthetic_acceptance_length": _SYNTHETIC,
}
_FLY: Final = frozenset({FLY_KEY, "fly_entropy_threshold", "fly_entropy_top_k"})

_KINDS: Final[Mapping[str, tuple[str, tuple[type, ...]]]] = {
    **dict.fromkeys(SWITCH_KEYS, ("true or false", (bool,))),
    **dict.fromkeys(WHOLE_KEYS, ("a whole number", (int,))),
    **dict.fromkeys(REAL_KEYS, ("a number", (int, float))),
    **dict.fromkeys(("attention_backend", "moe_backend", "kv_cache_dtype", "code_revision"), ("a text", (str,))),
    "draft_load_config": ("an object", (dict,)),
}
"""Types of vllm/config/speculative.py, SpeculativeConfig. The engine checks keys that are not listed."""


def extra_config_problems(
    config: Mapping[str, Any], profile: EngineProfile, *, checks_by_entropy: bool = False
) -> Iterator[Problem]:
    """Yield a problem for each key that a field sets, that the version lacks, or that has a value of another type.

    ``checks_by_entropy`` is whether rejectionSampling is fly: only fly reads its keys.
    """
    for key, value in config.items():
        field = f"{EXTRA_CONFIG}.{key}"
        if key in _REJECTED:
            yield Problem(field, shown(value), f"is not allowed in extraConfig: {_REJECTED[key]}")
        elif key not in profile.speculative_keys:
            if not profile.tested:
                continue
            nearest, later = (
                get_close_matches(key, profile.speculative_keys, n=1),
                profile.later_speculative_keys.get(key),
            )
            hint = f"did you mean {nearest[0]}?" if nearest else "remove it, or correct its name"
            message = f"has no such key in --speculative-config; {hint}"
            if later:
                message = f"does not have this key yet; it came with {later}"
            yield Problem(field, shown(value), f"vLLM {profile.version} {message}")
        elif key in _FLY and not checks_by_entropy:
            yield Problem(field, shown(value), "only applies to rejectionSampling: fly; remove it")
        elif key in _KINDS and (read := read_lax(key, value)) is not None:
            name, kinds = _KINDS[key]
            # True is an int in Python, but not in vLLM.
            if not isinstance(read, kinds) or (isinstance(read, bool) and bool not in kinds):
                yield Problem(field, shown(value), f"must be {name}")


def unknown_keys(config: Mapping[str, Any], profile: EngineProfile) -> list[str]:
    """Return the keys that no known version has and that are passed to a version newer than all known ones."""
    return [] if profile.tested else [key for key in config if key not in profile.speculative_keys]


def reserved_key_problem(key: str) -> str | None:
    """Return what to write instead of a key of --speculative-config in extraConfig; None if extraConfig may have it."""
    return _REJECTED.get(key)
