"""What sparse attention keeps beside weights and caches: the tokens that indexers chose (DeepSeek V3.2, GLM-5)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from specdecode_operator.sizing.model.layers import LatentAttention, Layer

_INT32_BYTES: Final = 4

BLOCK_TOKENS: Final = 64
"""Tokens of which its blocks are multiples (vLLM, v1/attention/backends/mla/indexer.py and flashmla_sparse.py)."""


@dataclass(frozen=True)
class IndexRows:
    """How many rows of chosen tokens one step fills."""

    batch_tokens: int  # Tokens of a step
    decoding_tokens: int  # Those of requests that decode: K + 1 each


def index_buffer_bytes(layers: Sequence[Layer], rows: IndexRows) -> int:
    """Return the buffers of chosen tokens that the engine makes while it builds these layers of one stage.

    One table for all of them, and one for each indexer, which the layers
    that share its choice read (vLLM, models/deepseek_v32/nvidia/model.py and
    v1/attention/backends/mla/index_group.py): with 1024 requests and 61
    indexers of 2048 tokens more than half a GiB.
    """
    sparse = [layer.mixer for layer in layers if isinstance(layer.mixer, LatentAttention) and layer.mixer.sparse_tokens]
    if not sparse:
        return 0
    chosen = sparse[0].sparse_tokens
    # A stage that begins between two indexers makes a table for the layers before the first one.
    groups = sum(mixer.indexer is not None for mixer in sparse) + (sparse[0].indexer is None)
    physical_rows = min(rows.batch_tokens, rows.decoding_tokens) + 1
    return (rows.batch_tokens * chosen + groups * physical_rows * (chosen + 1)) * _INT32_BYTES
