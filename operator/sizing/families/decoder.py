"""Read config keys common to all decoders, and multi-head latent attention (DeepSeek, Kimi K2, GLM-5).

Draft heads and mixtures of experts of other families use latent attention too, so its reader is here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from specdecode_operator.enums import FLOAT32_BYTES, SIXTEEN_BIT_BYTES
from specdecode_operator.sizing.config_fields import Fields
from specdecode_operator.sizing.geometry import (
    DenseMlp,
    Experts,
    FeedForward,
    Indexer,
    LatentAttention,
    Layer,
    Mixer,
    ModelGeometry,
    QuantizationMethod,
    RopeTable,
    SelfAttention,
    rope_table,
)
from specdecode_operator.sizing.quantization import read_checkpoint

SLIDING: Final = "sliding_attention"
FULL: Final = "full_attention"
CHUNKED: Final = "chunked_attention"
LINEAR: Final = "linear_attention"


@dataclass(frozen=True)
class Decoder:
    """How a family arranges its layers."""

    # The two halves of the layer of an index; None for a half that it lacks
    mixer: Callable[[int], Mixer | None]
    feed_forward: Callable[[int], FeedForward | None]
    ropes: tuple[RopeTable, ...]  # The rotary tables it loads
    # Norms over the hidden size in one layer, and after the last
    norms: int = 2
    final_norms: int = 1
    # Whether files that say nothing tie output head and embedding (the family's class in transformers does)
    tied: bool = False
    # What the engine's class makes on every pipeline stage
    tables_on_every_stage: bool = False
    embedding_on_every_stage: bool = False
    norm_on_every_stage: bool = False
    own_input_size: int = 0  # Width of the input that each layer has for itself


def assemble(fields: Fields, architecture: str, decoder: Decoder) -> ModelGeometry:
    """Return the geometry of a model whose layers a family has described; layers of the same parts are one object."""
    checkpoint = read_checkpoint(fields)
    size = fields.size("hidden_size")
    made: dict[tuple[int, int, frozenset[str]], Layer] = {}
    layers = []
    for index in range(fields.size("num_hidden_layers")):
        mixer, feed_forward = decoder.mixer(index), decoder.feed_forward(index)
        unquantized = checkpoint.unquantized_modules(index)
        # A layer keeps its parts, so that no other part gets their place in memory.
        key = (id(mixer), id(feed_forward), unquantized)
        if key not in made:
            own_input = decoder.own_input_size
            made[key] = Layer(mixer, feed_forward, decoder.norms, unquantized=unquantized, own_input_size=own_input)
        layers.append(made[key])
    # Latent attention does not read what compressed-tensors says of the cache (vLLM, mla_attention.py).
    has_heads = any(isinstance(mixer, SelfAttention) for layer in made.values() for mixer in layer.mixers)
    method = None if checkpoint.format is None else checkpoint.format.method
    reads_cache_type = has_heads or method is not QuantizationMethod.COMPRESSED_TENSORS
    # vLLM's dtype auto loads float32 checkpoints as bfloat16 (config/model.py, _resolve_auto_dtype).
    dtype = "dtype" if fields.is_set("dtype") else "torch_dtype"
    if fields.text(dtype, default="bfloat16") not in ("bfloat16", "float16", "float32"):
        raise fields.error(dtype, "must be bfloat16, float16 or float32")
    return ModelGeometry(
        name=fields.model,
        architecture=architecture,
        hidden_size=size,
        vocab_size=fields.size("vocab_size"),
        layers=tuple(layers),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=decoder.tied),
        max_position_embeddings=fields.size("max_position_embeddings"),
        ropes=decoder.ropes,
        dtype_bytes=SIXTEEN_BIT_BYTES,
        checkpoint=checkpoint.format,
        cache_element_bytes=checkpoint.cache_element_bytes if reads_cache_type else None,
        final_norms=decoder.final_norms,
        tables_on_every_stage=decoder.tables_on_every_stage,
        embedding_on_every_stage=decoder.embedding_on_every_stage,
        norm_on_every_stage=decoder.norm_on_every_stage,
    )


def with_defaults(fields: Fields, defaults: Mapping[str, object]) -> Fields:
    """Return the fields with values that files of this family leave out."""
    present = {key: value for key, value in fields.values.items() if value is not None}
    return fields.having({**defaults, **present})


def attention(
    fields: Fields, *, default_kv: bool = False, default_dim: int | None = None, **features: bool | int | None
) -> SelfAttention:
    """Return self-attention with the heads of a file, checked against each other, and further fields.

    Parameters
    ----------
    default_kv
        Whether a file without key/value heads has as many as query heads.
    default_dim
        Width of a head if the file lacks it; None: the hidden size divided by the heads.
    """
    count = fields.size("num_attention_heads")
    kv_count = fields.size("num_key_value_heads", default=count if default_kv else None)
    if count % kv_count:
        raise fields.error("num_key_value_heads", f"must divide num_attention_heads, which is {count}")
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
    return SelfAttention(count, kv_count, dim, **features)  # type: ignore[arg-type]


def layer_types(fields: Fields, default: Callable[[int], str]) -> tuple[str, ...]:
    """Return the kind of attention of each layer, from the file or else by the family's default."""
    count = fields.size("num_hidden_layers")
    given = fields.strings("layer_types")
    if not given:
        return tuple(map(default, range(count)))
    if len(given) != count:
        raise fields.error("layer_types", f"must name one type a layer, {count} in all")
    for kind in given:
        if kind not in (SLIDING, FULL, CHUNKED, LINEAR):
            known = f"known are {FULL}, {SLIDING}, {CHUNKED}, {LINEAR}"
            raise fields.unmodelled("layer_types", f"sizing lacks {kind}; {known}")
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


