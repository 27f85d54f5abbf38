"""What all families of decoders share when their config.json is read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from specdecode_operator.sizing.base.fields import Fields
from specdecode_operator.sizing.model.checkpoint import Checkpoint, read_checkpoint
from specdecode_operator.sizing.model.geometry import ModelGeometry, Tower
from specdecode_operator.sizing.model.layers import DenseMlp, FeedForward, Layer, Mixer, SelfAttention
from specdecode_operator.sizing.model.precision import Method
from specdecode_operator.sizing.model.rope import RopeTable, rope_table

_SIXTEEN_BIT: Final = 2
"""Bytes an element. vLLM's dtype auto loads float32 checkpoints as bfloat16 (config/model.py, _resolve_auto_dtype)."""

SLIDING: Final = "sliding_attention"
FULL: Final = "full_attention"
CHUNKED: Final = "chunked_attention"
LINEAR: Final = "linear_attention"


@dataclass(frozen=True)
class Heads:
    """Sizes of the attention, checked against each other."""

    count: int
    kv_count: int
    dim: int


@dataclass(frozen=True)
class Decoder:
    """How a family arranges its layers."""

    # What the layer of an index is made of; None for a half that it lacks
    mixer: Callable[[int], Mixer | None]
    feed_forward: Callable[[int], FeedForward | None]
    ropes: tuple[RopeTable, ...]  # The rotary tables it loads
    # Norms over the hidden size in one layer, and after the last
    norms: int = 2
    final_norms: int = 1
    # Whether files that say nothing tie output head and embedding (the family's class in transformers does)
    tied: bool = False
    tower: Tower = field(default_factory=Tower)  # Encoder in front of it
    # What the engine's class makes on every pipeline stage
    tables_on_every_stage: bool = False
    embedding_on_every_stage: bool = False
    norm_on_every_stage: bool = False
    own_input_size: int = 0  # Width of the input that each layer has for itself


def assemble(fields: Fields, architecture: str, decoder: Decoder) -> ModelGeometry:
    """Return the geometry of a model whose layers a family has described."""
    checkpoint = read_checkpoint(fields)
    size = fields.size("hidden_size")
    layers = _layers(decoder, checkpoint, fields.size("num_hidden_layers"))
    # Latent attention does not read what compressed-tensors says of the cache (vLLM, mla_attention.py).
    has_heads = any(isinstance(mixer, SelfAttention) for layer in layers for mixer in layer.mixers)
    follows = has_heads or checkpoint.format is None or checkpoint.format.method is not Method.COMPRESSED_TENSORS
    return ModelGeometry(
        name=fields.model,
        architecture=architecture,
        hidden_size=size,
        vocab_size=fields.size("vocab_size"),
        layers=layers,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=decoder.tied),
        max_position_embeddings=fields.size("max_position_embeddings"),
        ropes=decoder.ropes + decoder.tower.ropes,
        dtype_bytes=dtype_bytes(fields),
        checkpoint=checkpoint.format,
        cache_element_bytes=checkpoint.cache_element_bytes if follows else None,
        tower=decoder.tower,
        final_norms=decoder.final_norms,
        tables_on_every_stage=decoder.tables_on_every_stage,
        embedding_on_every_stage=decoder.embedding_on_every_stage,
        norm_on_every_stage=decoder.norm_on_every_stage,
    )


def _layers(decoder: Decoder, checkpoint: Checkpoint, count: int) -> tuple[Layer, ...]:
    """Return the layers from first to last; those that a family makes of the same parts are one object."""
    made: dict[tuple[int, int, frozenset[str]], Layer] = {}
    layers = []
    for index in range(count):
        mixer, feed_forward = decoder.mixer(index), decoder.feed_forward(index)
        unquantized = checkpoint.unquantized_modules(index)
        # A layer keeps its parts, so that no other part gets their place in memory.
        key = (id(mixer), id(feed_forward), unquantized)
        if key not in made:
            made[key] = Layer(
                mixer,
                feed_forward,
                decoder.norms,
                unquantized=unquantized,
                own_input_size=decoder.own_input_size,
            )
        layers.append(made[key])
    return tuple(layers)


