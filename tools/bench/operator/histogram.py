"""Reads values from a metrics page, and computes quantiles of a histogram between two scrapes."""

import math
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

Buckets = Mapping[float, float]
"""Number of observations up to each bound."""


def buckets(page: str, name: str, labels: Mapping[str, str]) -> dict[float, float]:
    """Return the buckets of a histogram, summed over all series with the labels."""
    found: dict[float, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == f"{name}_bucket" and labels.items() <= sample.labels.items():
                bound = float(sample.labels["le"])
                found[bound] = found.get(bound, 0) + sample.value
    return found


def value(page: str, name: str) -> float:
    """Return the first value of a metric.

    Raises
    ------
    LookupError
        When the page does not have the metric.
    """
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name:
                return float(sample.value)
    raise LookupError(name)


def since(before: Buckets, after: Buckets) -> dict[float, float]:
    """Return the observations between two scrapes. For a new process, ``before`` is empty."""
    return {bound: count - before.get(bound, 0) for bound, count in after.items()}


def quantile(observed: Buckets, share: float) -> float | None:
    """Return a quantile as Prometheus' `histogram_quantile` does, by linear interpolation within a bucket.

    None without observations. The largest finite bound if the quantile lies above it.
    """
    bounds = sorted(observed)
    if not bounds or not observed[bounds[-1]]:
        return None
    rank = share * observed[bounds[-1]]
    below, count_below = 0.0, 0.0
    for bound in bounds:
        if observed[bound] >= rank:
            break
        below, count_below = bound, observed[bound]
    if math.isinf(bound):
        return below
    return below + (bound - below) * (rank - count_below) / (observed[bound] - count_below)
