"""What vLLM's log says of a KV cache, and whether it starts with it: only for comparing sizing with real engines."""

from specdecode_operator.sizing.memory.kv_cache import NULL_BLOCKS, KvGrouping, pool_capacity, request_blocks
from specdecode_operator.sizing.memory.kv_pages import kv_rules


def printed_tokens(grouping: KvGrouping, version: str, num_blocks: int, max_model_len: int) -> int:
    """Tokens in the log. Before 0.21 those of one group (_report_kv_cache_config); a state's block is a request."""
    if kv_rules(version).tokens_by_concurrency:
        return pool_capacity(grouping, num_blocks, max_model_len).tokens
    smallest_block = min(group.block_size or max_model_len for group in grouping.groups)
    return num_blocks // len(grouping.groups) * smallest_block


def engine_starts(grouping: KvGrouping, version: str, num_blocks: int, max_model_len: int) -> bool:
    """Whether one request of the full length has room (_check_enough_kv_cache_memory)."""
    return request_blocks(grouping, max_model_len) <= _room(version, num_blocks)


def largest_length(grouping: KvGrouping, version: str, num_blocks: int, limit_tokens: int) -> int:
    """The largest length with which the engine starts; zero for none (_estimate_max_model_len_from_groups)."""
    fits, too_long = 0, limit_tokens + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        room_for_it = grouping.blocks_per_request(middle) <= _room(version, num_blocks)
        fits, too_long = (middle, too_long) if room_for_it else (fits, middle)
    return fits


def _room(version: str, num_blocks: int) -> int:
    # Versions before 0.29 counted the null block as room.
    return num_blocks - NULL_BLOCKS if kv_rules(version).checks_null_block else num_blocks
