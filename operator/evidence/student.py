"""Quantiles of Student's t."""

import math
from functools import lru_cache
from typing import Final

_HALVINGS: Final = 100
_LARGEST_QUANTILE: Final = 1e9


@lru_cache(maxsize=256)
def student_quantile(share: float, freedom: int) -> float:
    """Return what Student's t of so many degrees of freedom stays below with a probability of more than a half."""
    low, high = 0.0, 1.0
    while _student_below(high, freedom) < share and high < _LARGEST_QUANTILE:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_below(middle, freedom) < share else (low, middle)
    return high


def _student_below(value: float, freedom: int) -> float:
    """Return the probability below a value, in closed form (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    angle = math.atan(value / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for step in range(freedom // 2):
        total += term
        term *= cosine**2 * (2 * step + 1 + odd) / (2 * step + 2 + odd)
    between = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return (1 + between) / 2
