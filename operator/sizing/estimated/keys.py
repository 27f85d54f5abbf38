"""Keys that config.json files of many models share, and how to read a size that goes by several names."""

from collections.abc import Iterable
from typing import Final

from specdecode_operator.sizing.base.fields import Fields

LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers")
WIDTH: Final = ("hidden_size", "n_embd", "d_model", "dim", "model_dim")
HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS: Final = (
    *("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "multi_query_group_num"),
    *("num_attention_groups", "num_query_groups"),
)
HEAD_DIM: Final = ("head_dim", "kv_channels", "attention_head_dim", "head_size", "qk_head_dim")
EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
EXPERTS_A_TOKEN: Final = (
    *("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k"),
    *("experts_per_token", "num_selected_experts"),
)
LAYER_KINDS: Final = ("layer_types", "layers_block_type", "block_types", "layer_kinds")
VOCABULARY: Final = ("vocab_size", "padded_vocab_size", "n_vocab")
LENGTH: Final = (
    *("max_position_embeddings", "seq_length", "n_positions", "max_seq_len", "max_sequence_length"),
    *("model_max_length", "max_seq_length"),
)
"""Names of one size in different files, the most specific first."""

_ONE_SIZE: Final = (LAYERS, WIDTH, HEADS[:-1], HEAD_DIM[:-1], KV_HEADS, EXPERTS, EXPERTS_A_TOKEN)
"""Names of one size that a file needs only once. Other names have fallbacks, or also count the heads of a state."""

_MOST_DIGITS: Final = 18
"""Of a number that a file writes as text."""


def settled(fields: Fields, levels: Iterable[Fields]) -> tuple[Fields, tuple[str, ...]]:
    """Return the fields with one value for each size, and a sentence for each size that has several values.

    ``levels`` are the sections of the file that may hold them. Which one the engine reads depends on its class, so the
    larger one is used, because it needs more memory. For layers, the length of a list of layer types wins.
    """
    levels, values, names, doubts = tuple(levels), dict(fields.values), {}, []
    for keys in _ONE_SIZE:
        found = {level.path(key): size for level in levels for key in keys if (size := _size(level.values.get(key)))}
        if len(set(found.values())) <= 1:
            continue
        listed = {len(kinds) for key in LAYER_KINDS if isinstance(kinds := fields.values.get(key), list)}
        taken = max(listed & set(found.values()) if keys is LAYERS else (), default=max(found.values()))
        where = next(path for path, size in found.items() if size == taken)
        for key in filter(fields.is_set, keys):
            values[key], names[key] = taken, where
        told = " and ".join(f"{path} {size}" for path, size in found.items())
        doubts.append(f"its config.json contradicts itself ({told}); the plan uses {taken}; correct the file")
    return fields.having(values, names), tuple(doubts)


def _size(value: object) -> int | None:
    """Return a size as files write it: a number, one in quotes, or the largest of one for each layer; else None."""
    if isinstance(value, list):
        return max((each for each in value if type(each) is int), default=None)
    if isinstance(value, str) and value.isdecimal() and len(value) <= _MOST_DIGITS:
        return int(value)
    return value if type(value) is int else None


def number(fields: Fields, keys: tuple[str, ...], default: int) -> int:
    """Return the size under the first key that is set and not zero; the largest if it is a list with one per layer."""
    for key in keys:
        value = fields.values.get(key)
        size = _size(value)
        if size or not (value in (None, 0, False) or isinstance(value, str | list)):
            return fields.having({**fields.values, key: size or value}).size(key)
    return default


def required(fields: Fields, keys: tuple[str, ...]) -> int:
    """Return a size as number does, or raise GeometryError if no key is set."""
    found = number(fields, keys, 0)
    if not found:
        raise fields.error(keys[0], "is missing; copy it from the model's config.json")
    return found
