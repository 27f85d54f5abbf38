"""What counts as alike when steps and bursts of a capture stand in for others: values, in buckets."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

DECODING: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Requests that have their next tokens in a step; each bucket ends with its number, included."""
PREFILL_TOKENS: Final = (0, 64, 256, 1024, 2048, 4096, 8192, 16384)
POSITION: Final = (16, 64, 256)
"""Tokens of the output that a request has already."""
CONTEXT: Final = (512, 2048, 8192, 32768)
"""Tokens that a request attends to."""
BURST: Final = (0, 1, 2, 3, 4, 5, 8, 16)
"""Tokens of the burst before; 0 stands for the one that ended the prefill."""
PACES: Final = 5
"""Steps of a cell, from the shortest fifth to the longest."""


def bucket(value: float, ends: Sequence[int]) -> int:
    """Return in which bucket a value is; what is beyond the last end has one of its own."""
    return bisect_left(ends, value)


def buckets(ends: Sequence[int]) -> int:
    """Return how many there are."""
    return len(ends) + 1
