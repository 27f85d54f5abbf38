"""How many small wrong changes the tests of an area let pass: mutmut over the areas of `[tool.mutants]`.

    ./just mutants [--sample 200 | --all] [--seed TEXT] [--tests PATH] [operator/sizing/memory/kv_cache.py …]

It works in a folder of its own, which goes away. A sample stays the same until its functions or the seed change.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import libcst as cst
from mutmut import __main__ as mutmut
from mutmut.configuration import config
from mutmut.mutation import mutators
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import copy_src_dir, walk_mutatable_files
from mutmut.utils.format_utils import orig_function_and_class_names_from_key

ROOT: Final = Path(__file__).parents[2]
PACKAGE: Final = Path("src/specdecode_operator")
SETTINGS: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutants"]
_NOTICED: Final = 1
"""pytest's exit status where a test fails."""

_FAILED: Final = ("killed", "timeout", "check was interrupted by user")
"""What mutmut calls it when tests fail, last or at all: modules of tests that cannot be imported any more, too."""


@dataclass(frozen=True)
class Mutant:
    """A function with one wrong change, what the tests said to it, and the change where they let it pass."""

    function: str
    status: str
    diff: str = ""

    @property
    def passed(self) -> bool:
        """Whether no test failed; a run that broke off tells nothing in its favour."""
        return self.status not in _FAILED

    @property
    def change(self) -> tuple[str, ...]:
        """What tells it from others wherever its function stands: the lines removed and added."""
        return change_of(self.function, self.diff)


def change_of(function: str, diff: str) -> tuple[str, ...]:
    """Return a function's name and the lines that a diff removes and adds, without their indentation."""
    lines = [line for line in diff.splitlines() if line[:1] in ("-", "+") and line[:3] not in ("---", "+++")]
    return (function, *(f"{line[0]} {line[1:].strip()}" for line in lines))


def equivalents() -> set[tuple[str, ...]]:
    """Return the changes that make no difference; the file says why."""
    listed = tomllib.loads((ROOT / SETTINGS["equivalents"]).read_text())
    return {change_of(each["function"], each["diff"]) for each in listed.get("equivalent", [])}


def files_of(patterns: Iterable[str], under: list[Path]) -> list[Path]:
    """Return an area's files, relative to the package; of those, the ones that are or lie under a path."""
    package = ROOT / "operator"
    found = [(pattern, sorted(package.glob(pattern))) for pattern in patterns]
    if missing := [pattern for pattern, files in found if not files]:
        sys.exit(f"[tool.mutants] of pyproject.toml: no file matches {', '.join(missing)}")
    files = [file for _, files in found for file in files]
    return [file.relative_to(package) for file in files if not under or {file, *file.parents} & {*under}]


def copied() -> list[Path]:
    """Return what the tests may read beside the package: every top-level entry that git tracks but its source folder.

    A list by hand lacked one file, and then no test passed before anything was changed.
    """
    command = ["git", "ls-files", "-z"]
    tracked = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout  # noqa: S603
    entries = dict.fromkeys(name.partition("/")[0] for name in tracked.split("\0") if name)
    return [Path(entry) for entry in entries if entry != PACKAGE.parts[0]]


