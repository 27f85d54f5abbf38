"""A block of a comparison, read from JSON that others wrote."""

import math
from dataclasses import dataclass
from typing import Any, Final

from specdecode_operator.problems import MISSING, Problem, shown

_LONGEST_NAME: Final = 200
_LARGEST_BLOCK: Final = 2**53
_KEYS: Final = ("series", "block", "baseline", "candidate")

SeriesName = str | int | None


@dataclass(frozen=True)
class Block:
    """One pair of measurements.

    Attributes
    ----------
    series
        Name of the comparison; None where there is one alone.
    block
        Number of the block: those of a series grow.
    baseline, candidate
        Goodput of each arm in the same unit, such as tokens/s.
    """

    series: SeriesName
    block: int
    baseline: float
    candidate: float


class BlockError(ValueError):
    """A line that is no block.

    Attributes
    ----------
    series, block
        As they stand there, so that the answer can be told apart; None where they are no names and numbers.
    """

    def __init__(self, problem: Problem | str, series: SeriesName = None, block: int | None = None) -> None:
        self.series, self.block = series, block
        super().__init__(str(problem))


def read_block(value: Any) -> Block:
    """Return what a line says.

    Raises
    ------
    BlockError
        When it is no object, lacks a field, has another, or a value that cannot be.
    """
    if not isinstance(value, dict):
        raise BlockError(f"{shown(value)}: must be an object with {', '.join(_KEYS)}")
    series = value.get("series") if _is_name(value.get("series")) else None
    block = int(value["block"]) if _is_block(value.get("block")) else None
    problem = _problem(value)
    if problem is not None:
        raise BlockError(problem, series, block)
    return Block(value.get("series"), int(value["block"]), float(value["baseline"]), float(value["candidate"]))


def _problem(value: dict[str, Any]) -> Problem | None:
    for key, given in value.items():
        if key not in _KEYS:
            return Problem(shown(key), shown(given), f"is no field of a block: use {', '.join(_KEYS)}")
    for key in _KEYS[1:]:
        if key not in value:
            return Problem(key, MISSING, _MEANINGS[key])
    if not _is_name(value.get("series")):
        return Problem("series", shown(value["series"]), _MEANINGS["series"])
    if not _is_block(value["block"]):
        return Problem("block", shown(value["block"]), _MEANINGS["block"])
    for key in _KEYS[2:]:
        if not _is_goodput(value[key]):
            return Problem(key, shown(value[key]), _MEANINGS[key])
    return None


_GOODPUT: Final = "write the goodput of that arm as a number, 0 or more, such as 812.3"
_MEANINGS: Final = {
    "series": f"write a name of at most {_LONGEST_NAME} characters or a whole number, or leave it out",
    "block": "write its number as a whole number, 0 or more, such as 1",
    "baseline": _GOODPUT,
    "candidate": _GOODPUT,
}


def _is_name(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONGEST_NAME
    return value is None or _is_whole(value)


def _is_block(value: Any) -> bool:
    # Data frames write whole numbers with a point where a column has gaps.
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    return _is_whole(whole) and whole >= 0


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST_BLOCK


def _is_goodput(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value)) and value >= 0
    except OverflowError:
        return False
