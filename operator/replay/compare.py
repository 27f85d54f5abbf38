"""Compare two recordings: figures of each, their distance, and whether it is within tolerance."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from specdecode_operator.capture.trace_reader import Recording, read_steps
from specdecode_operator.problems import printable

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Figures of one recording; empty if it has no such values."""

    k: int
    requests: int
    seconds: float  # from the first arrival to the last token; 0 without arrivals
    output_tokens: int
    ttft_ms: Floats
    tpot_ms: Floats  # of each request with more than one token
    gap_ms: Floats
    latency_ms: Floats
    bursts: dict[int, float]  # share of each size, without first chunks
    per_position: list[float]  # share of drafts of which each position was accepted
    acceptance: float | None  # share of drafted tokens that were accepted
    tokens_per_burst: Floats  # of each request, on average
    from_steps: bool  # acceptance is by the engine's own counters


def measured(recording: Recording) -> Measures:
    """Return the measures of a recording; raise RecordingError if its step statistics are unreadable."""
    requests = recording.requests
    k = recording.num_speculative_tokens
    several = [request for request in requests if len(request.gaps_ms)]
    sizes = _joined([np.asarray(request.chunk_tokens[1:]) for request in several])
    # By the step statistics, where an n-gram draft may have fewer than K tokens; accepted by position
    drafts, draft_tokens, accepted = 0, 0, [0] * k
    for line in read_steps(recording.steps) if recording.steps is not None else ():
        if (stats := line.scheduler.spec_decoding_stats) is not None:
            drafts += stats.num_drafts
            draft_tokens += stats.num_draft_tokens
            for position, count in enumerate(stats.num_accepted_tokens_per_pos[:k]):
                accepted[position] += count
    from_steps = bool(drafts)
    if not from_steps:
        # Without counters, every step drafts K tokens. Last chunks may be cut, and do not count.
        whole = _joined([np.asarray(request.chunk_tokens[1:-1]) for request in several])
        drafts = len(whole) if k else 0
        draft_tokens, accepted = drafts * k, [int((whole > position).sum()) for position in range(1, k + 1)]
    arrived = [(each.arrival_ms, each.end_ms) for each in requests]
    spans = [(arrival, end) for arrival, end in arrived if arrival is not None and end is not None]
    return Measures(
        k=k,
        requests=len(requests),
        seconds=(max(end for _, end in spans) - min(arrival for arrival, _ in spans)) / 1000 if spans else 0.0,
        output_tokens=sum(request.output_tokens for request in requests),
        ttft_ms=np.array([request.ttft_ms for request in requests]),
        tpot_ms=np.array([sum(each.gaps_ms) / (each.output_tokens - 1) for each in several if each.output_tokens > 1]),
        gap_ms=_joined([np.asarray(request.gaps_ms) for request in several]),
        latency_ms=np.array([request.ttft_ms + sum(request.gaps_ms) for request in requests]),
        bursts={int(size): float(np.mean(sizes == size)) for size in np.unique(sizes)},
        per_position=[count / drafts for count in accepted] if drafts else [],
        acceptance=sum(accepted) / draft_tokens if draft_tokens else None,
        tokens_per_burst=np.array([float(np.mean(request.chunk_tokens[1:])) for request in several]),
        from_steps=from_steps,
    )


def _joined(arrays: Sequence[NDArray[np.generic]]) -> Floats:
    return np.concatenate(arrays).astype(np.float64) if arrays else np.empty(0)


SHARES: Final = (50, 90, 99)
POINTS, PERCENT = "points", "%"

LIMITS: Final = {"TTFT": 5.0, "TPOT": 3.0, "gap": 5.0, "throughput": 2.0, "bursts": 2.0, "acceptance": 1.0}
"""Largest deviation of a faithful replay: TTFT, TPOT, gaps and throughput in percent, bursts and acceptance in points.
"""

_FEW: Final = 1000  # P99 of fewer values depends on ten at most: chance moves it by more than a limit
_TAIL: Final = 99


