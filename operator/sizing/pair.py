"""What is sized: a target, its draft, and the limits the engine runs under."""

from dataclasses import dataclass
from typing import Final

from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.precision import Precision

DRAFT_MODEL: Final = "draft_model"
"""Method with a draft model of its own."""

NGRAM: Final = "ngram"
"""Method that looks the proposal up in the prompt."""

NO_SPECULATION: Final = "none"
"""Method of an engine that does not speculate."""


@dataclass(frozen=True)
class EngineLimits:
    """Settings of the engine that decide its memory.

    Attributes
    ----------
    max_model_len
        Longest sequence in tokens.
    max_num_seqs
        Requests that may run at once.
    max_num_batched_tokens
        Tokens scheduled in one step.
    block_size
        Tokens in one KV cache block.
    kv_cache_element_bytes
        Bytes of one KV cache element; None for the model's own type.
    memory_utilization_percent
        Share of the GPU's memory that the engine may use.
    enforce_eager
        Whether the engine runs without CUDA graphs.
    min_concurrency
        Requests of max_model_len that must fit at once.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_cache_element_bytes: int | None
    memory_utilization_percent: int
    enforce_eager: bool
    min_concurrency: int


@dataclass(frozen=True)
class Pair:
    """A target, how tokens are proposed for it, and the engine's limits.

    Attributes
    ----------
    target, target_precision
        The served model and the precision of its linear layers.
    draft, draft_precision
        The draft model, for method draft_model only.
    method
        draft_model, ngram or none.
    num_speculative_tokens
        Tokens proposed a step; 0 for method none.
    limits
        Settings of the engine.
    """

    target: ModelGeometry
    target_precision: Precision
    draft: ModelGeometry | None
    draft_precision: Precision | None
    method: str
    num_speculative_tokens: int
    limits: EngineLimits
