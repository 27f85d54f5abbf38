"""One arm against the baseline in one phase: pairs of blocks become a ratio with an interval, and a verdict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from specdecode_operator.capture.comparison.reading.blocks import Block
from specdecode_operator.capture.comparison.result import LoadVerdict
from specdecode_operator.evidence.series import Finding, PairedSeries, Verdict, bounded_exp
from specdecode_operator.evidence.starts import between_starts, starts_needed

Pair = tuple[Block, Block]

_AS_GOOD_AS_NOTHING: Final = 1e-3
"""Of the other arm's goodput: what stands for none, of which there is no logarithm."""

_POWER: Final = ((0.3, 253), (0.5, 112), (1.0, 47), (2.0, 27), (5.0, 11))
"""Blocks that nine of ten comparisons take, by the effect in standard deviations of a block's log ratio, at the level
95 %: measured, docs/explanation/verdict.md."""

SMALLEST_EFFECT: Final = 0.01
"""A log ratio nearer to 0 is taken for no difference: how long it would take to see it helps nobody."""

_MOST_BLOCKS: Final = 2000


@dataclass(frozen=True)
class Measured:
    """What was measured of one arm in one phase, beside the baseline."""

    pairs: Mapping[int, Sequence[Pair]]
    """By repetition, in the order of time: blocks of the baseline and of the candidate."""

    goodputs: Sequence[Sequence[float]]
    """Of each arm, the baseline first, in each start of its engine."""

    candidate: int
    """Which of them it is."""

    whole: bool
    """Whether all repetitions are there that were asked for. Else there is no verdict: looking earlier than planned,
    and stopping where it looks good, would err more often than the level says."""


def judge(measured: Measured, level: float, predicted: float | None = None) -> LoadVerdict:
    """Return the verdict of a phase; ``level`` is of the interval, ``predicted`` the ratio that formulas predict."""
    pairs = measured.pairs
    found, count = _by_blocks(pairs, level)
    logs = _logs(measured.goodputs)
    starts = between_starts(logs, measured.candidate, level)
    blocks_low, blocks_high = (None, None) if found is None else (found.low, found.high)
    starts_low, starts_high = (None, None) if starts is None else (bounded_exp(starts[0]), bounded_exp(starts[1]))
    verdict = _both(found, starts) if measured.whole else Verdict.INCONCLUSIVE
    effect = _effect(found) if verdict is Verdict.INCONCLUSIVE else None
    return LoadVerdict(
        verdict=verdict.value,
        blocks=count,
        ratio=None if found is None else found.ratio,
        low=None if blocks_low is None or starts_low is None else min(blocks_low, starts_low),
        high=None if blocks_high is None or starts_high is None else max(blocks_high, starts_high),
        blocks_low=blocks_low,
        blocks_high=blocks_high,
        starts_low=starts_low,
        starts_high=starts_high,
        blocks_needed=None if effect is None else _blocks_needed(pairs, effect),
        repetitions_needed=None if effect is None else starts_needed(logs, effect, level),
        predicted_ratio=predicted,
    )


def _by_blocks(pairs: Mapping[int, Sequence[Pair]], level: float) -> tuple[Finding | None, int]:
    """Return what the series of all pairs has found, if there is one, and how many pairs it is of."""
    series, count, found = PairedSeries(level), 0, None
    for repetition in sorted(pairs):
        for baseline, other in pairs[repetition]:
            found = series.add(baseline.goodput, other.goodput)
            count += 1
    return found, count


def _effect(found: Finding | None) -> float | None:
    """Return the log ratio that more measurements could show; None where there is none, or one too small to help."""
    if found is None or found.ratio is None or found.ratio <= 0:
        return None
    effect = math.log(found.ratio)
    return effect if abs(effect) >= SMALLEST_EFFECT else None


def _both(blocks: Finding | None, starts: tuple[float, float] | None) -> Verdict:
    """Return the verdict that both intervals give; where one arm did nothing, that of blocks has no end to show."""
    if blocks is None or starts is None:
        return Verdict.INCONCLUSIVE
    by_starts = Verdict.PAYS if starts[0] > 0 else Verdict.DOES_NOT_PAY if starts[1] < 0 else Verdict.INCONCLUSIVE
    return blocks.verdict if blocks.verdict is by_starts else Verdict.INCONCLUSIVE


def _logs(goodputs: Sequence[Sequence[float]]) -> list[list[float]]:
    largest = max((each for arm in goodputs for each in arm), default=0.0)
    if not largest:
        return [[] for _ in goodputs]
    return [[math.log(max(each, _AS_GOOD_AS_NOTHING * largest)) for each in arm] for arm in goodputs]


def _blocks_needed(pairs: Mapping[int, Sequence[Pair]], effect: float) -> int | None:
    """Return how many pairs of blocks nine of ten comparisons take for such an effect at the noise of these."""
    noise = _noise(pairs)
    if noise is None:
        return None
    size = max(_POWER[0][0] / 3, abs(effect) / noise if noise else math.inf)
    if size >= _POWER[-1][0]:
        return _POWER[-1][1]
    if size <= _POWER[0][0]:
        # Where noise is larger than an effect, blocks go with the square.
        needed = _POWER[0][1] * (_POWER[0][0] / size) ** 2
    else:
        (left, more), (right, fewer) = next(
            (one, other) for one, other in pairwise(_POWER) if one[0] <= size <= other[0]
        )
        share = (math.log(size) - math.log(left)) / (math.log(right) - math.log(left))
        needed = math.exp(math.log(more) + share * (math.log(fewer) - math.log(more)))
    return math.ceil(needed) if needed <= _MOST_BLOCKS else None


def _noise(pairs: Mapping[int, Sequence[Pair]]) -> float | None:
    """Return the standard deviation of a block's log ratio within a repetition."""
    squares, freedom = 0.0, 0
    for of_one in pairs.values():
        logs = [
            math.log(other.goodput / baseline.goodput)
            for baseline, other in of_one
            if baseline.goodput and other.goodput
        ]
        if len(logs) > 1:
            mean = sum(logs) / len(logs)
            squares += sum((each - mean) ** 2 for each in logs)
            freedom += len(logs) - 1
    return math.sqrt(squares / freedom) if freedom else None
