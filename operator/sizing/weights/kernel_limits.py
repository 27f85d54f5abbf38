"""What the kernels for quantized layers do not take: blocks, groups and tiles that a split cuts."""

from dataclasses import dataclass
from typing import Final, NamedTuple

from specdecode_operator.sizing.base.eras import sizing_facts
from specdecode_operator.sizing.model.precision import Method, Scales, WeightFormat
from specdecode_operator.sizing.weights.linear_bytes import common_group, refined_block, takes_marlin
from specdecode_operator.sizing.weights.rank_layers import LinearLayer
from specdecode_operator.vocabulary import Precision

MARLIN_TILE_INPUTS: Final = 128
MARLIN_TILE_OUTPUTS: Final = 64
"""The 4-bit kernel works in tiles of this size (vLLM, marlin_utils.py)."""


@dataclass(frozen=True)
class KernelRules:
    """What the kernels of a vLLM version take; the table of versions names the sources."""

    pads_tiles: bool
    """Incomplete tiles of the 4-bit kernel are filled up."""
    cuts_expert_blocks: bool
    """Blocks of experts are cut to fit."""
    takes_activation_order: bool
    """GPTQ with desc_act is loaded."""
    packs_experts_in_bytes: bool
    """Experts of compressed-tensors may be packed in eight bits."""
    packs_experts_by_channel: bool
    """They may have a scale an output channel."""


def kernel_rules(version: str | None) -> KernelRules:
    """Return the rules of a vLLM version; without one what every version takes."""
    if version is None:
        return KernelRules(
            pads_tiles=False,
            cuts_expert_blocks=False,
            takes_activation_order=False,
            packs_experts_in_bytes=False,
            packs_experts_by_channel=False,
        )
    return KernelRules(**sizing_facts(version)["kernels"])


class RefusedFormat(NamedTuple):
    """A key of quantization_config whose value a version does not load, whatever the size of a layer is."""

    key: str
    value: str
    message: str


def refused_format(weight_format: WeightFormat, linear: LinearLayer, rules: KernelRules) -> RefusedFormat | None:
    """Return why a version loads no layer like this that is stored so; None where it does."""
    if weight_format.scales is not Scales.GROUP:
        return None
    if weight_format.ordered_by_activation and not rules.takes_activation_order:
        return RefusedFormat("desc_act", "true", "vLLM 0.30 and newer load GPTQ without desc_act only")
    if not linear.routed or weight_format.method is not Method.COMPRESSED_TENSORS:
        return None
    if weight_format.precision is Precision.INT8 and not rules.packs_experts_in_bytes:
        return RefusedFormat("num_bits", "8", "vLLM 0.28 loads packed experts of 4 bits only")
    if not weight_format.group_size and not rules.packs_experts_by_channel:
        return RefusedFormat("strategy", "channel", "vLLM 0.28 and 0.29 load packed experts with strategy group only")
    return None


def broken_limit(
    weight_format: WeightFormat, linear: LinearLayer, unsplit: LinearLayer, rules: KernelRules
) -> str | None:
    """Return the limit that one rank's part of a layer breaks, in words; None where it breaks none.

    ``linear`` is the layer on one of the ranks, ``unsplit`` on a single one.
    """
    match weight_format.scales:
        case Scales.BLOCK if linear.routed:
            return _broken_expert_block(weight_format, linear, rules)
        case Scales.BLOCK:
            return _broken_block(weight_format, linear, unsplit)
        case Scales.GROUP:
            return _broken_group(weight_format, linear) or _broken_tile(linear, rules)
        case Scales.MICROSCALE if weight_format.method is Method.MODELOPT and not linear.routed:
            # vLLM, modelopt.py, KNvfp4Static.create_weights.
            size = weight_format.group_size
            return f"groups of {size} inputs" if linear.inputs % size else None
        case _:
            return None


def _broken_block(weight_format: WeightFormat, linear: LinearLayer, unsplit: LinearLayer) -> str | None:
    """Apply fp8_utils.py, validate_fp8_block_shape: a split must not cut a block.

    A merged layer of the fp8 method may have incomplete blocks
    (linear.py, _maybe_allow_fp8_block_shape_mismatch), one of
    compressed-tensors in its last part, where it is not split.
    """
    edge, merged = weight_format.group_size, len(linear.parts) > 1
    by_outputs = linear.outputs != unsplit.outputs
    if merged and weight_format.method is Method.FP8:
        broken = False
    elif merged:
        broken = any(part % edge for part in (linear.parts if by_outputs else linear.parts[:-1]))
    else:
        broken = by_outputs and linear.outputs % edge != 0
    if linear.inputs != unsplit.inputs and linear.inputs % edge:
        broken = True
    return f"blocks of {edge} x {edge}" if broken else None


def _broken_expert_block(weight_format: WeightFormat, linear: LinearLayer, rules: KernelRules) -> str | None:
    edge = weight_format.group_size
    part = linear.parts[0] if linear.widens else linear.inputs
    if part % edge == 0:
        return None
    refines = weight_format.method is Method.FP8 and rules.cuts_expert_blocks
    return None if refines and refined_block(edge, linear) else f"blocks of {edge} x {edge}"


def _broken_group(weight_format: WeightFormat, linear: LinearLayer) -> str | None:
    size = weight_format.group_size
    if size == 0:
        return None
    if linear.routed and weight_format.method in (Method.AWQ, Method.GPTQ):
        taken = takes_marlin(size, linear) or common_group(size, linear) is not None
        return None if taken else f"groups of {size} inputs"
    return f"groups of {size} inputs" if linear.inputs % size else None


def _broken_tile(linear: LinearLayer, rules: KernelRules) -> str | None:
    if rules.pads_tiles:
        return None
    if linear.inputs % MARLIN_TILE_INPUTS or linear.outputs % MARLIN_TILE_OUTPUTS:
        return f"kernel tiles of {MARLIN_TILE_INPUTS} x {MARLIN_TILE_OUTPUTS}"
    return None
