"""Confidence intervals for the goodput ratio of a candidate to a baseline, and the verdict on it.

`PairedSeries` takes blocks of both arms and returns an anytime-valid interval. If the true log ratio is t and
blocks deviate from it symmetrically, given all earlier blocks, then

    product over blocks of 2 / (1 + exp(-2 w x)),    x = deviation from t, in scales, between -2 and 2

is a martingale for each weight w (de la Peña 1999; Ramdas, Ruf, Larsson and Koolen 2020), and so is the mean over
several w. By Ville's inequality, the probability that it ever reaches 2/alpha is at most alpha/2. It decreases in
t, so the t at which it equals 2/alpha is a lower bound. If blocks have an autocorrelation of a, the same holds for
each deviation minus a times the previous one.

`between_starts` gives the interval between engine starts, which blocks of one start cannot show: Student's
interval for two means with a common variance, from the log goodput of each start (Student, Biometrika 6, 1908;
pooled variance: Fisher, Statistical Methods for Research Workers, 1925).

For two records of the same prompts, a block jackknife estimates the ratio of their figures, with an interval. A
block is a run of the same prompts in both records. Effects that are shorter than a block, such as a queue, stay
within blocks, so blocks vary as they would in another run.
"""

import math
from array import array
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from statistics import fmean
from typing import Final

ANYTHING_TO_NOTHING: Final = 1e4
"""Log ratio of a block in which only one arm made progress, larger than for any two floats (1420)."""

_NORMAL_QUARTILES: Final = 1.349
"""Distance between the quartiles of a normal distribution, in standard deviations."""

_FARTHEST: Final = 3.0
"""Largest deviation of a block in scales when dependence is estimated, so that one outlier does not hide it."""

_TRIMMED: Final = 0.2
"""Share of blocks at each end that the centre leaves out."""

DEPENDENCES: Final = tuple(step / 10 for step in range(9))
"""Autocorrelations that a series may have."""

_CAUTION_BLOCKS: Final = 6.0
_CAUTION_ERRORS: Final = 0.25
"""Margin added to the estimate of an autocorrelation, in blocks of bias and in standard errors.

Estimates from few blocks are uncertain and too low (Kendall 1954: by (1 + 3 times it) / n). docs/design/verdict.md
explains the choice.
"""


