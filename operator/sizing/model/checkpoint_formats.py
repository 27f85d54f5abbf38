"""Which format a quantization_config describes: fp8, compressed-tensors, AWQ, GPTQ, MXFP4, ModelOpt."""

from collections.abc import Mapping
from dataclasses import replace

from specdecode_operator.problems import shown
from specdecode_operator.sizing.base.datafiles import read_data
from specdecode_operator.sizing.base.fields import Fields
from specdecode_operator.sizing.model.precision import DEFAULT_FORMATS, Method, Scales, WeightFormat
from specdecode_operator.vocabulary import Precision

_BLOCK_EDGE = 128
"""Edge of the blocks that the FP8 kernels of vLLM on Hopper (CUTLASS, DeepGEMM) take."""

_PACKED_PRECISIONS = {4: Precision.INT4, 8: Precision.INT8}
"""Precision of packed integers by their bits."""

_WHOLE_CHANNEL = -1
"""What files write as the group size where a group is a whole channel."""


def read_format(section: Fields) -> WeightFormat:
    """Return the format that a quantization_config describes; refuse by name what sizing does not know."""
    if not section.is_set("quant_method"):
        raise section.error(
            "quant_method", "is missing; without it vLLM takes the weights for 16 bits and cannot load them"
        )
    match section.text("quant_method", default=""):
        case "fp8":
            return _fp8(section)
        case "compressed-tensors":
            return _compressed_tensors(section)
        case "awq":
            return _awq(section)
        case "gptq":
            return _gptq(section)
        case "mxfp4":
            return DEFAULT_FORMATS[Precision.MXFP4]
        case "modelopt" | "modelopt_fp4":
            return _modelopt(section)
        case method if method in read_data("registry.json")["quantization"]:
            raise section.unmodelled("quant_method", "sizing does not implement this method")
        case _:
            known = "fp8, compressed-tensors, awq, gptq, mxfp4 or modelopt"
            raise section.error("quant_method", f"vLLM does not know this method; use {known}")


def _fp8(section: Fields) -> WeightFormat:
    edges = section.values.get("weight_block_size")
    if edges is None:
        static = section.text("activation_scheme", default="dynamic") == "static"
        return WeightFormat(Precision.FP8, Scales.TENSOR, method=Method.FP8, static_inputs=static)
    return WeightFormat(
        Precision.FP8, Scales.BLOCK, group_size=_block_edge(section, "weight_block_size"), method=Method.FP8
    )


def _block_edge(section: Fields, key: str) -> int:
    if section.values.get(key) not in ([_BLOCK_EDGE] * 2, (_BLOCK_EDGE,) * 2):
        raise section.unmodelled(key, f"must be [{_BLOCK_EDGE}, {_BLOCK_EDGE}]")
    return _BLOCK_EDGE


def _compressed_tensors(section: Fields) -> WeightFormat:
    groups = section.section("config_groups")
    schemes = [] if groups is None else [groups.section(name) for name in groups.values]
    if groups is None or len(schemes) != 1 or schemes[0] is None:
        raise section.unmodelled("config_groups", "must hold exactly one scheme for all linear layers")
    weights = schemes[0].section("weights")
    if weights is None:
        raise schemes[0].error("weights", "is missing; copy it from the model's config.json")
    return replace(
        _compressed_weights(weights, schemes[0].section("input_activations")), method=Method.COMPRESSED_TENSORS
    )


def _compressed_weights(weights: Fields, inputs: Fields | None) -> WeightFormat:
    kind = weights.text("type", default="int")
    strategy = weights.text("strategy", default="channel")
    match weights.size("num_bits"), kind, strategy:
        case 8, "float" | "int", "channel" if kind == "float" or inputs is not None:
            return WeightFormat(Precision.FP8 if kind == "float" else Precision.INT8, Scales.CHANNEL)
        case 8, "float", "tensor":
            # Scales of activations that are found while running are not stored.
            static = inputs is not None and not inputs.values.get("dynamic")
            return WeightFormat(Precision.FP8, Scales.TENSOR, static_inputs=static)
        case 8, "float", "block":
            return WeightFormat(Precision.FP8, Scales.BLOCK, group_size=_block_edge(weights, "block_structure"))
        case 8, "int", "tensor" if inputs is not None:
            return WeightFormat(Precision.INT8, Scales.TENSOR)
        case 4, "float", "tensor_group":
            return replace(DEFAULT_FORMATS[Precision.NVFP4], static_inputs=inputs is not None)
        case 4 | 8 as bits, "int", "group" | "channel":
            size = weights.size("group_size") if strategy == "group" else 0
            zero_points = not weights.flag("symmetric", default=True)
            return WeightFormat(_PACKED_PRECISIONS[bits], Scales.GROUP, size, zero_points=zero_points)
        case bits, _, _:
            raise weights.unmodelled(
                "num_bits",
                f"{bits}-bit {shown(kind)} weights with strategy {shown(strategy)} cannot be sized; "
                "known are 8-bit float by tensor, channel or block, 8-bit int by tensor, channel or group, "
                "4-bit int by channel or group, and NVFP4",
            )


def _awq(section: Fields) -> WeightFormat:
    bits_key = "w_bit" if section.is_set("w_bit") else "bits"
    precision = _packed_precision(section, bits_key)
    if precision is not Precision.INT4:
        raise section.unmodelled(bits_key, "only 4-bit AWQ checkpoints can be sized")
    key = "q_group_size" if section.is_set("q_group_size") else "group_size"
    return WeightFormat(precision, Scales.GROUP, _group_size(section, key), zero_points=True, method=Method.AWQ)


def _gptq(section: Fields) -> WeightFormat:
    precision = _packed_precision(section, "bits")
    if not section.flag("sym", default=True):
        raise section.error("sym", "vLLM's kernels take symmetric GPTQ only; use a checkpoint with sym true")
    group_size = _group_size(section, "group_size")
    return WeightFormat(
        precision,
        Scales.GROUP,
        group_size,
        zero_points=True,
        method=Method.GPTQ,
        ordered_by_activation=section.flag("desc_act") and group_size > 0,
    )


def _packed_precision(section: Fields, key: str) -> Precision:
    precision = _PACKED_PRECISIONS.get(section.size(key))
    if precision is None:
        raise section.unmodelled(key, "only 4 and 8 bits can be sized")
    return precision


def _group_size(section: Fields, key: str) -> int:
    return 0 if section.values.get(key) == _WHOLE_CHANNEL else section.size(key)


def _modelopt(section: Fields) -> WeightFormat:
    algorithm = section.text("quant_algo", default="FP8").upper()
    if algorithm == "NVFP4":
        groups = section.section("config_groups")
        schemes = [] if groups is None else list(groups.values.values())
        # Without a scheme for activations in any group, weights alone are (vLLM, modelopt.py, ModelOptNvFp4Config).
        weight_only = bool(schemes) and not any(_quantizes_inputs(scheme) for scheme in schemes)
        return replace(DEFAULT_FORMATS[Precision.NVFP4], static_inputs=not weight_only)
    if algorithm == "FP8":
        return WeightFormat(Precision.FP8, Scales.TENSOR, method=Method.MODELOPT, static_inputs=True)
    raise section.unmodelled("quant_algo", "is not supported; use FP8 or NVFP4")


def _quantizes_inputs(scheme: object) -> bool:
    return isinstance(scheme, Mapping) and scheme.get("input_activations") is not None
