"""`specdecode replay compare`: two recordings held against each other."""

from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from specdecode_operator.cli.options import TextOrJson
from specdecode_operator.cli.replay.fit import NO_NUMPY
from specdecode_operator.cli.terminal import say
from specdecode_operator.problems import printable
from specdecode_operator.replay.recording.read import RecordingError, read_recording
from specdecode_operator.replay.recording.recording import Recording

if TYPE_CHECKING:
    from specdecode_operator.replay.compare.comparison import Comparison, Figure


class ExitCode(IntEnum):
    """What the shell gets."""

    OK = 0
    TOO_FAR = 1


def compare_command(
    first: Annotated[Path, typer.Argument(help="A capture's folder, or a trace.")],
    second: Annotated[Path, typer.Argument(help="What is held against it, such as its replay.")],
    *,
    output: Annotated[TextOrJson, typer.Option("--output", "-o", help="text or json.")] = TextOrJson.TEXT,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 where a figure is farther than it may be.")
    ] = False,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Leave out lines that cannot be read.")
    ] = False,
) -> None:
    """Say how far one recording is from another: times, throughput, burst sizes, acceptance.

    For example: specdecode replay compare captures/demo replayed
    """
    try:
        recordings = [read_recording(path, skip_bad_lines=skip_bad_lines) for path in (first, second)]
        found = _compared(*recordings)
    except RecordingError as error:
        raise typer.BadParameter(str(error)) from error
    say(msgspec.json.format(msgspec.json.encode(found)).decode() if output is TextOrJson.JSON else _as_text(found))
    if check and not found.passed:
        raise typer.Exit(ExitCode.TOO_FAR)


def _compared(first: Recording, second: Recording) -> "Comparison":
    try:
        from specdecode_operator.replay.compare.comparison import compare  # noqa: PLC0415  numpy is an extra
    except ImportError as error:
        raise typer.BadParameter(NO_NUMPY) from error
    return compare(first, second)


def _as_text(found: "Comparison") -> str:
    wide = max(len(figure.name) for figure in found.figures)
    counts = " and ".join(f"{count:,}" for count in found.requests)
    lines = [f"{printable(found.first)} against {printable(found.second)}: {counts} requests"]
    lines += [f"  {_row(figure, wide)}" for figure in found.figures]
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def _row(figure: "Figure", wide: int) -> str:
    values = f"{figure.first:>10.2f}  {figure.second:>10.2f}  {figure.unit:<8}"
    limit = "" if figure.limit is None else f"  (limit {figure.limit:g})"
    verdict = "    " if figure.limit is None else "ok  " if figure.passed else "FAR "
    return f"{verdict}{figure.name:<{wide}}  {values}  {figure.difference:>+8.2f} {figure.difference_unit}{limit}"
