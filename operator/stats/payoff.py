"""Pay-off of speculation at a load: acceptance, step cost, speed-up, break-even and the best K.

The formulas are derived in docs/design/payoff.md. Two shares are called acceptance at position k. vLLM reports
the share of drafts whose first k tokens were all accepted (vllm/v1/spec_decode/metrics.py
SpecDecodingStats.observe_draft). It is non-increasing in k. The conditional share is P(k-th accepted | first k-1
accepted). It can rise with k. The first share is the product of the conditional shares up to k. Step costs are
measured points (tokens, milliseconds) joined by straight lines.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Final

LARGEST_K: Final = 32
"""Largest number of proposed tokens per step."""

LARGEST_BATCH: Final = 8192
"""Largest batch in which to look for a crossover, more requests than engines run at the same time."""

_HALVINGS: Final = 60


class PayoffError(ValueError):
    """Numbers that no engine can have."""


@dataclass(frozen=True)
class Acceptance:
    """The conditional share of each position; the last share applies to all further positions."""

    conditional: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.conditional) <= LARGEST_K:
            raise PayoffError(f"{len(self.conditional)} positions: give 1 to {LARGEST_K}")
        for share in self.conditional:
            _checked_share(share)

    @classmethod
    def by_position(cls, shares: Sequence[float]) -> "Acceptance":
        """Return it from shares of all drafts, as vLLM counts them."""
        before, conditional = 1.0, []
        for share in shares:
            if _checked_share(share) > before:
                raise PayoffError(
                    f"{share:g} follows {before:g}: shares of all drafts, as vLLM counts them, do not rise; give those "
                    "of the drafts that got so far as conditional acceptance"
                )
            conditional.append(share / before if before else 0.0)
            before = share
        return cls(tuple(conditional))

    @classmethod
    def of_rate(cls, rate: float, k: int) -> "Acceptance":
        """Return the one with equal conditional shares whose accepted over drafted tokens at K are the given rate.

        The rate increases strictly with that share, so bisection finds it.
        """
        _checked_share(rate)
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            below = sum(middle**position for position in range(1, k + 1)) < rate * k
            low, high = (middle, high) if below else (low, middle)
        return cls((high,) * k)

    def conditional_to(self, k: int) -> tuple[float, ...]:
        """Return the first K conditional shares."""
        known = self.conditional[:k]
        return known + (self.conditional[-1],) * (k - len(known))

    def reached(self, k: int) -> tuple[float, ...]:
        """Return the shares of all drafts for the first K positions, as vLLM counts them."""
        return tuple(accumulate(self.conditional_to(k), mul))

    def expected_tokens(self, k: int) -> float:
        """Return the tokens per step and request, including the target's own token.

        A step gives at least 1 + k tokens if and only if the first k were accepted; the expectation of a count is the
        sum of these probabilities.
        """
        return 1 + sum(self.reached(k))

    def rate(self, k: int) -> float:
        """Return accepted over drafted tokens."""
        return (self.expected_tokens(k) - 1) / k


def _checked_share(share: float) -> float:
    if not 0 <= share <= 1:
        raise PayoffError(f"{share:g}: a share is from 0 to 1")
    return share


_LONGEST_MS: Final = 1e7
_SHORTEST_MS: Final = 1e-12
"""Shortest time of a target's step in milliseconds, because speed-ups divide by it."""

_LARGEST_COUNT: Final = 2**31
_CLEARLY_LESS: Final = 0.95
"""Share of a time that counts as clearly less: measured medians differ by less."""


