"""`specdecode plan`: show where a deployment would run, without a cluster or a GPU."""

from pathlib import Path
from typing import Annotated, Final

import typer

from specdecode_operator.cli import options
from specdecode_operator.cli.deployment_options import Description, with_description
from specdecode_operator.cli.options import HiddenName, PlanForm, ended, fail, refuse_written
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.cli.text_files import STANDARD_INPUT, DocumentError
from specdecode_operator.sizing.arithmetic import MIB

_BATCH_OPTIONS: Final = frozenset({"batch", "out", "hub", "calibration", "strict"})
_MOST_MIB_PER_S: Final = 2**20


@with_description
def plan_command(  # noqa: PLR0913  each is an option
    context: typer.Context,
    files: options.FilesArgument = None,
    *,
    file: options.FilesOption = None,
    batch: Annotated[
        str | None,
        typer.Option(
            "--batch",
            HiddenName("--in"),
            metavar="FILE",
            help="Size engine configurations instead of objects: one JSON object per line; - for standard input.",
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the formula and numbers of each memory term at the best place.")
    ] = False,
    matrix: Annotated[bool, typer.Option("--matrix", help="Show every product and split, not only the best.")] = False,
    nodes: options.NodesOption = None,
    model_config: options.ModelConfigOption = None,
    facts: options.FactsOption = None,
    hub: options.HubOption = False,
    calibration: options.CalibrationOption = None,
    read_rate: Annotated[
        int | None,
        typer.Option(
            metavar="MIB_PER_S",
            min=1,
            max=_MOST_MIB_PER_S,
            help="Speed at which engines read weights from storage, in MiB/s, for the start-up time. By default a range"
            " from slow volumes to the page cache.",
        ),
    ] = None,
    download_rate: Annotated[
        int | None,
        typer.Option(
            metavar="MIB_PER_S",
            min=1,
            max=_MOST_MIB_PER_S,
            help="Speed of downloads from the model hub, in MiB/s, for the start-up time. By default a range from 1 to"
            " 10 Gbit/s.",
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Exit with 3 if there are warnings, including tight fits. With --batch, exit with 2 if a line has an "
            "error.",
        ),
    ] = False,
    output: Annotated[
        PlanForm,
        typer.Option("--output", "-o", help="Format: table, json, yaml, or markdown for CI summaries."),
    ] = PlanForm.TABLE,
    out: Annotated[
        str, typer.Option(metavar="FILE", help="With --batch: file for the results, or - for standard output.")
    ] = STANDARD_INPUT,
    allow_pod_template: options.AllowPodTemplateOption = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the memory of each candidate to FILE.png or FILE.svg.")
    ] = None,
    description: Description,
) -> None:
    """Show where each object would run, and what to change if it does not fit.

    Objects of other projects that run vLLM are planned without changes:
    Deployment, StatefulSet, Pod, LeaderWorkerSet, LLMInferenceService,
    InferenceService, DynamoGraphDeployment, VLLMRuntime and RayService. For these,
    --engine-version sets the version of vLLM if the image tag does not contain it.

    Instead of a file, --model and the options after it describe an object:
    specdecode plan --model meta-llama/Llama-3.1-70B-Instruct --gpu H200 --tp 2

    Exits with 0 when all fit (tight ones with a warning), 2 for invalid
    input, 3 with --strict when there are warnings, 4 when one does not fit,
    5 when a model is not in the catalogue (in a cluster, the operator would
    read its config.json), or a server of another project cannot be read.
    With --batch: 0 when all results are written, 2 when a file cannot be used
    or, with --strict, when a line has an error.
    """
    if batch is not None:
        from specdecode_operator.cli.plan.batch import size_batch  # noqa: PLC0415

        others = {each.name or "" for each in context.command.params} - _BATCH_OPTIONS
        refuse_written(context, others, "cannot be used with --batch; leave it out")
        raise typer.Exit(size_batch(batch, out, hub=hub, calibration=calibration, strict=strict))
    # A batch needs none of these modules; importing them takes longer than sizing 1,000 lines.
    from specdecode_operator.cli.input_files import InputOptions  # noqa: PLC0415
    from specdecode_operator.cli.plan.answers import ask, exit_code, say_what_is_missing  # noqa: PLC0415
    from specdecode_operator.cli.plan.objects import described_or_read, print_answers, say_notes  # noqa: PLC0415
    from specdecode_operator.sizing.startup_time import Rates  # noqa: PLC0415

    refuse_written(context, {"out"}, "needs --batch")
    if explain:
        refuse_written(context, {"matrix"}, "cannot be used with --explain; leave one out")
    if explain and output is PlanForm.MARKDOWN:
        fail("--output: markdown: has no formulas; use another format, or leave out --explain")
    reading = described_or_read(description, options.sources(files, file, needed=description.is_empty))
    if description.gpu and nodes:
        fail(f"--gpu: {description.gpu[0]}: --nodes defines the GPUs; leave one of the two out")
    with ended(DocumentError):
        # With files, they replace the products that the objects name.
        products = description.products if description.by_memory or description.model is None else ()
    models, allowed = options.hub_models(wanted=hub), options.allowed_names(allow_pod_template)
    rates = Rates(*(None if each is None else each * MIB for each in (download_rate, read_rate)))
    result = ask(
        reading,
        InputOptions(nodes, model_config or [], calibration, facts or [], models, allowed, rates),
        products=products,
        every_precision=not explain and (matrix or output in (PlanForm.JSON, PlanForm.YAML)),
    )
    print_answers(result, output, explain=explain, matrix=matrix)
    say_notes(reading, gpu=not (description.gpu or nodes))
    say_what_is_missing(result.errors, result.unknown, hub=hub)
    corrected = any(place.budget.calibration for each in result.answers for place in each.matrix)
    if calibration and result.answers and not corrected:
        say_line(f"warning: --calibration: {calibration}: has no entry for these engines", err=True)
    if plot is not None:
        try:
            from specdecode_operator.cli.plan.plot import PlotError, draw  # noqa: PLC0415
        except ImportError:
            fail("--plot: matplotlib is not installed: pip install '.[plot]' in a clone")
        with ended(PlotError, at="--plot: "):
            draw(result.answers, plot, matrix=matrix)
    raise typer.Exit(exit_code(result, strict=strict))
