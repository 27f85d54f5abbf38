"""A stepped engine whose requests know how long they waited for it."""

from dataclasses import dataclass, replace
from itertools import count
from weakref import WeakValueDictionary

from specdecode_operator.replay.engines.behaviour import Behaviour, StepReport
from specdecode_operator.replay.engines.engine import Clock, Incoming, Load, Sink, Submission, Ticket
from specdecode_operator.replay.engines.stepped import SteppedEngine
from specdecode_operator.replay.fitted.model import Limits


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Watched:
    submitted_ms: float
    scheduled_ms: float | None = None
    ticket: Ticket | None = None

    def cancel(self) -> None:
        if self.ticket is not None:
            self.ticket.cancel()

    def waited_ms(self) -> float | None:
        return None if self.scheduled_ms is None else self.scheduled_ms - self.submitted_ms


class WatchedEngine:
    """Looks at the engine's steps for those that ran for the first time."""

    def __init__(self, clock: Clock, behaviour: Behaviour, limits: Limits) -> None:
        self._clock = clock
        self._engine = SteppedEngine(clock, behaviour, limits, self._on_step)
        # Ids of clients may be there twice, and several answers to one request have the same.
        self._numbers = count()
        self._watched: WeakValueDictionary[str, _Watched] = WeakValueDictionary()

    def submit(self, request: Incoming, sink: Sink) -> Submission:
        """Take a request; its bursts go to the sink. Cancelled, it frees its place at once."""
        mine, name = _Watched(self._clock.now_ms()), str(next(self._numbers))
        self._watched[name] = mine
        mine.ticket = self._engine.submit(replace(request, request_id=name), sink)
        return mine

    def load(self) -> Load:
        """Return what it has to do."""
        return self._engine.load()

    def _on_step(self, step: StepReport) -> None:
        for name in step.scheduled:
            if (watched := self._watched.get(name)) is not None:
                watched.scheduled_ms = step.end_ms - step.duration_ms
