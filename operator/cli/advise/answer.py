"""Output of `advise`: figures and the assumptions behind them."""

from collections.abc import Iterator, Sequence
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
    LARGEST_K,
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
    """Acceptance at one position of the draft."""

    position: int
    """Position in the draft, from 1."""
    conditional: float
    """Share of drafts with this token accepted, among those whose earlier tokens were all accepted."""
    of_all_drafts: float
    """Share of all drafts that were accepted up to this position, as vLLM counts it."""
    expected_tokens: float
    """Expected tokens per step and request if K is this position."""
    known: bool
    """Whether acceptance was given for this position. If false, `conditional` is that of the last given position."""


class LoadOutput(Output):
    """Payoff of speculation at one load: a number of requests and their context length."""

    batch: float
    """Requests per step with speculation."""
    batch_alone: float
    """Requests per step without speculation. More than `batch` if the draft takes space in a full KV cache."""
    context_tokens: float
    """Context length of each request."""
    full_cache: bool
    """Whether these requests fill the KV cache."""
    plain_step_ms: float
    """Time of a step without speculation."""
    step_ms: float
    """Time of a step with K draft tokens per request."""
    break_even_tokens: float
    """Tokens per step and request at which speculation breaks even."""
    break_even_acceptance: float | None
    """Accepted divided by drafted tokens at break-even; null if accepting all of them is not enough."""
    speed_up: float | None
    """Tokens per second at K, divided by those without speculation; null if acceptance is unknown."""
    extrapolated: bool
    """Whether the figures above need a step time or a position outside the measured ones."""
    best_k: int | None
    """K with the largest speed-up, at most one more than the positions with known acceptance; 0: no speculation."""
    best_speed_up: float | None
    """Speed-up at `best_k`."""
    best_k_extrapolated: bool
    """Whether `best_k` needs a step time or a position outside the measured ones."""


class PrefixCacheOutput(Output):
    """Cost of the draft for the prefix cache."""

    method: str
    """Speculation method."""
    engine_version: str
    """vLLM version."""
    block_tokens: int
    """Tokens per block of the KV cache."""
    mean_lost_tokens: float
    """Tokens that a prefix of at least one block loses, averaged over all lengths."""
    shared_tokens: int | None
    """Length of the common beginning of prompts; null without --shared-prefix."""
    found_tokens: int | None
    """Shared tokens that are reused from the cache."""
    lost_tokens: int | None
    """Shared tokens that are computed again because of the draft."""


class AdviseOutput(Output):
    """Payoff of speculation, computed from the given measurements."""

    num_speculative_tokens: int
    """K."""
    acceptance: list[PositionOutput]
    """Acceptance per position up to K; empty if it is unknown."""
    acceptance_rate: float | None
    """Accepted divided by drafted tokens at K."""
    expected_tokens: float | None
    """Expected tokens per step and request: mean acceptance length, block efficiency."""
    memory_bound_speed_up: float | None
    """Memory-bound speed-up (MBSU); null without --size-ratio."""
    loads: list[LoadOutput]
    """One entry per number of requests and context length; empty without step times."""
    measured_batches: tuple[int, int] | None
    """Smallest and largest number of requests, up to 8,192, whose steps at K need no extrapolated time; null if there
    are none."""
    crossover_batch: int | None
    """Requests from which K no longer pays, at the first context length and while the KV cache has room. It is the
    smallest of `measured_batches` if K pays at none of them, and null if K pays at the largest or acceptance is
    unknown."""
    prefix_cache: PrefixCacheOutput | None
    """Prefix-cache tax; null without a method."""
    assumptions: list[str]
    """Assumptions behind the figures."""