class History:
    """The log ratios of a series, each with the scale that was known before it."""

    __slots__ = ("_correlated", "_count", "_last", "_sorted", "_squared", "_summed", "log_ratios", "scales")

    def __init__(self) -> None:
        self.log_ratios = array("d")  # natural logarithm of candidate to baseline, one per block
        # Standard deviation of the earlier blocks, by their quartiles, so that outliers do not move it; 0 if it is not
        # known: for the first two, and while all are equal.
        self.scales = array("d")
        self._sorted = array("d")
        self._count = 0
        self._last = self._summed = self._squared = self._correlated = 0.0

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.log_ratios)

    def add(self, log_ratio: float) -> None:
        """Add the next block."""
        scale = self.scale()
        if len(self) > 1:
            deviation = (log_ratio - self._quantile(0.5)) / scale if scale else 0.0
            deviation = min(max(deviation, -_FARTHEST), _FARTHEST)
            self._correlated += deviation * self._last
            self._summed += deviation
            self._squared += deviation**2
            self._count += 1
            self._last = deviation
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
        """Return the trimmed mean of the blocks; trim more of them if an arm made no progress in some.

        It is ANYTHING_TO_NOTHING if one arm made no progress in half of them.
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

    def _quantile(self, share: float) -> float:
        place = share * (len(self._sorted) - 1)
        below = int(place)
        above = min(below + 1, len(self._sorted) - 1)
        return self._sorted[below] + (self._sorted[above] - self._sorted[below]) * (place - below)


_WEIGHTS: Final = (0.125, 0.25, 0.5, 1.0, 2.0)
"""Weights of the martingale; each is best for an effect of its size in scales. `Point` requires that they double."""

_BOUND_FARTHEST: Final = 2.0
"""Largest deviation of a block in scales, so that one outlier cannot decide or destroy the bound."""

_FARTHEST_BEFORE: Final = 3.0
"""Scales of the block before that one is expected to follow."""

_LOG_2: Final = math.log(2)
_LOG_WEIGHTS: Final = math.log(len(_WEIGHTS))
_BELOW_ALL: Final = -1e9
_SMALLEST_ERROR: Final = 1e-6
"""Smallest standard error of the mean, used if all blocks are equal."""

_STEPS_AN_ERROR: Final = 2
"""Approximate number of grid points per standard error of the mean. Evidence is linear between two points."""

_SLACK: Final = 0.8
"""Difference in powers of two after which the grid is replaced."""

_USUAL_ERRORS: Final = 3.5
_GROWTH: Final = 1.1
"""Growth of a series after which its grid is checked again, so that a change of scale per block does not replace it."""

_KEPT: Final = 4


class Point:
    """The evidence against one log ratio and all smaller ones."""

    __slots__ = ("_evidence", "_logs", "_seen", "log_ratio")

    def __init__(self, log_ratio: float) -> None:
        self.log_ratio = log_ratio
        self._logs = [0.0] * len(_WEIGHTS)
        self._seen = 0
        self._evidence = 0.0

    def evidence(self, history: History, side: int, dependence: float) -> float:
        """Return the logarithm of the martingale after all blocks; side -1 uses the series with swapped arms."""
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
                yield min(max(deviation / scale, -_BOUND_FARTHEST), _BOUND_FARTHEST)
            else:
                yield math.copysign(1.0, deviation) if deviation else 0.0


class LowerBound:
    """The lowest log ratio that is not refuted, for blocks with a given dependence on the previous one.

    It is searched on a grid, and only grid points near it are updated. Points are multiples of a power of two: a finer
    grid contains the points of a coarser one, and all contain 0, the log ratio that a verdict tests.
    """

    __slots__ = ("_chosen_at", "_exists", "_history", "_how", "_index", "_lowest", "_points", "_power")

    def __init__(self, history: History, side: int, dependence: float) -> None:
        self._history = history
        self._how = history, side, dependence
        self._lowest = Point(_BELOW_ALL)
        self._exists = False
        self._points: dict[int, Point] = {}
        self._index = 0
        self._power: int | None = None
        self._chosen_at = 0

    def value(self, needed: float) -> float | None:
        """Return the bound at which the logarithm of the evidence is `needed`; None if there is no bound yet."""
        # Against a log ratio below all blocks the evidence only grows.
        self._exists = self._exists or self._lowest.evidence(*self._how) >= needed
        if not self._exists:
            return None
        self._choose_grid()
        self._index = self._highest_refuted(needed)
        below, above = self._point(self._index), self._point(self._index + 1)
        self._points = {key: each for key, each in self._points.items() if abs(key - self._index) <= _KEPT}
        if self._error() <= _SMALLEST_ERROR:
            # Evidence falls in steps as wide as the grid, at each block, so the refuted point is the bound.
            return below.log_ratio
        refuted, not_refuted = below.evidence(*self._how), above.evidence(*self._how)
        share = (refuted - needed) / (refuted - not_refuted)
        return below.log_ratio + share * (above.log_ratio - below.log_ratio)

    def _choose_grid(self) -> None:
        """Make the grid as fine as the series allows, starting near the usual bound."""
        # Points of another grid take all blocks again, so that the grid is not changed at every block.
        if len(self._history) < self._chosen_at * _GROWTH:
            return
        error, dependence = self._error(), self._how[2]
        power = math.log2(error / _STEPS_AN_ERROR)
        if self._power is None:
            self._power, self._chosen_at = round(power), len(self._history)
            wider = math.sqrt((1 + dependence) / (1 - dependence))
            usual = self._how[1] * self._history.centre() - _USUAL_ERRORS * error * wider
            self._index = math.floor(usual / 2.0**self._power)
        elif abs(power - self._power) > _SLACK:
            finer = self._power - round(power)
            self._power, self._chosen_at = round(power), len(self._history)

            def moved(index: int) -> int:
                return index << finer if finer >= 0 else index >> -finer

            kept = [key for key in self._points if finer >= 0 or not key % 2**-finer]
            self._points = {moved(key): self._points[key] for key in kept}
            self._index = moved(self._index)

    def _error(self) -> float:
        """Return the approximate standard error of the mean."""
        return max(self._history.scale() / math.sqrt(len(self._history)), _SMALLEST_ERROR)

    def _highest_refuted(self, needed: float) -> int:
        """Return the place on the grid, searched from the last one in doubling steps, then by bisection."""

        def is_refuted(index: int) -> bool:
            return self._point(index).evidence(*self._how) >= needed

        step, low = 1, self._index
        if is_refuted(low):
            while is_refuted(low + step):
                low, step = low + step, 2 * step
            high = low + step
        else:
            while not is_refuted(low - step):
                low, step = low - step, 2 * step
            low, high = low - step, low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_refuted(middle) else (low, middle)
        return low

    def _point(self, index: int) -> Point:
        if index not in self._points:
            self._points[index] = Point(index * 2.0 ** (self._power or 0))
        return self._points[index]


DEFAULT_LEVEL: Final = 0.95
_LARGEST_EXPONENT: Final = 700.0
"""Largest exponent whose exponential is a finite float."""


class Verdict(StrEnum):
    """Whether the interval excludes a ratio of 1."""

    PAYS = "Pays"
    DOES_NOT_PAY = "DoesNotPay"
    INCONCLUSIVE = "Inconclusive"

    @classmethod
    def of(cls, low: float | None, high: float | None) -> "Verdict":
        """Return the verdict by the ends of an interval of the log ratio."""
        if low is not None and low > 0:
            return cls.PAYS
        return cls.DOES_NOT_PAY if high is not None and high < 0 else cls.INCONCLUSIVE


@dataclass(frozen=True)
class Finding:
    """The result of a series after a block."""

    verdict: Verdict
    ratio: float | None  # candidate's goodput to the baseline's; None if one of them did nothing in half of the blocks
    low: float | None  # end of the interval; None while it has no such end
    high: float | None


class PairedSeries:
    """Blocks of one comparison, each with the goodput of both arms.

    Parameters
    ----------
    level
        Probability that the interval holds the true ratio after every block.
    """

    __slots__ = ("_bounds", "_history", "_needed")

    def __init__(self, level: float = DEFAULT_LEVEL) -> None:
        self._history = History()
        self._needed = math.log(2 / (1 - level))
        self._bounds: dict[float, tuple[LowerBound, LowerBound]] = {}

    def add(self, baseline: float, candidate: float) -> Finding:
        """Add the next block and return the finding. A block without activity in both arms is ignored."""
        if baseline and candidate:
            self._history.add(math.log(candidate) - math.log(baseline))
        elif baseline or candidate:
            self._history.add(ANYTHING_TO_NOTHING if candidate else -ANYTHING_TO_NOTHING)
        if not len(self._history):
            return Finding(Verdict.INCONCLUSIVE, None, None, None)
        # The wider interval: for independent blocks, or for the dependence seen.
        found = [
            [bound.value(self._needed) for bound in self._both(each)] for each in {0.0, self._history.dependence()}
        ]
        low, mirrored = (None if None in each else min(each) for each in zip(*found, strict=True))
        high = None if mirrored is None else -mirrored
        centre = self._history.centre()
        centre = centre if low is None else max(centre, low)
        centre = centre if high is None else min(centre, high)
        ratio, lowest, highest = (
            None if each is None or abs(each) > _LARGEST_EXPONENT else math.exp(each) for each in (centre, low, high)
        )
        return Finding(Verdict.of(low, high), ratio, lowest, highest)

    def _both(self, dependence: float) -> tuple[LowerBound, LowerBound]:
        """Return the bounds for a dependence, from a cache because the dependence alternates."""
        bounds = self._bounds.pop(dependence, None)
        if bounds is None:
            bounds = LowerBound(self._history, 1, dependence), LowerBound(self._history, -1, dependence)
        self._bounds[dependence] = bounds
        if len(self._bounds) > _KEPT:
            del self._bounds[next(iter(self._bounds))]
        return bounds


def bounded_exp(log_ratio: float) -> float:
    """Return a ratio, limited to the range of a float."""
    return math.exp(max(-_LARGEST_EXPONENT, min(_LARGEST_EXPONENT, log_ratio)))


_HALVINGS: Final = 100
_LARGEST_QUANTILE: Final = 1e9


@lru_cache(maxsize=256)
def student_quantile(share: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution for a share of more than a half."""
    low, high = 0.0, 1.0
    while _student_below(high, freedom) < share and high < _LARGEST_QUANTILE:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_below(middle, freedom) < share else (low, middle)
    return high


