"""Judge each figure of an engine against a golden capture.

Each figure has a largest loss that may pass. It is Regressed if more than half of that was lost and chance
does not explain it, at a level that holds for all figures together (Bonferroni), because one of many is beyond its
limits by chance. It is Inconclusive if the end of its own interval lies beyond the whole of it, and Holds
otherwise. All figures have to hold, so each may be judged at its own level (Berger 1982): such a loss passes at
most one time in twenty.

The golden capture is mounted into the pod of the capture, which is judged when it has been published.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from specdecode_operator.capture.comparison.golden_records import (
    Answer,
    Block,
    NotComparableError,
    Pair,
    Record,
    Side,
    first_difference,
    paired_blocks,
    read_record,
    repetitions_of,
)
from specdecode_operator.capture.files.formats import MESSAGE_BYTES
from specdecode_operator.capture.files.publish import read_manifest, verify
from specdecode_operator.problems import printable, shown
from specdecode_operator.redaction import clip
from specdecode_operator.stats.verdict import (
    Statistic,
    estimate,
    estimate_near_nothing,
    of_quantile,
    of_sums,
)

ALARM_LEVEL: Final = 0.99
"""Confidence level of all figures together: the chance that no figure is called worse by mistake."""

LEVEL: Final = 0.9
"""Confidence level of each interval: 5 % on either side."""

_SHARE_OF_STEPS: Final = 0.05
_MOST_POSITIONS: Final = 32
_LOST_ANSWERS: Final = 0.01
_PARTED: Final = 0.02
"""Greedy answers that part, by token: in batches of BF16 a few in a thousand do without any change."""
_FEWEST_PARTED: Final = 8


class RegressionVerdict(StrEnum):
    """Whether an engine serves as well as the one of the golden record."""

    HOLDS = "Holds"
    REGRESSED = "Regressed"
    INCONCLUSIVE = "Inconclusive"


class Limits(Struct, kw_only=True, frozen=True):
    """The largest losses that may pass, in percent."""

    goodput: float = 5.0
    acceptance: float = 10.0  # of the drafts' tokens, whole and by position
    step_time: float = 5.0
    latency: float = 20.0  # quantiles of TTFT and TPOT


DEFAULT_LIMITS: Final = Limits()


class Figure(Struct, kw_only=True, frozen=True):
    """One figure of both records."""

    name: str
    unit: str
    golden: float | None
    found: float | None
    change_percent: float | None  # of the golden record's; absent where it is not judged by a ratio
    # Interval of the change.
    low_percent: float | None = None
    high_percent: float | None = None
    loss_limit_percent: float | None = None  # the largest loss that may pass; absent where it is only told
    verdict: RegressionVerdict | None = None


class Regression(Struct, kw_only=True, frozen=True):
    """An engine against the golden record."""

    verdict: RegressionVerdict
    message: str  # the same in a sentence with the figures that decide
    golden: str
    found: str
    requests: int
    level: float
    figures: list[Figure]
    notes: list[str]


class _Asked(Struct, frozen=True):
    """A figure that is to be judged."""

    name: str
    unit: str
    limit_percent: float
    gain: Literal[1, -1]  # 1 if more is better
    of: Callable[[Side], Statistic]
    blocks: int
    decides: bool = True  # whether an uncertain change makes the whole verdict Inconclusive


def judge(golden: Sequence[Path], found: Sequence[Path], limits: Limits = DEFAULT_LIMITS) -> Regression:
    """Compare a record with an earlier one of the same prompts; each has a folder for each repetition.

    Raises
    ------
    NotComparableError
        If one cannot be read, or they are of different engines or prompts.
    """
    records = before, after = read_record(golden), read_record(found)
    for name, field in (("model", "model"), ("gpu", "GPU"), ("tp", "tensor-parallel size")):
        own = [getattr(each.meta, name) for each in records]
        if own[0] != own[1]:
            first, second = ("nothing" if each is None else shown(each) for each in own)
            raise NotComparableError(
                f"{before.name} and {after.name}: {field} is {first} in the first and"
                f" {second} in the second: take a new golden capture of it"
            )
    blocks = paired_blocks(before, after)
    asked, notes = _asked(blocks, before, after, limits)
    alpha = (1 - ALARM_LEVEL) / max(1, len(asked))
    figures = [_figure(each, alpha) for each in asked]
    pairs = [pair for block in blocks for pair in block.pairs]
    figures += [_answered(pairs), *_greedy(pairs)]
    verdicts = {figure.verdict for figure in figures}
    verdict = RegressionVerdict.HOLDS
    if RegressionVerdict.REGRESSED in verdicts:
        verdict = RegressionVerdict.REGRESSED
    elif RegressionVerdict.INCONCLUSIVE in verdicts or not asked:
        verdict = RegressionVerdict.INCONCLUSIVE
    return Regression(
        verdict=verdict,
        message=_message(verdict, figures, asked),
        golden=before.name,
        found=after.name,
        requests=len(pairs),
        level=LEVEL,
        figures=figures,
        notes=notes,
    )


def _asked(blocks: Sequence[Block], golden: Record, found: Record, limits: Limits) -> tuple[list[_Asked], list[str]]:
    notes = []
    phases: dict[str, list[Block]] = {}
    for block in blocks:
        phases.setdefault(block.phase, []).append(block)
    before, now = ((each.meta.speculative or {}).get("num_speculative_tokens") for each in (golden, found))
    asked = [
        _Asked(f"goodput in phase {phase}", "tokens/s", limits.goodput, 1, partial(_goodput, own), len(own))
        for phase, own in phases.items()
    ]
    if now is None and before is not None:
        notes.append("the engine no longer speculates, unlike in the golden record: acceptance is not judged")
    else:
        asked += _acceptance(blocks, limits.acceptance, whole=before == now)
    if before == now:
        asked += _step_time(blocks, limits.step_time)
    else:
        notes.append(f"K is {before or 0} in the golden record and {now or 0} now: step times cannot be compared")
    # Quantiles of each phase: over phases with different loads they would lie between the loads.
    for phase, own in phases.items():
        for name, share in product(("ttft", "tpot"), (0.5, 0.9)):
            what = f"{name.upper()} P{100 * share:.0f} in phase {phase}"
            of = partial(_quantile, own, f"{name}_ms", share)
            asked.append(_Asked(what, "ms", limits.latency, -1, of, len(own), decides=False))
    if golden.is_cut or found.is_cut:
        notes.append("a record has too many answers: only the first ones are judged")
    return asked, notes


def _sums(blocks: Sequence[Block], side: Side, of: Callable[[Answer], float]) -> list[float]:
    return [sum(map(of, each.answers(side))) for each in blocks]


def _goodput(blocks: Sequence[Block], side: Side) -> Statistic:
    tokens = _sums(blocks, side, lambda each: each.output_tokens if each.whole else 0)
    return of_sums(tokens, [each.seconds(side) for each in blocks])


def _acceptance(blocks: Sequence[Block], limit_percent: float, *, whole: bool) -> Iterator[_Asked]:
    deepest = max((len(each.accepted) for block in blocks for pair in block.pairs for each in pair if each), default=0)

    def per_draft(of: Callable[[Answer], float], side: Side) -> Statistic:
        return of_sums(_sums(blocks, side, of), _sums(blocks, side, lambda each: each.drafts))

    if whole and deepest:
        in_all = partial(per_draft, lambda each: sum(each.accepted))
        yield _Asked("accepted tokens a step", "tokens", limit_percent, 1, in_all, len(blocks))
    for position in range(min(deepest, _MOST_POSITIONS)):

        def accepted(answer: Answer, position: int = position) -> float:
            return 100 * answer.accepted[position] if position < len(answer.accepted) else 0

        name = f"acceptance at position {position + 1}"
        of = partial(per_draft, accepted)
        yield _Asked(name, "% of steps", limit_percent, 1, of, len(blocks), decides=False)


def _step_time(blocks: Sequence[Block], limit_percent: float) -> Iterator[_Asked]:
    """Yield the step time by the power of two of running requests, if both records have enough such steps."""
    counts: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
    for pair in (pair for block in blocks for pair in block.pairs):
        for answer, count in zip(pair, counts, strict=True):
            count.update({running: steps for running, (_, steps) in answer.steps.items()} if answer else {})
    for running in sorted(counts[0]):
        if any(each[running] < _SHARE_OF_STEPS * each.total() for each in counts):
            continue

        def of(side: Side, running: int = running) -> Statistic:
            total_ms, steps = (
                _sums(blocks, side, lambda each: each.steps.get(running, (0.0, 0))[what])  # noqa: B023  used at once
                for what in (0, 1)
            )
            return of_sums(total_ms, steps)

        few, many = (1 << running) >> 1, (1 << running) - 1
        batch = "" if not running else f" with {few} running" if few == many else f" with {few} to {many} running"
        yield _Asked(f"step time{batch}", "ms", limit_percent, -1, of, len(blocks))


def _quantile(blocks: Sequence[Block], name: str, share: float, side: Side) -> Statistic:
    times = [
        (time_ms, number)
        for number, block in enumerate(blocks)
        for answer in block.answers(side)
        if (time_ms := getattr(answer, name)) is not None
    ]
    return of_quantile(times, share, len(blocks))


def _figure(asked: _Asked, alpha: float) -> Figure:
    golden, found = asked.of(0), asked.of(1)
    estimated = estimate(golden, found, asked.blocks)
    if estimated is None and asked.gain > 0:
        estimated = estimate_near_nothing(golden, found, asked.blocks)
    low, high = map(_percent, estimated.interval(1 - LEVEL)) if estimated else (None, None)
    before, now = golden(None), found(None)
    verdict = RegressionVerdict.INCONCLUSIVE if asked.decides else None
    if estimated is None:
        is_gone = asked.gain > 0 and before and not now
        verdict = RegressionVerdict.REGRESSED if is_gone and asked.decides else verdict
    else:
        least = min(-asked.gain * _percent(each) for each in estimated.interval(alpha))
        most = max(-asked.gain * _percent(each) for each in estimated.interval(1 - LEVEL))
        if -asked.gain * _percent(estimated.ratio) > asked.limit_percent / 2 and least > 0:
            verdict = RegressionVerdict.REGRESSED
        elif most <= asked.limit_percent:
            verdict = RegressionVerdict.HOLDS
    return Figure(
        name=asked.name,
        unit=asked.unit,
        golden=_rounded(before),
        found=_rounded(now),
        change_percent=None if not before else _percent((now or 0.0) / before),
        low_percent=low,
        high_percent=high,
        loss_limit_percent=asked.limit_percent,
        verdict=verdict,
    )


def _answered(pairs: Sequence[Pair]) -> Figure:
    """Return the number of requests answered whole, without an interval, since chance has no part in it."""
    counts = [sum(1 for each in side if each and each.whole) for side in zip(*pairs, strict=True)]
    lost = counts[0] - counts[1]
    lost_too_many = lost > max(1.0, _LOST_ANSWERS * counts[0])
    return Figure(
        name="requests answered whole",
        unit="requests",
        golden=counts[0],
        found=counts[1],
        change_percent=_percent(counts[1] / counts[0]) if counts[0] else None,
        loss_limit_percent=100 * _LOST_ANSWERS,
        verdict=RegressionVerdict.REGRESSED if lost_too_many else RegressionVerdict.HOLDS,
    )


def _greedy(pairs: Sequence[Pair]) -> Iterator[Figure]:
    """Yield how often greedy answers differ, if tokens were recorded: nearly all of a broken model's do."""
    alike = parted = answers = 0
    for one, other in pairs:
        if one is None or other is None or one.temperature != 0 or one.token_ids is None or other.token_ids is None:
            continue
        answers += 1
        place = first_difference(one.token_ids, other.token_ids)
        parted += place is not None
        alike += min(len(one.token_ids), len(other.token_ids)) if place is None else place
    if not answers:
        return
    often = parted / max(1, alike + parted)
    differs = parted >= min(_FEWEST_PARTED, answers) and often > _PARTED
    yield Figure(
        name=f"greedy answers that part, of {answers}",
        unit="per 1,000 tokens",
        golden=0.0,
        found=_rounded(1000 * often),
        change_percent=None,
        verdict=RegressionVerdict.REGRESSED if differs else RegressionVerdict.HOLDS,
    )