def prefix_cache(  # noqa: PLR0913  each is an option
    method: str | None,
    version: str | None,
    block_size: int | None,
    shared: int | None,
    speculating: Measured | None,
    *,
    mtp: tuple[int, int] = (1, 1),
) -> PrefixCacheOutput | None:
    """Return the prefix-cache tax of a method; None if the method is unknown and no other option needs it.

    ``mtp`` is the number of the target's MTP layers, and K. Several layers run in a chain.
    """
    recorded = speculating or Measured(k=0, acceptance=None, shortened=False, step_ms={})
    asked = method or recorded.method
    if asked is None:
        if (version, block_size, shared) != (None, None, None):
            raise typer.BadParameter("is missing: the prefix-cache tax depends on the method", param_hint="--method")
        return None
    version = version or recorded.version or LAUNCHED_VERSIONS[-1]
    block_tokens = block_size or recorded.block_tokens or 16
    if mtp[0] > 1 and asked != Method.MTP:
        raise typer.BadParameter(f"{mtp[0]}: only applies to --method {Method.MTP}", param_hint="--mtp-layers")
    option, message, tax = "--engine-version", "", None
    if asked not in set(Method):
        option, message = "--method", f"{shown(asked)}: is not a method; use one of {', '.join(Method)}"
    else:
        try:
            tax = prefix_tax(version, asked, block_tokens, mtp[1] if mtp[0] > 1 else 1)
            message = f"{shown(version)}: prefix cache unknown; use {LAUNCHED_VERSIONS[0]} or later"
        except SizingError as error:
            message = str(error)
    if tax is None:
        # The method or version of a capture may be unknown here.
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
    """The measurements."""

    k: int
    acceptance: Acceptance | None = None
    costs: StepCosts | None = None
    loads: tuple[Load, ...] = ()
    size_ratio: float | None = None
    one_pass: bool = False  # The draft proposes all tokens in one pass
    captured: bool = False  # Acceptance and drafting times are from a capture
    prefix: PrefixCacheOutput | None = None
    shortened: bool = False  # Some drafts were shorter than K
    mean_only: bool = False  # Acceptance is known as a mean over the positions
    drafts_in_full: str | None = None  # A method that drafts K tokens even if a schedule asks for fewer

    @property
    def positions(self) -> int:
        """Positions with known acceptance; K without any, because no figure then depends on acceptance."""
        return self.k if self.acceptance is None else len(self.acceptance.conditional)


def answer(question: Question) -> AdviseOutput:
    """Return all figures that the measurements allow."""
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
                known=position <= question.positions,
            )
            positions.append(row)
        if ratio is not None:
            speed_up_bound = memory_bound_speed_up(tokens, 1 if question.one_pass else k, ratio)
        if costs is not None:
            crossing = crossover(acceptance, costs, k, question.loads[0].context_tokens)
    loads = [_at(load, costs, question) for load in question.loads] if costs else []
    batches = costs.measured_batches(k) if costs else range(0)
    return AdviseOutput(
        num_speculative_tokens=k,
        acceptance=positions,
        acceptance_rate=None if acceptance is None else acceptance.rate(k),
        expected_tokens=tokens,
        memory_bound_speed_up=speed_up_bound,
        loads=loads,
        measured_batches=(batches[0], batches[-1]) if batches else None,
        crossover_batch=crossing,
        prefix_cache=question.prefix,
        assumptions=list(_assumptions(question, loads)),
    )


def _at(load: Load, costs: StepCosts, question: Question) -> LoadOutput:
    k, acceptance = question.k, question.acceptance
    needed = break_even_tokens(costs, k, load)
    best = None if acceptance is None else best_k(acceptance, costs, load, min(LARGEST_K, question.positions + 1))
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
        extrapolated=_is_extrapolated(load, costs, question, k),
        best_k=best,
        best_speed_up=None if acceptance is None or best is None else speed_up(acceptance, costs, best, load),
        best_k_extrapolated=best is not None and _is_extrapolated(load, costs, question, best),
    )


def _is_extrapolated(load: Load, costs: StepCosts, question: Question, k: int) -> bool:
    # K 0 is the best if K 1 is slower, which needs the times of K 1.
    return k > question.positions or bool(costs.extrapolated(load, max(k, 1)))


