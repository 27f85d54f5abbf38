"""How long prompts and answers are: numbers, ranges and distributions as people write them."""

import math
from dataclasses import dataclass
from random import Random
from typing import Final

from specdecode_operator.problems import shown

LONGEST: Final = 16_777_216
"""Tokens, as of the prompts of a capture's load."""

FORMS: Final = "512, 100-900 (evenly spread) or lognormal:512:0.5 (median and sigma)"


class InvalidLengthsError(ValueError):
    """A text that says no lengths: the text, and what to write."""


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens."""

    least: int
    most: int
    sigma: float = 0.0  # of a lognormal distribution with its median in `least`

    def draw(self, random: Random) -> int:
        """Return one length."""
        if self.sigma:
            return min(max(1, round(self.least * math.exp(random.gauss(0, self.sigma)))), self.most)
        return self.least if self.least == self.most else random.randint(self.least, self.most)


def parse_lengths(text: str) -> Lengths:
    """Return the lengths that a text says.

    Raises
    ------
    InvalidLengthsError
        It says none.
    """
    try:
        if text.startswith("lognormal:"):
            median, sigma = text.removeprefix("lognormal:").split(":")
            found = Lengths(int(median), LONGEST, float(sigma))
            usable = 0 < found.sigma <= 3 and found.least <= LONGEST  # noqa: PLR2004  e^3: 20 times the median
        else:
            least, _, most = text.partition("-")
            found = Lengths(int(least), int(most or least))
            usable = found.least <= found.most <= LONGEST
    except ValueError:
        usable = False
    if not usable or found.least < 1:
        raise InvalidLengthsError(f"{shown(text)}: write {FORMS}, of 1 to {LONGEST:,} tokens")
    return found
