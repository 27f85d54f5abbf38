"""Quantiles of measured times."""

import statistics
from collections.abc import Iterable

from msgspec import Struct


class Quantiles(Struct, kw_only=True, frozen=True):
    """What so many percent of some numbers do not exceed, interpolated linearly between neighbours as numpy does."""

    count: int
    p50: float
    p90: float
    p95: float
    p99: float


def quantiles(values: Iterable[float]) -> Quantiles | None:
    """Return the quantiles of some numbers; nothing of none."""
    numbers = list(values)
    if not numbers:
        return None
    # Before Python 3.13 statistics takes two numbers at least; twice the same has the same quantiles.
    at_least_two = numbers * 2 if len(numbers) == 1 else numbers
    # "inclusive" is numpy's definition: the smallest and the largest number are the quantiles 0 and 1.
    percentiles = [round(each, 3) for each in statistics.quantiles(at_least_two, n=100, method="inclusive")]
    p50, p90, p95, p99 = (percentiles[share - 1] for share in (50, 90, 95, 99))
    return Quantiles(count=len(numbers), p50=p50, p90=p90, p95=p95, p99=p99)
