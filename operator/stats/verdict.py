"""The lowest ratio that a series leaves possible at a level, whenever one looks: by a martingale for each ratio.

If the true log ratio is t and blocks deviate from it to either side alike, whatever came before, then

    product over blocks of 2 / (1 + exp(-2 w x)),    x = deviation from t, in scales, between -2 and 2

is a martingale for each weight w (de la Peña 1999; Ramdas, Ruf, Larsson and Koolen 2020): who bets on blocks above t
wins nothing on average. So is the mean over several w. By Ville's inequality it ever reaches 2/alpha with a probability
of at most alpha/2. It falls with t: the t at which it stands at 2/alpha is a bound below which all t are refuted.

Where each block follows the one before it with an autocorrelation of a, the same holds of deviations less a times the
last one.
"""

import math
from collections.abc import Iterator
from typing import Final

from specdecode_operator.evidence.history import History

_WEIGHTS: Final = (0.125, 0.25, 0.5, 1.0, 2.0)
"""Each is best for an effect of so many scales. Doubled each time, as `Point` counts on."""

_FARTHEST: Final = 2.0
"""Scales that a block counts at most, so that an outlier neither decides nor destroys."""

_FARTHEST_BEFORE: Final = 3.0
"""Scales of the block before that one is expected to follow."""

_LOG_2: Final = math.log(2)
_LOG_WEIGHTS: Final = math.log(len(_WEIGHTS))
_BELOW_ALL: Final = -1e9
_SMALLEST_ERROR: Final = 1e-6
"""Of the mean, where blocks are equal to the last digit."""

_STEPS_AN_ERROR: Final = 2
"""Points of the grid in a standard error of the mean, about. Between two of them the evidence is taken as straight."""

_SLACK: Final = 0.8
"""Powers of two that a grid may be off before there is another one."""

_USUAL_ERRORS: Final = 3.5
_GROWTH: Final = 1.1
"""By how much a series has grown before its grid is chosen anew: scales that change at every block change no grid."""

_KEPT: Final = 4


class Point:
    """The evidence against one log ratio, and all below it."""

    __slots__ = ("_evidence", "_logs", "_seen", "log_ratio")

    def __init__(self, log_ratio: float) -> None:
        self.log_ratio = log_ratio
        self._logs = [0.0] * len(_WEIGHTS)
        self._seen = 0
        self._evidence = 0.0

    def evidence(self, history: History, side: int, dependence: float) -> float:
        """Return the logarithm of the martingale after all blocks; side -1 looks at the series with arms swapped."""
        blocks = len(history.scales)
        if self._seen < blocks:
            logs = self._logs
            for score in self._scores(history, side, dependence):
                # For each weight, the last one's is squared.
                lost = math.exp(-2 * _WEIGHTS[0] * score)
                for index in range(len(logs)):
                    logs[index] += _LOG_2 - math.log1p(lost)
                    lost *= lost
            self._seen = blocks
            most = max(logs)
            self._evidence = most + math.log(sum([math.exp(each - most) for each in logs])) - _LOG_WEIGHTS
        return self._evidence

    def _scores(self, history: History, side: int, dependence: float) -> Iterator[float]:
        log_ratios, scales, narrower = history.log_ratios, history.scales, math.sqrt(1 - dependence**2)
        for position in range(self._seen, len(scales)):
            scale = scales[position]
            deviation = side * log_ratios[position] - self.log_ratio
            if dependence and position:
                before = side * log_ratios[position - 1] - self.log_ratio
                farthest = _FARTHEST_BEFORE * scale if scale else math.inf
                deviation -= dependence * min(max(before, -farthest), farthest)
                scale *= narrower
            if scale:
                yield min(max(deviation / scale, -_FARTHEST), _FARTHEST)
            else:
                yield math.copysign(1.0, deviation) if deviation else 0.0


