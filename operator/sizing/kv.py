"""The KV cache: bytes a token, and what fits into a given space.

Full attention only: target and draft then share one pool of blocks, and a
block holds the same tokens for all layers of both.
"""

from dataclasses import dataclass

from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.units import ceil_div
from specdecode_operator.sizing.weights import KEYS_AND_VALUES, kv_heads_per_rank

NULL_BLOCKS = 1
"""Blocks that the engine sets aside before it asks whether one request fits (kv_cache_utils.py)."""


@dataclass(frozen=True)
class KvCapacity:
    """What fits into the space for the KV cache.

    Attributes
    ----------
    num_blocks
        Whole blocks.
    tokens
        Tokens as vLLM's log counts them: concurrency x length, rounded down.
    max_concurrency
        Requests of the full length that fit at once.
    """

    num_blocks: int
    tokens: int
    max_concurrency: float


def kv_bytes_per_token(geometry: ModelGeometry, tensor: int, element_bytes: int | None = None) -> int:
    """Return the bytes one token takes in all layers on one rank; element None: the model's own type."""
    width = element_bytes or geometry.dtype_bytes
    return geometry.num_layers * KEYS_AND_VALUES * kv_heads_per_rank(geometry, tensor) * geometry.head_dim * width


def blocks_per_request(max_model_len: int, block_size: int) -> int:
    """Return the blocks that one request of the full length takes."""
    return ceil_div(max_model_len, block_size)


def required_blocks(max_model_len: int, block_size: int, min_concurrency: int) -> int:
    """Return the blocks without which min_concurrency full requests do not fit."""
    return min_concurrency * blocks_per_request(max_model_len, block_size) + NULL_BLOCKS


def kv_capacity(available_bytes: int, bytes_per_token: int, block_size: int, max_model_len: int) -> KvCapacity:
    """Return what fits into the available bytes, by vLLM's own arithmetic.

    Floats as in vLLM (kv_cache_utils.py, get_kv_cache_configs), so that
    tokens equal the number its log prints.
    """
    num_blocks = max(0, available_bytes // (block_size * bytes_per_token))
    concurrency = num_blocks / blocks_per_request(max_model_len, block_size)
    return KvCapacity(num_blocks, int(concurrency * max_model_len), concurrency)
