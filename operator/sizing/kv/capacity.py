"""The KV cache: what fits into a given space.

Everything is counted in blocks of the pool that all layers of target and
draft share, as vLLM counts (v1/core/kv_cache_utils.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specdecode_operator.sizing.base.errors import SizingError
from specdecode_operator.sizing.kv.groups import KvGrouping

NULL_BLOCKS = 1
"""Blocks that the pool holds back for itself (block_pool.py, null_block): no request gets them."""


@dataclass(frozen=True)
class KvCapacity:
    """What fits into the space for the KV cache.

    Attributes
    ----------
    num_blocks
        Whole blocks.
    tokens
        Tokens that fit: concurrency x length, rounded down.
    max_concurrency
        Requests of the full length that fit at once.
    printed_tokens
        Tokens that the engine's log claims. The same from 0.21 on.
    """

    num_blocks: int
    tokens: int
    max_concurrency: float
    printed_tokens: int


def rank_blocks(grouping: KvGrouping, available_bytes: int) -> int:
    """Return the whole blocks that fit on one rank (get_kv_cache_config_from_groups)."""
    return max(0, available_bytes // grouping.bytes_per_block)


def pool_blocks(stages: Sequence[KvGrouping], available_bytes: Sequence[int]) -> int:
    """Return the blocks of the pool: what the smallest of the ranks holds (get_kv_cache_configs)."""
    return min(map(rank_blocks, stages, available_bytes))


def pool_capacity(grouping: KvGrouping, num_blocks: int, max_model_len: int) -> KvCapacity:
    """Return what a pool of this many blocks holds.

    Floats as in vLLM (get_kv_cache_capacity), so that tokens equal the number
    its log prints. With pipeline stages any stage's grouping gives the same.
    """
    per_request = request_blocks(grouping, max_model_len)
    concurrency = num_blocks / per_request
    tokens = int(concurrency * max_model_len)
    if grouping.rules.tokens_by_concurrency:
        return KvCapacity(num_blocks, tokens, concurrency, tokens)
    return KvCapacity(num_blocks, tokens, concurrency, _printed_before(grouping, num_blocks, max_model_len))


def request_blocks(grouping: KvGrouping, max_model_len: int) -> int:
    """Return the blocks that one request of this length takes."""
    if max_model_len < 1:
        raise SizingError("maxModelLen", max_model_len, "use a length of at least one token")
    return grouping.blocks_per_request(max_model_len)


def blocks_for(grouping: KvGrouping, max_model_len: int, requests: int) -> int:
    """Return the blocks that hold this many requests of the full length, with the block the pool holds back."""
    return requests * request_blocks(grouping, max_model_len) + NULL_BLOCKS


def engine_starts(grouping: KvGrouping, num_blocks: int, max_model_len: int) -> bool:
    """Decide whether the engine starts: it wants room for one request of the full length.

    kv_cache_utils.py, _check_enough_kv_cache_memory. Versions before 0.29
    count the null block as room.
    """
    return request_blocks(grouping, max_model_len) <= _room(grouping, num_blocks)


def largest_length(grouping: KvGrouping, num_blocks: int, limit_tokens: int) -> int:
    """Return the largest length up to the limit with which the engine starts; zero for none.

    The estimate that the engine prints where the length asked for does not
    fit (_estimate_max_model_len_from_groups).
    """
    room = _room(grouping, num_blocks)
    fits, too_long = 0, limit_tokens + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if grouping.blocks_per_request(middle) <= room:
            fits = middle
        else:
            too_long = middle
    return fits


def _room(grouping: KvGrouping, num_blocks: int) -> int:
    return num_blocks - NULL_BLOCKS if grouping.rules.checks_null_block else num_blocks


def _printed_before(grouping: KvGrouping, num_blocks: int, max_model_len: int) -> int:
    """Return the tokens that versions before 0.21 print: of one group (_report_kv_cache_config).

    The block of a state is there as long as the request, or with prefix
    caching as attention's.
    """
    smallest_block = min(group.block_size or max_model_len for group in grouping.groups)
    return num_blocks // len(grouping.groups) * smallest_block
