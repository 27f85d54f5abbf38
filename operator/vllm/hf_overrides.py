"""Compute overrides of the target's config.json: `spec.target.ropeScaling` and `--hf-overrides`.

Sizing uses the overridden config. The draft is not overridden: vLLM passes it no JSON overrides
(config/speculative.py, compose_draft_hf_overrides).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from specdecode_operator.api.speculation import RopeScaling
from specdecode_operator.problems import InvalidSpecError, Problem
from specdecode_operator.vllm.arguments import HF_OVERRIDES
from specdecode_operator.vllm.extra_args_parser import json_value, options
from specdecode_operator.vllm.profiles import EngineProfile
from specdecode_operator.vllm.versions import ROPE_KEYS

ROPE_SCALING: Final = "spec.target.ropeScaling"

_LONGEST: Final = "max_position_embeddings"
_THETA: Final = "rope_theta"

_OF_WINDOWS: Final = "rope_local_base_freq"
"""Gemma 3 files of before transformers 5: layers with a window have a base of their own."""

_TEXT: Final = "text_config"

_KEPT: Final = (_THETA, "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Rope parameters that are no scaling: an override takes the place of all (config/model.py, _apply_dict_overrides)."""


@dataclass(frozen=True)
class ConfigOverrides:
    """Overrides of the target's config.json: a scaling, or the JSON in further arguments."""

    field: str
    shown: str
    scaling: RopeScaling | None
    given: Mapping[str, Any]

    def keys(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the keys that take the place of those of a config.json.

        Raises InvalidSpecError if the model is none that they could be said of.
        """
        if self.scaling is not None:
            return self._scaled(config, self.scaling)
        theta, rope = positions_of(config).get(_THETA), _rope_of(_text_of(self.given))
        if rope and theta is not None and rope.get(_THETA) is None and not _is_nested(rope):
            message = (
                f"its rope parameters take the place of all, and so drop the model's {_THETA} {theta}: use"
                f" {ROPE_SCALING}, which keeps it, or add it"
            )
            raise _refusal(self.field, self.shown, message)
        return self.given

    def _scaled(self, config: Mapping[str, Any], scaling: RopeScaling) -> Mapping[str, Any]:
        """Return the keys of a scaling.

        The longest sequence stands among them for YaRN: from 0.30 on vLLM does not multiply it by the factor
        (config/model.py, _get_and_verify_max_len).
        """
        known = positions_of(config)
        if _is_nested(_rope_of(_text_of(config))) or known.get(_OF_WINDOWS) is not None:
            raise _refusal(
                self.field,
                self.shown,
                "the model's layers rotate in several ways, which no single scaling can stretch: remove it",
            )
        # What stands among rope parameters is no length.
        theta, longest = known.get(_THETA), _text_of(config).get(_LONGEST)
        if theta is None or not isinstance(longest, int):
            key = _THETA if theta is None else _LONGEST
            raise _refusal(
                self.field,
                self.shown,
                f"the model's config.json does not say its {key}, without which it is lost: remove it",
            )
        factor = float(scaling.factor)
        rope = {key: known[key] for key in _KEPT if known.get(key) is not None}
        rope |= {"rope_type": scaling.type.value, "factor": factor}
        keys: dict[str, Any] = {ROPE_KEYS[0]: rope}
        if scaling.type.has_original_length:
            original = scaling.original_max_position_embeddings or longest
            rope["original_max_position_embeddings"] = original
            keys[_LONGEST] = math.ceil(original * factor)
        return {_TEXT: keys} if isinstance(config.get(_TEXT), Mapping) else keys


def config_overrides(
    scaling: RopeScaling | None, extra_args: Sequence[str], profile: EngineProfile
) -> ConfigOverrides | None:
    """Return what a spec says of the target's config.json; None where it says nothing.

    Raises InvalidSpecError if it says so twice, or further arguments are no JSON object.
    """
    given = [option for option in options(extra_args, profile) if option.flag.name == HF_OVERRIDES]
    if not given:
        return None if scaling is None else ConfigOverrides(ROPE_SCALING, str(scaling.factor), scaling, {})
    field, shown = f"spec.engine.extraArgs[{given[-1].index}]", given[-1].shown
    if scaling is not None:
        message = f"vLLM keeps one of its kind, and {ROPE_SCALING} is another: remove one of the two"
        raise _refusal(field, shown, message)
    keys = json_value(given)
    if keys is None:
        raise _refusal(field, shown, "must be followed by a JSON object")
    return ConfigOverrides(field, shown, None, keys)


def _refusal(field: str, shown: str, message: str) -> InvalidSpecError:
    return InvalidSpecError([Problem(field, shown, message)])


def _text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get(_TEXT)
    return inner if isinstance(inner, Mapping) else config


def _rope_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Any = next((config[key] for key in ROPE_KEYS if config.get(key)), {})
    return found if isinstance(found, Mapping) else {}


def positions_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's keys, and on top those of its rope parameters."""
    text = _text_of(config)
    return {**text, **_rope_of(text)}


def _is_nested(rope: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in rope.values())
