"""The inputs of `advise`: acceptance and step times from options, a capture, or a saved metrics page."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import typer

from specdecode_operator.capture.trace_reader import Recording, RecordingError, read_recording, read_steps
from specdecode_operator.cli.options import refused
from specdecode_operator.cli.replay.fit import NO_NUMPY
from specdecode_operator.cli.text_files import DocumentError, place_of, read_text
from specdecode_operator.enums import METHODS_OF_BLOCKS
from specdecode_operator.problems import printable, shown
from specdecode_operator.stats.payoff import LARGEST_K, Acceptance, Curve, Load, PayoffError, full_cache
from specdecode_operator.vllm.engine_metrics import UnreadableMetricsError, read_metrics
from specdecode_operator.vllm.profiles import find_profile
from specdecode_operator.vllm.versions import LAUNCHED_VERSIONS

MOST_NUMBERS: Final = 64
_LARGEST: Final = 2**31


def refuse_several(given: Mapping[str, object]) -> None:
    """End if more than one of some options says the same thing."""
    named = [option for option, value in given.items() if value is not None]
    if len(named) > 1:
        raise typer.BadParameter(f"is given beside {named[0]}: give one of them", param_hint=named[1])


def acceptance_of(by_position: str | None, conditional: str | None, rate: float | None, k: int) -> Acceptance | None:
    """Return the acceptance that one of three options gives, if any."""
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


def curve_of(text: str, option: str) -> Curve:
    """Return a curve of ``MS``, or of ``TOKENS:MS,TOKENS:MS``."""
    parts = text.split(",")
    with refused(option, PayoffError):
        if ":" not in text and len(parts) == 1:
            (ms,) = _numbers(text, option)
            return Curve(((1.0, ms),))
        if lacking := [part for part in parts[:MOST_NUMBERS] if ":" not in part]:
            raise typer.BadParameter(f"{shown(lacking[0])}: write TOKENS:MS, such as 64:21.5", param_hint=option)
        tokens, times = (",".join(part.partition(":")[side] for part in parts) for side in (0, 2))
        return Curve(tuple(zip(_numbers(tokens, option), _numbers(times, option), strict=True)))


def _numbers(text: str, option: str) -> list[float]:
    found, parts = [], text.split(",")
    if len(parts) > MOST_NUMBERS:
        raise typer.BadParameter(f"has {len(parts)} numbers: give at most {MOST_NUMBERS}", param_hint=option)
    for part in parts:
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise typer.BadParameter(f"{shown(part)}: is no number; write them with commas between", param_hint=option)
        found.append(value)
    return found


def counts(text: str, option: str) -> list[int]:
    """Return the numbers of a list with commas, which are whole and above 0."""
    found = _numbers(text, option)
    for each in found:
        if each != int(each) or not 0 < each <= _LARGEST:
            raise typer.BadParameter(f"{each:g}: write whole numbers above 0, up to {_LARGEST}", param_hint=option)
    return [int(each) for each in found]


def with_verification(target: Curve, verify_ms: float | None, batch: int, k: int) -> Curve:
    """Return the curve through a plain step and one that verifies, both of the same requests."""
    if verify_ms is None:
        return target
    if len(target.points) > 1:
        message = "is given beside times by tokens in the step, which say it already: leave it out"
        raise typer.BadParameter(message, param_hint="--verify-step-ms")
    with refused("--verify-step-ms", PayoffError):
        return Curve(((batch, target.points[0][1]), (batch * (k + 1), verify_ms)))


def loads_of(
    batches: Sequence[int], context: str | None, kv_tokens: int | None, kv_tokens_alone: int | None
) -> tuple[Load, ...]:
    """Return a load for each number of requests and context length, and where it is known those of a full cache."""
    contexts = [] if context is None else counts(context, "--context")
    loads = [Load.same(batch, tokens) for tokens in contexts or [0] for batch in batches]
    if (kv_tokens is None) != (kv_tokens_alone is None):
        missing = "--kv-tokens" if kv_tokens is None else "--kv-tokens-alone"
        raise typer.BadParameter("is missing: plan says both, give both or none", param_hint=missing)
    if kv_tokens is not None and kv_tokens_alone is not None:
        if not contexts:
            message = "is missing: how many requests fill the KV cache depends on how long they are"
            raise typer.BadParameter(message, param_hint="--context")
        with refused("--kv-tokens", PayoffError):
            loads += [full_cache(kv_tokens, kv_tokens_alone, tokens) for tokens in contexts]
    return tuple(loads)


_LEAST_STEPS: Final = 20
"""Of one number of requests: the median of fewer is as good as chance."""
_MOST_BATCHES: Final = 8
"""Approximate number of request counts that are shown by default."""


@dataclass(frozen=True)
class Measured:
    """An engine as it was recorded: times by the requests in a step, of steps in which all of them decode."""

    k: int
    acceptance: Acceptance | None
    shortened: bool  # Whether drafts were shorter than K, which counts as refused
    step_ms: Mapping[int, float]
    # As its header says; None where it does not
    method: str | None = None
    version: str | None = None
    block_tokens: int | None = None
    parallel: bool = False

    @property
    def one_pass(self) -> bool:
        """Whether its draft is known to propose all tokens at once; earlier recorders do not tell it of heads."""
        return self.parallel or self.method in METHODS_OF_BLOCKS


def measured(path: Path, option: str) -> Measured:
    """Return the measurements in a capture's folder; BadParameter if it has none."""
    with refused(option, PayoffError):
        try:
            recording = read_recording(path)
            if recording.steps is None:
                message = f"{printable(str(path))}: has no step-stats.jsonl: name a capture's folder"
                raise typer.BadParameter(message, param_hint=option)
            if (k := recording.num_speculative_tokens) > LARGEST_K:
                raise typer.BadParameter(f"K is {k}: at most {LARGEST_K} is looked at", param_hint=option)
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
    """Return the median time of a step by its requests, where all of them have K + 1 tokens in it and none prefills."""
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
    f"no {_LEAST_STEPS} steps of as many requests say that all of them decode: record a steadier load, with "
    "--enable-logging-iteration-details, as captures have it"
)


