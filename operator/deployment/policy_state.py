"""Collect a policy's inputs from engines, captures and status; write `status.policy`.

State that must survive an operator restart is in the status; the rest is relearned.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import CaptureWorkload
from specdecode_operator.api.capture_status import ArmVerdict, ComparedArm, ComparisonStatus, Outputs
from specdecode_operator.api.crd_validation import broken_rules
from specdecode_operator.api.deployment import MOST_DECISIONS, MOST_RESTARTS, Policy, PolicyDecision, PolicyStatus
from specdecode_operator.api.deployment_status import PlanStatus
from specdecode_operator.api.speculation import Speculation
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, ConditionUpdate
from specdecode_operator.deployment.desired_state import DesiredState, Launch
from specdecode_operator.deployment.observed.engine_reports import decimal
from specdecode_operator.deployment.observed.observation import Observation, rollout_of
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment, speculating
from specdecode_operator.deployment.policy_decision import (
    Decision,
    Evidence,
    Fits,
    Memory,
    NoEvidence,
    Point,
    Rules,
    Seen,
    Setting,
    decide,
)
from specdecode_operator.enums import Method, PolicyAction, PolicyMode, PolicyOutcome, RejectionSampling
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.redaction import clip
from specdecode_operator.stats.engine_window import Sample, Window, Work
from specdecode_operator.vllm.engine_metrics import answering_engines


def observe_engines(desired: DesiredState, observation: Observation, window: Window, now_s: float) -> Seen:
    """Return what is seen now, with the window of what was seen before; looks at engines of a rollout do not count."""
    settled = False
    if not observation.blocked and isinstance(desired.outcome, Launch):
        rollout = rollout_of(desired.outcome, observation)
        settled = rollout.complete and rollout.wanted > 0
    engines = answering_engines(observation.readings)
    if settled and engines:
        drafting = {
            name: Work(0, its.drafts, its.draft_tokens, its.accepted_tokens)
            for name, engine in engines.items()
            if (its := engine.speculation) is not None
        }
        running = sum(engine.requests_running for engine in engines.values()) / len(engines)
        window = window.add(Sample(now_s, running, drafting))
    speculation = desired.outcome.facts.spec.speculation if isinstance(desired.outcome, Launch) else None
    adapts = speculation is not None and bool(speculation.adaptive_verification)
    return Seen(now_s, window, settled, _slowest_start_s(observation.pods), counts_all=not adapts)


def _slowest_start_s(pods: Sequence[Body]) -> float:
    taken = [0.0]
    for pod in pods:
        status = pod.get("status") or {}
        begun = _read_time(status.get("startTime"))
        for each in status.get("conditions") or []:
            if each["type"] == "Ready" and each["status"] == "True":
                ready = _read_time(each.get("lastTransitionTime"))
                taken += [(ready - begun).total_seconds()] if begun and ready else []
    return max(taken)


def _read_time(text: object) -> datetime | None:
    try:
        return datetime.strptime(str(text), _TIME).replace(tzinfo=UTC)
    except ValueError:
        return None


_OFF: Final = Speculation(method=Method.NONE)
_NONE: Final = "no SpecDecodeCapture of this deployment compared arms: create one with spec.arms"


@dataclass(frozen=True)
class Measured:
    """What one capture compared."""

    evidence: Evidence
    speculations: Mapping[str, Speculation]
    written: Speculation
    in_force: str


def read_measured(
    captures: Sequence[Body], name: str | None, engine: str, asked: Speculation | None, in_force: Speculation | None
) -> Measured | NoEvidence:
    """Return what the capture of a name compared, or the newest of all; or why nothing can be decided by it.

    ``engine`` identifies the engines of the written spec, ``asked`` is its speculation.
    """
    capture = _chosen(captures, name)
    if isinstance(capture, NoEvidence):
        return capture
    found, status = capture["metadata"]["name"], capture["status"]
    if status.get("engine") != engine:
        return NoEvidence("EvidenceOutdated", f"{found} measured engines of another spec or place: capture again")
    try:
        comparison = ComparisonStatus.parse(status["comparison"], newer=True)
    except ValidationError:
        return NoEvidence("EvidenceUnusable", f"the comparison of {found} cannot be read: capture again")
    speculations = _speculations(capture["spec"].get("arms") or [], asked)
    arm = next((each for each, its in speculations.items() if its == (in_force or _OFF)), None)
    if arm is None:
        return NoEvidence("EvidenceOutdated", f"no arm of {found} speculates as the engines do: capture again with one")
    evidence = _evidence(found, comparison, speculations, capture["spec"].get("arms") or [])
    if evidence is None:
        return NoEvidence("EvidenceUnusable", f"{found} has no interval at any load: capture again, for longer")
    return Measured(evidence, speculations, asked or _OFF, arm)


def _chosen(captures: Sequence[Body], name: str | None) -> Body | NoEvidence:
    if name is not None:
        captures = [each for each in captures if each["metadata"]["name"] == name]
        if not captures:
            return NoEvidence("NoEvidence", f"spec.policy.evidence: {name}: no SpecDecodeCapture of this deployment")
    compared = [each for each in captures if (each.get("status") or {}).get("comparison")]
    # Phases of a sweep ask for other temperatures, lengths or prompts each, so they are no loads of one traffic.
    ended = [each for each in compared if not _is_sweep(each)]
    if ended:
        return max(ended, key=lambda each: (str(each["status"].get("finishedAt")), each["metadata"]["name"]))
    if name is not None and compared:
        why = "is a sweep: its phases ask different things, and are no loads of one traffic: name another"
        return NoEvidence("EvidenceUnusable", f"{name} {why}")
    phase = (captures[-1].get("status") or {}).get("phase") if name is not None else None
    return NoEvidence("NoEvidence", f"{name} compared no arms, it is {phase}" if name else _NONE)


def _is_sweep(capture: Body) -> bool:
    try:
        workload = CaptureWorkload.parse(capture["spec"].get("workload") or {}, newer=True)
    except ValidationError:
        return False
    return len({phase.asks for phase in workload.phases}) > 1


def _speculations(arms: Sequence[Any], asked: Speculation | None) -> dict[str, Speculation]:
    found = {}
    for arm in arms:
        if arm.get("targetQuantization") or arm.get("kvCacheDtype"):
            continue
        try:
            given = arm.get("speculation")
            found[str(arm.get("name"))] = Speculation.parse(given, newer=True) if given else asked or _OFF
        except ValidationError:
            continue
    return found


def _evidence(
    name: str, comparison: ComparisonStatus, speculations: Mapping[str, Speculation], arms: Sequence[Any]
) -> Evidence | None:
    as_asked = {str(arm.get("name")) for arm in arms if not arm.get("speculation")}
    loads = {
        running: goodput
        for arm in comparison.arms
        for load in arm.loads
        if (running := decimal(load.running))
        and running > 0
        and (goodput := decimal(load.baseline_goodput))
        and goodput > 0
    }
    settings = []
    for arm in comparison.arms:
        points = []
        for load in arm.loads:
            texts = (load.running, load.arm_running or load.running, load.ratio, load.low, load.high)
            numbers = [number for number in map(decimal, texts) if number is not None and number > 0]
            points += [Point(*numbers)] if len(numbers) == len(texts) else []
        points.sort(key=lambda point: point.load)
        if points and arm.name in speculations:
            its = speculations[arm.name]
            refused = "" if arm.name in as_asked else _refusal(arm, its)
            settings.append(_setting(arm.name, points, its, arm.acceptance_percent, refused))
    if not settings or not loads:
        return None
    if comparison.baseline in speculations:
        points = [Point(load, load) for load in sorted(loads)]
        its = speculations[comparison.baseline]
        settings.append(_setting(comparison.baseline, points, its, comparison.baseline_acceptance_percent))
    return Evidence(name, settings, sorted(loads.items()))


def _refusal(arm: ComparedArm, its: Speculation) -> str:
    """Return why an arm is not chosen: its answers may be others than were asked for."""
    if its.rejection_sampling is RejectionSampling.FLY:
        return "its answers may be others than the target's own (rejectionSampling fly)"
    if arm.verdict is ArmVerdict.INCORRECT or arm.outputs in {Outputs.DIFFERENT, Outputs.LOSSY}:
        return "its answers are others than the baseline's"
    return ""


def _setting(
    name: str, points: Sequence[Point], speculation: Speculation, percent: int | None, refused: str = ""
) -> Setting:
    drafts = 0 if speculation.method is Method.NONE else speculation.num_speculative_tokens or 0
    # With K by batch size, K moves with the load, so acceptance does not give tokens per step.
    by_batch = bool(speculation.num_speculative_tokens_by_batch_size)
    return Setting(name, points, drafts, None if percent is None or by_batch else percent / 100, refused)


_PLACE: Final = (
    *("product", "tensor", "pipeline", "data", "gpus_per_replica", "nodes_per_replica", "target_quantization"),
)


def with_speculation(parent: ParsedDeployment, speculation: Speculation) -> ParsedDeployment | str:
    """Return an object as if its spec said so, or why no API server would take that."""
    written = parent.written_spec or parent.spec
    if isinstance(written, InvalidSpecError):
        return str(written)
    spec = speculating(written, speculation)
    if broken := "; ".join(map(str, broken_rules(spec, "spec"))):
        return broken
    raw = {**parent.raw_spec, "speculation": speculation.model_dump(mode="json", by_alias=True, exclude_unset=True)}
    return replace(parent, raw_spec=raw, spec=spec, written_spec=written, by_policy=True)


def why_not_plannable(desired: DesiredState, in_force: PlanStatus | None) -> str:
    """Return why a speculation cannot take the place of the one in force; an empty text where it can."""
    if not isinstance(desired.outcome, Launch):
        return refusal(desired) or "it cannot be launched now"
    plan = desired.outcome.plan_status
    others = [name for name in _PLACE if in_force is None or getattr(plan, name) != getattr(in_force, name)]
    if not others:
        return ""
    words = ", ".join(f"{name.replace('_', ' ')} {getattr(plan, name)}" for name in others)
    return f"it would not run where it was measured, but with {words}"


def refusal(desired: DesiredState) -> str:
    """Return why a spec is not accepted or fits nowhere; an empty text where it may only wait."""
    named = {each.type: each for each in desired.conditions}
    told = [named[each] for each in ("Accepted", "Planned") if each in named]
    refused = next((each for each in told if each.status is FALSE), None)
    return f"{refused.reason}: {refused.message}" if refused else ""


_TIME: Final = "%Y-%m-%dT%H:%M:%SZ"
_LONGEST: Final = 1024
_LONGEST_ARM: Final = 200
CONDITION: Final = "BestInForce"


@dataclass(frozen=True)
class Remembered:
    """What is remembered only as long as the operator runs: after a restart it is seen anew."""

    window: Window
    looked_s: float | None = None
    ahead_s: dict[str, float] = field(default_factory=dict)
    written_s: float = 0.0


def of_this_spec(status: PolicyStatus | None, asked: str) -> PolicyStatus | None:
    """Return what is remembered for a spec; of an earlier one only when engines were started anew."""
    if status is None or status.asked == asked:
        return status
    return PolicyStatus(
        mode=status.mode,
        action=PolicyAction.KEEP,
        outcome=PolicyOutcome.KEPT,
        reason="NoEvidence",
        message="",
        asked=asked,
        restarts=status.restarts,
        decisions=status.decisions,
    )


@dataclass(frozen=True)
class PolicyInputs:
    """What is decided by, besides the engines."""

    policy: Policy
    asked: str
    before: PolicyStatus | None
    measured: Measured | NoEvidence
    rollout_paused: bool = False


def judge(case: PolicyInputs, seen: Seen, remembered: Remembered, fits: Fits) -> tuple[Decision, Memory]:
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
            restarts=tuple(time.timestamp() for time in map(_read_time, before.restarts) if time is not None),
        )
    if before is not None and isinstance(measured, Measured):
        # By digest: another capture may call the same arm otherwise.
        failed = {each.rpartition("@")[2] for each in before.failed_arms}
        names = frozenset(name for name, its in measured.speculations.items() if _digest(its) in failed)
        memory = replace(memory, failed=names)
    policy, rule = case.policy, case.policy.acceptance_rule
    rules = Rules(
        mode=policy.mode,
        paused=policy.paused or case.rollout_paused,
        min_gain=policy.min_gain_percent / 100,
        cooldown_s=float(policy.cooldown_seconds),
        restarts_a_day=policy.max_restarts_per_day,
        acceptance_rule=rule.acceptance if rule else None,
    )
    return decide(rules, measured.evidence if isinstance(measured, Measured) else measured, seen, memory, fits)


def policy_status(case: PolicyInputs, decision: Decision, memory: Memory, now: datetime) -> PolicyStatus:
    """Return what the status says after a decision."""
    measured, before, moment = case.measured, case.before, now.strftime(_TIME)
    speculation, since, decisions = (before.speculation, before.since, before.decisions) if before else (None, None, [])
    is_done = decision.outcome is PolicyOutcome.DONE
    if is_done or (decision.outcome is PolicyOutcome.ADVISED and not is_unchanged(before, decision)):
        told = PolicyDecision(
            at=moment,
            action=decision.action,
            outcome=decision.outcome,
            target=decision.target or None,
            message=clip(decision.message, _LONGEST),
        )
        decisions = [told, *decisions][:MOST_DECISIONS]
    if isinstance(measured, Measured) and decision.changes:
        taken = measured.speculations[decision.target]
        speculation, since = None if taken == measured.written else taken, moment
    if case.policy.mode is not PolicyMode.ENFORCE:
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
        restarts=[datetime.fromtimestamp(each, UTC).strftime(_TIME) for each in memory.restarts][-MOST_RESTARTS:],
        decisions=decisions,
    )


def is_unchanged(before: PolicyStatus | None, decision: Decision) -> bool:
    """Whether the status says of a decision already what it comes to; its words may have other figures."""
    return before is not None and (before.action, before.outcome, before.target) == (
        *(decision.action, decision.outcome, decision.target or None),
    )


def given_up(status: PolicyStatus, why: str, now: datetime) -> PolicyStatus:
    """Return the status after the arm in force turned out not to serve: what the spec says is in force again."""
    arm, failed = status.arm or "", list[str]()
    if status.arm and status.speculation is not None:
        failed = [f"{status.arm[:_LONGEST_ARM]}@{_digest(status.speculation)}"]
    earlier = [each for each in status.failed_arms if each not in failed]
    message = clip(f"{arm} was given up, and what the spec says is in force again: {why}", _LONGEST)
    done, at = PolicyOutcome.DONE, now.strftime(_TIME)
    told = PolicyDecision(at=at, action=PolicyAction.KEEP, outcome=done, target=arm or None, message=message)
    return status.model_copy(
        update={
            "action": PolicyAction.KEEP,
            "outcome": PolicyOutcome.KEPT,
            "reason": "ArmFailed",
            "message": message,
            "decisions": [told, *status.decisions][:MOST_DECISIONS],
            **dict.fromkeys(("speculation", "since", "target", "arm", "left")),
            # The one that just failed is never the one that is forgotten, or it would be taken again and again.
            "failed_arms": [*earlier[1 - MOST_DECISIONS :], *failed],
        }
    )


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
    if status is None or status.mode is PolicyMode.OBSERVE:
        return []
    if status.action is not PolicyAction.KEEP:
        return [ConditionUpdate(CONDITION, FALSE, status.reason, f"{status.action}: {status.message}")]
    is_best = status.reason == "BestMeasured"
    return [ConditionUpdate(CONDITION, TRUE if is_best else UNKNOWN, status.reason, status.message)]
