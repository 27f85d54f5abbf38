"""Acceptance as somebody wants it, in place of what was recorded: for tests of what reacts to it."""

from bisect import bisect_right
from dataclasses import dataclass
from random import Random
from typing import Final

_HALVINGS: Final = 40


@dataclass(frozen=True)
class AcceptanceSchedule:
    """The accepted share of drafted tokens, from each moment on. The first moment is 0."""

    moments_ms: tuple[float, ...]
    shares: tuple[float, ...]  # 0 to 1

    @classmethod
    def parse(cls, text: str) -> "AcceptanceSchedule":
        """Read ``0.7``, or ``0:0.8,60:0.3`` with the seconds from which a share holds.

        Raises
        ------
        ValueError
            It is neither, and why.
        """
        pairs = [part.rpartition(":")[::2] for part in text.split(",")]
        try:
            moments_ms = tuple(float(moment or 0) * 1000 for moment, _ in pairs)
            shares = tuple(float(share) for _, share in pairs)
        except ValueError as error:
            raise ValueError(f"{text}: write a share such as 0.7, or shares by seconds such as 0:0.8,60:0.3") from error
        if not all(0 <= share <= 1 for share in shares):
            raise ValueError(f"{text}: a share lies between 0 and 1")
        if moments_ms[0] != 0 or list(moments_ms) != sorted(set(moments_ms)) or moments_ms[-1] == float("inf"):
            raise ValueError(f"{text}: the seconds begin with 0 and rise")
        return cls(moments_ms, shares)

    def at(self, moment_ms: float) -> float:
        """Return the share that holds then."""
        return self.shares[max(0, bisect_right(self.moments_ms, moment_ms) - 1)]


class AcceptanceDraws:
    """Accepted tokens of one draft after the other, each position accepted with one chance if all before it were."""

    def __init__(self, schedule: AcceptanceSchedule, num_speculative_tokens: int, random: Random) -> None:
        self._schedule = schedule
        self._k = num_speculative_tokens
        self._random = random
        self._chances = {share: position_chance(share, num_speculative_tokens) for share in set(schedule.shares)}

    def accepted(self, moment_ms: float) -> int:
        """Return how many of K drafted tokens a step accepts."""
        chance = self._chances[self._schedule.at(moment_ms)]
        accepted = 0
        while accepted < self._k and self._random.random() < chance:
            accepted += 1
        return accepted


def position_chance(share: float, num_speculative_tokens: int) -> float:
    """Return the chance p of each position for which p + p^2 + … + p^K is that share of K."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        expected = sum(middle**position for position in range(1, num_speculative_tokens + 1))
        low, high = (middle, high) if expected < share * num_speculative_tokens else (low, middle)
    return high
