"""Enumerations and value tables shared by the API, vLLM and sizing: methods, precisions, dtypes.

They are defined once, without pydantic, because sizing imports this module and stays free of the API models.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Precision(StrEnum):
    """Precision of a model's linear layers, in a checkpoint or in GPU memory."""

    BF16 = "BF16"
    FP8 = "FP8"
    INT8 = "INT8"
    INT4 = "INT4"
    MXFP4 = "MXFP4"
    NVFP4 = "NVFP4"


class Knowledge(StrEnum):
    """How well sizing knows a model."""

    EXACT = "exact"
    ESTIMATED = "estimated"
    ASSUMED = "assumed"
    """The user gives the numbers."""


class Objective(StrEnum):
    """What the plan aims at where it may choose."""

    QUALITY = "Quality"
    """The least quantized target; the draft may be quantized harder, it cannot change the output."""
    CAPACITY = "Capacity"
    COST = "Cost"


class WorkloadKind(StrEnum):
    """What most requests are."""

    CHAT = "Chat"
    CODE = "Code"
    CREATIVE = "Creative"
    MIXED = "Mixed"
    RAG = "RAG"
    STRUCTURED = "Structured"
    SUMMARIZATION = "Summarization"


class Slo(StrEnum):
    """What the service promises first of all."""

    TTFT = "TTFT"
    TPOT = "TPOT"
    THROUGHPUT = "Throughput"


class Method(StrEnum):
    """How tokens are proposed."""

    DRAFT_MODEL = "draft_model"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MTP = "mtp"
    MEDUSA = "medusa"
    DFLASH = "dflash"
    DSPARK = "dspark"
    NGRAM = "ngram"
    NGRAM_GPU = "ngram_gpu"
    SUFFIX = "suffix"
    NONE = "none"


class DraftUpdate(StrEnum):
    """How engines get a trained head."""

    RESTART = "Restart"
    IN_PLACE = "InPlace"


METHODS_WITH_DRAFT: Final = (
    *(Method.DRAFT_MODEL, Method.EAGLE, Method.EAGLE3),
    *(Method.MEDUSA, Method.DFLASH, Method.DSPARK),
)
"""Methods whose draft is a checkpoint of its own: a model that drafts, or a head that was trained for the target."""

METHODS_TAKING_DRAFT: Final = (*METHODS_WITH_DRAFT, Method.MTP)
"""Methods that may name a checkpoint to draft with: mtp drafts with layers of the target's own without one."""

METHODS_NEEDING_DRAFT: Final = tuple(method for method in METHODS_WITH_DRAFT if method is not Method.DSPARK)

METHODS_WITH_HIDDEN_STATES: Final = (Method.EAGLE, Method.EAGLE3, Method.MTP, Method.DFLASH, Method.DSPARK)

METHODS_OF_BLOCKS: Final = (Method.DFLASH, Method.DSPARK)
"""Methods whose draft proposes all tokens of a block in one pass."""
METHODS_IN_PARALLEL: Final = (Method.DRAFT_MODEL, Method.EAGLE3)
"""Methods whose draft may be one that proposes all tokens in one pass (PARD, P-EAGLE); dflash and dspark always do."""


class Dtype(StrEnum):
    """Element type of what is not quantized, in vLLM's words."""

    AUTO = "auto"
    """That of the checkpoint; of one in float32 bfloat16 (config/model.py, _resolve_auto_dtype)."""
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


ENGINE_DTYPES: Final[Mapping[str, Dtype]] = {
    **{dtype.value: dtype for dtype in Dtype},
    "half": Dtype.FLOAT16,
    "float": Dtype.FLOAT32,
}
"""All names that vLLM takes for them (config/model.py, _STR_DTYPE_TO_TORCH_DTYPE)."""

SIXTEEN_BIT_BYTES: Final = 2
FLOAT32_BYTES: Final = 4

DTYPE_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys((Dtype.AUTO, Dtype.BFLOAT16, Dtype.FLOAT16), SIXTEEN_BIT_BYTES),
    Dtype.FLOAT32: FLOAT32_BYTES,
}


