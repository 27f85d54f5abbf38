"""Runs the benchmarks, and prints their figures as one table.

    ./just bench [--only sizing,capture.report] [--all] [--json FILE]

Each part is a module whose `figures()` yields its figures. It runs in its own process, so parts share no imports and no
caches.
"""

import argparse
import difflib
import importlib
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Final

from bench.figures import FAILED, Figure, Row, Run, runs_file, text_table, write_run
from bench.machine import described, facts

PARTS: Final = (
    "sizing.accuracy",
    "sizing.estimated",
    "sizing.speed",
    "sizing.lines",
    "sizing.processes",
    "sizing.peers",
    "command_line.input",
    "operator.rendering",
    "operator.admission",
    "capture.recorder",
    "capture.live_recorder",
    "capture.recorder_overhead",
    "capture.load_generator",
    "capture.validator",
    "capture.report",
    "replay.speed",
)
"""Modules of `bench`, in the order of the table."""

LONG_PARTS: Final = ("operator.scale", "operator.scale_alone", "operator.failover")
"""Parts that take longer than all others together. They run with --all, or if --only names them."""

SECOND_WAYS: Final = {"operator.scale_alone": ("operator.scale", "figures_alone")}
"""Parts that are not modules: module, and the function that yields the figures."""


class UnknownPartError(Exception):
    """A name is neither an area nor a part."""


def chosen(only: str | None, *, every: bool = False) -> list[str]:
    """Return the named parts and the parts of the named areas; by default all but the long parts.

    Raises
    ------
    UnknownPartError
        When a name is unknown.
    """
    known = (*PARTS, *LONG_PARTS)
    if only is None:
        return list(known if every else PARTS)
    areas = dict.fromkeys(part.partition(".")[0] for part in known)
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in areas and name not in known:
            meant = difflib.get_close_matches(name, (*areas, *known), n=1)
            hint = f"did you mean {meant[0]}?" if meant else f"use some of {', '.join((*areas, *known))}"
            raise UnknownPartError(f"{name!r} is neither an area nor a part: {hint}")
    return [part for part in known if part in names or part.partition(".")[0] in names]


def measure(part: str) -> list[Figure]:
    """Measure a part in its own process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as own:
        return own.submit(figures_of, part).result()


def figures_of(part: str) -> list[Figure]:
    """Measure a part in this process."""
    module, function = SECOND_WAYS.get(part, (part, "figures"))
    return list(getattr(importlib.import_module(f"bench.{module}"), function)())


def measured(parts: Iterable[str]) -> list[Row]:
    """Return the rows of all parts. A part that fails gets one row with the error."""
    rows = []
    for part in parts:
        print(f"bench: {part} …", file=sys.stderr, flush=True)
        try:
            found = measure(part)
        except Exception as error:  # noqa: BLE001  the other parts are still measured
            found = [Figure(FAILED, None, remark=f"{type(error).__name__}: {error}")]
        rows += [Row(part, figure) for figure in found]
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if a part failed."""
    parser = argparse.ArgumentParser(prog="./just bench")
    parser.add_argument("--only", metavar="NAME,…", help=f"areas or parts: {', '.join((*PARTS, *LONG_PARTS))}")
    parser.add_argument("--all", action="store_true", help=f"also the long parts: {', '.join(LONG_PARTS)}")
    parser.add_argument(
        "--json", type=runs_file, metavar="FILE", help="add the run to FILE, with the facts of the machine"
    )
    asked = parser.parse_args(arguments)
    try:
        parts = chosen(asked.only, every=asked.all)
    except UnknownPartError as error:
        parser.error(f"--only: {error}")
    machine = facts()
    rows = measured(parts)
    print("\n".join(text_table(rows)))
    print(f"\n{described(machine, (each for row in rows for each in row.figure.parts))}")
    print("To run one part: ./just bench --only PART")
    if asked.json:
        write_run(asked.json, Run(machine, rows))
    return int(any(row.figure.name == FAILED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
