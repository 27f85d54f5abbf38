"""The figures of `./just bench` in the documents, as a committed run has them: docs/reference/benchmarks.json."""

from itertools import chain
from typing import Final

from bench.figures import markdown_table, read_runs
from bench.machine import ROOT, described

FILE: Final = ROOT / "docs/reference/benchmarks.json"

_WITHOUT_REMARK: Final = 5


def bench_table(*, held: bool) -> str:
    """Return the rows of the file and when they were measured; in short: those with limit or peer alone."""
    runs = read_runs(FILE)
    every = [row for run in runs for row in run.rows]
    rows = [row for row in every if row.figure.against and not row.figure.is_detail] if held else every
    facts = (
        f"- {', '.join(dict.fromkeys(row.part for row in run.rows))}: "
        + described(dict(run.machine), chain.from_iterable(row.figure.parts for row in run.rows))
        for run in runs
    )
    table = markdown_table(rows, columns=_WITHOUT_REMARK) if held else markdown_table(rows)
    return "\n".join([*table, "", "Measured:", "", *facts, ""])
