"""`specdecode advise`: compute from measured numbers whether speculation pays."""

from pathlib import Path
from typing import Annotated

import typer

from specdecode_operator.cli import completion
from specdecode_operator.cli.advise.measured import (
    Measured,
    acceptance_of,
    acceptance_of_page,
    asked_k,
    counts,
    curve_of,
    draft_curve,
    loads_of,
    measured,
    measured_batches,
    plain_curve,
    refuse_several,
    refused_at,
    with_verification,
)
from specdecode_operator.cli.options import TableOrData, VersionOption
from specdecode_operator.cli.outputs import print_data
from specdecode_operator.cli.terminal import say
from specdecode_operator.enums import METHODS_OF_BLOCKS
from specdecode_operator.stats.payoff import LARGEST_K, Acceptance, Curve, StepCosts

Capture = Annotated[
    Path | None,
    typer.Argument(help="A capture's folder: its K, its acceptance, and how long its steps took.", show_default=False),
]
Baseline = Annotated[
    Path | None,
    typer.Option("--baseline", help="A capture without speculation: how long the target's steps take, by requests."),
]
Metrics = Annotated[
    str | None,
    typer.Option("--metrics", metavar="FILE", help="An engine's /metrics, saved: acceptance since its start."),
]
ByPosition = Annotated[
    str | None,
    typer.Option(
        "--acceptance",
        metavar="SHARES",
        help="Share of drafts accepted up to each position, as vLLM counts them: 0.8,0.6,0.4. They do not rise.",
    ),
]
Conditional = Annotated[
    str | None,
    typer.Option(
        "--conditional-acceptance",
        metavar="SHARES",
        help="The same, each of the drafts whose earlier tokens were all accepted: 0.8,0.75,0.67.",
    ),
]
Rate = Annotated[
    float | None,
    typer.Option("--acceptance-rate", help="Accepted over drafted tokens at K, where positions are not known."),
]
Tokens = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        "-K",
        min=1,
        max=LARGEST_K,
        show_default=False,
        help="K: tokens proposed a step. Absent: as many as there are positions.",
    ),
]
TargetStep = Annotated[
    str | None,
    typer.Option(
        "--target-step-ms",
        metavar="MS",
        help="A step of the target with a token for each request; or by tokens in it: 1:20,64:24,512:60.",
    ),
]
VerifyStep = Annotated[
    float | None,
    typer.Option(
        "--verify-step-ms",
        help="A step of the target with K + 1 tokens for each of the first --batch, without drafting.",
    ),
]
DraftStep = Annotated[
    str | None,
    typer.Option("--draft-step-ms", metavar="MS", help="One pass of the draft, likewise. Absent: 0, as with ngram."),
]
ParallelDrafting = Annotated[
    bool, typer.Option("--parallel-drafting", help="The draft proposes all K tokens in one pass.")
]
TargetContext = Annotated[
    float, typer.Option("--target-context-ms", help="What 1,000 tokens of KV cache add to a step of the target.")
]
DraftContext = Annotated[float, typer.Option("--draft-context-ms", help="What they add to a pass of the draft.")]
Batch = Annotated[
    str | None,
    typer.Option(
        "--batch", metavar="REQUESTS", help="Requests that decode at once; several: 1,8,32. Absent: as captured, or 1."
    ),
]
Context = Annotated[
    str | None, typer.Option("--context", metavar="TOKENS", help="Tokens of each of them; several: 2000,32000.")
]
KvTokens = Annotated[
    int | None,
    typer.Option("--kv-tokens", min=1, help="Tokens that the KV cache holds beside the draft, as plan says."),
]
KvTokensAlone = Annotated[
    int | None, typer.Option("--kv-tokens-alone", min=1, help="Tokens that it holds without speculation.")
]
SizeRatio = Annotated[
    float | None,
    typer.Option("--size-ratio", help="Bytes of the draft's weights over those of the target's, for MBSU."),
]
MethodName = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="METHOD",
        autocompletion=completion.methods,
        help="Who proposes tokens, for the prefix-cache tax and for schedules of K. Absent: as captured.",
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        "--block-size",
        min=1,
        max=1_048_576,
        show_default=False,
        help="Tokens in a block of the KV cache. Absent: as captured, or 16.",
    ),
]
MtpLayers = Annotated[
    int,
    typer.Option(
        min=1,
        max=64,
        help="Layers of the target that predict further tokens (num_nextn_predict_layers), for the tax of method mtp.",
    ),
]
SharedPrefix = Annotated[
    int | None,
    typer.Option("--shared-prefix", min=1, max=2**31, help="Tokens with which prompts begin alike, with --method."),
]


