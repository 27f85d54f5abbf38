"""Keys that config.json files of many models share, and how to read a size that goes by several names."""

from typing import Any, Final

from specdecode_operator.sizing.base.fields import Fields

LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers")
WIDTH: Final = ("hidden_size", "n_embd", "d_model", "dim", "model_dim")
HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads")
VOCABULARY: Final = ("vocab_size", "padded_vocab_size", "n_vocab")
LENGTH: Final = (
    *("max_position_embeddings", "seq_length", "n_positions", "max_seq_len", "max_sequence_length"),
    *("model_max_length", "max_seq_length"),
)
"""Names of one size in different files, the most specific first."""

_MOST_DIGITS: Final = 18
"""Of a number that a file writes as text."""


def number(fields: Fields, keys: tuple[str, ...], default: int) -> int:
    """Return the size under the first key that is set and not zero; the largest of one that files write per layer."""
    for key in keys:
        value: Any = fields.values.get(key)
        if isinstance(value, list):
            value = max((each for each in value if isinstance(each, int)), default=None)
        if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= _MOST_DIGITS:
            value = int(value)
        if value in (None, 0, False) or isinstance(value, str):
            continue
        return fields.having({**fields.values, key: value}).size(key)
    return default


def required(fields: Fields, keys: tuple[str, ...]) -> int:
    """Return a size as number does, or raise GeometryError if no key is set."""
    found = number(fields, keys, 0)
    if not found:
        raise fields.error(keys[0], "is missing; copy it from the model's config.json")
    return found
