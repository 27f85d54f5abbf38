"""Bytes of one quantized linear layer on a rank, with its scales.

Equal to the parameters of vLLM 0.32's own layer classes on the meta device.
"""

import math
from typing import Final

from specdecode_operator.sizing.base.units import ceil_div
from specdecode_operator.sizing.model.layers import LatentAttention, SelfAttention, SingleMixer
from specdecode_operator.sizing.model.precision import Method, Scales, WeightFormat
from specdecode_operator.sizing.weights.rank_layers import ROUTER, LinearLayer
from specdecode_operator.vocabulary import SIXTEEN_BIT_BYTES, Precision

SCALE_BYTES_FLOAT32: Final = 4
"""Scales of 8-bit weights and scales for whole tensors are float32 (vLLM, fp8_utils.py, create_fp8_scale_parameter)."""

SCALE_BYTES_16_BIT: Final = SIXTEEN_BIT_BYTES
"""Scales of packed integers are stored in the model's 16-bit type."""

_PACKED_BYTES: Final = 4
"""Weights of 4 and 8 bits are packed into int32."""

_WEIGHT_SHAPE_BYTES: Final = 16
"""``weight_shape``: two int64 beside each packed weight (vLLM, compressed_tensors_wNa16.py)."""

_EXPERT_WEIGHT_SHAPE_BYTES: Final = 4
"""The same two numbers an expert, in the model's type (compressed_tensors_moe_wna16.py)."""

_COMPRESSED_ATTENTION_SCALES_BYTES: Final = 18
"""q, k and v scale (float32) and zero point (16-bit) a layer (vLLM, CompressedTensorsKVCacheMethod)."""

_ATTENTION_SCALES_BYTES: Final = 8
"""q, k, v and probability scale in the model's type a layer (vLLM, kv_cache.py, BaseKVCacheMethod)."""

_SMALLEST_REFINED_BLOCK: Final = 32
"""Blocks of experts are cut down to it, not further (vLLM, fused_moe/oracle/fp8.py, refine_fp8_moe_block_shape)."""

_MARLIN_EXPERT_GROUPS: Final = (0, 32, 64, 128)
_MARLIN_EXPERT_HIDDEN_MULTIPLE: Final = 128
"""What the Marlin kernel of experts takes (vLLM, marlin_utils.py, check_moe_marlin_supports_config)."""


def linear_bytes(weight_format: WeightFormat, linear: LinearLayer, dtype_bytes: int = SIXTEEN_BIT_BYTES) -> int:
    """Return the bytes of one copy of a linear layer on a rank, scales included, bias not.

    ``dtype_bytes`` are those of a number that is not quantized. Scales in the model's type have 16 bits: vLLM
    multiplies nothing quantized in float32.
    """
    weights = linear.inputs * linear.outputs
    match weight_format.scales:
        case Scales.NONE:
            return dtype_bytes * weights
        case Scales.TENSOR:
            # Experts share one scale for what goes into gate and up.
            inputs = (1 if linear.routed else len(linear.parts)) * weight_format.static_inputs
            return weights + (len(linear.parts) + inputs) * SCALE_BYTES_FLOAT32
        case Scales.CHANNEL:
            return weights + linear.outputs * SCALE_BYTES_FLOAT32
        case Scales.BLOCK:
            return weights + _blocks(weight_format, linear) * SCALE_BYTES_FLOAT32
        case Scales.MICROSCALE:
            # One byte a group: the exponent of MXFP4, the FP8 scale of NVFP4.
            scales = linear.inputs // weight_format.group_size * linear.outputs
            return ceil_div(weights, 2) + scales + _global_scales(weight_format, linear) * SCALE_BYTES_FLOAT32
        case Scales.GROUP:
            return _packed_bytes(weight_format, linear)


def keeps_16_bits(weight_format: WeightFormat, linear: LinearLayer) -> bool:
    """Whether a format leaves a layer alone that it could hold."""
    if weight_format.experts_only and not linear.routed:
        return True
    # What AWQ and GPTQ quantize is looked up in their files, which leave routers alone (vLLM, auto_gptq.py and
    # auto_awq.py, maybe_update_config).
    return linear.module == ROUTER and weight_format.method in (Method.AWQ, Method.GPTQ)


