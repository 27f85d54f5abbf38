"""`specdecode advise`: compute from measured numbers whether speculation pays."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Final

import typer

from specdecode_operator.capture.trace_reader import Recording, RecordingError, read_recording, read_steps
from specdecode_operator.cli import completion
from specdecode_operator.cli.options import TableOrData, VersionOption, refused
from specdecode_operator.cli.outputs import Output, print_data
from specdecode_operator.cli.replay.fit import NO_NUMPY
from specdecode_operator.cli.terminal import aligned, say
from specdecode_operator.cli.text_files import DocumentError, place_of, read_text
from specdecode_operator.enums import METHODS_OF_BLOCKS, METHODS_OF_FREE_LENGTH, METHODS_WITH_LAYERS, Method
from specdecode_operator.problems import printable, shown
from specdecode_operator.sizing.errors import SizingError
from specdecode_operator.sizing.memory.prefix_cache import prefix_tax
from specdecode_operator.stats.payoff import (
    LARGEST_K,
    NO_DRAFT,
    Acceptance,
    Curve,
    Load,
    PayoffError,
    StepCosts,
    best_k,
    break_even_rate,
    break_even_tokens,
    crossover,
    full_cache,
    memory_bound_speed_up,
    speed_up,
)
from specdecode_operator.vllm.engine_metrics import UnreadableMetricsError, read_metrics
from specdecode_operator.vllm.profiles import UnknownEngineVersionError, find_profile
from specdecode_operator.vllm.versions import LAUNCHED_VERSIONS, release

MOST_NUMBERS: Final = 64
_LARGEST: Final = 2**31


def refuse_several(given: Mapping[str, object]) -> None:
    """Raise BadParameter if more than one of the options is given."""
    named = [option for option, value in given.items() if value is not None]
    if len(named) > 1:
        raise typer.BadParameter(f"cannot be combined with {named[0]}: give one of them", param_hint=named[1])


def acceptance_of(by_position: str | None, conditional: str | None, rate: float | None, k: int) -> Acceptance | None:
    """Return the acceptance from one of three options, or None without any."""
    if by_position is not None:
        with refused("--acceptance", PayoffError):
            return Acceptance.by_position(_numbers(by_position, "--acceptance"))
    if conditional is not None:
        with refused("--conditional-acceptance", PayoffError):
            return Acceptance(tuple(_numbers(conditional, "--conditional-acceptance")))
    if rate is not None:
        with refused("--acceptance-rate", PayoffError):
            return Acceptance.of_rate(rate, k)
    return None


def curve_of(text: str, option: str, *, constant: bool = False) -> Curve:
    """Parse ``MS`` or ``TOKENS:MS,TOKENS:MS``; ``MS`` is the time of one token, or with ``constant`` of any number."""
    parts = text.split(",")
    with refused(option, PayoffError):
        if ":" not in text and len(parts) == 1:
            (ms,) = _numbers(text, option)
            return Curve.constant(ms) if constant else Curve(((1.0, ms),))
        if lacking := [part for part in parts[:MOST_NUMBERS] if ":" not in part]:
            raise typer.BadParameter(f"{shown(lacking[0])}: write TOKENS:MS, such as 64:21.5", param_hint=option)
        tokens, times = (",".join(part.partition(":")[side] for part in parts) for side in (0, 2))
        return Curve(tuple(zip(_numbers(tokens, option), _numbers(times, option), strict=True)))


def _numbers(text: str, option: str) -> list[float]:
    found, parts = [], text.split(",")
    if len(parts) > MOST_NUMBERS:
        raise typer.BadParameter(f"{len(parts)} numbers exceed the maximum of {MOST_NUMBERS}", param_hint=option)
    for part in parts:
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise typer.BadParameter(f"{shown(part)}: is not a number; separate numbers with commas", param_hint=option)
        found.append(value)
    return found


def counts(text: str, option: str) -> list[int]:
    """Parse a list of positive whole numbers that are separated by commas."""
    found = _numbers(text, option)
    for each in found:
        if each != int(each) or not 0 < each <= _LARGEST:
            raise typer.BadParameter(f"{each:g}: is not a whole number from 1 to {_LARGEST}", param_hint=option)
    return [int(each) for each in found]


def with_verification(target: Curve, verify_ms: float | None, batch: int, k: int) -> Curve:
    """Return the curve through a plain step and a verifying step of the same requests."""
    if verify_ms is None:
        return target
    if len(target.points) > 1:
        message = "only applies to a single --target-step-ms, not to times by tokens: leave it out"
        raise typer.BadParameter(message, param_hint="--verify-step-ms")
    with refused("--verify-step-ms", PayoffError):
        return Curve(((batch, target.points[0][1]), (batch * (k + 1), verify_ms)))


def loads_of(
    batches: Sequence[int], context: str | None, kv_tokens: int | None, kv_tokens_alone: int | None
) -> tuple[Load, ...]:
    """Return one load per number of requests and context length, and those that fill the cache if its size is given."""
    contexts = [] if context is None else counts(context, "--context")
    loads = [Load.same(batch, tokens) for tokens in contexts or [0] for batch in batches]
    if (kv_tokens is None) != (kv_tokens_alone is None):
        missing = "--kv-tokens" if kv_tokens is None else "--kv-tokens-alone"
        raise typer.BadParameter("is missing: give both sizes as reported by plan, or neither", param_hint=missing)
    if kv_tokens is not None and kv_tokens_alone is not None:
        if not contexts:
            message = "is missing: the number of requests that fill the KV cache depends on it"
            raise typer.BadParameter(message, param_hint="--context")
        with refused("--kv-tokens", PayoffError):
            loads += [full_cache(kv_tokens, kv_tokens_alone, tokens) for tokens in contexts]
    return tuple(loads)


_LEAST_STEPS: Final = 20
"""Minimum number of steps with the same number of requests; the median of fewer is too noisy."""
_MOST_BATCHES: Final = 8
"""Approximate number of request counts that are shown by default."""


@dataclass(frozen=True)
class Measured:
    """Measurements of a recorded engine. Step times are by number of requests, all of them decoding."""

    k: int
    acceptance: Acceptance | None
    shortened: bool  # Some drafts were shorter than K, which counts as rejected
    step_ms: Mapping[int, float]
    # From the header; None if it lacks them
    method: str | None = None
    version: str | None = None
    block_tokens: int | None = None
    parallel: bool = False

    @property
    def one_pass(self) -> bool:
        """Whether the draft is known to propose all tokens in one pass; older recorders omit this for heads."""
        return self.parallel or self.method in METHODS_OF_BLOCKS


def measured(path: Path, option: str) -> Measured:
    """Read the measurements from a capture's folder; raise BadParameter if it has none."""
    with refused(option, PayoffError):
        try:
            recording = read_recording(path)
            if recording.steps is None:
                message = f"{printable(str(path))}: has no step-stats.jsonl; name the folder of a capture"
                raise typer.BadParameter(message, param_hint=option)
            if (k := recording.num_speculative_tokens) > LARGEST_K:
                raise typer.BadParameter(f"K {k} of the capture exceeds the maximum of {LARGEST_K}", param_hint=option)
            acceptance, shortened = None, False
            drafts, drafted, accepted = 0, 0, Counter[int]()
            for line in read_steps(recording.steps) if k else ():
                stats = line.scheduler.spec_decoding_stats
                if stats is not None:
                    drafts += stats.num_drafts
                    drafted += stats.num_draft_tokens
                    accepted.update(dict(enumerate(stats.num_accepted_tokens_per_pos[:k])))
            if drafts:
                acceptance = Acceptance.by_position([accepted[position] / drafts for position in range(k)])
                shortened = drafted < k * drafts
            step_ms = _step_ms(recording, k)
        except RecordingError as error:
            raise typer.BadParameter(str(error), param_hint=option) from error
        except ImportError as error:
            raise typer.BadParameter(NO_NUMPY, param_hint=option) from error
    meta = recording.meta
    method = (meta.speculative or {}).get("method")
    named = (method if isinstance(method, str) else None, meta.vllm_version, meta.block_size)
    return Measured(k, acceptance, shortened, step_ms, *named, meta.drafts_in_one_pass)


