"""Count the tokens of a cached prefix that the engine recomputes because of speculation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from specdecode_operator.sizing.memory.kv_cache import cache_layout
from specdecode_operator.sizing.memory.kv_pages import CacheKind
from specdecode_operator.sizing.pair import Pair, Parallelism
from specdecode_operator.sizing.version_rules import sizing_facts

_UNREAD: Final[Mapping[CacheKind, str]] = {
    CacheKind.STATE: "states of a fixed size (Mamba, linear attention)",
    CacheKind.CHUNKED: "chunked attention",
}
"""Layers whose rules for finding a prefix were not read."""


class Loss(StrEnum):
    """How a version of vLLM shortens a found prefix for a draft that reads hidden states."""

    DROPS_BLOCK = "drops_block"
    """The last block that agrees is computed again: the draft's cache of its last token was made with the next one."""

    HASHES_AHEAD = "hashes_ahead"
    """A block agrees only if the following tokens that the draft reads also agree."""


@dataclass(frozen=True)
class PrefixTax:
    """Loss of each prefix, for models whose layers all keep every token or a window of tokens."""

    loss: Loss | None  # None where the draft loses nothing
    block_tokens: int  # Tokens in a block; prefixes are found in whole ones
    ahead_tokens: int = 0  # After a block, that must agree

    def found(self, shared_tokens: int) -> int:
        """Return the tokens found of a prefix that both prompts continue."""
        blocks = max(0, shared_tokens - self.ahead_tokens) // self.block_tokens
        if self.loss is Loss.DROPS_BLOCK:
            blocks = max(0, blocks - 1)
        return blocks * self.block_tokens

    def lost(self, shared_tokens: int) -> int:
        """Return the tokens that are found only without speculation."""
        return PrefixTax(None, self.block_tokens).found(shared_tokens) - self.found(shared_tokens)

    @property
    def mean_lost(self) -> float:
        """Mean loss in tokens over all prefix lengths of at least a block.

        A dropped block costs all of its tokens. If L tokens behind a block must agree, L of the B lengths of the last
        block lack one, and each of those loses the B tokens of the block.
        """
        return self.block_tokens if self.loss is Loss.DROPS_BLOCK else self.ahead_tokens


def prefix_tax(version: str, method: str, block_tokens: int, chained_tokens: int = 1) -> PrefixTax | None:
    """Return the loss by a method in a version of vLLM; None if that version's source was not read for it.

    ``chained_tokens`` is K for MTP modules that read one after the other, and 1 otherwise (config/vllm.py,
    num_prefill_lookahead_tokens).
    """
    methods: Mapping[str, str] | None = sizing_facts(version).get("prefix_cache")
    if methods is None:
        return None
    loss = Loss(methods[method]) if method in methods else None
    return PrefixTax(loss, block_tokens, chained_tokens if loss is Loss.HASHES_AHEAD else 0)


def unread_layers(pair: Pair, split: Parallelism) -> str:
    """Return the layers with unread rules for prefixes, if they may shorten a pair's prefixes; otherwise empty."""
    usual = prefix_tax(pair.limits.engine_version, pair.method, block_tokens=1)
    # Without attention no prefixes are cached by default.
    caches = pair.limits.prefix_caching and bool(pair.target.attentions)
    if usual is None or usual.loss is None or not caches:
        return ""
    return " and ".join(_UNREAD[kind] for kind in _unread(pair, split))


def _unread(pair: Pair, split: Parallelism) -> list[CacheKind]:
    kinds = {group.kind for stage in cache_layout(pair, split) for group in stage.groups}
    return [kind for kind in _UNREAD if kind in kinds]


def prefix_tax_of(pair: Pair, split: Parallelism) -> PrefixTax | None:
    """Return the loss of a pair; None without prefix caching, and for states and chunks, whose rules were not read."""
    if not pair.limits.prefix_caching or _unread(pair, split):
        return None
    groups = [group for stage in cache_layout(pair, split) for group in stage.groups]
    # Groups with blocks of several sizes share a boundary only at the least common multiple
    # (v1/core/kv_cache_utils.py, resolve_kv_cache_block_sizes).
    block_tokens = math.lcm(*(group.block_size for group in groups))
    chained = min(pair.prediction_modules, pair.num_speculative_tokens) > 1
    return prefix_tax(
        pair.limits.engine_version, pair.method, block_tokens, pair.num_speculative_tokens if chained else 1
    )