class KvCacheDtype(StrEnum):
    """Element type of the KV cache, in vLLM's words."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"


FP8_ELEMENT_BYTES: Final = 1

KV_ELEMENT_BYTES: Final[Mapping[str, int | None]] = {
    KvCacheDtype.AUTO: None,
    KvCacheDtype.BFLOAT16: 2,
    **dict.fromkeys((KvCacheDtype.FP8, KvCacheDtype.FP8_E4M3, KvCacheDtype.FP8_E5M2), FP8_ELEMENT_BYTES),
}
"""Bytes of a number in the KV cache; None is what the checkpoint asks for, or else the model's own type."""


class PolicyMode(StrEnum):
    """What a policy may do."""

    OBSERVE = "Observe"
    ADVISE = "Advise"
    ENFORCE = "Enforce"


class OnCrashLoop(StrEnum):
    """What a policy does about engines that crash again and again while they speculate."""

    REPORT = "Report"
    SERVE_WITHOUT_SPECULATION = "ServeWithoutSpeculation"


class PolicyAction(StrEnum):
    """What is to be done."""

    KEEP = "Keep"
    CHANGE = "Change"
    """Speculate otherwise: another K, K by batch size, adaptive verification, another method."""
    TURN_OFF = "TurnOff"
    TRY_AGAIN = "TryAgain"
    RESTART = "Restart"


class PolicyOutcome(StrEnum):
    """Outcome of an action."""

    KEPT = "Kept"
    PAUSED = "Paused"
    COOLING_DOWN = "CoolingDown"
    BUDGET_SPENT = "BudgetSpent"
    OBSERVED = "Observed"
    ADVISED = "Advised"
    REFUSED = "Refused"
    """The API server did not let it happen; it is tried again."""
    DONE = "Done"


class Quantization(StrEnum):
    """Precision in which a model's linear layers are held in GPU memory."""

    AS_CHECKPOINT = "AsCheckpoint"
    BF16 = "BF16"
    FP8 = "FP8"
    INT8 = "INT8"
    INT4 = "INT4"
    AUTO = "Auto"


METHODS_WITH_LAYERS = (*METHODS_WITH_DRAFT, Method.MTP)

METHODS_WITH_LOOKUP = (Method.NGRAM, Method.NGRAM_GPU)

METHODS_OF_FREE_LENGTH = (*METHODS_WITH_LOOKUP, Method.SUFFIX)
"""Methods that propose as many tokens as they find, in some steps none."""

METHODS_WITH_SAMPLING = (Method.DRAFT_MODEL, *METHODS_WITH_HIDDEN_STATES)
"""Methods whose draft has a distribution of its own to sample from."""


class RejectionSampling(StrEnum):
    """How drafted tokens are checked, in vLLM's words. One that is left out, synthetic, makes answers up."""

    STANDARD = "standard"
    BLOCK = "block"
    FLY = "fly"


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


class Platform(StrEnum):
    """What the engine computes on."""

    GPU = "gpu"
    CPU = "cpu"


class OnlineQuantization(StrEnum):
    """Precision to which the engine quantizes a 16-bit checkpoint while loading it."""

    FP8 = "FP8"


ROPE_KEYS: Final = ("rope_parameters", "rope_scaling")
"""Present and former name of the same key of config.json; transformers accepts both."""


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


class AutoscalingMetric(StrEnum):
    """Metric of the engines that an autoscaler keeps at a target per replica."""

    RUNNING_REQUESTS = "RunningRequests"
    WAITING_REQUESTS = "WaitingRequests"
    KV_CACHE_USAGE = "KvCacheUsage"
    PREDICTED_UTILIZATION = "PredictedUtilization"


class RolloutStrategy(StrEnum):
    """Which engine goes first when the engines are replaced."""

    REPLACE = "Replace"
    SURGE = "Surge"
    CANARY = "Canary"


class LiveTokenIds(StrEnum):
    """Token ids that live captures may record in a namespace, as in the engine's variable."""

    NONE = ""
    ANSWERS = "answers"
    PROMPTS = "answers,prompts"
