"""Compute the number of requests that a workload sends, their times and the total duration.

Times of an open phase are offsets from its start. Each is computed from the index of the request alone, so rounding
errors do not accumulate, however long the phase is.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count, islice, takewhile
from random import Random

from specdecode_operator.api.capture import CaptureWorkload, Pattern, Phase
from specdecode_operator.capture.load.run_settings import exact, needed


def arrival_offsets_s(phase: Phase, seed: int, recorded_s: Sequence[float] = ()) -> Iterator[float]:
    """Yield when each request of an open phase is to be sent, in seconds from the phase's start, ascending.

    ``recorded_s`` are the moments of a ``Recorded`` phase, and at the end the one when it begins again.

    Requests of a phase with a duration are sent before it is over, the first
    of a ``Constant``, ``Burst`` or ``Staircase`` phase at 0.
    """
    offsets_s = _endless_offsets_s(phase, seed, recorded_s)
    if phase.requests is not None:
        return map(float, islice(offsets_s, phase.requests))
    # Whether a request is still in the phase is asked of the exact time: rounded, one at the very end would count.
    duration_s = exact(phase.duration_seconds)
    return map(float, takewhile(lambda offset_s: offset_s < duration_s, offsets_s))


def _endless_offsets_s(phase: Phase, seed: int, recorded_s: Sequence[float]) -> Iterator[Fraction]:
    match phase.pattern:
        case Pattern.CONSTANT:
            rate = exact(phase.requests_per_second)
            return (index / rate for index in count())
        case Pattern.POISSON:
            return _poisson_offsets_s(phase, seed)
        case Pattern.BURST:
            interval_s, size = exact(phase.burst_interval_seconds), needed(phase.burst_size)
            return (index // size * interval_s for index in count())
        case Pattern.STAIRCASE:
            return (stair.offset_s(index) for stair in _stairs(phase) for index in stair.indexes())
        case Pattern.RECORDED:
            *moments_s, again_s = map(Fraction, recorded_s)
            return (run * again_s + moment_s for run in count() for moment_s in moments_s)
        case Pattern.CLOSED | Pattern.MULTITURN:
            raise ValueError(f"requests of a {phase.pattern} phase have no planned times")


def _poisson_offsets_s(phase: Phase, seed: int) -> Iterator[Fraction]:
    random = Random(f"{seed}/{phase.name}/arrivals")  # noqa: S311 - not for secrets
    rate = float(exact(phase.requests_per_second))
    offset_s = 0.0
    while True:
        offset_s += random.expovariate(rate)
        yield Fraction(offset_s)


@dataclass(frozen=True)
class _Stair:
    """A step of a staircase: from when on, at what rate, and how many requests were due before and after it.

    The numbers of requests due are fractions: a request's number need not be
    reached just when the rate changes.
    """

    start_s: Fraction
    rate: Fraction
    due_before: Fraction
    due_after: Fraction

    def indexes(self) -> range:
        return range(math.ceil(self.due_before), math.ceil(self.due_after))

    def offset_s(self, index: int) -> Fraction:
        return self.start_s + (index - self.due_before) / self.rate


def _stairs(phase: Phase) -> Iterator[_Stair]:
    width_s, rise = exact(phase.step_seconds), exact(phase.step_requests_per_second)
    due = Fraction(0)
    for number in count():
        rate = exact(phase.requests_per_second) + number * rise
        stair = _Stair(number * width_s, rate, due, due + rate * width_s)
        yield stair
        due = stair.due_after


def expected_duration_s(workload: CaptureWorkload) -> float:
    """Return how long the phases of a workload take at least, in seconds.

    What depends on the engine comes on top: warm-up, the answers still in
    flight when a phase ends, and the whole of a closed phase that ends after a
    number of requests.
    """
    return math.fsum(phase_duration_s(phase) for phase in workload.phases)


def phase_duration_s(phase: Phase) -> float:
    """Return how long requests of a phase begin, in seconds; 0 where the engine or a trace decides."""
    if phase.duration_seconds is not None:
        return float(phase.duration_seconds)
    last = needed(phase.requests) - 1
    match phase.pattern:
        case Pattern.CONSTANT | Pattern.POISSON:
            return float(last / exact(phase.requests_per_second))
        case Pattern.BURST:
            return float(last // needed(phase.burst_size) * exact(phase.burst_interval_seconds))
        case Pattern.STAIRCASE:
            return float(next(stair.offset_s(last) for stair in _stairs(phase) if last < stair.due_after))
        case Pattern.CLOSED | Pattern.MULTITURN | Pattern.RECORDED:
            return 0.0


def phase_requests(phase: Phase) -> int | None:
    """Return how many requests a phase has; None where the engine or a trace decides, the mean where chance does."""
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
            last = next(stair for stair in _stairs(phase) if duration_s <= stair.start_s + exact(phase.step_seconds))
            return math.ceil(last.due_before + (duration_s - last.start_s) * last.rate)
        case Pattern.CLOSED | Pattern.MULTITURN | Pattern.RECORDED:
            return None
