"""Draft heads that propose a whole block in one pass: DFlash, with XPress or without, and DSpark."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from specdecode_operator.sizing.base.fields import Fields
from specdecode_operator.sizing.base.units import round_up
from specdecode_operator.sizing.families.decoder import (
    SLIDING,
    Decoder,
    Heads,
    assemble,
    attention,
    heads,
    mlp,
    model_rope,
)
from specdecode_operator.sizing.families.heads import TOKEN_ID_BYTES
from specdecode_operator.sizing.model.geometry import HeadParts, ModelGeometry, Refiner, Tower
from specdecode_operator.sizing.model.layers import SelfAttention
from specdecode_operator.sizing.weights.weights import VOCABULARY_PADDING
from specdecode_operator.vocabulary import FLOAT32_BYTES

_SIDES: Final = 2
"""A convolution of DFlash 2 works on what goes into half a layer, and on what comes out."""

_SELECTOR_RANK: Final = 256
"""Width of the selector of the published DFlash 2 heads, for files that were shortened; vLLM itself wants the key."""

_RANK: Final = 256
_MLP_WIDTH: Final = 512
_CANDIDATES: Final = 512
_STEPS: Final = 15
"""What files of XPress heads mean that do not say (vLLM, qwen3_xpress.py, Qwen3XPressModel)."""


_SPECULATORS: Final[Mapping[str, str]] = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",
}
"""Class of the block heads in the format of vLLM's speculators library, by their ``speculators_model_type``."""

