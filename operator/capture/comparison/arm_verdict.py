"""What an arm's loads and outputs come to: one verdict, the load from which it stops paying, and a sentence."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from specdecode_operator.api.status.comparison import ArmVerdict, Outputs
from specdecode_operator.capture.comparison.judged import SMALLEST_EFFECT
from specdecode_operator.capture.comparison.result import Load, LoadVerdict, OutputsFound
from specdecode_operator.redaction import clip

LONGEST: Final = 1024
"""Letters of a sentence, as the status takes it."""

_MOST_LOADS: Final = 6

_WIDE: Final = 1.1
"""Upper end of an interval to the lower: from here on it hides what would matter."""

Compared = tuple[Load, LoadVerdict]


def compared_loads(loads: Sequence[Load]) -> list[Compared]:
    """Return the loads that could be compared."""
    return [(each, each.compared) for each in loads if each.compared is not None]


def arm_verdict(loads: Sequence[Load], outputs: OutputsFound | None) -> ArmVerdict:
    """Return what all loads come to; an arm that answers otherwise is Incorrect, however fast it is."""
    if outputs is not None and (outputs.parses_less or outputs.outputs == Outputs.DIFFERENT):
        return ArmVerdict.INCORRECT
    found = {compared.verdict for _, compared in compared_loads(loads)}
    pays, loses = ArmVerdict.PAYS in found, ArmVerdict.DOES_NOT_PAY in found
    if pays and loses:
        return ArmVerdict.DEPENDS_ON_LOAD
    return ArmVerdict.PAYS if pays else ArmVerdict.DOES_NOT_PAY if loses else ArmVerdict.INCONCLUSIVE


def crossover(baseline: Sequence[Load], loads: Sequence[Load]) -> float | None:
    """Return the requests running at once above which an arm stops paying.

    That is where the ratio first falls to 1, from the last load that pays before one that costs to that one. Between
    loads its logarithm lies on a straight line over that of the load. Phases that ask different things, as in a sweep,
    are no loads of one traffic: it is not known.
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
    # What is missing comes first: until it is there, nothing else is needed.
    made = None if missing is not None else repetitions
    parts = [*_parts(verdict, baseline, loads, outputs, crossing, level, made)]
    if missing is not None:
        parts.insert(0, missing)
    return clip("; ".join(parts), LONGEST)


def _parts(  # noqa: PLR0913, PLR0917  as above
    verdict: ArmVerdict,
    baseline: Sequence[Load],
    loads: Sequence[Load],
    outputs: OutputsFound | None,
    crossing: float | None,
    level: float,
    repetitions: int | None,
) -> Iterator[str]:
    if verdict is ArmVerdict.INCORRECT and outputs is not None:
        yield from _wrong(outputs)
    running = {each.phase: each.running for each in baseline}
    compared = compared_loads(loads)
    said = [_load(running.get(load.phase), load, each, level) for load, each in compared]
    if said:
        more = f" and {len(said) - _MOST_LOADS} more loads" if len(said) > _MOST_LOADS else ""
        yield f"goodput {', '.join(said[:_MOST_LOADS])}{more}"
    else:
        why = next((each.not_compared for each in loads if each.not_compared), "none ran")
        yield f"no load could be compared: {why}"
    if crossing is not None:
        yield f"stops paying above about {crossing:g} running"
    if verdict is ArmVerdict.INCONCLUSIVE and repetitions is not None:
        yield from _needed(compared, repetitions)
    if outputs is not None and verdict is not ArmVerdict.INCORRECT:
        yield _outputs(outputs)


def _load(running: float | None, load: Load, compared: LoadVerdict, level: float) -> str:
    at = f"in {load.phase}" if running is None or load.asks else f"with {running:.3g} running"
    ends = [None if each is None else percent(each) for each in (compared.low, compared.high)]
    if compared.blocks_low is None or compared.blocks_high is None:
        return f"{_ratio(compared)} {at} (too few blocks for an interval: {compared.blocks})"
    if None in ends:
        return f"{_ratio(compared)} {at} (one start of each engine gives no interval)"
    return f"{_ratio(compared)} ({100 * level:.0f} %: {ends[0]} to {ends[1]}) {at}"


def _ratio(compared: LoadVerdict) -> str:
    return "not known" if compared.ratio is None else percent(compared.ratio)


def percent(ratio: float) -> str:
    """Return a ratio as people read it: +18 %, -2.5 %."""
    change = 100 * (ratio - 1)
    return f"{change:+.3g} %" if abs(change) >= 10 else f"{change:+.1f} %"  # noqa: PLR2004  two digits


def _needed(compared: Sequence[Compared], repetitions: int) -> Iterator[str]:
    """Yield what would decide the load that is nearest to it, beside what was made."""
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
        more = [f"{starts} repetitions in place of {repetitions}"] if starts > repetitions else []
        more += [f"{math.ceil(10 * longer) / 10:g} times as many requests"] if longer > 1 else []
        yield f"if it is as measured, about {' with '.join(more)} would tell in {phase}"
        return
    if any(each.ratio and abs(math.log(each.ratio)) >= SMALLEST_EFFECT for _, each in compared):
        yield "more than 20 repetitions, or many times as many requests, would be needed to tell"
    elif any(each.low and each.high and each.high / each.low > _WIDE for _, each in compared):
        yield "the difference is less than 1 % as measured, but intervals are wide: more repetitions make them narrower"


def _wrong(outputs: OutputsFound) -> Iterator[str]:
    if outputs.outputs == Outputs.DIFFERENT and outputs.first_difference is not None:
        first = outputs.first_difference
        margin = (
            "" if first.baseline_margin is None else f", where its two likeliest were {first.baseline_margin:.3g} apart"
        )
        yield (
            f"{outputs.different} of {outputs.prompts} greedy answers differ from the baseline's, one at "
            f"token {first.position + 1}{margin}"
        )
    for what, shares in (("structured answers", outputs.structured), ("tool calls", outputs.tool_calls)):
        if outputs.parses_less and shares is not None and shares[0] < shares[1]:
            yield f"{100 * shares[0]:.0f} % of its {what} can be parsed, {100 * shares[1]:.0f} % of the baseline's"


def _outputs(outputs: OutputsFound) -> str:
    match outputs.outputs:
        case Outputs.EQUAL:
            return f"{_counted(outputs.prompts, 'greedy answer')} equal to the baseline's"
        case Outputs.EXPLAINED:
            return (
                f"{outputs.explained} of {outputs.prompts} greedy answers differ, where two tokens were about as likely"
            )
        case Outputs.LOSSY:
            return "it may answer otherwise by its settings"
        case _:
            return "outputs were not checked"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
