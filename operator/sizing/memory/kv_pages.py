"""The page of each layer: what it keeps in one block, after the engine has made the pages fit one pool.

What ``v1/core/kv_cache_utils.py`` of vLLM does to its KVCacheSpecs before it groups them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from specdecode_operator.sizing.base.errors import SizingError
from specdecode_operator.sizing.base.units import ceil_div
from specdecode_operator.sizing.kv.layers import CacheKind, KvLayer
from specdecode_operator.sizing.kv.settings import KvSettings, exports_checkpoint, kv_rules

WHOLE: Final = frozenset({CacheKind.FULL, CacheKind.LATENT})
"""Kinds that keep every token."""

LOCAL: Final = frozenset({CacheKind.SLIDING, CacheKind.CHUNKED})
"""Kinds that forget."""

LATENT_BLOCK_ALIGNMENT: Final = 128
"""Tokens of which blocks beside states are multiples with latent attention (interface.py, _align_hybrid_block_size)."""

EXPORTED_TOKENS: Final = 64
"""Tokens on whose multiples FlashInfer exports states (gdn_attn.py, FLASHINFER_GDN_CHECKPOINT_ALIGNMENT)."""


@dataclass(frozen=True)
class Page:
    """One layer's part of a block. Layers of equal pages can share a group."""

    # What the layer keeps. Its kind is how the engine manages it, which may be FULL although the layer computes with a
    # window.
    layer: KvLayer
    block_size: int  # Tokens in its blocks; zero for a state
    page_bytes: int  # Bytes of one block in this layer


def layer_pages(layers: Sequence[KvLayer], settings: KvSettings) -> list[Page]:
    """Return the page of each layer as the engine starts from it, without the mark of the draft.

    Where the target has states, blocks are raised until attention's page holds
    one, and every state is padded to that page (platforms/interface.py,
    _align_hybrid_block_size). A state has room for the speculated tokens.
    """
    unmarked = [replace(layer, of_draft=False) for layer in layers]
    states = [_state_bytes(layer, settings) for layer in layers if layer.kind is CacheKind.STATE]
    of_target = [layer for layer in layers if layer.kind is CacheKind.STATE and not layer.of_draft]
    attention = next((layer for layer in layers if layer.kind is not CacheKind.STATE and not layer.of_draft), None)
    if attention is None or not of_target:
        return [_page(layer, settings.block_size, _state_bytes(layer, settings)) for layer in unmarked]
    block_size = _raised_block_size(attention, of_target, settings)
    page_bytes = block_size * attention.token_bytes
    if max(states) > page_bytes:
        # The engine stops at an assertion (kv_cache_interface.py, MambaSpec.page_size_bytes).
        message = f"its states do not fit the target's blocks of {page_bytes} bytes a layer; use a draft without states"
        raise SizingError("draft", max(states), message)
    return [_page(layer, block_size, page_bytes) for layer in unmarked]


def is_uniform(pages: Sequence[Page]) -> bool:
    """Decide whether one table of blocks serves all layers, however wide (UniformTypeKVCacheSpecs.is_uniform_type)."""
    first = pages[0]
    if first.layer.kind in WHOLE:
        return all(page.layer.kind in WHOLE for page in pages)
    if first.layer.kind in LOCAL:
        wanted = (first.layer.kind, first.layer.reach_tokens)
        return all((page.layer.kind, page.layer.reach_tokens) == wanted for page in pages)
    wanted_state = _state_type(first)
    return all(_state_type(page) == wanted_state for page in pages)


def _state_type(page: Page) -> tuple[CacheKind, bool, bool, int]:
    return page.layer.kind, page.layer.exports_checkpoint, page.layer.delta_rule, page.page_bytes


def keep_all_tokens(pages: list[Page]) -> list[Page] | None:
    """Return the pages with windows and chunks managed as full attention; None where that makes them no one type.

    kv_cache_utils.py, _promote_local_kv_cache_specs.
    """
    if is_uniform(pages):
        return pages
    if not any(page.layer.kind in WHOLE for page in pages) or _unequal_reaches(pages):
        return None
    kept = [
        replace(page, layer=replace(page.layer, kind=CacheKind.FULL, reach_tokens=0))
        if page.layer.kind in LOCAL
        else page
        for page in pages
    ]
    return kept if is_uniform(kept) else None


