"""How many tokens come next, by what is known of a request: recorded bursts, the most alike counting the most.

From the whole capture down to requests of the same class, in steps of the same pace, with the same burst before, load,
position and context, what is seen at each level counts where it differs from the level above by more than chance, and
is mixed with that: a few alike do not outvote many that are nearly so.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from specdecode_operator.replay.fitted.donors import Bursts

Key = tuple[int, ...]
"""Class, pace, burst before, decoding requests, position, context, each as its bucket; or a beginning of it."""

_DEVIATIONS: Final = 3.0
_DEPTHS: Final = (0, 1, 2, 3, 4, 5, 6)
_PRIOR: Final = 10.0
"""What the level above says counts as so many bursts."""


class BurstChances:
    """Chances of each size, summed up to it, by key."""

    def __init__(self, bursts: Bursts) -> None:
        """Add up what was recorded, at each level."""
        self._counts: dict[Key, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._below: dict[Key, set[Key]] = defaultdict(set)
        self._parted: dict[Key, bool] = {}
        self._found: dict[Key, Sequence[float]] = {}
        columns = (bursts.classes, bursts.paces, bursts.before, bursts.decoding, bursts.positions, bursts.contexts)
        for *key, tokens, count in zip(*columns, bursts.tokens, bursts.counts, strict=True):
            for depth in _DEPTHS:
                self._counts[tuple(key[:depth])][tokens] += count
                if depth:
                    self._below[tuple(key[: depth - 1])].add(tuple(key[:depth]))
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
            self._chances[key] = (
                self._mixed(key, self._of(key[:-1])) if key else _shares(self._counts.get(()) or {1: 1})
            )
        return self._chances[key]

    def _mixed(self, key: Key, above: dict[int, float]) -> dict[int, float]:
        counts = self._counts.get(key)
        if counts is None or not self._parts(key[:-1]):
            return above
        total = sum(counts.values()) + _PRIOR
        return {size: (counts.get(size, 0.0) + _PRIOR * share) / total for size, share in above.items()}

    def _parts(self, key: Key) -> bool:
        """Whether what is known next parts these bursts by more than chance: a G test, at three deviations.

        Of all or none of the parts: if only those were taken that differ most, bursts would drift to their side.
        """
        if key not in self._parted:
            parts = [self._counts[each] for each in self._below[key]]
            shares = _shares(self._counts[key])
            apart = sum(
                2 * count * math.log(count / (sum(part.values()) * shares[size]))
                for part in parts
                for size, count in part.items()
            )
            free = (len(parts) - 1) * (len(shares) - 1)
            self._parted[key] = free > 0 and apart > free + _DEVIATIONS * math.sqrt(2 * free)
        return self._parted[key]


def _shares(counts: Mapping[int, float]) -> dict[int, float]:
    total = sum(counts.values())
    return {size: count / total for size, count in counts.items()}
