"""Options, exit codes and errors that several commands share."""

from enum import IntEnum, StrEnum
from typing import Annotated, Final, NoReturn

import typer

CALIBRATION_HELP: Final = (
    "Calibration file, as specdecode calibrate writes it: what it measured corrects the estimates."
)
MODEL_CONFIG_HELP: Final = "ID=PATH: the config.json of a model that the catalogue does not know. May be repeated."

Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig. Absent: the current one.")]


class ExitCode(IntEnum):
    """What the shell gets; the names are those of the verdicts of a plan."""

    OK = 0
    INVALID = 2
    TIGHT = 3
    DOES_NOT_FIT = 4


class TextOrJson(StrEnum):
    """How to print an answer."""

    TEXT = "text"
    JSON = "json"


def fail(message: object) -> NoReturn:
    """Say on standard error what is wrong, and end with the exit code of invalid input."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(ExitCode.INVALID)
