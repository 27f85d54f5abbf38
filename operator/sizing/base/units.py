"""Units and the two roundings that memory arithmetic needs."""

from typing import Final

MIB: Final = 2**20
GIB: Final = 2**30
"""Bytes in one GiB. vLLM's logs, CUDA and Kubernetes quantities all count in it."""


def ceil_div(dividend: int, divisor: int) -> int:
    """Return the quotient rounded up, exactly (no floats)."""
    return -(-dividend // divisor)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not below the value."""
    return ceil_div(value, multiple) * multiple


def gib_to_bytes(gib: float) -> int:
    """Return whole bytes for a size that a source states in GiB."""
    return round(gib * GIB)


def format_gib(size_bytes: int) -> str:
    """Return a size for a sentence: one decimal, without the unit, never ``-0.0``."""
    text = f"{size_bytes / GIB:.1f}"
    return "0.0" if text == "-0.0" else text
