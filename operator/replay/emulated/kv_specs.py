"""What each layer keeps, in vLLM's own classes: it divides the KV cache itself."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
from vllm.v1 import kv_cache_interface as kinds

from .settings import CachedLayers

_ELEMENTS = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}


def kv_cache_specs(layers: Iterable[CachedLayers], vllm_config: Any) -> dict[str, Any]:
    """Return the specification of every layer of a rank, by a name of ours."""
    cache = vllm_config.cache_config
    layers = list(layers)
    if any(each.kind == "state" for each in layers):
        _align(layers, cache)
    found: dict[str, Any] = {}
    for each in layers:
        spec = _state(each, vllm_config) if each.kind == "state" else _attention(each)
        for _ in range(each.count):
            found[f"{'draft' if each.of_draft else 'model'}.layers.{len(found)}.attn"] = spec
    return found


def _align(layers: list[CachedLayers], cache: Any) -> None:
    """Adopt the blocks that hold a state: vLLM's workers would choose them, by the same rule as the plan."""
    cache.block_size = max((each.block_size for each in layers), default=0) or cache.block_size
    cache.mamba_page_size_padded = max(each.page_bytes for each in layers if each.kind == "state")
    if cache.mamba_cache_mode == "align":
        cache.mamba_block_size = cache.block_size


def _attention(layer: CachedLayers) -> Any:
    shape = {"block_size": layer.block_size, "dtype": _ELEMENTS[layer.element_bytes]}
    if layer.kind == "latent":
        width = layer.token_bytes // layer.element_bytes
        return _made(kinds.MLAAttentionSpec, **shape, num_kv_heads=1, head_size=width)
    heads, rest = divmod(layer.token_bytes, 2 * layer.head_width * layer.element_bytes)
    # Where keys and values differ in width, only their bytes together count.
    width = layer.token_bytes // (2 * layer.element_bytes) if rest else layer.head_width
    shape |= {"num_kv_heads": 1 if rest else heads, "head_size": width}
    if layer.kind == "sliding":
        return _made(kinds.SlidingWindowSpec, **shape, sliding_window=layer.reach_tokens)
    if layer.kind == "chunked":
        return _made(kinds.ChunkedLocalAttentionSpec, **shape, attention_chunk_size=layer.reach_tokens)
    return _made(kinds.FullAttentionSpec, **shape)


def _state(layer: CachedLayers, vllm_config: Any) -> Any:
    cache = vllm_config.cache_config
    return _made(
        kinds.MambaSpec,
        block_size=cache.mamba_block_size or vllm_config.model_config.max_model_len,
        shapes=((layer.state_bytes,),),
        dtypes=(torch.uint8,),
        page_size_padded=cache.mamba_page_size_padded,
        mamba_cache_mode=cache.mamba_cache_mode,
        num_speculative_blocks=vllm_config.num_speculative_tokens,
        num_prefill_checkpoint_blocks=int(layer.exports_checkpoint and cache.mamba_cache_mode == "align"),
    )


def _made(kind: Any, **known: Any) -> Any:
    """Return a specification with what this version of vLLM has of it."""
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in known.items() if name in names})
