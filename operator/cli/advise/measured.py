"""Inputs of `advise`: acceptance and step times from options, a capture, or a saved metrics page."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Final

import typer

from specdecode_operator.capture.trace_reader import Recording, RecordingError, read_recording, read_steps
from specdecode_operator.cli.options import refused
from specdecode_operator.cli.replay.fit import NO_NUMPY
from specdecode_operator.cli.text_files import DocumentError, place_of, read_text
from specdecode_operator.enums import METHODS_OF_BLOCKS, METHODS_OF_FREE_LENGTH
from specdecode_operator.problems import printable, shown
from specdecode_operator.stats.payoff import (
    LARGEST_K,
    NO_DRAFT,
    Acceptance,
    Curve,
    Load,
    PayoffError,
    StepCosts,
    full_cache,
)
from specdecode_operator.vllm.engine_metrics import UnreadableMetricsError, read_metrics
from specdecode_operator.vllm.profiles import find_profile
from specdecode_operator.vllm.versions import LAUNCHED_VERSIONS

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