class LowerBound:
    """The lowest log ratio that is not refuted, of a series whose blocks depend on the last one by so much.

    It is sought on a grid, of which only the points near it are kept up to date. Points are multiples of a power of
    two: a finer grid has those of a coarser one, and all have 0, the log ratio that a verdict is about.
    """

    __slots__ = (
        "_chosen_at",
        "_dependence",
        "_history",
        "_index",
        "_is_there",
        "_lowest",
        "_points",
        "_power",
        "_side",
    )

    def __init__(self, history: History, side: int, dependence: float) -> None:
        self._history, self._side, self._dependence = history, side, dependence
        self._lowest = Point(_BELOW_ALL)
        self._is_there = False
        self._points: dict[int, Point] = {}
        self._index = 0
        self._power: int | None = None
        self._chosen_at = 0

    def value(self, needed: float) -> float | None:
        """Return the bound where the logarithm of the evidence stands at what is needed; None while there is none."""
        # Against what lies below all blocks the evidence only grows.
        self._is_there = self._is_there or self._evidence(self._lowest) >= needed
        if not self._is_there:
            return None
        self._choose_grid()
        self._index = self._highest_refuted(needed)
        below, above = self._point(self._index), self._point(self._index + 1)
        self._points = {key: each for key, each in self._points.items() if abs(key - self._index) <= _KEPT}
        if self._error() <= _SMALLEST_ERROR:
            # Evidence falls in steps as wide as the grid, at each block: what is refuted for sure.
            return below.log_ratio
        refuted, not_refuted = self._evidence(below), self._evidence(above)
        share = (refuted - needed) / (refuted - not_refuted)
        return below.log_ratio + share * (above.log_ratio - below.log_ratio)

    def _choose_grid(self) -> None:
        """Make the grid as fine as the series allows, and begin where the bound of a usual one is."""
        # Points of another grid take all blocks again, so that the grid is not changed at every block.
        if len(self._history) < self._chosen_at * _GROWTH:
            return
        error = self._error()
        power = math.log2(error / _STEPS_AN_ERROR)
        if self._power is None:
            self._power, self._chosen_at = round(power), len(self._history)
            wider = math.sqrt((1 + self._dependence) / (1 - self._dependence))
            usual = self._side * self._history.centre() - _USUAL_ERRORS * error * wider
            self._index = math.floor(usual / 2.0**self._power)
        elif abs(power - self._power) > _SLACK:
            finer = self._power - round(power)
            self._power, self._chosen_at = round(power), len(self._history)
            self._points = {
                _on_grid(key, finer): each for key, each in self._points.items() if finer >= 0 or not key % 2**-finer
            }
            self._index = _on_grid(self._index, finer)

    def _error(self) -> float:
        """Return the standard error of the mean, about."""
        return max(self._history.scale() / math.sqrt(len(self._history)), _SMALLEST_ERROR)

    def _highest_refuted(self, needed: float) -> int:
        """Return the place on the grid, sought from the last one in ever larger steps, then by halves."""
        step, low = 1, self._index
        if self._is_refuted(low, needed):
            while self._is_refuted(low + step, needed):
                low, step = low + step, 2 * step
            high = low + step
        else:
            while not self._is_refuted(low - step, needed):
                low, step = low - step, 2 * step
            low, high = low - step, low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._is_refuted(middle, needed) else (low, middle)
        return low

    def _is_refuted(self, index: int, needed: float) -> bool:
        return self._evidence(self._point(index)) >= needed

    def _point(self, index: int) -> Point:
        if index not in self._points:
            self._points[index] = Point(index * 2.0 ** (self._power or 0))
        return self._points[index]

    def _evidence(self, point: Point) -> float:
        return point.evidence(self._history, self._side, self._dependence)


def _on_grid(index: int, finer: int) -> int:
    """Return the place of a point on a grid that is so many times twice as fine, or coarser where that is negative."""
    return index << finer if finer >= 0 else index >> -finer
