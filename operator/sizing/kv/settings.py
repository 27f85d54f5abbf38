"""The settings of the engine that decide how its KV cache is divided."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from specdecode_operator.sizing.base.eras import sizing_facts
from specdecode_operator.sizing.base.remembered import MOST_REMEMBERED
from specdecode_operator.sizing.kv.layers import KvLayer


@dataclass(frozen=True)
class KvRules:
    """Which of its rules a version of vLLM follows; the table of versions says what each means."""

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


@lru_cache(maxsize=MOST_REMEMBERED)
def kv_rules(version: str) -> KvRules:
    """Return the rules of a vLLM version such as ``0.19.1``; a newer one than is known follows all of them."""
    return KvRules(**sizing_facts(version)["kv_cache"])


class KvSettings(NamedTuple):
    """What the engine was told. The length of a request is no part: it does not change how memory is divided."""

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
    """Return how many steps may be under way at once (config/vllm.py, max_concurrent_batches)."""
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
    return states + 1 + exports_checkpoint(layer, settings) if settings.prefix_caching else states


def exports_checkpoint(layer: KvLayer, settings: KvSettings) -> bool:
    """Decide whether a state is stored from inside a prefill, which takes one more.

    Of a gated delta net by FlashInfer, which vLLM chooses on Hopper
    (gdn/qwen_gdn_linear_attn.py); counted on other GPUs too.
    """
    rules = kv_rules(settings.version)
    exports = (layer.exports_checkpoint and rules.exports_checkpoints) or (
        layer.delta_rule and rules.exports_delta_states
    )
    return settings.prefix_caching and exports
