"""Page sizes of KV cache layers: the bytes of each layer in one block, made equal for one pool.

The rules follow vLLM's v1/core/kv_cache_utils.py up to the grouping of its KVCacheSpecs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

from specdecode_operator.sizing.arithmetic import ceil_div
from specdecode_operator.sizing.errors import SizingError
from specdecode_operator.sizing.result_cache import MEMO_SIZE
from specdecode_operator.sizing.version_rules import sizing_facts


class CacheKind(StrEnum):
    """How much of a sequence a layer remembers."""

    FULL = "full"
    """Every token: keys and values of each head."""

    LATENT = "latent"
    """Every token: one compressed vector for all heads (MLA), whole on every rank."""

    SLIDING = "sliding"
    """The tokens of a window."""

    CHUNKED = "chunked"
    """The tokens of the chunk that is being filled."""

    STATE = "state"
    """A state of fixed size for any length (Mamba, linear attention)."""


@dataclass(frozen=True)
class KvLayer:
    """The cache of one layer on one rank."""

    kind: CacheKind  # How much of a sequence it remembers
    token_bytes: int = 0  # Bytes of one token; zero for kind STATE
    reach_tokens: int = 0  # Window or chunk in tokens; zero for the other kinds
    state_bytes: int = 0  # Bytes of one state with no tokens speculated; zero but for kind STATE
    # What each speculated token adds to one state (the convolution's columns)
    state_bytes_per_speculated_token: int = 0
    # Keys and values are this wide: layers of unequal width are unequal to the engine even where their bytes agree.
    # Zero for kind STATE.
    head_width: int = 0
    element_bytes: int = 0  # Bytes of one number in it, for the same reason. Zero for kind STATE.
    # Whether a state can be stored from inside a prefill (Mamba 2 from vLLM 0.32 on, Kimi K3), which takes one more
    # with prefix caching
    exports_checkpoint: bool = False
    # Whether it is a gated delta net, whose states FlashInfer exports so from vLLM 0.33 on, each 64 tokens
    delta_rule: bool = False
    of_draft: bool = False  # Whether the layer belongs to the draft


@dataclass(frozen=True)
class LayerRun:
    """Equal layers in a row."""

    layer: KvLayer  # What each of them keeps
    count: int  # How many there are


@dataclass(frozen=True)
class KvRules:
    """Rules of a version of vLLM; the table of versions explains each."""

    groups_tolerate_half: bool
    tokens_by_concurrency: bool
    pads_attention_pages: bool
    pads_latent_pages: bool
    batches_in_flight: bool
    pads_state_pages: bool
    full_allocation_fallback: bool
    aligns_latent_blocks: bool
    keeps_replayed_tokens: bool
    checks_null_block: bool
    exports_checkpoints: bool
    exports_delta_states: bool


@lru_cache(maxsize=MEMO_SIZE)
def kv_rules(version: str) -> KvRules:
    """Return the rules of a vLLM version such as ``0.19.1``; a newer one than is known follows all of them."""
    return KvRules(**sizing_facts(version)["kv_cache"])


class KvSettings(NamedTuple):
    """Settings of the engine. The length of a request is not included: it does not change the layout."""

    block_size: int  # Tokens in a block, as asked for or as the attention backend prefers (16 with FlashAttention)
    max_num_batched_tokens: int  # Tokens that one step computes at most
    version: str  # vLLM's version
    pipeline: int = 1  # Pipeline stages
    async_scheduling: bool = True  # Whether the next step is prepared while one runs
    v2_runner: bool = True  # Whether model runner V2 runs it
    prefix_caching: bool = True  # Whether prefixes are cached. Models with states then keep one state more.
    num_speculative_tokens: int = 0  # K; zero without speculation
    # Whether the draft reads the target's hidden states (EAGLE, MTP, dflash, dspark)
    draft_reads_hidden_states: bool = False
    prediction_modules: int = 0  # Modules of an MTP draft that predict one after the other; zero for other methods
    # False with ``--disable-hybrid-kv-cache-manager``, or with a KV connector that needs that
    hybrid_manager: bool = True
    # False if the layers of target or draft are estimated, so that the engine may lay them out otherwise
    layout_known: bool = True
    chunked_hybrid: bool = True  # VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE, which is on unless set to 0


def concurrent_batches(settings: KvSettings) -> int:
    """Return the maximum number of concurrent steps (config/vllm.py, max_concurrent_batches)."""
    if settings.async_scheduling and settings.v2_runner:
        return settings.pipeline + 1
    if settings.async_scheduling and settings.pipeline == 1:
        return 2
    return settings.pipeline


def in_flight_tokens(settings: KvSettings) -> int:
    """Return the tokens that may be scheduled but not yet computed (config/vllm.py, max_in_flight_tokens)."""
    batches = concurrent_batches(settings) if kv_rules(settings.version).batches_in_flight else 1
    return batches * settings.max_num_batched_tokens


def replayed_tokens(settings: KvSettings) -> int:
    """Return the tokens that a window keeps for chained prediction modules, beyond its width.

    config/vllm.py, num_prefill_lookahead_tokens; config/speculative.py, use_multi_module_mtp.
    """
    chained = min(settings.prediction_modules, settings.num_speculative_tokens) > 1
    if not chained or not kv_rules(settings.version).keeps_replayed_tokens:
        return 0
    return settings.num_speculative_tokens - 1


def states_per_request(layer: KvLayer, settings: KvSettings) -> int:
    """Return the states that one request holds in a layer (kv_cache_interface.py, MambaSpec.max_memory_usage_bytes).

    One, one for each speculated token, and with prefix caching (mode
    ``align``) the one at the last block's end and the one that a prefill exports.
    """
    states = 1 + settings.num_speculative_tokens
    return states + 1 + _exports_checkpoint(layer, settings) if settings.prefix_caching else states


def _exports_checkpoint(layer: KvLayer, settings: KvSettings) -> bool:
    """Decide whether a state is stored from inside a prefill, which takes one more.

    FlashInfer, which vLLM selects on Hopper (gdn/qwen_gdn_linear_attn.py), does so for a gated delta net; counted on
    other GPUs too.
    """
    rules = kv_rules(settings.version)
    exports = (layer.exports_checkpoint and rules.exports_checkpoints) or (
        layer.delta_rule and rules.exports_delta_states
    )
    return settings.prefix_caching and exports


_WHOLE: Final = frozenset({CacheKind.FULL, CacheKind.LATENT})
"""Kinds that keep every token."""

_LOCAL: Final = frozenset({CacheKind.SLIDING, CacheKind.CHUNKED})
"""Kinds that forget."""

_LATENT_BLOCK_ALIGNMENT: Final = 128
"""Multiple in tokens of blocks if states and latent attention are combined (interface.py, _align_hybrid_block_size)."""

_EXPORTED_TOKENS: Final = 64
"""Multiple in tokens at which FlashInfer exports states (gdn_attn.py, FLASHINFER_GDN_CHECKPOINT_ALIGNMENT)."""


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

    If the target has states, blocks are raised until attention's page holds one, and every state is padded to that page
    (platforms/interface.py, _align_hybrid_block_size). A state has room for the speculated tokens. States that a
    prefill exports are on a grid, and so are blocks (get_mamba_prefill_checkpoint_alignment).
    """
    states = {layer: _state_bytes(layer, settings) for layer in layers if layer.kind is CacheKind.STATE}
    of_target = [layer for layer in states if not layer.of_draft]
    attention = next((layer for layer in layers if layer.kind is not CacheKind.STATE and not layer.of_draft), None)
    block_size, page_bytes = settings.block_size, None
    if attention is not None and of_target:
        alignment = settings.block_size
        if attention.kind is CacheKind.LATENT and kv_rules(settings.version).aligns_latent_blocks:
            alignment = max(alignment, _LATENT_BLOCK_ALIGNMENT)
        if all(layer.delta_rule and _exports_checkpoint(layer, settings) for layer in of_target):
            alignment = math.lcm(alignment, _EXPORTED_TOKENS)
        largest = max(states[layer] for layer in of_target)
        block_size = alignment * ceil_div(largest, alignment * attention.token_bytes)
        page_bytes = block_size * attention.token_bytes
        if max(states.values()) > page_bytes:
            # The engine stops at an assertion (kv_cache_interface.py, MambaSpec.page_size_bytes).
            message = (
                f"its states do not fit the target's blocks of {page_bytes} bytes a layer; use a draft without states"
            )
            raise SizingError("draft", max(states.values()), message)
    pages = []
    for layer in layers:
        unmarked = replace(layer, of_draft=False)
        if layer.kind is CacheKind.STATE:
            pages.append(Page(unmarked, 0, states[layer] if page_bytes is None else page_bytes))
        elif layer.token_bytes <= 0:
            message = f"a layer that keeps {layer.kind} attention needs bytes"
            raise SizingError("token_bytes", layer.token_bytes, message)
        else:
            pages.append(Page(unmarked, block_size, block_size * layer.token_bytes))
    return pages


