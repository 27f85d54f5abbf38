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
    refused_at,
    with_verification,
)
from specdecode_operator.cli.options import TableOrData
from specdecode_operator.cli.outputs.printing import print_data
from specdecode_operator.cli.terminal import say
from specdecode_operator.payoff.step_cost import StepCosts


def advise_command(  # noqa: PLR0913  each is an option
    *,
    acceptance: options.ByPosition = None,
    conditional_acceptance: options.Conditional = None,
    acceptance_rate: options.Rate = None,
    num_speculative_tokens: options.Tokens = None,
    target_step_ms: options.TargetStep = None,
    verify_step_ms: options.VerifyStep = None,
    draft_step_ms: options.DraftStep = "0",
    parallel_drafting: options.ParallelDrafting = False,
    target_context_ms: options.TargetContext = 0.0,
    draft_context_ms: options.DraftContext = 0.0,
    batch: options.Batch = "1",
    context: options.Context = None,
    kv_tokens: options.KvTokens = None,
    kv_tokens_alone: options.KvTokensAlone = None,
    size_ratio: options.SizeRatio = None,
    output: Annotated[TableOrData, typer.Option("--output", "-o", help="How to print the answer.")] = TableOrData.TABLE,
) -> None:
    """Say what speculation brings, by arithmetic: tokens a step, break-even acceptance, best K, by load and context.

    The numbers are those that you measured. What is taken for granted is
    said. It predicts nothing that was not measured: a comparison on your own
    traffic decides.

    For example: specdecode advise --acceptance 0.8,0.6 --target-step-ms 1:20,64:24
    """
    from specdecode_operator.cli.advise.answer import Question, advise_text, answer  # noqa: PLC0415  not for --help

    k = asked_k(num_speculative_tokens, acceptance or conditional_acceptance)
    batches = counts(batch, "--batch")
    costs = None
    if target_step_ms is not None:
        with refused_at("--target-step-ms"):
            target = with_verification(curve_of(target_step_ms, "--target-step-ms"), verify_step_ms, batches[0], k)
            draft = curve_of(draft_step_ms, "--draft-step-ms")
            costs = StepCosts(target, draft, parallel_drafting, target_context_ms, draft_context_ms)
    question = Question(
        k=k,
        acceptance=acceptance_of(acceptance, conditional_acceptance, acceptance_rate, k),
        costs=costs,
        loads=loads_of(batches, context, kv_tokens, kv_tokens_alone),
        size_ratio=size_ratio,
    )
    found = answer(question)
    if output is TableOrData.TABLE:
        say(advise_text(found))
    else:
        print_data(found, output)
