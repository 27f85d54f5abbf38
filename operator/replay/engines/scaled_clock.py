"""A clock that goes faster or slower than another."""

from collections.abc import Callable
from dataclasses import dataclass

from specdecode_operator.replay.engines.engine import Clock, Ticket


@dataclass(frozen=True)
class ScaledClock:
    """Of two seconds on the clock below, one passes here with a scale of 2."""

    clock: Clock
    scale: float

    def now_ms(self) -> float:
        """Return what time it is."""
        return self.clock.now_ms() / self.scale

    def call_at(self, when_ms: float, callback: Callable[[], None]) -> Ticket:
        """Call back at that moment, or as soon as may be where it is over."""
        return self.clock.call_at(when_ms * self.scale, callback)