def _student_below(value: float, freedom: int) -> float:
    """Return the probability below a value, in closed form (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    angle = math.atan(value / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for step in range(freedom // 2):
        total += term
        term *= cosine**2 * (2 * step + 1 + odd) / (2 * step + 2 + odd)
    between = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return (1 + between) / 2


FEWEST_STARTS: Final = 2
"""Fewest starts per arm: one start shows no variation."""


def between_starts(arms: Sequence[Sequence[float]], candidate: int, level: float) -> tuple[float, float] | None:
    """Return the interval of a log ratio.

    Parameters
    ----------
    arms
        For each arm its log goodput in each start; the baseline first.
    candidate
        Index of the arm to compare with the baseline.
    level
        Probability that the interval holds the true log ratio.

    Returns
    -------
    tuple
        Its ends; None if one of the two arms has no start, or no arm has two.
    """
    baseline, other = arms[0], arms[candidate]
    variance, freedom = _pooled(arms)
    if not baseline or not other or freedom < 1:
        return None
    error = math.sqrt(variance * (1 / len(baseline) + 1 / len(other)))
    half = student_quantile(1 - (1 - level) / 2, freedom) * error
    centre = fmean(other) - fmean(baseline)
    return centre - half, centre + half


def starts_needed(arms: Sequence[Sequence[float]], log_ratio: float, level: float, most: int = 20) -> int | None:
    """Return the starts per arm that would tell the ratio from 1 if they vary as these do; None if more than `most`."""
    variance, freedom = _pooled(arms)
    if freedom < 1:
        return None
    for starts in range(FEWEST_STARTS, most + 1):
        quantile = student_quantile(1 - (1 - level) / 2, len(arms) * (starts - 1))
        if quantile * math.sqrt(2 * variance / starts) < abs(log_ratio):
            return starts
    return None


def _pooled(arms: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the variance of a start over all arms, and its degrees of freedom."""
    freedom = sum(len(each) - 1 for each in arms if each)
    squares = sum((value - fmean(each)) ** 2 for each in arms if each for value in each)
    return squares / max(1, freedom), freedom


