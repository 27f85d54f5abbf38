"""The rotary position table that the engine keeps in GPU memory."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from specdecode_operator.sizing.base.fields import MAX_TOKENS, Fields

_MROPE_STRETCH: Final = 4
"""Tables of positions in several dimensions are so much longer (vLLM, mrope.py)."""


@dataclass(frozen=True)
class RopeTable:
    """Table of sines and cosines; models whose tables are equal share one."""

    head_dim: int  # Width of the heads it is for
    rotary_dim: int  # Columns: how much of each head is rotated
    positions: int  # Rows
    parameters: tuple[tuple[str, str], ...]  # Type, base and scaling, in one canonical order
    element_bytes: int | None = None  # Bytes of a number in it; None: of the model's type
    # So many times as long in versions that do not know that its positions never go beyond the tokens
    stretch_once: int = 1

    def size_bytes(self, dtype_bytes: int, *, stretched: bool = False) -> int:
        """Return the bytes of the table, a full copy on every rank; ``stretched``: in versions that know less."""
        rows = self.positions * (self.stretch_once if stretched else 1)
        return rows * self.rotary_dim * (self.element_bytes or dtype_bytes)


def rope_table(
    config: Fields, head_dim: int, max_position_embeddings: int, *, follows_tokens: bool = False
) -> RopeTable:
    """Return the table that vLLM builds for a config.json.

    The rows of each type are those of vLLM 0.32's rotary_embedding package:
    default and llama3 cover max_position_embeddings, linear and yarn stretch
    by their factor. Positions in several dimensions may go beyond the tokens
    unless it is known that they never do (``follows_tokens``).
    """
    nested = config.section("rope_parameters") or config.section("rope_scaling")
    parameters = nested or Fields(config.model, {})
    # Old files say "type" and keep the base and the partial factor outside.
    kind = parameters.text("rope_type", default=parameters.text("type", default="default"))
    factor_home = parameters if parameters.is_set("partial_rotary_factor") else config
    partial = factor_home.number("partial_rotary_factor", default=1.0)
    if partial > 1:
        raise factor_home.error("partial_rotary_factor", "must be above 0 and at most 1")
    facts = {
        **parameters.values,
        "rope_theta": parameters.values.get("rope_theta", config.values.get("rope_theta")),
        "type": None,
        "rope_type": kind,
        "partial_rotary_factor": partial,
    }
    stretch = _MROPE_STRETCH if kind == "mrope" or parameters.is_set("mrope_section") else 1
    return RopeTable(
        head_dim=head_dim,
        rotary_dim=_rotary_dim(head_dim, partial, kind),
        positions=_rows(config, parameters, kind, max_position_embeddings) * (1 if follows_tokens else stretch),
        parameters=_canonical(facts),
        stretch_once=stretch if follows_tokens else 1,
    )


_INCLUDED: Final = ("llama3", "longrope", "su")
"""Types with which max_position_embeddings is the stretched length, in all versions."""

_YARN: Final = ("yarn", "deepseek_yarn", "deepseek_llama_scaling")


def stretched_length(max_position_embeddings: int, ropes: Iterable[RopeTable], *, multiplies_yarn: bool) -> int:
    """Return the longest sequence that the engine takes (vLLM, config/model.py, _get_and_verify_max_len).

    Before 0.30 it is the original length of YaRN times its factor, from then on what the file says.
    """
    length, factor = max_position_embeddings, 1.0
    for facts in ({key: json.loads(value) for key, value in rope.parameters} for rope in ropes):
        kind = facts["rope_type"]
        if kind in _INCLUDED or (kind in _YARN and not multiplies_yarn):
            continue
        factor = _number(facts.get("factor"), factor)
        if kind == "yarn":
            length = int(_number(facts.get("original_max_position_embeddings"), length))
    return min(int(length * factor), MAX_TOKENS)


def _number(value: object, default: float) -> float:
    """Return a positive number, as most files have it, or else the default."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and 0 < value <= MAX_TOKENS else default  # type: ignore[return-value,operator]


def _rotary_dim(head_dim: int, partial: float, kind: str) -> int:
    # Gemma 4 fills the part that is not rotated with ones and zeros (gemma4_rope.py).
    return head_dim if kind == "proportional" else int(head_dim * partial)


def _rows(config: Fields, parameters: Fields, kind: str, max_position_embeddings: int) -> int:
    match kind:
        case "default" | "llama3" | "proportional" | "mrope":
            return max_position_embeddings
        case "linear" | "dynamic":
            return math.ceil(max_position_embeddings * parameters.number("factor"))
        case "longrope" | "su":
            # Two tables, one of the original length and one of the full (phi3_long_rope_scaled_rope.py).
            original = config.size("original_max_position_embeddings", default=max_position_embeddings)
            return original + max_position_embeddings
        case "yarn" | "deepseek_yarn":
            original = parameters.size("original_max_position_embeddings", default=max_position_embeddings)
            return math.ceil(original * parameters.number("factor"))
        case _:
            key = "rope_type" if parameters.is_set("rope_type") else "type"
            raise parameters.error(
                key,
                "is not supported; known are default, linear, dynamic, llama3, yarn, longrope, mrope and proportional",
            )


def _canonical(facts: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Return the facts sorted, with 8.0 written as 8: files write numbers both ways."""
    return tuple(
        (key, json.dumps(_plain(value), sort_keys=True, default=str))
        for key, value in sorted(facts.items())
        if value is not None
    )


def _plain(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value
