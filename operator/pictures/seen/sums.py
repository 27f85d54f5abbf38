"""Sums that stay small however many steps go into them: by whole numbers, by time, and by size on a log scale."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MOST_TIME_BINS: Final = 4096
_FIRST_WIDTH_MS: Final = 16.0
_FURTHEST_MS: Final = 1e15
"""30,000 years: what lies further is no moment of a run."""

_LEAST_MS: Final = 0.001
_PER_DECADE: Final = 500
"""Quantiles of a log histogram err by half a bin: 0.23 %."""
_DECADES: Final = 10
LOG_BINS: Final = _PER_DECADE * _DECADES


class ByNumber:
    """Sums by a whole number, such as the requests in a batch; all numbers above the largest count as it."""

    def __init__(self, largest: int, columns: int) -> None:
        self.sums: Floats = np.zeros((largest + 1, columns))

    def add(self, numbers: Integers, *columns: Floats | Integers) -> None:
        """Add the values that belong to some numbers."""
        length = len(self.sums)
        clipped = np.minimum(numbers, length - 1)
        for column, values in enumerate(columns):
            self.sums[:, column] += np.bincount(clipped, weights=values, minlength=length)


class ByTime:
    """Sums over time, in bins of one width, which doubles as often as there are too many; and maxima, if wanted."""

    def __init__(self, columns: int, most: int = MOST_TIME_BINS) -> None:
        self.width_ms = _FIRST_WIDTH_MS
        self._most = most
        self._keys: Integers = np.empty(0, dtype=np.int64)
        self._sums: Floats = np.empty((0, columns))
        self._largest: Floats = np.empty((0, columns))

    def add(self, moments_ms: Floats, *columns: Floats | Integers) -> None:
        """Add the values of some moments; what is no moment of a run is left out."""
        sane = np.abs(moments_ms) <= _FURTHEST_MS
        if not sane.any():
            return
        values = np.column_stack(columns).astype(np.float64)[sane]
        keys = np.floor(moments_ms[sane] / self.width_ms).astype(np.int64)
        self._merge(
            np.concatenate((self._keys, keys)),
            np.concatenate((self._sums, values)),
            np.concatenate((self._largest, values)),
        )
        while len(self._keys) > self._most:
            self.width_ms *= 2
            self._merge(self._keys // 2, self._sums, self._largest)

    def _merge(self, keys: Integers, sums: Floats, largest: Floats) -> None:
        self._keys, places = np.unique(keys, return_inverse=True)
        columns = range(sums.shape[1])
        self._sums = np.column_stack([np.bincount(places, weights=sums[:, column]) for column in columns])
        self._largest = np.full(self._sums.shape, -np.inf)
        np.maximum.at(self._largest, places, largest)

    def coarser(self, most: int) -> "ByTime":
        """Return the same in fewer, wider bins."""
        found = ByTime(self._sums.shape[1], most)
        found.width_ms, found._keys, found._sums, found._largest = (
            self.width_ms,
            self._keys,
            self._sums,
            self._largest,
        )
        # By the span, not by how many have something in them: a picture has its width for all of it.
        while len(found._keys) and found._keys[-1] - found._keys[0] >= most:
            found.width_ms *= 2
            found._merge(found._keys // 2, found._sums, found._largest)
        return found

    @property
    def moments_ms(self) -> Floats:
        """The middle of each bin that has something in it."""
        return np.asarray((self._keys + 0.5) * self.width_ms, dtype=np.float64)

    @property
    def sums(self) -> Floats:
        """A row a bin."""
        return self._sums

    @property
    def largest(self) -> Floats:
        """A row a bin."""
        return self._largest


def log_bin(values_ms: Floats) -> Integers:
    """Return the bin of each duration on a log scale."""
    logs = np.log10(np.maximum(values_ms, _LEAST_MS) / _LEAST_MS)
    return np.asarray(np.minimum(logs * _PER_DECADE, LOG_BINS - 1), dtype=np.int64)


def log_quantile(counts: Floats, share: float) -> float:
    """Return the duration that a share of all counted ones does not exceed, in ms."""
    cumulated = np.cumsum(counts)
    place = int(np.searchsorted(cumulated, share * cumulated[-1]))
    return float(_LEAST_MS * 10 ** ((min(place, LOG_BINS - 1) + 0.5) / _PER_DECADE))
