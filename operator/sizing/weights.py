"""Bytes of a model's weights on one rank, and whether a checkpoint's size matches its config.json.

Bytes of quantized linear layers equal the parameter bytes of vLLM 0.32's layer classes on the meta device.
"""

import math
from dataclasses import replace
from enum import Enum, auto
from functools import lru_cache
from typing import Final, NamedTuple

from specdecode_operator.enums import FLOAT32_BYTES, SIXTEEN_BIT_BYTES, Precision
from specdecode_operator.sizing.arithmetic import MIB, ceil_div, format_gib, named, round_up
from specdecode_operator.sizing.geometry import (
    ExpertKernel,
    LatentAttention,
    Layer,
    ModelGeometry,
    QuantizationMethod,
    Scales,
    SelfAttention,
    SingleMixer,
    StoredWeights,
    WeightFormat,
    padded_vocabulary,
)
from specdecode_operator.sizing.rank_layers import (
    ROUTER,
    LinearLayer,
    Split,
    Stage,
    kv_heads_per_rank,
    rank_layer,
    whole_model,
)
from specdecode_operator.sizing.result_cache import MEMO_SIZE

_SCALE_BYTES: Final = 4
"""Scales of 8-bit weights and scales for whole tensors are float32 (vLLM, fp8_utils.py, create_fp8_scale_parameter).
Scales of packed integers have the model's 16-bit type."""

_SMALLEST_REFINED_BLOCK: Final = 32
"""Minimum edge of the blocks of experts (vLLM, fused_moe/oracle/fp8.py, refine_fp8_moe_block_shape)."""

_SHOWN_KINDS: Final = 3
"""Maximum kinds of layers that a formula shows one by one."""

_SIXTEEN_BITS: Final = WeightFormat(Precision.BF16)
_AWQ_AND_GPTQ: Final = (QuantizationMethod.AWQ, QuantizationMethod.GPTQ)


def linear_bytes(weight_format: WeightFormat, linear: LinearLayer, dtype_bytes: int = SIXTEEN_BIT_BYTES) -> int:
    """Return the bytes of one copy of a linear layer on a rank, with scales, without bias.

    ``dtype_bytes`` is the size of an unquantized element. Scales in the model's type have 16 bits: vLLM multiplies
    quantized layers in 16 bits only.
    """
    weights = linear.inputs * linear.outputs
    match weight_format.scales:
        case Scales.NONE:
            return dtype_bytes * weights
        case Scales.TENSOR:
            # Experts share one input scale for gate and up.
            inputs = (1 if linear.routed else len(linear.parts)) * weight_format.static_inputs
            return weights + (len(linear.parts) + inputs) * _SCALE_BYTES
        case Scales.CHANNEL:
            return weights + linear.outputs * _SCALE_BYTES
        case Scales.BLOCK:
            edge = (
                refined_block(weight_format.group_size, linear) if linear.routed else None
            ) or weight_format.group_size
            parts = linear.parts if linear.routed else (linear.outputs,)
            return weights + ceil_div(linear.inputs, edge) * sum(ceil_div(part, edge) for part in parts) * _SCALE_BYTES
        case Scales.MICROSCALE:
            # One byte a group: the exponent of MXFP4, the FP8 scale of NVFP4. NVFP4 has scales for whole tensors too,
            # and its experts always have those of their inputs.
            scales = linear.inputs // weight_format.group_size * linear.outputs
            whole = len(linear.parts) * (1 + (weight_format.static_inputs or linear.routed))
            whole = whole if weight_format.precision is Precision.NVFP4 else 0
            return ceil_div(weights, 2) + scales + whole * _SCALE_BYTES
        case Scales.GROUP:
            return _packed_bytes(weight_format, linear)


