"""The answer of `advise`: figures, with the assumptions behind them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import typer

from specdecode_operator.cli.advise.measured import Measured
from specdecode_operator.cli.outputs import Output
from specdecode_operator.cli.terminal import aligned
from specdecode_operator.enums import Method
from specdecode_operator.problems import shown
from specdecode_operator.sizing.errors import SizingError
from specdecode_operator.sizing.memory.prefix_cache import prefix_tax
from specdecode_operator.stats.payoff import (
    Acceptance,
    Load,
    StepCosts,
    best_k,
    break_even_rate,
    break_even_tokens,
    crossover,
    memory_bound_speed_up,
    speed_up,
)
from specdecode_operator.vllm.versions import LAUNCHED_VERSIONS, release


class PositionOutput(Output):
    """Acceptance at one place in the proposal."""

    position: int
    """From 1."""
    conditional: float
    """Of the drafts whose earlier tokens were all accepted, those whose token here was, too."""
    of_all_drafts: float
    """Of all drafts, those accepted up to here: what vLLM counts."""
    expected_tokens: float
    """Tokens that a request gets from a step where K ends here."""
    known: bool
    """Whether the share was given; where not, that of the position before stands for it."""


class LoadOutput(Output):
    """Whether speculation pays with so many requests at once; times are null where none were given."""

    batch: float
    """Requests in a step with speculation."""
    batch_alone: float
    """Requests in a step without: more than with it where the KV cache is full and the draft takes a share."""
    context_tokens: float
    """Of each request."""
    full_cache: bool
    """Whether these requests are all that the KV cache holds."""
    plain_step_ms: float
    """A step without speculation."""
    step_ms: float
    """A step with K proposed tokens a request."""
    break_even_tokens: float
    """Tokens a request must get from that step for it to be worth its time."""
    break_even_acceptance: float | None
    """Accepted over drafted tokens that give them; null where even all of them are too few."""
    speed_up: float | None
    """Tokens a second over those without speculation; null where acceptance is not known."""
    best_k: int | None
    """The K with the largest speed-up; 0: no speculation."""
    best_speed_up: float | None
    """That speed-up."""


class PrefixCacheOutput(Output):
    """What the draft costs of the prefix cache."""

    method: str
    """How tokens are proposed."""
    engine_version: str
    """vLLM's version."""
    block_tokens: int
    """Tokens in a block of the KV cache."""
    mean_lost_tokens: float
    """Tokens that a prefix of at least a block loses, over all lengths alike."""
    shared_tokens: int | None
    """Tokens with which prompts begin alike; null where it was not asked."""
    found_tokens: int | None
    """Tokens of them that are found in the cache."""
    lost_tokens: int | None
    """Tokens of them that would be found without speculation, and are computed again."""


class AdviseOutput(Output):
    """The arithmetic of speculation for the numbers that were given."""

    num_speculative_tokens: int
    """K."""
    acceptance: list[PositionOutput]
    """By position up to K; empty where it is not known."""
    acceptance_rate: float | None
    """Accepted over drafted tokens at K."""
    expected_tokens: float | None
    """Tokens that a request gets from a step: mean acceptance length, block efficiency."""
    memory_bound_speed_up: float | None
    """MBSU; null without --size-ratio."""
    loads: list[LoadOutput]
    """One for each number of requests and context length; empty where no step times are known."""
    crossover_batch: int | None
    """Requests from which on K no longer pays, at the first context length and while the KV cache has room; 1 where it
    never does, null where it does with 8,192, or it is not known."""
    prefix_cache: PrefixCacheOutput | None
    """The prefix-cache tax; null without a method."""
    assumptions: list[str]
    """What was taken for granted."""