_OUTSIDE_THE_LAYERS: Final = (
    *("draft_vocab_size", "target_hidden_size", "speculators_config"),
    *("markov_rank", "block_size", "enable_confidence_head", "confidence_head_with_markov"),
)
_OPTIONS: Final = ("sample_from_anchor", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Keys of that format beside the section of the layers, and those that vLLM moves to dflash_config."""


def as_engine_reads(fields: Fields) -> Fields:
    """Return the config.json of a block head in the speculators library's format as vLLM rewrites it; others as is.

    vLLM, transformers_utils/configs/speculators/algos.py, update_dflash, update_dflash2 and update_dspark.
    """
    kind = _SPECULATORS.get(fields.text("speculators_model_type", default=""))
    section = fields.section("transformer_layer_config")
    if kind is None or section is None:
        return fields
    layers = fields.values.get("aux_hidden_state_layer_ids")
    if not isinstance(layers, list | tuple) or not layers:
        raise fields.error("aux_hidden_state_layer_ids", "must list layers of the target; copy the head's config.json")
    outer = {key: fields.values[key] for key in _OUTSIDE_THE_LAYERS if fields.is_set(key)}
    if kind != _SPECULATORS["dspark"]:
        # Only DSpark is bound to the blocks that it was trained with.
        outer.pop("block_size", None)
    options = {key: fields.values[key] for key in _OPTIONS if fields.is_set(key)}
    values = {
        **section.values,
        **outer,
        "architectures": [kind],
        "dflash_config": options,
        "eagle_aux_hidden_state_layer_ids": layers,
    }
    paths = {key: section.path(key) for key in section.values if key not in outer}
    return fields.having(values, {**paths, **{key: key for key in outer}})


def dflash(fields: Fields, architecture: str, _tower: Tower | None = None) -> ModelGeometry:
    """DFlash: Qwen3 layers that read the target's hidden states as their context (vLLM, qwen3_dflash.py).

    All its layers keep keys and values of the context. One place of a block
    is the token that verification gave, so it proposes one fewer.
    """
    if fields.text("model_type", default="qwen3") == "dflash":
        raise fields.error("model_type", "vLLM knows no such type and would not start; its DFlash heads are of qwen3")
    options = fields.section("dflash_config") or Fields(fields.model, {})
    block = fields.size("block_size") if fields.is_set("block_size") else None
    most_tokens = None if block is None else block - (not options.flag("sample_from_anchor"))
    return _block_head(fields, options, architecture, _parts(fields, options, most_tokens=most_tokens))


def dflash2(fields: Fields, architecture: str, _tower: Tower | None = None) -> ModelGeometry:
    """DFlash 2: DFlash with convolutions around both halves of each layer, and a selector (vLLM, qwen3_dflash2.py).

    A convolution (DFlashGroupedConv) has two sides: for each its taps a channel, and a projection of the hidden state
    to as many taps a group of channels. The selector (CandidateSelector) has two tables of ``selector_rank`` columns
    and a projection into that width. All of it is whole on every rank, and counted in 16 bits.
    """
    options = fields.section("dflash_config") or Fields(fields.model, {})
    size, taps = fields.size("hidden_size"), options.size("conv_kernel_size")
    group = options.size("conv_group_size")
    if size % group:
        raise options.error("conv_group_size", f"vLLM refuses what does not divide the hidden size of {size}")
    convolution = _SIDES * taps * (size + size // group * size)
    selector = options.size("selector_rank", _SELECTOR_RANK) * (2 * fields.size("vocab_size") + size)
    home = fields if fields.is_set("block_size") else options
    most_tokens = home.size("block_size") - 1 if home.is_set("block_size") else None
    parts = _parts(fields, options, most_tokens=most_tokens)
    convolutions = 2 * fields.size("num_hidden_layers") * convolution
    parts = replace(parts, whole_elements=parts.whole_elements + convolutions + selector)
    return _block_head(fields, options, architecture, parts)


def xpress(fields: Fields, architecture: str, _tower: Tower | None = None) -> ModelGeometry:
    """XPress: DFlash whose blocks are refined before they are verified (vLLM, qwen3_xpress.py, XPressRefinerHead).

    The refiner is two tables of ``xpress_rank`` columns, projections into
    that width, what mixes the places of a block, and an MLP. All but the first
    table and the projections of hidden states is kept a second time, turned
    (build_fused_buffers).
    """
    options = fields.section("dflash_config") or Fields(fields.model, {})
    if fields.flag("sample_from_anchor") or options.flag("sample_from_anchor"):
        raise fields.error("sample_from_anchor", "vLLM does not start with an XPress head that was trained so")
    vocabulary, size = fields.size("vocab_size"), fields.size("hidden_size")
    if _draft_vocabulary(fields) != vocabulary:
        raise fields.error("draft_vocab_size", "vLLM starts with XPress heads of the target's whole vocabulary alone")
    rank, width = fields.size("xpress_rank", _RANK), fields.size("xpress_mlp_hidden", _MLP_WIDTH)
    places = fields.size("xpress_block_size", fields.size("num_speculative_steps", _STEPS) + 1)
    copied = rank * (3 * rank + places * places + 3 * width + vocabulary)
    parts = _parts(fields, options, most_tokens=places - 1)
    parts = replace(
        parts,
        whole_elements=parts.whole_elements + copied + rank * (vocabulary + 2 * size),
        refiner=Refiner(rank, places, _candidates(fields, vocabulary), copied),
    )
    return _block_head(fields, options, architecture, parts)


def _candidates(fields: Fields, vocabulary: int) -> int:
    """Return from how many tokens it chooses; 0 for all (config/speculative.py, xpress_topc)."""
    if fields.values.get("xpress_topc") == 0:
        return 0
    candidates = fields.size("xpress_topc", min(_CANDIDATES, vocabulary))
    if candidates > vocabulary:
        raise fields.error("xpress_topc", f"vLLM refuses more than the vocabulary of {vocabulary}")
    return candidates


def dspark(fields: Fields, architecture: str, _tower: Tower | None = None) -> ModelGeometry:
    """DSpark on Qwen3: DFlash with heads for transitions and confidence, whole on every rank (vLLM, qwen3_dspark.py).

    The transitions are two tables of ``markov_rank`` columns; vLLM pads only the second.
    """
    if fields.text("model_type", default="qwen3") != "qwen3":
        raise fields.unmodelled("model_type", "only DSpark heads of type qwen3 can be sized")
    options = fields.section("dflash_config") or Fields(fields.model, {})
    if not fields.is_set("markov_rank"):
        raise fields.error(
            "markov_rank",
            "is missing; vLLM reads it, as enable_confidence_head and confidence_head_with_markov, only from the "
            "top level of config.json: copy them there from dflash_config",
        )
    rank, size = fields.size("markov_rank"), fields.size("hidden_size")
    tables = (fields.size("vocab_size") + round_up(_draft_vocabulary(fields), VOCABULARY_PADDING)) * rank
    confidence = 0
    if fields.flag("enable_confidence_head"):
        # One row and its bias, in 32 bits.
        confidence = (size + rank * fields.flag("confidence_head_with_markov") + 1) * FLOAT32_BYTES
    block = fields.size("block_size") if fields.is_set("block_size") else None
    parts = _parts(fields, options, most_tokens=block)
    parts = replace(parts, whole_elements=parts.whole_elements + tables, whole_bytes=parts.whole_bytes + confidence)
    return _block_head(fields, options, architecture, parts)


def _block_head(fields: Fields, options: Fields, architecture: str, parts: HeadParts) -> ModelGeometry:
    sizes = heads(fields)
    feed_forward = mlp(fields)
    kinds = fields.strings("layer_types")

    def mixer(index: int) -> SelfAttention:
        return _attention(fields, options, sizes, kinds, index)

    decoder = Decoder(mixer, lambda _: feed_forward, (model_rope(fields, sizes.dim),))
    return replace(assemble(fields, architecture, decoder), head=parts)


def _attention(fields: Fields, options: Fields, sizes: Heads, kinds: tuple[str, ...], index: int) -> SelfAttention:
    """Return the attention of one layer; use_swa gives all a window where the file marks none (qwen3_dflash.py)."""
    marked = SLIDING in kinds
    windowed = kinds[index] == SLIDING if marked and index < len(kinds) else options.flag("use_swa")
    window = None
    if windowed:
        home = options if options.is_set("swa_window_size") else fields
        window = home.size("swa_window_size" if home is options else "sliding_window")
    bias = fields.flag("attention_bias")
    sinks = options.flag("attention_sink_bias", default=fields.flag("add_swa_attention_sink_bias"))
    return attention(sizes, qkv_bias=bias, output_bias=bias, qk_norm=True, sinks=sinks, window_tokens=window)


def _parts(fields: Fields, options: Fields, *, most_tokens: int | None) -> HeadParts:
    size = fields.size("hidden_size")
    states = _joined_states(fields, options)
    reads_width = fields.size("target_hidden_size", default=size)
    rows = _draft_vocabulary(fields)
    token_map_bytes = 0 if rows == fields.size("vocab_size") else rows * TOKEN_ID_BYTES
    return HeadParts(
        output_rows=rows,
        shares_embedding=True,
        shares_output=True,
        # The projection of the target's states, their norm, and the embedding of a place to fill.
        whole_elements=reads_width * states * size + 2 * size,
        whole_bytes=token_map_bytes,
        token_map_bytes=token_map_bytes,
        most_tokens=most_tokens,
        auxiliary_states=states,
        copies_keys_and_values=True,
        reads_width=reads_width,
    )


def _draft_vocabulary(fields: Fields) -> int:
    return fields.size("draft_vocab_size", default=fields.size("vocab_size"))


def _joined_states(fields: Fields, options: Fields) -> int:
    """Return how many hidden states of the target it reads: one for each layer named, or as many as it has layers.

    vLLM, eagle3_utils.py, get_eagle3_aux_layers_from_config.
    """
    named = (
        fields.values.get("eagle_aux_hidden_state_layer_ids"),
        options.values.get("target_layer_ids"),
        fields.values.get("dspark_target_layer_ids"),
        fields.values.get("target_layer_ids"),
    )
    layers = next((ids for ids in named if isinstance(ids, list | tuple) and ids), None)
    return fields.size("num_hidden_layers") if layers is None else len(layers)
