"""`specdecode replay forecast`: a load that was never run, on a fitted engine, in no time."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from specdecode_operator.capture.files.formats import TraceMeta
from specdecode_operator.capture.files.manifest import SCHEMA
from specdecode_operator.cli.replay.fit import NO_NUMPY, MaxNumBatchedTokens, MaxNumSeqs, NumGpuBlocks, with_limits
from specdecode_operator.cli.replay.given_load import (
    Arrivals,
    Duration,
    OutputTokens,
    PromptTokens,
    Requests,
    Seed,
    SharedPrefixTokens,
    phases_of,
    prompts_of,
    refuse_nothing,
)
from specdecode_operator.cli.terminal import say
from specdecode_operator.cli.text_files import DocumentError, new_folder
from specdecode_operator.problems import printable
from specdecode_operator.replay.engines.modelled import ModelledBehaviour, NoDonorsError
from specdecode_operator.replay.engines.stepped import BLOCK_SIZE
from specdecode_operator.replay.fitted.model import FittedModel, ModelFileError, read_model
from specdecode_operator.replay.recording.read import RecordingError, read_recording
from specdecode_operator.replay.recording.recording import RecordedRequest, Recording
from specdecode_operator.replay.synth.load import replayed
from specdecode_operator.replay.synth.run import Outcome, VirtualRun

if TYPE_CHECKING:
    from specdecode_operator.replay.compare.measures import Floats

SOURCE: Final = "forecast"
"""What the header of such a trace says that it is from."""

_SHARES: Final = (50, 90, 99)


_OF_ARRIVALS: Final = ("requests", "duration", "prompt_tokens", "output_tokens", "shared_prefix_tokens")


def forecast_command(  # noqa: PLR0913  each is an option
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="A model that `specdecode replay fit` wrote.")],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write, which must not be there yet.")],
    load: Annotated[
        Path | None, typer.Option(help="A capture's folder, or a trace, whose requests come as they did.")
    ] = None,
    load_factor: Annotated[
        float, typer.Option(help="With --load: how many times as fast they come.", min=0.01, max=1000)
    ] = 1.0,
    arrivals: Arrivals = None,
    requests: Requests = None,
    duration: Duration = None,
    prompt_tokens: PromptTokens = "512",
    output_tokens: OutputTokens = "128",
    shared_prefix_tokens: SharedPrefixTokens = 0,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    num_gpu_blocks: NumGpuBlocks = None,
    seed: Seed = 0,
) -> None:
    """Forecast what an engine does under another load: it is played in virtual time, hours in seconds.

    Writes trace.jsonl and step-stats.jsonl, as a capture of that load would
    have them. What lies outside of what the model was fitted on is said, with
    how far.

    For example: specdecode replay forecast demo-model.json -o doubled --load captures/demo --load-factor 2
    """
    if (load is None) == (not arrivals):
        raise typer.BadParameter("give --arrivals or --load, one of them", param_hint="--load")
    if load is None:
        _refuse(context, ("load_factor",), "is heeded with --load alone: leave it out")
    else:
        _refuse(context, _OF_ARRIVALS, "is not heeded with --load: leave it out")
    fitted, behaviour = _engine(model, seed, (max_num_seqs, max_num_batched_tokens, num_gpu_blocks))
    limits = fitted.origin.limits
    block_size = limits.block_size or BLOCK_SIZE
    turnarounds_ms = (fitted.clients.turnarounds_ms if fitted.clients else None) or (0.0,)
    run = VirtualRun(behaviour=behaviour, limits=limits, meta=_meta(fitted), turnarounds_ms=turnarounds_ms)
    try:
        recorded = None if load is None else read_recording(load)
        with new_folder(out) as folder:
            if recorded is not None:
                outcome = run.requests(folder, replayed(_arrived(recorded), load_factor, block_size))
            else:
                phases = phases_of(arrivals or [], requests, duration)
                prompts = prompts_of(prompt_tokens, output_tokens, shared_prefix_tokens, block_size, seed)
                outcome = run.phases(folder, prompts, phases, SOURCE)
            refuse_nothing(outcome)
    except DocumentError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from error
    except RecordingError as error:
        raise typer.BadParameter(str(error), param_hint="--load") from error
    say("\n".join(_text(out, outcome)))
    for line in behaviour.outside():
        say(f"note: {line}", err=True)
    if limits.max_model_len is not None and behaviour.longest_request > limits.max_model_len:
        say(
            f"note: requests of up to {behaviour.longest_request} tokens are longer than max_model_len "
            f"{limits.max_model_len}: they end there, and vLLM refuses them",
            err=True,
        )


def _refuse(context: typer.Context, names: Sequence[str], why: str) -> None:
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(why, param_hint=parameter.opts[0])


def _engine(
    path: Path, seed: int, limits: tuple[int | None, int | None, int | None]
) -> tuple[FittedModel, ModelledBehaviour]:
    try:
        model = with_limits(read_model(path), *limits)
        return model, ModelledBehaviour(model, seed)
    except ModelFileError as error:
        raise typer.BadParameter(str(error), param_hint="MODEL") from error
    except NoDonorsError as error:
        raise typer.BadParameter(f"{printable(str(path))}: {error}", param_hint="MODEL") from error


def _arrived(recording: Recording) -> list[RecordedRequest]:
    found = [request for request in recording.requests if request.arrival_ms is not None]
    if not found:
        raise RecordingError(f"{printable(str(recording.trace))}: no request has arrival_ms: give --arrivals")
    return found


def _meta(model: FittedModel) -> TraceMeta:
    origin = model.origin
    return TraceMeta(
        model=origin.model,
        gpu=origin.gpu,
        tp=origin.tp,
        max_num_seqs=origin.limits.max_num_seqs,
        source=SOURCE,
        block_size=origin.limits.block_size,
        vllm_version=origin.vllm_version,
        schema=SCHEMA,
        speculative=origin.speculative,
    )


def _text(out: Path, outcome: Outcome) -> list[str]:
    try:
        from specdecode_operator.replay.compare.measures import measured  # noqa: PLC0415  numpy is an extra
    except ImportError as error:
        raise typer.BadParameter(NO_NUMPY) from error
    try:
        recording = read_recording(out, skip_bad_lines=True)
    except RecordingError:
        # Nothing but what the reader takes for no step of an engine.
        return [f"{printable(str(out))}: {outcome.finished:,} requests, all of which waited longer than an hour"]
    found, late = measured(recording), recording.skipped_lines
    rate = found.output_tokens / found.seconds if found.seconds else 0.0
    more = [f"{outcome.preemptions} preemptions"] if outcome.preemptions else []
    more += [f"{outcome.failed} requests were too large for the KV cache"] if outcome.failed else []
    more += [f"{late:,} requests waited longer than an hour, and are not in these figures"] if late else []
    times = (("TTFT", found.ttft_ms), ("TPOT", found.tpot_ms), ("gap", found.gap_ms))
    return [
        f"{printable(str(out))}: {outcome.finished:,} requests in {found.seconds:.1f} s, {rate:,.1f} tokens/s",
        *(_row(name, values) for name, values in times),
        *([f"  acceptance  {100 * found.acceptance:.1f} %"] if found.acceptance is not None else []),
        *(f"  {each}" for each in more),
    ]


def _row(name: str, values: "Floats") -> str:
    import numpy as np  # noqa: PLC0415  an extra, which is there now

    if not len(values):
        return f"  {name}  none"
    quantiles = "  ".join(f"P{share} {np.percentile(values, share):.2f}" for share in _SHARES)
    return f"  {name:<10}  mean {values.mean():.2f}  {quantiles} ms"
