"""Validates files of captures, without a cluster, and prints what is wrong with them."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
import typer

from specdecode_operator.capture.files.errors import CaptureError
from specdecode_operator.capture.files.formats import DATA_FILES, MANIFEST
from specdecode_operator.capture.validation.summary import summarize, summary_text
from specdecode_operator.capture.validation.validate import Validation, find, validate_capture, validate_file
from specdecode_operator.cli.outputs.printing import printable_json
from specdecode_operator.cli.terminal import say, say_line
from specdecode_operator.problems import printable


class ExitCode(IntEnum):
    """What the shell gets."""

    OK = 0
    PROBLEMS = 1
    BAD_INPUT = 2


class _BadInputError(Exception):
    """A path that holds nothing to validate."""


@dataclass(frozen=True)
class _Answer:
    """One thing that was validated."""

    path: Path
    validation: Validation


def validate(paths: Sequence[Path], *, as_json: bool) -> ExitCode:
    """Print what is wrong with the files at these paths; return what the shell gets."""
    answers: list[_Answer] = []
    errors: list[str] = []
    for path in paths:
        try:
            answers += [_Answer(target, _validated(target)) for target in _targets(path)]
        except (_BadInputError, CaptureError) as error:
            errors.append(str(error))
        except OSError as error:
            errors.append(f"{error.filename or path}: {error.strerror}")
    if as_json:
        typer.echo(printable_json(_as_json(answers)))
    elif answers:
        say("\n\n".join(map(_as_text, answers)))
    for message in errors:
        say_line(f"error: {message}", err=True)
    passed = all(answer.validation.passed for answer in answers)
    return ExitCode.BAD_INPUT if errors else ExitCode.OK if passed else ExitCode.PROBLEMS


def _targets(path: Path) -> list[Path]:
    """Return what to validate as one: a file, a folder with a capture's files, or the captures and files below it."""
    if not path.exists():
        raise _BadInputError(f"{path}: is not there: name a file or a folder")
    if path.is_file() or any(find(path, name) for name in (MANIFEST, *DATA_FILES)):
        return [path]
    found = [manifest.parent for manifest in sorted(path.rglob(MANIFEST))] or list(_files(path))
    if not found:
        raise _BadInputError(f"{path}: holds neither a capture nor a .jsonl or .jsonl.gz file: name another folder")
    return found


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name.endswith((".jsonl", ".jsonl.gz")):
            yield path


def _validated(path: Path) -> Validation:
    return validate_file(path) if path.is_file() else validate_capture(path)


def _as_text(answer: _Answer) -> str:
    found = answer.validation
    lines = [f"{answer.path}: {'ok' if found.passed else 'PROBLEMS'}"]
    for report in found.files:
        counts = [] if report.file == MANIFEST else [_counted(report.lines, "line")]
        counts += [_counted(report.broken, "problem")] if report.broken else []
        lines.append(f"  {report.file}: {', '.join(counts) or 'ok'}")
        for problem in report.problems:
            place = f"line {problem.line}: " if problem.line else ""
            lines.append(f"    {place}{problem.message} [{problem.rule}]")
        if report.broken > len(report.problems):
            lines.append(f"    and {report.broken - len(report.problems)} more")
        lines += [f"    note: {note}" for note in report.notes]
    for name, gate in found.gates.items():
        limit = f" (limit {gate.limit:g})" if gate.limit is not None else ""
        lines.append(f"  {'pass' if gate.passed else 'FAIL'}  {name} {gate.value:g}{limit}: {gate.why}")
    if found.client is not None and found.trace is not None:
        lines += [f"  {line}" for line in summary_text(summarize(found, _sizes(answer.path))).splitlines()]
    return "\n".join(map(printable, lines))


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _as_json(answers: list[_Answer]) -> str:
    return msgspec.json.format(msgspec.json.encode({"validated": [_document(each) for each in answers]})).decode()


def _document(answer: _Answer) -> dict[str, Any]:
    found = answer.validation
    whole = found.client is not None and found.trace is not None
    return {
        "path": str(answer.path),
        "passed": found.passed,
        "files": [asdict(report) for report in found.files],
        "gates": found.gates,
        "summary": summarize(found, _sizes(answer.path)) if whole else None,
    }


def _sizes(folder: Path) -> int:
    return sum(path.stat().st_size for name in DATA_FILES if (path := find(folder, name)) is not None)