def mutants_of(files: list[Path], tests: list[str], sample: int | None, seed: str) -> list[Mutant]:
    """Return the mutants of the files, or a sample of them, as the tests see them. Needs a process of its own."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # progress is no result
    mutators.mutation_operators[:] = [  # type: ignore[index]
        (kind, _change_word if operator is mutators.operator_string else operator)
        for kind, operator in mutators.mutation_operators
    ]
    with tempfile.TemporaryDirectory() as folder:
        for entry in ROOT.iterdir():
            (Path(folder) / entry.name).symlink_to(entry)
        os.chdir(folder)
        config().only_mutate = [str(PACKAGE / file) for file in files]
        config().pytest_add_cli_args_test_selection = tests
        config().also_copy = copied()
        copy_src_dir()
        with mutmut.CatchOutput():
            mutmut.create_mutants(os.cpu_count() or 1)
        names = sorted(_results(), key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())[:sample]
        if names:
            _test(names)
        results = _results()
        return [_mutant(name, *results[name]) for name in names]


def _test(names: list[str]) -> None:
    """Let mutmut run the tests of these mutants."""
    process = os.getpid()
    try:
        mutmut._run(names, None)  # noqa: SLF001  its command, whose arguments the names would not fit in
    finally:
        # A copy of this process, in which a mutant broke what a module of tests does when it is imported.
        if os.getpid() != process:
            os._exit(_NOTICED)


def _change_word(node: cst.BaseString) -> Iterable[cst.BaseString]:
    """Change what code compares and looks up, once; the wording of a message is for people to judge."""
    return [] if isinstance(node, cst.SimpleString) and " " in node.value else [*mutators.operator_string(node)][:1]


def _results() -> dict[str, tuple[Path, int | None]]:
    """Where each mutant's file is and pytest's exit status, by its name."""
    results: dict[str, tuple[Path, int | None]] = {}
    for path in walk_mutatable_files():
        data = SourceFileMutationData(path=path)
        data.load()
        results |= {name: (path, code) for name, code in data.exit_code_by_key.items()}
    return results


def _mutant(name: str, path: Path, code: int | None) -> Mutant:
    function = ".".join(part for part in reversed(orig_function_and_class_names_from_key(name)) if part)
    mutant = Mutant(function, status_by_exit_code[code])
    return Mutant(function, mutant.status, get_diff_for_mutant(name, path=path)) if mutant.passed else mutant


def measured(files: list[Path], tests: list[str], sample: int | None, seed: str) -> list[Mutant] | str:
    """Return the mutants of the files, made and tested in another process, or why that failed."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as own:
        try:
            return own.submit(mutants_of, files, tests, sample, seed).result()
        # mutmut exits if the tests fail without a mutant; the other areas are measured all the same.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"


def main() -> None:
    """Print each area's share and its survivors; fail if a share is above the limit, or if an area has none."""
    parser = argparse.ArgumentParser(prog="./just mutants")
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="files or folders under operator/")
    parser.add_argument("--tests", action="append", metavar="PATH", help="run these in place of the area's own tests")
    parser.add_argument("--sample", type=int, default=SETTINGS["sample"], help="mutants of each area")
    parser.add_argument("--all", action="store_const", const=None, dest="sample", help="every mutant: hours")
    parser.add_argument("--seed", default="", help="another text takes another sample")
    asked = parser.parse_args()
    under = [path.resolve() for path in asked.paths]
    known, rows, failed = equivalents(), [], False
    for area, of in SETTINGS["areas"].items():
        if files := files_of(of["files"], under):
            mutants = measured(files, asked.tests or of["tests"], asked.sample, asked.seed)
            if isinstance(mutants, str):
                failed = True
                rows.append(f"{area:<20}   not measured: {mutants} (see standard error)\n")
                continue
            counted = [mutant for mutant in mutants if mutant.change not in known]
            survivors = [mutant for mutant in counted if mutant.passed]
            share = len(survivors) / max(len(counted), 1)
            failed |= share > SETTINGS["survivors"]
            sys.stdout.writelines(f"\n{area}: {each.function} ({each.status})\n{each.diff}\n" for each in survivors)
            columns = (len(mutants), len(counted) - len(survivors), len(mutants) - len(counted), len(survivors))
            rows.append(f"{area:<20}" + "".join(f"{column:>12}" for column in columns) + f"{share:>10.1%}\n")
    if not rows:
        sys.exit(f"[tool.mutants] of pyproject.toml: no area has a file of {', '.join(map(str, asked.paths))}")
    heads = ("mutants", "killed", "equivalent", "survived")
    sys.stdout.writelines([f"\n{'area':<20}" + "".join(f"{head:>12}" for head in heads) + f"{'share':>10}\n", *rows])
    sys.exit(failed)


if __name__ == "__main__":
    main()
