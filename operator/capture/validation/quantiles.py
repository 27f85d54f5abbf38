"""Quantiles of measured times."""

from array import array
from collections.abc import Iterable

from msgspec import Struct


class Quantiles(Struct, kw_only=True, frozen=True):
    """Quantiles of some numbers, interpolated linearly between neighbours as numpy does."""

    count: int
    # What half, 90 %, 95 % and 99 % of them do not exceed.
    p50: float
    p90: float
    p95: float
    p99: float


def quantiles(values: Iterable[float]) -> Quantiles | None:
    """Return the quantiles of some numbers; nothing of none."""
    ordered = array("d", sorted(values))
    if not ordered:
        return None
    return Quantiles(
        count=len(ordered),
        p50=_at(ordered, 0.5),
        p90=_at(ordered, 0.9),
        p95=_at(ordered, 0.95),
        p99=_at(ordered, 0.99),
    )


def _at(ordered: "array[float]", share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return round(ordered[below] + (ordered[above] - ordered[below]) * (place - below), 3)
