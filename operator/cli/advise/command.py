"""`specdecode advise`: compute from measured numbers whether speculation pays."""

from pathlib import Path
from typing import Annotated

import typer

from specdecode_operator.cli import completion
from specdecode_operator.cli.advise import measured as given
from specdecode_operator.cli.advise.answer import Question, advise_text, answer, prefix_cache
from specdecode_operator.cli.options import TableOrData, VersionOption, refused
from specdecode_operator.cli.outputs import print_data
from specdecode_operator.cli.terminal import say
from specdecode_operator.enums import METHODS_OF_BLOCKS, METHODS_WITH_LAYERS
from specdecode_operator.stats.payoff import LARGEST_K, PayoffError, StepCosts
from specdecode_operator.vllm.profiles import UnknownEngineVersionError, find_profile
from specdecode_operator.vllm.versions import LAUNCHED_VERSIONS

Capture = Annotated[
    Path | None,
    typer.Argument(help="Folder of a capture, from which K, acceptance and step times are read.", show_default=False),
]
Tokens = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        "-K",
        min=1,
        max=LARGEST_K,
        show_default=False,
        help="K: draft tokens per step. Defaults to the number of positions given.",
    ),
]
Context = Annotated[
    str | None,
    typer.Option("--context", metavar="TOKENS", help="Context length of each request in tokens. Several: 2000,32000."),
]


