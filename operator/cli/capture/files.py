"""`specdecode capture compare`: the arms of a capture, from files that were fetched."""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdecode_operator.cli.options import ExitCode
from specdecode_operator.cli.outputs.printing import printable_json
from specdecode_operator.cli.terminal import say
from specdecode_operator.redaction import clip

if TYPE_CHECKING:
    from specdecode_operator.capture.comparison.result import Arm, Comparison, Load

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
    import msgspec  # noqa: PLC0415

    from specdecode_operator.capture.comparison.compare import compare_capture  # noqa: PLC0415
    from specdecode_operator.capture.files.errors import CaptureError  # noqa: PLC0415

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