def prefix_cache(  # noqa: PLR0913  each is an option
    method: str | None,
    version: str | None,
    block_size: int | None,
    shared: int | None,
    speculating: Measured | None,
    *,
    mtp: tuple[int, int] = (1, 1),
) -> PrefixCacheOutput | None:
    """Return the prefix-cache tax of a method; None if no method is known, and nothing else was asked for.

    ``mtp`` are the target's layers that predict tokens, and K: several of them read one after the other.
    """
    recorded = speculating or Measured(k=0, acceptance=None, shortened=False, step_ms={})
    asked = method or recorded.method
    if asked is None:
        if (version, block_size, shared) != (None, None, None):
            raise typer.BadParameter("is missing: what is lost depends on it", param_hint="--method")
        return None
    version = version or recorded.version or LAUNCHED_VERSIONS[-1]
    block_tokens = block_size or recorded.block_tokens or 16
    if mtp[0] > 1 and asked != Method.MTP:
        raise typer.BadParameter(f"{mtp[0]}: it is for --method {Method.MTP} alone", param_hint="--mtp-layers")
    option, message, tax = "--engine-version", "", None
    if asked not in set(Method):
        option, message = "--method", f"{shown(asked)}: is no method: use {', '.join(Method)}"
    else:
        try:
            tax = prefix_tax(version, asked, block_tokens, mtp[1] if mtp[0] > 1 else 1)
            message = f"{shown(version)}: was not read for this: name {LAUNCHED_VERSIONS[0]} or later"
        except SizingError as error:
            message = str(error)
    if tax is None:
        # A recording may have a method or version that is unknown here.
        if method is None and shared is None:
            return None
        raise typer.BadParameter(message, param_hint=option)
    return PrefixCacheOutput(
        method=asked,
        engine_version=version,
        block_tokens=block_tokens,
        mean_lost_tokens=tax.mean_lost,
        shared_tokens=shared,
        found_tokens=None if shared is None else tax.found(shared),
        lost_tokens=None if shared is None else tax.lost(shared),
    )


@dataclass(frozen=True)
class Question:
    """The numbers that are known."""

    k: int
    acceptance: Acceptance | None = None
    costs: StepCosts | None = None
    loads: tuple[Load, ...] = ()
    size_ratio: float | None = None
    one_pass: bool = False  # The draft proposes all tokens in one pass
    captured: bool = False  # Acceptance and drafting are those of a capture
    prefix: PrefixCacheOutput | None = None
    shortened: bool = False  # Drafts were shorter than K at times
    drafts_in_full: str | None = None  # A method that drafts K tokens even if fewer are asked for


def answer(question: Question) -> AdviseOutput:
    """Return all figures that the numbers allow."""
    k, acceptance, costs, ratio = question.k, question.acceptance, question.costs, question.size_ratio
    positions, tokens, speed_up_bound, crossing = [], None, None, None
    if acceptance is not None:
        tokens = acceptance.expected_tokens(k)
        shares = zip(acceptance.conditional_to(k), acceptance.reached(k), strict=True)
        for position, (conditional, reached) in enumerate(shares, start=1):
            row = PositionOutput(
                position=position,
                conditional=conditional,
                of_all_drafts=reached,
                expected_tokens=acceptance.expected_tokens(position),
                known=position <= len(acceptance.conditional),
            )
            positions.append(row)
        if ratio is not None:
            speed_up_bound = memory_bound_speed_up(tokens, 1 if question.one_pass else k, ratio)
        if costs is not None and question.loads:
            crossing = crossover(acceptance, costs, k, question.loads[0].context_tokens)
    return AdviseOutput(
        num_speculative_tokens=k,
        acceptance=positions,
        acceptance_rate=None if acceptance is None else acceptance.rate(k),
        expected_tokens=tokens,
        memory_bound_speed_up=speed_up_bound,
        loads=[_at(load, costs, k, acceptance) for load in question.loads] if costs else [],
        crossover_batch=crossing,
        prefix_cache=question.prefix,
        assumptions=list(_assumptions(question, crossing)),
    )


