"""The figures of `./just bench` in the documents, as a committed run has them: docs/reference/benchmarks.json."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from bench.figures import AIM, GROWTH, Figure, Row, Run, cells, markdown_table, read_runs, table_lines
from bench.machine import ROOT, described

FILE: Final = ROOT / "docs/reference/benchmarks.json"

_Machine = Mapping[str, Any]


def bench_table() -> str:
    """Return the rows of the file, and when and where each was measured."""
    runs = read_runs(FILE)
    facts = (
        f"- {', '.join(dict.fromkeys(row.part for row in run.rows))}: "
        + described(dict(run.machine), chain.from_iterable(row.figure.parts for row in run.rows))
        for run in runs
    )
    return "\n".join([*markdown_table(_rows(runs)), "", "Measured:", "", *facts, ""])


def bench_table_in_short() -> str:
    """Return the rows with limit or peer without growth, of the largest size and what is not kept, and the machines."""
    runs = read_runs(FILE)
    rows = [row for row in _rows(runs) if row.figure.unit != GROWTH and _is_told_in_short(row.figure)]
    return "\n".join([*table_lines(_short_cells(rows)), "", *_machines([run.machine for run in runs]), ""])


def _rows(runs: Iterable[Run]) -> list[Row]:
    return [row for run in runs for row in run.rows]


def _is_told_in_short(figure: Figure) -> bool:
    if figure.against is None or figure.value is None:
        return False
    return not figure.is_detail or figure.against.holds(figure.value) is False


def _short_cells(rows: Iterable[Row]) -> Iterator[tuple[str, ...]]:
    yield "figure", "value", "against", "kept"
    for row in rows:
        _, name, value, against, kept, _ = cells(row)
        bound, _, source = against.partition(" (")
        others = source.partition("; ")[2] if source.startswith(AIM) else source
        yield name, value, f"{bound} ({others}" if others else bound, kept


def _machines(measured: Sequence[_Machine]) -> Iterator[str]:
    """Yield a line for each machine: what it is, when it was, and what else it did."""
    runs = defaultdict(list)
    for each in measured:
        runs[f"{each['cores']} cores of {each['cpu']}, {each['memory_gib']} GiB"].append(each)
    for machine, of_machine in runs.items():
        days = sorted({each["date"].split()[0] for each in of_machine})
        loads = [each["load_at_start"][0] for each in of_machine]
        when = " to ".join(dict.fromkeys((days[0], days[-1])))
        yield f"Measured {when} on {machine}, at a load of {min(loads):g} to {max(loads):g}."