def attention_scale_bytes(weight_format: WeightFormat, mixer: SingleMixer) -> int:
    """Return the bytes of the scales that one attention layer holds until its checkpoint is loaded."""
    match weight_format.method, mixer:
        case Method.COMPRESSED_TENSORS, SelfAttention():
            return _COMPRESSED_ATTENTION_SCALES_BYTES
        case (Method.FP8, SelfAttention()) | (Method.MODELOPT, SelfAttention() | LatentAttention()):
            return _ATTENTION_SCALES_BYTES
        case _:
            return 0


def refined_block(edge: int, linear: LinearLayer) -> int | None:
    """Return the edge of the blocks that vLLM cuts an expert's blocks into; None where it refuses to.

    Where a rank's part of an expert is no multiple of the edge, it takes the
    largest common divisor with the part and the hidden size
    (vLLM, fused_moe/oracle/fp8.py, refine_fp8_moe_block_shape).
    """
    part = linear.parts[0] if linear.widens else linear.inputs
    if part % edge == 0:
        return edge
    refined = math.gcd(edge, linear.inputs, linear.parts[0])
    return refined if refined >= _SMALLEST_REFINED_BLOCK else None


def common_group(group_size: int, linear: LinearLayer) -> int | None:
    """Return the group of experts in AWQ or GPTQ where Marlin does not take theirs; None where no other kernel does.

    It is halved until it divides the expert's part and the hidden size (vLLM, moe_wna16.py, create_weights).
    """
    while group_size and (linear.inputs % group_size or linear.parts[0] % group_size):
        group_size //= 2
    return group_size if group_size >= _SMALLEST_REFINED_BLOCK else None


def takes_marlin(group_size: int, linear: LinearLayer) -> bool:
    """Whether Marlin takes the experts of AWQ or GPTQ (vLLM, marlin_utils.py, check_moe_marlin_supports_config)."""
    part, hidden = (linear.parts[0], linear.inputs) if linear.widens else (linear.inputs, linear.outputs)
    whole_groups = group_size == 0 or part % group_size == 0
    return whole_groups and hidden % _MARLIN_EXPERT_HIDDEN_MULTIPLE == 0 and group_size in _MARLIN_EXPERT_GROUPS


def _blocks(weight_format: WeightFormat, linear: LinearLayer) -> int:
    edge = weight_format.group_size
    if not linear.routed:
        return ceil_div(linear.inputs, edge) * ceil_div(linear.outputs, edge)
    edge = refined_block(edge, linear) or edge
    return ceil_div(linear.inputs, edge) * sum(ceil_div(part, edge) for part in linear.parts)


def _global_scales(weight_format: WeightFormat, linear: LinearLayer) -> int:
    """Return the scales for whole tensors of NVFP4; experts always have those of their inputs, too."""
    if weight_format.precision is not Precision.NVFP4:
        return 0
    return len(linear.parts) * (1 + (weight_format.static_inputs or linear.routed))


def _packed_bytes(weight_format: WeightFormat, linear: LinearLayer) -> int:
    bits = 4 if weight_format.precision is Precision.INT4 else 8
    group_size, zero_points = weight_format.group_size, weight_format.zero_points
    by_experts = linear.routed and weight_format.method in (Method.AWQ, Method.GPTQ)
    if by_experts and not takes_marlin(group_size, linear):
        group_size = common_group(group_size, linear) or group_size
        zero_points = weight_format.method is Method.AWQ
    groups = max(1, linear.inputs // group_size) if group_size else 1
    size_bytes = linear.outputs * ceil_div(linear.inputs * bits, 8) + groups * linear.outputs * SCALE_BYTES_16_BIT
    if zero_points:
        size_bytes += groups * ceil_div(linear.outputs * bits, 8 * _PACKED_BYTES) * _PACKED_BYTES
    if weight_format.method is Method.COMPRESSED_TENSORS:
        size_bytes += _EXPERT_WEIGHT_SHAPE_BYTES if linear.routed else _WEIGHT_SHAPE_BYTES
    return size_bytes
