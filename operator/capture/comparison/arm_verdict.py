"""Judge each arm against the baseline: ratio and interval by load, verdict, and status message.

In ``status.comparison`` decimals are strings, as everywhere in the API.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from specdecode_operator.api.capture_status import (
    ArmVerdict,
    ComparedArm,
    ComparedLoad,
    ComparisonStatus,
    Outputs,
    StepCost,
    TokensPerStep,
)
from specdecode_operator.capture.comparison.client_requests import Pair
from specdecode_operator.capture.comparison.comparison_file import Arm, Comparison, Load, LoadVerdict, OutputsFound
from specdecode_operator.redaction import clip
from specdecode_operator.stats.verdict import PairedSeries, Verdict, between_starts, bounded_exp, starts_needed

_AS_GOOD_AS_NOTHING: Final = 1e-3
"""Share of the largest goodput that replaces 0, which has no logarithm."""

_POWER: Final = ((0.3, 253), (0.5, 112), (1.0, 47), (2.0, 27), (5.0, 11))
"""Blocks that nine of ten comparisons take, by the effect in standard deviations of a block's log ratio, at the level
95 %: measured, docs/design/verdict.md."""

SMALLEST_EFFECT: Final = 0.01
"""A log ratio nearer to 0 counts as no difference: measuring it would take too long to be useful."""

_MOST_BLOCKS: Final = 2000


def judge(  # noqa: PLR0913  the measurements and the level
    pairs: Mapping[int, Sequence[Pair]],
    goodputs: Sequence[Sequence[float]],
    candidate: int,
    level: float,
    predicted: float | None = None,
    *,
    whole: bool,
) -> LoadVerdict:
    """Return the verdict of a phase.

    Parameters
    ----------
    pairs
        By repetition, in the order of time.
    goodputs
        Of each arm, the baseline first, in each start of its engine.
    candidate
        Index of the arm to compare.
    level
        Confidence level of the interval.
    predicted
        The ratio that formulas predict.
    whole
        Whether all repetitions are present. Otherwise there is no verdict: looking earlier than planned, and stopping
        at a good result, would err more often than the level allows.
    """
    series, found = PairedSeries(level), None
    for _, of_one in sorted(pairs.items()):
        for baseline, other in of_one:
            found = series.add(baseline, other)
    largest = max((each for arm in goodputs for each in arm), default=0.0)
    logs = [[math.log(max(each, _AS_GOOD_AS_NOTHING * largest)) for each in arm if largest] for arm in goodputs]
    starts = between_starts(logs, candidate, level)
    blocks_low, blocks_high = (None, None) if found is None else (found.low, found.high)
    starts_low, starts_high = (None, None) if starts is None else (bounded_exp(starts[0]), bounded_exp(starts[1]))
    agree = whole and found is not None and starts is not None and found.verdict is Verdict.of(*starts)
    verdict = found.verdict if found is not None and agree else Verdict.INCONCLUSIVE
    # The log ratio that more measurements could show, unless it is too small.
    effect = None
    if verdict is Verdict.INCONCLUSIVE and found is not None and found.ratio:
        effect = math.log(found.ratio) if abs(math.log(found.ratio)) >= SMALLEST_EFFECT else None
    return LoadVerdict(
        verdict=verdict.value,
        blocks=sum(map(len, pairs.values())),
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


def _blocks_needed(pairs: Mapping[int, Sequence[Pair]], effect: float) -> int | None:
    """Return the pairs of blocks that nine of ten comparisons need for this effect at this noise."""
    squares, freedom = 0.0, 0
    for of_one in pairs.values():
        logs = [math.log(other / one) for one, other in of_one if one and other]
        if len(logs) > 1:
            mean = sum(logs) / len(logs)
            squares += sum((each - mean) ** 2 for each in logs)
            freedom += len(logs) - 1
    if not freedom:
        return None
    # Standard deviation of a block's log ratio within a repetition.
    noise = math.sqrt(squares / freedom)
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


LONGEST_SENTENCE: Final = 1024
"""Characters of a message in the status."""

_MOST_LOADS: Final = 6

_WIDE: Final = 1.1
"""Ratio of an interval's ends above which it hides relevant differences."""

Compared = tuple[Load, LoadVerdict]


def compared_loads(loads: Sequence[Load]) -> list[Compared]:
    """Return the loads that could be compared."""
    return [(each, each.compared) for each in loads if each.compared is not None]


def arm_verdict(loads: Sequence[Load], outputs: OutputsFound | None) -> ArmVerdict:
    """Return the verdict over all loads; an arm that answers differently is Incorrect at any speed."""
    if outputs is not None and (outputs.parses_less or outputs.outputs == Outputs.DIFFERENT):
        return ArmVerdict.INCORRECT
    found = {compared.verdict for _, compared in compared_loads(loads)}
    pays, loses = ArmVerdict.PAYS in found, ArmVerdict.DOES_NOT_PAY in found
    if pays and loses:
        return ArmVerdict.DEPENDS_ON_LOAD
    return ArmVerdict.PAYS if pays else ArmVerdict.DOES_NOT_PAY if loses else ArmVerdict.INCONCLUSIVE


