"""`specdecode verdict`: goodput of two arms block by block, and after each whether the candidate pays."""

from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Final

import typer

from specdecode_operator.cli.line_files import opened_line_files
from specdecode_operator.cli.options import ExitCode
from specdecode_operator.cli.outputs.printing import json_text
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.evidence.batch import MOST_LINE_BYTES, Batch
from specdecode_operator.evidence.series import DEFAULT_LEVEL
from specdecode_operator.problems import shown

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