class Figure(Struct, kw_only=True, frozen=True):
    """One figure of both recordings."""

    name: str
    unit: str
    first: float
    second: float
    difference: float  # of the second from the first
    difference_unit: str  # ``%`` of the first, or points
    limit: float | None  # of the absolute difference; null if the figure is not judged
    passed: bool


class Comparison(Struct, kw_only=True, frozen=True):
    """All figures of two recordings, and notes for the reader."""

    first: str
    second: str
    requests: tuple[int, int]
    figures: list[Figure]
    notes: list[str]

    @property
    def passed(self) -> bool:
        """Whether every figure is within its limit."""
        return all(figure.passed for figure in self.figures)


def compare(first: Recording, second: Recording) -> Comparison:
    """Return the differences of the second recording from the first."""
    one, other = measured(first), measured(second)
    return Comparison(
        first=str(first.trace),
        second=str(second.trace),
        requests=(one.requests, other.requests),
        figures=[*_times(one, other), *_shares(one, other)],
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
        yield _figure(f"{name} mean", "ms", float(of_one.mean()), float(of_other.mean()), LIMITS.get(name))
        for share in SHARES:
            limit = None if few and share == _TAIL else LIMITS.get(name)
            yield _figure(f"{name} P{share}", "ms", _at(of_one, share), _at(of_other, share), limit)
    if one.seconds and other.seconds:
        rates = (one.output_tokens / one.seconds, other.output_tokens / other.seconds)
        yield _figure("throughput", "tokens/s", *rates, LIMITS["throughput"])


def _shares(one: Measures, other: Measures) -> Iterator[Figure]:
    for size in sorted(one.bursts.keys() | other.bursts.keys()):
        shares = (100 * one.bursts.get(size, 0.0), 100 * other.bursts.get(size, 0.0))
        yield _figure(f"bursts of {size}", PERCENT, *shares, LIMITS["bursts"])
    if len(one.tokens_per_burst) and len(other.tokens_per_burst):
        for share in (10, *SHARES[:-1]):
            values = (_at(one.tokens_per_burst, share), _at(other.tokens_per_burst, share))
            yield _figure(f"tokens per step of a request P{share}", "tokens", *values, None)
    if one.acceptance is None or other.acceptance is None:
        return
    yield _figure("acceptance", PERCENT, 100 * one.acceptance, 100 * other.acceptance, LIMITS["acceptance"])
    for position, shares in enumerate(zip(one.per_position, other.per_position, strict=False), start=1):
        yield _figure(f"acceptance at position {position}", PERCENT, 100 * shares[0], 100 * shares[1], None)


def _notes(first: Recording, second: Recording, one: Measures, other: Measures) -> Iterator[str]:
    if one.k != other.k:
        yield f"K is {one.k} in the first and {other.k} in the second: bursts and acceptance are not comparable"
    if first.meta.model != second.meta.model:
        names = [printable(str(each.meta.model)) for each in (first, second)]
        yield f"the first recording is of {names[0]}, the second of {names[1]}"
    if one.requests != other.requests:
        yield f"the first has {one.requests} requests, the second {other.requests}"
    if min(one.requests, other.requests) < _FEW:
        yield f"P{_TAIL} of TTFT and TPOT is not judged, because it needs {_FEW:,} requests or more"
    if one.from_steps != other.from_steps:
        yield (
            "acceptance comes from the engine's counters in one, and from chunks in the other, as if every step had"
            " drafted"
        )
    if not one.seconds or not other.seconds:
        yield "one has no arrival_ms, so throughput cannot be compared"


def _at(values: Floats, share: int) -> float:
    return float(np.percentile(values, share))


def _figure(name: str, unit: str, first: float, second: float, limit: float | None) -> Figure:
    """Return a figure; shares in percent differ by points, other values by percent of the first."""
    if unit == PERCENT:
        difference = second - first
    else:
        difference = 100 * (second - first) / first if first else 0.0 if not second else float("inf")
    return Figure(
        name=name,
        unit=unit,
        first=round(first, 4),
        second=round(second, 4),
        difference=round(difference, 4),
        difference_unit=POINTS if unit == PERCENT else PERCENT,
        limit=limit,
        passed=limit is None or abs(difference) <= limit,
    )