def with_defaults(fields: Fields, defaults: Mapping[str, object]) -> Fields:
    """Return the fields with values that files of this family leave out."""
    present = {key: value for key, value in fields.values.items() if value is not None}
    return fields.having({**defaults, **present})


def heads(fields: Fields, *, default_kv: bool = False, default_dim: int | None = None) -> Heads:
    """Return the sizes of the attention.

    Parameters
    ----------
    default_kv
        Whether a file without key/value heads means as many as query heads.
    default_dim
        Width of a head where the file has none; None: the hidden size shared out.
    """
    count = fields.size("num_attention_heads")
    kv_count = fields.size("num_key_value_heads", default=count if default_kv else None)
    if count % kv_count:
        raise fields.error("num_key_value_heads", f"must divide num_attention_heads, which is {count}")
    return Heads(count, kv_count, _head_dim(fields, count, default_dim))


def _head_dim(fields: Fields, count: int, default_dim: int | None) -> int:
    hidden = fields.size("hidden_size")
    if fields.is_set("head_dim") or default_dim is not None:
        dim = fields.size("head_dim", default=default_dim)
    elif hidden % count:
        raise fields.error("num_attention_heads", f"must divide hidden_size, which is {hidden}, or head_dim be given")
    else:
        dim = hidden // count
    if dim % 2:
        key = "head_dim" if fields.is_set("head_dim") else "num_attention_heads"
        raise fields.error(key, f"heads are {dim} wide, but rotary embeddings need an even width")
    return dim


def layer_types(fields: Fields, default: Callable[[int], str]) -> tuple[str, ...]:
    """Return what kind of attention each layer has, as the file says or as its family's class would."""
    count = fields.size("num_hidden_layers")
    given = fields.strings("layer_types")
    if not given:
        return tuple(default(index) for index in range(count))
    if len(given) != count:
        raise fields.error("layer_types", f"must name one type a layer, {count} in all")
    for kind in given:
        if kind not in (SLIDING, FULL, CHUNKED, LINEAR):
            raise fields.unmodelled(
                "layer_types", f"sizing lacks {kind}; known are {FULL}, {SLIDING}, {CHUNKED}, {LINEAR}"
            )
    return given


def first_that_borrows(fields: Fields, kinds: Sequence[str], borrowers: int) -> int:
    """Return the first of the last layers that read the keys and values of an earlier layer of their kind.

    Source: vllm/model_executor/models/gemma4.py, Gemma4Attention.

    Raises
    ------
    GeometryError
        If there is no earlier layer of a kind.
    """
    first = len(kinds) - borrowers
    if set(kinds[max(first, 0) :]) - set(kinds[: max(first, 0)]):
        most = len(kinds) - 1 - max(kinds.index(kind) for kind in set(kinds))
        raise fields.error("num_kv_shared_layers", f"leaves layers without one to read from; at most {most} can share")
    return first


def model_rope(fields: Fields, head_dim: int, *, follows_tokens: bool = False) -> RopeTable:
    """Return the rotary table of a model that has one."""
    return rope_table(fields, head_dim, fields.size("max_position_embeddings"), follows_tokens=follows_tokens)


def attention(sizes: Heads, **features: bool | int | None) -> SelfAttention:
    """Return self-attention of these sizes."""
    return SelfAttention(sizes.count, sizes.kv_count, sizes.dim, **features)  # type: ignore[arg-type]


def mlp(fields: Fields, *, bias: bool = False) -> DenseMlp:
    """Return the gated feed-forward layer of a dense model."""
    return DenseMlp(fields.size("intermediate_size"), bias)


def dtype_bytes(fields: Fields) -> int:
    """Return the bytes of an element that no quantization touches."""
    key = "dtype" if fields.is_set("dtype") else "torch_dtype"
    if fields.text(key, default="bfloat16") not in ("bfloat16", "float16", "float32"):
        raise fields.error(key, "must be bfloat16, float16 or float32")
    return _SIXTEEN_BIT