def _state_bytes(layer: KvLayer, settings: KvSettings) -> int:
    if layer.state_bytes <= 0:
        raise SizingError("state_bytes", layer.state_bytes, "a layer with a state needs its bytes")
    return layer.state_bytes + settings.num_speculative_tokens * layer.state_bytes_per_speculated_token


def is_uniform(pages: Sequence[Page]) -> bool:
    """Decide whether one table of blocks serves all layers, however wide (UniformTypeKVCacheSpecs.is_uniform_type)."""
    first = pages[0]
    if first.layer.kind in _WHOLE:
        return all(page.layer.kind in _WHOLE for page in pages)
    if first.layer.kind in _LOCAL:
        wanted = (first.layer.kind, first.layer.reach_tokens)
        return all((page.layer.kind, page.layer.reach_tokens) == wanted for page in pages)
    wanted_state = _state_type(first)
    return all(_state_type(page) == wanted_state for page in pages)


def _state_type(page: Page) -> tuple[CacheKind, bool, bool, int]:
    return page.layer.kind, page.layer.exports_checkpoint, page.layer.delta_rule, page.page_bytes


def keep_all_tokens(pages: list[Page]) -> list[Page] | None:
    """Return the pages with windows and chunks managed as full attention; None if they still have several types.

    kv_cache_utils.py, _promote_local_kv_cache_specs.
    """
    if is_uniform(pages):
        return pages
    if not any(page.layer.kind in _WHOLE for page in pages) or _unequal_reaches(pages):
        return None
    kept = [
        replace(page, layer=replace(page.layer, kind=CacheKind.FULL, reach_tokens=0))
        if page.layer.kind in _LOCAL
        else page
        for page in pages
    ]
    return kept if is_uniform(kept) else None


