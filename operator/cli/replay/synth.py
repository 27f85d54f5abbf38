"""`specdecode replay synth` and `forecast`: simulate engines in virtual time under unrecorded load."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer

from specdecode_operator.api.capture import Phase
from specdecode_operator.capture.files.formats import MANIFEST_SCHEMA, TraceMeta
from specdecode_operator.capture.trace_reader import RecordedRequest, Recording, RecordingError, read_recording
from specdecode_operator.cli.options import HiddenName, refuse_written, refused
from specdecode_operator.cli.replay.fit import (
    NO_NUMPY,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    NumGpuBlocks,
    with_limits,
)
from specdecode_operator.cli.terminal import say
from specdecode_operator.cli.text_files import DocumentError, new_folder
from specdecode_operator.problems import printable, shown
from specdecode_operator.replay import synthetic_load
from specdecode_operator.replay.emulated.engine_model import StepTime, from_rates
from specdecode_operator.replay.model_file import BLOCK_TOKENS, FittedModel, Limits, ModelFileError, read_model
from specdecode_operator.replay.modelled_engine import ModelledBehaviour, NoDonorsError
from specdecode_operator.replay.virtual_run import GivenBehaviour, Outcome, VirtualRun, replayed, spread

Arrivals = Annotated[
    list[str] | None,
    typer.Option(
        "--arrivals",
        help=f"Arrival pattern: {synthetic_load.ARRIVAL_FORMS}. May be repeated: patterns run one after another.",
    ),
]
Requests = Annotated[
    int | None, typer.Option("--requests", help="Number of requests per --arrivals.", min=1, max=10_000_000)
]
Duration = Annotated[
    int | None,
    typer.Option(
        "--duration", help="Duration of each --arrivals in seconds, instead of --requests.", min=1, max=86_400
    ),
]
PromptTokens = Annotated[str, typer.Option(help=f"Tokens per prompt: {synthetic_load.LENGTH_FORMS}.")]
OutputTokens = Annotated[str, typer.Option(help="Tokens per response, in the same formats.")]
SharedPrefixTokens = Annotated[
    int, typer.Option(help="Tokens of a prefix that all prompts share.", min=0, max=16_777_216)
]
Seed = Annotated[int, typer.Option(help="Random seed. The same seed creates the same files.")]


def _phases_of(arrivals: list[str], requests: int | None, duration_s: int | None) -> list[Phase]:
    if requests is not None and duration_s is not None:
        raise typer.BadParameter("--requests and --duration exclude each other: omit one", param_hint="--duration")
    if requests is None and duration_s is None:
        requests = 200
    with refused("--arrivals", synthetic_load.InvalidLoadError):
        found = [synthetic_load.parse_arrivals(text, requests, duration_s) for text in arrivals]
    if len(found) == 1:
        return found
    return [each.model_copy(update={"name": f"{each.name}-{number}"}) for number, each in enumerate(found, start=1)]


def _prompts_of(
    prompt_tokens: str, output_tokens: str, shared_prefix_tokens: int, block_size: int, seed: int
) -> synthetic_load.Prompts:
    lengths = []
    for option, text in (("--prompt-tokens", prompt_tokens), ("--output-tokens", output_tokens)):
        with refused(option, synthetic_load.InvalidLoadError):
            lengths.append(synthetic_load.parse_lengths(text))
    return synthetic_load.Prompts(
        prompt_tokens=lengths[0],
        output_tokens=lengths[1],
        shared_prefix_tokens=shared_prefix_tokens,
        block_size=block_size,
        seed=seed,
    )


def _refuse_nothing(outcome: Outcome) -> None:
    """Reject a run without a completed request."""
    if not outcome.finished and not outcome.failed:
        raise typer.BadParameter("no request arrives in this time: use a larger value", param_hint="--duration")
    if not outcome.finished:
        raise typer.BadParameter("too few for any request: use a larger value", param_hint="--num-gpu-blocks")


SOURCE: Final = "synthetic"
"""Source in the header of synthetic traces."""


def synth_command(  # noqa: PLR0913  each is an option
    *,
    out: Annotated[Path, typer.Option("--out", HiddenName("-o"), help="Folder to create. It must not exist.")],
    arrivals: Arrivals = None,
    requests: Requests = None,
    duration: Duration = None,
    prompt_tokens: PromptTokens = "512",
    output_tokens: OutputTokens = "128",
    shared_prefix_tokens: SharedPrefixTokens = 0,
    acceptance: Annotated[
        str,
        typer.Option(
            help="Acceptance rate per position, one number per draft token. An empty value disables speculation."
        ),
    ] = "0.8,0.6,0.42,0.3",
    drafting: Annotated[
        float, typer.Option(help="Share of steps in which a request has a draft, as with ngram.", min=0.0, max=1.0)
    ] = 1.0,
    step_ms: Annotated[float, typer.Option(help="Base time of a step in milliseconds.", min=0.2, max=60_000)] = 10.0,
    request_ms: Annotated[
        float, typer.Option(help="Additional milliseconds per request in the step.", min=0, max=1000)
    ] = 0.1,
    prefill_token_ms: Annotated[
        float, typer.Option(help="Additional milliseconds per prompt token in the step.", min=0, max=100)
    ] = 0.02,
    context_token_us: Annotated[
        float, typer.Option(help="Additional microseconds per token of context.", min=0, max=1000)
    ] = 0.0,
    noise: Annotated[
        float, typer.Option(help="Standard deviation of the step time, as a share of it.", min=0, max=0.3)
    ] = 0.05,
    max_num_seqs: Annotated[int, typer.Option(help="Maximum number of requests per batch.", min=1, max=65_536)] = 256,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Maximum number of tokens per step.", min=1, max=2**24)
    ] = 8192,
    num_gpu_blocks: Annotated[
        int | None,
        typer.Option(help="Number of KV cache blocks. If not set, there are always enough.", min=1, max=2**32),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per KV cache block.", min=1, max=4096)] = 16,
    seed: Seed = 0,
) -> None:
    """Create a synthetic trace with known distributions, from a simulated engine with vLLM's scheduling.

    It writes trace.jsonl and step-stats.jsonl, which all commands for captures
    accept. The defaults are typical of an 8B model with EAGLE on one GPU.

    For example: specdecode replay synth --out made --arrivals poisson:4 --requests 500 --acceptance 0.7,0.5
    """
    try:
        shares = None if acceptance in ("", "none") else [float(share) for share in acceptance.split(",")]
        rates = None if shares is None else from_rates(shares, drafting)
    except ValueError as error:
        message = f"{shown(acceptance)}: must be shares from 1 to 0 in descending order, such as 0.8,0.6"
        raise typer.BadParameter(message, param_hint="--acceptance") from error
    speculative: dict[str, object] | None = None
    if rates is not None:
        method = "draft_model" if drafting == 1 else "ngram"
        speculative = {"method": method, "num_speculative_tokens": rates.num_speculative_tokens}
    step_time = StepTime(
        curve=((1, step_ms),),
        request_us=1000 * request_ms,
        prefill_token_us=1000 * prefill_token_ms,
        context_ns=1000 * context_token_us,
        residuals=spread(noise),
    )
    run = VirtualRun(
        behaviour=GivenBehaviour(step_time, rates, seed),
        limits=Limits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_gpu_blocks=num_gpu_blocks,
        ),
        meta=TraceMeta(
            model=SOURCE,
            tp=1,
            max_num_seqs=max_num_seqs,
            source=SOURCE,
            block_size=block_size,
            schema=MANIFEST_SCHEMA,
            speculative=speculative,
        ),
    )
    phases = _phases_of(arrivals or ["poisson:4"], requests, duration)
    prompts = _prompts_of(prompt_tokens, output_tokens, shared_prefix_tokens, block_size, seed)
    with refused("--out", DocumentError), new_folder(out) as folder:
        outcome = run.phases(folder, prompts, phases, "synth")
        _refuse_nothing(outcome)
    too_large = f", {outcome.failed} were too large for the KV cache" if outcome.failed else ""
    say(f"{out}: {outcome.finished} requests in {outcome.end_ms / 1000:.1f} s{too_large}")


FORECAST_SOURCE: Final = "forecast"
"""Source in the header of forecasts."""


def forecast_command(  # noqa: PLR0913  each is an option
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="Model that specdecode replay fit wrote.")],
    *,
    out: Annotated[Path, typer.Option("--out", HiddenName("-o"), help="Folder to create. It must not exist.")],
    load: Annotated[
        Path | None,
        typer.Option(help="Folder of a capture, or a trace, whose requests arrive at their recorded times."),
    ] = None,
    load_factor: Annotated[
        float, typer.Option(help="With --load: factor for the arrival rate.", min=0.01, max=1000)
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
    """Simulate a fitted engine under another load, in virtual time: hours take seconds.

    It writes trace.jsonl and step-stats.jsonl, like a capture of that load. It
    reports values outside the range of the captures, and how far outside they are.

    For example: specdecode replay forecast demo-model.json --out doubled --load captures/demo --load-factor 2
    """
    if (load is None) == (not arrivals):
        raise typer.BadParameter("set either --arrivals or --load", param_hint="--load")
    if load is None:
        refuse_written(context, {"load_factor"}, "requires --load: add it, or omit the option")
    else:
        of_arrivals = {"requests", "duration", "prompt_tokens", "output_tokens", "shared_prefix_tokens"}
        refuse_written(context, of_arrivals, "has no effect with --load: omit it")
    fitted, behaviour = _engine(model, seed, max_num_seqs, max_num_batched_tokens, num_gpu_blocks)
    limits, origin = fitted.origin.limits, fitted.origin
    meta, block_size = origin.header(source=FORECAST_SOURCE), limits.block_size or BLOCK_TOKENS
    turnarounds_ms = (fitted.clients.turnarounds_ms if fitted.clients else None) or (0.0,)
    run = VirtualRun(behaviour=behaviour, limits=limits, meta=meta, turnarounds_ms=turnarounds_ms)
    with refused("--out", DocumentError), refused("--load", RecordingError):
        recording = None if load is None else read_recording(load)
        with new_folder(out) as folder:
            if recording is not None:
                outcome = run.requests(folder, replayed(_arrived(recording), load_factor, block_size))
            else:
                phases = _phases_of(arrivals or [], requests, duration)
                prompts = _prompts_of(prompt_tokens, output_tokens, shared_prefix_tokens, block_size, seed)
                outcome = run.phases(folder, prompts, phases, FORECAST_SOURCE)
            _refuse_nothing(outcome)
    say("\n".join(_text(out, outcome)))
    for line in behaviour.outside():
        say(f"note: {line}", err=True)
    if limits.max_model_len is not None and behaviour.longest_request > limits.max_model_len:
        say(
            f"note: the longest request has {behaviour.longest_request} tokens, which exceeds max_model_len "
            f"{limits.max_model_len}: the simulation truncates such requests, and vLLM rejects them",
            err=True,
        )


def _engine(path: Path, seed: int, *limits: int | None) -> tuple[FittedModel, ModelledBehaviour]:
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
        raise RecordingError(f"{printable(str(recording.trace))}: no request has arrival_ms: use --arrivals instead")
    return found


def _text(out: Path, outcome: Outcome) -> Iterator[str]:
    try:
        import numpy as np  # noqa: PLC0415  heavy, and an extra

        from specdecode_operator.replay.compare import measured  # noqa: PLC0415
    except ImportError as error:
        raise typer.BadParameter(NO_NUMPY) from error
    name, finished = printable(str(out)), f"{outcome.finished:,} requests"
    try:
        recording = read_recording(out, skip_bad_lines=True)
    except RecordingError:
        # The reader accepts no line as an engine's step.
        yield f"{name}: {finished}, all waited longer than an hour"
        return
    found = measured(recording)
    rate = found.output_tokens / found.seconds if found.seconds else 0.0
    yield f"{name}: {finished} in {found.seconds:.1f} s, {rate:,.1f} tokens/s"
    for title, values in (("TTFT", found.ttft_ms), ("TPOT", found.tpot_ms), ("gap", found.gap_ms)):
        if len(values):
            quantiles = "  ".join(f"P{share} {np.percentile(values, share):.2f}" for share in (50, 90, 99))
            yield f"  {title:<10}  mean {values.mean():.2f}  {quantiles} ms"
        else:
            yield f"  {title}  none"
    if found.acceptance is not None:
        yield f"  acceptance  {100 * found.acceptance:.1f} %"
    if outcome.preemptions:
        yield f"  {outcome.preemptions} preemptions"
    if outcome.failed:
        yield f"  {outcome.failed} requests were too large for the KV cache"
    if late := recording.skipped_lines:
        yield f"  excluded {late:,} requests that waited longer than an hour"
