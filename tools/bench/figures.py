"""What `./just bench` tells: figures, what each is held against, and how they are written down."""

import json
import math
import re
import statistics
from argparse import ArgumentTypeError
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any, Final

from devcluster.host.arguments import output_file

AIM: Final = "our aim"
FAILED: Final = "failed"
"""The name of what stands for a part that could not be measured."""

GROWTH: Final = "exponent"
"""The unit of cost growth."""

_SIZE: Final = re.compile(r"[\d,]+ objects(?=: )")
"""With what the name of a figure begins that is of one of several numbers of objects."""

LINEAR: Final = 1.1
"""An exponent of cost growth up to which growth counts as linear, noise of small sizes included."""


class Sense(StrEnum):
    """How a figure is read against its bound."""

    AT_MOST = "≤"
    AT_LEAST = "≥"
    PEER = "peer"


@dataclass(frozen=True)
class Bound:
    """What a figure is held against: a limit, or what a peer needs for the same."""

    sense: Sense
    value: float
    source: str  # Who says so: our aim, a publication, or a peer in the same run

    def holds(self, value: float) -> bool | None:
        """Whether a value keeps the limit; None for a peer, which is no limit."""
        if self.sense is Sense.PEER:
            return None
        return value <= self.value if self.sense is Sense.AT_MOST else value >= self.value


def at_most(value: float, source: str = AIM) -> Bound:
    """Return a limit from above."""
    return Bound(Sense.AT_MOST, value, source)


def at_least(value: float, source: str = AIM) -> Bound:
    """Return a limit from below."""
    return Bound(Sense.AT_LEAST, value, source)


def peer(value: float, source: str) -> Bound:
    """Return what a peer needs: measured in the same run, or published."""
    return Bound(Sense.PEER, value, source)


@dataclass(frozen=True)
class Figure:
    """One figure; its part of the bench is known from where it was measured."""

    name: str
    value: float | None  # None where it was not measured: the remark says why
    unit: str = ""
    against: Bound | None = None
    remark: str = ""
    parts: tuple[str, ...] = ()  # What was measured with its version, such as `vLLM 0.32.0`