def equal_pages(pages: list[Page], settings: KvSettings) -> list[Page] | None:
    """Return the pages raised to the largest; None if the engine cannot.

    kv_cache_utils.py, unify_kv_cache_spec_page_size: more tokens if the page divides the largest, otherwise padding.
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
    """Return whether a page may be longer than its layer's content."""
    rules = kv_rules(settings.version)
    if kind is CacheKind.STATE:
        return rules.pads_state_pages
    return rules.pads_latent_pages if kind is CacheKind.LATENT else rules.pads_attention_pages


def falls_back_to_full(pages: Sequence[Page], settings: KvSettings) -> bool:
    """Decide whether windows are kept whole where pages cannot be equal (_try_get_full_allocation_fallback_groups)."""
    kinds = {page.layer.kind for page in pages}
    known = kv_rules(settings.version).full_allocation_fallback
    return known and {CacheKind.LATENT, CacheKind.SLIDING} <= kinds and CacheKind.CHUNKED not in kinds


def _unequal_reaches(pages: Sequence[Page]) -> bool:
    """Decide whether the engine rejects several windows, or several chunks, managed as full attention.

    FullAttentionSpec.merge_window_sizes raises; with a latent cache among them vLLM does not call it.
    """
    if any(page.layer.kind not in _LOCAL and page.layer.kind is not CacheKind.FULL for page in pages):
        return False
    windows = {page.layer.reach_tokens for page in pages if page.layer.kind is CacheKind.SLIDING}
    chunks = {page.layer.reach_tokens for page in pages if page.layer.kind is CacheKind.CHUNKED}
    return len(windows) > 1 or len(chunks) > 1