def _message(verdict: RegressionVerdict, figures: Sequence[Figure], asked: Sequence[_Asked]) -> str:
    told = [each for each in figures if each.verdict is verdict]
    if verdict is RegressionVerdict.HOLDS:
        firsts = [each for each in figures if each.low_percent is not None and each.name in {one.name for one in asked}]
        return f"holds: {'; '.join(map(_sentence, firsts[:2]))}"
    more = f"; and {len(told) - 3} more" if len(told) > 3 else ""  # noqa: PLR2004  as many as are told
    why = "; ".join(map(_sentence, told[:3])) + more
    if verdict is RegressionVerdict.REGRESSED:
        return f"worse than the golden record: {why}"
    return f"the record is too short, or too uneven, to tell: {why}: send more requests in both"


def _sentence(figure: Figure) -> str:
    found, golden = ("nothing" if each is None else f"{each:,.4g}" for each in (figure.found, figure.golden))
    text = f"{figure.name} {found} {figure.unit} after {golden}"
    if figure.change_percent is None:
        return text
    between = "no interval"
    if figure.low_percent is not None and figure.high_percent is not None:
        between = f"{100 * LEVEL:.0f} %: {figure.low_percent:+.1f} to {figure.high_percent:+.1f} %"
    limit = "" if figure.loss_limit_percent is None else f", {figure.loss_limit_percent:g} % may be lost"
    return f"{text} ({figure.change_percent:+.1f} %, {between}{limit})"


