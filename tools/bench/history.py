"""Compares a run of the benchmarks with the last nights, and reports figures that became worse.

    ./just bench --json run.json
    ./just bench-history run.json history.jsonl [--add]

Each line of the history is the file of one night (``--json``). A figure is compared if it does not depend on the speed
of the machine: as a ratio to its peer, or directly if it is a ratio, a number or a size.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.figures import Figure, Run, Sense, dump_runs, label, parse_runs, quantity, table_lines

WINDOW: Final = 7
"""Number of earlier nights that a run is compared with."""

FEWEST: Final = 3
"""Number of earlier values from which the spread of a figure is estimated."""

WORSE: Final = 0.1

_FENCE: Final = 1.5
"""Interquartile ranges between the upper quartile and an outlier, as in a box plot."""

_RATIO: Final = "x"
"""Unit of a ratio to the peer."""

_COUNTED: Final = ("", "an object", "kB an object", "a minute", "bytes", "MB", "MiB")
_COUNTED_OF: Final = "of "
"""Prefix of the units of numbers such as `of 26 logs`."""

Night = list[Run]
Key = tuple[str, str, str]
"""Part, name, and peer or unit: ratios to two versions of a peer are different figures."""


@dataclass(frozen=True)
class Value:
    """A value that does not depend on the speed of the machine."""

    value: float
    unit: str
    more_is_better: bool


@dataclass(frozen=True)
class Worse:
    """A figure that became worse."""

    key: Key
    old: float
    new: Value

    def cells(self) -> tuple[str, ...]:
        """Return the row of the figure."""
        part, name, against = self.key
        old, new = (quantity(value, self.new.unit) for value in (self.old, self.new.value))
        by = f"{abs(self.new.value / self.old - 1):.0%}" if self.old else ""
        return part, label(name), old, new, by, against if self.new.unit == _RATIO else ""


class HistoryError(Exception):
    """A file that cannot be used."""


class Comparison:
    """The figures of one night beside those of earlier nights."""

    def __init__(self, night: Night, earlier: Sequence[Night]) -> None:
        self._now = values(night)
        self.nights = earlier[-WINDOW:]
        before = [values(each) for each in self.nights]
        self._old = {key: [each[key].value for each in before if key in each] for key in self._now}
        parts = {row.part for run in night for row in run.rows}
        self.missing = [key for key in (before[-1] if before else ()) if key[0] in parts and key not in self._now]
        self.new = [key for key, old in self._old.items() if not old]
        self.compared = [key for key, old in self._old.items() if len(old) >= FEWEST]
        self.left_out = sum(row.figure.value is not None for run in night for row in run.rows) - len(self._now)

    def worse(self) -> Iterator[Worse]:
        """Yield the figures that are worse than the median by more than 10 % and more than their spread."""
        for key in self.compared:
            now, sign = self._now[key], -1 if self._now[key].more_is_better else 1
            costs = [sign * value for value in self._old[key]]
            median, (lower, _, upper) = statistics.median(costs), statistics.quantiles(costs)
            fence = upper + _FENCE * (upper - lower)
            if sign * now.value > max(median + WORSE * abs(median), fence):
                yield Worse(key, abs(median), now)

    def report(self) -> Iterator[str]:
        """Yield the lines of the report, in Markdown."""
        if worse := [each.cells() for each in self.worse()]:
            head = ("part", "figure", f"median of {len(self.nights)} nights", "now", "worse by", "peer")
            yield from table_lines([head, *worse])
            yield ""
        waiting = len(self._now) - len(self.compared)
        yield f"- Worse by more than {WORSE:.0%} and outside the spread: {len(worse)} of {len(self.compared)} figures"
        yield f"- Not compared, because fewer than {FEWEST} earlier nights have a value: {waiting}"
        yield f"- Not compared, because they depend on the machine (times and shares without a peer): {self.left_out}"
        for title, keys in (("New", self.new if self.nights else []), ("Missing", self.missing)):
            if keys:
                yield f"- {title}: {'; '.join(f'{part}: {label(name)} ({against})' for part, name, against in keys)}"


def values(night: Night) -> dict[Key, Value]:
    """Return the figures that can be compared between machines."""
    found = {}
    for run in night:
        for row in run.rows:
            if (value := _value(row.figure)) is not None:
                bound = row.figure.against
                against = bound.source if bound and value.unit == _RATIO else value.unit
                found[row.part, row.figure.name, against] = value
    return found


def _value(figure: Figure) -> Value | None:
    bound, unit = figure.against, figure.unit
    if figure.value is None:
        return None
    if bound and bound.sense is Sense.PEER:
        return Value(figure.value / bound.value, _RATIO, figure.more_is_better) if bound.value else None
    if unit in _COUNTED or unit.startswith(_COUNTED_OF):
        return Value(figure.value, unit, figure.more_is_better)
    return None


def read_history(file: Path) -> list[Night]:
    """Return the nights of a history; none if the file does not exist.

    Raises
    ------
    HistoryError
        When a line is not a run.
    """
    nights = []
    for number, line in enumerate(_text(file).splitlines() if file.exists() else (), 1):
        try:
            nights.append(parse_runs(line))
        except ValueError as error:
            fix = "delete the line, or restore the file from its branch"
            raise HistoryError(f"{file}: line {number}: {_reason(error)}; {fix}") from error
    return nights


def read_night(file: Path) -> Night:
    """Return the runs of a file that the benchmarks wrote.

    Raises
    ------
    HistoryError
        When the file has no runs.
    """
    try:
        night = parse_runs(_text(file))
    except ValueError as error:
        raise HistoryError(f"{file}: {_reason(error)}; create the file with ./just bench --json {file}") from error
    if not night:
        raise HistoryError(f"{file}: contains no run; create the file with ./just bench --json {file}")
    return night


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise HistoryError(f"{file}: cannot be read: {error}; name another file") from error


def _reason(error: ValueError) -> str:
    return f"invalid or truncated JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)


def add(file: Path, night: Night) -> None:
    """Append a night to a history."""
    with file.open("a", encoding="utf-8") as history:
        history.write(dump_runs(night) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; return 1 if a figure became worse, and 2 if a file cannot be used."""
    parser = argparse.ArgumentParser(prog="./just bench-history")
    parser.add_argument("run", type=Path, metavar="RUN.json", help="file that ./just bench --json wrote")
    parser.add_argument("history", type=Path, metavar="HISTORY.jsonl", help="earlier runs, one per line")
    parser.add_argument("--add", action="store_true", help="append the run to HISTORY, also if a figure became worse")
    asked = parser.parse_args(arguments)
    try:
        night, history = read_night(asked.run), read_history(asked.history)
        # A job that is repeated compares with the same nights, and adds no second line.
        comparison = Comparison(night, [each for each in history if each != night])
        print("\n".join(comparison.report()))
        if asked.add and night not in history:
            add(asked.history, night)
    except (HistoryError, OSError) as error:
        print(f"bench-history: {error}", file=sys.stderr)
        return 2
    return int(any(comparison.worse()))


if __name__ == "__main__":
    sys.exit(main())