def mlp(fields: Fields, *, bias: bool = False, gated: bool = True) -> DenseMlp:
    """Return the feed-forward layer of a dense model."""
    return DenseMlp(fields.size("intermediate_size"), bias, gated)


def number_or_zero(fields: Fields, key: str) -> int:
    """Return a number that may be zero, or absent, which means zero."""
    return 0 if fields.values.get(key) in (0, None) else fields.size(key)


_FIRST_SHARED_INDEX: Final = 2
"""Layer from which indices are shared if files do not say (vLLM, DeepseekV32Attention, index_skip_topk_offset)."""


def deepseek(fields: Fields, architecture: str) -> ModelGeometry:
    """DeepSeek V2, V3 and R1, Kimi K2: the first layers are dense, the rest experts."""
    mixer = latent_attention(fields)
    ropes = (model_rope(fields, mixer.rope_head_dim),)
    return assemble(fields, architecture, Decoder(lambda _: mixer, lambda index: _feed_forward(fields, index), ropes))


def sparse_deepseek(fields: Fields, architecture: str) -> ModelGeometry:
    """DeepSeek V3.2 and GLM-5: an indexer chooses the tokens that a layer reads (vLLM, models/deepseek_v32)."""
    indexer = Indexer(fields.size("index_n_heads"), fields.size("index_head_dim"))
    shared = replace(latent_attention(fields), sparse_tokens=fields.size("index_topk"))
    indexed = replace(shared, indexer=indexer)
    rope = model_rope(fields, shared.rope_head_dim)
    # The indexer has its own table unless its positions are interleaved.
    own = () if fields.flag("indexer_rope_interleave") else (("is_neox_style", "true"),)
    decoder = Decoder(
        lambda index: indexed if has_indexer(fields, index) else shared,
        lambda index: _feed_forward(fields, index),
        (rope, replace(rope, parameters=(*rope.parameters, *own))) if own else (rope,),
    )
    return assemble(fields, architecture, decoder)


def latent_attention(fields: Fields) -> LatentAttention:
    """Return the attention of DeepSeek V2 and V3 as a file describes it."""
    return LatentAttention(
        num_heads=fields.size("num_attention_heads"),
        query_rank=fields.size("q_lora_rank") if fields.is_set("q_lora_rank") else None,
        kv_rank=fields.size("kv_lora_rank"),
        nope_head_dim=fields.size("qk_nope_head_dim"),
        rope_head_dim=fields.size("qk_rope_head_dim"),
        value_head_dim=fields.size("v_head_dim"),
    )


def has_indexer(fields: Fields, index: int) -> bool:
    """Test whether a layer chooses tokens itself; in GLM-5.2, three of four layers reuse tokens of an earlier one."""
    pattern = fields.text("index_topk_pattern", default="")
    if pattern:
        return index >= len(pattern) or pattern[index] != "S"  # Shared
    since = max(index - fields.size("index_skip_topk_offset", default=_FIRST_SHARED_INDEX) + 1, 0)
    return since % fields.size("index_topk_freq", default=1) == 0


def _feed_forward(fields: Fields, index: int) -> FeedForward:
    dense = mlp(fields)
    if not fields.is_set("n_routed_experts"):
        return dense
    first_dense = number_or_zero(fields, "first_k_dense_replace")
    if index < first_dense or index % fields.size("moe_layer_freq", default=1):
        return dense
    width = fields.size("moe_intermediate_size")
    shared = fields.size("n_shared_experts") if fields.is_set("n_shared_experts") else 0
    # A learned bias an expert (vLLM, deepseek_v2.py, e_score_correction_bias).
    balanced = fields.text("topk_method", default="") == "noaux_tc"
    return Experts(
        fields.size("n_routed_experts"),
        fields.size("num_experts_per_tok"),
        width,
        score_bias_bytes=FLOAT32_BYTES if balanced else 0,
        shared_intermediate_size=shared * width,
    )
