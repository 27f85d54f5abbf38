"""Short words for the layers of which KV caches are built."""

from dataclasses import replace

from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.memory.kv_cache import (
    KvCapacity,
    KvGrouping,
    Layers,
    pool_blocks,
    pool_capacity,
    stage_groups,
)
from specdecode_operator.sizing.memory.kv_pages import CacheKind, KvLayer, KvSettings, LayerRun

NEWEST = KvSettings(block_size=16, max_num_batched_tokens=8192, version="0.32.0")
SPACE = 20 * GIB


def full(heads: int, width: int, element: int = 2) -> KvLayer:
    """Full attention."""
    return KvLayer(CacheKind.FULL, token_bytes=2 * heads * width * element, head_width=width, element_bytes=element)


def sliding(heads: int, width: int, window: int) -> KvLayer:
    """A sliding window."""
    return replace(full(heads, width), kind=CacheKind.SLIDING, reach_tokens=window)


def chunked(heads: int, width: int) -> KvLayer:
    """Chunks of 8192 tokens."""
    return replace(full(heads, width), kind=CacheKind.CHUNKED, reach_tokens=8192)


def latent(width: int = 576) -> KvLayer:
    """Multi-head latent attention."""
    return KvLayer(CacheKind.LATENT, token_bytes=2 * width, head_width=width, element_bytes=2)


def linear(state_bytes: int, per_speculated: int = 0) -> KvLayer:
    """A state of a request."""
    return KvLayer(CacheKind.STATE, state_bytes=state_bytes, state_bytes_per_speculated_token=per_speculated)


def runs(*pairs: tuple[int, KvLayer]) -> Layers:
    """Layers of a model, each with their number."""
    return tuple(LayerRun(layer, count) for count, layer in pairs)


def kv_groups(layers: Layers, settings: KvSettings) -> KvGrouping:
    """The KV cache of a model without pipeline stages."""
    return stage_groups((layers,), settings)[0]


def capacity(layers: Layers, settings: KvSettings, length: int, space: float = SPACE) -> KvCapacity:
    """What a space holds of requests of a length."""
    grouping = kv_groups(layers, settings)
    return pool_capacity(grouping, pool_blocks([grouping], [int(space)]), length)
