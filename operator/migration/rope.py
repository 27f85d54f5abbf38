"""Rope parameters that a server was told: the field for them, where it means the same."""

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from specdecode_operator.api.values import RopeType
from specdecode_operator.engine.arguments import HF_OVERRIDES
from specdecode_operator.engine.rules.config_overrides import positions_of
from specdecode_operator.migration.arguments import Argument
from specdecode_operator.migration.builder import SpecBuilder
from specdecode_operator.sizing.families.catalogue import find_entry

_FIELD: Final = "target.ropeScaling"
_ROPE: Final = frozenset({"rope_parameters", "rope_scaling"})
_LONGEST: Final = "max_position_embeddings"
_ORIGINAL: Final = "original_max_position_embeddings"
_ORIGINAL_FIELD: Final = "originalMaxPositionEmbeddings"
_KEYS: Final = frozenset({"rope_type", "type", "factor", _ORIGINAL})
_TEXT: Final = "text_config"
_OWN: Final = frozenset({"rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"})
"""Keys that the field keeps as the model has them."""

_MOST_FACTOR: Final = 10_000


def take_rope_scaling(given: Argument, model: str, builder: SpecBuilder) -> bool:
    """Take ``--hf-overrides`` that says a scaling of a model and nothing else; return whether it does.

    Rope parameters that repeat the model's own are part of the scaling: an override must repeat them.
    """
    if given.name != HF_OVERRIDES or not given.known:
        return False
    try:
        said = json.loads(given.value)
    except (ValueError, RecursionError):
        return False
    for key in reversed(given.path):
        said = {key: said}
    if isinstance(said, dict) and said.keys() == {_TEXT} and _TEXT in _config(model):
        said = said[_TEXT]
    scaling = _scaling(said, model) if isinstance(said, dict) else None
    if scaling is None:
        return False
    builder.take(given.text, _FIELD, scaling, "the model's other rope parameters are kept")
    return True


def _scaling(said: Mapping[str, Any], model: str) -> dict[str, Any] | None:
    rope = next((said[key] for key in sorted(_ROPE) if key in said), None)
    if not isinstance(rope, dict) or not said.keys() <= {*_ROPE, _LONGEST}:
        return None
    own = positions_of(_config(model))
    if not rope.keys() <= _KEYS | {key for key in _OWN if key in own and rope.get(key) == own[key]}:
        return None
    kind, factor, original = rope.get("rope_type", rope.get("type")), rope.get("factor"), rope.get(_ORIGINAL)
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not isinstance(kind, str) or kind not in set(RopeType) or not is_number or not 1 <= factor < _MOST_FACTOR:  # type: ignore[operator]
        return None
    scaling = {"type": kind, "factor": f"{factor:.3f}".rstrip("0").rstrip(".")}
    if float(scaling["factor"]) != factor:
        return None
    if not RopeType(kind).has_original_length:
        return scaling if original is None and _LONGEST not in said else None
    if original is not None:
        scaling[_ORIGINAL_FIELD] = original
    reached = said.get(_LONGEST)
    same = reached is None or (isinstance(original, int) and reached == math.ceil(original * factor))
    return scaling if same else None


def _config(model: str) -> Mapping[str, Any]:
    """Return the config.json of a model of the catalogue; of others nothing is known."""
    entry = find_entry(model)
    return entry.config if entry is not None else {}
