"""How far engines of one arm differ from start to start, and what that leaves of a ratio between two arms.

What a start of an engine brings along stays until the next: it is in all blocks of that start, and none tells of it.
Taken here is Student's interval for two means with one variance in common: logarithms of goodput, one for each start,
the variance from how far the starts of one arm lie apart, of all arms together. Student, The probable error of a mean,
Biometrika 6, 1908; the variance of several groups is Fisher's, Statistical Methods for Research Workers, 1925.
"""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Final

FEWEST_STARTS: Final = 2
"""Of an arm: one start says nothing about the next."""

_HALVINGS: Final = 100
_LARGEST_QUANTILE: Final = 1e9


def between_starts(arms: Sequence[Sequence[float]], candidate: int, level: float) -> tuple[float, float] | None:
    """Return the ends of the interval of a log ratio.

    Parameters
    ----------
    arms
        For each arm its log goodput in each start; the baseline first.
    candidate
        Which of them is compared with the baseline.
    level
        Probability that the interval holds the true log ratio.

    Returns
    -------
    tuple
        The lower end and the upper one; None where an arm of the two has no start, or no arm has two.
    """
    baseline, other = arms[0], arms[candidate]
    freedom = sum(len(each) - 1 for each in arms if each)
    if not baseline or not other or freedom < 1:
        return None
    variance = sum((value - fmean(each)) ** 2 for each in arms if each for value in each) / freedom
    error = math.sqrt(variance * (1 / len(baseline) + 1 / len(other)))
    half = student_quantile(1 - (1 - level) / 2, freedom) * error
    centre = fmean(other) - fmean(baseline)
    return centre - half, centre + half


def starts_needed(arms: Sequence[Sequence[float]], log_ratio: float, level: float, most: int = 20) -> int | None:
    """Return how many starts of each arm would tell such a ratio from 1 if they vary as these do; None: more."""
    freedom = sum(len(each) - 1 for each in arms if each)
    if freedom < 1:
        return None
    variance = sum((value - fmean(each)) ** 2 for each in arms if each for value in each) / freedom
    for starts in range(FEWEST_STARTS, most + 1):
        quantile = student_quantile(1 - (1 - level) / 2, len(arms) * (starts - 1))
        if quantile * math.sqrt(2 * variance / starts) < abs(log_ratio):
            return starts
    return None


def student_quantile(share: float, freedom: int) -> float:
    """Return what Student's t of so many degrees of freedom stays below with a probability of more than a half."""
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
