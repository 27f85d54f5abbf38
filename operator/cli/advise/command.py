"""`specdecode advise`: whether speculation pays, by arithmetic on numbers that were measured."""

from typing import Annotated

import typer

from specdecode_operator.cli.advise import options
from specdecode_operator.cli.advise.given import (
    acceptance_of,
    asked_k,
    counts,
    curve_of,
    loads_of,
    refuse_several,
    refused_at,
    with_verification,
)
from specdecode_operator.cli.advise.measured import (
    Measured,
    acceptance_of_page,
    draft_curve,
    measured,
    measured_batches,
    plain_curve,
)
from specdecode_operator.cli.options import TableOrData, VersionOption
from specdecode_operator.cli.outputs.printing import print_data
from specdecode_operator.cli.terminal import say
from specdecode_operator.payoff.acceptance import Acceptance
from specdecode_operator.payoff.step_cost import Curve, StepCosts
from specdecode_operator.vocabulary import METHODS_OF_BLOCKS


def advise_command(  # noqa: PLR0913  each is an option
    capture: options.Capture = None,
    *,
    baseline: options.Baseline = None,
    metrics: options.Metrics = None,
    acceptance: options.ByPosition = None,
    conditional_acceptance: options.Conditional = None,
    acceptance_rate: options.Rate = None,
    num_speculative_tokens: options.Tokens = None,
    target_step_ms: options.TargetStep = None,
    verify_step_ms: options.VerifyStep = None,
    draft_step_ms: options.DraftStep = None,
    parallel_drafting: options.ParallelDrafting = False,
    target_context_ms: options.TargetContext = 0.0,
    draft_context_ms: options.DraftContext = 0.0,
    batch: options.Batch = None,
    context: options.Context = None,
    kv_tokens: options.KvTokens = None,
    kv_tokens_alone: options.KvTokensAlone = None,
    size_ratio: options.SizeRatio = None,
    method: options.MethodName = None,
    engine_version: VersionOption = None,
    mtp_layers: options.MtpLayers = 1,
    block_size: options.BlockSize = None,
    shared_prefix: options.SharedPrefix = None,
    output: Annotated[TableOrData, typer.Option("--output", "-o", help="How to print the answer.")] = TableOrData.TABLE,
) -> None:
    """Say what speculation brings, by arithmetic: tokens a step, break-even acceptance, best K, by load and context.

    The numbers are those that you measured, or that a capture and one without
    speculation hold. What is taken for granted is said. It predicts nothing
    that was not measured: a comparison on your own traffic decides.

    For example: specdecode advise --acceptance 0.8,0.6 --target-step-ms 1:20,64:24
    """
    from specdecode_operator.cli.advise.answer import Question, advise_text, answer  # noqa: PLC0415  not for --help
    from specdecode_operator.cli.advise.prefix import prefix_cache  # noqa: PLC0415

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
    from specdecode_operator.api.values import METHODS_WITH_LAYERS  # noqa: PLC0415  not for --help
    from specdecode_operator.engine.profiles import UnknownEngineVersionError, find_profile  # noqa: PLC0415  slow
    from specdecode_operator.versions.table import LAUNCHED_VERSIONS  # noqa: PLC0415

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
    """Return K, the acceptance where it was measured, and whether drafts were shorter than K was at most.

    K is that asked for, else that of what was measured.
    """
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
