"""`specdecode replay synth`: a capture of an engine of which everything is given."""

from pathlib import Path
from typing import Annotated, Final

import typer

from specdecode_operator.capture.files.formats import TraceMeta
from specdecode_operator.capture.files.manifest import SCHEMA
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
from specdecode_operator.problems import shown
from specdecode_operator.replay.emulated.acceptance import Acceptance, from_rates
from specdecode_operator.replay.emulated.step_time import StepTime
from specdecode_operator.replay.fitted.model import Limits
from specdecode_operator.replay.synth.given import GivenBehaviour, spread
from specdecode_operator.replay.synth.run import VirtualRun

SOURCE: Final = "synthetic"
"""What the header of such a trace says that it is from."""


def synth_command(  # noqa: PLR0913  each is an option
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write, which must not be there yet.")],
    arrivals: Arrivals = None,
    requests: Requests = None,
    duration: Duration = None,
    prompt_tokens: PromptTokens = "512",
    output_tokens: OutputTokens = "128",
    shared_prefix_tokens: SharedPrefixTokens = 0,
    acceptance: Annotated[
        str,
        typer.Option(help="Share of drafts of which each position is accepted, as many as are drafted: none without."),
    ] = "0.8,0.6,0.42,0.3",
    drafting: Annotated[
        float, typer.Option(help="Share of steps in which a request has a draft, as with ngram.", min=0.0, max=1.0)
    ] = 1.0,
    step_ms: Annotated[float, typer.Option(help="Time of every step.", min=0.2, max=60_000)] = 10.0,
    request_ms: Annotated[float, typer.Option(help="More for each request in it.", min=0, max=1000)] = 0.1,
    prefill_token_ms: Annotated[float, typer.Option(help="And for each token of a prompt.", min=0, max=100)] = 0.02,
    context_token_us: Annotated[float, typer.Option(help="And for each token attended to.", min=0, max=1000)] = 0.0,
    noise: Annotated[float, typer.Option(help="Standard deviation of it all, as a share.", min=0, max=0.3)] = 0.05,
    max_num_seqs: Annotated[int, typer.Option(help="Requests in one batch at most.", min=1, max=65_536)] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens in one step at most.", min=1, max=2**24)] = 8192,
    num_gpu_blocks: Annotated[
        int | None, typer.Option(help="Blocks of the KV cache. Absent: always enough.", min=1, max=2**32)
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens in a block.", min=1, max=4096)] = 16,
    seed: Seed = 0,
) -> None:
    """Make a trace with known distributions: of an engine that schedules as vLLM does, with steps as they are given.

    Writes trace.jsonl and step-stats.jsonl, which all that reads captures
    takes. What is not given is typical of an 8B model with EAGLE on one GPU.

    For example: specdecode replay synth -o made --arrivals poisson:4 --requests 500 --acceptance 0.7,0.5
    """
    rates = _acceptance(acceptance, drafting)
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
            schema=SCHEMA,
            speculative=_speculative(rates, drafting),
        ),
    )
    phases = phases_of(arrivals or ["poisson:4"], requests, duration)
    prompts = prompts_of(prompt_tokens, output_tokens, shared_prefix_tokens, block_size, seed)
    try:
        with new_folder(out) as folder:
            outcome = run.phases(folder, prompts, phases, "synth")
            refuse_nothing(outcome)
    except DocumentError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from error
    too_large = f", {outcome.failed} were too large for the KV cache" if outcome.failed else ""
    say(f"{out}: {outcome.finished} requests in {outcome.end_ms / 1000:.1f} s{too_large}")


def _acceptance(text: str, drafting: float) -> Acceptance | None:
    if text in ("", "none"):
        return None
    try:
        rates = [float(rate) for rate in text.split(",")]
        return from_rates(rates, drafting)
    except ValueError as error:
        message = f"{shown(text)}: write shares from 1 to 0 that do not rise, such as 0.8,0.6"
        raise typer.BadParameter(message, param_hint="--acceptance") from error


def _speculative(acceptance: Acceptance | None, drafting: float) -> dict[str, object] | None:
    if acceptance is None:
        return None
    method = "draft_model" if drafting == 1 else "ngram"
    return {"method": method, "num_speculative_tokens": acceptance.num_speculative_tokens}
