"""Counts what a run sent, and how late."""

import math
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from specdecode_operator.capture.files.formats import Outcome


@dataclass(frozen=True)
class Lateness:
    """How much later than planned requests were sent, in milliseconds.

    A load generator that does not keep its schedule measures an easier load
    than the one that was asked for; these numbers show it (coordinated omission).
    """

    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, late_ms: "array[float]") -> "Lateness | None":
        """Return the quantiles of all requests (nearest rank); None without any."""
        if not late_ms:
            return None
        ordered = sorted(late_ms)
        p50, p90, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 0.99))
        return cls(p50, p90, p99, ordered[-1])


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
    lateness: Lateness | None

    @property
    def requests(self) -> int:
        """How many requests it had."""
        return sum(self.outcomes.values())


@dataclass
class Tally:
    """What happened in one phase so far."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    late_ms: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, outcome: Outcome, late_ms: float) -> None:
        """Count a request that ended."""
        self.outcomes[outcome] += 1
        self.late_ms.append(late_ms)

    @property
    def completed(self) -> int:
        """Requests with a whole answer."""
        return self.outcomes["completed"]

    @property
    def ended(self) -> int:
        """Requests that ended in whatever way."""
        return self.outcomes.total()
