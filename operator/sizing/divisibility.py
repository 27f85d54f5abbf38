"""Which tensor parallelism a model can be split into."""

from dataclasses import dataclass
from typing import Final

from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.precision import Precision, Scales, WeightFormat
from specdecode_operator.sizing.weights import LinearLayer, linear_layers, padded_vocabulary

MAX_TENSOR: Final = 64
"""Largest tensor parallelism that is ever proposed."""

MARLIN_TILE_INPUTS: Final = 128
MARLIN_TILE_OUTPUTS: Final = 64
"""The 4-bit kernel works in tiles of this size (vLLM, marlin_utils.py)."""


@dataclass(frozen=True)
class TensorProblem:
    """One reason why a model cannot be split.

    Attributes
    ----------
    key
        Key of config.json that does not divide.
    value
        Its value.
    message
        What does not divide, and what to do.
    """

    key: str
    value: int
    message: str


def tensor_problems(
    geometry: ModelGeometry, tensor: int, precision: Precision | None = None
) -> tuple[TensorProblem, ...]:
    """Return everything that stops a model from being split over so many GPUs; empty when nothing does.

    A precision of None is the checkpoint's own.
    """
    problems = _shape_problems(geometry, tensor)
    # Parts of layers are only whole numbers once the shape itself divides.
    return problems or _quantization_problems(geometry, tensor, geometry.weight_format(precision))


def supported_tensors(
    target: ModelGeometry,
    draft: ModelGeometry | None = None,
    target_precision: Precision | None = None,
    draft_precision: Precision | None = None,
) -> tuple[int, ...]:
    """Return the powers of two over which target and draft can both be split."""
    powers = [2**exponent for exponent in range(MAX_TENSOR.bit_length())]
    return tuple(
        tensor
        for tensor in powers
        if not tensor_problems(target, tensor, target_precision)
        and (draft is None or not tensor_problems(draft, tensor, draft_precision))
    )


def _shape_problems(geometry: ModelGeometry, tensor: int) -> tuple[TensorProblem, ...]:
    shared = {
        "num_attention_heads": geometry.num_attention_heads,
        "intermediate_size": geometry.intermediate_size,
        "vocab_size": padded_vocabulary(geometry),
    }
    problems = [
        TensorProblem(key, value, _message(geometry, tensor, key, value))
        for key, value in shared.items()
        if value % tensor
    ]
    kv_heads = geometry.num_kv_heads
    # Fewer KV heads than ranks are replicated, which takes a whole number of copies.
    if kv_heads % tensor and tensor % kv_heads:
        problems.append(
            TensorProblem("num_key_value_heads", kv_heads, _message(geometry, tensor, "num_key_value_heads", kv_heads))
        )
    return tuple(problems)


def _message(geometry: ModelGeometry, tensor: int, key: str, value: int) -> str:
    padded = " (padded)" if key == "vocab_size" else ""
    return f"{key} {value}{padded} of {geometry.name} does not divide over tensor {tensor}; use a power of two"


def _quantization_problems(
    geometry: ModelGeometry, tensor: int, weight_format: WeightFormat
) -> tuple[TensorProblem, ...]:
    if weight_format.scales not in (Scales.BLOCK, Scales.GROUP):
        return ()
    keys = ("num_attention_heads", "num_attention_heads", "intermediate_size", "intermediate_size")
    problems: dict[str, TensorProblem] = {}
    for key, layer in zip(keys, linear_layers(geometry, tensor), strict=True):
        limit = _broken_limit(weight_format, layer)
        if limit is not None:
            value = geometry.num_attention_heads if key == "num_attention_heads" else geometry.intermediate_size
            message = (
                f"{weight_format.precision} weights of {geometry.name} at tensor {tensor}: a layer of {layer.inputs} x "
                f"{layer.outputs} on each GPU breaks {limit}; use a smaller tensor or another quantization"
            )
            problems.setdefault(key, TensorProblem(key, value, message))
    return tuple(problems.values())


def _broken_limit(weight_format: WeightFormat, layer: LinearLayer) -> str | None:
    """Return the kernel limit that one rank's part of a layer breaks, in words."""
    size = weight_format.group_size
    if weight_format.scales is Scales.BLOCK:
        broken = layer.inputs % size or layer.outputs % size
        return f"blocks of {size} x {size}" if broken else None
    if layer.inputs % size:
        return f"groups of {size} inputs"
    if layer.inputs % MARLIN_TILE_INPUTS or layer.outputs % MARLIN_TILE_OUTPUTS:
        return f"kernel tiles of {MARLIN_TILE_INPUTS} x {MARLIN_TILE_OUTPUTS}"
    return None
