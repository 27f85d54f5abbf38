"""`specdecode verdict`: compare the goodput of two arms, with a verdict after each block.

The verdict says whether the candidate pays. Series may interleave. Each verdict uses only its own line and earlier
ones. The input is untrusted: line length, number of series and number of blocks are bounded.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Final, Literal

import typer
from pydantic import RootModel

from specdecode_operator.cli.options import ExitCode
from specdecode_operator.cli.outputs import Output, json_text
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.cli.text_files import opened_line_files
from specdecode_operator.problems import MISSING, Problem, shown
from specdecode_operator.stats.verdict import DEFAULT_LEVEL, Finding, PairedSeries
from specdecode_operator.untrusted import UnreadableTextError, parse_json

_LONGEST_NAME: Final = 200
_LARGEST_BLOCK: Final = 2**53
_GOODPUT: Final = "write the goodput of that arm as a number, 0 or more, such as 812.3"
_MEANINGS: Final = {
    "series": f"write a name of at most {_LONGEST_NAME} characters or a whole number, or leave it out",
    "block": "write its number as a whole number, 0 or more, such as 1",
    "baseline": _GOODPUT,
    "candidate": _GOODPUT,
}
MOST_LINE_BYTES: Final = 64 * 2**10
MOST_SERIES: Final = 20_000
MOST_BLOCKS: Final = 100_000
"""Per series."""
MOST_BLOCKS_IN_ALL: Final = 5_000_000
"""A block takes 24 bytes, a series up to 28 kB more: 0.7 GB at most."""
_MOST_NAMED: Final = 20
"""Series in the summary on standard error; each has its last line in the results."""
_LOWEST_LEVEL: Final = 0.5
_HIGHEST_LEVEL: Final = 0.999999

SeriesName = str | int | None


class FindingOutput(Output):
    """What a series says after a block, from that block and those before it."""

    series: str | int | None
    """That of the block; null where it has none."""
    block: int
    """That of the block."""
    verdict: Literal["Pays", "DoesNotPay", "Inconclusive"]
    """Pays where low is above 1, DoesNotPay where high is below 1."""
    ratio: float | None
    """Goodput of the candidate to that of the baseline, the mean of log ratios without the outer fifths; null where one
    of them did nothing in half of the blocks or more, or neither ever did anything."""
    low: float | None
    """Lower end of the interval; null while there is none."""
    high: float | None
    """Upper end of the interval; null while there is none."""
    level: float
    """Probability that the true ratio lies in the intervals after all blocks at once."""


class BlockErrorOutput(Output):
    """A line that is no block, or none that can be counted."""

    series: str | int | None
    """That of the line; null where it cannot be read."""
    block: int | None
    """That of the line; null where it cannot be read."""
    error: str
    """Why."""


class VerdictOutput(RootModel[FindingOutput | BlockErrorOutput]):
    """One line of the results."""


@dataclass
class _State:
    series: PairedSeries
    last: int | None = None  # Number of the last block
    blocks: int = 0
    finding: Finding | None = None


class Batch:
    """All series of an input, with intervals of this level."""

    def __init__(self, level: float) -> None:
        self._level = level
        self._states: dict[SeriesName, _State] = {}
        self.lines = self.errors = self._blocks = 0

    def answer(self, number: int, text: str | bytes) -> dict[str, Any]:
        """Return the answer to a line of the input: a finding, or what is wrong with the line."""
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
                return Problem(shown(key), shown(given), f"unknown field of a block: use {', '.join(_MEANINGS)}")
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
            fix = f"must be larger than that of the block before it in its series, {state.last}"
            return Problem("block", number, fix)
        if not state and len(self._states) >= MOST_SERIES:
            fix = f"is one more than the {MOST_SERIES:,} that are kept: divide the input"
            return Problem("series", shown(series), fix)
        if state and state.blocks >= MOST_BLOCKS:
            return Problem("block", number, f"its series has {MOST_BLOCKS:,} already: make blocks longer")
        if self._blocks >= MOST_BLOCKS_IN_ALL:
            return Problem("block", number, f"all series have {MOST_BLOCKS_IN_ALL:,} already: divide the input")
        return None

    def summary(self) -> Iterator[str]:
        """Yield a line for each of the first series, and how many lines have an error."""
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
    # Data frames write whole numbers with a point if a column has gaps.
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
    """Decide after each block of a paired comparison whether the candidate pays. Stop at any block.

    A block has the goodput of both arms:
    {"series": "a", "block": 1, "baseline": 812.3, "candidate": 901.0}

    Exits with 0 when all lines are answered, 2 when a line has an error or a file cannot be used.
    """
    batch = Batch(level)
    with opened_line_files(blocks, verdicts, MOST_LINE_BYTES) as (lines, target):
        for number, line in enumerate(lines, start=1):
            if line.strip():
                target.write(json_text(batch.answer(number, line)) + "\n")
                # Who feeds a pipe waits for the answer before the next block.
                target.flush()
    for each in batch.summary():
        say_line(each, err=True)
    if batch.errors:
        raise typer.Exit(ExitCode.INVALID)