def _at(load: Load, costs: StepCosts, k: int, acceptance: Acceptance | None) -> LoadOutput:
    needed = break_even_tokens(costs, k, load)
    best = None if acceptance is None else best_k(acceptance, costs, load)
    return LoadOutput(
        batch=load.batch,
        batch_alone=load.batch_alone,
        context_tokens=load.context_tokens,
        full_cache=load.full_cache,
        plain_step_ms=costs.step_ms(load.batch_alone, 0, load.context_tokens),
        step_ms=costs.step_ms(load.batch, k, load.context_tokens),
        break_even_tokens=needed,
        break_even_acceptance=break_even_rate(needed, k),
        speed_up=None if acceptance is None else speed_up(acceptance, costs, k, load),
        best_k=best,
        best_speed_up=None if acceptance is None or best is None else speed_up(acceptance, costs, best, load),
    )


def _assumptions(question: Question, crossing: int | None) -> Iterator[str]:
    acceptance, costs, captured, prefix = question.acceptance, question.costs, question.captured, question.prefix
    if acceptance is not None and len(acceptance.conditional) < question.k:
        yield f"positions after {len(acceptance.conditional)} are accepted as that one, of the drafts that got so far"
    if question.shortened:
        yield "drafts were shorter than K at times: the tokens that they lack count as refused"
    if costs is None and (captured or acceptance is None):
        yield "break-even takes the target's own step times: give --baseline, or --target-step-ms"
    if costs is not None:
        if captured:
            yield "drafting takes what is left of a recorded step beside the target's pass over as many tokens"
        yield from _of_times(question, costs, crossing)
    if question.size_ratio is not None and acceptance is not None:
        yield "MBSU: a step takes as long as reading the weights of each pass; nothing else takes time"
    if prefix is not None and release(prefix.engine_version) > release(LAUNCHED_VERSIONS[-1]):
        yield (
            f"vLLM {prefix.engine_version} is newer than all that were read: its prefix cache is taken to be "
            f"that of {LAUNCHED_VERSIONS[-1]}"
        )


def _of_times(question: Question, costs: StepCosts, crossing: int | None) -> Iterator[str]:
    k, acceptance, loads = question.k, question.acceptance, question.loads
    if acceptance is not None:
        yield "the best K takes later positions to be accepted as the last one known, of the drafts that got so far"
        if question.drafts_in_full is not None and not costs.one_pass and k > 1:
            # In vllm/v1/worker/gpu/spec_decode/standalone_ar/speculator.py, _multi_step_decode runs all passes; tokens
            # beyond those asked for are dropped before verification (v1/worker/gpu/model_runner.py).
            in_full = replace(costs, drafted=k)
            best = {
                f"{load.batch:g}": max(range(1, k + 1), key=lambda each: speed_up(acceptance, in_full, each, load))
                for load in loads
            }
            listed = ", ".join(f"{each} of {batch} requests" for batch, each in best.items())
            yield (
                f"with numSpeculativeTokensByBatchSize {question.drafts_in_full} still drafts {k} tokens each step,"
                f" and fewer save verification alone: its best numbers are {listed}; the best K is that of an engine"
                " started with it"
            )
    batches = [(load.batch, load.batch_alone) for load in loads]
    batches += [] if crossing is None else [(crossing, crossing)]
    steps = [tokens for batch, alone in batches for tokens in (alone, batch * (k + 1))]
    passes = [batch * (k if costs.one_pass else 1) for batch, _ in batches]
    for what, curve, asked in (
        ("steps of {} tokens were asked for, the target's", costs.target, steps),
        ("passes of {} tokens were asked for, the draft's", costs.draft, passes),
    ):
        if beyond := [tokens for tokens in asked if not curve.knows(tokens)]:
            low, high = curve.points[0][0], curve.points[-1][0]
            asked_for = " to ".join(dict.fromkeys(f"{each:.5g}" for each in (min(beyond), max(beyond))))
            yield (
                f"{what.format(asked_for)} times are known of {low:g} to {high:g}: below they stay as they are, above"
                " they go on"
            )
    if len(costs.target.points) == 1:
        yield "a step of the target takes equally long whatever is in it: true of few requests (--verify-step-ms)"
    if costs.target.falls:
        yield "times of the target fall where a step has more tokens: measure longer, speed-ups come out too large"
    if any(load.context_tokens for load in loads) and not costs.target_ms_per_1000_context:
        yield "reading the context takes the target no time: give --target-context-ms"
    yield "requests decode all the time: prefill, and steps that a finished request leaves early, are not counted"
    yield "acceptance is the same at every load, and adaptive verification is off: under it acceptance reads low"