@dataclass(frozen=True)
class Row:
    """A figure, and the part of the bench that measured it."""

    part: str
    figure: Figure

    @property
    def command(self) -> str:
        """What prints this row, and no other part."""
        return f"./just bench --only {self.part}"

    @property
    def series(self) -> tuple[str, str]:
        """What is measured together: a part of the bench, or one number of objects in it."""
        size = _SIZE.match(self.figure.name)
        return self.part, size[0] if size else ""

    def is_replaced_by(self, rows: Iterable["Row"]) -> bool:
        """Whether rows of a later run measured the same; of a part that failed, anything."""
        if self.figure.name == FAILED:
            return any(row.part == self.part for row in rows)
        return any(row.series == self.series for row in rows)

    def as_json(self) -> dict[str, Any]:
        """Return what stands in the file."""
        area = self.part.partition(".")[0]
        return {"area": area, "part": self.part, "command": self.command, **asdict(self.figure)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Row":
        """Return a row of a file."""
        against = values["against"]
        bound = against and Bound(Sense(against["sense"]), against["value"], against["source"])
        figure = {key: values[key] for key in ("name", "value", "unit", "remark")}
        return cls(values["part"], Figure(**figure, against=bound, parts=tuple(values["parts"])))


@dataclass(frozen=True)
class Run:
    """What was measured at one time on one machine."""

    machine: Mapping[str, Any]
    rows: Sequence[Row]


def growth(name: str, unit: str, costs: Mapping[int, float], most: float = LINEAR, source: str = AIM) -> Figure:
    """Return the exponent with which a cost grows with size: the slope of the logarithms, by least squares."""
    logarithms = [(math.log(size), math.log(cost)) for size, cost in costs.items()]
    slope = statistics.linear_regression(*zip(*logarithms, strict=True)).slope
    points = ", ".join(f"{size:,}: {number(cost)} {unit}" for size, cost in costs.items())
    return Figure(f"{name}: growth", slope, GROWTH, at_most(most, source), points)


def number(value: float) -> str:
    """Return a value with three digits, or all that stand before the point."""
    if value == 0 or abs(value) >= 100:  # noqa: PLR2004  three digits before the point
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


_HEAD: Final = ("part", "figure", "value", "against", "kept", "remark")
_KEPT: Final = {True: "yes", False: "NO", None: ""}

_LABELS: Final = {
    "until all children are there": "until all children exist",
    "until all is at rest": "until the operator is idle",
    "CPU time for it": "CPU time of the creation",
    "writes to etcd for it, of all controllers": "writes to etcd of the creation, by all controllers",
    "create, times the peer's": "create, relative to the peer",
    "API server alone, a Service with an address": "API server only, one Service with an address",
    "idle CPU, beside the peer": "idle CPU, compared with the peer",
    "memory at most": "peak memory",
    "one change amid them": "one change while all others are idle",
    "until 3 changes are acted on": "until 3 changes are applied",
    "until all workloads have it": "until all workloads are updated",
    "until no child is left": "until all children are deleted",
    "replica that works": "leader",
    "replica that waits": "standby",
    "replica killed, a change is acted on": "leader killed, until a change is applied",
    "replica told to end, a change is acted on": "leader terminated, until a change is applied",
    "more promised than was there": "more tokens promised than available",
    "more CPU of": "additional CPU of",
    "more time a token": "additional time per token",
    "recorder's line of a step": "recorder, size of a step line",
    "recorder's line of a request": "recorder, size of a request line",
    "recorder's files of an hour": "recorder, size of the files per hour",
    "tokens a burst": "tokens per burst",
}
"""Labels of the tables, by the part of a figure's name that they replace. Names are keys in the file."""

_PER: Final = re.compile(r"\ban? (?=(object|minute)$)")


def _label(name: str) -> str:
    for part, label in _LABELS.items():
        name = name.replace(part, label)
    return name


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row."""
    figure = row.figure
    unit = f" {_PER.sub('per ', figure.unit)}" if figure.unit else ""
    if figure.value is None:
        return row.part, _label(figure.name), "not measured", "", "", figure.remark
    bound = figure.against
    against = f"{bound.sense} {number(bound.value)}{unit} ({bound.source})" if bound else ""
    kept = _KEPT[bound.holds(figure.value) if bound else None]
    return row.part, _label(figure.name), number(figure.value) + unit, against, kept, figure.remark


def text_table(rows: Iterable[Row]) -> Iterator[str]:
    """Return the lines of a table for a terminal."""
    lines = [_HEAD, *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def markdown_table(rows: Iterable[Row]) -> Iterator[str]:
    """Return the lines of the table for a document."""
    return table_lines(chain([_HEAD], map(cells, rows)))


def table_lines(lines: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Return a table for a document, of its head and what follows."""
    for number, line in enumerate(lines):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |"
        if number == 0:
            yield f"| {' | '.join(['---'] * len(line))} |"


def read_runs(file: Path) -> list[Run]:
    """Return the runs of a file; none where there is no file."""
    if not file.exists():
        return []
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"]
    return [Run(run["machine"], [Row.from_json(row) for row in run["figures"]]) for run in runs]


def runs_file(text: str) -> Path:
    """Return a file of an option that a run can be added to."""
    file = output_file(text)
    try:
        read_runs(file)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ArgumentTypeError(f"{text!r}: holds something else than runs: name another file") from error
    return file


def write_run(file: Path, run: Run) -> None:
    """Add a run to a file; what it measured replaces the same parts, and numbers of objects, of earlier runs."""
    kept = [Run(old.machine, [row for row in old.rows if not row.is_replaced_by(run.rows)]) for old in read_runs(file)]
    runs = [each for each in (*kept, run) if each.rows]
    values = [{"machine": dict(each.machine), "figures": [row.as_json() for row in each.rows]} for each in runs]
    file.write_text(json.dumps({"runs": values}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
