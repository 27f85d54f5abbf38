"""Count the requests of a run, and print its progress once a second as one line of JSON."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from specdecode_operator.api.capture import Phase
from specdecode_operator.capture.files.formats import Outcome
from specdecode_operator.capture.load.arrivals import phase_duration_s, phase_requests
from specdecode_operator.capture.load.shutdown import Stop

TICK_S = 1.0


@dataclass(frozen=True)
class PhaseResult:
    """What became of one phase, warm-up included."""

    name: str
    # From its beginning, a little before its first request, to its last answer's end, since the run's zero.
    started_ms: float
    ended_ms: float
    # How many requests it was to have, where that is known beforehand; a Poisson phase with a duration: about.
    planned: int | None
    outcomes: Mapping[Outcome, int]

    @property
    def requests(self) -> int:
        """How many requests it had."""
        return sum(self.outcomes.values())


@dataclass
class Tally:
    """What happened in one phase so far."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Count a request that ended."""
        self.outcomes[outcome] += 1

    @property
    def completed(self) -> int:
        """Requests with a whole answer."""
        return self.outcomes["completed"]

    @property
    def ended(self) -> int:
        """Requests that ended in whatever way."""
        return self.outcomes.total()


def print_line(line: str) -> None:
    """Write a line of progress where the container's log has it at once."""
    print(line, flush=True)  # noqa: T201 - what it is for


class Progress:
    """The run's progress.

    The lines have ``phase`` (the present one), ``sent``, ``recorded``,
    ``completed`` and ``failed`` (since the run began, warm-up included),
    ``rate`` (requests ended a second in the present phase) and ``eta_s`` (until
    the last phase's end; null while that cannot be told).

    ``recorded`` reads from the volume, so it gets a thread.
    """

    def __init__(self, in_flight: Callable[[], int], recorded: Callable[[], int]) -> None:
        self._in_flight = in_flight
        self._count_recorded = recorded
        self._recorded = 0
        self._tallies: list[Tally] = []
        self._phase: Phase | None = None
        self._later: Sequence[Phase] = ()
        self._started_s = time.monotonic()

    def begin(self, phase: Phase, tally: Tally, later: Sequence[Phase]) -> None:
        """Follow a phase from now on; ``later`` are those that come after it."""
        self._tallies.append(tally)
        self._phase, self._later = phase, later
        self._started_s = time.monotonic()

    async def run(self, stop: Stop) -> None:
        """Write a line each second until the run must end."""
        tick_s = time.monotonic()
        while await stop.sleep_until(tick_s):
            # The schedule of the load must not wait for a slow volume.
            self._recorded = await asyncio.to_thread(self._count_recorded)
            self.tick()
            tick_s += TICK_S

    def tick(self) -> None:
        """Write one line."""
        if self._phase is None:
            return
        current = self._tallies[-1]
        passed_s = time.monotonic() - self._started_s
        rate = current.ended / passed_s if passed_s > 0 else 0.0
        parts_s = [_left_s(self._phase, current, passed_s, rate), *map(_known_duration_s, self._later)]
        known_s = [part_s for part_s in parts_s if part_s is not None]
        ended = sum(tally.ended for tally in self._tallies)
        completed = sum(tally.completed for tally in self._tallies)
        line = {
            "phase": self._phase.name,
            "sent": ended + self._in_flight(),
            "recorded": self._recorded,
            "completed": completed,
            "failed": ended - completed,
            "rate": round(rate, 2),
            "eta_s": round(sum(known_s), 1) if len(known_s) == len(parts_s) else None,
        }
        print_line(msgspec.json.encode(line).decode())


def _left_s(phase: Phase, tally: Tally, passed_s: float, rate: float) -> float | None:
    """Return how long the present phase still takes; None while that cannot be told."""
    duration_s = _known_duration_s(phase)
    if duration_s is not None:
        return max(0.0, duration_s - passed_s)
    planned = phase_requests(phase)
    if planned is None or not rate:
        return None
    return (planned - tally.ended) / rate


def _known_duration_s(phase: Phase) -> float | None:
    """Return how long requests of a phase begin; None where the engine's speed decides that."""
    return phase_duration_s(phase) or None
