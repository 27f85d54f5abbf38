"""`specdecode estimate`: the budget of many engine configurations, one a line."""

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from specdecode_operator.cli.options import CALIBRATION_HELP, ExitCode, fail

if TYPE_CHECKING:
    from specdecode_operator.sizing.pair.calibration import Calibration

STANDARD_STREAM = "-"


def estimate_command(
    cases: Annotated[str, typer.Option("--in", help="JSON lines, one configuration each; - for standard input.")],
    results: Annotated[str, typer.Option("--out", help="Where results go, a line a case; - for standard output.")],
    *,
    calibration: Annotated[str | None, typer.Option(help=CALIBRATION_HELP)] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail (2) where a line has an error.")] = False,
) -> None:
    """Size each configuration; a bad line gets an error in its place, and the batch goes on.

    Exits with 0 when all results are written, 2 when a file cannot be used
    or, with --strict, when a line has an error.
    """
    measured = _read_calibration(calibration)
    try:
        with contextlib.ExitStack() as streams:
            source: TextIO = sys.stdin
            if cases != STANDARD_STREAM:
                source = streams.enter_context(Path(cases).open(encoding="utf-8", errors="replace"))
            lines = list(source)
            target: TextIO = sys.stdout
            if results != STANDARD_STREAM:
                target = streams.enter_context(Path(results).open("w", encoding="utf-8"))
            total, bad = _write(estimated(lines, measured), target)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}: name a file that can be used, or -")
    if bad:
        typer.echo(f"{bad} of {total} cases have an error", err=True)
        if strict:
            raise typer.Exit(ExitCode.INVALID)


def estimated(lines: Iterable[str], calibration: "Calibration | None" = None) -> Iterator[dict[str, Any]]:
    """Return the result of each line that is not blank."""
    # Sizing takes longer to load than the rest of the command line.
    from specdecode_operator.sizing.pair.calibration import UNCALIBRATED  # noqa: PLC0415

    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _estimated(number, line, calibration or UNCALIBRATED)


def _read_calibration(file: str | None) -> "Calibration | None":
    if file is None:
        return None
    from specdecode_operator.cli.input_files import DocumentError, read_calibration  # noqa: PLC0415

    try:
        return read_calibration(file)
    except DocumentError as error:
        fail(f"--calibration: {error}")


def _write(results: Iterator[dict[str, Any]], target: TextIO) -> tuple[int, int]:
    total = bad = 0
    for result in results:
        total += 1
        bad += result["error"] is not None
        target.write(json.dumps(result, ensure_ascii=False) + "\n")
    return total, bad


def _estimated(number: int, line: str, calibration: "Calibration") -> dict[str, Any]:
    from specdecode_operator.estimate.estimate import size_case  # noqa: PLC0415

    try:
        case = json.loads(line)
    except json.JSONDecodeError as error:
        return {"id": None, "error": f"line {number}: is no JSON: {error.msg} at character {error.pos + 1}"}
    except (ValueError, RecursionError) as error:
        return {"id": None, "error": f"line {number}: cannot be read: {error}"}
    identity = _identity(case)
    try:
        return {"id": identity, **size_case(case, calibration)}
    except (ValueError, RecursionError) as error:
        return {"id": identity, "error": str(error)}
    except Exception as error:  # noqa: BLE001  one case must never stop the batch, whatever it brings to light
        return {"id": identity, "error": f"sizing failed on this case ({type(error).__name__}: {error}), please report"}


def _identity(case: Any) -> str | int | None:
    """Return the id of a case where it can be written back as it is."""
    identity = case.get("id") if isinstance(case, dict) else None
    return identity if isinstance(identity, str | int) else None
