"""Figures of the benchmarks, their limits and peers, and the tables and files that they are written to."""

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
"""Name of the row of a part that raised an error."""

GROWTH: Final = "exponent"
"""Unit of the growth of a cost."""

RATES: Final = ("/s", "by CPU s")
"""Parts of the units of rates. Of rates, more is better; of all other values, less."""

_SIZE: Final = re.compile(r"[\d,]+ objects(, \d+ operators)?(?=: )")
"""Prefix of the name of a figure that is measured for several numbers of objects."""

LINEAR: Final = 1.1
"""Largest exponent that counts as linear growth. It leaves room for the noise of small sizes."""


class Sense(StrEnum):
    """How a figure relates to its bound."""

    AT_MOST = "≤"
    AT_LEAST = "≥"
    PEER = "peer"


@dataclass(frozen=True)
class Bound:
    """A limit, or the value of a peer that did the same work in the same run."""

    sense: Sense
    value: float
    source: str  # Our aim, a publication, or the peer with its version

    def holds(self, value: float) -> bool | None:
        """Return whether a value is within the limit; None for a peer, which is not a limit."""
        if self.sense is Sense.PEER:
            return None
        return value <= self.value if self.sense is Sense.AT_MOST else value >= self.value


def at_most(value: float, source: str = AIM) -> Bound:
    """Return an upper limit."""
    return Bound(Sense.AT_MOST, value, source)


def at_least(value: float, source: str = AIM) -> Bound:
    """Return a lower limit."""
    return Bound(Sense.AT_LEAST, value, source)


def peer(value: float, source: str) -> Bound:
    """Return the value of a peer, measured in the same run."""
    return Bound(Sense.PEER, value, source)


@dataclass(frozen=True)
class Figure:
    """One measured value."""

    name: str
    value: float | None  # None if it was not measured; the remark has the reason
    unit: str = ""
    against: Bound | None = None
    remark: str = ""
    parts: tuple[str, ...] = ()  # Programs with their versions, such as `vLLM 0.32.0`

    @property
    def more_is_better(self) -> bool:
        """Whether a larger value is better."""
        is_rate = any(each in self.unit for each in RATES)
        return is_rate or (self.against is not None and self.against.sense is Sense.AT_LEAST)


@dataclass(frozen=True)
class Row:
    """A figure and the part of the bench that measured it."""

    part: str
    figure: Figure

    @property
    def command(self) -> str:
        """Command that measures only the part of this row."""
        return f"./just bench --only {self.part}"

    @property
    def series(self) -> tuple[str, str]:
        """Part and number of objects and operators. Rows of the same series are measured together."""
        size = _SIZE.match(self.figure.name)
        return self.part, size[0] if size else ""

    def is_replaced_by(self, rows: Iterable["Row"]) -> bool:
        """Return whether a later run measured the same series, or any row of a part that had failed."""
        if self.figure.name == FAILED:
            return any(row.part == self.part for row in rows)
        return any(row.series == self.series for row in rows)

    def as_json(self) -> dict[str, Any]:
        """Return the row as it is stored in a file."""
        area = self.part.partition(".")[0]
        return {"area": area, "part": self.part, "command": self.command, **asdict(self.figure)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Row":
        """Parse a row of a file."""
        against = values["against"]
        bound = against and Bound(Sense(against["sense"]), against["value"], against["source"])
        figure = {key: values[key] for key in ("name", "value", "unit", "remark")}
        return cls(values["part"], Figure(**figure, against=bound, parts=tuple(values["parts"])))


@dataclass(frozen=True)
class Run:
    """Rows that were measured in one run on one machine."""

    machine: Mapping[str, Any]
    rows: Sequence[Row]


def growth(name: str, unit: str, costs: Mapping[int, float], most: float = LINEAR, source: str = AIM) -> Figure:
    """Return the exponent with which a cost grows with size: a least-squares fit of the logarithms."""
    logarithms = [(math.log(size), math.log(cost)) for size, cost in costs.items()]
    slope = statistics.linear_regression(*zip(*logarithms, strict=True)).slope
    points = ", ".join(f"{size:,}: {number(cost)} {unit}" for size, cost in costs.items())
    return Figure(f"{name}: growth", slope, GROWTH, at_most(most, source), points)


def number(value: float) -> str:
    """Format a value with three significant digits; larger values keep all digits before the point."""
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
"""Replacements in the names of figures for the tables. The names are keys in the files, so they do not change."""

_PER: Final = re.compile(r"\ban? (?=(object|minute)$)")


def label(name: str) -> str:
    """Return the name of a figure as the tables show it."""
    for part, label in _LABELS.items():
        name = name.replace(part, label)
    return name


def quantity(value: float, unit: str) -> str:
    """Format a value with its unit, as the tables show it."""
    return f"{number(value)} {_PER.sub('per ', unit)}".rstrip()


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row."""
    figure = row.figure
    if figure.value is None:
        return row.part, label(figure.name), "not measured", "", "", figure.remark
    bound = figure.against
    against = f"{bound.sense} {quantity(bound.value, figure.unit)} ({bound.source})" if bound else ""
    kept = _KEPT[bound.holds(figure.value) if bound else None]
    return row.part, label(figure.name), quantity(figure.value, figure.unit), against, kept, figure.remark


def text_table(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the lines of the table for a terminal."""
    lines = [_HEAD, *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def markdown_table(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the lines of the table in Markdown."""
    return table_lines(chain([_HEAD], map(cells, rows)))


def table_lines(lines: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a Markdown table; the first row is its header."""
    for number, line in enumerate(lines):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |"
        if number == 0:
            yield f"| {' | '.join(['---'] * len(line))} |"


def read_runs(file: Path) -> list[Run]:
    """Return the runs of a file; none if the file does not exist."""
    return parse_runs(file.read_text(encoding="utf-8")) if file.exists() else []


def parse_runs(text: str) -> list[Run]:
    """Parse runs that were written as JSON.

    Raises
    ------
    ValueError
        When the text does not contain runs.
    """
    try:
        runs = json.loads(text)["runs"]
        return [Run(run["machine"], [Row.from_json(row) for row in run["figures"]]) for run in runs]
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"does not contain runs of ./just bench: {error!r}") from error


def dump_runs(runs: Iterable[Run], indent: int | None = None) -> str:
    """Return runs as JSON."""
    values = [{"machine": dict(each.machine), "figures": [row.as_json() for row in each.rows]} for each in runs]
    return json.dumps({"runs": values}, indent=indent, ensure_ascii=False)


def runs_file(text: str) -> Path:
    """Parse the option for a file that a run can be added to."""
    file = output_file(text)
    try:
        read_runs(file)
    except (OSError, ValueError) as error:
        raise ArgumentTypeError(f"{text!r}: contains something other than runs; use another file") from error
    return file


def write_run(file: Path, run: Run) -> None:
    """Add a run to a file. Its rows replace the same parts, and the same numbers of objects, of earlier runs."""
    kept = [Run(old.machine, [row for row in old.rows if not row.is_replaced_by(run.rows)]) for old in read_runs(file)]
    runs = [each for each in (*kept, run) if each.rows]
    file.write_text(dump_runs(runs, indent=1) + "\n", encoding="utf-8")
