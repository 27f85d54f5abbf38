"""The values that fields of our kinds may hold where they may not hold any."""

from enum import StrEnum

from specdecode_operator.vocabulary import METHODS_WITH_DRAFT, METHODS_WITH_HIDDEN_STATES, Method


class Quantization(StrEnum):
    """Precision in which a model's linear layers are held in GPU memory."""

    AS_CHECKPOINT = "AsCheckpoint"
    BF16 = "BF16"
    FP8 = "FP8"
    INT8 = "INT8"
    INT4 = "INT4"
    AUTO = "Auto"


METHODS_WITH_LAYERS = (*METHODS_WITH_DRAFT, Method.MTP)
"""Methods whose draft has layers, which are split over GPUs."""

METHODS_WITH_LOOKUP = (Method.NGRAM, Method.NGRAM_GPU)
"""Methods that look the proposal up in the prompt."""

METHODS_OF_FREE_LENGTH = (*METHODS_WITH_LOOKUP, Method.SUFFIX)
"""Methods that propose as many tokens as they find, in some steps none."""

METHODS_WITH_SAMPLING = (Method.DRAFT_MODEL, *METHODS_WITH_HIDDEN_STATES)
"""Methods whose draft has a distribution of its own to sample from."""


class RejectionSampling(StrEnum):
    """How drafted tokens are checked, in vLLM's words. One that is left out, synthetic, makes answers up."""

    STANDARD = "standard"
    BLOCK = "block"
    FLY = "fly"
    """Alone loses what the target would have answered."""


class Loss(StrEnum):
    """Whether answers may be others than the target's own."""

    ACCEPTED = "Accepted"


class DraftSampling(StrEnum):
    """How a draft picks its tokens, in vLLM's words."""

    GREEDY = "greedy"
    PROBABILISTIC = "probabilistic"


class DraftHeadQuantization(StrEnum):
    """Precision of a draft's copy of the output head, in vLLM's words."""

    FP8 = "fp8"
    NVFP4 = "nvfp4"


METHODS_WITH_TARGETS_HEAD = (Method.EAGLE, Method.MTP)
"""Methods whose draft uses the target's output head: heads of eagle3 have one of their own."""


class AcceleratorType(StrEnum):
    """What the engine computes on."""

    GPU = "GPU"
    CPU = "CPU"


class RopeType(StrEnum):
    """How rotary positions are stretched, in vLLM's words."""

    YARN = "yarn"
    LINEAR = "linear"
    DYNAMIC = "dynamic"

    @property
    def has_original_length(self) -> bool:
        """Whether it starts from the length that the model was trained with, whatever its file says."""
        return self is RopeType.YARN


class CudagraphMode(StrEnum):
    """Which steps run as CUDA graphs, in vLLM's words."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"


class Planning(StrEnum):
    """What an override asks the operator to pass over."""

    IGNORE = "Ignore"


class RolloutStrategy(StrEnum):
    """Which engine goes first when the engines are replaced."""

    REPLACE = "Replace"
    SURGE = "Surge"