def equal_pages(pages: list[Page], settings: KvSettings) -> list[Page] | None:
    """Return the pages raised to the largest; None where the engine cannot.

    kv_cache_utils.py, unify_kv_cache_spec_page_size: more tokens where the
    page divides the largest, padding where not.
    """
    largest = max(page.page_bytes for page in pages)
    raised = []
    for page in pages:
        kind = page.layer.kind
        if page.page_bytes == largest:
            raised.append(page)
        elif kind is not CacheKind.STATE and largest % page.page_bytes == 0:
            raised.append(Page(page.layer, page.block_size * (largest // page.page_bytes), largest))
        elif _can_be_padded(kind, settings):
            raised.append(replace(page, page_bytes=largest))
        else:
            return None
    return raised


def padded_pages(pages: Sequence[Page]) -> list[Page]:
    """Return the pages padded to the largest, which is the most that any layout of equal blocks takes."""
    largest = max(page.page_bytes for page in pages)
    return [replace(page, page_bytes=largest) for page in pages]


def _can_be_padded(kind: CacheKind, settings: KvSettings) -> bool:
    """Decide whether a page may be longer than what its layer keeps."""
    rules = kv_rules(settings.version)
    if kind is CacheKind.STATE:
        return rules.pads_state_pages
    return rules.pads_latent_pages if kind is CacheKind.LATENT else rules.pads_attention_pages


def falls_back_to_full(pages: Sequence[Page], settings: KvSettings) -> bool:
    """Decide whether windows are kept whole where pages cannot be equal (_try_get_full_allocation_fallback_groups)."""
    kinds = {page.layer.kind for page in pages}
    known = kv_rules(settings.version).full_allocation_fallback
    return known and {CacheKind.LATENT, CacheKind.SLIDING} <= kinds and CacheKind.CHUNKED not in kinds


def _page(layer: KvLayer, block_size: int, state_page_bytes: int) -> Page:
    if layer.kind is CacheKind.STATE:
        return Page(layer, 0, state_page_bytes)
    if layer.token_bytes <= 0:
        raise SizingError("token_bytes", layer.token_bytes, f"a layer that keeps {layer.kind} attention needs bytes")
    return Page(layer, block_size, block_size * layer.token_bytes)


def _state_bytes(layer: KvLayer, settings: KvSettings) -> int:
    if layer.kind is CacheKind.STATE and layer.state_bytes <= 0:
        raise SizingError("state_bytes", layer.state_bytes, "a layer with a state needs its bytes")
    return layer.state_bytes + settings.num_speculative_tokens * layer.state_bytes_per_speculated_token


def _raised_block_size(attention: KvLayer, states: list[KvLayer], settings: KvSettings) -> int:
    """Return the tokens of a block that holds one state, no fewer than were asked for.

    States that a prefill exports lie on a grid, and blocks on it, too (get_mamba_prefill_checkpoint_alignment).
    """
    state_bytes = max(_state_bytes(layer, settings) for layer in states)
    alignment = settings.block_size
    if attention.kind is CacheKind.LATENT and kv_rules(settings.version).aligns_latent_blocks:
        alignment = max(alignment, LATENT_BLOCK_ALIGNMENT)
    if all(layer.delta_rule and exports_checkpoint(layer, settings) for layer in states):
        alignment = math.lcm(alignment, EXPORTED_TOKENS)
    return alignment * ceil_div(state_bytes, alignment * attention.token_bytes)


def _unequal_reaches(pages: Sequence[Page]) -> bool:
    """Decide whether the engine refuses to manage several windows, or several chunks, as full attention.

    FullAttentionSpec.merge_window_sizes raises; with a latent cache among them it is not asked.
    """
    if any(page.layer.kind not in LOCAL and page.layer.kind is not CacheKind.FULL for page in pages):
        return False
    windows = {page.layer.reach_tokens for page in pages if page.layer.kind is CacheKind.SLIDING}
    chunks = {page.layer.reach_tokens for page in pages if page.layer.kind is CacheKind.CHUNKED}
    return len(windows) > 1 or len(chunks) > 1
