"""Two recordings held against each other: how far the second is from the first, and whether that is near enough."""

from collections.abc import Iterator
from typing import Final

import numpy as np
from msgspec import Struct

from specdecode_operator.problems import printable
from specdecode_operator.replay.compare.measures import Floats, Measures, measured
from specdecode_operator.replay.recording.recording import Recording

SHARES: Final = (50, 90, 99)
POINTS, PERCENT = "points", "%"

LIMITS: Final = {"TTFT": 5.0, "TPOT": 3.0, "gap": 5.0, "throughput": 2.0, "bursts": 2.0, "acceptance": 1.0}
"""How far a faithful replay may be: TTFT, TPOT, gaps and throughput by percent, bursts and acceptance by points."""

_FEW: Final = 1000
"""P99 of fewer values is that of ten at most: chance alone moves it by more than a limit."""
_TAIL: Final = 99


class Figure(Struct, kw_only=True, frozen=True):
    """One figure of both."""

    name: str
    unit: str
    first: float
    second: float
    difference: float  # of the second from the first
    difference_unit: str  # ``%`` of the first, or points
    limit: float | None  # how far it may be; null where nothing is judged
    passed: bool


class Comparison(Struct, kw_only=True, frozen=True):
    """All figures, and what a reader should know of them."""

    first: str
    second: str
    requests: tuple[int, int]
    figures: list[Figure]
    notes: list[str]

    @property
    def passed(self) -> bool:
        """Whether everything is as near as it should be."""
        return all(figure.passed for figure in self.figures)


def compare(first: Recording, second: Recording) -> Comparison:
    """Return how far the second recording is from the first.

    Raises
    ------
    RecordingError
        Where step statistics cannot be read.
    """
    one, other = measured(first), measured(second)
    return Comparison(
        first=str(first.trace),
        second=str(second.trace),
        requests=(one.requests, other.requests),
        figures=[*_times(one, other), *_rates(one, other), *_bursts(one, other), *_acceptance(one, other)],
        notes=list(_notes(first, second, one, other)),
    )


def _times(one: Measures, other: Measures) -> Iterator[Figure]:
    for name, of_one, of_other in (
        ("TTFT", one.ttft_ms, other.ttft_ms),
        ("TPOT", one.tpot_ms, other.tpot_ms),
        ("gap", one.gap_ms, other.gap_ms),
        ("latency", one.latency_ms, other.latency_ms),
    ):
        if not len(of_one) or not len(of_other):
            continue
        few = min(len(of_one), len(of_other)) < _FEW
        yield _by_percent(f"{name} mean", "ms", float(of_one.mean()), float(of_other.mean()), LIMITS.get(name))
        for share in SHARES:
            limit = None if few and share == _TAIL else LIMITS.get(name)
            yield _by_percent(f"{name} P{share}", "ms", _at(of_one, share), _at(of_other, share), limit)


def _rates(one: Measures, other: Measures) -> Iterator[Figure]:
    if one.seconds and other.seconds:
        rates = (one.output_tokens / one.seconds, other.output_tokens / other.seconds)
        yield _by_percent("throughput", "tokens/s", *rates, LIMITS["throughput"])


def _bursts(one: Measures, other: Measures) -> Iterator[Figure]:
    for size in sorted(one.bursts.keys() | other.bursts.keys()):
        shares = (100 * one.bursts.get(size, 0.0), 100 * other.bursts.get(size, 0.0))
        yield _by_points(f"bursts of {size}", *shares, LIMITS["bursts"])
    if len(one.tokens_per_burst) and len(other.tokens_per_burst):
        for share in (10, *SHARES[:-1]):
            values = (_at(one.tokens_per_burst, share), _at(other.tokens_per_burst, share))
            yield _by_percent(f"tokens per step of a request P{share}", "tokens", *values, None)


def _acceptance(one: Measures, other: Measures) -> Iterator[Figure]:
    if one.acceptance is None or other.acceptance is None:
        return
    yield _by_points("acceptance", 100 * one.acceptance, 100 * other.acceptance, LIMITS["acceptance"])
    for position, shares in enumerate(zip(one.per_position, other.per_position, strict=False), start=1):
        yield _by_points(f"acceptance at position {position}", 100 * shares[0], 100 * shares[1], None)


def _notes(first: Recording, second: Recording, one: Measures, other: Measures) -> Iterator[str]:
    if one.k != other.k:
        yield f"K is {one.k} in the first and {other.k} in the second: bursts and acceptance are of different drafts"
    if first.meta.model != second.meta.model:
        names = [printable(str(each.meta.model)) for each in (first, second)]
        yield f"the first is of {names[0]}, the second of {names[1]}"
    if one.requests != other.requests:
        yield f"the first has {one.requests} requests, the second {other.requests}"
    if min(one.requests, other.requests) < _FEW:
        yield f"with fewer than {_FEW:,} requests P{_TAIL} of TTFT and TPOT is that of a few, and not judged"
    if one.from_steps != other.from_steps:
        yield "acceptance is by the engine's counters in one and by chunks, as if every step had drafted, in the other"
    if not one.seconds or not other.seconds:
        yield "one has no arrival_ms: there is no throughput to compare"


def _at(values: Floats, share: int) -> float:
    return float(np.percentile(values, share))


def _by_percent(name: str, unit: str, first: float, second: float, limit: float | None) -> Figure:
    difference = 100 * (second - first) / first if first else 0.0 if not second else float("inf")
    return _figure(name, unit, (first, second), difference, PERCENT, limit)


def _by_points(name: str, first: float, second: float, limit: float | None) -> Figure:
    return _figure(name, PERCENT, (first, second), second - first, POINTS, limit)


def _figure(  # noqa: PLR0913, PLR0917  the parts of a row
    name: str, unit: str, values: tuple[float, float], difference: float, difference_unit: str, limit: float | None
) -> Figure:
    return Figure(
        name=name,
        unit=unit,
        first=round(values[0], 4),
        second=round(values[1], 4),
        difference=round(difference, 4),
        difference_unit=difference_unit,
        limit=limit,
        passed=limit is None or abs(difference) <= limit,
    )
