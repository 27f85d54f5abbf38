"""What the layers of target and draft keep of a sequence, on one rank."""

from dataclasses import replace
from functools import lru_cache
from typing import Final, NamedTuple

from specdecode_operator.sizing.base.errors import SizingError
from specdecode_operator.sizing.base.formula import named
from specdecode_operator.sizing.base.remembered import MOST_REMEMBERED
from specdecode_operator.sizing.base.units import ceil_div
from specdecode_operator.sizing.kv.layers import CacheKind, KvLayer, LayerRun
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.model.layers import (
    DeltaNet,
    Indexer,
    LatentAttention,
    Layer,
    SelectiveScan,
    SelfAttention,
    SingleMixer,
    StateSpace,
)
from specdecode_operator.sizing.weights.rank_layers import groups_per_rank, kv_heads_per_rank
from specdecode_operator.sizing.weights.stages import Stage, stages
from specdecode_operator.vocabulary import FLOAT32_BYTES, FP8_ELEMENT_BYTES

_SIXTEEN_BIT_BYTES: Final = 2

_SCALED_TOGETHER: Final = 128
"""Numbers of an FP8 vector that share a scale (vLLM, DeepseekV32Indexer.quant_block_size)."""


@lru_cache(maxsize=MOST_REMEMBERED)
def cached_layers(
    target: ModelGeometry, draft: ModelGeometry | None, tensor: int, pipeline: int, element_bytes: int | None
) -> tuple[tuple[LayerRun, ...], ...]:
    """Return what each pipeline stage keeps; the draft sits on the last one.

    Without bytes of a number in the cache it is what the checkpoint asks for, or else the model's own type. The draft
    follows the target: vLLM gives both the same cache_dtype.
    """
    element_bytes = element_bytes or target.cache_element_bytes
    if any(_is_severed(stage) for stage in stages(target, pipeline)):
        message = f"cuts layers of {target.name} off from those whose keys and values they read; use 1"
        raise SizingError("parallelism.pipeline", pipeline, message)
    kept = [_runs(stage, target, tensor, element_bytes, of_draft=False) for stage in stages(target, pipeline)]
    if draft is not None and draft.layers:
        kept[-1] += _runs(stages(draft, 1)[0], draft, tensor, element_bytes, of_draft=True)
    return tuple(kept)


def _runs(
    stage: Stage, geometry: ModelGeometry, tensor: int, element_bytes: int | None, *, of_draft: bool
) -> tuple[LayerRun, ...]:
    width = element_bytes or geometry.dtype_bytes
    runs = []
    for layer, count in stage.distinct_layers:
        for mixer in _keeping(layer):
            kept = _kv_layer(mixer, tensor, width, geometry.dtype_bytes, of_draft=of_draft)
            kept = _as_assumed(kept, geometry)
            runs.append(LayerRun(kept, named(count, f"{kept.kind.value} layers", like=geometry.hidden_size)))
    return tuple(runs)


def _as_assumed(layer: KvLayer, geometry: ModelGeometry) -> KvLayer:
    """Return the cache of a layer, scaled to what the user says that those of all layers take on one GPU."""
    of_tokens, of_states = geometry.assumed_token_bytes, geometry.assumed_state_bytes
    if of_tokens is None and of_states is None:
        return layer
    by_shape = whole_cache(geometry)
    if layer.kind is CacheKind.STATE:
        return layer if of_states is None else _scaled_state(layer, of_states, by_shape.state_bytes)
    return layer if of_tokens is None else _scaled_tokens(layer, of_tokens, by_shape.token_bytes)


def _scaled_tokens(layer: KvLayer, given: int, by_shape: int) -> KvLayer:
    return replace(layer, token_bytes=max(ceil_div(layer.token_bytes * given, by_shape), 1))


def _scaled_state(layer: KvLayer, given: int, by_shape: int) -> KvLayer:
    return replace(
        layer,
        state_bytes=max(ceil_div(layer.state_bytes * given, by_shape), 1),
        state_bytes_per_speculated_token=ceil_div(layer.state_bytes_per_speculated_token * given, by_shape),
    )


class WholeCache(NamedTuple):
    """What all layers of a model keep on one GPU, by their shapes."""

    token_bytes: int
    state_bytes: int


@lru_cache(maxsize=MOST_REMEMBERED)
def whole_cache(geometry: ModelGeometry) -> WholeCache:
    """Return the bytes of a token and of a request's states, in the model's own type, whatever the user assumes."""
    width = geometry.dtype_bytes
    kept = [
        (_kv_layer(mixer, 1, width, width, of_draft=False), count)
        for layer, count in geometry.distinct_layers
        for mixer in _keeping(layer)
    ]
    tokens = sum(count * layer.token_bytes for layer, count in kept)
    return WholeCache(tokens, sum(count * layer.state_bytes for layer, count in kept))


def _is_severed(stage: Stage) -> bool:
    """Decide whether layers borrow keys and values of one that lies on another stage (vLLM refuses: attention.py)."""
    mixers = [mixer for layer, _ in stage.distinct_layers for mixer in layer.mixers if isinstance(mixer, SelfAttention)]
    lent = {mixer.window_tokens for mixer in mixers if not mixer.borrows_cache}
    return any(mixer.borrows_cache and mixer.window_tokens not in lent for mixer in mixers)