def plain_curve(baseline: Measured, option: str) -> Curve:
    """Return times of the target by the tokens in a step, from an engine that does not speculate."""
    if baseline.k:
        message = f"it speculates, with K {baseline.k}: name a capture of the same load with method none"
        raise typer.BadParameter(message, param_hint=option)
    if not baseline.step_ms:
        raise typer.BadParameter(_NO_STEPS, param_hint=option)
    with refused(option, PayoffError):
        return Curve(tuple(baseline.step_ms.items()))


def draft_curve(speculating: Measured, target: Curve, option: str, *, one_pass: bool) -> Curve:
    """Return times of a pass of the draft by the tokens in it: what is left of a step beside the target's pass."""
    if not speculating.k:
        raise typer.BadParameter("it does not speculate: name it with --baseline", param_hint=option)
    if not speculating.step_ms:
        raise typer.BadParameter(_NO_STEPS, param_hint=option)
    k = speculating.k
    left = {batch: max(0.0, ms - target.ms(batch * (k + 1))) for batch, ms in speculating.step_ms.items()}
    with refused(option, PayoffError):
        if one_pass:
            return Curve(tuple((batch * k, ms) for batch, ms in left.items()))
        return Curve(tuple((batch, ms / k) for batch, ms in left.items()))


def measured_batches(recorded: Measured | None) -> list[int]:
    """Return the requests that steps of a recording had, a few of them where they are many; one without a recording."""
    batches = [] if recorded is None else sorted(recorded.step_ms)
    if not batches:
        return [1]
    stride = max(1, (len(batches) - 1) // (_MOST_BATCHES - 1))
    return sorted({*batches[::stride], batches[-1]})


def acceptance_of_page(file: str) -> tuple[int, Acceptance, bool]:
    """Return the counts of an engine's saved /metrics: K, acceptance, and whether drafts were shorter than K."""
    try:
        counted = read_metrics(read_text(file), find_profile(LAUNCHED_VERSIONS[-1])).speculation
    except (DocumentError, UnreadableMetricsError) as error:
        raise typer.BadParameter(printable(str(error)), param_hint="--metrics") from error
    if counted is None or not counted.drafts or not counted.accepted_per_position:
        message = f"{place_of(file)}: counts no drafts: this engine has not speculated"
        raise typer.BadParameter(message, param_hint="--metrics")
    with refused("--metrics", PayoffError):
        k = len(counted.accepted_per_position)
        acceptance = Acceptance.by_position([each / counted.drafts for each in counted.accepted_per_position])
        return k, acceptance, counted.draft_tokens < k * counted.drafts
