"""What a config.json's quantization_config says about the stored weights."""

from specdecode_operator.sizing.fields import Fields
from specdecode_operator.sizing.precision import Precision, Scales, WeightFormat

_NEVER_QUANTIZED = ("lm_head", "embed", "norm")
"""Parts that stay 16-bit anyway, so naming them as excluded changes nothing."""

_INT4_BITS = 4

_EXCLUSION_KEYS = ("ignore", "ignored_layers", "modules_to_not_convert")


def checkpoint_format(config: Fields) -> WeightFormat | None:
    """Return how the checkpoint stores its linear layers; None for an unquantized one.

    Knows fp8, compressed-tensors, AWQ and GPTQ, and refuses the rest by name.
    """
    section = config.section("quantization_config") or config.section("compression_config")
    if section is None:
        return None
    _refuse_partly_quantized(section)
    method = section.text("quant_method", default="")
    match method:
        case "fp8":
            return _fp8(section)
        case "compressed-tensors":
            return _compressed_tensors(section)
        case "awq":
            return _grouped_int4(section, bits_key="w_bit" if section.is_set("w_bit") else "bits")
        case "gptq":
            return _grouped_int4(section, bits_key="bits")
        case _:
            raise section.error("quant_method", "is not supported; use fp8, compressed-tensors, awq or gptq")


def _refuse_partly_quantized(section: Fields) -> None:
    for key in _EXCLUSION_KEYS:
        for module in section.strings(key):
            if not any(part in module for part in _NEVER_QUANTIZED):
                raise section.error(key, f"leaves linear layer {module!r} unquantized, which sizing cannot count yet")
    if section.flag("lm_head"):
        raise section.error("lm_head", "a quantized output head cannot be sized yet")


def _fp8(section: Fields) -> WeightFormat:
    edges = section.values.get("weight_block_size")
    if edges is None:
        return WeightFormat(Precision.FP8, Scales.CHANNEL)
    # The block kernels of vLLM on Hopper (CUTLASS, DeepGEMM) take 128 x 128 only.
    if edges not in ([128, 128], (128, 128)):
        raise section.error("weight_block_size", "must be [128, 128]")
    return WeightFormat(Precision.FP8, Scales.BLOCK, group_size=128)


def _grouped_int4(section: Fields, bits_key: str) -> WeightFormat:
    if section.size(bits_key) != _INT4_BITS:
        raise section.error(bits_key, "only 4-bit AWQ and GPTQ checkpoints can be sized")
    key = "q_group_size" if section.is_set("q_group_size") else "group_size"
    return WeightFormat(Precision.INT4, Scales.GROUP, group_size=section.size(key), zero_points=True)


def _compressed_tensors(section: Fields) -> WeightFormat:
    groups = section.section("config_groups")
    schemes = [] if groups is None else [groups.section(name) for name in groups.values]
    if groups is None or len(schemes) != 1 or schemes[0] is None:
        raise section.error("config_groups", "must hold exactly one scheme for all linear layers")
    weights = schemes[0].section("weights")
    if weights is None:
        raise schemes[0].error("weights", "is missing; copy it from the model's config.json")
    return _compressed_weights(weights)


def _compressed_weights(weights: Fields) -> WeightFormat:
    kind = weights.text("type", default="int")
    strategy = weights.text("strategy", default="channel")
    match weights.size("num_bits"), kind, strategy:
        case 8, "float", "channel" | "tensor":
            return WeightFormat(Precision.FP8, Scales.CHANNEL, compressed_tensors=True)
        case 8, "int", "channel" | "tensor":
            return WeightFormat(Precision.INT8, Scales.CHANNEL, compressed_tensors=True)
        case 4, "int", "group" if weights.flag("symmetric", default=True):
            size = weights.size("group_size")
            return WeightFormat(Precision.INT4, Scales.GROUP, group_size=size, compressed_tensors=True)
        case bits, _, _:
            raise weights.error(
                "num_bits",
                f"{bits}-bit {kind} weights with strategy {strategy} cannot be sized; known are 8-bit float or int by "
                "channel or tensor, and symmetric 4-bit int by group",
            )
