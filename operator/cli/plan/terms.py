"""A line of `explain`: what it is, how it comes about, and the result."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TermLine:
    """One term.

    Attributes
    ----------
    name
        What it is.
    formula
        How it comes about, with the numbers filled in.
    size_bytes
        The result.
    """

    name: str
    formula: str
    size_bytes: int


@dataclass(frozen=True)
class CapacityLine:
    """One figure of what the KV cache holds: its name, formula and result."""

    name: str
    formula: str
    result: str


def exact(formula: str, value: float, counted: float, words: str) -> str:
    """Return a formula only where it gives what sizing counted; else, what the term is in words.

    The formulas of `explain` are short ones. Sizing knows more: other layers, methods and versions.
    """
    return formula if value == counted else words
