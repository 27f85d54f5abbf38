"""Whether a candidate pays: goodput of both arms, block by block, as an interval for their ratio at every look."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from specdecode_operator.evidence.bound import LowerBound
from specdecode_operator.evidence.history import ANYTHING_TO_NOTHING, History

DEFAULT_LEVEL: Final = 0.95
_KEPT: Final = 4
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
        Goodput of the candidate to that of the baseline; None where one of them did nothing in half
        of the blocks or more.
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
        self._bounds: dict[float, tuple[LowerBound, LowerBound]] = {}

    def add(self, baseline: float, candidate: float) -> Finding:
        """Take the next block and return what is known now. One in which neither arm did anything tells nothing."""
        if baseline or candidate:
            self._history.add(_log_ratio(baseline, candidate))
        if not len(self._history):
            return Finding(Verdict.INCONCLUSIVE, None, None, None)
        low, mirrored = self._lowest()
        high = None if mirrored is None else -mirrored
        centre = self._history.centre()
        centre = centre if low is None else max(centre, low)
        centre = centre if high is None else min(centre, high)
        return Finding(_verdict(low, high), *(_ratio(each) for each in (centre, low, high)))

    def _lowest(self) -> tuple[float | None, float | None]:
        """Return the lowest log ratio, and that with arms swapped: for independent blocks or the dependence seen."""
        dependences = {0.0, self._history.dependence()}
        found = [[bound.value(self._needed) for bound in self._both(each)] for each in dependences]
        low, mirrored = (None if None in each else min(each) for each in zip(*found, strict=True))
        return low, mirrored

    def _both(self, dependence: float) -> tuple[LowerBound, LowerBound]:
        """Return the bounds for a dependence; those that were asked last are kept, as it goes to and fro."""
        bounds = self._bounds.pop(dependence, None)
        if bounds is None:
            bounds = LowerBound(self._history, 1, dependence), LowerBound(self._history, -1, dependence)
        self._bounds[dependence] = bounds
        if len(self._bounds) > _KEPT:
            del self._bounds[next(iter(self._bounds))]
        return bounds


def bounded_exp(log_ratio: float) -> float:
    """Return a ratio; in place of one that no program can compute with, the largest or least that it can."""
    return math.exp(max(-_LARGEST_EXPONENT, min(_LARGEST_EXPONENT, log_ratio)))


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
