"""`capture validate`, `compare`, `gate` and `report`: evaluate fetched captures, without a cluster."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from specdecode_operator.capture.comparison.compare_arms import compare_capture
from specdecode_operator.capture.comparison.comparison_file import Arm, Comparison, Load
from specdecode_operator.capture.comparison.golden_records import NotComparableError, repetitions_of
from specdecode_operator.capture.comparison.regression import Figure, Limits, Regression, RegressionVerdict, judge
from specdecode_operator.capture.files.formats import DATA_FILES, MANIFEST, CaptureError
from specdecode_operator.capture.files.summary import summarize, summary_text
from specdecode_operator.capture.files.validate import Validation, find, validate_capture, validate_file
from specdecode_operator.cli.options import ExitCode, TextOrJson, fail
from specdecode_operator.cli.outputs import printable_json
from specdecode_operator.cli.terminal import say, say_line
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip


class ValidateExitCode(IntEnum):
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


def validate(paths: Sequence[Path], *, as_json: bool) -> ValidateExitCode:
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
    return ValidateExitCode.BAD_INPUT if errors else ValidateExitCode.OK if passed else ValidateExitCode.PROBLEMS


def _targets(path: Path) -> list[Path]:
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


_ROW = "  {:<18}{:>9}{:>11}{:>9}{:>18}{:>10}{:>10}{:>10}{:>8}"
_HEAD = ("load", "running", "goodput", "change", "95 %", "TTFT P50", "TPOT P50", "TPOT P99", "accept")


class TableOrJson(StrEnum):
    """How to print a comparison."""

    TABLE = "table"
    JSON = "json"


def compare_command(
    folder: Annotated[Path, typer.Argument(help="A capture's folder, with one folder for each arm in it.")],
    *,
    price: Annotated[
        float | None,
        typer.Option("--price-per-gpu-hour", metavar="PRICE", min=0, max=1e6, help="In any currency, for the cost."),
    ] = None,
    output: Annotated[TableOrJson, typer.Option("--output", "-o", help="table or json.")] = TableOrJson.TABLE,
) -> None:
    """Compare the arms of a capture with the first one: whether each pays, by load, with its interval.

    What it prints with -o json is comparison.json, as the capture itself wrote
    it, made anew from the files. No cluster is asked.

    For example: specdecode capture compare captures/demo

    Exits with 0 whatever the verdicts are, 2 when the arms cannot be compared.
    """
    # Comparing takes longer to load than the rest of the command line.

    try:
        comparison = compare_capture(folder, price)
    except CaptureError as error:
        say(f"error: {error}", err=True)
        raise typer.Exit(ExitCode.INVALID) from error
    if output is TableOrJson.JSON:
        typer.echo(printable_json(msgspec.json.format(msgspec.json.encode(comparison), indent=2).decode()))
    else:
        say("\n".join(_lines(comparison)))


def _lines(comparison: "Comparison") -> Iterator[str]:
    baseline, *others = comparison.arms
    for arm in others:
        yield f"{arm.name} against {baseline.name}: {arm.verdict}"
        yield f"  {arm.message}"
        yield _ROW.format(*_HEAD)
        for load in arm.loads:
            plain = next(each for each in baseline.loads if each.phase == load.phase)
            yield _row(plain, f"{clip(load.phase, 14)} *")
            yield _row(load, clip(load.phase, 16))
        yield from _figures(arm, comparison)
        yield ""
    yield f"* {baseline.name}, which the others are compared with; goodput in tokens/s, TTFT and TPOT in ms"
    yield from (f"note: {each}" for each in comparison.notes)


def _row(load: "Load", name: str) -> str:
    compared = load.compared
    change = "" if compared is None or compared.ratio is None else f"{compared.ratio - 1:+.1%}"
    ends = (
        ""
        if compared is None or compared.low is None or compared.high is None
        else (f"{compared.low - 1:+.1%} {compared.high - 1:+.1%}")
    )
    return _ROW.format(
        name,
        _shown(load.running, 1),
        _shown(load.goodput, 1),
        change,
        ends,
        _shown(None if load.ttft_ms is None else load.ttft_ms.p50, 1),
        _shown(None if load.tpot_ms is None else load.tpot_ms.p50, 2),
        _shown(None if load.tpot_ms is None else load.tpot_ms.p99, 2),
        "" if load.acceptance is None else f"{load.acceptance:.0%}",
    ).rstrip()


def _figures(arm: "Arm", comparison: "Comparison") -> Iterator[str]:
    drafting, cache = arm.drafting, arm.prefix_cache
    if drafting is not None:
        positions = " ".join(f"{share:.0%}" for share in drafting.per_position)
        most = "" if drafting.largest_block_efficiency is None else f" of {drafting.largest_block_efficiency}"
        yield (
            f"  acceptance {drafting.acceptance:.1%}, by position {positions}; "
            f"{drafting.block_efficiency:.2f}{most} tokens a verification"
        )
    if cache is not None and cache.hit_rate is not None:
        tax = (
            "" if cache.tax_tokens is None else f"; prefix-cache tax {cache.tax_tokens:,} tokens, {cache.tax_percent} %"
        )
        yield f"  prefix cache {cache.hit_rate:.1%} hits{tax}"
    costs = [
        (each.phase, each.gpu_seconds_per_1000_tokens, each.cost_per_1000_tokens)
        for each in arm.loads
        if each.gpu_seconds_per_1000_tokens is not None
    ]
    if costs:
        said = ", ".join(
            f"{seconds:.3g} s{'' if price is None else f' ({price:.3g})'} in {phase}" for phase, seconds, price in costs
        )
        cost = "" if comparison.price_per_gpu_hour is None else " (and what it costs)"
        yield f"  GPU time for 1,000 tokens{cost} {said}"
    if comparison.slo.given:
        yield f"  within the SLO {sum(each.within_slo for each in arm.loads):,} requests"


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


_MOST_PERCENT: Final = 90


class GateExitCode(IntEnum):
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

    limits = Limits(goodput=goodput, acceptance=acceptance, step_time=step_time, latency=latency)
    try:
        regression = judge(repetitions_of(golden), repetitions_of(found), limits)
    except NotComparableError as error:
        raise typer.BadParameter(str(error)) from error
    as_json = output is TextOrJson.JSON
    say(msgspec.json.format(msgspec.json.encode(regression)).decode() if as_json else _gate_as_text(regression))
    holds = regression.verdict is RegressionVerdict.HOLDS
    raise typer.Exit(GateExitCode.HOLDS if holds else GateExitCode.DOES_NOT_HOLD)


def _gate_as_text(regression: "Regression") -> str:
    rows: list[tuple[str, ...]] = [("figure", "golden", "new", "change", "interval", "may be lost", "verdict")]
    rows += [_gate_row(each) for each in regression.figures]
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


def _gate_row(figure: "Figure") -> tuple[str, ...]:
    change = "" if figure.change_percent is None else f"{figure.change_percent:+.1f} %"
    interval = ""
    if figure.low_percent is not None and figure.high_percent is not None:
        interval = f"{figure.low_percent:+.1f} to {figure.high_percent:+.1f} %"
    limit = "" if figure.loss_limit_percent is None else f"{figure.loss_limit_percent:g} %"
    verdict = figure.verdict.value if figure.verdict else "not known"
    golden, found = ("" if each is None else f"{each:,.4g}" for each in (figure.golden, figure.found))
    return f"{figure.name} ({figure.unit})", golden, found, change, interval, limit, verdict


_SHOWN_WARNINGS = 10


def report(  # noqa: PLR0913  each is an option
    captured: Sequence[Path],
    replayed: Sequence[Path],
    page: Path,
    *,
    png: Path | None = None,
    svg: Path | None = None,
    perfetto: Path | None = None,
) -> None:
    """Write what was asked for, and say what is in it, and what is left out and why."""
    try:
        from specdecode_operator.capture.report.report import Outputs, ReportError, make_report  # noqa: PLC0415  heavy
        from specdecode_operator.capture.trace_reader import RecordingError  # noqa: PLC0415
    except ImportError:
        fail("matplotlib is not installed: pip install '.[plot]' in a clone")
    try:
        made = make_report(captured, replayed, Outputs(page, png=png, svg=svg, perfetto=perfetto))
    except (RecordingError, ReportError) as error:
        fail(error)
    for warning in made.warnings[:_SHOWN_WARNINGS]:
        say(f"warning: {warning}", err=True)
    for each in made.left_out:
        say(f"left out: {each.title}: {each.why}")
    say(f"{page}: {len(made.pictures)} figure{'s' * (len(made.pictures) != 1)}")
    for what in (png, svg, perfetto):
        if what is not None:
            say(f"{what}: written")
