"""Gemma: windows in most layers, norms before and after each half, tied embeddings."""

from dataclasses import replace
from typing import Final

from specdecode_operator.sizing.base.fields import Fields
from specdecode_operator.sizing.base.units import round_up
from specdecode_operator.sizing.families.decoder import (
    FULL,
    SLIDING,
    Decoder,
    Heads,
    assemble,
    attention,
    first_that_borrows,
    heads,
    layer_types,
    mlp,
    model_rope,
    with_defaults,
)
from specdecode_operator.sizing.families.heads import TOKEN_ID_BYTES
from specdecode_operator.sizing.model.geometry import HeadParts, ModelGeometry, Tower
from specdecode_operator.sizing.model.layers import Experts, FeedForward, SelfAttention
from specdecode_operator.sizing.model.rope import RopeTable, rope_table

VOCABULARY_PADDING: Final = 64
"""Rows of every table are padded to it (vLLM, vocab_parallel_embedding.py)."""

_GEMMA2_DEFAULTS: Final = {"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096}
"""What Gemma2Config of transformers fills in."""

_GEMMA3_DEFAULTS: Final = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
"""What Gemma3TextConfig of transformers fills in; Google's files leave much of it out."""

_GEMMA4_DEFAULTS: Final = {
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "num_kv_shared_layers": 0,
}
"""What Gemma4TextConfig of transformers fills in."""

_BACKBONE_WIDTH: Final = 1536
_CENTROIDS: Final = 2048
_CHOSEN_CENTROIDS: Final = 32
"""What Gemma4AssistantConfig of transformers fills in."""

_GEMMA3_PATTERN: Final = 6
"""One layer in so many sees everything."""

_NORMS: Final = 4
_NORMS_WITH_EXPERTS: Final = 7
"""Norms of a layer: before and after each half, and before and after what stands beside each other."""


def gemma2(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Gemma 2: every other layer sees a window, four norms a layer."""
    fields = with_defaults(fields, _GEMMA2_DEFAULTS)
    sizes = heads(fields)
    bias = fields.flag("attention_bias")
    mixer = attention(sizes, qkv_bias=bias, output_bias=bias)
    kinds = layer_types(fields, lambda index: FULL if index % 2 else SLIDING)
    ropes = (model_rope(fields, sizes.dim),)
    return assemble(fields, architecture, _gemma_decoder(fields, mixer, kinds, ropes, tower))


def gemma3(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Gemma 3: one layer in six sees everything and has rotary positions of its own."""
    fields = with_defaults(fields, _GEMMA3_DEFAULTS)
    sizes = heads(fields)
    bias = fields.flag("attention_bias")
    mixer = attention(sizes, qkv_bias=bias, output_bias=bias, qk_norm=True)
    pattern = fields.size("sliding_window_pattern", default=_GEMMA3_PATTERN)
    kinds = layer_types(fields, lambda index: SLIDING if (index + 1) % pattern else FULL)
    ropes = gemma3_ropes(fields, sizes)
    return assemble(fields, architecture, _gemma_decoder(fields, mixer, kinds, ropes, tower))


def gemma4(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Gemma 4: layers that see everything have wider heads; experts, where there are any, stand beside the MLP.

    In the small models (E2B, E4B) every layer has an input of its own, and the last layers borrow keys and values.
    """
    fields = with_defaults(fields, _GEMMA4_DEFAULTS)
    windowed, wide = _gemma4_attention(fields)
    kinds = layer_types(fields, lambda index: SLIDING if (index + 1) % _GEMMA3_PATTERN else FULL)
    first_borrower = first_that_borrows(fields, kinds, _whole_number(fields, "num_kv_shared_layers"))
    own, borrowers = gemma4_feed_forwards(fields)
    own_input = _whole_number(fields, "hidden_size_per_layer_input")
    decoder = Decoder(
        mixer=lambda index: replace(
            windowed if kinds[index] == SLIDING else wide, borrows_cache=index >= first_borrower
        ),
        feed_forward=lambda index: own if index < first_borrower else borrowers,
        ropes=gemma4_ropes(fields, wide.head_dim, windowed.head_dim),
        norms=_NORMS_WITH_EXPERTS if isinstance(own, Experts) else _NORMS,
        tied=True,
        tower=tower or Tower(),
        embedding_on_every_stage=True,
        norm_on_every_stage=True,
        own_input_size=own_input,
    )
    model = assemble(fields, architecture, decoder)
    inputs = own_input * len(kinds)
    rows = round_up(fields.size("vocab_size_per_layer_input"), VOCABULARY_PADDING)
    # The table of the layers' inputs, the projection of the embedding to them, and their norm.
    return replace(model, split_elements=inputs * (rows + model.hidden_size), whole_elements=own_input)


def gemma4_assistant(fields: Fields, architecture: str, _tower: Tower | None = None) -> ModelGeometry:
    """Gemma 4 assistant: drafts from the target's hidden states, keys and values (vLLM, gemma4_mtp.py).

    Its layers have queries alone. It embeds tokens by the target's table, and keeps its own as output head, whatever
    its file ties (v1/worker/gpu/spec_decode/gemma4/speculator.py, _share_embeddings). Both projections between its
    width and the target's are divided over the ranks. With ``use_ordered_embeddings`` it scores only the tokens of
    some centroids, whose rows it copies (Gemma4MTPMaskedEmbedder).
    """
    fields = with_defaults(fields, _GEMMA4_DEFAULTS)
    windowed, wide = (replace(mixer, borrows_cache=True) for mixer in _gemma4_attention(fields))
    kinds = layer_types(fields, lambda index: SLIDING if (index + 1) % _GEMMA3_PATTERN else FULL)
    feed_forward = mlp(fields)
    decoder = Decoder(
        mixer=lambda index: windowed if kinds[index] == SLIDING else wide,
        feed_forward=lambda _: feed_forward,
        ropes=gemma4_ropes(fields, wide.head_dim, windowed.head_dim),
        norms=_NORMS,
        tied=True,
    )
    model = assemble(fields, architecture, decoder)
    size, rows = model.hidden_size, model.vocab_size
    backbone = fields.size("backbone_hidden_size", default=_BACKBONE_WIDTH)
    centroids = fields.size("num_centroids", default=_CENTROIDS) if fields.flag("use_ordered_embeddings") else 0
    chosen = fields.size("centroid_intermediate_top_k", default=_CHOSEN_CENTROIDS)
    head = HeadParts(
        output_rows=rows,
        embeds=False,
        shares_embedding=False,
        shares_output=False,
        whole_elements=centroids * size,
        whole_bytes=rows * TOKEN_ID_BYTES if centroids else 0,
        split_elements=3 * backbone * size,
        reads_width=backbone,
        returns_width=backbone,
        copied_rows=chosen * (rows // centroids) if centroids else 0,
    )
    return replace(model, head=head)


def _gemma4_attention(fields: Fields) -> tuple[SelfAttention, SelfAttention]:
    """Return the attention of layers that see a window, and of those that see everything."""
    bias = fields.flag("attention_bias")
    windowed = attention(
        heads(fields), qkv_bias=bias, output_bias=bias, qk_norm=True, window_tokens=fields.size("sliding_window")
    )
    wide = replace(
        windowed,
        num_kv_heads=fields.size("num_global_key_value_heads", default=windowed.num_kv_heads),
        head_dim=fields.size("global_head_dim"),
        window_tokens=None,
    )
    return windowed, wide


def gemma4_feed_forwards(fields: Fields) -> tuple[FeedForward, FeedForward]:
    """Return the second half of a layer, and of one that borrows keys and values (vLLM, Gemma4DecoderLayer)."""
    dense = mlp(fields)
    borrower = replace(dense, intermediate_size=2 * dense.intermediate_size)
    if not fields.is_set("num_experts"):
        return dense, borrower if fields.flag("use_double_wide_mlp") else dense
    experts = Experts(
        fields.size("num_experts"),
        fields.size("top_k_experts"),
        fields.size("moe_intermediate_size"),
        shared_intermediate_size=dense.intermediate_size,
        beside_mlp=True,
    )
    return experts, experts


def _whole_number(fields: Fields, key: str) -> int:
    """Return a size that may be zero."""
    return 0 if fields.values[key] == 0 else fields.size(key)


def gemma4_ropes(fields: Fields, wide_dim: int, dim: int) -> tuple[RopeTable, ...]:
    """Return the tables of layers that see everything and of those that see a window."""
    nested = fields.section("rope_parameters") or fields
    longest = fields.size("max_position_embeddings")
    return tuple(
        rope_table(_rope_of(nested, kind), head_dim, longest) for kind, head_dim in ((FULL, wide_dim), (SLIDING, dim))
    )


def gemma3_ropes(fields: Fields, sizes: Heads) -> tuple[RopeTable, ...]:
    """Return the tables of layers that see everything and of those that see a window."""
    longest = fields.size("max_position_embeddings")
    nested = fields.section("rope_parameters")
    if nested is not None and nested.section(FULL) is not None:
        tables = [_rope_of(nested, kind) for kind in (FULL, SLIDING)]
    else:
        local = {"rope_theta": fields.values.get("rope_local_base_freq")}
        tables = [fields, fields.having(local, {"rope_theta": fields.path("rope_local_base_freq")})]
    return tuple(rope_table(table, sizes.dim, longest) for table in tables)


def _rope_of(nested: Fields, kind: str) -> Fields:
    """Return the rope parameters of one kind of layer, where files otherwise have those of all."""
    return nested.having({"rope_parameters": nested.values.get(kind)}, {"rope_parameters": nested.path(kind)})


def _gemma_decoder(
    fields: Fields, mixer: SelfAttention, kinds: tuple[str, ...], ropes: tuple[RopeTable, ...], tower: Tower | None
) -> Decoder:
    """Return Gemma's arrangement: windows in some layers, four norms a layer, tied embeddings."""
    windowed = replace(mixer, window_tokens=fields.size("sliding_window"))
    feed_forward = mlp(fields)
    return Decoder(
        mixer=lambda index: windowed if kinds[index] == SLIDING else mixer,
        feed_forward=lambda _: feed_forward,
        ropes=ropes,
        norms=_NORMS,
        tied=True,
        tower=tower or Tower(),
        norm_on_every_stage=True,
    )
