"""Compute the number of requests that a workload sends, their times and the total duration.

Times of an open phase are offsets from its start. Each is computed only from the index of the request, so rounding
errors do not accumulate, however long the phase is.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import accumulate, count, islice, takewhile
from random import Random

from specdecode_operator.api.capture import CaptureWorkload, Pattern, Phase
from specdecode_operator.capture.load.run_settings import exact, needed


def arrival_offsets_s(phase: Phase, seed: int, recorded_s: Sequence[float] = ()) -> Iterator[float]:
    """Yield the send times of an open phase in seconds from its start, in ascending order."""
    # ``recorded_s`` are the times of a ``Recorded`` phase, followed by the time at which it repeats. In a phase with a
    # duration, all times lie before its end. A ``Constant``, ``Burst`` or ``Staircase`` phase starts at 0.
    offsets_s = _endless_offsets_s(phase, seed, recorded_s)
    if phase.requests is not None:
        return map(float, islice(offsets_s, phase.requests))
    # Compared exactly: a rounded time at the very end would count.
    duration_s = exact(phase.duration_seconds)
    return map(float, takewhile(lambda offset_s: offset_s < duration_s, offsets_s))


def _endless_offsets_s(phase: Phase, seed: int, recorded_s: Sequence[float]) -> Iterator[Fraction]:
    match phase.pattern:
        case Pattern.CONSTANT:
            rate = exact(phase.requests_per_second)
            return (index / rate for index in count())
        case Pattern.POISSON:
            random = Random(f"{seed}/{phase.name}/arrivals")  # noqa: S311 - not for secrets
            mean_rate = float(exact(phase.requests_per_second))
            return map(Fraction, accumulate(random.expovariate(mean_rate) for _ in count()))
        case Pattern.BURST:
            interval_s, size = exact(phase.burst_interval_seconds), needed(phase.burst_size)
            return (index // size * interval_s for index in count())
        case Pattern.STAIRCASE:
            return (
                stair.offset_s(index) for stair in map(partial(_stair, phase), count()) for index in stair.indexes()
            )
        case Pattern.RECORDED:
            *times_s, again_s = map(Fraction, recorded_s)
            return (run * again_s + time_s for run in count() for time_s in times_s)
        case Pattern.CLOSED | Pattern.MULTITURN:
            raise ValueError(f"requests of a {phase.pattern} phase have no planned times")


@dataclass(frozen=True)
class _Stair:
    """One step of a staircase. The requests due before and after it may be fractions."""

    start_s: Fraction
    rate: Fraction
    due_before: Fraction
    due_after: Fraction

    def indexes(self) -> range:
        return range(math.ceil(self.due_before), math.ceil(self.due_after))

    def offset_s(self, index: int) -> Fraction:
        return self.start_s + (index - self.due_before) / self.rate


def _stair(phase: Phase, number: int) -> _Stair:
    """Return a step of a staircase, counted from 0, without computing the earlier ones: a capture may have millions."""
    width_s, rise, first = map(exact, (phase.step_seconds, phase.step_requests_per_second, phase.requests_per_second))
    rate = first + number * rise
    due_before = width_s * number * (first + rate - rise) / 2
    return _Stair(number * width_s, rate, due_before, due_before + rate * width_s)


def _stair_with(phase: Phase, index: int) -> _Stair:
    """Return the step in which a request is due."""
    slowest = exact(phase.requests_per_second) * exact(phase.step_seconds)
    steps = range(math.floor(index / slowest) + 1)
    return _stair(phase, bisect_right(steps, Fraction(index), key=lambda number: _stair(phase, number).due_after))


def expected_duration_s(workload: CaptureWorkload) -> float:
    """Return the minimum duration of a workload in seconds."""
    # Warm-up, open requests at the end of a phase, and closed phases with a number of requests depend on the engine and
    # are not included.
    return math.fsum(phase_duration_s(phase) for phase in workload.phases)


def phase_duration_s(phase: Phase) -> float:
    """Return the time from the first to the last request of a phase in s; 0 if the engine or a trace decides."""
    if phase.duration_seconds is not None:
        return float(phase.duration_seconds)
    last = needed(phase.requests) - 1
    match phase.pattern:
        case Pattern.CONSTANT | Pattern.POISSON:
            return float(last / exact(phase.requests_per_second))
        case Pattern.BURST:
            return float(last // needed(phase.burst_size) * exact(phase.burst_interval_seconds))
        case Pattern.STAIRCASE:
            return float(_stair_with(phase, last).offset_s(last))
        case Pattern.CLOSED | Pattern.MULTITURN | Pattern.RECORDED:
            return 0.0


def phase_requests(phase: Phase) -> int | None:
    """Return the number of requests of a phase, for Poisson the mean; None if the engine or a trace decides."""
    if phase.requests is not None:
        return phase.requests
    duration_s = exact(phase.duration_seconds)
    match phase.pattern:
        case Pattern.CONSTANT:
            return math.ceil(duration_s * exact(phase.requests_per_second))
        case Pattern.POISSON:
            return round(duration_s * exact(phase.requests_per_second))
        case Pattern.BURST:
            return math.ceil(duration_s / exact(phase.burst_interval_seconds)) * needed(phase.burst_size)
        case Pattern.STAIRCASE:
            last = _stair(phase, math.ceil(duration_s / exact(phase.step_seconds)) - 1)
            return math.ceil(last.due_before + (duration_s - last.start_s) * last.rate)
        case Pattern.CLOSED | Pattern.MULTITURN | Pattern.RECORDED:
            return None
