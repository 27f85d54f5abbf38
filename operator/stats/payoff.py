"""Whether speculation pays at a load: speed-up, break-even and the best K. Derived in docs/explanation/payoff.md."""

from dataclasses import dataclass
from typing import Final

from specdecode_operator.payoff.acceptance import LARGEST_K, Acceptance, PayoffError
from specdecode_operator.payoff.step_cost import StepCosts

LARGEST_BATCH: Final = 8192
"""Requests that a crossover is looked for among: more than engines run at once."""

LARGEST_RATIO: Final = 100
"""Of a draft's size to the target's: far more than anybody has."""


@dataclass(frozen=True)
class Load:
    """What an engine decodes at once, with speculation and without."""

    batch: float  # Requests in a step with speculation
    batch_alone: float  # Requests in a step without: more where the KV cache is full and the draft takes a share
    context_tokens: float = 0.0  # Of each request, on average
    full_cache: bool = False  # Whether these are all that the KV cache holds

    def __post_init__(self) -> None:
        """Refuse a load without requests."""
        if not (0 < self.batch <= self.batch_alone):
            raise PayoffError(
                f"{self.batch:g} requests with speculation, {self.batch_alone:g} without: above 0, and no more with it"
            )

    @classmethod
    def same(cls, batch: float, context_tokens: float = 0.0) -> "Load":
        """Return a load that the KV cache has room for either way."""
        return cls(batch, batch, context_tokens)


def full_cache(kv_tokens: float, kv_tokens_alone: float, context_tokens: float) -> Load:
    """Return the load that fills the KV cache: as many requests as it holds beside a draft, and without one."""
    if not 0 < context_tokens <= kv_tokens:
        raise PayoffError(f"{context_tokens:g} tokens of context: above 0, and no more than the cache's {kv_tokens:g}")
    if kv_tokens > kv_tokens_alone:
        raise PayoffError(f"{kv_tokens:g} tokens beside a draft, {kv_tokens_alone:g} without: no more with it")
    return Load(kv_tokens / context_tokens, kv_tokens_alone / context_tokens, context_tokens, full_cache=True)


def break_even_tokens(costs: StepCosts, k: int, load: Load) -> float:
    """Return the tokens that a step must give each request so that speculation is no slower than none.

    With it, an engine gives ``batch * tokens`` in a step's time, without it ``batch_alone`` in that of a plain step.
    """
    longer = costs.step_ms(load.batch, k, load.context_tokens) / costs.step_ms(load.batch_alone, 0, load.context_tokens)
    return longer * load.batch_alone / load.batch


def break_even_rate(needed_tokens: float, k: int) -> float | None:
    """Return the acceptance, accepted over drafted tokens, that gives so many tokens a step; None: K is too few."""
    rate = max(0.0, (needed_tokens - 1) / k)
    return rate if rate <= 1 else None


def speed_up(acceptance: Acceptance, costs: StepCosts, k: int, load: Load) -> float:
    """Return tokens a second with speculation over those without; 1 for K = 0, which is no speculation."""
    return acceptance.expected_tokens(k) / break_even_tokens(costs, k, load) if k else 1.0


def best_k(acceptance: Acceptance, costs: StepCosts, load: Load, largest: int = LARGEST_K) -> int:
    """Return the K with the largest speed-up, the smallest of equals; 0 where none is faster than no speculation."""
    return max(range(largest + 1), key=lambda k: (speed_up(acceptance, costs, k, load), -k))


def crossover(acceptance: Acceptance, costs: StepCosts, k: int, context_tokens: float = 0.0) -> int | None:
    """Return the requests from which on K is slower than no speculation; None where it is not at `LARGEST_BATCH`.

    It is 1 where no number of requests pays.
    """

    def loses(batch: int) -> bool:
        return speed_up(acceptance, costs, k, Load.same(batch, context_tokens)) < 1

    if not loses(LARGEST_BATCH):
        return None
    # Time that is gained is a straight line from corner to corner: it may be lost and won again.
    corners = _corners(costs, k)
    low = max((corner for corner in corners if not loses(corner)), default=0)
    high = min(corner for corner in corners if corner > low)
    while low and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if loses(middle) else (middle, high)
    return high


def _corners(costs: StepCosts, k: int) -> set[int]:
    """Return the requests next to which a step's time has a corner, the fewest and the most."""
    at = [tokens / rows for tokens, _ in costs.target.points for rows in (1, k + 1)]
    at += [tokens / (k if costs.one_pass else 1) for tokens, _ in costs.draft.points]
    beside = {int(each) + up for each in at for up in (0, 1)}
    return {1, LARGEST_BATCH, *(each for each in beside if 1 <= each <= LARGEST_BATCH)}


def memory_bound_speed_up(tokens: float, passes: int, size_ratio: float) -> float:
    """Return MBSU: the speed-up where a step takes as long as reading the weights of each pass.

    Parameters
    ----------
    tokens
        That a request gets from a step, tau.
    passes
        Of the draft in a step: K, or 1 where one proposes all tokens.
    size_ratio
        Bytes of the draft's weights over those of the target's, c: reading the target takes 1, a step passes * c + 1.
    """
    if not 0 <= size_ratio <= LARGEST_RATIO:
        raise PayoffError(f"{size_ratio:g}: a ratio of sizes is from 0 to {LARGEST_RATIO}")
    return tokens / (passes * size_ratio + 1)
