"""Write the figures of `./just bench` into the documents, from the committed runs in docs/design/benchmarks.json."""

from itertools import chain
from typing import Final

from bench.figures import markdown_table, read_runs
from bench.machine import ROOT, described

FILE: Final = ROOT / "docs/design/benchmarks.json"


def bench_table() -> str:
    """Return the rows of the file, with the date and machine of each run."""
    runs = read_runs(FILE)
    facts = (
        f"- {', '.join(dict.fromkeys(row.part for row in run.rows))}: "
        + described(dict(run.machine), chain.from_iterable(row.figure.parts for row in run.rows))
        for run in runs
    )
    rows = [row for run in runs for row in run.rows]
    return "\n".join([*markdown_table(rows), "", "Measured:", "", *facts, ""])
