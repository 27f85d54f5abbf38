"""The feed-forward layers of an estimated model, and which of them are experts."""

import re
from collections.abc import Callable, Iterator
from typing import Final

from specdecode_operator.sizing.base.fields import Fields
from specdecode_operator.sizing.estimated.attention import NO_MIXER
from specdecode_operator.sizing.estimated.keys import EXPERTS, EXPERTS_A_TOKEN, number, required
from specdecode_operator.sizing.families.decoder import LINEAR
from specdecode_operator.sizing.model.layers import DenseMlp, Experts, FeedForward
from specdecode_operator.vocabulary import FLOAT32_BYTES

_INNER_WIDTH: Final = (
    *("dense_intermediate_size", "intermediate_size_mlp", "intermediate_size", "ffn_hidden_size", "n_inner"),
    *("ffn_dim", "ffn_intermediate_size", "hidden_dim"),
)
_EXPERT_WIDTH: Final = (
    *("moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size", "expert_ffn_hidden_size"),
    *("intermediate_size", "ffn_hidden_size"),
)
_SHARED_WIDTH: Final = (
    *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"),
    *("shared_expert_intermediate_dim", "share_expert_dim"),
)
_SHARED_EXPERTS: Final = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
_DENSE_FIRST: Final = (
    "first_k_dense_replace",
    "num_dense_layers",
    "moe_layer_start_index",
    "moe_first_k_dense_replace",
    "dense_mlp_idx",
)
"""Names of one size in different files, the most specific first."""

_EXPERT_LAYERS: Final = ("moe_layers_enum", "moe_layers")
"""Keys that name the layers with experts."""

_NO_GATE: Final = ("relu2", "gelu_new", "gelu_fast", "squared_relu")
_WIDENS: Final = 4


def feed_forwards(fields: Fields, kinds: tuple[str, ...]) -> Callable[[int], FeedForward | None]:
    """Return the second half of each layer."""
    gated = not any(
        fields.values.get(key) in _NO_GATE for key in ("hidden_act", "mlp_hidden_act", "activation_function")
    )
    width = number(fields, _INNER_WIDTH, 0)
    dense = DenseMlp(width or _WIDENS * fields.size("hidden_size"), gated=gated)
    experts = _experts(fields, gated=gated)
    apart = bool(set(kinds) & set(NO_MIXER))
    has_experts = _where_experts(fields, len(kinds))

    def feed_forward(index: int) -> FeedForward | None:
        kind = kinds[index]
        if apart:
            return (experts if kind == "moe" and experts else dense) if kind in NO_MIXER else None
        if not width and experts is None and kinds[index] == LINEAR:
            # Mamba alone has no feed-forward layer.
            return None
        return experts if experts is not None and has_experts(index) else dense

    return feed_forward


def _experts(fields: Fields, *, gated: bool) -> Experts | None:
    count = number(fields, EXPERTS, 0)
    if count <= 1:
        return None
    width = required(fields, _EXPERT_WIDTH)
    shared = number(fields, _SHARED_WIDTH, 0)
    times = number(fields, _SHARED_EXPERTS, 0)
    if shared and times:
        shared *= times
    latent = number(fields, ("moe_latent_size", "routed_expert_hidden_size"), 0)
    return Experts(
        count,
        min(number(fields, EXPERTS_A_TOKEN, 1), count),
        width,
        score_bias_bytes=FLOAT32_BYTES,
        shared_intermediate_size=shared or times * width,
        gated=gated,
        latent_size=latent or None,
    )


def expert_doubts(fields: Fields, kinds: tuple[str, ...]) -> Iterator[str]:
    """Yield a warning for each key that puts experts into layers that the model does not have."""
    count = number(fields, EXPERTS, 0)
    if count <= 1 or set(kinds) & set(NO_MIXER):
        return
    if not _has_some(_named_experts(fields), len(kinds)):
        yield f"its config.json has {count} experts but no layer for them; the plan counts experts in all layers"
    for key in filter(fields.is_set, _EXPERT_LAYERS):
        if beyond := [place for place in _places(fields, key) if place >= len(kinds)]:
            yield f"{fields.path(key)} lists layer {beyond[0]}, but the last layer is {len(kinds) - 1}; check both"


def _where_experts(fields: Fields, layers: int) -> Callable[[int], bool]:
    """Return which layers have experts; all others are dense.

    A file that names experts and no layer for them is wrong: with experts in all layers the model takes most memory.
    """
    has_experts = _named_experts(fields)
    return has_experts if _has_some(has_experts, layers) else lambda _: True


def _has_some(has_experts: Callable[[int], bool], layers: int) -> bool:
    return any(has_experts(index) for index in range(layers))


def _places(fields: Fields, key: str) -> list[int]:
    """Return layers that a file names in a list or in text, such as 4,5,6."""
    return [int(each) for each in re.findall(r"\d{1,9}", str(fields.values[key]))]


def _named_experts(fields: Fields) -> Callable[[int], bool]:
    """Return which layers have experts by the keys with which files say it."""
    values = fields.values
    first = number(fields, _DENSE_FIRST, 0)
    marks = values.get("moe_layer_freq")
    dense_only = values.get("mlp_only_layers")
    named = next((key for key in _EXPERT_LAYERS if values.get(key)), None)
    places = set() if named is None else set(_places(fields, named))
    step = 1
    for key in ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", "expert_layer_period"):
        step = max(step, number(fields, (key,), 1))
    offset = number(fields, ("expert_layer_offset",), -1)

    def has_experts(index: int) -> bool:
        if places:
            return index in places
        if isinstance(marks, list):
            return bool(marks[index]) if index < len(marks) else True
        if isinstance(dense_only, list) and index in dense_only:
            return False
        if index < first:
            return False
        return index % step == offset if offset >= 0 else (index + 1) % step == 0

    return has_experts
