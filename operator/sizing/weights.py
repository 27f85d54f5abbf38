"""Bytes of a model's weights on one rank."""

from dataclasses import replace
from enum import Enum, auto
from functools import lru_cache
from typing import Final, NamedTuple

from specdecode_operator.sizing.base.formula import named
from specdecode_operator.sizing.base.remembered import MOST_REMEMBERED
from specdecode_operator.sizing.base.units import ceil_div, round_up
from specdecode_operator.sizing.model.geometry import HeadParts, ModelGeometry
from specdecode_operator.sizing.model.layers import Layer, SelfAttention
from specdecode_operator.sizing.model.precision import ExpertKernel, WeightFormat
from specdecode_operator.sizing.weights.linear_bytes import (
    SCALE_BYTES_FLOAT32,
    attention_scale_bytes,
    keeps_16_bits,
    linear_bytes,
)
from specdecode_operator.sizing.weights.rank_layers import LinearLayer, Split, kv_heads_per_rank, rank_layer
from specdecode_operator.sizing.weights.stages import Stage, whole_model
from specdecode_operator.vocabulary import FLOAT32_BYTES, SIXTEEN_BIT_BYTES, Precision

VOCABULARY_PADDING: Final = 64
"""vLLM pads the vocabulary to it, whatever the tensor parallelism (vocab_parallel_embedding.py)."""

_SEGMENT_FROM: Final = 10 * 2**20
_SEGMENT_BYTES: Final = 2 * 2**20
_SPLIT_FROM: Final = 2**20
"""Constants of torch's caching allocator: kMinLargeAlloc, kRoundLarge, kSmallSize."""

_SIXTEEN_BITS: Final = WeightFormat(Precision.BF16)

_MOST_KINDS: Final = 3
"""Kinds of layers up to which a formula shows each: more make no readable line."""

_FEED_FORWARD: Final = ("mlp", "experts")
"""How the modules of feed-forward layers begin (rank_layers.py)."""


class Tables(Enum):
    """Which of embedding and output head a draft head has for itself."""

    OWN = auto()
    OWN_EMBEDDING = auto()
    SHARED = auto()


def quantized_head_bytes(target: ModelGeometry, quantization: str, tensor: int) -> int:
    """Return a draft's quantized copy of the target's output head, on one rank; the target keeps its own.

    ``quantization`` is a value of ``draft_lm_head_quantization`` (vLLM, quantization/online/lm_head.py): ``fp8`` has a
    float32 scale a row, ``nvfp4`` an FP8 scale for each 16 weights and one of float32 for all.
    """
    rows = padded_vocabulary(target.vocab_size) // tensor
    weights = rows * target.hidden_size
    if quantization == "fp8":
        return weights + rows * SCALE_BYTES_FLOAT32
    return weights // 2 + weights // 16 + SCALE_BYTES_FLOAT32


def padded_vocabulary(tokens: int) -> int:
    """Return the rows of an embedding as vLLM allocates it."""
    return round_up(tokens, VOCABULARY_PADDING)


