"""`specdecode calibrate`: measure real engines, and write down how far the predictions were off."""

from pathlib import Path
from typing import Annotated, Final

import typer

from specdecode_operator.cli.options import ModelConfigOption, fail
from specdecode_operator.cli.terminal import say

_PRODUCT_HELP: Final = "GPU as the node label nvidia.com/gpu.product has it, such as NVIDIA-H200, or H200."
_LOG_HELP: Final = "Log of an engine's start, from its first line on; needs no GPU. May be repeated."
_DEPLOYMENT_HELP: Final = "Output of kubectl get sdd NAME -o yaml, of an object whose engines serve. May be repeated."
_MODEL_HELP: Final = "Run vLLM with dummy weights of this model: hub id, or a folder with its config.json."
_DRAFT_HELP: Final = "Also measure with this draft model: hub id or folder."
_SHAPE_HELP: Final = "Run with SEQUENCESxBATCHED_TOKENS, such as 256x8192. May be repeated."


def calibrate_command(  # noqa: PLR0913  each is an option
    *,
    out: Annotated[Path, typer.Option("--output", "-o", help="Calibration file; entries are added to it.")],
    product: Annotated[str | None, typer.Option(help=_PRODUCT_HELP)] = None,
    from_deployment: Annotated[list[str] | None, typer.Option(help=_DEPLOYMENT_HELP)] = None,
    from_log: Annotated[list[Path] | None, typer.Option(help=_LOG_HELP)] = None,
    model: Annotated[str | None, typer.Option(help=_MODEL_HELP)] = None,
    draft: Annotated[str | None, typer.Option(help=_DRAFT_HELP)] = None,
    num_speculative_tokens: Annotated[int, typer.Option(min=1, help="K with --draft and ngram.")] = 5,
    shape: Annotated[list[str] | None, typer.Option(help=_SHAPE_HELP)] = None,
    tensor: Annotated[int | None, typer.Option(min=1, help="GPUs of one engine, where the log does not say.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Where the log does not say.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Where the log does not say.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Where the log does not say.")] = None,
    engine_version: Annotated[str | None, typer.Option(help="As 0.32, where the log does not say.")] = None,
    model_config: ModelConfigOption = None,
) -> None:
    """Compare what engines took with what was predicted, term by term, and add it to a calibration file."""
    # Sizing takes longer to load than the rest of the command line.
    from specdecode_operator.calibration.engine_log import Given  # noqa: PLC0415
    from specdecode_operator.cli.calibrate import engine_runs, measurements  # noqa: PLC0415
    from specdecode_operator.cli.input_files import read_model_configs  # noqa: PLC0415
    from specdecode_operator.cli.text_files import DocumentError  # noqa: PLC0415
    from specdecode_operator.estimate.gpu_names import full_product  # noqa: PLC0415

    folders = [name for name in (model, draft) if name and (Path(name) / "config.json").is_file()]
    try:
        configs = read_model_configs([*(model_config or []), *(f"{name}={name}/config.json" for name in folders)])
    except DocumentError as error:
        fail(error)
    if [bool(from_log), bool(model), bool(from_deployment)].count(True) != 1:
        fail("give one of --from-log FILE, --from-deployment FILE, and --model MODEL to run vLLM here")
    if from_deployment:
        entries = measurements.of_deployments(from_deployment, configs)
    elif product is None:
        fail("--product is missing: no log names the GPU")
    else:
        given = Given(
            product=full_product(product),
            engine_version=engine_version,
            tensor=tensor,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            configs=configs,
        )
        if model:
            try:
                runs = engine_runs.runs_of(model, draft, shape or [], num_speculative_tokens, given)
            except ValueError as error:
                fail(error)
            entries = measurements.of_runs(runs, given, out)
        else:
            entries = measurements.of_logs(from_log or [], given)
    measurements.write_entries(out, entries)
    say(f"{len(entries)} entries written to {out}")
