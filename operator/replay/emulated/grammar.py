"""Tokens that a grammar allows: structured output without logits.

vLLM says what is allowed as rows of bits, one row for each position that a step may sample, 32 tokens a word. A pick
leans to tokens that end something, so that what is generated ends, too.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

Row = Sequence[int]
"""Words of 32 bits, signed or not: bit b of word w is token 32 w + b."""

_BITS: Final = 32
_CLOSE: Final = 0.5
"""How often a token that closes something is taken where it is allowed."""


@dataclass(frozen=True)
class Constraint:
    """What a grammar allows one request in this step."""

    rows: Sequence[Row]  # for each drafted token, then for the one after them
    acceptable: int  # leading drafted tokens that it allows


@dataclass(frozen=True)
class Endings:
    """Tokens that end what is generated, and those that close a part of it, in the order in which they are tried."""

    stop: Sequence[int] = ()
    closing: Sequence[int] = ()
    blank: Collection[int] = ()  # taken only where nothing else is allowed: grammars of JSON allow any number of them


def allows(row: Row, token: int) -> bool:
    """Decide whether a token is allowed."""
    word = token // _BITS
    return word < len(row) and bool(row[word] >> token % _BITS & 1)


def pick(row: Row, endings: Endings, random: Random) -> int | None:
    """Return an allowed token; None where there is none."""
    for token in endings.stop:
        if allows(row, token):
            return token
    for token in endings.closing:
        if allows(row, token) and random.random() < _CLOSE:
            return token
    return _any(row, endings.blank, random)


def _any(row: Row, blank: Collection[int], random: Random) -> int | None:
    """Return an allowed token, of those from a random word on that has one; one that is blank where no other is."""
    start = random.randrange(len(row)) if row else 0
    last: int | None = None
    for place in (*range(start, len(row)), *range(start)):
        word = row[place]
        tokens = [place * _BITS + bit for bit in range(_BITS) if word >> bit & 1] if word else []
        written: list[int] = [token for token in tokens if token not in blank]
        if written:
            return random.choice(written)
        last = tokens[0] if tokens else last
    return last
