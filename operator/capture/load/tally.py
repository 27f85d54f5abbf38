"""Counts what a run sent."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from specdecode_operator.capture.files.formats import Outcome


@dataclass(frozen=True)
class PhaseResult:
    """What became of one phase, warm-up included.

    Attributes
    ----------
    started_ms, ended_ms
        From its beginning, a little before its first request, to its last answer's end, since the run's zero.
    planned
        How many requests it was to have, where that is known beforehand; a Poisson phase with a duration: about.
    outcomes
        Requests by outcome.
    """

    name: str
    started_ms: float
    ended_ms: float
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
