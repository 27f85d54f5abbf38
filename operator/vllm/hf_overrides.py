"""Compute overrides of the target's config.json: `spec.target.ropeScaling` and `--hf-overrides`.

Sizing uses the overridden config. The draft is not overridden: vLLM passes it no JSON overrides
(config/speculative.py, compose_draft_hf_overrides).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from specdecode_operator.api.speculation import RopeScaling
from specdecode_operator.enums import ROPE_KEYS
from specdecode_operator.problems import InvalidSpecError, Problem
from specdecode_operator.vllm.arguments import HF_OVERRIDES
from specdecode_operator.vllm.extra_args_parser import json_value, options
from specdecode_operator.vllm.profiles import EngineProfile

ROPE_SCALING: Final = "spec.target.ropeScaling"

_LONGEST: Final = "max_position_embeddings"
_THETA: Final = "rope_theta"

_OF_WINDOWS: Final = "rope_local_base_freq"
"""Key of Gemma 3 files written before transformers 5: layers with a window have their own base frequency."""

_TEXT: Final = "text_config"

_KEPT: Final = (_THETA, "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Rope parameters other than the scaling.

An override replaces all parameters (config/model.py, _apply_dict_overrides), so these are copied into it.
"""


@dataclass(frozen=True)
class ConfigOverrides:
    """Overrides of the target's config.json: a scaling, or the JSON in extraArgs."""

    field: str
    shown: str
    scaling: RopeScaling | None
    given: Mapping[str, Any]

    def keys(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the keys that replace those of a config.json; raise InvalidSpecError if the model cannot have them.

        For YaRN they include the longest sequence: since 0.30, vLLM does not multiply it by the factor
        (config/model.py, _get_and_verify_max_len).
        """
        known, problem = positions_of(config), ""
        theta = known.get(_THETA)
        if self.scaling is None:
            rope = _rope_of(_text_of(self.given))
            if rope and theta is not None and rope.get(_THETA) is None and not _is_nested(rope):
                problem = (
                    f"its rope parameters replace all of the model's and drop {_THETA} {theta}: use"
                    f" {ROPE_SCALING}, which keeps it, or add it"
                )
                raise _rejected(self.field, self.shown, problem)
            return self.given
        # Rope parameters do not contain the length.
        longest = _text_of(config).get(_LONGEST)
        if _is_nested(_rope_of(_text_of(config))) or known.get(_OF_WINDOWS) is not None:
            problem = "the model's layers have different rope parameters, which one scaling cannot extend: remove it"
        elif theta is None or not isinstance(longest, int):
            key = _THETA if theta is None else _LONGEST
            problem = f"the model's config.json has no {key}, which the override must keep: remove it"
        if problem or not isinstance(longest, int):
            raise _rejected(self.field, self.shown, problem)
        factor = float(self.scaling.factor)
        rope = {key: known[key] for key in _KEPT if known.get(key) is not None}
        rope |= {"rope_type": self.scaling.type.value, "factor": factor}
        keys: dict[str, Any] = {ROPE_KEYS[0]: rope}
        if self.scaling.type.has_original_length:
            original = self.scaling.original_max_position_embeddings or longest
            rope["original_max_position_embeddings"] = original
            keys[_LONGEST] = math.ceil(original * factor)
        return {_TEXT: keys} if isinstance(config.get(_TEXT), Mapping) else keys


def config_overrides(
    scaling: RopeScaling | None, extra_args: Sequence[str], profile: EngineProfile
) -> ConfigOverrides | None:
    """Return the overrides of the target's config.json in a spec; None without overrides.

    Raises InvalidSpecError if there are two overrides, or if the one in extraArgs is not a JSON object.
    """
    given = [option for option in options(extra_args, profile) if option.flag.name == HF_OVERRIDES]
    if not given:
        return None if scaling is None else ConfigOverrides(ROPE_SCALING, str(scaling.factor), scaling, {})
    field, shown = f"spec.engine.extraArgs[{given[-1].index}]", given[-1].shown
    if scaling is not None:
        message = f"vLLM keeps only one override, and {ROPE_SCALING} is another: remove one of the two"
        raise _rejected(field, shown, message)
    keys = json_value(given)
    if keys is None:
        raise _rejected(field, shown, "must be followed by a JSON object")
    return ConfigOverrides(field, shown, None, keys)


def _rejected(field: str, shown: str, message: str) -> InvalidSpecError:
    return InvalidSpecError([Problem(field, shown, message)])


def _text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get(_TEXT)
    return inner if isinstance(inner, Mapping) else config


def _rope_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Any = next((config[key] for key in ROPE_KEYS if config.get(key)), {})
    return found if isinstance(found, Mapping) else {}


def positions_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's keys, overlaid with those of its rope parameters."""
    text = _text_of(config)
    return {**text, **_rope_of(text)}


def _is_nested(rope: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in rope.values())
