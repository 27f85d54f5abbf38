"""`specdecode capture gate`: an engine against the golden capture of an earlier one."""

from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from specdecode_operator.cli.options import TextOrJson
from specdecode_operator.cli.terminal import say
from specdecode_operator.problems import printable

if TYPE_CHECKING:
    from specdecode_operator.capture.comparison.regression import Figure, Regression

_MOST_PERCENT: Final = 90


class ExitCode(IntEnum):
    """What the shell gets."""

    HOLDS = 0
    DOES_NOT_HOLD = 1


def gate_command(  # noqa: PLR0913  options of a command
    golden: Annotated[Path, typer.Argument(help="Folder of the golden capture.")],
    found: Annotated[Path, typer.Argument(metavar="NEW", help="Folder of a capture with the same workload and seed.")],
    *,
    goodput: Annotated[int, typer.Option(help="Goodput that may be lost, in percent.", min=1, max=_MOST_PERCENT)] = 5,
    acceptance: Annotated[int, typer.Option(help="The same of acceptance.", min=1, max=_MOST_PERCENT)] = 10,
    step_time: Annotated[int, typer.Option(help="By how much steps may be longer.", min=1, max=_MOST_PERCENT)] = 5,
    latency: Annotated[int, typer.Option(help="The same of TTFT and TPOT.", min=1, max=_MOST_PERCENT)] = 20,
    output: Annotated[TextOrJson, typer.Option("--output", "-o", help="text or json.")] = TextOrJson.TEXT,
) -> None:
    """Say whether an engine serves as well as the one of an earlier capture of the same prompts.

    Goodput, acceptance by position, step time by requests running, latency and,
    where tokens were recorded, greedy answers, each with its interval. A loss of
    the limit does not pass, and half of it is an alarm where chance does not
    explain it: this is what spec.rollout.gate asks.

    For example: specdecode capture gate captures/golden captures/new

    Exits with 0 when it holds, 1 when it is worse or cannot be told, 2 when the
    captures cannot be compared.
    """
    # Judging takes longer to load than the rest of the command line.
    from specdecode_operator.capture.comparison.answers import NotComparableError, repetitions_of  # noqa: PLC0415
    from specdecode_operator.capture.comparison.regression import Limits, RegressionVerdict, judge  # noqa: PLC0415

    limits = Limits(goodput=goodput, acceptance=acceptance, step_time=step_time, latency=latency)
    try:
        regression = judge(repetitions_of(golden), repetitions_of(found), limits)
    except NotComparableError as error:
        raise typer.BadParameter(str(error)) from error
    as_json = output is TextOrJson.JSON
    say(msgspec.json.format(msgspec.json.encode(regression)).decode() if as_json else _as_text(regression))
    holds = regression.verdict is RegressionVerdict.HOLDS
    raise typer.Exit(ExitCode.HOLDS if holds else ExitCode.DOES_NOT_HOLD)


def _as_text(regression: "Regression") -> str:
    rows: list[tuple[str, ...]] = [("figure", "golden", "new", "change", "interval", "may be lost", "verdict")]
    rows += [_row(each) for each in regression.figures]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [_line(row, widths) for row in rows]
    notes = [f"note: {each}" for each in regression.notes]
    return "\n".join(map(printable, [*lines, "", regression.message, *notes]))


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    first, *others = (
        cell.ljust(width) if place in {0, len(row) - 1} else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join([first, *others]).rstrip()


def _row(figure: "Figure") -> tuple[str, ...]:
    change = "" if figure.change_percent is None else f"{figure.change_percent:+.1f} %"
    interval = ""
    if figure.low_percent is not None and figure.high_percent is not None:
        interval = f"{figure.low_percent:+.1f} to {figure.high_percent:+.1f} %"
    limit = "" if figure.loss_limit_percent is None else f"{figure.loss_limit_percent:g} %"
    verdict = figure.verdict.value if figure.verdict else "not known"
    golden, found = ("" if each is None else f"{each:,.4g}" for each in (figure.golden, figure.found))
    return f"{figure.name} ({figure.unit})", golden, found, change, interval, limit, verdict
