"""Units, rounding, and traced integers that record their formula.

Sizing computes with plain integers, thousands of times a second. Given a traced copy of the same models and
settings, its functions return the same numbers with their formulas. `plan --explain` therefore prints the actual
arithmetic of sizing.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Final, Self, TypeVar, cast

MIB: Final = 2**20
GIB: Final = 2**30
"""Unit of vLLM's logs, CUDA and Kubernetes quantities."""


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


_T = TypeVar("_T")


class Named(int):
    """A constant with its words in a formula. Arithmetic on it gives plain numbers at full speed."""

    words: str

    def __new__(cls, value: int, words: str) -> Self:
        """Return the constant."""
        number = super().__new__(cls, value)
        number.words = words
        return number


class Traced(int):
    """A whole number that remembers how it was computed; arithmetic on it gives further ones.

    ``operator`` is one of ``+ - x /``, ``ceil`` and ``negative``; empty for a given number. ``words`` describe it:
    ``tokens``, or ``of draft logits``.
    """

    operator: str
    operands: tuple[int, ...]
    words: str

    def __new__(cls, value: int, operator: str = "", operands: tuple[int, ...] = (), words: str = "") -> Self:
        """Return the number."""
        number = super().__new__(cls, value)
        number.operator, number.operands, number.words = operator, operands, words
        return number

    def __add__(self, other: int) -> "Traced":
        return _sum(self, other)

    def __radd__(self, other: int) -> "Traced":
        return _sum(other, self)

    def __sub__(self, other: int) -> "Traced":
        return _traced(self) if other == 0 else Traced(int(self) - int(other), "-", (self, other))

    def __rsub__(self, other: int) -> "Traced":
        return _traced(other) if self == 0 else Traced(int(other) - int(self), "-", (other, self))

    def __mul__(self, other: int) -> "Traced":
        return _product(self, other)

    def __rmul__(self, other: int) -> "Traced":
        # A list is repeated.
        return _product(other, self) if isinstance(other, int) else NotImplemented

    def __floordiv__(self, other: int) -> "Traced":
        return _quotient(self, other)

    def __rfloordiv__(self, other: int) -> "Traced":
        return _quotient(other, self)

    def __neg__(self) -> "Traced":
        # Rounding up is written -(-a // b).
        if self.operator == "/" and self.operands[0] < 0:
            dividend, divisor = self.operands
            return Traced(-int(self), "ceil" if dividend % divisor else "/", (-dividend, divisor))
        return self.operands[0] if self.operator == "negative" else Traced(-int(self), "negative", (self,))  # type: ignore[return-value]


def named(size: int, words: str, like: int | None = None) -> int:
    """Return the number; if it (or ``like``) is traced, its formula is its value with these words."""
    return Traced(size, words=words) if isinstance(size if like is None else like, Traced) else size


def described(size: int, words: str) -> int:
    """Return the number; if it is traced, with these words after its formula, such as ``of draft logits``."""
    if not isinstance(size, Traced) or not size:
        return size
    return Traced(size, size.operator, size.operands, words)


def traced(value: _T, words: Mapping[str, str], field: str = "") -> _T:
    """Return a copy of models or settings whose whole numbers are traced; ``words`` has the words for each field."""
    result: Any = value
    if type(value) is int:
        result = Traced(cast("int", value), words=words.get(field, ""))
    elif isinstance(value, tuple):
        result = tuple(traced(each, words, field) for each in value)
    elif is_dataclass(value) and not isinstance(value, type):
        result = object.__new__(_unequal(type(value)))
        for each in fields(value):
            object.__setattr__(result, each.name, traced(getattr(value, each.name), words, each.name))
    return cast("_T", result)


@cache
def _unequal(kind: type[Any]) -> type[Any]:
    """Return a subclass whose objects equal no plain ones: caches of sizing keep both apart."""
    return type(kind.__name__, (kind,), {})


def formula(number: int) -> str:
    """Return how a number was computed; its value and words if it is not traced."""
    words = getattr(number, "words", "")
    if not isinstance(number, Traced) or not number.operator:
        return f"{number:,} {words}".rstrip()
    left = number.operands[0]
    match number.operator:
        case "negative":
            text = f"-{_within(left, 'x')}"
        case "ceil":
            text = f"ceil({formula(left)} / {_within(number.operands[1], '/')})"
        case "/" if left % number.operands[1]:
            text = f"floor({formula(left)} / {_within(number.operands[1], '/')})"
        case operator:
            right = number.operands[1]
            text = f"{_within(left, operator)} {operator} {_within(right, operator, is_right=True)}"
    if not words:
        return text
    return f"({text}) {words}" if number.operator in ("+", "-") else f"{text} {words}"


def _within(number: int, operator: str, *, is_right: bool = False) -> str:
    """Return the formula of an operand, in parentheses if it needs them."""
    text, inner = formula(number), getattr(number, "operator", "")
    if getattr(number, "words", ""):
        return text
    loose = inner in ("+", "-") and (operator != "+" and (operator != "-" or is_right))
    exact = inner == "/" and cast("Traced", number).operands[0] % cast("Traced", number).operands[1] == 0
    grouped = operator == "/" and is_right and (inner == "x" or exact)
    return f"({text})" if loose or grouped else text


def _traced(number: int) -> Traced:
    return number if isinstance(number, Traced) else Traced(number, words=getattr(number, "words", ""))


def _sum(left: int, right: int) -> Traced:
    if left == 0 or right == 0:
        return _traced(right if left == 0 else left)
    return Traced(int(left) + int(right), "+", (left, right))


def _product(left: int, right: int) -> Traced:
    for one, other in ((left, right), (right, left)):
        if one == 1 and not getattr(one, "words", ""):
            return _traced(other)
        # Rounding a multiple up changes nothing.
        if isinstance(one, Traced) and one.operator == "/" and one.operands[1] == other and not one.operands[0] % other:
            return _traced(one.operands[0])
    return Traced(int(left) * int(right), "x", (left, right))


def _quotient(left: int, right: int) -> Traced:
    return _traced(left) if right == 1 else Traced(int(left) // int(right), "/", (left, right))
