"""Write the table of docs/operate/scale.md: the cost of one operator by the number of objects that it serves."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from bench.documents.bench_table import FILE
from bench.figures import Figure, number, read_runs, table_lines
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

_CREATE: Final = "create, until all children are there"
_FIGURES: Final = {
    "create all objects, until their children exist": _CREATE,
    "CPU time for the creation": "CPU time for it",
    "start of the operator, until it acts on changes": "restart, until 3 changes are acted on",
    "CPU time of a start, until the operator is idle": "CPU time of a restart, until all is at rest",
    "one change while all other objects are idle": "one change amid them",
    "CPU while nothing changes": "idle CPU",
}

Values = Mapping[int, float]


def scale_table() -> str:
    """Return the table, the sentences that follow from its values, and the runs."""
    heads = [f"{size:,} objects" + " (interpolated)" * (size in BETWEEN) for size in sorted((*MEASURED, *BETWEEN))]
    below, above = MEASURED[-2:]
    rows = [("", *heads, f"exponent, {below:,} to {above:,}"), *_memory(), *_times(), _asked()]
    return "\n".join([*table_lines(rows), "", *_sentences(), "", *_runs(), ""])


def objects_within(memory_mib: float) -> int:
    """Return the number of objects whose peak memory fits, in hundreds and at most the largest measured number."""
    most = _peak_memory_mb()
    fits = [size for size in range(MEASURED[0], MEASURED[-1] + 1, 100) if _at(most, size) <= memory_mib * _MIB_IN_MB]
    return max(fits, default=0)


def _sentences() -> Iterator[str]:
    below, above = MEASURED[-2:]
    most, (create, _) = _peak_memory_mb(), _values(_CREATE)
    per_object = (most[above] - most[below]) / (above - below)
    request, limit = objects_within(_REQUEST_MIB), objects_within(_LIMIT_MIB / _ROOM)
    yield f"The chart's defaults suffice for {request:,} objects (request) and {limit:,} objects (limit)."
    yield f"Above {below:,} objects, memory grows by {number(per_object)} MB per object."
    longer = f"{above / below:.0f} times as many objects takes {create[above] / create[below]:.1f} times as long"
    yield f"Creating {longer} ({below:,} and {above:,} objects)."


def _runs() -> Iterator[str]:
    yield "Measured:"
    yield ""
    for size, (machine, _) in _rows(_CREATE).items():
        cpu = f"{machine['cores']} cores of {machine['cpu']}"
        yield f"- {size:,} objects: {machine['date'].split()[0]}, {cpu}, commit {machine['commit']}"


def _peak_memory_mb() -> Values:
    phases = [_values(f"memory at most, {phase}")[0] for phase in ("all Ready", "after a restart")]
    return {size: max(phase[size] for phase in phases) for size in MEASURED}


def _memory() -> Iterator[tuple[str, ...]]:
    most = _with_between(_peak_memory_mb())
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
    """Return the values of a figure by number of objects, and their unit."""
    found = _rows(name)
    return {size: figure.value or 0.0 for size, (_, figure) in found.items()}, found[MEASURED[0]][1].unit


def _rows(name: str) -> dict[int, tuple[Mapping[str, Any], Figure]]:
    """Return the newest figure whose name starts with a text, by number of objects, with the machine of its run."""
    figures, found = [(run.machine, row.figure) for run in read_runs(FILE) for row in run.rows], {}
    for size in MEASURED:
        start = f"{size:,} objects: {name}"
        if not (of_size := [each for each in figures if each[1].name.startswith(start)]):
            raise LookupError(f"{FILE}: has no row {start!r}: measure it, or restore it from git")
        found[size] = max(of_size, key=lambda each: str(each[0]["date"]))
    return found


def _with_between(values: Values) -> dict[int, float]:
    """Return the measured and the interpolated values."""
    return {**values, **{size: _at(values, size) for size in BETWEEN}}


def _at(values: Values, size: int) -> float:
    """Interpolate linearly between the measured sizes below and above."""
    below = max(each for each in MEASURED if each <= size)
    above = min(each for each in MEASURED if each >= size)
    share = (size - below) / (above - below) if above > below else 0.0
    return values[below] + share * (values[above] - values[below])


def _exponent(values: Values) -> str:
    """Return the exponent of the growth between the two largest measured sizes; 1 is linear."""
    below, above = MEASURED[-2:]
    return f"{math.log(values[above] / values[below], above / below):.2f}"
