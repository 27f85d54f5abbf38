"""Checks of ``spec.speculation.extraConfig``: keys of ``--speculative-config`` that have no field of their own."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Final

from specdecode_operator.engine.lax_values import REAL_KEYS, SWITCH_KEYS, WHOLE_KEYS, read_lax
from specdecode_operator.engine.profiles import EngineProfile
from specdecode_operator.engine.speculative_config import FLY_KEY, SPECULATIVE_KEYS
from specdecode_operator.problems import Problem, shown

EXTRA_CONFIG: Final = "spec.speculation.extraConfig"

_FIELDS: Final = {
    **{key.key: f"use {key.field}" for key in SPECULATIVE_KEYS},
    "parallel_drafting": "remove it; the operator sets it if the draft's config.json asks for it",
    # vllm/config/speculative.py, _verify_args: it is there to be refused.
    "tensor_parallel_size": "use spec.parallelism.draftTensor",
}
_SYNTHETIC: Final = "remove it; the engine would accept drafted tokens at random instead of checking them"
_REFUSED: Final = _FIELDS | {
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
"""Types of vllm/config/speculative.py, SpeculativeConfig; a key that is not listed is left to the engine."""


def extra_config_problems(
    config: Mapping[str, Any], profile: EngineProfile, *, checks_by_entropy: bool = False
) -> Iterator[Problem]:
    """Yield a problem for each key that a field decides, that the version lacks, or that has a value of another type.

    ``checks_by_entropy`` is whether rejectionSampling is fly, which alone reads the keys of fly.
    """
    for key, value in config.items():
        field = f"{EXTRA_CONFIG}.{key}"
        if key in _REFUSED:
            yield Problem(field, shown(value), f"is not for extraConfig: {_REFUSED[key]}")
        elif key not in profile.speculative_keys:
            if profile.tested:
                yield Problem(field, shown(value), _why_unknown(key, profile))
        elif key in _FLY and not checks_by_entropy:
            yield Problem(field, shown(value), "is read with rejectionSampling: fly only; remove it")
        elif key in _KINDS and not _is_of(read_lax(key, value), _KINDS[key][1]):
            yield Problem(field, shown(value), f"must be {_KINDS[key][0]}")


def unknown_keys(config: Mapping[str, Any], profile: EngineProfile) -> list[str]:
    """Return the keys that no known version has and that are passed to a version newer than all known ones."""
    return [] if profile.tested else [key for key in config if key not in profile.speculative_keys]


def refusal(key: str) -> str | None:
    """Return what to write instead of a key of --speculative-config in extraConfig; None if extraConfig may have it."""
    return _REFUSED.get(key)


def _is_of(value: Any, kinds: tuple[type, ...]) -> bool:
    # True is an int to Python, and not to vLLM.
    return value is None or (isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)))


def _why_unknown(key: str, profile: EngineProfile) -> str:
    if key in profile.later_speculative_keys:
        return f"vLLM {profile.version} does not have this key yet; it came with {profile.later_speculative_keys[key]}"
    nearest = get_close_matches(key, profile.speculative_keys, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else "remove it, or correct its name"
    return f"vLLM {profile.version} has no such key in --speculative-config; {hint}"