def _percent(ratio: float) -> float:
    return round(100 * (ratio - 1), 3)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


AGAINST_VARIABLE: Final = "SPECDECODE_AGAINST"
AGAINST_MOUNT: Final = "/against"
"""Mount of the golden capture's volume."""

_MOST_FIGURES: Final = 12
_MESSAGE_CHARACTERS: Final = 1000
_OF_THE_SUMMARY: Final = ("files", "lateMs", "latencyMs", "perPositionPercent")


class GoldenCapture(Struct, kw_only=True, frozen=True):
    """The golden capture and limits, as the operator passes them to the pod."""

    capture: str
    folder: str  # from the root of the volume
    limits: Limits = DEFAULT_LIMITS


def regression_status(environment: Mapping[str, str], published: Path) -> dict[str, Any] | None:
    """Return ``status.regression`` of a published capture; None without a golden capture.

    Errors of the golden files are part of it and do not stop publication.
    """
    text = environment.get(AGAINST_VARIABLE)
    if not text:
        return None
    golden = msgspec.json.decode(text, type=GoldenCapture)
    status: dict[str, Any] = {"against": golden.capture}
    try:
        regression = _judged(Path(AGAINST_MOUNT) / golden.folder, published, golden.limits)
        told = [each for each in regression.figures if each.verdict is not None]
        told.sort(key=lambda each: each.verdict is RegressionVerdict.HOLDS)
        return status | {
            "verdict": regression.verdict.value,
            "message": clip(regression.message, _MESSAGE_CHARACTERS),
            "figures": [_golden_figure(each) for each in told[:_MOST_FIGURES]],
        }
    except NotComparableError as error:
        why = str(error)
    except Exception as error:  # noqa: BLE001  files that others may write to
        why = f"judging failed: {type(error).__name__}: {error}"
    return status | {"verdict": "NotComparable", "message": clip(printable(why), _MESSAGE_CHARACTERS)}


