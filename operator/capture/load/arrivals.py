"""When the requests of a workload are sent, and how many there are.

An open phase's times are offsets from its start, each computed by itself from
the request's number: nothing adds up, so nothing drifts, however long it runs.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import singledispatch
from itertools import count, islice, takewhile
from random import Random

from specdecode_operator.capture.load.workload import (
    Burst,
    Closed,
    Constant,
    Multiturn,
    OpenPhase,
    Phase,
    Poisson,
    Staircase,
    Workload,
)


def arrival_offsets_s(phase: OpenPhase, seed: int) -> Iterator[float]:
    """Yield when each request of an open phase is to be sent, in seconds from the phase's start, ascending.

    Requests of a phase with a duration are sent before it is over, the first
    of a ``Constant``, ``Burst`` or ``Staircase`` phase at 0.
    """
    offsets_s = _endless_offsets_s(phase, seed)
    if phase.requests is not None:
        return map(float, islice(offsets_s, phase.requests))
    # Whether a request is still in the phase is asked of the exact time: rounded, one at the very end would count.
    duration_s = _duration_s(phase)
    return map(float, takewhile(lambda offset_s: offset_s < duration_s, offsets_s))


@singledispatch
def _endless_offsets_s(phase: OpenPhase, seed: int) -> Iterator[Fraction]:
    raise NotImplementedError(type(phase))


@_endless_offsets_s.register
def _(phase: Constant, _seed: int) -> Iterator[Fraction]:
    rate = Fraction(phase.requests_per_second)
    return (index / rate for index in count())


@_endless_offsets_s.register
def _(phase: Poisson, seed: int) -> Iterator[Fraction]:
    random = Random(f"{seed}/{phase.name}/arrivals")  # noqa: S311 - not for secrets
    rate = float(phase.requests_per_second)
    offset_s = 0.0
    while True:
        offset_s += random.expovariate(rate)
        yield Fraction(offset_s)


@_endless_offsets_s.register
def _(phase: Burst, _seed: int) -> Iterator[Fraction]:
    interval_s = Fraction(phase.burst_interval_seconds)
    return (index // phase.burst_size * interval_s for index in count())


@_endless_offsets_s.register
def _(phase: Staircase, _seed: int) -> Iterator[Fraction]:
    return (step.offset_s(index) for step in _stairs(phase) for index in step.indexes())


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


def _stairs(phase: Staircase) -> Iterator[_Stair]:
    width_s, rise = Fraction(phase.step_seconds), Fraction(phase.step_requests_per_second)
    due = Fraction(0)
    for number in count():
        rate = Fraction(phase.requests_per_second) + number * rise
        stair = _Stair(number * width_s, rate, due, due + rate * width_s)
        yield stair
        due = stair.due_after


def expected_duration_s(workload: Workload) -> float:
    """Return how long the phases of a workload take at least, in seconds.

    What depends on the engine comes on top: warm-up, the answers still in
    flight when a phase ends, and the whole of a closed phase that ends after a
    number of requests.
    """
    return math.fsum(phase_duration_s(phase) for phase in workload.phases)


def phase_duration_s(phase: Phase) -> float:
    """Return how long requests of a phase begin, in seconds; 0 where only the engine's speed decides."""
    if phase.duration_seconds is not None:
        return float(phase.duration_seconds)
    assert phase.requests is not None  # noqa: S101 - a phase has one of the two
    match phase:
        case Constant() | Poisson():
            return float((phase.requests - 1) / Fraction(phase.requests_per_second))
        case Burst():
            return float((phase.requests - 1) // phase.burst_size * Fraction(phase.burst_interval_seconds))
        case Staircase():
            last = phase.requests - 1
            return float(next(stair.offset_s(last) for stair in _stairs(phase) if last < stair.due_after))
        case Closed() | Multiturn():
            return 0.0


def phase_requests(phase: Phase) -> int | None:
    """Return how many requests a phase has; None where the engine's speed decides, the mean where chance does."""
    if phase.requests is not None:
        return phase.requests
    duration_s = _duration_s(phase)
    match phase:
        case Constant():
            return math.ceil(duration_s * Fraction(phase.requests_per_second))
        case Poisson():
            return round(duration_s * Fraction(phase.requests_per_second))
        case Burst():
            return math.ceil(duration_s / Fraction(phase.burst_interval_seconds)) * phase.burst_size
        case Staircase():
            last = next(stair for stair in _stairs(phase) if duration_s <= stair.start_s + Fraction(phase.step_seconds))
            return math.ceil(last.due_before + (duration_s - last.start_s) * last.rate)
        case Closed() | Multiturn():
            return None


def _duration_s(phase: Phase) -> Fraction:
    assert phase.duration_seconds is not None  # noqa: S101 - a phase without requests has it
    return Fraction(phase.duration_seconds)