def _keeping(layer: Layer) -> tuple[SingleMixer | Indexer, ...]:
    """Return what of a layer keeps something of a sequence."""
    indexers = [mixer.indexer for mixer in layer.mixers if isinstance(mixer, LatentAttention) and mixer.indexer]
    own = (mixer for mixer in layer.mixers if not (isinstance(mixer, SelfAttention) and mixer.borrows_cache))
    return (*own, *indexers)


def _kv_layer(mixer: SingleMixer | Indexer, tensor: int, width: int, state_width: int, *, of_draft: bool) -> KvLayer:
    match mixer:
        case SelfAttention():
            token = kv_heads_per_rank(mixer.num_kv_heads, tensor) * (mixer.head_dim + mixer.value_dim) * width
            kind, reach = CacheKind.FULL, 0
            if mixer.window_tokens is not None:
                kind, reach = CacheKind.SLIDING, mixer.window_tokens
            elif mixer.chunk_tokens is not None:
                kind, reach = CacheKind.CHUNKED, mixer.chunk_tokens
            return KvLayer(kind, token, reach, head_width=mixer.head_dim, element_bytes=width, of_draft=of_draft)
        case LatentAttention():
            return _latent(mixer, width, of_draft=of_draft)
        case Indexer():
            return _index_keys(mixer, of_draft=of_draft)
        case DeltaNet():
            return _delta_net(mixer, tensor, state_width, of_draft=of_draft)
        case StateSpace():
            return _state_space(mixer, tensor, state_width, of_draft=of_draft)
        case SelectiveScan():
            return _selective_scan(mixer, tensor, state_width, of_draft=of_draft)


def _latent(mixer: LatentAttention, width: int, *, of_draft: bool) -> KvLayer:
    """Return the cache of latent attention: one vector for all heads, whole on every rank (MLAAttentionSpec).

    In FP8, sparse attention keeps its rotary part in 16 bits and a scale for
    each 128 of the rest (fp8_ds_mla, v1/kv_cache_interface.py): 656 bytes in
    the place of 576 with DeepSeek V3.2 and GLM-5. Kernels of Blackwell do not.
    """
    latent = mixer.kv_rank + mixer.rope_head_dim
    token = latent * width
    if mixer.sparse_tokens and mixer.packs_cache and width == FP8_ELEMENT_BYTES:
        token = mixer.kv_rank + _scale_bytes(mixer.kv_rank) + mixer.rope_head_dim * _SIXTEEN_BIT_BYTES
    return KvLayer(CacheKind.LATENT, token, head_width=latent, element_bytes=width, of_draft=of_draft)


def _index_keys(indexer: Indexer, *, of_draft: bool) -> KvLayer:
    """Return the cache of an indexer: one FP8 key a token with its scales, whatever the type of the other layers.

    models/deepseek_v32/attention.py, DeepseekV32Indexer: 132 bytes with a width of 128.
    """
    token = indexer.head_dim + _scale_bytes(indexer.head_dim)
    return KvLayer(CacheKind.LATENT, token, head_width=token, element_bytes=FP8_ELEMENT_BYTES, of_draft=of_draft)


def _scale_bytes(width: int) -> int:
    """Return the bytes of the float32 scales of a vector in FP8."""
    return width // _SCALED_TOGETHER * FLOAT32_BYTES


def _delta_net(mixer: DeltaNet, tensor: int, width: int, *, of_draft: bool) -> KvLayer:
    """Return the state of a linear layer (vLLM, mamba_utils.py, gated_delta_net_state_shape)."""
    convolution = mixer.conv_width // tensor * width
    state_width = mixer.state_element_bytes or width
    temporal = mixer.num_value_heads // tensor * mixer.value_head_dim * mixer.key_head_dim * state_width
    return KvLayer(
        CacheKind.STATE,
        state_bytes=convolution * (mixer.conv_kernel - 1) + temporal,
        state_bytes_per_speculated_token=convolution,
        delta_rule=True,
        of_draft=of_draft,
    )


def _state_space(mixer: StateSpace, tensor: int, width: int, *, of_draft: bool) -> KvLayer:
    """Return the state of a Mamba 2 layer (vLLM, mamba_utils.py, mamba2_state_shape and mamba2_state_dtype)."""
    groups = groups_per_rank(mixer.num_groups, tensor)
    convolution = (mixer.width // tensor + 2 * groups * mixer.state_size) * width
    temporal = mixer.width // tensor * mixer.state_size * (mixer.state_element_bytes or width)
    return KvLayer(
        CacheKind.STATE,
        state_bytes=convolution * (mixer.conv_kernel - 1) + temporal,
        state_bytes_per_speculated_token=convolution,
        exports_checkpoint=True,
        of_draft=of_draft,
    )


def _selective_scan(mixer: SelectiveScan, tensor: int, width: int, *, of_draft: bool) -> KvLayer:
    """Return the state of a Mamba 1 layer, which has no room for speculated tokens (mamba1_state_shape)."""
    columns = mixer.conv_kernel - 1 + mixer.state_size
    return KvLayer(CacheKind.STATE, state_bytes=mixer.width // tensor * columns * width, of_draft=of_draft)
