"""What sequences have in common."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how long the beginning is that two sequences have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
