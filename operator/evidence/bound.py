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
_SMALLEST_STEP: Final = 1e-7
_STEPS_AN_ERROR: Final = 4
"""Points of the grid in a standard error of the mean: the bound between two of them is off by a 400th of that."""

_KEPT: Final = 3


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

    It is sought on a grid of ratios, of which only those around it are kept up to date.
    """

    __slots__ = ("_dependence", "_history", "_index", "_laid_out_at", "_lowest", "_origin", "_points", "_side", "_step")

    def __init__(self, history: History, side: int, dependence: float) -> None:
        self._history, self._side, self._dependence = history, side, dependence
        self._lowest = Point(_BELOW_ALL)
        self._points: dict[int | None, Point] = {}
        self._origin, self._step, self._index, self._laid_out_at = 0.0, 0.0, 0, 0

    def value(self, needed: float) -> float | None:
        """Return the bound where the logarithm of the evidence stands at what is needed; None while there is none."""
        if self._evidence(self._lowest) < needed:
            return None
        if len(self._history) >= 2 * self._laid_out_at:
            self._lay_out()
        self._index = self._highest_refuted(needed)
        below, above = self._point(self._index), self._point(self._index + 1)
        self._points = {key: each for key, each in self._points.items() if key is None or self._is_near(key)}
        if below.log_ratio < 0 < above.log_ratio:
            # That the ratio is 1 is what a verdict is about: it is asked itself.
            equal = self._points.setdefault(None, Point(0.0))
            below, above = (equal, above) if self._evidence(equal) >= needed else (below, equal)
        refuted, not_refuted = self._evidence(below), self._evidence(above)
        share = (refuted - needed) / (refuted - not_refuted)
        return below.log_ratio + share * (above.log_ratio - below.log_ratio)

    def _lay_out(self) -> None:
        """Make the grid as fine as the series now allows, around where the bound was."""
        blocks = len(self._history)
        self._origin = self._point(self._index).log_ratio if self._points else self._side * self._history.centre()
        self._step = max(self._history.scale() / math.sqrt(blocks) / _STEPS_AN_ERROR, _SMALLEST_STEP)
        self._points, self._index, self._laid_out_at = {}, 0, blocks

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

    def _is_near(self, index: int) -> bool:
        return abs(index - self._index) <= _KEPT

    def _point(self, index: int) -> Point:
        if index not in self._points:
            self._points[index] = Point(self._origin + index * self._step)
        return self._points[index]

    def _evidence(self, point: Point) -> float:
        return point.evidence(self._history, self._side, self._dependence)
