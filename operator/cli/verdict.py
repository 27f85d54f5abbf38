"""`specdecode verdict`: compare the goodput of two arms, with a verdict after each block.

The verdict is whether the candidate pays. Series may interleave. Each verdict uses only its own line and earlier
ones. The input is untrusted: line length, number of series and number of blocks are bounded.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Final, Literal

import typer
from pydantic import RootModel

from specdecode_operator.cli.json_text import json_text
from specdecode_operator.cli.options import ExitCode
from specdecode_operator.cli.outputs import Output
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.cli.text_files import opened_line_files
from specdecode_operator.problems import MISSING, Problem, shown
from specdecode_operator.stats.verdict import DEFAULT_LEVEL, Finding, PairedSeries
from specdecode_operator.untrusted import UnreadableTextError, parse_json

_LONGEST_NAME: Final = 200
_LARGEST_BLOCK: Final = 2**53
_GOODPUT: Final = "set it to the arm's goodput, a number of 0 or more, such as 812.3"
_MEANINGS: Final = {
    "series": f"use a name of at most {_LONGEST_NAME} characters or a whole number, or omit it",
    "block": "set it to the block's number, a whole number of 0 or more, such as 1",
    "baseline": _GOODPUT,
    "candidate": _GOODPUT,
}
MOST_LINE_BYTES: Final = 64 * 2**10
MOST_SERIES: Final = 20_000
MOST_BLOCKS: Final = 100_000
"""Maximum number of blocks per series."""
MOST_BLOCKS_IN_ALL: Final = 5_000_000
"""A block takes 24 bytes, a series up to 28 kB: at most 0.7 GB in total."""
_MOST_NAMED: Final = 20
"""Series in the summary on standard error. The results contain all series."""
_LOWEST_LEVEL: Final = 0.5
_HIGHEST_LEVEL: Final = 0.999999

SeriesName = str | int | None


class FindingOutput(Output):
    """Verdict on a series after a block, from this block and the earlier ones."""

    series: str | int | None
    """Series of the block; null if the block has none."""
    block: int
    """Number of the block."""
    verdict: Literal["Pays", "DoesNotPay", "Inconclusive"]
    """Pays if low is above 1, DoesNotPay if high is below 1."""
    ratio: float | None
    """Goodput of the candidate divided by the goodput of the baseline: the trimmed mean of log ratios, without the
    lowest and highest fifth. Null if an arm had no goodput in half of the blocks or more, or both never had any."""
    low: float | None
    """Lower end of the confidence interval; null if unknown."""
    high: float | None
    """Upper end of the confidence interval; null if unknown."""
    level: float
    """Simultaneous confidence level: probability that the intervals after all blocks contain the true ratio."""


class BlockErrorOutput(Output):
    """A line that is not a valid block."""

    series: str | int | None
    """Series in the line; null if it cannot be read."""
    block: int | None
    """Block number in the line; null if it cannot be read."""
    error: str
    """Problem and fix."""


class VerdictOutput(RootModel[FindingOutput | BlockErrorOutput]):
    """A line of the results."""


@dataclass
class _State:
    series: PairedSeries
    last: int | None = None  # Number of the last block
    blocks: int = 0
    finding: Finding | None = None


class Batch:
    """All series of an input, with one confidence level."""

    def __init__(self, level: float) -> None:
        self._level = level
        self._states: dict[SeriesName, _State] = {}
        self.lines = self.errors = self._blocks = 0

    def answer(self, number: int, text: str | bytes) -> dict[str, Any]:
        """Return the answer to an input line: a finding, or an error."""
        self.lines += 1
        value: Any = None
        try:
            value = parse_json(text, MOST_LINE_BYTES)
            problem = self._problem(value)
        except UnreadableTextError as error:
            problem = str(error)
        given = value if isinstance(value, dict) else {}
        series = given.get("series") if _is_name(given.get("series")) else None
        block = int(given["block"]) if _is_block(given.get("block")) else None
        if problem is not None or block is None:
            self.errors += 1
            return {"series": series, "block": block, "error": f"line {number}: {problem}"}
        state = self._states.setdefault(series, _State(PairedSeries(self._level)))
        self._blocks += 1
        state.last, state.blocks = block, state.blocks + 1
        state.finding = found = state.series.add(float(given["baseline"]), float(given["candidate"]))
        return {
            "series": series,
            "block": block,
            "verdict": found.verdict.value,
            "ratio": found.ratio,
            "low": found.low,
            "high": found.high,
            "level": self._level,
        }

    def _problem(self, value: Any) -> Problem | str | None:
        if not isinstance(value, dict):
            return f"{shown(value)}: must be an object with {', '.join(_MEANINGS)}"
        for key, given in value.items():
            if key not in _MEANINGS:
                return Problem(shown(key), shown(given), f"unknown field: use {', '.join(_MEANINGS)}")
        for key, meaning in _MEANINGS.items():
            if key not in value and key != "series":
                return Problem(key, MISSING, meaning)
        checks = {"series": _is_name, "block": _is_block, "baseline": _is_goodput, "candidate": _is_goodput}
        for key, is_valid in checks.items():
            if not is_valid(value.get(key)):
                return Problem(key, shown(value[key]), _MEANINGS[key])
        return self._limit(value.get("series"), int(value["block"]))

    def _limit(self, series: SeriesName, block: int) -> Problem | None:
        state, number = self._states.get(series), shown(block)
        if state and state.last is not None and block <= state.last:
            fix = f"must be larger than the previous block of the series, {state.last}"
            return Problem("block", number, fix)
        if not state and len(self._states) >= MOST_SERIES:
            fix = f"exceeds the maximum of {MOST_SERIES:,} series: divide the input"
            return Problem("series", shown(series), fix)
        if state and state.blocks >= MOST_BLOCKS:
            return Problem(
                "block", number, f"exceeds the maximum of {MOST_BLOCKS:,} blocks per series: make blocks longer"
            )
        if self._blocks >= MOST_BLOCKS_IN_ALL:
            return Problem(
                "block", number, f"exceeds the maximum of {MOST_BLOCKS_IN_ALL:,} blocks in all series: divide the input"
            )
        return None

    def summary(self) -> Iterator[str]:
        """Yield a line for each of the first series, and the number of lines with errors."""
        for name, state in islice(self._states.items(), _MOST_NAMED):
            found, count = state.finding, state.blocks
            if found is None:
                continue
            series = "" if name is None else f"{shown(name)}: "
            ratio = "no ratio" if found.ratio is None else f"ratio {found.ratio:.4g}"
            ends = " to ".join("unknown" if each is None else f"{each:.4g}" for each in (found.low, found.high))
            interval = "no interval" if found.low is None and found.high is None else f"interval {ends}"
            blocks = "1 block" if count == 1 else f"{count:,} blocks"
            yield f"{series}{found.verdict} after {blocks}: {ratio}, {interval}"
        if len(self._states) > _MOST_NAMED:
            yield f"and {len(self._states) - _MOST_NAMED:,} more series"
        if self.errors:
            yield f"{self.errors:,} of {self.lines:,} lines have an error"


def _is_name(value: Any) -> bool:
    return len(value) <= _LONGEST_NAME if isinstance(value, str) else value is None or _is_whole(value)


def _is_block(value: Any) -> bool:
    # Data frames write whole numbers as floats if a column has gaps.
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


def verdict_command(
    blocks: Annotated[str, typer.Option("--in", help="File of JSON lines, one block per line; - for standard input.")],
    verdicts: Annotated[
        str, typer.Option("--out", help="File for the verdicts, one line per block; - for standard output.")
    ],
    *,
    level: Annotated[
        float,
        typer.Option(
            min=_LOWEST_LEVEL, max=_HIGHEST_LEVEL, help="Simultaneous confidence level of all intervals of a series."
        ),
    ] = DEFAULT_LEVEL,
) -> None:
    """Decide after each block of a paired comparison whether the candidate pays. You may stop after any block.

    A block has the goodput of both arms:
    {"series": "a", "block": 1, "baseline": 812.3, "candidate": 901.0}

    Exits with 0 when all lines are answered, 2 when a line has an error or a file cannot be used.
    """
    batch = Batch(level)
    with opened_line_files(blocks, verdicts, MOST_LINE_BYTES) as (lines, target):
        for number, line in enumerate(lines, start=1):
            if line.strip():
                target.write(json_text(batch.answer(number, line)) + "\n")
                # The writer of a pipe may wait for the answer before it sends the next block.
                target.flush()
    for each in batch.summary():
        say_line(each, err=True)
    if batch.errors:
        raise typer.Exit(ExitCode.INVALID)
