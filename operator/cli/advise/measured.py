"""What a capture, or a saved page of metrics, says of acceptance and step times."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

import typer

from specdecode_operator.cli.advise.given import refused_at
from specdecode_operator.cli.replay.fit import NO_NUMPY
from specdecode_operator.cli.text_files import DocumentError, place_of, read_text
from specdecode_operator.payoff.acceptance import LARGEST_K, Acceptance
from specdecode_operator.payoff.step_cost import Curve
from specdecode_operator.problems import printable
from specdecode_operator.vocabulary import METHODS_OF_BLOCKS

if TYPE_CHECKING:
    from specdecode_operator.replay.recording.recording import Recording

_LEAST_STEPS: Final = 20
"""Of one number of requests: the median of fewer is as good as chance."""

_MOST_BATCHES: Final = 8
"""Numbers of requests that are shown where nobody named some, about."""


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


@contextmanager
def _unreadable(option: str) -> Iterator[None]:
    from specdecode_operator.replay.recording.read import RecordingError  # noqa: PLC0415  takes msgspec

    try:
        yield
    except RecordingError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
    except ImportError as error:
        raise typer.BadParameter(NO_NUMPY, param_hint=option) from error


def measured(path: Path, option: str) -> Measured:
    """Return what a capture's folder says; end with what is wrong where it says nothing."""
    with _unreadable(option), refused_at(option):
        from specdecode_operator.replay.recording.read import read_recording  # noqa: PLC0415

        recording = read_recording(path)
        if recording.steps is None:
            message = f"{printable(str(path))}: has no step-stats.jsonl: name a capture's folder"
            raise typer.BadParameter(message, param_hint=option)
        k = recording.num_speculative_tokens
        if k > LARGEST_K:
            raise typer.BadParameter(f"K is {k}: at most {LARGEST_K} is looked at", param_hint=option)
        acceptance, shortened = _counted(recording, k)
        meta = recording.meta
        method = (meta.speculative or {}).get("method")
        return Measured(
            k=k,
            acceptance=acceptance,
            shortened=shortened,
            step_ms=_step_ms(recording, k),
            method=method if isinstance(method, str) else None,
            version=meta.vllm_version,
            block_tokens=meta.block_size,
            parallel=meta.drafts_in_one_pass,
        )


def _counted(recording: "Recording", k: int) -> tuple[Acceptance | None, bool]:
    """Return the acceptance over all steps, and whether drafts were shorter than K."""
    from specdecode_operator.replay.recording.read import read_steps  # noqa: PLC0415

    drafts = drafted = 0
    accepted: Counter[int] = Counter()
    for line in read_steps(recording.steps) if recording.steps and k else ():
        stats = line.scheduler.spec_decoding_stats
        if stats is not None:
            drafts += stats.num_drafts
            drafted += stats.num_draft_tokens
            accepted.update(dict(enumerate(stats.num_accepted_tokens_per_pos[:k])))
    if not drafts:
        return None, False
    return _of_counts(drafts, (accepted[position] for position in range(k))), drafted < k * drafts


def _of_counts(drafts: int, accepted: Iterable[int]) -> Acceptance:
    return Acceptance.by_position([each / drafts for each in accepted])


def _step_ms(recording: "Recording", k: int) -> dict[int, float]:
    """Return the median time of a step by its requests, where all of them have K + 1 tokens in it and none prefills."""
    from specdecode_operator.replay.fitted.measured_steps import MeasuredSteps  # noqa: PLC0415  takes numpy

    found = MeasuredSteps.of([recording])
    times: defaultdict[int, list[float]] = defaultdict(list)
    for requests, tokens, prefill, ms in zip(
        found.requests, found.scheduled_tokens, found.prefill_tokens, found.ms, strict=True
    ):
        if not prefill and tokens == requests * (k + 1):
            times[int(requests)].append(float(ms))
    return {batch: median(times[batch]) for batch in sorted(times) if len(times[batch]) >= _LEAST_STEPS}


def plain_curve(baseline: Measured, option: str) -> Curve:
    """Return times of the target by the tokens in a step, from an engine that does not speculate."""
    if baseline.k:
        message = f"it speculates, with K {baseline.k}: name a capture of the same load with method none"
        raise typer.BadParameter(message, param_hint=option)
    if not baseline.step_ms:
        raise typer.BadParameter(_no_steps(), param_hint=option)
    with refused_at(option):
        return Curve(tuple(baseline.step_ms.items()))


def draft_curve(speculating: Measured, target: Curve, option: str, *, one_pass: bool) -> Curve:
    """Return times of a pass of the draft by the tokens in it: what is left of a step beside the target's pass."""
    if not speculating.k:
        raise typer.BadParameter("it does not speculate: name it with --baseline", param_hint=option)
    if not speculating.step_ms:
        raise typer.BadParameter(_no_steps(), param_hint=option)
    k = speculating.k
    left = {batch: max(0.0, ms - target.ms(batch * (k + 1))) for batch, ms in speculating.step_ms.items()}
    with refused_at(option):
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


def _no_steps() -> str:
    return (
        f"no {_LEAST_STEPS} steps of as many requests say that all of them decode: record a steadier load, with "
        "--enable-logging-iteration-details, as captures have it"
    )


def acceptance_of_page(file: str) -> tuple[int, Acceptance, bool]:
    """Return what an engine's saved /metrics counts since its start: K, acceptance, and whether drafts were shorter."""
    from specdecode_operator.engine.metrics import UnreadableMetricsError, read_metrics  # noqa: PLC0415  slow
    from specdecode_operator.engine.profiles import find_profile  # noqa: PLC0415
    from specdecode_operator.versions.table import LAUNCHED_VERSIONS  # noqa: PLC0415

    try:
        counted = read_metrics(read_text(file), find_profile(LAUNCHED_VERSIONS[-1])).speculation
    except (DocumentError, UnreadableMetricsError) as error:
        raise typer.BadParameter(printable(str(error)), param_hint="--metrics") from error
    if counted is None or not counted.drafts or not counted.accepted_per_position:
        message = f"{place_of(file)}: counts no drafts: this engine has not speculated"
        raise typer.BadParameter(message, param_hint="--metrics")
    with refused_at("--metrics"):
        k = len(counted.accepted_per_position)
        acceptance = _of_counts(counted.drafts, counted.accepted_per_position)
        return k, acceptance, counted.draft_tokens < k * counted.drafts
