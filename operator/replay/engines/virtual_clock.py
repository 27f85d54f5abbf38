"""A clock that goes as fast as there is something to do: for forecasts, comparisons and tests."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from specdecode_operator.replay.engines.engine import Ticket


@dataclass(slots=True)
class _Timer:
    callback: Callable[[], None] | None

    def cancel(self) -> None:
        self.callback = None


@dataclass
class VirtualClock:
    """Time that passes only while `run` is called, from one timer to the next."""

    _now_ms: float = 0.0
    _timers: list[tuple[float, int, _Timer]] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=count)

    def now_ms(self) -> float:
        """Return what time it is."""
        return self._now_ms

    def call_at(self, when_ms: float, callback: Callable[[], None]) -> Ticket:
        """Call back at that moment; timers of one moment go off in the order in which they were set."""
        timer = _Timer(callback)
        heapq.heappush(self._timers, (max(when_ms, self._now_ms), next(self._numbers), timer))
        return timer

    def run(self, until_ms: float = float("inf")) -> None:
        """Let time pass until nothing is left to do, or until that moment."""
        while self._timers and self._timers[0][0] <= until_ms:
            self._now_ms, _, timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                timer.callback()
        if until_ms != float("inf"):
            self._now_ms = max(self._now_ms, until_ms)
