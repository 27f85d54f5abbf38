"""`specdecode plan`: show where a deployment would run, without a cluster or a GPU."""

import gc
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdecode_operator.cli import options
from specdecode_operator.cli.options import TableOrData, fail
from specdecode_operator.cli.outputs import print_data
from specdecode_operator.cli.plan.answers import exit_code, say_what_is_missing
from specdecode_operator.cli.terminal import line_width, say, say_line
from specdecode_operator.cli.text_files import DocumentError

if TYPE_CHECKING:
    from specdecode_operator.cli.plan.answers import Answers


class Form(StrEnum):
    """How to print."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    MARKDOWN = "markdown"


def plan_command(  # noqa: PLR0913  each is an option
    files: options.FilesArgument = None,
    *,
    file: options.FilesOption = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Show every product and split, not the best alone.")] = False,
    nodes: options.NodesOption = None,
    model_config: options.ModelConfigOption = None,
    facts: options.FactsOption = None,
    hub: options.HubOption = False,
    calibration: options.CalibrationOption = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail (3) also for warnings: tight is one.")] = False,
    output: Annotated[
        Form, typer.Option("--output", "-o", help="table, json, yaml, or markdown for summaries of CI.")
    ] = Form.TABLE,
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
    input, 3 with --strict when there are warnings, 4 when one does not fit,
    5 when a model is unknown here, which the operator would read in a
    cluster.
    """
    # Sizing and the API's models take longer to load than the rest of the command line,
    # and a tenth longer where garbage is looked for meanwhile.
    gc.disable()
    from specdecode_operator.cli.deployment_options import Description, described_or_read  # noqa: PLC0415
    from specdecode_operator.cli.plan.answers import ask  # noqa: PLC0415

    # Nor is any of it garbage later: a file of a megabyte would have it looked through twenty times.
    gc.freeze()
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
    shows_all = matrix or output in (Form.JSON, Form.YAML)
    reading = described_or_read(description, options.sources(files, file, needed=description.is_empty))
    if gpu and nodes:
        fail(f"--gpu: {gpu[0]}: --nodes says which GPUs there are: remove one of the two")
    try:
        # With files they stand in for the products that those name.
        products = description.products if description.by_memory or description.model is None else ()
    except DocumentError as error:
        fail(error)
    models, allowed = options.hub_models(wanted=hub), options.allowed_names(allow_pod_template)
    result = ask(
        reading,
        nodes,
        model_config or [],
        calibration,
        products=products,
        models=models,
        facts=facts or [],
        allowed=allowed,
        every_precision=shows_all,
    )
    if output is Form.TABLE:
        _print_text(result, matrix=matrix)
    elif output is Form.MARKDOWN:
        from specdecode_operator.cli.plan.text import plan_markdown  # noqa: PLC0415

        say(plan_markdown(result, matrix=matrix))
    else:
        from specdecode_operator.cli.plan.data import plan_data  # noqa: PLC0415

        print_data(plan_data(result), TableOrData(output.value))
    say_what_is_missing(result.errors, result.unknown, hub=hub)
    if calibration and result.answers and not any(each.budget.calibration for each in result.candidates):
        say_line(f"warning: --calibration: {calibration}: none of its entries is of engines like these", err=True)
    if plot is not None:
        _draw(result, plot, matrix=matrix)
    raise typer.Exit(exit_code(result, strict=strict))


def _print_text(result: "Answers", *, matrix: bool) -> None:
    from specdecode_operator.cli.plan.text import plan_text, summary_lines  # noqa: PLC0415

    width = line_width()
    if matrix or len(result.answers) == 1:
        texts = (plan_text(each, matrix=matrix, width=width) for each in result.answers)
        say("\n\n".join(texts), nl=bool(result.answers), verdicts=True)
    elif result.answers:
        say("\n".join(summary_lines(result.answers)), verdicts=True)


def _draw(result: "Answers", file: Path, *, matrix: bool) -> None:
    from specdecode_operator.cli.plan.plot import PlotError, draw  # noqa: PLC0415

    try:
        draw(result.answers, file, matrix=matrix)
    except PlotError as error:
        fail(f"--plot: {error}")