def _packed_bytes(weight_format: WeightFormat, linear: LinearLayer) -> int:
    bits = 4 if weight_format.precision is Precision.INT4 else 8
    group_size, zero_points = weight_format.group_size, weight_format.zero_points
    if linear.routed and weight_format.method in _AWQ_AND_GPTQ and not takes_marlin(group_size, linear):
        group_size = common_group(group_size, linear) or group_size
        zero_points = weight_format.method is QuantizationMethod.AWQ
    groups = max(1, linear.inputs // group_size) if group_size else 1
    size_bytes = linear.outputs * ceil_div(linear.inputs * bits, 8) + groups * linear.outputs * SIXTEEN_BIT_BYTES
    if zero_points:
        # Packed into int32.
        size_bytes += groups * ceil_div(linear.outputs * bits, 32) * 4
    if weight_format.method is QuantizationMethod.COMPRESSED_TENSORS:
        # weight_shape: two int64 beside each packed weight (vLLM, compressed_tensors_wNa16.py), or two numbers per
        # expert in the model's type (compressed_tensors_moe_wna16.py).
        size_bytes += 4 if linear.routed else 16
    return size_bytes


def refined_block(edge: int, linear: LinearLayer) -> int | None:
    """Return the edge of the blocks that vLLM cuts an expert's blocks into; None if it rejects them.

    If a rank's part of an expert is not divisible by it, the edge is the largest common divisor with the part and the
    hidden size (vLLM, fused_moe/oracle/fp8.py, refine_fp8_moe_block_shape).
    """
    part = linear.parts[0] if linear.widens else linear.inputs
    if part % edge == 0:
        return edge
    refined = math.gcd(edge, linear.inputs, linear.parts[0])
    return refined if refined >= _SMALLEST_REFINED_BLOCK else None


def common_group(group_size: int, linear: LinearLayer) -> int | None:
    """Return the group of experts in AWQ or GPTQ if Marlin does not take theirs; None if no other kernel does.

    It is halved until it divides the expert's part and the hidden size (vLLM, moe_wna16.py, create_weights).
    """
    while group_size and (linear.inputs % group_size or linear.parts[0] % group_size):
        group_size //= 2
    return group_size if group_size >= _SMALLEST_REFINED_BLOCK else None


def takes_marlin(group_size: int, linear: LinearLayer) -> bool:
    """Return whether Marlin takes experts of AWQ or GPTQ (vLLM, marlin_utils.py, check_moe_marlin_supports_config)."""
    part, hidden = (linear.parts[0], linear.inputs) if linear.widens else (linear.inputs, linear.outputs)
    whole_groups = group_size == 0 or part % group_size == 0
    return whole_groups and hidden % 128 == 0 and group_size in (0, 32, 64, 128)


class Tables(Enum):
    """Which of embedding and output head a draft head holds itself."""

    OWN = auto()
    OWN_EMBEDDING = auto()
    SHARED = auto()


def quantized_head_bytes(target: ModelGeometry, quantization: str, tensor: int) -> int:
    """Return the bytes of a draft's quantized copy of the target's output head, on one rank.

    ``quantization`` is a value of ``draft_lm_head_quantization`` (vLLM, quantization/online/lm_head.py): ``fp8`` has a
    float32 scale a row, ``nvfp4`` an FP8 scale for each 16 weights and one of float32 for all.
    """
    rows = padded_vocabulary(target.vocab_size) // tensor
    weights = rows * target.hidden_size
    if quantization == "fp8":
        return weights + rows * _SCALE_BYTES
    return weights // 2 + weights // 16 + _SCALE_BYTES


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
    tensor_parallel.py). Without a stage the rank holds all layers.
    """
    where = stage or whole_model(geometry)
    return sum(weight_parts(geometry, precision, split, where, encoder_everywhere=encoder_everywhere).values())


@lru_cache(maxsize=MEMO_SIZE)
def loaded_head_bytes(geometry: ModelGeometry, precision: Precision, split: Split) -> int:
    """Return the bytes of a draft's weights after the engine shares the target's output head and embedding."""
    return sum(weight_parts(geometry, precision, split, whole_model(geometry), Tables.SHARED).values())


def copied_bytes(geometry: ModelGeometry, tensor: int) -> int:
    """Return the bytes of a draft's second copy of its key and value projections: one multiplication fills all layers.

    vLLM, qwen3_dflash.py, _build_context_kv_buffers, made while loading from layers in 16 bits. A refiner is copied
    too, and never quantized (qwen3_xpress.py, build_fused_buffers). A Gemma 4 assistant that copies rows of its output
    head gathers that head from all ranks (gemma4_mtp.py, _get_full_lm_head_weight).
    """
    head = geometry.head
    if head is not None and head.copied_rows and tensor > 1:
        return head.output_rows * geometry.hidden_size * geometry.dtype_bytes
    if head is None or not head.copies_keys_and_values:
        return 0
    elements = head.refiner.copied_elements if head.refiner else 0
    for layer, count in geometry.distinct_layers if geometry.checkpoint is None else ():
        if isinstance(mixer := layer.mixer, SelfAttention):
            rows = 2 * kv_heads_per_rank(mixer.num_kv_heads, tensor) * mixer.head_dim
            elements += count * (rows * (geometry.hidden_size + mixer.qkv_bias) + mixer.head_dim)
    return elements * geometry.dtype_bytes


@lru_cache(maxsize=MEMO_SIZE)
def allocation_bytes(geometry: ModelGeometry, precision: Precision, split: Split, *, stage: Stage | None = None) -> int:
    """Return the bytes that torch's allocator takes beyond the weights: part of "Model loading took".

    A tensor of 10 MiB and more gets a segment of whole 2 MiB. Its rest counts as taken unless it is more than 1 MiB and
    can be split off (c10/cuda/CUDACachingAllocator.cpp, get_allocation_size and should_split).
    """
    where = stage or whole_model(geometry)
    weight_format = geometry.weight_format(precision)

    def rounding(tensor_bytes: int) -> int:
        rest = round_up(tensor_bytes, 2 * MIB) - tensor_bytes
        # kMinLargeAlloc, kRoundLarge and kSmallSize.
        return rest if tensor_bytes >= 10 * MIB and rest <= MIB else 0

    total = 0
    bits = {Precision.BF16: 8 * geometry.dtype_bytes, Precision.FP8: 8, Precision.INT8: 8}
    for layer, count in where.distinct_layers:
        for linear in rank_layer(layer, geometry.hidden_size, split).linears:
            width = bits.get(linear_format(linear, layer, weight_format).precision, 4)
            total += count * rounding(linear.copies * linear.inputs * linear.outputs * width // 8)
    rows = padded_vocabulary(geometry.vocab_size) // split.tensor
    tables = _vocabulary_rows(geometry, where, Tables.OWN) // padded_vocabulary(geometry.vocab_size)
    return total + tables * rounding(rows * geometry.hidden_size * geometry.dtype_bytes)


def weight_parts(  # noqa: PLR0913 (all that it depends on)
    geometry: ModelGeometry,
    precision: Precision,
    split: Split,
    stage: Stage,
    tables: Tables = Tables.OWN,
    *,
    encoder_everywhere: bool = True,
) -> dict[str, int]:
    """Return the bytes of each part of a model on one rank, by its name in words."""
    width, hidden, tensor = geometry.dtype_bytes, geometry.hidden_size, split.tensor
    tower, head = geometry.tower, geometry.head
    rows = _vocabulary_rows(geometry, stage, tables)
    vocabulary = "embedding" if rows == padded_vocabulary(geometry.vocab_size) else "embedding, output head"
    parts = {
        vocabulary: rows // tensor * hidden * width,
        "layers": _layers_bytes(geometry, stage, geometry.weight_format(precision), split),
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


def _layers_bytes(geometry: ModelGeometry, stage: Stage, weight_format: WeightFormat, split: Split) -> int:
    """Return the bytes of a stage's layers, scaled to those in the files if the model is estimated."""
    size_bytes = sum(
        named(count, "layers", like=geometry.hidden_size) * sum(layer_bytes(layer, geometry, weight_format, split))
        for layer, count in stage.distinct_layers
    )
    if len(stage.distinct_layers) > _SHOWN_KINDS:
        size_bytes = named(size_bytes, f"in layers of {len(stage.distinct_layers)} kinds")
    in_files, by_shape = geometry.layer_scale
    if in_files == by_shape:
        return size_bytes
    return named(ceil_div(int(size_bytes) * in_files, by_shape), "in layers as the files hold them", like=size_bytes)


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
        padded, beside_bytes = linear, 0
        if stored_as.precision is Precision.MXFP4:
            padded, beside_bytes = padded_experts(linear, stored_as)
        size_bytes = linear.copies * (
            linear_bytes(stored_as, padded, geometry.dtype_bytes) + padded.bias * geometry.dtype_bytes + beside_bytes
        )
        if linear.module.startswith(("mlp", "experts")):
            feed_forward += size_bytes
        else:
            mixers += size_bytes
    scales = sum(_attention_scale_bytes(weight_format.method, mixer) for mixer in layer.mixers)
    rest = on_rank.elements * geometry.dtype_bytes + on_rank.fixed_bytes + scales
    return LayerBytes(
        named(mixers, "attention" if geometry.attentions else "mixer"),
        named(feed_forward, "feed-forward"),
        named(rest, "norms" if weight_format.precision is Precision.BF16 else "norms and scales"),
    )