def crossover(baseline: Sequence[Load], loads: Sequence[Load]) -> float | None:
    """Return the number of running requests above which an arm stops paying off.

    It lies between the first load with a loss and the last load with a gain before it, where the ratio falls to 1.
    Between loads, the logarithm of the ratio is linear in the logarithm of the load. It is unknown if phases have
    different requests, as in a sweep.
    """
    if len({load.asks for load, _ in compared_loads(loads)}) > 1:
        return None
    running = {each.phase: each.running for each in baseline}
    known = sorted(
        (at, compared.ratio, compared.verdict)
        for load, compared in compared_loads(loads)
        if (at := running.get(load.phase)) and compared.ratio
    )
    costs = next(
        (
            place
            for place, (_, _, verdict) in enumerate(known)
            if verdict == ArmVerdict.DOES_NOT_PAY and any(before == ArmVerdict.PAYS for _, _, before in known[:place])
        ),
        None,
    )
    if costs is None:
        return None
    pays = max(place for place, (_, _, verdict) in enumerate(known[:costs]) if verdict == ArmVerdict.PAYS)
    for (low, gain, _), (high, loss, _) in pairwise(known[pays : costs + 1]):
        if gain > 1 >= loss:
            share = math.log(gain) / (math.log(gain) - math.log(loss))
            return round(math.exp(math.log(low) + share * (math.log(high) - math.log(low))), 1)
    return None


def sentence(  # noqa: PLR0913, PLR0917  what it speaks of
    verdict: ArmVerdict,
    baseline: Sequence[Load],
    loads: Sequence[Load],
    outputs: OutputsFound | None,
    crossing: float | None,
    level: float,
    repetitions: int,
    missing: str | None,
) -> str:
    """Return the verdict of an arm with its figures."""
    parts = [missing] if missing is not None else []
    if verdict is ArmVerdict.INCORRECT and outputs is not None:
        parts += _wrong(outputs)
    running = {each.phase: each.running for each in baseline}
    compared = compared_loads(loads)
    said = [_load(running.get(load.phase), load, each, level) for load, each in compared]
    if said:
        more = f" and {len(said) - _MOST_LOADS} more loads" if len(said) > _MOST_LOADS else ""
        parts.append(f"goodput {', '.join(said[:_MOST_LOADS])}{more}")
    else:
        why = next((each.not_compared for each in loads if each.not_compared), "none ran")
        parts.append(f"no load could be compared: {why}")
    if crossing is not None:
        parts.append(f"pays off up to about {crossing:g} running requests")
    if verdict is ArmVerdict.INCONCLUSIVE and missing is None:
        parts += _needed(compared, repetitions)
    if outputs is not None and verdict is not ArmVerdict.INCORRECT:
        parts.append(_outputs(outputs))
    return clip("; ".join(parts), LONGEST_SENTENCE)


def _load(running: float | None, load: Load, compared: LoadVerdict, level: float) -> str:
    at = f"in {load.phase}" if running is None or load.asks else f"with {running:.3g} running"
    ratio = "not known" if compared.ratio is None else percent(compared.ratio)
    if compared.blocks_low is None or compared.blocks_high is None:
        return f"{ratio} {at} (too few blocks for an interval: {compared.blocks})"
    if compared.low is None or compared.high is None:
        return f"{ratio} {at} (one start of each engine gives no interval)"
    return f"{ratio} ({100 * level:.0f} %: {percent(compared.low)} to {percent(compared.high)}) {at}"


def percent(ratio: float) -> str:
    """Return a ratio as people read it: +18 %, -2.5 %."""
    change = 100 * (ratio - 1)
    return f"{change:+.3g} %" if abs(change) >= 10 else f"{change:+.1f} %"  # noqa: PLR2004  two digits


def _needed(compared: Sequence[Compared], repetitions: int) -> Iterator[str]:
    """Yield the further measurements that would decide the load that needs the fewest."""
    needed = []
    for load, each in compared:
        if each.repetitions_needed is None or each.blocks_needed is None or not each.blocks:
            continue
        starts = max(repetitions, each.repetitions_needed)
        # Blocks come with repetitions. What these do not bring, longer phases do: as more blocks, or as less noise.
        longer = each.blocks_needed * repetitions / (each.blocks * starts)
        if starts == repetitions and longer <= 1:
            starts += 1
        needed.append((starts * max(1, longer), starts, longer, load.phase))
    if needed:
        _, starts, longer, phase = min(needed)
        more = [f"{starts} repetitions instead of {repetitions}"] if starts > repetitions else []
        more += [f"{math.ceil(10 * longer) / 10:g} times as many requests"] if longer > 1 else []
        yield f"if the difference is as measured, about {' with '.join(more)} would decide it in {phase}"
        return
    if any(each.ratio and abs(math.log(each.ratio)) >= SMALLEST_EFFECT for _, each in compared):
        yield "more than 20 repetitions, or many times as many requests, would be needed to decide"
    elif any(each.low and each.high and each.high / each.low > _WIDE for _, each in compared):
        yield "the measured difference is less than 1 %, but the intervals are wide: more repetitions narrow them"


