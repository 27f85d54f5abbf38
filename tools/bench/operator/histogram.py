"""What a page of /metrics says: single values, and quantiles of a histogram between two scrapes."""

import math
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

Buckets = Mapping[float, float]
"""How many observations were no larger than each bound."""


def buckets(page: str, name: str, labels: Mapping[str, str]) -> dict[float, float]:
    """Return the buckets of a histogram on a page of /metrics, of all series that have the labels together."""
    found: dict[float, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == f"{name}_bucket" and labels.items() <= sample.labels.items():
                bound = float(sample.labels["le"])
                found[bound] = found.get(bound, 0) + sample.value
    return found


def value(page: str, name: str) -> float:
    """Return the only value of a name on a page of /metrics.

    Raises
    ------
    LookupError
        When there is none.
    """
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name:
                return float(sample.value)
    raise LookupError(name)


def since(before: Buckets, after: Buckets) -> dict[float, float]:
    """Return what was observed between two scrapes; a process that is another one begins from nothing."""
    return {bound: count - before.get(bound, 0) for bound, count in after.items()}


def quantile(observed: Buckets, share: float) -> float | None:
    """Return a quantile as Prometheus' `histogram_quantile` does, evenly within a bucket.

    None where nothing was observed; the last bound where it lies beyond it.
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
