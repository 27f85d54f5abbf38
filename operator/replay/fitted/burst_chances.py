"""How many tokens come next, by what is known of a request: recorded bursts, the most alike counting the most.

From the whole capture down to requests of the same class, in steps of the same pace, with the same burst before, load,
position and context, what is seen at each level counts where it differs from the level above by more than chance, and
is mixed with that: a few alike do not outvote many that are nearly so.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from specdecode_operator.replay.fitted.donors import Bursts

Key = tuple[int, ...]
"""Class, pace, burst before, decoding requests, position, context, each as its bucket; or a beginning of it."""

_DEVIATIONS: Final = 3.0
_DEPTHS: Final = (0, 1, 2, 3, 4, 5, 6)
_PRIOR: Final = 20.0
"""What the level above says counts as so many bursts."""


class BurstChances:
    """Chances of each size, summed up to it, by key."""

    def __init__(self, bursts: Bursts) -> None:
        """Add up what was recorded, at each level."""
        self._counts: dict[Key, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._found: dict[Key, Sequence[float]] = {}
        columns = (bursts.classes, bursts.paces, bursts.before, bursts.decoding, bursts.positions, bursts.contexts)
        for *key, tokens, count in zip(*columns, bursts.tokens, bursts.counts, strict=True):
            for depth in _DEPTHS:
                self._counts[tuple(key[:depth])][tokens] += count
        self.sizes: Sequence[int] = sorted(self._counts[()]) or [1]
        self._chances: dict[Key, dict[int, float]] = {}

    def up_to(self, key: Key) -> Sequence[float]:
        """Return, for each of `sizes`, the chance that a burst is not larger."""
        found = self._found.get(key)
        if found is None:
            total, sums = 0.0, list[float]()
            chances = self._of(key)
            for size in self.sizes:
                total += chances.get(size, 0.0)
                sums.append(total)
            sums[-1] = 1.0
            found = self._found[key] = sums
        return found

    def _of(self, key: Key) -> dict[int, float]:
        if key not in self._chances:
            self._chances[key] = self._mixed(self._counts.get(key), self._of(key[:-1]) if key else None)
        return self._chances[key]

    @staticmethod
    def _mixed(counts: dict[int, float] | None, above: dict[int, float] | None) -> dict[int, float]:
        if above is None:
            total = sum(counts.values()) if counts else 0.0
            return {size: count / total for size, count in counts.items()} if counts and total else {1: 1.0}
        if counts is None or not _differs(counts, above):
            return above
        total = sum(counts.values()) + _PRIOR
        return {size: (counts.get(size, 0.0) + _PRIOR * share) / total for size, share in above.items()}


def _differs(counts: dict[int, float], above: dict[int, float]) -> bool:
    """Whether these bursts are others than the level above says, by more than chance: a G test at three deviations."""
    total = sum(counts.values())
    apart = 2 * sum(count * math.log(count / (total * above[size])) for size, count in counts.items())
    free = len(above) - 1
    return apart > free + _DEVIATIONS * math.sqrt(2 * free)
