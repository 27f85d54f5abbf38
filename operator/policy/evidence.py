"""What a capture with several arms measured, as a policy needs it: the goodput of each setting over the load."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """What one setting did in one load step."""

    load: float
    """Requests running at once in the baseline: what all settings share."""

    running: float
    """Requests running at once in this setting: a faster one has fewer of those that come at the same rate."""

    ratio: float = 1.0
    """Goodput over that of the baseline."""

    low: float = 1.0
    high: float = 1.0
    """The ends of its interval."""


@dataclass(frozen=True)
class Setting:
    """A way to speculate that was measured."""

    name: str
    points: Sequence[Point]
    """By load, ascending; those of the baseline have a ratio of 1."""

    drafts: int = 0
    """Tokens of a draft; 0 where speculation is off."""

    acceptance: float | None = None
    """Accepted share of the drafted tokens when it was measured."""

    refused: str = ""
    """Why it is not chosen; empty where it may be."""

    @property
    def off(self) -> bool:
        """Whether it does not speculate."""
        return self.drafts == 0

    def load_at(self, running: float) -> float:
        """Return the load at which this setting has so many requests running."""
        if running <= 0:
            return 0.0
        factors = sorted((point.running, point.load / point.running) for point in self.points)
        return running * _on_line(factors, running)

    def ratio_at(self, load: float) -> tuple[float, float, float]:
        """Return ratio, low and high at a load: between two steps in the ratio of loads, beyond the ends as there."""
        above = bisect_right(self.points, load, key=lambda point: point.load)
        left, right = self.points[max(above - 1, 0)], self.points[min(above, len(self.points) - 1)]
        share = _share(left.load, right.load, load)
        return (
            left.ratio + share * (right.ratio - left.ratio),
            left.low + share * (right.low - left.low),
            left.high + share * (right.high - left.high),
        )

    def tokens_a_step(self, acceptance_factor: float) -> float:
        """Return tokens a step over those when it was measured, where acceptance is so many times what it was then."""
        if self.acceptance is None or self.off:
            return 1.0
        accepted = self.acceptance * self.drafts
        return (1 + min(acceptance_factor * accepted, self.drafts)) / (1 + accepted)


@dataclass(frozen=True)
class Evidence:
    """All settings that one capture compared."""

    name: str
    """Of the capture."""

    settings: Sequence[Setting]
    goodput: Sequence[tuple[float, float]]
    """Of the baseline: load and tokens a second."""

    def find(self, name: str) -> Setting | None:
        """Return a setting by its name."""
        return next((each for each in self.settings if each.name == name), None)

    def goodput_at(self, load: float) -> float:
        """Return what the baseline brings at a load: in proportion below the first step, no more above the last."""
        lowest, first = self.goodput[0]
        return first * load / lowest if load < lowest else _on_line(self.goodput, load)

    def measured(self, load: float) -> bool:
        """Whether a load lies between the lowest and the highest that were measured."""
        return self.goodput[0][0] <= load <= self.goodput[-1][0]


def _on_line(points: Sequence[tuple[float, float]], place: float) -> float:
    """Return the value at a place: straight between two points over the logarithm, and beyond the ends as there."""
    above = bisect_right(points, place, key=lambda point: point[0])
    (left, low), (right, high) = points[max(above - 1, 0)], points[min(above, len(points) - 1)]
    return low + (high - low) * _share(left, right, place)


def _share(left: float, right: float, place: float) -> float:
    return math.log(place / left) / math.log(right / left) if left < place < right else 0.0
