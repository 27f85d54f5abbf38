"""What engines had to do lately: requests that ran, and what of the drafts was accepted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

LOOK_STANDS_S: Final = 60.0
"""How long a look at engines stands for what they do: a few rounds of the operator's."""

_ENOUGH_OF_WINDOW: Final = 0.75
_ENOUGH_DRAFTED: Final = 1000
"""Tokens, before their acceptance is compared: so many err by a few percent."""

_DECAYED: Final = 0.5
"""Share of the accepted tokens a draft that the other replicas have, below which one has decayed."""


@dataclass(frozen=True)
class Drafting:
    """Counters of an engine, or how far they went."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: "Drafting") -> "Drafting":
        return Drafting(self.drafts + other.drafts, self.drafted + other.drafted, self.accepted + other.accepted)

    def since(self, before: "Drafting") -> "Drafting":
        """Return how far they went; a counter that is less than it was began anew."""
        if self.drafts < before.drafts or self.drafted < before.drafted or self.accepted < before.accepted:
            return self
        return Drafting(self.drafts - before.drafts, self.drafted - before.drafted, self.accepted - before.accepted)


@dataclass(frozen=True)
class Sample:
    """One look at the engines that answered."""

    at_s: float
    running: float
    """Requests running at once, of a replica on average."""

    engines: Mapping[str, Drafting]
    """Counters by pod."""


@dataclass(frozen=True)
class Window:
    """The looks of the last seconds."""

    length_s: float
    samples: Sequence[Sample] = ()

    def add(self, sample: Sample) -> "Window":
        """Return the window with one look more, and without what is too old."""
        kept = [each for each in self.samples if sample.at_s - self.length_s <= each.at_s < sample.at_s]
        return Window(self.length_s, (*kept, sample))

    def spans(self) -> list[tuple[float, float]]:
        """Return requests running, and how many seconds that stands for."""
        return [(each.running, min(after.at_s - each.at_s, LOOK_STANDS_S)) for each, after in pairwise(self.samples)]

    @property
    def enough(self) -> bool:
        """Whether the looks cover most of the window."""
        return sum(seconds for _, seconds in self.spans()) >= _ENOUGH_OF_WINDOW * self.length_s

    @property
    def idle(self) -> bool:
        """Whether no look saw a request."""
        return not any(each.running for each in self.samples)

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the drafted tokens; None where too few were drafted."""
        total = sum(self.drafted().values(), Drafting())
        return total.accepted / total.drafted if total.drafted >= _ENOUGH_DRAFTED else None

    def drafted(self) -> dict[str, Drafting]:
        """Return how far the counters of each engine of the last look went; one that came meanwhile began then."""
        grown = dict.fromkeys(self.samples[-1].engines if self.samples else (), Drafting())
        for before, after in pairwise(self.samples):
            for name in grown:
                if name in before.engines and name in after.engines:
                    grown[name] += after.engines[name].since(before.engines[name])
        return grown

    def decayed(self) -> tuple[str, float, float] | None:
        """Return the engine that has less than half of the others accepted, with tokens a draft of it and of them.

        All are compared under the same load, so other prompts or another K look alike in all of them. One engine alone
        has nothing to be compared with.
        """
        lengths = {
            name: each.accepted / each.drafts
            for name, each in self.drafted().items()
            if each.drafted >= _ENOUGH_DRAFTED
        }
        if len(lengths) <= 1:
            return None
        worst = min(lengths, key=lambda name: lengths[name])
        others = median(length for name, length in lengths.items() if name != worst)
        return (worst, lengths[worst], others) if lengths[worst] < _DECAYED * others else None
