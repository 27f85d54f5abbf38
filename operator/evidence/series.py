"""Whether a candidate pays: goodput of both arms, block by block, as an interval for their ratio at every look."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from specdecode_operator.evidence.bound import LowerBound
from specdecode_operator.evidence.history import ANYTHING_TO_NOTHING, History

DEFAULT_LEVEL: Final = 0.95
_LARGEST_EXPONENT: Final = 700.0
"""Of a ratio that a program can compute with."""


class Verdict(StrEnum):
    """What the interval says of a ratio of 1."""

    PAYS = "Pays"
    DOES_NOT_PAY = "DoesNotPay"
    INCONCLUSIVE = "Inconclusive"


@dataclass(frozen=True)
class Finding:
    """What a series says after a block.

    Attributes
    ----------
    verdict
        Pays where the whole interval lies above 1, DoesNotPay where it lies below.
    ratio
        Goodput of the candidate to that of the baseline; None where one of them did nothing in most blocks.
    low, high
        The interval; None where it has no such end yet.
    """

    verdict: Verdict
    ratio: float | None
    low: float | None
    high: float | None


class PairedSeries:
    """Blocks of one comparison, each with the goodput of both arms.

    Parameters
    ----------
    level
        Probability that the interval holds the true ratio after every block; its docstring says of which series.
    """

    __slots__ = ("_bounds", "_history", "_needed")

    def __init__(self, level: float = DEFAULT_LEVEL) -> None:
        self._history = History()
        self._needed = math.log(2 / (1 - level))
        self._bounds: dict[tuple[int, float], LowerBound] = {}

    def add(self, baseline: float, candidate: float) -> Finding:
        """Take the next block and return what is known now. One in which neither arm did anything tells nothing."""
        if baseline or candidate:
            self._history.add(_log_ratio(baseline, candidate))
        if not len(self._history):
            return Finding(Verdict.INCONCLUSIVE, None, None, None)
        low, mirrored = self._lowest(1), self._lowest(-1)
        high = None if mirrored is None else -mirrored
        centre = self._history.centre()
        centre = centre if low is None else max(centre, low)
        centre = centre if high is None else min(centre, high)
        return Finding(_verdict(low, high), *(_ratio(each) for each in (centre, low, high)))

    def _lowest(self, side: int) -> float | None:
        """Return the lower of two bounds: for blocks that do not depend on each other, and for the dependence seen."""
        found = []
        for dependence in sorted({0.0, self._history.dependence()}, reverse=True):
            key = side, dependence
            if key not in self._bounds:
                self._bounds[key] = LowerBound(self._history, side, dependence)
            bound = self._bounds[key].value(self._needed)
            if bound is None:
                return None
            found.append(bound)
        return min(found)


def _log_ratio(baseline: float, candidate: float) -> float:
    if not baseline or not candidate:
        return ANYTHING_TO_NOTHING if candidate else -ANYTHING_TO_NOTHING
    return math.log(candidate) - math.log(baseline)


def _ratio(log_ratio: float | None) -> float | None:
    return None if log_ratio is None or abs(log_ratio) > _LARGEST_EXPONENT else math.exp(log_ratio)


def _verdict(low: float | None, high: float | None) -> Verdict:
    if low is not None and low > 0:
        return Verdict.PAYS
    if high is not None and high < 0:
        return Verdict.DOES_NOT_PAY
    return Verdict.INCONCLUSIVE