def _wrong(outputs: OutputsFound) -> Iterator[str]:
    if outputs.outputs == Outputs.DIFFERENT and outputs.first_difference is not None:
        first = outputs.first_difference
        apart = first.baseline_margin
        margin = "" if apart is None else f", where the baseline's two likeliest tokens were {apart:.3g} apart"
        yield (
            f"{outputs.different} of {outputs.prompts} greedy answers differ from the baseline's, one at "
            f"token {first.position + 1}{margin}"
        )
    for what, shares in (("structured answers", outputs.structured), ("tool calls", outputs.tool_calls)):
        if outputs.parses_less and shares is not None and shares[0] < shares[1]:
            yield f"{100 * shares[0]:.0f} % of its {what} can be parsed, {100 * shares[1]:.0f} % of the baseline's"


def _outputs(outputs: OutputsFound) -> str:
    equal = f"{outputs.prompts} greedy answer{'s' * (outputs.prompts != 1)} equal to the baseline's"
    explained = (
        f"{outputs.explained} of {outputs.prompts} greedy answers differ where two tokens were about equally likely"
    )
    lossy = "its settings allow different answers"
    known = {Outputs.EQUAL.value: equal, Outputs.EXPLAINED.value: explained, Outputs.LOSSY.value: lossy}
    return known.get(outputs.outputs, "outputs were not checked")


MOST_BYTES: Final = 3072
"""Most bytes of the comparison in a termination message of 4096: the rest is for status.summary."""

_SHORTER: Final = ((400, 32), (200, 16), (160, 8), (120, 4), (120, 2), (80, 1), (60, 0))
"""Characters of each message and loads of each arm, tried until the status fits."""


def comparison_status(comparison: Comparison, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Return ``status.comparison``, in at most `most_bytes` of JSON.

    If it is longer, messages are cut and loads in the middle are left out: comparison.json has all of them.
    """
    baseline, *others = comparison.arms
    of_baseline = {each.phase: each for each in baseline.loads}
    status = ComparisonStatus(
        baseline=baseline.name,
        level_percent=round(100 * comparison.level),
        baseline_acceptance_percent=_acceptance_percent(baseline),
        arms=[
            ComparedArm(
                name=arm.name,
                verdict=ArmVerdict(arm.verdict or ArmVerdict.INCONCLUSIVE),
                message=arm.message,
                outputs=Outputs(arm.outputs.outputs) if arm.outputs is not None else Outputs.NOT_CHECKED,
                acceptance_percent=_acceptance_percent(arm),
                tokens_per_step=_tokens_per_step(arm),
                loads=[_load_status(of_baseline[each.phase], each, found) for each, found in compared_loads(arm.loads)],
            )
            for arm in others
        ],
        crossover_running=_decimal(others[0].crossover_running, 1) if others else None,
    ).model_dump(mode="json", by_alias=True, exclude_none=True)
    for letters, loads in _SHORTER:
        if len(json.dumps(status, separators=(",", ":"))) <= most_bytes:
            break
        for arm in status["arms"]:
            text = arm["message"]
            arm["message"] = text if len(text) <= letters else f"{text[: letters - 1]}…"
            found = arm.get("loads", [])
            if len(found) > loads:
                # Evenly, with the first and the last one.
                found = [found[round(place * (len(found) - 1) / max(1, loads - 1))] for place in range(loads)]
            arm["loads"] = found
    return status


def _acceptance_percent(arm: Arm) -> int | None:
    return None if arm.drafting is None else round(100 * arm.drafting.acceptance)


def _tokens_per_step(arm: Arm) -> TokensPerStep | None:
    if (found := arm.tokens_per_step) is None:
        return None
    names = ("arm", "baseline", "ratio", "low", "high")
    return TokensPerStep(
        **{name: _decimal(getattr(found, name), 3) for name in names},
        requests=found.requests,
        step_cost=StepCost(found.step_cost),
    )


def _load_status(plain: Load, load: Load, compared: LoadVerdict) -> ComparedLoad:
    return ComparedLoad(
        phase=load.phase,
        running=_decimal(plain.running, 1) or "0",
        baseline_goodput=_decimal(plain.goodput, 1) or "0",
        goodput=_decimal(load.goodput, 1) or "0",
        verdict=ArmVerdict(compared.verdict),
        ratio=_decimal(compared.ratio, 3),
        low=_decimal(compared.low, 3),
        high=_decimal(compared.high, 3),
    )


def _decimal(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"