def advise_command(  # noqa: PLR0913  each is an option
    capture: Capture = None,
    *,
    baseline: Annotated[
        Path | None,
        typer.Option(
            "--baseline", help="Capture without speculation, for the step times of the target by number of requests."
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option("--metrics", metavar="FILE", help="Saved /metrics page of an engine: acceptance since its start."),
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(
            "--acceptance",
            metavar="SHARES",
            help="Acceptance rate per position as vLLM reports it, such as 0.8,0.6,0.4. Must not increase.",
        ),
    ] = None,
    conditional_acceptance: Annotated[
        str | None,
        typer.Option(
            "--conditional-acceptance",
            metavar="SHARES",
            help="Acceptance rate per position given that all earlier positions were accepted: 0.8,0.75,0.67.",
        ),
    ] = None,
    acceptance_rate: Annotated[
        float | None,
        typer.Option(
            "--acceptance-rate", help="Accepted divided by drafted tokens at K, if rates per position are unknown."
        ),
    ] = None,
    num_speculative_tokens: Tokens = None,
    target_step_ms: Annotated[
        str | None,
        typer.Option(
            "--target-step-ms",
            metavar="MS",
            help="Time of a target step with one token per request, or times by tokens in the step: 1:20,64:24,512:60.",
        ),
    ] = None,
    verify_step_ms: Annotated[
        float | None,
        typer.Option(
            "--verify-step-ms",
            help="Time of a target step with K + 1 tokens for each request of the first --batch, without drafting.",
        ),
    ] = None,
    draft_step_ms: Annotated[
        str | None,
        typer.Option(
            "--draft-step-ms",
            metavar="MS",
            help="Time of one draft pass, in the same format. Required with target step times, except with CAPTURE and "
            "for methods ngram, ngram_gpu and suffix.",
        ),
    ] = None,
    parallel_drafting: Annotated[
        bool, typer.Option("--parallel-drafting", help="The draft proposes all K tokens in one pass.")
    ] = False,
    target_context_ms: Annotated[
        float,
        typer.Option("--target-context-ms", help="Milliseconds that 1,000 tokens of KV cache add to a target step."),
    ] = 0.0,
    draft_context_ms: Annotated[
        float,
        typer.Option("--draft-context-ms", help="Milliseconds that 1,000 tokens of KV cache add to a draft pass."),
    ] = 0.0,
    batch: Annotated[
        str | None,
        typer.Option(
            "--batch",
            metavar="REQUESTS",
            help="Number of concurrently decoding requests. Several: 1,8,32. Defaults to those in the capture, or 1.",
        ),
    ] = None,
    context: Context = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option("--kv-tokens", min=1, help="KV cache capacity in tokens with the draft, as plan reports it."),
    ] = None,
    kv_tokens_alone: Annotated[
        int | None, typer.Option("--kv-tokens-alone", min=1, help="KV cache capacity in tokens without speculation.")
    ] = None,
    size_ratio: Annotated[
        float | None,
        typer.Option("--size-ratio", help="Weight bytes of the draft divided by weight bytes of the target, for MBSU."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="METHOD",
            autocompletion=completion.methods,
            help="Speculation method, for the prefix-cache tax and for schedules of K. Defaults to the method "
            "of the capture.",
        ),
    ] = None,
    engine_version: VersionOption = None,
    mtp_layers: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="MTP layers of the target (num_nextn_predict_layers), for the prefix-cache tax of method mtp.",
        ),
    ] = 1,
    block_size: Annotated[
        int | None,
        typer.Option(
            "--block-size",
            min=1,
            max=1_048_576,
            show_default=False,
            help="Tokens per KV cache block. Defaults to the value in the capture, or 16.",
        ),
    ] = None,
    shared_prefix: Annotated[
        int | None,
        typer.Option(
            "--shared-prefix",
            min=1,
            max=2**31,
            help="Length in tokens of the common beginning of prompts. Needs --method.",
        ),
    ] = None,
    output: Annotated[TableOrData, typer.Option("--output", "-o", help="Output format.")] = TableOrData.TABLE,
) -> None:
    """Estimate from measurements whether speculation pays: speed-up, break-even acceptance and best K.

    The inputs are numbers that you measured, or captures with and without
    speculation. The answer lists its assumptions, and marks figures with * that
    it extrapolates. Best K is at most one more than the number of positions
    with measured acceptance. Only a comparison on your own traffic decides.

    For example: specdecode advise --acceptance 0.8,0.6 --target-step-ms 1:20,64:24 --draft-step-ms 1.5
    """
    shares = {"--acceptance": acceptance, "--conditional-acceptance": conditional_acceptance}
    given.refuse_several({**shares, "--acceptance-rate": acceptance_rate, "--metrics": metrics, "CAPTURE": capture})
    given.refuse_several({"--target-step-ms": target_step_ms, "--baseline": baseline})
    given.refuse_several({"CAPTURE": capture, "--draft-step-ms": draft_step_ms})
    given.refuse_several({"--baseline": baseline, "--verify-step-ms": verify_step_ms})
    if verify_step_ms is not None and target_step_ms is None:
        raise typer.BadParameter("is missing: --verify-step-ms needs it", param_hint="--target-step-ms")
    speculating = None if capture is None else given.measured(capture, "CAPTURE")
    plain = None if baseline is None else given.measured(baseline, "--baseline")
    found, shortened, k = None, False, num_speculative_tokens
    if speculating is not None:
        k, found, shortened = k or speculating.k or None, speculating.acceptance, speculating.shortened
    elif metrics is not None:
        counted, found, shortened = given.acceptance_of_page(metrics)
        k = k or counted
    elif k is None and (positions := acceptance or conditional_acceptance) is not None:
        k = min(positions.count(",") + 1, LARGEST_K)
    if k is None:
        raise typer.BadParameter(f"is missing: give K, from 1 to {LARGEST_K}", param_hint="--num-speculative-tokens")
    batches = given.counts(batch, "--batch") if batch else given.measured_batches(speculating or plain)
    one_pass = parallel_drafting or (method in METHODS_OF_BLOCKS if speculating is None else speculating.one_pass)
    costs = None
    target = None if plain is None else given.plain_curve(plain, "--baseline")
    if target_step_ms is not None:
        target = given.with_verification(
            given.curve_of(target_step_ms, "--target-step-ms"), verify_step_ms, batches[0], k
        )
    if target is not None:
        draft = given.draft_curve(draft_step_ms, speculating, target, method, one_pass=one_pass)
        with refused("--target-step-ms", PayoffError):
            costs = StepCosts(target, draft, one_pass, target_context_ms, draft_context_ms)
        costs = given.with_recorded_k(costs, speculating)
    question = Question(
        k=k,
        acceptance=found or given.acceptance_of(acceptance, conditional_acceptance, acceptance_rate, k),
        costs=costs,
        loads=given.loads_of(batches, context, kv_tokens, kv_tokens_alone),
        size_ratio=size_ratio,
        one_pass=one_pass,
        captured=speculating is not None,
        prefix=prefix_cache(method, engine_version, block_size, shared_prefix, speculating, mtp=(mtp_layers, k)),
        shortened=shortened,
        mean_only=acceptance_rate is not None,
        drafts_in_full=_drafts_in_full(
            method or (speculating.method if speculating else None),
            engine_version or (speculating.version if speculating else None),
        ),
    )
    with refused("--size-ratio", PayoffError):
        said = answer(question)
    if output is TableOrData.TABLE:
        say(advise_text(said))
    else:
        print_data(said, output)


def _drafts_in_full(method: str | None, version: str | None) -> str | None:
    """Return the method and engine that draft K tokens even if a schedule asks for fewer; None if it drafts fewer.

    This is the behaviour of model runner V2 on a GPU; V1 drafts fewer. Unknown methods and versions give None, too.
    """
    asked = ".".join((version or LAUNCHED_VERSIONS[-1]).split(".")[:2])
    try:
        profile = find_profile(asked)
    except UnknownEngineVersionError:
        return None
    found = next((each for each in METHODS_WITH_LAYERS if each == method), None)
    if found is None or found in profile.shortens_drafts_on_v2 or profile.runners.get(found) != "V2":
        return None
    return f"method {found} on model runner V2 of vLLM {asked}"
