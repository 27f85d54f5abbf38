"""How linear layers are stored: their precision, and for what each scale holds.

Embeddings, the output head, norms and biases keep the model's 16-bit type in
every format here.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from specdecode_operator.vocabulary import FLOAT32_BYTES, Precision


class Scales(StrEnum):
    """For what each stored scale holds."""

    NONE = "none"
    TENSOR = "tensor"
    CHANNEL = "channel"
    BLOCK = "block"
    GROUP = "group"
    MICROSCALE = "microscale"


class Method(StrEnum):
    """Which of vLLM's quantization methods holds the layers; each has small tensors of its own."""

    NONE = "none"
    FP8 = "fp8"
    COMPRESSED_TENSORS = "compressed-tensors"
    MODELOPT = "modelopt"
    AWQ = "awq"
    GPTQ = "gptq"
    MXFP4 = "mxfp4"


def precision_name(precision: Precision, dtype_bytes: int) -> str:
    """Return what people call a precision: BF16 stands for what is not quantized, which may be float32."""
    return "FP32" if precision is Precision.BF16 and dtype_bytes == FLOAT32_BYTES else precision.value


class ExpertKernel(StrEnum):
    """Kernel that runs experts in MXFP4."""

    MARLIN = "Marlin"
    TRITON = "Triton"
    TRITON_BESIDE_SCALES = "Triton, beside the stored scales"
    """Up to vLLM 0.24 the scales of the checkpoint stay beside those that the kernel reads."""


@dataclass(frozen=True)
class WeightFormat:
    """How a checkpoint or the loader stores a linear layer."""

    precision: Precision  # Precision of the weights themselves
    # For what each scale holds: a tensor, an output channel, a square block, a group of inputs
    scales: Scales = Scales.NONE
    # Inputs a group, or edge of a block. Zero where scales are not grouped: a group is then a whole channel.
    group_size: int = 0
    zero_points: bool = False  # Whether each group stores a zero point beside its scale (AWQ, GPTQ)
    method: Method = Method.NONE  # What of vLLM loads it
    static_inputs: bool = False  # Whether the scales of activations are stored too
    experts_only: bool = False  # Whether only the layers of experts are quantized
    expert_format: "WeightFormat | None" = None  # How the experts are stored; None: as all linear layers are
    ordered_by_activation: bool = False  # Whether GPTQ sorted the inputs before it grouped them (desc_act)
    expert_kernel: ExpertKernel = ExpertKernel.MARLIN  # What runs experts in MXFP4, which decides how they are padded


DEFAULT_FORMATS: Final = {
    Precision.BF16: WeightFormat(Precision.BF16),
    Precision.FP8: WeightFormat(Precision.FP8, Scales.CHANNEL, method=Method.COMPRESSED_TENSORS),
    Precision.INT8: WeightFormat(Precision.INT8, Scales.CHANNEL, method=Method.COMPRESSED_TENSORS),
    Precision.INT4: WeightFormat(Precision.INT4, Scales.GROUP, group_size=128, method=Method.COMPRESSED_TENSORS),
    Precision.MXFP4: WeightFormat(
        Precision.MXFP4, Scales.MICROSCALE, group_size=32, method=Method.MXFP4, experts_only=True
    ),
    Precision.NVFP4: WeightFormat(
        Precision.NVFP4, Scales.MICROSCALE, group_size=16, method=Method.MODELOPT, static_inputs=True
    ),
}
"""What a precision means when no checkpoint says more.

Symmetric w4a16 with groups of 128 is 4.125 bits a weight. FP8 made while
loading has one scale a channel at most, so this never counts too little.
"""
