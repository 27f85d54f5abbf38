"""A series as it is known from its blocks so far: log ratios, their scale and centre, and how each follows the last."""

import math
from array import array
from bisect import insort
from typing import Final

ANYTHING_TO_NOTHING: Final = 1e4
"""Log ratio of a block in which one arm alone did nothing: more than two numbers can have (1420)."""

_NORMAL_QUARTILES: Final = 1.349
"""How far the quartiles of a normal distribution are from each other, in standard deviations."""

_FARTHEST: Final = 3.0
"""Scales that a block deviates at most where dependence is estimated, so that one outlier hides nothing."""

_TRIMMED: Final = 0.2
"""Share of blocks at each end that the centre leaves out."""

DEPENDENCES: Final = tuple(step / 10 for step in range(9))
"""Autocorrelations that a series may be taken to have."""

_CAUTION_BLOCKS: Final = 6.0
_CAUTION_ERRORS: Final = 0.25
"""By how much the estimate of an autocorrelation is raised: blocks of bias, and standard errors. Few blocks say little
of it, and read low (Kendall 1954: by (1 + 3 times it) / n). How they were chosen: docs/explanation/verdict.md."""


class History:
    """The log ratios of a series, each with the scale that was known before it.

    Attributes
    ----------
    log_ratios
        Natural logarithm of candidate to baseline, a block each.
    scales
        Standard deviation of the blocks before each, by their quartiles, so that outliers do not move it; 0 where it
        is not known: for the first two, and while all are equal.
    """

    __slots__ = ("_correlated", "_count", "_last", "_sorted", "_squared", "_summed", "log_ratios", "scales")

    def __init__(self) -> None:
        self.log_ratios = array("d")
        self.scales = array("d")
        self._sorted = array("d")
        self._count = 0
        self._last = self._summed = self._squared = self._correlated = 0.0

    def __len__(self) -> int:
        """Return how many blocks have told something."""
        return len(self.log_ratios)

    def add(self, log_ratio: float) -> None:
        """Take the next block."""
        scale = self.scale()
        if len(self) > 1:
            self._note_deviation((log_ratio - self._quantile(0.5)) / scale if scale else 0.0)
        self.log_ratios.append(log_ratio)
        self.scales.append(scale)
        insort(self._sorted, log_ratio)

    def scale(self) -> float:
        """Return the scale of all blocks so far."""
        blocks = len(self._sorted)
        if blocks < 2:  # noqa: PLR2004  one block has no scale
            return 0.0
        # Of two to five blocks of a normal distribution the quartiles are nearer by about this.
        few = blocks / (blocks - 1)
        return few * (self._quantile(0.75) - self._quantile(0.25)) / _NORMAL_QUARTILES

    def centre(self) -> float:
        """Return the mean of the blocks without the outer ones: of more of them where one arm did nothing in some.

        It is ANYTHING_TO_NOTHING where that is so up to the middle.
        """
        cut = int(len(self) * _TRIMMED)
        if max(abs(self._sorted[cut]), abs(self._sorted[-1 - cut])) >= ANYTHING_TO_NOTHING:
            cut = (len(self) - 1) // 2
        inner = self._sorted[cut : len(self) - cut]
        farthest = max(inner, key=abs)
        return farthest if abs(farthest) >= ANYTHING_TO_NOTHING else math.fsum(inner) / len(inner)

    def dependence(self) -> float:
        """Return an autocorrelation, out of DEPENDENCES, that successive blocks probably do not exceed."""
        if self._count < 2:  # noqa: PLR2004  there is no pair yet
            return DEPENDENCES[-1]
        mean = self._summed / self._count
        variance = self._squared / self._count - mean**2
        covariance = self._correlated / (self._count - 1) - mean**2
        found = min(max(covariance / variance, -1.0), 1.0) if variance > 0 else 0.0
        error = math.sqrt((1 - min(found**2, 0.8)) / self._count)
        at_most = found + _CAUTION_BLOCKS * (1 + 3 * max(found, 0.0)) / self._count + _CAUTION_ERRORS * error
        return next((each for each in DEPENDENCES if each >= at_most), DEPENDENCES[-1])

    def _note_deviation(self, deviation: float) -> None:
        deviation = min(max(deviation, -_FARTHEST), _FARTHEST)
        self._correlated += deviation * self._last
        self._summed += deviation
        self._squared += deviation**2
        self._count += 1
        self._last = deviation

    def _quantile(self, share: float) -> float:
        place = share * (len(self._sorted) - 1)
        below = int(place)
        above = min(below + 1, len(self._sorted) - 1)
        return self._sorted[below] + (self._sorted[above] - self._sorted[below]) * (place - below)
