"""`specdecode calibrate`: measure real engines, and write down how far the predictions were off."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from specdecode_operator.cli.options import MODEL_CONFIG_HELP, fail

if TYPE_CHECKING:
    from specdecode_operator.calibration.engine_log import Given, Measurement
    from specdecode_operator.cli.calibrate.engine_runs import EngineRun
    from specdecode_operator.sizing.pair.calibration import CalibrationEntry

_GIB: Final = 2**30

_PRODUCT_HELP: Final = "GPU as the node label nvidia.com/gpu.product has it, such as NVIDIA-H200."
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
    model_config: Annotated[list[str] | None, typer.Option(help=MODEL_CONFIG_HELP)] = None,
) -> None:
    """Compare what engines took with what was predicted, term by term, and add it to a calibration file."""
    # Sizing takes longer to load than the rest of the command line.
    from specdecode_operator.calibration.engine_log import Given  # noqa: PLC0415

    configs = _configs([*(model_config or []), *_folders(model, draft)])
    if [bool(from_log), bool(model), bool(from_deployment)].count(True) != 1:
        fail("give one of --from-log FILE, --from-deployment FILE, and --model MODEL to run vLLM here")
    if from_deployment:
        _finish(out, _of_deployments(from_deployment, configs))
        return
    if product is None:
        fail("--product is missing: no log names the GPU")
    given = Given(
        product=product,
        engine_version=engine_version,
        tensor=tensor,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        configs=configs,
    )
    if model:
        entries = _of_runs(_runs(model, draft, shape, num_speculative_tokens, given), given, out)
    else:
        entries = _of_logs(from_log or [], given)
    _finish(out, entries)


def _finish(out: Path, entries: list["CalibrationEntry"]) -> None:
    _write(out, entries)
    typer.echo(f"{len(entries)} entries written to {out}")


def _of_deployments(files: list[str], configs: Mapping[str, dict[str, Any]]) -> list["CalibrationEntry"]:
    """Print the comparison of each object and return their entries."""
    from specdecode_operator.calibration.deployment_status import (  # noqa: PLC0415
        UnusableObjectError,
        measure_deployment,
    )
    from specdecode_operator.cli.input_files import read_deployments, with_configs  # noqa: PLC0415
    from specdecode_operator.deployment.spec.checkpoints import MODEL_UNKNOWN  # noqa: PLC0415
    from specdecode_operator.problems import InvalidSpecError  # noqa: PLC0415

    reading = read_deployments(files)
    if reading.errors or not reading.documents:
        fail(str(reading.errors[0]) if reading.errors else f"{', '.join(files)}: holds no SpecDecodeDeployment")
    entries = []
    for document in reading.documents:
        try:
            measurement = measure_deployment(
                {**document.body, "spec": with_configs(document.body.get("spec"), configs)}
            )
        except UnusableObjectError as error:
            fail(f"{document.name} ({document.place}): {error}")
        except InvalidSpecError as error:
            hint = "; or use --model-config ID=PATH" if error.reason == MODEL_UNKNOWN else ""
            fail(f"{document.name} ({document.place}): {error}{hint}")
        typer.echo("\n".join(_table(document.name, measurement)))
        entries.append(measurement.entry)
    return entries


def _of_logs(files: list[Path], given: "Given") -> list["CalibrationEntry"]:
    """Print the comparison of each log and return their entries; nothing is printed before all can be read."""
    logs = [(str(file), _text(file)) for file in files]
    return [_measured(name, text, given) for name, text in logs]


def _runs(
    model: str, draft: str | None, shapes: list[str] | None, num_speculative_tokens: int, given: "Given"
) -> list["EngineRun"]:
    """Return the runs of vLLM that measure a model here."""
    from specdecode_operator.cli.calibrate.engine_runs import runs_of  # noqa: PLC0415

    try:
        return runs_of(
            model,
            draft,
            shapes or [],
            num_speculative_tokens=num_speculative_tokens,
            tensor=given.tensor or 1,
            max_model_len=given.max_model_len,
        )
    except ValueError as error:
        fail(error)


def _of_runs(runs: list["EngineRun"], given: "Given", out: Path) -> list["CalibrationEntry"]:
    """Print the comparison of each run and return their entries; each is kept at once, for runs take minutes."""
    entries: list[CalibrationEntry] = []
    for run in runs:
        typer.echo(f"starting {' '.join(run.command)}", err=True)
        try:
            entries.append(_measured(run.name, run.start(), run.settle(given)))
        except RuntimeError as error:
            fail(error)
        _write(out, entries)
    return entries


def _measured(name: str, text: str, given: "Given") -> "CalibrationEntry":
    """Print one comparison and return its entry."""
    from specdecode_operator.calibration.engine_log import UnusableLogError, measure  # noqa: PLC0415
    from specdecode_operator.engine.startup_log import read_startup_log  # noqa: PLC0415
    from specdecode_operator.problems import InvalidSpecError  # noqa: PLC0415

    try:
        measurement = measure(read_startup_log(text), given)
    except (UnusableLogError, InvalidSpecError) as error:
        fail(f"{name}: {error}")
    typer.echo("\n".join(_table(name, measurement)))
    return measurement.entry


def _table(name: str, measurement: "Measurement") -> list[str]:
    entry = measurement.entry
    precisions = " + ".join(filter(None, (entry.target_precision, entry.draft_precision)))
    tokens_a_step = f" K={entry.num_speculative_tokens}" if entry.num_speculative_tokens else ""
    engine = (
        f"{name}: {entry.model} in {precisions}, vLLM {entry.engine_version} ({entry.runner}) on {entry.tensor} x"
        f" {entry.product}, {entry.max_num_seqs} sequences, {entry.max_num_batched_tokens} batched tokens,"
        f" {entry.method}{tokens_a_step}"
    )
    lines = [
        engine,
        f"{'GiB on each GPU':<30}{'predicted':>10}{'reported':>10}{'residual':>10}",
    ]
    for term in measurement.terms:
        reported = term.reported_bytes
        residual = None if reported is None else term.predicted_bytes - reported
        lines.append(f"{term.name:<30}{_gib(term.predicted_bytes)}{_gib(reported)}{_gib(residual, sign='+')}")
    tokens = measurement.reported_tokens
    said = "not said" if tokens is None else f"{tokens:,}"
    return [*lines, f"KV cache tokens: {measurement.predicted_tokens:,} predicted, {said} reported", ""]


def _gib(size_bytes: int | None, sign: str = "") -> str:
    return f"{'-':>10}" if size_bytes is None else f"{size_bytes / _GIB:>{sign}10.2f}"


def _write(out: Path, entries: list["CalibrationEntry"]) -> None:
    """Add entries to the file; it is replaced whole, so that an interruption leaves the old one."""
    from specdecode_operator.sizing.pair.calibration import (  # noqa: PLC0415
        Calibration,
        CalibrationError,
        parse_calibration,
        serialize_calibration,
    )

    try:
        old = parse_calibration(_text(out)) if out.exists() else Calibration()
        new = out.with_name(f"{out.name}.new")
        new.write_text(serialize_calibration(old.with_entries(entries)), encoding="utf-8")
        new.replace(out)
    except CalibrationError as error:
        fail(f"{out}: {error}")
    except OSError as error:
        fail(f"{out}: {error.strerror}: name a file that can be written")


def _folders(*models: str | None) -> list[str]:
    """The config.json of each model that is a folder here."""
    return [f"{name}={name}/config.json" for name in models if name and (Path(name) / "config.json").is_file()]


def _configs(named: list[str]) -> Mapping[str, dict[str, Any]]:
    from specdecode_operator.cli.input_files import DocumentError, read_model_configs  # noqa: PLC0415

    try:
        return read_model_configs(named)
    except DocumentError as error:
        fail(error)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        fail(f"{file}: {error.strerror}: name a file that can be read")
