"""How long a step takes, by the tokens in it: what was measured, joined by straight lines."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from specdecode_operator.payoff.acceptance import PayoffError

_LONGEST_MS: Final = 1e7
_SHORTEST_MS: Final = 1e-12
"""Of a step of the target: by a time that is as good as none nothing can be divided."""

_LARGEST_COUNT: Final = 2**31
_CLEARLY_LESS: Final = 0.95
"""Share of a time: medians that were measured differ by less."""


@dataclass(frozen=True)
class Curve:
    """Time of a pass by its tokens: points (tokens, milliseconds), by rising tokens.

    Below the first point a pass takes as long as there; above the last it goes on as between the last two, but never
    falls. One point is a pass that takes equally long whatever is in it, as one does that reads weights alone.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        """Refuse what is no curve."""
        if not self.points:
            raise PayoffError("no point: give TOKENS:MS")
        for tokens, ms in self.points:
            if not (0 < tokens <= _LARGEST_COUNT and 0 <= ms <= _LONGEST_MS):
                raise PayoffError(f"{tokens:g}:{ms:g}: tokens are above 0, milliseconds from 0 to {_LONGEST_MS:g}")
        for (before, _), (after, _) in pairwise(self.points):
            if after <= before:
                raise PayoffError(f"{after:g} tokens after {before:g}: name each number of tokens once, rising")

    def knows(self, tokens: float) -> bool:
        """Whether so many tokens lie among the points, or one point stands for all."""
        return len(self.points) == 1 or self.points[0][0] <= tokens <= self.points[-1][0]

    @property
    def falls(self) -> bool:
        """Whether a pass with more tokens takes clearly less, as none does."""
        return any(after < _CLEARLY_LESS * before for (_, before), (_, after) in pairwise(self.points))

    def ms(self, tokens: float) -> float:
        """Return how long a pass with so many tokens takes."""
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


@dataclass(frozen=True)
class StepCosts:
    """What a step of decoding costs, with and without proposed tokens."""

    target: Curve
    draft: Curve = Curve(((1, 0.0),))  # One pass of the draft; nothing for ngram and suffix
    one_pass: bool = False  # The draft proposes all K tokens in one pass: DFlash, DSpark, P-EAGLE, PARD
    # What reading the KV cache of 1,000 tokens adds to a pass
    target_ms_per_1000_context: float = 0.0
    draft_ms_per_1000_context: float = 0.0
    drafted: int = 0  # Tokens that the draft proposes at least, however few of them are verified

    def __post_init__(self) -> None:
        """Refuse times that cannot be, and a target without any."""
        for ms in (self.target_ms_per_1000_context, self.draft_ms_per_1000_context):
            if not (math.isfinite(ms) and 0 <= ms <= _LONGEST_MS):
                raise PayoffError(f"{ms:g}: milliseconds are from 0 to {_LONGEST_MS:g}")
        shortest = min(ms for _, ms in self.target.points)
        if shortest < _SHORTEST_MS:
            raise PayoffError(f"{shortest:g} ms: a step of the target takes time")

    def target_ms(self, batch: float, k: int, context_tokens: float) -> float:
        """Return the time of the target's pass: K + 1 tokens of each request, which read its context once."""
        return self.target.ms(batch * (k + 1)) + self.target_ms_per_1000_context * batch * context_tokens / 1000

    def draft_ms(self, batch: float, k: int, context_tokens: float) -> float:
        """Return the time of proposing: K passes of a token a request, or one of K."""
        if k == 0:
            return 0.0
        k = max(k, self.drafted)
        reading = self.draft_ms_per_1000_context * batch * context_tokens / 1000
        if self.one_pass:
            return self.draft.ms(batch * k) + reading
        return k * (self.draft.ms(batch) + reading)

    def step_ms(self, batch: float, k: int, context_tokens: float = 0.0) -> float:
        """Return the time of a whole step; with K = 0 one without speculation, whose draft is not there at all."""
        return self.target_ms(batch, k, context_tokens) + self.draft_ms(batch, k, context_tokens)