def _step_ms(recording: Recording, k: int) -> dict[int, float]:
    """Return the median step time by number of requests, of steps with K + 1 tokens per request and no prefill."""
    from specdecode_operator.replay.fit_step_time import MeasuredSteps  # noqa: PLC0415  takes numpy

    found = MeasuredSteps.of([recording])
    times: defaultdict[int, list[float]] = defaultdict(list)
    for requests, tokens, prefill, ms in zip(
        found.requests, found.scheduled_tokens, found.prefill_tokens, found.ms, strict=True
    ):
        if not prefill and tokens == requests * (k + 1):
            times[int(requests)].append(float(ms))
    return {batch: median(times[batch]) for batch in sorted(times) if len(times[batch]) >= _LEAST_STEPS}


_NO_STEPS: Final = (
    f"fewer than {_LEAST_STEPS} steps with the same number of requests, all of them decoding: record a steadier load, "
    "with --enable-logging-iteration-details as captures set it"
)


def plain_curve(baseline: Measured, option: str) -> Curve:
    """Return target step times by number of tokens, from a capture without speculation."""
    if baseline.k:
        message = f"speculates with K {baseline.k}: name a capture of the same load with method none"
        raise typer.BadParameter(message, param_hint=option)
    if not baseline.step_ms:
        raise typer.BadParameter(_NO_STEPS, param_hint=option)
    with refused(option, PayoffError):
        return Curve(tuple(baseline.step_ms.items()))