@dataclass(frozen=True)
class Curve:
    """Time of a pass by its tokens: points (tokens, milliseconds), by rising tokens.

    Times outside the points are extrapolated. Below the first point a pass takes the first point's time. Above the last
    one, the last slope continues, but never falls. A single point gives the same time everywhere.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise PayoffError("no point: give TOKENS:MS")
        for tokens, ms in self.points:
            if not (0 < tokens <= _LARGEST_COUNT and 0 <= ms <= _LONGEST_MS):
                raise PayoffError(f"{tokens:g}:{ms:g}: tokens are above 0, milliseconds from 0 to {_LONGEST_MS:g}")
        for (before, _), (after, _) in pairwise(self.points):
            if after <= before:
                raise PayoffError(f"{after:g} tokens after {before:g}: name each number of tokens once, rising")

    @classmethod
    def constant(cls, ms: float) -> "Curve":
        """Return the curve of a pass that takes the same time for every number of tokens."""
        return cls(((1, ms), (_LARGEST_COUNT, ms)))

    def knows(self, tokens: float) -> bool:
        """Return whether the number of tokens is within the points."""
        return self.points[0][0] <= tokens <= self.points[-1][0]

    @property
    def falls(self) -> bool:
        """Whether a pass with more tokens takes clearly less time, which is implausible."""
        return any(after < _CLEARLY_LESS * before for (_, before), (_, after) in pairwise(self.points))

    def ms(self, tokens: float) -> float:
        """Return the time of a pass with a number of tokens."""
        if tokens <= self.points[0][0]:
            return self.points[0][1]
        for (left, left_ms), (right, right_ms) in pairwise(self.points):
            if tokens <= right:
                return left_ms + (right_ms - left_ms) * (tokens - left) / (right - left)
        last, last_ms = self.points[-1]
        if len(self.points) == 1:
            return last_ms
        left, left_ms = self.points[-2]
        return last_ms + max(0.0, (last_ms - left_ms) / (last - left)) * (tokens - last)


NO_DRAFT: Final = Curve.constant(0.0)
"""Time of a draft pass of methods that look up tokens: ngram and suffix."""


@dataclass(frozen=True)
class StepCosts:
    """The cost of a decode step, with and without proposed tokens."""

    target: Curve
    draft: Curve = NO_DRAFT  # one pass of the draft
    one_pass: bool = False  # the draft proposes all K tokens in one pass: DFlash, DSpark, P-EAGLE, PARD
    # Added to a pass by reading the KV cache of 1,000 tokens
    target_ms_per_1000_context: float = 0.0
    draft_ms_per_1000_context: float = 0.0
    drafted: int = 0  # minimum of proposed tokens, however few of them are verified
    recorded_k: int = 0  # K of the recorded steps from which `draft` was derived, by subtracting the target's time
    as_recorded: bool = False  # steps with that K have the recorded times

    def __post_init__(self) -> None:
        for ms in (self.target_ms_per_1000_context, self.draft_ms_per_1000_context):
            if not (math.isfinite(ms) and 0 <= ms <= _LONGEST_MS):
                raise PayoffError(f"{ms:g}: milliseconds are from 0 to {_LONGEST_MS:g}")
        shortest = min(ms for _, ms in self.target.points)
        if shortest < _SHORTEST_MS:
            raise PayoffError(f"{shortest:g} ms: a step of the target takes time")

    def step_ms(self, batch: float, k: int, context_tokens: float = 0.0) -> float:
        """Return the time of a step; K = 0 is a step without speculation.

        The target's pass has K + 1 tokens per request, which read its context once. The draft has K passes of one
        token per request, or one pass of K.
        """
        context = batch * context_tokens / 1000
        target_ms = self.target.ms(batch * (k + 1)) + self.target_ms_per_1000_context * context
        if k == 0:
            return target_ms
        k, reading_ms = max(k, self.drafted), self.draft_ms_per_1000_context * context
        if self.one_pass:
            return target_ms + self.draft.ms(batch * k) + reading_ms
        return target_ms + k * (self.draft.ms(batch) + reading_ms)

    def _needed(self, k: int) -> tuple[float, int]:
        """Return the tokens per request of the largest target pass, and of a draft pass, that K >= 1 needs to know.

        Steps with the recorded K were measured as a whole. For another K, the draft's time is only known if the
        subtracted time of the target is.
        """
        drafted = k if self.one_pass else 1
        if k == self.recorded_k and self.as_recorded:
            return 1, drafted
        subtracted = drafted * (self.recorded_k + 1) / (max(1, self.recorded_k) if self.one_pass else 1)
        return max(k + 1, subtracted), drafted

    def extrapolated(self, load: "Load", k: int) -> list[Curve]:
        """Return the curves whose points do not cover a plain step or a step with K."""
        verified, drafted = self._needed(k)
        target = self.target.knows(load.batch_alone) and self.target.knows(load.batch * verified)
        draft = self.draft.knows(load.batch * drafted)
        return [curve for curve, known in ((self.target, target), (self.draft, draft)) if not known]

    def measured_batches(self, k: int) -> range:
        """Return the numbers of requests, up to `LARGEST_BATCH`, for which no time of a step with K is extrapolated."""
        verified, drafted = self._needed(k)
        first = max(self.target.points[0][0], self.draft.points[0][0] / drafted)
        last = min(self.target.points[-1][0] / verified, self.draft.points[-1][0] / drafted, LARGEST_BATCH)
        return range(math.ceil(first), math.floor(last) + 1)


LARGEST_RATIO: Final = 100
"""Largest ratio of a draft's size to the target's, far more than in any pair."""


@dataclass(frozen=True)
class Load:
    """Requests that an engine decodes at the same time, with and without speculation."""

    batch: float  # with speculation
    batch_alone: float  # without: more if the KV cache is full and the draft takes a share
    context_tokens: float = 0.0  # mean per request
    full_cache: bool = False  # these requests fill the KV cache

    def __post_init__(self) -> None:
        if not (0 < self.batch <= self.batch_alone):
            raise PayoffError(
                f"{self.batch:g} requests with speculation, {self.batch_alone:g} without: above 0, and no more with it"
            )

    @classmethod
    def same(cls, batch: float, context_tokens: float = 0.0) -> "Load":
        """Return a load that fits into the KV cache either way."""
        return cls(batch, batch, context_tokens)


def full_cache(kv_tokens: float, kv_tokens_alone: float, context_tokens: float) -> Load:
    """Return the load that fills the KV cache with a draft, and without one."""
    if not 0 < context_tokens <= kv_tokens:
        raise PayoffError(f"{context_tokens:g} tokens of context: above 0, and no more than the cache's {kv_tokens:g}")
    if kv_tokens > kv_tokens_alone:
        raise PayoffError(f"{kv_tokens:g} tokens beside a draft, {kv_tokens_alone:g} without: no more with it")
    return Load(kv_tokens / context_tokens, kv_tokens_alone / context_tokens, context_tokens, full_cache=True)


def break_even_tokens(costs: StepCosts, k: int, load: Load) -> float:
    """Return the tokens per step and request at which speculation breaks even.

    With speculation, an engine generates ``batch * tokens`` in the time of a step; without it, ``batch_alone`` in the
    time of a plain step.
    """
    longer = costs.step_ms(load.batch, k, load.context_tokens) / costs.step_ms(load.batch_alone, 0, load.context_tokens)
    return longer * load.batch_alone / load.batch


def break_even_rate(needed_tokens: float, k: int) -> float | None:
    """Return the accepted share of drafted tokens that gives the needed tokens per step; None if K is too small."""
    rate = max(0.0, (needed_tokens - 1) / k)
    return rate if rate <= 1 else None


def speed_up(acceptance: Acceptance, costs: StepCosts, k: int, load: Load) -> float:
    """Return the ratio of tokens per second with speculation to those without; 1 for K = 0, which is no speculation."""
    return acceptance.expected_tokens(k) / break_even_tokens(costs, k, load) if k else 1.0


def best_k(acceptance: Acceptance, costs: StepCosts, load: Load, largest: int = LARGEST_K) -> int:
    """Return the K with the largest speed-up, the smallest of equals; 0 if no K is faster than no speculation."""
    return max(range(largest + 1), key=lambda k: (speed_up(acceptance, costs, k, load), -k))


def crossover(acceptance: Acceptance, costs: StepCosts, k: int, context_tokens: float = 0.0) -> int | None:
    """Return the number of requests from which K is slower than no speculation, within the measured batches.

    It is the first measured batch if K is slower in all of them, and None if K is not slower in the last one, or if no
    batch is measured.
    """

    def loses(batch: int) -> bool:
        return speed_up(acceptance, costs, k, Load.same(batch, context_tokens)) < 1

    batches = costs.measured_batches(k)
    if not batches or not loses(batches[-1]):
        return None
    # The gained time is a straight line between corners of a step's time: it may be lost and won again.
    at = [tokens / rows for tokens, _ in costs.target.points for rows in (1, k + 1)]
    at += [tokens / (k if costs.one_pass else 1) for tokens, _ in costs.draft.points]
    beside = {int(each) + up for each in at for up in (0, 1)}
    corners = {batches[0], batches[-1], *(each for each in beside if each in batches)}
    low = max((corner for corner in corners if not loses(corner)), default=batches[0] - 1)
    high = min(corner for corner in corners if corner > low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if loses(middle) else (middle, high)
    return high


def memory_bound_speed_up(tokens: float, passes: int, size_ratio: float) -> float:
    """Return MBSU, the speed-up if a step takes as long as reading the weights of each pass.

    Parameters
    ----------
    tokens
        Tokens per step and request, tau.
    passes
        Draft passes per step: K, or 1 if one pass proposes all tokens.
    size_ratio
        Bytes of the draft's weights divided by the target's, c. Reading the target takes 1, a step passes * c + 1.
    """
    if not 0 <= size_ratio <= LARGEST_RATIO:
        raise PayoffError(f"{size_ratio:g}: a ratio of sizes is from 0 to {LARGEST_RATIO}")
    return tokens / (passes * size_ratio + 1)
