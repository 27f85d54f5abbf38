"""`specdecode plan`: where would it run, without a cluster and without a GPU."""

import gc
import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdecode_operator.cli import options
from specdecode_operator.cli.options import ExitCode, fail, say
from specdecode_operator.cli.terminal import line_width
from specdecode_operator.cli.text_files import DocumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pydantic import BaseModel

    from specdecode_operator.cli.plan.answers import Answers
    from specdecode_operator.cli.plan.unknown import Models, UnknownModel


class Output(StrEnum):
    """How to print."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


def plan_command(  # noqa: PLR0913  each is an option
    files: options.FilesArgument = None,
    *,
    file: options.FilesOption = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Show every product and split, not the best alone.")] = False,
    nodes: options.NodesOption = None,
    model_config: options.ModelConfigOption = None,
    hub: options.HubOption = False,
    calibration: options.CalibrationOption = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail (3) also where it is tight.")] = False,
    output: Annotated[Output, typer.Option("--output", "-o", help="table, json or yaml.")] = Output.TABLE,
    allow_pod_template: options.AllowPodTemplateOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the memory of each candidate: FILE.png or FILE.svg.")] = None,
    model: options.ModelOption = None,
    draft: options.DraftOption = None,
    method: options.MethodOption = None,
    num_speculative_tokens: options.TokensOption = None,
    gpu: options.GpuOption = None,
    tp: options.TensorOption = None,
    pp: options.PipelineOption = None,
    dp: options.DataOption = None,
    max_model_len: options.LengthOption = None,
    quantization: options.QuantizationOption = None,
    kv_cache_dtype: options.KvCacheOption = None,
    engine_version: options.VersionOption = None,
) -> None:
    """Say where each object would run, and what to change where it does not fit.

    Or what --model and the options after it describe, without a file:
    specdecode plan --model meta-llama/Llama-3.1-70B-Instruct --gpu H200 --tp 2

    Exits with 0 when all fit (tight ones with a warning), 2 for invalid
    input, 3 with --strict when one is tight, 4 when one does not fit, 5 when
    a model is unknown here, which the operator would read in a cluster.
    """
    # Sizing and the API's models take longer to load than the rest of the command line,
    # and a tenth longer where garbage is looked for meanwhile.
    gc.disable()
    from specdecode_operator.cli.described import Description, described_or_read  # noqa: PLC0415
    from specdecode_operator.cli.plan.answers import ask  # noqa: PLC0415

    gc.enable()

    description = Description(
        model=model,
        draft=draft,
        method=method,
        num_speculative_tokens=num_speculative_tokens,
        gpus=tuple(gpu or ()),
        tensor=tp,
        pipeline=pp,
        data=dp,
        max_model_len=max_model_len,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        engine_version=engine_version,
    )
    shows_all = matrix or output is not Output.TABLE
    reading = described_or_read(description, sources(files, file, needed=description.is_empty))
    if gpu and nodes:
        fail(f"--gpu: {gpu[0]}: --nodes says which GPUs there are: remove one of the two")
    try:
        # With files they stand in for the products that those name.
        products = description.products if description.by_memory or description.model is None else ()
    except DocumentError as error:
        fail(error)
    models, allowed = hub_models(wanted=hub), options.allowed_names(allow_pod_template)
    result = ask(
        reading,
        nodes,
        model_config or [],
        calibration,
        products=products,
        models=models,
        allowed=allowed,
        every_precision=shows_all,
    )
    if output is Output.TABLE:
        _print_text(result, matrix=matrix)
    else:
        from specdecode_operator.cli.plan.data import plan_data  # noqa: PLC0415

        print_data(plan_data(result), output)
    say_what_is_missing(result.errors, result.unknown, hub=hub)
    if calibration and result.answers and not any(each.budget.calibration for each in result.candidates):
        say(f"warning: --calibration: {calibration}: none of its entries is of engines like these", err=True)
    if plot is not None:
        _draw(result, plot, matrix=matrix)
    raise typer.Exit(exit_code(result, strict=strict))


def sources(files: list[str] | None, with_option: list[str] | None, *, needed: bool = True) -> list[str]:
    """Return the files that are named, with -f or without."""
    named = [*(files or []), *(with_option or [])]
    if needed and not named:
        raise typer.BadParameter("name a file, a folder, or - for standard input", param_hint="-f FILE")
    return named


def hub_models(*, wanted: bool) -> "Models | None":
    """Return the models of the hub, if they are wanted: nothing else opens a connection."""
    if not wanted:
        return None
    from specdecode_operator.cli.hub.models import HubModels  # noqa: PLC0415

    return HubModels()


def say_what_is_missing(errors: "Iterable[DocumentError]", unknown: "Sequence[UnknownModel]", *, hub: bool) -> None:
    """Say on standard error what could not be read, and all models at once that are unknown, even to the hub."""
    for error in errors:
        say(f"error: {error}", err=True)
    if unknown:
        from specdecode_operator.cli.plan.unknown import how_to_resolve  # noqa: PLC0415

        say(how_to_resolve(unknown, asked_hub=hub), err=True)


def exit_code(result: "Answers", *, strict: bool) -> ExitCode:
    """Return what the shell gets; says on standard error what is tight."""
    from specdecode_operator.cli.plan import answers  # noqa: PLC0415

    for answer in result.answers:
        if answer.verdict == answers.TIGHT:
            say(f"warning: {answer.document.name} is tight: {answer.explanation}", err=True)
    codes = {
        answers.FITS: ExitCode.OK,
        answers.TIGHT: ExitCode.TIGHT if strict else ExitCode.OK,
        answers.DOES_NOT_FIT: ExitCode.DOES_NOT_FIT,
        answers.UNKNOWN: ExitCode.UNKNOWN,
        answers.INVALID: ExitCode.INVALID,
    }
    return codes[result.verdict]


def _print_text(result: "Answers", *, matrix: bool) -> None:
    from specdecode_operator.cli.plan.text import plan_text, summary_lines  # noqa: PLC0415

    width = line_width()
    if matrix or len(result.answers) == 1:
        texts = (plan_text(each, matrix=matrix, width=width) for each in result.answers)
        say("\n\n".join(texts), nl=bool(result.answers), verdicts=True)
    elif result.answers:
        say("\n".join(summary_lines(result.answers)), verdicts=True)


def print_data(data: "BaseModel", output: Output) -> None:
    """Print an answer for programs."""
    plain = data.model_dump(mode="json")
    if output is Output.JSON:
        typer.echo(json.dumps(plain, indent=2, ensure_ascii=False))
    else:
        import yaml  # noqa: PLC0415

        typer.echo(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), nl=False)


def _draw(result: "Answers", file: Path, *, matrix: bool) -> None:
    from specdecode_operator.cli.plan.plot import PlotError, draw  # noqa: PLC0415

    try:
        draw(result.answers, file, matrix=matrix)
    except PlotError as error:
        fail(f"--plot: {error}")
