"""Repeat parts or tests beside a CPU load, and list every test that failed. `./just repeat` runs this.

    python -m tests.repeat [--times 20] [--load 4] [--page FILE] PART|PATH...

A part is one of `./just parts`; paths are those that pytest takes and run together. The results are read from
pytest's JUnit XML. The exit status is 1 if any test failed in any round, or if any round ended early.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree as ET

from tests.parts import LANES, Outcome, Part, prepare, run_lanes, say

PARTS = {part.name: part for lane in LANES for part in lane if "pytest" in part.command}
"""The parts whose results pytest writes: lint and typing have none."""

_FAILED = 1
"""pytest's exit status if tests failed, and the run itself came to its end."""

_BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""
"""Keeps one core busy until its parent ends, however that ends."""


@dataclass
class Tally:
    """How often each test of one part passed and failed.

    A skipped test counts as neither. ``broken`` counts rounds that ended early or without results, by reason.
    """

    rounds: int = 0
    passed: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome, results: Path) -> None:
        """Count one round by its JUnit XML."""
        self.rounds += 1
        passed = read_results(results)
        self.passed.update(name for name, each in passed.items() if each)
        self.failed.update(name for name, each in passed.items() if not each)
        failure = outcome.failure or (None if passed else f"{outcome.part.name}: no results")
        if failure and (outcome.status > _FAILED or all(passed.values())):
            self.broken[failure] += 1

    def lines(self) -> list[str]:
        """Return one line per test that failed, flaky ones first, then one per reason of broken rounds."""
        flaky = sorted(name for name in self.failed if self.passed[name])
        always = sorted(name for name in self.failed if not self.passed[name])
        return [
            *(f"flaky: failed {self.failed[name]}, passed {self.passed[name]}: {name}" for name in flaky),
            *(f"always failed ({self.failed[name]}): {name}" for name in always),
            *(f"{count} of {self.rounds} rounds broken: {reason}" for reason, count in sorted(self.broken.items())),
        ]


def read_results(file: Path) -> dict[str, bool]:
    """Return whether each test that was not skipped passed, by its name for pytest; nothing if there is no file.

    A test that passes and whose teardown fails has failed.
    """
    passed: dict[str, bool] = {}
    if not file.exists():
        return passed
    for case in ET.parse(file).iter("testcase"):
        path, name = case.get("file", ""), case.get("name", "")
        # A class of tests follows the module; a module that cannot be imported has neither file nor class.
        groups = case.get("classname", "").removeprefix(path.removesuffix(".py").replace("/", ".")).strip(".")
        test = "::".join(word for word in (path, *groups.split("."), name) if word)
        has_failed = any(case.find(tag) is not None for tag in ("failure", "error"))
        if has_failed or case.find("skipped") is None:
            passed[test] = passed.get(test, True) and not has_failed
    return passed


@contextmanager
def busy(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep ``count`` processes busy for the length of the block."""
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY, str(os.getpid())]) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def repeat(part: Part, times: int, tally: Tally, run: Callable[[Part], Outcome]) -> None:
    """Run a part ``times`` times, and count each round as soon as it ends."""
    with tempfile.TemporaryDirectory(prefix="specdecode-repeat-") as folder:
        for number in range(1, times + 1):
            results = Path(folder) / f"{number}.xml"
            # The family xunit1 names a test's file.
            command = (*part.command, f"--junitxml={results}", "--override-ini=junit_family=xunit1")
            outcome = run(replace(part, name=f"{part.name}-{number}", command=command))
            tally.add(replace(outcome, part=part), results)


def parts_of(names: list[str]) -> list[Part]:
    """Return the parts that are named, and one of all paths.

    Raises
    ------
    ValueError
        If a name is neither.
    """
    parts = [PARTS[name] for name in names if name in PARTS]
    paths = [name for name in names if name not in PARTS]
    if unknown := [path for path in paths if not Path(path.partition("::")[0]).exists()]:
        message = f"no part or path {', '.join(unknown)}; name a path of tests, or a part: {', '.join(PARTS)}"
        raise ValueError(message)
    command = (sys.executable, "-m", "pytest", "--color=no", *paths)
    return [*parts, *([Part("paths", command)] if paths else [])]


def report(tallies: dict[str, Tally], load: int, page: Path | None) -> int:
    """Print what failed, and write it as Markdown to ``page``, which stays empty otherwise; return the exit status."""
    sections = []
    for name, tally in tallies.items():
        tests = len({*tally.passed, *tally.failed})
        head = f"{name}: {tests} tests, {tally.rounds} rounds beside a load of {load}"
        lines = tally.lines()
        say("\n".join([f"\n{head}{'' if lines else ', all passed'}", *(f"  {line}" for line in lines)]))
        if lines:
            sections.append(f"## {head}\n\n" + "".join(f"- {line}\n" for line in lines))
    if page:
        page.write_text("\n".join(sections))
    return 1 if sections else 0


def at_least(minimum: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``minimum`` on."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            message = f"{text!r} is not a whole number of at least {minimum}"
            raise argparse.ArgumentTypeError(message)
        return int(text)

    return number


def main(arguments: list[str] | None = None) -> int:
    """Repeat what is named."""
    parser = argparse.ArgumentParser(prog="./just repeat", description=__doc__.partition("\n")[0])
    parser.add_argument("name", nargs="+", metavar="PART|PATH", help=f"{', '.join(PARTS)}, or what pytest takes")
    parser.add_argument("--times", type=at_least(1), default=20, help="rounds of each part (default: 20)")
    parser.add_argument("--load", type=at_least(0), default=4, help="busy processes beside the tests (default: 4)")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write what failed as Markdown; empty if all passed")
    asked = parser.parse_args(arguments)
    try:
        parts = parts_of(asked.name)
    except ValueError as error:
        parser.error(str(error))
    tallies = {part.name: Tally() for part in parts}
    prepare(parts)
    try:
        with busy(asked.load):
            for part in parts:
                repeat(part, asked.times, tallies[part.name], lambda each: run_lanes([[each]])[0])
    except KeyboardInterrupt:
        report(tallies, asked.load, asked.page)
        return 130
    return report(tallies, asked.load, asked.page)


if __name__ == "__main__":
    sys.exit(main())
