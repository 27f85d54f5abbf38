"""The KV cache: what fits into a given space.

Everything is counted in blocks of the pool that all layers of target and draft share, as vLLM counts
(v1/core/kv_cache_utils.py).
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from specdecode_operator.sizing.base.errors import SizingError
from specdecode_operator.sizing.kv.groups import KvGrouping

NULL_BLOCKS: Final = 1
"""Blocks that the pool holds back for itself (block_pool.py, null_block): no request gets them."""


class KvCapacity(NamedTuple):
    """What fits into the space for the KV cache, in whole blocks."""

    num_blocks: int
    tokens: int
    max_concurrency: float
    """Requests of the full length that fit at once."""


def pool_blocks(stages: Sequence[KvGrouping], available_bytes: Sequence[int]) -> int:
    """Return the blocks of the pool: what the smallest of the ranks holds (get_kv_cache_configs)."""
    return min(max(0, size // stage.bytes_per_block) for stage, size in zip(stages, available_bytes, strict=True))


def pool_capacity(grouping: KvGrouping, num_blocks: int, max_model_len: int) -> KvCapacity:
    """Return what a pool of this many blocks holds.

    Floats as in vLLM (get_kv_cache_capacity), so that tokens equal the number that its log prints from 0.21 on. With
    pipeline stages any stage's grouping gives the same.
    """
    concurrency = num_blocks / request_blocks(grouping, max_model_len)
    return KvCapacity(num_blocks, int(concurrency * max_model_len), concurrency)


def request_blocks(grouping: KvGrouping, max_model_len: int) -> int:
    """Return the blocks that one request of this length takes."""
    if max_model_len < 1:
        raise SizingError("maxModelLen", max_model_len, "use a length of at least one token")
    return grouping.blocks_per_request(max_model_len)


def blocks_for(grouping: KvGrouping, max_model_len: int, requests: int) -> int:
    """Return the blocks that hold this many requests of the full length, with the block the pool holds back."""
    return requests * request_blocks(grouping, max_model_len) + NULL_BLOCKS