def parameter_count(geometry: ModelGeometry) -> int:
    """Return the parameters of the whole model as vLLM lays it out, its own embedding included."""
    split, total = Split(1), 0
    for layer, count in geometry.distinct_layers:
        on_rank = rank_layer(layer, geometry.hidden_size, split)
        linears = sum(linear.copies * (linear.inputs * linear.outputs + linear.bias) for linear in on_rank.linears)
        total += count * (linears + on_rank.elements + on_rank.fixed_bytes // 4)
    head = geometry.head
    if head is not None:
        total += head.whole_elements + head.split_elements + head.whole_bytes // 8
    tables = _vocabulary_rows(geometry, whole_model(geometry), Tables.OWN) * geometry.hidden_size
    tower = geometry.tower.split_elements + geometry.tower.whole_elements
    beside = geometry.split_elements + geometry.whole_elements
    return total + tables + geometry.final_norms * geometry.hidden_size + tower + beside


def weight_bytes(
    geometry: ModelGeometry,
    precision: Precision,
    split: Split,
    *,
    stage: Stage | None = None,
    encoder_everywhere: bool = True,
) -> int:
    """Return the bytes of the weights on one rank, without the rotary tables.

    Equal to the parameters of vLLM's classes on the meta device. The split must divide the model (see
    divisibility). Without a stage the rank holds all layers.
    """
    where = stage or whole_model(geometry)
    parts = weight_parts(geometry, precision, split, where, encoder_everywhere=encoder_everywhere)
    return sum(parts.values())


def loaded_head_bytes(
    geometry: ModelGeometry, precision: Precision, split: Split, *, shares_embedding: bool = True
) -> int:
    """Return what stays of a draft's weights once the engine shares the target's output head and embedding.

    The embedding is out of reach where it lies on another pipeline stage.
    """
    tables = Tables.SHARED if shares_embedding else Tables.OWN_EMBEDDING
    return _weight_bytes(geometry, precision, split, whole_model(geometry), tables)


def copied_bytes(geometry: ModelGeometry, tensor: int) -> int:
    """Return what a draft's second copy of its key and value projections takes: one multiplication fills all layers.

    vLLM, qwen3_dflash.py, _build_context_kv_buffers, made while loading from layers in 16 bits. And that of a refiner,
    which is never quantized (qwen3_xpress.py, build_fused_buffers). A Gemma 4 assistant that copies rows of its output
    head gathers that head from all ranks (gemma4_mtp.py, _get_full_lm_head_weight).
    """
    if geometry.head is not None and geometry.head.copied_rows and tensor > 1:
        return geometry.head.output_rows * geometry.hidden_size * geometry.dtype_bytes
    if geometry.head is None or not geometry.head.copies_keys_and_values:
        return 0
    elements = geometry.head.refiner.copied_elements if geometry.head.refiner else 0
    if geometry.checkpoint is not None:
        return elements * geometry.dtype_bytes
    for layer, count in geometry.distinct_layers:
        if isinstance(layer.mixer, SelfAttention):
            mixer = layer.mixer
            rows = 2 * kv_heads_per_rank(mixer.num_kv_heads, tensor) * mixer.head_dim
            elements += count * (rows * (geometry.hidden_size + mixer.qkv_bias) + mixer.head_dim)
    return elements * geometry.dtype_bytes


@lru_cache(maxsize=MOST_REMEMBERED)
def allocation_bytes(geometry: ModelGeometry, precision: Precision, split: Split, *, stage: Stage | None = None) -> int:
    """Return what torch's allocator takes beyond the weights: part of what "Model loading took" says.

    A tensor of 10 MiB and more gets a segment of whole 2 MiB; what is left of
    it counts as taken unless it is more than 1 MiB and can be split off
    (c10/cuda/CUDACachingAllocator.cpp, get_allocation_size and should_split).
    """
    where = stage or whole_model(geometry)
    weight_format = geometry.weight_format(precision)
    total = 0
    for layer, count in where.distinct_layers:
        for linear in rank_layer(layer, geometry.hidden_size, split).linears:
            stored_as = linear_format(linear, layer, weight_format)
            tensor_bytes = linear.copies * linear.inputs * linear.outputs * _weight_bits(stored_as, geometry) // 8
            total += count * _rounding(tensor_bytes)
    rows = padded_vocabulary(geometry.vocab_size) // split.tensor
    tables = _vocabulary_rows(geometry, where, Tables.OWN) // padded_vocabulary(geometry.vocab_size)
    return total + tables * _rounding(rows * geometry.hidden_size * geometry.dtype_bytes)


_WEIGHT_BITS: Final = {Precision.FP8: 8, Precision.INT8: 8}


def _weight_bits(weight_format: WeightFormat, geometry: ModelGeometry) -> int:
    if weight_format.precision is Precision.BF16:
        return 8 * geometry.dtype_bytes
    return _WEIGHT_BITS.get(weight_format.precision, 4)


def _rounding(tensor_bytes: int) -> int:
    if tensor_bytes < _SEGMENT_FROM:
        return 0
    rest = round_up(tensor_bytes, _SEGMENT_BYTES) - tensor_bytes
    return rest if rest <= _SPLIT_FROM else 0


@lru_cache(maxsize=MOST_REMEMBERED)
def _weight_bytes(geometry: ModelGeometry, precision: Precision, split: Split, stage: Stage, tables: Tables) -> int:
    return sum(weight_parts(geometry, precision, split, stage, tables).values())


def weight_parts(  # noqa: PLR0913 (all that it depends on)
    geometry: ModelGeometry,
    precision: Precision,
    split: Split,
    stage: Stage,
    tables: Tables = Tables.OWN,
    *,
    encoder_everywhere: bool = True,
) -> dict[str, int]:
    """Return the bytes of each part of a model on one rank, by what people call it."""
    width, hidden, tensor = geometry.dtype_bytes, geometry.hidden_size, split.tensor
    tower, head = geometry.tower, geometry.head
    rows = _vocabulary_rows(geometry, stage, tables)
    vocabulary = "embedding" if rows == padded_vocabulary(geometry.vocab_size) else "embedding, output head"
    parts = {
        vocabulary: rows // tensor * hidden * width,
        "layers": _scaled(_layers_bytes(geometry, stage, geometry.weight_format(precision), split), geometry),
        # Under V1, and up to 0.32, every stage loads the encoder, though only the first runs it.
        "encoder": (tower.split_elements // tensor + tower.whole_elements) * width,
        "beside the layers": (geometry.split_elements // tensor + geometry.whole_elements) * width,
    }
    if not (stage.is_first or encoder_everywhere):
        parts["encoder"] = 0
    if stage.is_last or geometry.norm_on_every_stage:
        parts["layers"] += named(geometry.final_norms * hidden * width, "of the last norm")
    if head is not None:
        parts["joining layers"] = (head.whole_elements + head.split_elements // tensor) * width + head.whole_bytes
    return parts


def _scaled(layers_bytes: int, geometry: ModelGeometry) -> int:
    """Return the bytes of layers, scaled to those in the files if the model is estimated."""
    in_files, by_shape = geometry.layer_scale
    if in_files == by_shape:
        return layers_bytes
    return named(
        ceil_div(int(layers_bytes) * in_files, by_shape), "in layers as the files hold them", like=layers_bytes
    )


def _layers_bytes(geometry: ModelGeometry, stage: Stage, weight_format: WeightFormat, split: Split) -> int:
    size_bytes = sum(
        named(count, "layers", like=geometry.hidden_size) * sum(layer_bytes(layer, geometry, weight_format, split))
        for layer, count in stage.distinct_layers
    )
    if len(stage.distinct_layers) > _MOST_KINDS:
        return named(size_bytes, f"in layers of {len(stage.distinct_layers)} kinds")
    return size_bytes


class LayerBytes(NamedTuple):
    """One decoder layer on one rank: its linear layers before and in the feed-forward layer, and norms and the like."""

    mixer_bytes: int
    feed_forward_bytes: int
    rest_bytes: int


def layer_bytes(layer: Layer, geometry: ModelGeometry, weight_format: WeightFormat, split: Split) -> LayerBytes:
    """Return the bytes of one decoder layer on one rank, part by part."""
    on_rank = rank_layer(layer, geometry.hidden_size, split)
    mixers = feed_forward = 0
    for linear in on_rank.linears:
        stored_as = linear_format(linear, layer, weight_format)
        beside_bytes = 0
        if stored_as.precision is Precision.MXFP4:
            marlin = stored_as.expert_kernel is ExpertKernel.MARLIN
            # The same layer, as its kernel wants it.
            linear = _padded_for_marlin(linear) if marlin else _padded_for_triton(linear)  # noqa: PLW2901
            beside_bytes = 0 if marlin else _beside_triton_bytes(stored_as, linear)
        size_bytes = linear.copies * (
            linear_bytes(stored_as, linear, geometry.dtype_bytes) + linear.bias * geometry.dtype_bytes + beside_bytes
        )
        if linear.module.startswith(_FEED_FORWARD):
            feed_forward += size_bytes
        else:
            mixers += size_bytes
    scales = sum(attention_scale_bytes(weight_format, mixer) for mixer in layer.mixers)
    rest = on_rank.elements * geometry.dtype_bytes + on_rank.fixed_bytes + scales
    return LayerBytes(
        named(mixers, "attention" if geometry.attentions else "mixer"),
        named(feed_forward, "feed-forward"),
        named(rest, "norms" if weight_format.precision is Precision.BF16 else "norms and scales"),
    )


def _padded_for_marlin(linear: LinearLayer) -> LinearLayer:
    """Return experts in MXFP4 as the Marlin kernel of Hopper pads them (vLLM, quantization/utils/mxfp4_utils.py).

    The hidden size to 256, the width of an expert's part to 128: 65.9 GiB for gpt-oss-120b on one GPU.
    """
    if linear.widens:
        inputs, outputs = round_up(linear.inputs, 256), 2 * round_up(linear.outputs // 2, 128)
    else:
        inputs, outputs = round_up(linear.inputs, 128), round_up(linear.outputs, 256)
    return replace(linear, inputs=inputs, outputs=outputs, bias=outputs if linear.bias else 0)


def _padded_for_triton(linear: LinearLayer) -> LinearLayer:
    """Return experts in MXFP4 as Triton's kernel takes them: the width of an expert's part rounded to 64.

    vLLM, fused_moe/oracle/mxfp4.py, mxfp4_round_up_hidden_size_and_intermediate_size.
    """
    if linear.widens:
        outputs = 2 * round_up(linear.outputs // 2, 64)
        return replace(linear, outputs=outputs, bias=outputs if linear.bias else 0)
    return replace(linear, inputs=round_up(linear.inputs, 64))


def _beside_triton_bytes(stored_as: WeightFormat, linear: LinearLayer) -> int:
    """Return by how much Triton's scales and biases are larger than those of the checkpoint.

    Scales: 4 groups and 256 outputs at a time (vLLM, quantization/utils/mxfp4_utils.py, _swizzle_mxfp4, and
    triton_kernels, layout_details/hopper_scale.py, swizzle_data); biases: float32 (fused_moe/oracle/mxfp4.py).
    """
    groups = linear.inputs // stored_as.group_size
    stored_bytes = groups * linear.outputs
    swizzled_bytes = round_up(groups, 4) * round_up(linear.outputs, 256)
    kept_bytes = stored_bytes if stored_as.expert_kernel is ExpertKernel.TRITON_BESIDE_SCALES else 0
    return swizzled_bytes - stored_bytes + kept_bytes + linear.bias * (FLOAT32_BYTES - SIXTEEN_BIT_BYTES)


def linear_format(linear: LinearLayer, layer: Layer, weight_format: WeightFormat) -> WeightFormat:
    """Return how one linear layer of a quantized model is stored."""
    if not linear.quantizable or linear.module in layer.unquantized or keeps_16_bits(weight_format, linear):
        return _SIXTEEN_BITS
    return (weight_format.expert_format if linear.routed else None) or weight_format


def _vocabulary_rows(geometry: ModelGeometry, stage: Stage, tables: Tables) -> int:
    """Return the rows of embedding and output head that a rank's stage holds, before they are split."""
    embedding = padded_vocabulary(geometry.vocab_size)
    head = geometry.head
    if head is not None:
        return _head_rows(head, embedding, tables)
    if geometry.tables_on_every_stage:
        return (1 if geometry.tie_word_embeddings else 2) * embedding
    # A tied output head needs the embedding on the last stage, too (vLLM, the models' __init__).
    tied_here = stage.is_last and geometry.tie_word_embeddings
    has_embedding = stage.is_first or tied_here or geometry.embedding_on_every_stage
    has_output_head = stage.is_last and not geometry.tie_word_embeddings
    return (has_embedding + has_output_head) * embedding


def _head_rows(head: HeadParts, embedding: int, tables: Tables) -> int:
    embeds = head.embeds and not (tables is Tables.SHARED and head.shares_embedding)
    outputs = head.output_heads if tables is Tables.OWN or not head.shares_output else 0
    return embedding * embeds + outputs * (padded_vocabulary(head.output_rows) if head.output_rows else 0)