def _attention_scale_bytes(method: QuantizationMethod, mixer: SingleMixer) -> int:
    """Return the bytes of the scales that one attention layer holds until its checkpoint is loaded."""
    match method, mixer:
        case QuantizationMethod.COMPRESSED_TENSORS, SelfAttention():
            # q, k and v scale (float32) and zero point (16-bit): vLLM, CompressedTensorsKVCacheMethod.
            return 18
        case (QuantizationMethod.FP8, SelfAttention()) | (
            QuantizationMethod.MODELOPT,
            SelfAttention() | LatentAttention(),
        ):
            # q, k, v and probability scale in the model's type: vLLM, kv_cache.py, BaseKVCacheMethod.
            return 8
        case _:
            return 0


def padded_experts(linear: LinearLayer, stored_as: WeightFormat) -> tuple[LinearLayer, int]:
    """Return experts in MXFP4 as their kernel stores them, and the bytes in addition to the checkpoint's.

    Marlin on Hopper pads the hidden size to 256 and an expert's part to 128 (vLLM, quantization/utils/mxfp4_utils.py):
    65.9 GiB for gpt-oss-120b on one GPU. Triton pads an expert's part to 64 (vLLM, fused_moe/oracle/mxfp4.py,
    mxfp4_round_up_hidden_size_and_intermediate_size). Its scales are larger, 4 groups and 256 outputs at a time (vLLM,
    quantization/utils/mxfp4_utils.py, _swizzle_mxfp4, and triton_kernels, layout_details/hopper_scale.py,
    swizzle_data), and its biases are float32 (fused_moe/oracle/mxfp4.py).
    """
    marlin = stored_as.expert_kernel is ExpertKernel.MARLIN
    inputs, outputs = linear.inputs, linear.outputs
    if linear.widens:
        inputs = round_up(inputs, 256) if marlin else inputs
        outputs = 2 * round_up(outputs // 2, 128 if marlin else 64)
    else:
        inputs = round_up(inputs, 128 if marlin else 64)
        outputs = round_up(outputs, 256) if marlin else outputs
    padded = replace(linear, inputs=inputs, outputs=outputs, bias=outputs if linear.bias else 0)
    if marlin:
        return padded, 0
    groups = inputs // stored_as.group_size
    stored_bytes, swizzled_bytes = groups * outputs, round_up(groups, 4) * round_up(outputs, 256)
    kept_bytes = stored_bytes if stored_as.expert_kernel is ExpertKernel.TRITON_BESIDE_SCALES else 0
    return padded, swizzled_bytes - stored_bytes + kept_bytes + padded.bias * (FLOAT32_BYTES - SIXTEEN_BIT_BYTES)


def linear_format(linear: LinearLayer, layer: Layer, weight_format: WeightFormat) -> WeightFormat:
    """Return how one linear layer of a quantized model is stored.

    AWQ and GPTQ look up in their files which layers they quantize; these exclude routers (vLLM, auto_gptq.py and
    auto_awq.py, maybe_update_config).
    """
    if (
        not linear.quantizable
        or linear.module in layer.unquantized
        or (weight_format.experts_only and not linear.routed)
        or (linear.module == ROUTER and weight_format.method in _AWQ_AND_GPTQ)
    ):
        return _SIXTEEN_BITS
    return (weight_format.expert_format if linear.routed else None) or weight_format


def _vocabulary_rows(geometry: ModelGeometry, stage: Stage, tables: Tables) -> int:
    """Return the rows of embedding and output head that a rank's stage holds, before they are split."""
    embedding, head = padded_vocabulary(geometry.vocab_size), geometry.head
    if head is not None:
        embeds = head.embeds and not (tables is Tables.SHARED and head.shares_embedding)
        outputs = head.output_heads if tables is Tables.OWN or not head.shares_output else 0
        return embedding * embeds + outputs * (padded_vocabulary(head.output_rows) if head.output_rows else 0)
    if geometry.tables_on_every_stage:
        return (1 if geometry.tie_word_embeddings else 2) * embedding
    # A tied output head needs the embedding on the last stage, too (vLLM, the models' __init__).
    tied_here = stage.is_last and geometry.tie_word_embeddings
    has_embedding = stage.is_first or tied_here or geometry.embedding_on_every_stage
    return (has_embedding + (stage.is_last and not geometry.tie_word_embeddings)) * embedding


TOLERANCE_PERCENT: Final = 1
"""Files hold tensors that the engine never loads or stores otherwise: rotary frequencies, a scale a tensor instead of
one a channel, group indices of GPTQ. All of that is well below one percent of a model."""

TOLERANCE_BYTES: Final = 64 * 1024
"""Tolerance in bytes, for models so small that their norms and scales matter."""


def checkpoint_disagreement(geometry: ModelGeometry, stored: StoredWeights) -> str | None:
    """Return a sentence if the tensors in a model's files and the geometry of its config.json differ, or None.

    The sentence names the largest parts of the files if they are known.
    """
    loaded = stored.loaded_bytes(quantized=geometry.checkpoint is not None)
    least, most = expected_file_bytes(geometry, output_head=stored.output_head)
    below, above = (max(TOLERANCE_BYTES, size * TOLERANCE_PERCENT // 100) for size in (least, most))
    if least - below <= loaded <= most + above:
        return None
    described = most if loaded > most else least
    more = "more" if loaded > described else "less"
    percent = 100 * abs(loaded - described) / max(described, 1)
    largest = sorted(stored.bytes_by_part, key=lambda part: -part[1])[:4]
    parts = ", ".join(f"{name} {format_gib(part_bytes)}" for name, part_bytes in largest)
    return (
        f"the safetensors files of {geometry.name} hold {format_gib(loaded)} GiB as the engine loads them,"
        f" {percent:.1f} % {more} than the {format_gib(described)} GiB that its config.json describes"
        + (f" (largest parts in GiB: {parts})" if parts else "")
    )


def expected_file_bytes(geometry: ModelGeometry, *, output_head: bool) -> tuple[int, int]:
    """Return the least and most bytes of the files that hold a model as its config.json describes it.

    They are in the checkpoint's own precision. Estimates are not scaled to the files here.
    """
    geometry = geometry.unscaled
    precision = geometry.checkpoint_precision or Precision.BF16
    loaded = weight_bytes(geometry, precision, Split(1))
    table = geometry.vocab_size * geometry.hidden_size * geometry.dtype_bytes
    if geometry.head is not None:
        # Draft heads are published with or without the tables that they share with the target.
        return loaded_head_bytes(geometry, precision, Split(1)), loaded + table
    tables = 1 if geometry.tie_word_embeddings else 2
    padding = padded_vocabulary(geometry.vocab_size) - geometry.vocab_size
    at_rest = loaded - tables * padding * geometry.hidden_size * geometry.dtype_bytes
    if geometry.tie_word_embeddings and output_head:
        at_rest += table  # a copy that the engine ignores
    # Layers for multi-token prediction and stages of DSpark come with tables of their own, or without.
    layer = at_rest // max(geometry.num_layers, 1)
    further = geometry.mtp_layers + (len(geometry.dspark.layers) if geometry.dspark else 0)
    return at_rest, at_rest + further * (layer + 2 * table)
