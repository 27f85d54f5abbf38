"""From which acceptance on a draft pays for what it takes of the KV cache, by the bytes that a step reads."""

from dataclasses import dataclass
from typing import Final

from specdecode_operator.payoff.speed_up import Load, break_even_rate, break_even_tokens, full_cache
from specdecode_operator.payoff.step_cost import Curve, StepCosts
from specdecode_operator.sizing.base.units import GIB
from specdecode_operator.sizing.memory.budget import Budget
from specdecode_operator.sizing.pair.pair import Pair
from specdecode_operator.vocabulary import METHODS_OF_BLOCKS

_ONE_REQUEST: Final = Load.same(1)


@dataclass(frozen=True)
class BreakEven:
    """Acceptance, accepted over drafted tokens; None where even all of them are too few."""

    # While the KV cache has room, and is read in no time. None for a mixture of experts, too: how many of them a step
    # of few tokens reads depends on the text, and one that verifies reads more
    few_requests: float | None
    full_cache: float | None  # Once requests wait for room in it
    reads_all: bool = True  # Whether each step reads all weights; experts are where requests are many


def break_even(pair: Pair, budget: Budget, alone: Budget) -> BreakEven | None:
    """Return the break-even of a pair whose steps take as long as reading memory; None where it cannot be said.

    A step reads the weights and all of a full KV cache once, of the draft as often as it has passes. Reckoned in GiB in
    place of milliseconds, since only their ratio counts; how long requests are does not matter, where all of the cache
    is read.
    """
    k, tokens = pair.num_speculative_tokens, budget.kv_cache_tokens
    if k < 1 or not 0 < tokens <= alone.kv_cache_tokens or alone.target_weights_bytes <= 0:
        return None
    of_draft = max(0, budget.kv_bytes_per_token - alone.kv_bytes_per_token)
    costs = StepCosts(
        target=_reading(alone.target_weights_bytes),
        draft=_reading(budget.draft_weights_bytes),
        one_pass=pair.drafts_in_parallel or pair.method in METHODS_OF_BLOCKS,
        target_ms_per_1000_context=1000 * alone.kv_bytes_per_token / GIB,
        draft_ms_per_1000_context=1000 * of_draft / GIB,
    )
    full = full_cache(tokens, alone.kv_cache_tokens, context_tokens=1)
    reads_all = not pair.target.has_experts
    return BreakEven(
        few_requests=break_even_rate(break_even_tokens(costs, k, _ONE_REQUEST), k) if reads_all else None,
        full_cache=break_even_rate(break_even_tokens(costs, k, full), k),
        reads_all=reads_all,
    )


def pays_from(needed: BreakEven | None) -> tuple[str, tuple[tuple[str, float], ...]]:
    """Return what acceptance pays for a share of the KV cache, as a part of a sentence and as numbers."""
    if needed is None:
        return "", ()
    shares = (("break_even_full_percent", needed.full_cache), ("break_even_few_percent", needed.few_requests))
    numbers = tuple((name, 100 * share) for name, share in shares if share is not None)
    read = "weights" if needed.reads_all else "weights, those of all experts,"
    given = f"where a step takes as long as reading {read} and KV cache"
    few = "" if needed.few_requests is None else f" ({100 * needed.few_requests:.0f} % with few requests)"
    if needed.full_cache is None:
        return f"; not even 100 % acceptance pays for that while the cache is full{few}, {given}", numbers
    least = f"at least {100 * needed.full_cache:.0f} % acceptance to pay for that while the cache is full"
    return f"; it takes {least}{few}, {given}", numbers


def _reading(weights_bytes: int) -> Curve:
    return Curve(((1, weights_bytes / GIB),))