def advise_text(found: AdviseOutput) -> str:
    """Return the answer for people."""
    parts = [_acceptance_text(found), *_loads_text(found)]
    if found.memory_bound_speed_up is not None:
        parts.append(f"memory-bound speed-up, MBSU: {found.memory_bound_speed_up:.2f}x")
    if (crossing := found.crossover_batch) is not None:
        context, k = found.loads[0].context_tokens, found.num_speculative_tokens
        each = f" of {context:,.0f} tokens" if context else ""
        room = " while the KV cache has room" if any(load.full_cache for load in found.loads) else ""
        never = f"K {k} pays for no number of requests{each}{room}"
        parts.append(never if crossing == 1 else f"K {k} no longer pays from {crossing:,} requests{each} on{room}")
    if (prefix := found.prefix_cache) is not None:
        text = f"prefix cache, {prefix.method} in vLLM {prefix.engine_version}: "
        if not prefix.mean_lost_tokens:
            text += "nothing is lost"
        else:
            mean, shared, lost = prefix.mean_lost_tokens, prefix.shared_tokens, prefix.lost_tokens
            text += f"each prefix loses {'1 token' if mean == 1 else f'{mean:g} tokens'} on average"
            if shared is not None and lost is not None:
                share = f"{100 * lost / shared:.1f} %"
                text += f"; of {shared:,} that prompts share {lost:,} are computed again ({share})"
        parts.append(text)
    return "\n".join([*parts, *(f"note: {each}" for each in found.assumptions)])


def _acceptance_text(found: AdviseOutput) -> str:
    if found.expected_tokens is None or found.acceptance_rate is None:
        return f"K {found.num_speculative_tokens}: acceptance is not known"
    head = (
        f"K {found.num_speculative_tokens}: {found.expected_tokens:.2f} tokens a step expected, acceptance "
        f"{100 * found.acceptance_rate:.0f} %"
    )
    rows = [("POSITION", "OF ALL DRAFTS", "OF THOSE THAT GOT THERE", "TOKENS A STEP")]
    for each in found.acceptance:
        assumed = "" if each.known else " (assumed)"
        shares = (f"{100 * each.of_all_drafts:.1f} %", f"{100 * each.conditional:.1f} %{assumed}")
        rows.append((str(each.position), *shares, f"{each.expected_tokens:.2f}"))
    return "\n".join([head, *aligned(rows)])


def _loads_text(found: AdviseOutput) -> list[str]:
    with_k = f"STEP WITH K {found.num_speculative_tokens}"
    rows = [("REQUESTS", "CONTEXT", "PLAIN STEP", with_k, "BREAK-EVEN", "SPEED-UP", "BEST K", "ITS SPEED-UP")]
    for each in found.loads:
        requests = f"{each.batch:.4g}" if not each.full_cache else f"{each.batch:.4g} of {each.batch_alone:.4g} (full)"
        needed = each.break_even_acceptance
        ups = ("-" if up is None else f"{up:.2f}x" for up in (each.speed_up, each.best_speed_up))
        row = (
            requests,
            f"{each.context_tokens:,.0f}" if each.context_tokens else "-",
            f"{each.plain_step_ms:.2f} ms",
            f"{each.step_ms:.2f} ms",
            "> 100 %" if needed is None else f"{100 * needed:.0f} %",
            next(ups),
            "-" if each.best_k is None else str(each.best_k),
            next(ups),
        )
        rows.append(row)
    return aligned(rows) if found.loads else []