def _assumptions(question: Question, loads: Sequence[LoadOutput]) -> Iterator[str]:
    acceptance, costs, captured, prefix = question.acceptance, question.costs, question.captured, question.prefix
    if max([question.k, *(each.best_k or 0 for each in loads)]) > question.positions:
        yield f"extrapolated (*): later positions have the conditional acceptance of position {question.positions}"
    if question.mean_only:
        yield "conditional acceptance is the same at every position (--acceptance-rate)"
    if question.shortened:
        yield "some drafts were shorter than K: the missing tokens count as rejected"
    if costs is None and (captured or acceptance is None):
        yield "break-even and speed-up need step times of the target: give --baseline or --target-step-ms"
    if costs is not None:
        if captured:
            yield "drafting time is the time of a recorded step minus the target's time for the same number of tokens"
        yield from _of_times(question, costs, loads)
    if question.size_ratio is not None and acceptance is not None:
        yield "MBSU counts only the time to read the weights in each pass"
    if prefix is not None and release(prefix.engine_version) > release(LAUNCHED_VERSIONS[-1]):
        yield (
            f"vLLM {prefix.engine_version} is newer than the newest known version {LAUNCHED_VERSIONS[-1]}: its prefix"
            " cache is assumed to work the same"
        )


def _of_times(question: Question, costs: StepCosts, loads: Sequence[LoadOutput]) -> Iterator[str]:
    k, acceptance = question.k, question.acceptance
    if acceptance is not None and question.drafts_in_full is not None and not costs.one_pass and k > 1:
        # In vllm/v1/worker/gpu/spec_decode/standalone_ar/speculator.py, _multi_step_decode runs all passes; tokens
        # beyond those asked for are dropped before verification (v1/worker/gpu/model_runner.py).
        in_full = replace(costs, drafted=k)
        scheduled = range(1, min(k, question.positions + 1) + 1)
        best = {
            f"{load.batch:g}": max(scheduled, key=lambda each: speed_up(acceptance, in_full, each, load))
            for load in question.loads
        }
        listed = ", ".join(
            f"{each} at {batch} {'request' if batch == '1' else 'requests'}" for batch, each in best.items()
        )
        yield (
            f"numSpeculativeTokensByBatchSize saves only verification with {question.drafts_in_full}, which always"
            f" drafts {k} tokens: its best entries are {listed}. BEST K is for an engine that is started with it"
        )
    beyond = [
        curve
        for load, found in zip(question.loads, loads, strict=True)
        for tried in (k, k if found.best_k is None else max(found.best_k, 1))
        for curve in costs.extrapolated(load, tried)
    ]
    for what, curve in (("target steps", costs.target), ("draft passes", costs.draft)):
        if any(each is curve for each in beyond):
            low, high = curve.points[0][0], curve.points[-1][0]
            measured = f"{low:,g} to {high:,g}" if low < high else f"{low:,g}"
            yield f"extrapolated (*): the measured {what} have {measured} {'token' if high == 1 else 'tokens'}"
    if len(costs.target.points) == 1:
        yield "a target step takes the same time for any number of tokens: true of few requests (--verify-step-ms)"
    if len({ms for _, ms in costs.draft.points}) == 1 and costs.draft.points[0][1]:
        yield "a draft pass takes the same time for any number of tokens: if not, give --draft-step-ms by tokens"
    if costs.target.falls:
        yield "target step times fall with more tokens, so speed-ups are too large: measure longer"
    if any(load.context_tokens for load in question.loads) and not costs.target_ms_per_1000_context:
        yield "reading the context takes the target no time: give --target-context-ms"
    yield "prefill and the surplus tokens of a request's last step are not included"
    yield "acceptance is the same at every load, and adaptive verification is off: it makes acceptance read low"


