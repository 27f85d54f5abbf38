"""What a policy remembers, read from the status and written there: it survives the operator's restart."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final

from specdecode_operator.api.policy import MOST_DECISIONS, MOST_RESTARTS, Policy, PolicyDecision, PolicyStatus
from specdecode_operator.api.speculation import Speculation
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, ConditionUpdate
from specdecode_operator.deployment.policy.evidence import Measured
from specdecode_operator.deployment.proof.observed import decimal
from specdecode_operator.policy.decision import (
    Action,
    Decision,
    Fits,
    Memory,
    Mode,
    NoEvidence,
    Outcome,
    Rules,
    Seen,
    decide,
)
from specdecode_operator.policy.window import Window
from specdecode_operator.redaction import clip

_TIME: Final = "%Y-%m-%dT%H:%M:%SZ"
_LONGEST: Final = 1024
_LONGEST_ARM: Final = 200
_TOLD: Final = (Outcome.ADVISED, Outcome.DONE)
CONDITION: Final = "BestInForce"


@dataclass(frozen=True)
class Remembered:
    """What is remembered only as long as the operator runs: after a restart it is seen anew."""

    window: Window
    looked_s: float | None = None
    ahead_s: dict[str, float] = field(default_factory=dict)
    written_s: float = 0.0
    """When the message was written last."""


def rules_of(policy: Policy, *, rollout_paused: bool = False) -> Rules:
    """Return what a user allows."""
    rule = policy.acceptance_rule
    return Rules(
        mode=policy.mode,
        paused=policy.paused or rollout_paused,
        min_gain=policy.min_gain_percent / 100,
        cooldown_s=float(policy.cooldown_seconds),
        restarts_a_day=policy.max_restarts_per_day,
        acceptance_rule=rule.acceptance if rule else None,
    )


def of_this_spec(status: PolicyStatus | None, asked: str) -> PolicyStatus | None:
    """Return what is remembered for a spec; of an earlier one only when engines were started anew."""
    if status is None or status.asked == asked:
        return status
    return PolicyStatus(
        mode=status.mode,
        action=Action.KEEP,
        outcome=Outcome.KEPT,
        reason="NoEvidence",
        message="",
        asked=asked,
        restarts=status.restarts,
        decisions=status.decisions,
    )


@dataclass(frozen=True)
class Case:
    """What is decided by, besides the engines."""

    policy: Policy
    asked: str
    """What tells the spec."""

    before: PolicyStatus | None
    """What the status remembers for this spec."""

    measured: Measured | NoEvidence
    rollout_paused: bool = False


def judge(case: Case, seen: Seen, remembered: Remembered, fits: Fits) -> tuple[Decision, Memory]:
    """Return what to do, by what the status and the process remember."""
    measured, before = case.measured, case.before
    memory = Memory(
        in_force=measured.in_force if isinstance(measured, Measured) else "",
        looked_s=remembered.looked_s,
        ahead_s=remembered.ahead_s,
    )
    if before is not None:
        factor = decimal(before.acceptance_factor)
        memory = replace(
            memory,
            left=before.left or "",
            acceptance_factor=1.0 if factor is None else max(factor, 0.0),
            tried_in_vain=before.tried_in_vain,
            restarts=tuple(filter(None, map(_seconds, before.restarts))),
            failed=_failed(before.failed_arms, measured),
        )
    evidence = measured.evidence if isinstance(measured, Measured) else measured
    return decide(rules_of(case.policy, rollout_paused=case.rollout_paused), evidence, seen, memory, fits)


def policy_status(case: Case, decision: Decision, memory: Memory, now: datetime) -> PolicyStatus:
    """Return what the status says after a decision."""
    measured, before, moment = case.measured, case.before, now.strftime(_TIME)
    speculation, since = (before.speculation, before.since) if before else (None, None)
    if isinstance(measured, Measured) and decision.changes:
        taken = measured.speculations[decision.target]
        speculation, since = None if taken == measured.written else taken, moment
    if case.policy.mode is not Mode.ENFORCE:
        speculation = since = None
    return PolicyStatus(
        mode=case.policy.mode,
        action=decision.action,
        outcome=decision.outcome,
        reason=decision.reason,
        message=clip(decision.message, _LONGEST),
        target=decision.target or None,
        evidence=measured.evidence.name if isinstance(measured, Measured) else None,
        arm=memory.in_force or (before.arm if before and speculation else None),
        since=since,
        speculation=speculation,
        asked=case.asked,
        left=memory.left or None,
        acceptance_factor=None if memory.acceptance_factor == 1 else f"{memory.acceptance_factor:.4f}",
        tried_in_vain=memory.tried_in_vain,
        failed_arms=before.failed_arms if before else [],
        restarts=[_text(each) for each in memory.restarts][-MOST_RESTARTS:],
        decisions=_decisions(before, decision, moment),
    )


def stands(before: PolicyStatus | None, decision: Decision) -> bool:
    """Whether the status says of a decision already what it comes to; its words may have other figures."""
    return before is not None and (before.action, before.outcome, before.target) == (
        *(decision.action, decision.outcome, decision.target or None),
    )


def _decisions(before: PolicyStatus | None, decision: Decision, moment: str) -> list[PolicyDecision]:
    """Return what was advised or done last; an advice that stands is told once."""
    known = before.decisions if before else []
    if decision.outcome not in _TOLD or (stands(before, decision) and decision.outcome is not Outcome.DONE):
        return known
    told = PolicyDecision(
        at=moment,
        action=decision.action,
        outcome=decision.outcome,
        target=decision.target or None,
        message=clip(decision.message, _LONGEST),
    )
    return [told, *known][:MOST_DECISIONS]


def given_up(status: PolicyStatus, why: str, now: datetime) -> PolicyStatus:
    """Return the status after the arm in force turned out not to serve: what the spec says is in force again."""
    arm, failed = status.arm or "", _entry(status)
    earlier = [each for each in status.failed_arms if each not in failed]
    message = clip(f"{arm} was given up, and what the spec says is in force again: {why}", _LONGEST)
    told = PolicyDecision(
        at=now.strftime(_TIME), action=Action.KEEP, outcome=Outcome.DONE, target=arm or None, message=message
    )
    return status.model_copy(
        update={
            "action": Action.KEEP,
            "outcome": Outcome.KEPT,
            "reason": "ArmFailed",
            "message": message,
            "decisions": [told, *status.decisions][:MOST_DECISIONS],
            "speculation": None,
            "since": None,
            "target": None,
            "arm": None,
            "left": None,
            # The one that just failed is never the one that is forgotten, or it would be taken again and again.
            "failed_arms": [*earlier[1 - MOST_DECISIONS :], *failed],
        }
    )


def _entry(status: PolicyStatus) -> list[str]:
    """Return what is remembered of the arm in force when it fails: its name for people, and what it is."""
    if not status.arm or status.speculation is None:
        return []
    return [f"{status.arm[:_LONGEST_ARM]}@{_digest(status.speculation)}"]


def _failed(entries: Sequence[str], measured: Measured | NoEvidence) -> frozenset[str]:
    """Return the arms of the evidence whose engines never served here, whatever another capture called them."""
    if isinstance(measured, NoEvidence):
        return frozenset()
    digests = {each.rpartition("@")[2] for each in entries}
    return frozenset(name for name, its in measured.speculations.items() if _digest(its) in digests)


def _digest(speculation: Speculation) -> str:
    text = json.dumps(speculation.model_dump(mode="json", exclude_none=True), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def steady(new: PolicyStatus, old: PolicyStatus | None, *, due: bool) -> PolicyStatus:
    """Return the status with its old words while it says the same: figures move with every request."""
    if old is None or due or new.model_copy(update={"message": old.message}) != old:
        return new
    return old


def policy_condition(status: PolicyStatus | None) -> list[ConditionUpdate]:
    """Return the condition that says whether the best measured speculation is in force; none in mode Observe."""
    if status is None or status.mode is Mode.OBSERVE:
        return []
    if status.action is not Action.KEEP:
        return [ConditionUpdate(CONDITION, FALSE, status.reason, f"{status.action}: {status.message}")]
    is_best = status.reason == "BestMeasured"
    return [ConditionUpdate(CONDITION, TRUE if is_best else UNKNOWN, status.reason, status.message)]


def _seconds(text: str) -> float | None:
    try:
        return datetime.strptime(text, _TIME).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime(_TIME)
