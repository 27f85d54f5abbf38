"""Count the requests of a run, and print its progress once a second as one line of JSON."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from specdecode_operator.api.capture import Phase
from specdecode_operator.capture.files.formats import Outcome
from specdecode_operator.capture.load.arrivals import phase_duration_s, phase_requests
from specdecode_operator.capture.load.shutdown import Stop

TICK_S = 1.0


@dataclass(frozen=True)
class PhaseResult:
    """Result of one phase, or of the warm-up."""

    name: str
    # From shortly before its first request to the end of its last answer, in ms since the run's zero.
    started_ms: float
    ended_ms: float
    planned: int | None  # number of requests if known in advance; the mean for a Poisson phase with a duration
    outcomes: Mapping[Outcome, int]

    @property
    def requests(self) -> int:
        """Number of requests."""
        return sum(self.outcomes.values())


def print_line(line: str) -> None:
    """Print a line to the container's log without buffering."""
    print(line, flush=True)  # noqa: T201 - the container's log


class Progress:
    """Progress of a run.

    The lines have ``phase`` (the current one), ``sent``, ``recorded``, ``completed`` and ``failed`` (since the start
    of the run, warm-up included), ``rate`` (requests ended per second in the current phase) and ``eta_s`` (until the
    end of the last phase; null if unknown). ``recorded`` reads from the volume, in a thread.
    """

    def __init__(self, in_flight: Callable[[], int], recorded: Callable[[], int]) -> None:
        self._in_flight = in_flight
        self._count_recorded = recorded
        self._recorded = 0
        self._tallies: list[Counter[Outcome]] = []
        self._phase: Phase | None = None
        self._later: Sequence[Phase] = ()
        self._started_s = time.monotonic()

    def begin(self, phase: Phase, tally: Counter[Outcome], later: Sequence[Phase]) -> None:
        """Follow a phase; ``later`` are the phases after it."""
        self._tallies.append(tally)
        self._phase, self._later = phase, later
        self._started_s = time.monotonic()

    async def run(self, stop: Stop) -> None:
        """Print a line each second until the run must end."""
        tick_s = time.monotonic()
        while await stop.sleep_until(tick_s):
            # A slow volume must not delay the load.
            self._recorded = await asyncio.to_thread(self._count_recorded)
            if self._phase is not None:
                self._tick(self._phase)
            tick_s += TICK_S

    def _tick(self, phase: Phase) -> None:
        current = self._tallies[-1]
        passed_s = time.monotonic() - self._started_s
        rate = current.total() / passed_s if passed_s > 0 else 0.0
        # A duration of 0 means that the engine's speed decides.
        left_s: float | None = None
        if duration_s := phase_duration_s(phase):
            left_s = max(0.0, duration_s - passed_s)
        elif rate and (planned := phase_requests(phase)) is not None:
            left_s = (planned - current.total()) / rate
        parts_s = [left_s, *(phase_duration_s(each) or None for each in self._later)]
        known_s = [part_s for part_s in parts_s if part_s is not None]
        ended = sum(tally.total() for tally in self._tallies)
        completed = sum(tally["completed"] for tally in self._tallies)
        line = {
            "phase": phase.name,
            "sent": ended + self._in_flight(),
            "recorded": self._recorded,
            "completed": completed,
            "failed": ended - completed,
            "rate": round(rate, 2),
            "eta_s": round(sum(known_s), 1) if len(known_s) == len(parts_s) else None,
        }
        print_line(msgspec.json.encode(line).decode())
