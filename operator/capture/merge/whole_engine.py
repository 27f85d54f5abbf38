"""What no API server sees alone: how many requests an engine runs and prefills in a step, and how many are in flight.

One step of an engine yields one message for each API server with the requests of that server only, microseconds
apart, and its statistics go to one of them. So with several API servers the batch of each chunk is put together here:
messages of one engine that are closer than half of its shortest step are one step.

It holds about 40 bytes a step and a request, and is only made where there are several API servers.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from itertools import accumulate, pairwise
from typing import Final

from specdecode_operator.capture.recorder.lines import Request, Step

_SHORTEST_STEP_S: Final = 1e-4
"""Shorter gaps between two stamps of one API server are no step of a model."""


class _Samples:
    """Numbers by time, added in any order."""

    def __init__(self) -> None:
        self.times = array("d")
        self.values = array("Q")

    def add(self, time_s: float, value: int) -> None:
        self.times.append(time_s)
        self.values.append(value)

    def sort(self) -> None:
        order = sorted(range(len(self.times)), key=self.times.__getitem__)
        self.times = array("d", (self.times[i] for i in order))
        self.values = array("Q", (self.values[i] for i in order))


class WholeEngine:
    """Collects steps and requests of all API servers, then answers for one moment of one engine."""

    def __init__(self) -> None:
        self._running: defaultdict[int, _Samples] = defaultdict(_Samples)
        self._prefills: defaultdict[int, _Samples] = defaultdict(_Samples)
        self._prefill_sums: dict[int, array[int]] = {}
        self._shortest_s: dict[int, float] = {}
        self._last_stamp_s: dict[tuple[int, int], float] = {}
        self._arrivals_s = array("d")
        self._ends_s = array("d")

    def add_step(self, segment: int, step: Step) -> None:
        """Take a step that the API server of one segment saw."""
        if (before_s := self._last_stamp_s.get((segment, step.engine))) is not None:
            self._shorten(step.engine, step.t - before_s)
        self._last_stamp_s[segment, step.engine] = step.t
        if step.scheduler is not None:
            self._running[step.engine].add(step.t, int(step.scheduler.get("num_running_reqs", 0)))

    def add_request(self, request: Request) -> None:
        """Take a request of any API server."""
        if not request.chunk_s:
            return  # when it ended is not known: it would count as in flight for ever
        self._arrivals_s.append(request.arrival_monotonic_s)
        self._ends_s.append(request.chunk_s[-1])
        engine = request.engine or 0
        self._prefills[engine].add(request.chunk_s[0], request.prompt_tokens)
        for before_s, after_s in pairwise(request.chunk_s):
            self._shorten(engine, after_s - before_s)

    def _shorten(self, engine: int, gap_s: float) -> None:
        if _SHORTEST_STEP_S < gap_s < self._shortest_s.get(engine, float("inf")):
            self._shortest_s[engine] = gap_s

    def freeze(self) -> None:
        """Sort what was collected; answers are right from here on."""
        self._arrivals_s = array("d", sorted(self._arrivals_s))
        self._ends_s = array("d", sorted(self._ends_s))
        for engine, samples in [*self._running.items(), *self._prefills.items()]:
            samples.sort()
            if samples is self._prefills.get(engine):
                self._prefill_sums[engine] = array("Q", accumulate(samples.values, initial=0))

    def concurrency(self, arrival_s: float) -> int:
        """Return the requests in flight at a moment, those that arrive in it included."""
        return bisect_right(self._arrivals_s, arrival_s) - bisect_right(self._ends_s, arrival_s)

    def num_running(self, engine: int, stamp_s: float) -> int | None:
        """Return the requests that ran after the step with this stamp; nothing where its statistics are missing."""
        samples = self._running.get(engine)
        if samples is None:
            return None
        first, end = self._step(engine, samples.times, stamp_s)
        return int(samples.values[first]) if first < end else None

    def prefill_tokens(self, engine: int, stamp_s: float) -> int:
        """Return the prompt lengths of all requests whose first token came in the step with this stamp."""
        samples = self._prefills.get(engine)
        if samples is None:
            return 0
        first, end = self._step(engine, samples.times, stamp_s)
        sums = self._prefill_sums[engine]
        return int(sums[end] - sums[first])

    def _step(self, engine: int, times: "array[float]", stamp_s: float) -> tuple[int, int]:
        half_s = self._shortest_s.get(engine, _SHORTEST_STEP_S) / 2
        return bisect_left(times, stamp_s - half_s), bisect_right(times, stamp_s + half_s)
