"""How often proposed tokens are accepted, by position, and how many tokens a step gives for it.

Two shares are called acceptance at a position. Of all drafts, those whose first k tokens were all accepted: so vLLM
counts (vllm/v1/spec_decode/metrics.py SpecDecodingStats.observe_draft), and it can only fall with k. Of the drafts
whose first k - 1 tokens were accepted, those whose k-th was, too: the conditional share, which may rise. The first is
the product of the second up to k.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Final

LARGEST_K: Final = 32
"""Proposed tokens of a step that are looked at, at most."""

_HALVINGS: Final = 60


class PayoffError(ValueError):
    """Numbers that no engine can have."""


@dataclass(frozen=True)
class Acceptance:
    """The conditional share of each position; beyond the last one, that of the last one."""

    conditional: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse what is no share."""
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
        """Return the one with the same conditional share everywhere whose rate at K is the given one.

        The rate is accepted over drafted tokens, which is strictly increasing in that share: found by bisection.
        """
        _checked_share(rate)
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (
                (middle, high) if sum(middle**position for position in range(1, k + 1)) < rate * k else (low, middle)
            )
        return cls((high,) * k)

    def conditional_to(self, k: int) -> tuple[float, ...]:
        """Return the first K conditional shares."""
        known = self.conditional[:k]
        return known + (self.conditional[-1],) * (k - len(known))

    def reached(self, k: int) -> tuple[float, ...]:
        """Return the shares of all drafts for the first K positions, as vLLM counts them."""
        return tuple(accumulate(self.conditional_to(k), mul))

    def expected_tokens(self, k: int) -> float:
        """Return tokens that a request gets from a step, the target's own one among them.

        A step gives at least 1 + k tokens if and only if the first k were accepted; the expectation of a count is the
        sum of these chances.
        """
        return 1 + sum(self.reached(k))

    def rate(self, k: int) -> float:
        """Return accepted over drafted tokens."""
        return (self.expected_tokens(k) - 1) / k


def _checked_share(share: float) -> float:
    if not 0 <= share <= 1:
        raise PayoffError(f"{share:g}: a share is from 0 to 1")
    return share