def advise_text(found: AdviseOutput) -> str:
    """Return the figures as text."""
    parts = [_acceptance_text(found), *_loads_text(found)]
    if found.memory_bound_speed_up is not None:
        parts.append(f"memory-bound speed-up, MBSU: {found.memory_bound_speed_up:.2f}x{_mark(not _knows_k(found))}")
    if found.loads and found.acceptance:
        parts.append(_crossover_text(found))
    if (prefix := found.prefix_cache) is not None:
        text = f"prefix cache, {prefix.method} in vLLM {prefix.engine_version}: "
        if not prefix.mean_lost_tokens:
            text += "loses no tokens"
        else:
            mean, shared, lost = prefix.mean_lost_tokens, prefix.shared_tokens, prefix.lost_tokens
            text += f"each prefix loses {'1 token' if mean == 1 else f'{mean:g} tokens'} on average"
            if shared is not None and lost is not None:
                share = f"{100 * lost / shared:.1f} %"
                text += f"; {lost:,} of {shared:,} shared tokens are computed again ({share})"
        parts.append(text)
    return "\n".join([*parts, *(f"note: {each}" for each in found.assumptions)])


def _mark(extrapolated: bool) -> str:
    return "*" if extrapolated else ""


def _knows_k(found: AdviseOutput) -> bool:
    return all(each.known for each in found.acceptance)


def _acceptance_text(found: AdviseOutput) -> str:
    if found.expected_tokens is None or found.acceptance_rate is None:
        return f"K {found.num_speculative_tokens}: acceptance is unknown"
    head = (
        f"K {found.num_speculative_tokens}: {found.expected_tokens:.2f} tokens per step, acceptance "
        f"{100 * found.acceptance_rate:.0f} %"
    )
    if not _knows_k(found):
        head += f", extrapolated (*) beyond position {sum(each.known for each in found.acceptance)}"
    rows = [("POSITION", "OF ALL DRAFTS", "CONDITIONAL", "TOKENS PER STEP")]
    for each in found.acceptance:
        shares = (f"{100 * each.of_all_drafts:.1f} %", f"{100 * each.conditional:.1f} %")
        rows.append((f"{each.position}{_mark(not each.known)}", *shares, f"{each.expected_tokens:.2f}"))
    return "\n".join([head, *aligned(rows)])


def _loads_text(found: AdviseOutput) -> list[str]:
    with_k = f"STEP WITH K {found.num_speculative_tokens}"
    rows = [("REQUESTS", "CONTEXT", "PLAIN STEP", with_k, "BREAK-EVEN", "SPEED-UP", "BEST K", "BEST SPEED-UP")]
    for each in found.loads:
        mark, best_mark = _mark(each.extrapolated), _mark(each.best_k_extrapolated)
        requests = f"{each.batch:.4g}" if not each.full_cache else f"{each.batch:.4g} of {each.batch_alone:.4g} (full)"
        needed = each.break_even_acceptance
        row = (
            f"{requests}{mark}",
            f"{each.context_tokens:,.0f}" if each.context_tokens else "-",
            f"{each.plain_step_ms:.2f} ms",
            f"{each.step_ms:.2f} ms",
            "> 100 %" if needed is None else f"{100 * needed:.0f} %",
            "-" if each.speed_up is None else f"{each.speed_up:.2f}x{mark}",
            "-" if each.best_k is None else f"{each.best_k}{best_mark}",
            "-" if each.best_speed_up is None else f"{each.best_speed_up:.2f}x{best_mark}",
        )
        rows.append(row)
    return aligned(rows) if found.loads else []


def _crossover_text(found: AdviseOutput) -> str:
    k = f"K {found.num_speculative_tokens}{_mark(not _knows_k(found))}"
    if found.measured_batches is None:
        return f"crossover of {k} unknown: its steps are extrapolated at every number of requests"
    first, last = found.measured_batches
    context = found.loads[0].context_tokens
    of = f" of {context:,.0f} tokens" if context else ""
    room = " while the KV cache has room" if any(load.full_cache for load in found.loads) else ""
    most = "1 request" if last == 1 else f"{last:,} requests"
    if found.crossover_batch is None:
        return f"no crossover within the measured loads: {k} still pays at {most}{of}{room}"
    if found.crossover_batch == first:
        return f"{k} does not pay within the measured loads, {first:,} to {most}{of}{room}"
    return f"{k} no longer pays from {found.crossover_batch:,} requests{of} on{room}"
