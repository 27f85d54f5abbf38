"""Geometry of a model from user-supplied sizes: weights, KV cache per token, state per request."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from specdecode_operator.enums import Knowledge, Precision
from specdecode_operator.sizing.arithmetic import GIB, MIB
from specdecode_operator.sizing.errors import GeometryError
from specdecode_operator.sizing.geometry import DeltaNet, ModelGeometry, SelectiveScan, StateSpace
from specdecode_operator.sizing.rank_layers import Split, whole_model
from specdecode_operator.sizing.result_cache import MEMO_SIZE
from specdecode_operator.sizing.weights import weight_parts

_WIDTHS: Final = ((4 * GIB, 2048), (32 * GIB, 4096), (256 * GIB, 8192))
_WIDEST: Final = 16_384
"""Widths of models by their weights, each at least as in published models of the size; they decide the activation."""

_HEAD_DIM: Final = 128
_WIDENS: Final = 4
_LAYERS: Final = 32
_VOCABULARY: Final = 262_144
"""A usual shape, with as large a vocabulary as published models have."""


@dataclass(frozen=True)
class Assumption:
    """User-supplied sizes of a whole model on one GPU; None for those that follow from its files."""

    weights_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    state_bytes_per_request: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether a model can be sized without any of its files."""
        return self.weights_bytes is not None and self.kv_bytes_per_token is not None


def usual_config(
    given: Assumption, like: ModelGeometry | None = None, *, is_head: bool = False, is_draft: bool = False
) -> Mapping[str, Any]:
    """Return a config.json of usual shape for a model of which only the assumption is known.

    ``like`` is the other model of a pair. Both share its vocabulary; a head and its target share the target's width; a
    draft's longest sequence is the target's.
    """
    size = given.weights_bytes or 0
    width = next((width for most, width in _WIDTHS if size <= most), _WIDEST)
    made_for = like.head.reads_width if like is not None and like.head is not None else None
    if like is not None:
        width = like.hidden_size if is_head else made_for or width
    config: dict[str, Any] = {
        "architectures": ["AssumedForCausalLM"],
        "hidden_size": width,
        "num_hidden_layers": 1 if is_head else _LAYERS,
        "num_attention_heads": max(width // _HEAD_DIM, 1),
        "num_key_value_heads": max(width // _HEAD_DIM, 1),
        "head_dim": _HEAD_DIM,
        "intermediate_size": _WIDENS * width,
        "vocab_size": _VOCABULARY if like is None else like.vocab_size,
        "tie_word_embeddings": True,
    }
    if like is not None and is_draft:
        config["max_position_embeddings"] = like.max_position_embeddings
    if given.state_bytes_per_request is not None and not is_head:
        config |= {"full_attention_interval": 2, "linear_num_value_heads": width // _HEAD_DIM}
    return config


@lru_cache(maxsize=MEMO_SIZE)
def assumed_geometry(model: ModelGeometry, given: Assumption) -> ModelGeometry:
    """Return a model with the user-supplied sizes; an exactly known model stays unchanged.

    Raises
    ------
    GeometryError
        If it has no layer for tokens, or for states, whose bytes the user supplies.
    """
    if model.knowledge is Knowledge.EXACT:
        return model
    if given.kv_bytes_per_token is not None and not model.attentions:
        raise GeometryError(
            "kvBytesPerToken", given.kv_bytes_per_token, f"no layer of {model.name} keeps keys and values: remove it"
        )
    mixers = (mixer for layer, _ in model.distinct_layers for mixer in layer.mixers)
    has_states = any(isinstance(mixer, DeltaNet | StateSpace | SelectiveScan) for mixer in mixers)
    if given.state_bytes_per_request is not None and not has_states:
        raise GeometryError(
            "stateMiBPerRequest",
            given.state_bytes_per_request // MIB,
            f"no layer of {model.name} keeps a state, by its config.json: remove it",
        )
    layer_scale = model.layer_scale
    if given.weights_bytes is not None:
        whole = model.unscaled
        parts = weight_parts(whole, model.checkpoint_precision or Precision.BF16, Split(1), whole_model(whole))
        beside = sum(parts.values()) - parts["layers"]
        layer_scale = max(given.weights_bytes - beside, 0), max(int(parts["layers"]), 1)
    return replace(
        model,
        knowledge=Knowledge.ASSUMED,
        layer_scale=layer_scale,
        assumed_token_bytes=given.kv_bytes_per_token,
        assumed_state_bytes=given.state_bytes_per_request,
    )