def _judged(golden: Path, found: Path, limits: Limits) -> Regression:
    folders = repetitions_of(golden), repetitions_of(found)
    for folder in folders[0]:
        if faults := verify(folder):
            raise NotComparableError(f"{folder}: {faults[0]}: the golden capture was modified: record it again")
    manifests = [read_manifest(each[0]) for each in folders]
    for name in ("workload", "seed"):
        first, second = (getattr(each, name, None) for each in manifests)
        if first != second:
            raise NotComparableError(f"{golden}: was made with another {name}: take a new golden capture with this one")
    return judge(*folders, limits)


def _golden_figure(figure: Figure) -> dict[str, str]:
    change = "" if figure.change_percent is None else f"{figure.change_percent:+.1f} %"
    if figure.low_percent is not None and figure.high_percent is not None:
        change += f" ({figure.low_percent:+.1f} to {figure.high_percent:+.1f} %)"
    golden, found = ("none" if each is None else f"{each:,.4g} {figure.unit}" for each in (figure.golden, figure.found))
    verdict = figure.verdict.value if figure.verdict else ""
    return {"name": clip(figure.name, 96), "golden": golden, "found": found, "change": change, "verdict": verdict}


def with_regression(message: bytes, regression: dict[str, Any] | None) -> bytes:
    """Add the regression to the termination message of a success, cut to the size that Kubernetes takes."""
    if regression is None:
        return message
    said: dict[str, Any] = msgspec.json.decode(message)
    said = (said if "summary" in said else {"summary": said}) | {"regression": dict(regression)}
    figures: list[dict[str, str]] = said["regression"].get("figures") or []
    for dropped in _OF_THE_SUMMARY:
        if len(msgspec.json.encode(said)) <= MESSAGE_BYTES:
            break
        said["summary"].pop(dropped, None)
    while figures and len(msgspec.json.encode(said)) > MESSAGE_BYTES:
        figures = said["regression"]["figures"] = figures[:-1]
    while (words := said["regression"]["message"]) and len(msgspec.json.encode(said)) > MESSAGE_BYTES:
        # In steps: characters outside ASCII take more bytes.
        said["regression"]["message"] = clip(words, len(words) * 3 // 4)
    return msgspec.json.encode(said)
