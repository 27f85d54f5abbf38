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
    """Return what a line says."""
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


MOST_LINE_BYTES: Final = 64 * 2**10
MOST_SERIES: Final = 20_000
MOST_BLOCKS: Final = 100_000
"""Of a series."""
MOST_BLOCKS_IN_ALL: Final = 5_000_000
"""A block takes 24 bytes, a series up to 28 kB beside: 0.7 GB at the most."""


@dataclass
class _State:
    """A series, and the number of its last block."""

    series: PairedSeries
    last: int | None = None
    blocks: int = 0
    finding: Finding | None = None


class Batch:
    """All series of an input.

    Parameters
    ----------
    level
        Of the intervals.
    """

    def __init__(self, level: float) -> None:
        self._level = level
        self._states: dict[SeriesName, _State] = {}
        self.lines = self.errors = self._blocks = 0

    def answer(self, number: int, text: str | bytes) -> dict[str, Any]:
        """Return the answer to a line of the input, as it is written: a finding, or what is wrong with the line."""
        self.lines += 1
        try:
            block = read_block(parse_json(text, MOST_LINE_BYTES))
            finding = self._add(block)
        except UnreadableTextError as error:
            return self._refused(number, BlockError(str(error)))
        except BlockError as error:
            return self._refused(number, error)
        return {
            "series": block.series,
            "block": block.block,
            "verdict": finding.verdict.value,
            "ratio": finding.ratio,
            "low": finding.low,
            "high": finding.high,
            "level": self._level,
        }

    def findings(self) -> dict[SeriesName, tuple[int, Finding]]:
        """Return the last finding of each series, with the number of its blocks."""
        return {name: (each.blocks, each.finding) for name, each in self._states.items() if each.finding}

    def _refused(self, number: int, error: BlockError) -> dict[str, Any]:
        self.errors += 1
        return {"series": error.series, "block": error.block, "error": f"line {number}: {error}"}

    def _add(self, block: Block) -> Finding:
        state = self._states.get(block.series) or _State(PairedSeries(self._level))
        problem = self._problem(block, state)
        if problem is not None:
            raise BlockError(problem, block.series, block.block)
        self._states[block.series] = state
        self._blocks += 1
        state.last, state.blocks = block.block, state.blocks + 1
        state.finding = state.series.add(block.baseline, block.candidate)
        return state.finding

    def _problem(self, block: Block, state: _State) -> Problem | None:
        number, name = shown(block.block), shown(block.series)
        if state.last is not None and block.block <= state.last:
            fix = f"must be larger than that of the block before it in its series, {state.last}"
            return Problem("block", number, fix)
        if not state.blocks and len(self._states) >= MOST_SERIES:
            return Problem("series", name, f"is one more than the {MOST_SERIES:,} that are kept: divide the input")
        if state.blocks >= MOST_BLOCKS:
            return Problem("block", number, f"its series has {MOST_BLOCKS:,} already: make blocks longer")
        if self._blocks >= MOST_BLOCKS_IN_ALL:
            return Problem("block", number, f"all series have {MOST_BLOCKS_IN_ALL:,} already: divide the input")
        return None


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


_MOST_NAMED: Final = 20
"""Series that standard error sums up; each has its last line in the results."""

_LOWEST_LEVEL: Final = 0.5
_HIGHEST_LEVEL: Final = 0.999999


def verdict_command(
    blocks: Annotated[str, typer.Option("--in", help="JSON lines, one block each; - for standard input.")],
    verdicts: Annotated[str, typer.Option("--out", help="Where verdicts go, a line a block; - for standard output.")],
    *,
    level: Annotated[
        float,
        typer.Option(min=_LOWEST_LEVEL, max=_HIGHEST_LEVEL, help="Of the intervals: they all hold with it at once."),
    ] = DEFAULT_LEVEL,
) -> None:
    """Say after each block of a paired comparison whether the candidate pays, with an interval that may be watched.

    A block is {"series": "a", "block": 1, "baseline": 812.3, "candidate": 901.0}: the goodput of both arms.

    Exits with 0 when all lines are answered, 2 when a line has an error or a file cannot be used.
    """
    batch = Batch(level)
    with opened_line_files(blocks, verdicts, MOST_LINE_BYTES) as (lines, target):
        for number, line in enumerate(lines, start=1):
            if line.strip():
                target.write(json_text(batch.answer(number, line)) + "\n")
                # Who feeds a pipe waits for the answer before the next block.
                target.flush()
    for each in _summary(batch):
        say_line(each, err=True)
    if batch.errors:
        raise typer.Exit(ExitCode.INVALID)


def _summary(batch: Batch) -> Iterator[str]:
    findings = batch.findings()
    for name, (count, found) in islice(findings.items(), _MOST_NAMED):
        series = "" if name is None else f"{shown(name)}: "
        ratio = "no ratio" if found.ratio is None else f"ratio {found.ratio:.4g}"
        ends = " to ".join("unknown" if each is None else f"{each:.4g}" for each in (found.low, found.high))
        interval = "no interval" if found.low is None and found.high is None else f"interval {ends}"
        blocks = "1 block" if count == 1 else f"{count:,} blocks"
        yield f"{series}{found.verdict} after {blocks}: {ratio}, {interval}"
    if len(findings) > _MOST_NAMED:
        yield f"and {len(findings) - _MOST_NAMED:,} more series"
    if batch.errors:
        yield f"{batch.errors:,} of {batch.lines:,} lines have an error"
