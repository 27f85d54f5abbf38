"""Write the table of docs/operate/scale.md: the cost of one operator by the number of objects that it serves."""

import math
from collections.abc import Iterator, Mapping
from typing import Final

from bench.documents.bench_table import FILE
from bench.figures import number, read_runs, table_lines
from specdecode_operator.api.deployment import Key
from specdecode_operator.deployment.requeue import Requeue
from specdecode_operator.handlers.main import RESYNC_S
from specdecode_operator.handlers.resync import ResyncOrder

MEASURED: Final = (100, 1000, 5000)
BETWEEN: Final = (2000, 3000)
"""Interpolated linearly, not measured."""

_MIB_IN_MB: Final = 2**20 / 1e6
_REQUEST_STEP_MIB: Final = 64
_LIMIT_STEP_MIB: Final = 128
_ROOM: Final = 1.5
"""Limit, as a multiple of the peak."""

_REQUEST_MIB: Final = 192
_LIMIT_MIB: Final = 512
"""Default of the chart, and lower bound of the limit."""

_FIGURES: Final = {
    "create all objects, until their children exist": "create, until all children are there",
    "CPU time for the creation": "CPU time for it",
    "start of the operator, until it acts on changes": "restart, until 3 changes are acted on",
    "CPU time of a start, until the operator is idle": "CPU time of a restart, until all is at rest",
    "one change while all other objects are idle": "one change amid them",
    "CPU while nothing changes": "idle CPU",
}

Values = Mapping[int, float]


def scale_table() -> str:
    """Return the table."""
    heads = [f"{size:,} objects" + " (interpolated)" * (size in BETWEEN) for size in sorted((*MEASURED, *BETWEEN))]
    rows = [("", *heads, "exponent, 1,000 to 5,000"), *_memory(), *_times(), _asked()]
    return "\n".join([*table_lines(rows), ""])


def _memory() -> Iterator[tuple[str, ...]]:
    phases = [_values(f"memory at most, {phase}")[0] for phase in ("all Ready", "after a restart")]
    most = _with_between({size: max(phase[size] for phase in phases) for size in MEASURED})
    yield "peak memory", *(f"{number(most[size])} MB" for size in sorted(most)), _exponent(most)
    for name, least, room, step in (
        ("`resources.requests.memory`", _REQUEST_MIB, 1.0, _REQUEST_STEP_MIB),
        ("`resources.limits.memory`", _LIMIT_MIB, _ROOM, _LIMIT_STEP_MIB),
    ):
        wanted = [max(least, step * math.ceil(room * most[size] / _MIB_IN_MB / step)) for size in sorted(most)]
        yield name, *(f"{each}Mi" for each in wanted), ""


def _times() -> Iterator[tuple[str, ...]]:
    for title, name in _FIGURES.items():
        values, unit = _values(name)
        every = _with_between(values)
        yield title, *(f"{number(every[size])} {unit}" for size in sorted(every)), _exponent(values)


def _asked() -> tuple[str, ...]:
    """Return the polling interval per engine, which follows from the code."""
    turns, asked = ResyncOrder(RESYNC_S), []
    for size in range(1, max(MEASURED) + 1):
        turns.looked(Key("team", str(size)), Requeue())
        if size in (*MEASURED, *BETWEEN):
            asked.append(f"{turns.interval_s:.0f} s")
    return "polling interval per engine", *asked, ""


def _values(name: str) -> tuple[Values, str]:
    """Return the values of the first figure of such a name by the number of objects, and their unit."""
    figures, found = [row.figure for run in read_runs(FILE) for row in run.rows], {}
    for size in MEASURED:
        start = f"{size:,} objects: {name}"
        if not (of_size := [figure for figure in figures if figure.name.startswith(start)]):
            raise LookupError(f"{FILE}: has no row {start!r}: measure it, or take it back from git")
        found[size] = of_size[0]
    return {size: figure.value or 0.0 for size, figure in found.items()}, found[MEASURED[0]].unit


def _with_between(values: Values) -> dict[int, float]:
    """Return values with those of the sizes between the two largest ones."""
    below, above = MEASURED[-2:]
    a_step = (values[above] - values[below]) / (above - below)
    return {**values, **{size: values[below] + a_step * (size - below) for size in BETWEEN}}


def _exponent(values: Values) -> str:
    """Return with which exponent a value grows between the two largest sizes; 1 is as the number of objects."""
    below, above = MEASURED[-2:]
    return f"{math.log(values[above] / values[below], above / below):.2f}"
