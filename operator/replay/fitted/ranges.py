"""The values that something was fitted on, and how far others lie outside of them."""

from collections.abc import Iterable
from typing import Final, Self

from msgspec import Struct

_NEAR: Final = 1.05
"""So much farther is no farther: two loads of the same lengths differ by that."""


class Range(Struct, frozen=True):
    """The least and the largest value that was seen."""

    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Return the range of some values, of which there is one at least."""
        sorted_values = sorted(values)
        return cls(sorted_values[0], sorted_values[-1])

    def outside(self, name: str, value: float) -> str | None:
        """Say how far a value lies outside; nothing where it does not, or hardly."""
        if self.least / _NEAR <= value <= self.most * _NEAR:
            return None
        bound, word = (self.most, "most") if value > self.most else (self.least, "least")
        times = f", {value / bound:.1f} times that" if bound > 0 else ""
        return f"{name} {value:g} is outside of what the model was fitted on: {bound:g} at {word}{times}"
