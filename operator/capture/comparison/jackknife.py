"""How sure a ratio of two records is, which were made of the same prompts: by leaving blocks out, one after another.

A block is a run of the same prompts in both records. What lasts for less than a block, such as a queue or a mood of the
machine, is within blocks, so that blocks vary as they would in another run.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from specdecode_operator.evidence.series import bounded_exp
from specdecode_operator.evidence.student import student_quantile

FEWEST_BLOCKS: Final = 6
"""With fewer an interval is too wide to tell anything."""


@dataclass(frozen=True)
class Estimate:
    """The logarithm of a ratio, with its standard error and that one's degrees of freedom."""

    log_ratio: float
    error: float
    freedom: int

    @property
    def ratio(self) -> float:
        """The ratio."""
        return bounded_exp(self.log_ratio)

    def interval(self, alpha: float) -> tuple[float, float]:
        """Return an interval that misses the ratio with a probability of alpha, half of it on either side."""
        half_width = self.error * student_quantile(1 - alpha / 2, self.freedom)
        return bounded_exp(self.log_ratio - half_width), bounded_exp(self.log_ratio + half_width)


@dataclass(frozen=True)
class NearNothing:
    """A ratio so near to 0 that it has no logarithm without one of the blocks, with its standard error."""

    ratio: float
    error: float
    freedom: int

    def interval(self, alpha: float) -> tuple[float, float]:
        """Return an interval, as that of an `Estimate`."""
        half_width = self.error * student_quantile(1 - alpha / 2, self.freedom)
        return max(0.0, self.ratio - half_width), self.ratio + half_width


Statistic = Callable[[int | None], float | None]
"""A figure of one record without one of its blocks, or of all; None where there is none."""


def estimate(golden: Statistic, found: Statistic, blocks: int) -> Estimate | None:
    """Return the ratio of a figure in two records; None where there are too few blocks to tell how sure it is.

    The delete-one jackknife over blocks (Efron and Stein 1981), with Student's t for the number of blocks.
    """
    whole = _log_ratio(golden(None), found(None))
    parts = [_log_ratio(golden(block), found(block)) for block in range(blocks)]
    told = [each for each in parts if each is not None]
    if whole is None or len(told) < blocks or blocks < FEWEST_BLOCKS:
        return None
    centre = fmean(told)
    error = math.sqrt((blocks - 1) / blocks * sum((each - centre) ** 2 for each in told))
    return Estimate(whole, error, blocks - 1)


def estimate_near_nothing(golden: Statistic, found: Statistic, blocks: int) -> NearNothing | None:
    """Return the ratio of a figure that is 0 where there is none, such as what is accepted, as `estimate` does."""
    pairs = [(golden(block), found(block) or 0.0) for block in (None, *range(blocks))]
    told = [now / before for before, now in pairs if before]
    if len(told) <= blocks or blocks < FEWEST_BLOCKS:
        return None
    whole, *parts = told
    centre = fmean(parts)
    error = math.sqrt((blocks - 1) / blocks * sum((each - centre) ** 2 for each in parts))
    return NearNothing(whole, error, blocks - 1)


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
    """Return a quantile of values, each with its block, as a figure of a record."""
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
        # Places of the block before the one that is sought: the first has none of its own before it, and so on.
        before = bisect_right(range(len(left_out)), rank, key=lambda index: left_out[index] - index)
        return ordered[rank + before][0] or None

    return without


def _log_ratio(golden: float | None, found: float | None) -> float | None:
    return math.log(found) - math.log(golden) if golden and found else None
