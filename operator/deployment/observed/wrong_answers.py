"""Decide whether engines answer canary prompts other than their target: reason WrongAnswers, and `status.canaries`.

An engine counts its answers itself, from its start on, so this needs no history of the operator. A counted wrong answer
was confirmed by a second one. Answers to two different prompts must be wrong, because a single prompt may happen to
lie at a near tie that this model's decode and prefill always round differently. With only one prompt, one is enough.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from specdecode_operator.api.deployment_status import CanariesStatus
from specdecode_operator.deployment.canaries import asked_canaries, canaries_of, hourly_cost, not_asked, prompts_of
from specdecode_operator.deployment.conditions import EFFECTIVE, FALSE, WRONG_ANSWERS, ConditionUpdate
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.enums import Method
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip
from specdecode_operator.vllm.engine_metrics import CanaryReading, EngineReading, Reading

ENOUGH_PROMPTS: Final = 2
_MOST_COUNTER: Final = 2**53
_LONGEST_REASON: Final = 256
_MUCH_MORE: Final = 2  # Factor of answers after which the status is written though nothing went wrong

Answers = Mapping[str, CanaryReading]
"""Last reading by pod."""

_DETAILS: Final = "kubectl logs {pod} -c recorder shows tokens and differences"
_FIX: Final = (
    f"{_DETAILS}. Turn speculation off (remove spec.speculation, or use spec.policy.mode: Enforce), and report it to"
    " vLLM with its version, the speculation and the attention backend of the engine log"
)
_NOT_BY_SPECULATION: Final = (
    f"These engines do not speculate, so speculation is not the cause. {_DETAILS}. Try another attention backend, or"
    " an earlier image or driver, and report it to vLLM"
)


@dataclass(frozen=True)
class WrongAnswers:
    """Engines that answered wrong."""

    message: str
    speculates: bool
    pod: str

    def condition(self, by_policy: str | None = None) -> ConditionUpdate:
        """Return the condition SpeculationEffective; ``by_policy`` is what the policy says about it."""
        fix = by_policy or (_FIX if self.speculates else _NOT_BY_SPECULATION).format(pod=self.pod)
        return ConditionUpdate(EFFECTIVE, FALSE, WRONG_ANSWERS, f"{self.message}. {fix}")


def update_answers(before: Answers, pods: Collection[str], readings: Mapping[str, Reading]) -> Answers:
    """Return the last reading of each of these pods; one that does not answer now keeps its earlier reading."""
    kept = {name: its for name, its in before.items() if name in pods}
    for name, reading in readings.items():
        if isinstance(reading, EngineReading):
            kept.pop(name, None)
            if reading.canaries is not None:
                kept[name] = reading.canaries
    return kept


def wrong_answers(facts: Facts | None, answers: Answers) -> WrongAnswers | None:
    """Return the engines that answered wrong, or None; ``facts`` describe the launched engines."""
    canaries = asked_canaries(facts) if facts is not None else None
    if facts is None or canaries is None:
        return None
    enough = min(ENOUGH_PROMPTS, len(prompts_of(canaries)))
    wrong = {name: its for name, its in answers.items() if its.wrong_prompts >= enough}
    if not wrong:
        return None
    name, its = max(wrong.items(), key=lambda each: (each[1].wrong, each[0]))
    others = f", as {len(wrong) - 1} more engines do" if len(wrong) > 1 else ""
    message = (
        f"{name} gave {its.wrong} wrong answers to {its.wrong_prompts} canary prompts, each confirmed by asking again,"
        f" of {its.answers} answers{others}: tokens that the target itself finds clearly less likely than its best one"
    )
    return WrongAnswers(message, facts.method is not Method.NONE, name)


def canaries_status(facts: Facts | None, answers: Answers, before: CanariesStatus | None) -> CanariesStatus | None:
    """Return `status.canaries`: the earlier one until an answer was not right, or there are twice as many."""
    canaries = canaries_of(facts) if facts is not None else None
    if facts is None or canaries is None:
        return None
    cost, why_not = hourly_cost(canaries), not_asked(facts)
    read = [] if why_not else list(answers.values())
    refused = why_not or next((each.unsupported for each in read if each.unsupported is not None), None)
    new = CanariesStatus(
        right=_total(each.right for each in read),
        wrong=_total(each.wrong for each in read),
        unconfirmed=_total(each.unconfirmed for each in read),
        failed=_total(each.failed for each in read),
        unsupported=None if refused is None else clip(printable(refused), _LONGEST_REASON),
        generated_tokens_per_hour=0 if why_not else cost.generated_tokens,
        prompt_tokens_per_hour=0 if why_not else cost.prompt_tokens,
    )
    if before is None or before.right <= 0 or not before.right <= new.right < _MUCH_MORE * before.right:
        return new
    return before if new.model_copy(update={"right": before.right}) == before else new


def _total(counts: Iterable[int]) -> int:
    return min(_MOST_COUNTER, sum(counts))