FEWEST_BLOCKS: Final = 6
"""With fewer an interval is too wide to tell anything."""


@dataclass(frozen=True)
class Estimate:
    """A ratio, as a logarithm if it has one, with its standard error and the error's degrees of freedom."""

    value: float
    error: float
    freedom: int
    is_log: bool = True

    @property
    def ratio(self) -> float:
        """The ratio."""
        return bounded_exp(self.value) if self.is_log else self.value

    def interval(self, alpha: float) -> tuple[float, float]:
        """Return an interval that misses the ratio with a probability of alpha, half of it on either side."""
        half_width = self.error * student_quantile(1 - alpha / 2, self.freedom)
        low, high = self.value - half_width, self.value + half_width
        return (bounded_exp(low), bounded_exp(high)) if self.is_log else (max(0.0, low), high)


Statistic = Callable[[int | None], float | None]
"""A figure of a record without one of its blocks, or with all; None if it is undefined."""


def estimate(golden: Statistic, found: Statistic, blocks: int) -> Estimate | None:
    """Return the ratio of a figure in two records; None with too few blocks for a standard error.

    The delete-one jackknife over blocks (Efron and Stein 1981), with Student's t for the number of blocks.
    """
    pairs = [(golden(block), found(block)) for block in (None, *range(blocks))]
    return _jackknife([math.log(now) - math.log(before) if before and now else None for before, now in pairs])


def estimate_near_nothing(golden: Statistic, found: Statistic, blocks: int) -> Estimate | None:
    """Return the ratio of a figure that may be 0, such as acceptance, and then has no logarithm, as `estimate` does."""
    pairs = [(golden(block), found(block) or 0.0) for block in (None, *range(blocks))]
    return _jackknife([now / before if before else None for before, now in pairs], is_log=False)


def _jackknife(values: Sequence[float | None], *, is_log: bool = True) -> Estimate | None:
    whole, *parts = [each for each in values if each is not None] or [0.0]
    blocks = len(values) - 1
    if len(parts) < blocks or blocks < FEWEST_BLOCKS:
        return None
    centre = fmean(parts)
    error = math.sqrt((blocks - 1) / blocks * sum((each - centre) ** 2 for each in parts))
    return Estimate(whole, error, blocks - 1, is_log)


def of_sums(numerators: Sequence[float], denominators: Sequence[float]) -> Statistic:
    """Return the ratio of two sums over blocks as a figure of a record."""
    whole = sum(numerators), sum(denominators)

    def without(block: int | None) -> float | None:
        above, below = whole
        if block is not None:
            above, below = above - numerators[block], below - denominators[block]
        return above / below if above > 0 and below > 0 else None

    return without


def of_quantile(values: Sequence[tuple[float, int]], share: float, blocks: int) -> Statistic:
    """Return a quantile of values, each with its block, as a statistic."""
    ordered = sorted(values)
    places: list[list[int]] = [[] for _ in range(blocks)]
    for place, (_, block) in enumerate(ordered):
        places[block].append(place)

    def without(block: int | None) -> float | None:
        left_out = [] if block is None else places[block]
        kept = len(ordered) - len(left_out)
        if not kept:
            return None
        rank = min(int(share * kept), kept - 1)
        # Number of the block's values before the rank: value i of the block lies after i fewer kept values.
        before = bisect_right(range(len(left_out)), rank, key=lambda index: left_out[index] - index)
        return ordered[rank + before][0] or None

    return without
