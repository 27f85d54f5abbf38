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

from specdecode_operator.evidence.student import student_quantile

FEWEST_STARTS: Final = 2
"""Of an arm: one start says nothing about the next."""


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
    freedom = _freedom(arms)
    if not baseline or not other or freedom < 1:
        return None
    variance = _variance(arms, freedom)
    error = math.sqrt(variance * (1 / len(baseline) + 1 / len(other)))
    half = student_quantile(1 - (1 - level) / 2, freedom) * error
    centre = fmean(other) - fmean(baseline)
    return centre - half, centre + half


def starts_needed(arms: Sequence[Sequence[float]], log_ratio: float, level: float, most: int = 20) -> int | None:
    """Return how many starts of each arm would tell such a ratio from 1 if they vary as these do; None: more."""
    freedom = _freedom(arms)
    if freedom < 1:
        return None
    variance = _variance(arms, freedom)
    for starts in range(FEWEST_STARTS, most + 1):
        quantile = student_quantile(1 - (1 - level) / 2, len(arms) * (starts - 1))
        if quantile * math.sqrt(2 * variance / starts) < abs(log_ratio):
            return starts
    return None


def _freedom(arms: Sequence[Sequence[float]]) -> int:
    return sum(len(each) - 1 for each in arms if each)


def _variance(arms: Sequence[Sequence[float]], freedom: int) -> float:
    """Return the variance of a start, of all arms together."""
    return sum((value - fmean(each)) ** 2 for each in arms if each for value in each) / freedom
