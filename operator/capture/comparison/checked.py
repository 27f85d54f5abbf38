"""Whether an arm answers what the baseline answers: greedy tokens, and answers that must have a form."""

import math
from collections.abc import Iterator, Sequence
from typing import Final

from specdecode_operator.api.status.comparison import Outputs
from specdecode_operator.capture.comparison.result import Difference, OutputsFound
from specdecode_operator.capture.files.checks import Checks, GreedyAnswer, ParsingCheck
from specdecode_operator.capture.files.formats import CHECKS

CLOSE: Final = 0.25
"""Difference of log probability up to which two tokens are as likely: logits from 16 to 32 have steps of 0.125 in BF16,
and either may be off by one, as the order of sums changes with what is in a batch."""

_BY_CHANCE: Final = 0.05


def compare_outputs(baseline: Checks | None, arm: Checks | None, lossy: str | None) -> OutputsFound:
    """Return what the answers of an arm come to beside the baseline's."""
    pairs = [] if baseline is None or arm is None else [*_pairs(baseline, arm)]
    missing = list(_not_measured(baseline, arm, pairs))
    differences = [found for one, other in pairs if (found := _difference(one, other)) is not None]
    explained = sum(each.explained for each in differences)
    structured = tool_calls = None
    if baseline is not None and arm is not None:
        structured = _parsing(baseline.structured, arm.structured)
        tool_calls = _parsing(baseline.tool_calls, arm.tool_calls)
    first = next((each for each in differences if not each.explained), differences[0] if differences else None)
    return OutputsFound(
        outputs=_outputs(len(pairs), len(differences), explained, lossy).value,
        prompts=len(pairs),
        equal=len(pairs) - len(differences),
        explained=explained,
        different=len(differences) - explained,
        first_difference=first,
        structured=_shares(structured),
        tool_calls=_shares(tool_calls),
        parses_less=_less(structured) or _less(tool_calls),
        not_measured=missing,
    )


def _outputs(prompts: int, differences: int, explained: int, lossy: str | None) -> Outputs:
    if lossy is not None:
        # What may answer otherwise is never called equal, whatever so many prompts showed.
        return Outputs.LOSSY
    if not prompts:
        return Outputs.NOT_CHECKED
    if differences > explained:
        return Outputs.DIFFERENT
    return Outputs.EXPLAINED if differences else Outputs.EQUAL


def _pairs(baseline: Checks, arm: Checks) -> Iterator[tuple[GreedyAnswer, GreedyAnswer]]:
    of_arm = {each.prompt_sha256: each for each in arm.greedy.answers}
    for each in baseline.greedy.answers:
        other = of_arm.get(each.prompt_sha256)
        # Two answers without a token show nothing: an engine that says nothing would have said it of any prompt.
        if other is not None and (each.tokens or other.tokens):
            yield each, other


def _difference(baseline: GreedyAnswer, other: GreedyAnswer) -> Difference | None:
    """Return where two answers part: at a token, or where one of them has ended."""
    if baseline.tokens == other.tokens:
        return None
    shorter = min(len(baseline.tokens), len(other.tokens))
    position = next((at for at in range(shorter) if baseline.tokens[at] != other.tokens[at]), shorter)
    margins = [
        answer.top2_margin[position]
        for answer in (baseline, other)
        if position < min(len(answer.tokens), len(answer.top2_margin))
    ]
    margin = next((each for each in margins if each is not None), None)
    return Difference(
        prompt_sha256=baseline.prompt_sha256,
        position=position,
        baseline_margin=margin,
        explained=margin is not None and abs(margin) <= CLOSE,
    )


Parsing = tuple[ParsingCheck, ParsingCheck]
"""Of the arm and of the baseline."""


def _parsing(baseline: ParsingCheck, arm: ParsingCheck) -> Parsing | None:
    if not baseline.asked or not arm.asked:
        return None
    return arm, baseline


def _shares(parsing: Parsing | None) -> tuple[float, float] | None:
    if parsing is None:
        return None
    arm, baseline = (round(min(each.parsed, each.asked) / each.asked, 4) for each in parsing)
    return arm, baseline


def _less(parsing: Parsing | None) -> bool:
    """Whether an arm parses less often than chance explains: Fisher's exact test, one-sided."""
    if parsing is None:
        return False
    (asked, parsed), (asked_before, parsed_before) = (
        (min(each.asked, _MOST_ASKED), min(each.parsed, each.asked, _MOST_ASKED)) for each in parsing
    )
    together, right = asked + asked_before, parsed + parsed_before
    as_few = sum(
        math.comb(asked, count) * math.comb(asked_before, right - count)
        for count in range(max(0, right - asked_before), parsed + 1)
    )
    return as_few / math.comb(together, right) <= _BY_CHANCE


_MOST_ASKED: Final = 64


def _not_measured(
    baseline: Checks | None, arm: Checks | None, pairs: Sequence[tuple[GreedyAnswer, GreedyAnswer]]
) -> Iterator[str]:
    if baseline is None or arm is None:
        yield f"outputs were not checked: {'the baseline' if baseline is None else 'it'} has no {CHECKS}"
        return
    for what, of_baseline, of_arm in (
        ("greedy outputs", baseline.greedy, arm.greedy),
        ("structured outputs", baseline.structured, arm.structured),
        ("tool calls", baseline.tool_calls, arm.tool_calls),
    ):
        why = of_baseline.not_measured or of_arm.not_measured
        if why is None and of_baseline is baseline.greedy and not pairs:
            why = "no prompt has an answer with a token of both engines"
        if why is not None:
            yield f"{what} were not checked: {why}"