def advise_command(  # noqa: PLR0913  each is an option
    capture: Capture = None,
    *,
    baseline: Baseline = None,
    metrics: Metrics = None,
    acceptance: ByPosition = None,
    conditional_acceptance: Conditional = None,
    acceptance_rate: Rate = None,
    num_speculative_tokens: Tokens = None,
    target_step_ms: TargetStep = None,
    verify_step_ms: VerifyStep = None,
    draft_step_ms: DraftStep = None,
    parallel_drafting: ParallelDrafting = False,
    target_context_ms: TargetContext = 0.0,
    draft_context_ms: DraftContext = 0.0,
    batch: Batch = None,
    context: Context = None,
    kv_tokens: KvTokens = None,
    kv_tokens_alone: KvTokensAlone = None,
    size_ratio: SizeRatio = None,
    method: MethodName = None,
    engine_version: VersionOption = None,
    mtp_layers: MtpLayers = 1,
    block_size: BlockSize = None,
    shared_prefix: SharedPrefix = None,
    output: Annotated[TableOrData, typer.Option("--output", "-o", help="How to print the answer.")] = TableOrData.TABLE,
) -> None:
    """Say what speculation brings, by arithmetic: tokens a step, break-even acceptance, best K, by load and context.

    The numbers are those that you measured, or that a capture and one without
    speculation hold. What is taken for granted is said. It predicts nothing
    that was not measured: a comparison on your own traffic decides.

    For example: specdecode advise --acceptance 0.8,0.6 --target-step-ms 1:20,64:24
    """
    from specdecode_operator.cli.advise.answer import (  # noqa: PLC0415  not for --help
        Question,
        advise_text,
        answer,
        prefix_cache,
    )

    shares = {"--acceptance": acceptance, "--conditional-acceptance": conditional_acceptance}
    refuse_several({**shares, "--acceptance-rate": acceptance_rate, "--metrics": metrics, "CAPTURE": capture})
    refuse_several({"--target-step-ms": target_step_ms, "--baseline": baseline})
    refuse_several({"CAPTURE": capture, "--draft-step-ms": draft_step_ms})
    refuse_several({"--baseline": baseline, "--verify-step-ms": verify_step_ms})
    if verify_step_ms is not None and target_step_ms is None:
        raise typer.BadParameter("is missing: --verify-step-ms is held against it", param_hint="--target-step-ms")
    speculating = None if capture is None else measured(capture, "CAPTURE")
    plain = None if baseline is None else measured(baseline, "--baseline")
    k, found, shortened = _acceptance(
        speculating, metrics, num_speculative_tokens, acceptance or conditional_acceptance
    )
    batches = counts(batch, "--batch") if batch else measured_batches(speculating or plain)
    one_pass = parallel_drafting or (method in METHODS_OF_BLOCKS if speculating is None else speculating.one_pass)
    costs = None
    target = None if plain is None else plain_curve(plain, "--baseline")
    if target_step_ms is not None:
        target = with_verification(curve_of(target_step_ms, "--target-step-ms"), verify_step_ms, batches[0], k)
    if target is not None:
        draft = _draft(speculating, target, draft_step_ms, one_pass=one_pass)
        with refused_at("--target-step-ms"):
            costs = StepCosts(target, draft, one_pass, target_context_ms, draft_context_ms)
    question = Question(
        k=k,
        acceptance=found or acceptance_of(acceptance, conditional_acceptance, acceptance_rate, k),
        costs=costs,
        loads=loads_of(batches, context, kv_tokens, kv_tokens_alone),
        size_ratio=size_ratio,
        one_pass=one_pass,
        captured=speculating is not None,
        prefix=prefix_cache(method, engine_version, block_size, shared_prefix, speculating, mtp=(mtp_layers, k)),
        shortened=shortened,
        drafts_in_full=_drafts_in_full(
            method or (speculating.method if speculating else None),
            engine_version or (speculating.version if speculating else None),
        ),
    )
    with refused_at("--size-ratio"):
        said = answer(question)
    if output is TableOrData.TABLE:
        say(advise_text(said))
    else:
        print_data(said, output)


def _drafts_in_full(method: str | None, version: str | None) -> str | None:
    """Return who drafts K tokens, however few are asked for; None for a method that drafts fewer, or none known.

    Model runner V2 of a GPU is meant: V1 drafts fewer.
    """
    from specdecode_operator.enums import METHODS_WITH_LAYERS  # noqa: PLC0415  not for --help
    from specdecode_operator.vllm.profiles import UnknownEngineVersionError, find_profile  # noqa: PLC0415  slow
    from specdecode_operator.vllm.versions import LAUNCHED_VERSIONS  # noqa: PLC0415

    asked = ".".join((version or LAUNCHED_VERSIONS[-1]).split(".")[:2])
    try:
        profile = find_profile(asked)
    except UnknownEngineVersionError:
        return None
    found = next((each for each in METHODS_WITH_LAYERS if each == method), None)
    if found is None or found in profile.shortens_drafts_on_v2 or profile.runners.get(found) != "V2":
        return None
    return f"method {found} on model runner V2 of vLLM {asked}"


def _acceptance(
    speculating: Measured | None, metrics: str | None, k: int | None, shares: str | None
) -> tuple[int, Acceptance | None, bool]:
    if speculating is not None:
        return k or asked_k(speculating.k or None, None), speculating.acceptance, speculating.shortened
    if metrics is not None:
        counted, acceptance, shortened = acceptance_of_page(metrics)
        return k or counted, acceptance, shortened
    return asked_k(k, shares), None, False


def _draft(speculating: Measured | None, target: Curve, given: str | None, *, one_pass: bool) -> Curve:
    if speculating is not None:
        return draft_curve(speculating, target, "CAPTURE", one_pass=one_pass)
    return curve_of(given or "0", "--draft-step-ms")
