"""How a command about memory ends: what it says on standard error, and its exit code."""

from typing import TYPE_CHECKING

from specdecode_operator.cli.options import ExitCode
from specdecode_operator.cli.terminal import say, say_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from specdecode_operator.cli.plan.answers import Answers
    from specdecode_operator.cli.plan.unknown import UnknownModel
    from specdecode_operator.cli.text_files import DocumentError


def say_what_is_missing(errors: "Iterable[DocumentError]", unknown: "Sequence[UnknownModel]", *, hub: bool) -> None:
    """Say on standard error what could not be read, and all models at once that are unknown, even to the hub."""
    for error in errors:
        say_line(f"error: {error}", err=True)
    if unknown:
        from specdecode_operator.cli.plan.unknown import how_to_resolve  # noqa: PLC0415

        say(how_to_resolve(unknown, asked_hub=hub), err=True)


def exit_code(result: "Answers", *, strict: bool) -> ExitCode:
    """Return what the shell gets; says on standard error what is tight, and all warnings."""
    from specdecode_operator.cli.plan import answers  # noqa: PLC0415

    for answer in result.answers:
        if answer.verdict == answers.TIGHT:
            say_line(f"warning: {answer.document.name} is tight: {answer.explanation}", err=True)
    warnings = [(answer.document.name, warning) for answer in result.answers for warning in answer.warnings]
    for name, warning in warnings:
        say_line(f"{'error: --strict' if strict else 'warning'}: {name}: {warning}", err=True)
    codes = {
        answers.FITS: ExitCode.OK,
        answers.TIGHT: ExitCode.TIGHT if strict else ExitCode.OK,
        answers.DOES_NOT_FIT: ExitCode.DOES_NOT_FIT,
        answers.UNKNOWN: ExitCode.UNKNOWN,
        answers.INVALID: ExitCode.INVALID,
    }
    code = codes[result.verdict]
    return ExitCode.TIGHT if strict and warnings and code is ExitCode.OK else code