def draft_curve(
    text: str | None, speculating: Measured | None, target: Curve, method: str | None, *, one_pass: bool
) -> Curve:
    """Return draft pass times from a capture or --draft-step-ms; without them, only lookup methods have known times."""
    if speculating is not None:
        return _recorded_draft(speculating, target, "CAPTURE", one_pass=one_pass)
    if text is not None:
        return curve_of(text, "--draft-step-ms", constant=True)
    if method in METHODS_OF_FREE_LENGTH:
        return NO_DRAFT
    message = (
        "is missing: give the time of one draft pass in milliseconds, or a CAPTURE with speculation to derive it; only "
        f"--method {', '.join(METHODS_OF_FREE_LENGTH)} need neither"
    )
    raise typer.BadParameter(message, param_hint="--draft-step-ms")


def _recorded_draft(speculating: Measured, target: Curve, option: str, *, one_pass: bool) -> Curve:
    """Return draft pass times by number of tokens: the recorded step time minus the target's, divided by the passes."""
    if not speculating.k:
        raise typer.BadParameter("does not speculate: name it with --baseline", param_hint=option)
    if not speculating.step_ms:
        raise typer.BadParameter(_NO_STEPS, param_hint=option)
    k = speculating.k
    left = {batch: max(0.0, ms - target.ms(batch * (k + 1))) for batch, ms in speculating.step_ms.items()}
    with refused(option, PayoffError):
        if one_pass:
            return Curve(tuple((batch * k, ms) for batch, ms in left.items()))
        return Curve(tuple((batch, ms / k) for batch, ms in left.items()))


def with_recorded_k(costs: StepCosts, speculating: Measured | None) -> StepCosts:
    """Return costs that know K of the capture, and whether they reproduce its step times.

    They do not if an extrapolated time of the target exceeds the time of a recorded step.
    """
    if speculating is None:
        return costs
    same = (math.isclose(costs.step_ms(batch, speculating.k), ms) for batch, ms in speculating.step_ms.items())
    return replace(costs, recorded_k=speculating.k, as_recorded=all(same))


def measured_batches(recorded: Measured | None) -> list[int]:
    """Return up to about `_MOST_BATCHES` of the recorded numbers of requests, or 1 without a recording."""
    batches = [] if recorded is None else sorted(recorded.step_ms)
    if not batches:
        return [1]
    stride = max(1, (len(batches) - 1) // (_MOST_BATCHES - 1))
    return sorted({*batches[::stride], batches[-1]})


def acceptance_of_page(file: str) -> tuple[int, Acceptance, bool]:
    """Read K, acceptance, and whether some drafts were shorter than K from an engine's saved /metrics page."""
    try:
        counted = read_metrics(read_text(file), find_profile(LAUNCHED_VERSIONS[-1])).speculation
    except (DocumentError, UnreadableMetricsError) as error:
        raise typer.BadParameter(printable(str(error)), param_hint="--metrics") from error
    if counted is None or not counted.drafts or not counted.accepted_per_position:
        message = f"{place_of(file)}: counts no drafts; this engine has not speculated"
        raise typer.BadParameter(message, param_hint="--metrics")
    with refused("--metrics", PayoffError):
        k = len(counted.accepted_per_position)
        acceptance = Acceptance.by_position([each / counted.drafts for each in counted.accepted_per_position])
        return k, acceptance, counted.draft_tokens < k * counted.drafts


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
    refuse_several({**shares, "--acceptance-rate": acceptance_rate, "--metrics": metrics, "CAPTURE": capture})
    refuse_several({"--target-step-ms": target_step_ms, "--baseline": baseline})
    refuse_several({"CAPTURE": capture, "--draft-step-ms": draft_step_ms})
    refuse_several({"--baseline": baseline, "--verify-step-ms": verify_step_ms})
    if verify_step_ms is not None and target_step_ms is None:
        raise typer.BadParameter("is missing: --verify-step-ms needs it", param_hint="--target-step-ms")
    speculating = None if capture is None else measured(capture, "CAPTURE")
    plain = None if baseline is None else measured(baseline, "--baseline")
    found, shortened, k = None, False, num_speculative_tokens
    if speculating is not None:
        k, found, shortened = k or speculating.k or None, speculating.acceptance, speculating.shortened
    elif metrics is not None:
        counted, found, shortened = acceptance_of_page(metrics)
        k = k or counted
    elif k is None and (positions := acceptance or conditional_acceptance) is not None:
        k = min(positions.count(",") + 1, LARGEST_K)
    if k is None:
        raise typer.BadParameter(f"is missing: give K, from 1 to {LARGEST_K}", param_hint="--num-speculative-tokens")
    batches = counts(batch, "--batch") if batch else measured_batches(speculating or plain)
    one_pass = parallel_drafting or (method in METHODS_OF_BLOCKS if speculating is None else speculating.one_pass)
    costs = None
    target = None if plain is None else plain_curve(plain, "--baseline")
    if target_step_ms is not None:
        target = with_verification(curve_of(target_step_ms, "--target-step-ms"), verify_step_ms, batches[0], k)
    if target is not None:
        draft = draft_curve(draft_step_ms, speculating, target, method, one_pass=one_pass)
        with refused("--target-step-ms", PayoffError):
            costs = StepCosts(target, draft, one_pass, target_context_ms, draft_context_ms)
        costs = with_recorded_k(costs, speculating)
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
