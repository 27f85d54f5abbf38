"""Compose the status of a SpecDecodeDeployment from the desired and the observed state."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

from specdecode_operator.api.deployment import PolicyStatus, ScheduleStatus
from specdecode_operator.api.deployment_status import (
    CanaryStatus,
    ObservedStatus,
    SpecDecodeDeploymentStatus,
    SpeculationFeature,
    TrainedDraftStatus,
)
from specdecode_operator.cluster.resources import (
    CANARY_POOL,
    KEPT_MANAGERS_ANNOTATION,
    POOL_LABEL,
    selector_labels,
)
from specdecode_operator.deployment.conditions import (
    CRASH_LOOP,
    EFFECTIVE,
    FALSE,
    SEE_READY,
    TRUE,
    UNKNOWN,
    WRONG_ANSWERS,
    ConditionUpdate,
    kept,
    stamp,
)
from specdecode_operator.deployment.desired_state import DesiredState, Gated, InCanary, Launch, NotLaunched, Outcome
from specdecode_operator.deployment.http_route import exposed_condition
from specdecode_operator.deployment.observed.decay import decay_condition
from specdecode_operator.deployment.observed.engine_reports import (
    budget_condition,
    budget_residual,
    observed_status,
    steady,
)
from specdecode_operator.deployment.observed.observation import Observation, canary_decision, rollout_of
from specdecode_operator.deployment.observed.speculation_in_force import (
    last_acceptance,
    prove_speculation,
    settings_condition,
    with_last_acceptance,
)
from specdecode_operator.deployment.observed.wrong_answers import canaries_status
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment, is_off_until_change
from specdecode_operator.deployment.rollout.canary import CANARY_FAILED, JUDGED
from specdecode_operator.deployment.rollout.readiness import (
    CAPTURE_OVERDUE,
    ROLLED_BACK,
    EngineCounts,
    Lending,
    Readiness,
    asked_for_zero,
    available_condition,
    name_claim_users,
    rolled_back,
    summarize,
    suspended_for_capture,
    without_engines,
)
from specdecode_operator.deployment.rollout.rollout_gate import held_readiness
from specdecode_operator.deployment.speculation_policy import policy_condition

_PROOFS: Final = ("SpeculationActive", "BudgetAccurate", "SettingsInForce")
_BY_POLICY: Final = "Turned off by the speculation policy; see status.policy"
_REPLAYED: Final = "; replaying a recording (spec.engine.replay), no model runs"


_CRASH_FIX: Final = (
    "Save the log (kubectl logs POD --previous). Then remove spec.speculation, or let the operator turn it off:"
    " spec.policy.onCrashLoop: ServeWithoutSpeculation"
)
_EARLIER_CRASH_FIX: Final = (
    "The policy does not replace them. Save the log (kubectl logs POD --previous). Then let this spec roll out (see"
    " Ready), or apply the earlier spec without spec.speculation"
)
_CONTESTED_FIX: Final = (
    "Backing off repairs: stop the other writer, or keep its changes by listing its field manager in annotation"
    f" {KEPT_MANAGERS_ANNOTATION}"
)


@dataclass(frozen=True)
class _EngineStatus:
    readiness: Readiness
    counts: EngineCounts
    conditions: list[ConditionUpdate]
    figures: ObservedStatus | None = None
    features: list[SpeculationFeature] = field(default_factory=list)
    replays: bool = False
    declined: ConditionUpdate | None = None


def compose_status(  # noqa: PLR0913  the status combines these inputs
    parent: ParsedDeployment,
    desired: DesiredState,
    observation: Observation,
    now: datetime,
    schedules: Sequence[ScheduleStatus] | None = None,
    *,
    policy: PolicyStatus | None = None,
    trained_draft: TrainedDraftStatus | None = None,
) -> SpecDecodeDeploymentStatus:
    """Return the status; without ``schedules``, keep the schedules of the previous status."""
    seen = _engine_status(parent, desired, observation)
    # If a capture has the GPUs, or the user asked for zero engines, Available gives that reason even if something else
    # is wrong with the object too.
    readiness = name_claim_users(seen.readiness, observation.claim_users)
    lending = None if parent.suspended_for is None else observation.lending or Lending(parent.suspended_for)
    if lending is not None:
        no_engine: Readiness | None = suspended_for_capture(lending, desired.outcome.plan_status, now)
    else:
        no_engine = asked_for_zero(
            suspend=parent.raw_spec.get("suspend") is True, replicas=parent.raw_spec.get("replicas")
        )
    if lending is not None and no_engine is not None and readiness.status is TRUE:
        readiness = no_engine
    available = available_condition(seen.counts, readiness)
    if no_engine is not None and available.status is FALSE:
        is_overdue = lending is not None and lending.is_overdue(now)
        reason = CAPTURE_OVERDUE if is_overdue else no_engine.reason
        message = SEE_READY if no_engine.message == readiness.message else no_engine.message
        available = replace(available, reason=reason, message=message)
    if seen.replays:
        readiness = replace(readiness, message=f"{readiness.message}{_REPLAYED}")
    facts = desired.outcome.facts if isinstance(desired.outcome, Launch) else None
    acceptance = last_acceptance(parent.status.acceptance, seen.figures, facts, now)
    proofs = [with_last_acceptance(each, acceptance) for each in seen.conditions]
    if parent.written_spec is not None:
        proofs = [replace(each, message=_BY_POLICY) if each.reason == "Disabled" else each for each in proofs]
    effective = _effective_condition(observation, seen.declined, policy)
    details = list(desired.conditions)
    if isinstance(desired.outcome, InCanary):
        details.append(canary_decision(desired.outcome, observation).condition())
    exposed = exposed_condition(parent, observation.route, observation.route_blocked)
    conditions = [*readiness.conditions(details), available, *proofs, *effective, *exposed]
    if observation.contested:
        message = f"{'; '.join(observation.contested)}: changed again after each repair. {_CONTESTED_FIX}"
        conditions.append(ConditionUpdate("ChildrenInSync", FALSE, "RepairsUndone", message))
    counts = [(each or {}).get("status", {}) for each in (observation.workload, observation.replaced_workload)]
    return SpecDecodeDeploymentStatus(
        observed_generation=parent.generation,
        conditions=stamp(conditions, parent.status.conditions, parent.generation, now),
        plan=desired.outcome.plan_status,
        observed=seen.figures,
        acceptance=acceptance,
        speculation=seen.features,
        figures=observation.figures,
        policy=policy,
        trained_draft=trained_draft,
        canaries=canaries_status(facts, observation.answers, parent.status.canaries),
        canary=_canary_status(parent, desired, observation),
        captures=list(parent.status.captures if schedules is None else schedules),
        ready=f"{seen.counts.ready}/{_wanted_engines(parent)}",
        kept=parent.status.kept,
        replicas=sum(each.get("replicas", 0) for each in counts),
        ready_replicas=sum(each.get("readyReplicas", 0) for each in counts),
        selector=_selector(parent, desired.outcome),
    )


def _selector(parent: ParsedDeployment, outcome: Outcome) -> str:
    """Return the selector of the pods that autoscalers count: without a canary, which is not part of the replicas."""
    labels = [f"{name}={value}" for name, value in sorted(selector_labels(parent.key.name).items())]
    # The API server rejects != in the selector of a scale subresource.
    without = [f"{POOL_LABEL} notin ({CANARY_POOL})"] if isinstance(outcome, InCanary) else []
    return ",".join([*labels, *without])


def _effective_condition(
    observation: Observation, declined: ConditionUpdate | None, policy: PolicyStatus | None
) -> list[ConditionUpdate]:
    """Return the condition SpeculationEffective, if crashes, wrong answers, a decline or a policy set it.

    Crashes and wrong answers of engines that speculate take precedence until the policy has turned speculation off. A
    decline comes before the policy, because it is measured now, while the policy uses earlier captures.
    """
    crash_loop, wrong = observation.crash_loop, observation.wrong_answers
    is_off = policy is not None and is_off_until_change(policy)
    told = {policy.reason: policy.message} if policy is not None else {}
    if crash_loop and not is_off:
        fix = told.get(CRASH_LOOP, _CRASH_FIX) if crash_loop.of_spec else _EARLIER_CRASH_FIX
        return [ConditionUpdate(EFFECTIVE, FALSE, CRASH_LOOP, f"{crash_loop.message}. {fix}")]
    if wrong is not None and not (is_off and wrong.speculates):
        return [wrong.condition(None if is_off else told.get(WRONG_ANSWERS))]
    by_policy = policy_condition(policy)
    if declined is not None and by_policy is not None:
        return [replace(declined, message=f"{declined.message}. By the policy: {by_policy.message}")]
    found = declined or by_policy
    return [found] if found else []


def _canary_status(parent: ParsedDeployment, desired: DesiredState, observation: Observation) -> CanaryStatus | None:
    """Return the comparison of the canary; the last one stays while its verdict applies."""
    if isinstance(desired.outcome, InCanary):
        return canary_decision(desired.outcome, observation).status
    judged = any((each.type, each.reason) in JUDGED for each in desired.conditions)
    return parent.status.canary if judged else None


def _wanted_engines(parent: ParsedDeployment) -> int:
    """Return the number of engines in the spec, even if it is invalid or a capture has the GPUs."""
    replicas = parent.raw_spec.get("replicas", 1)
    suspended = parent.raw_spec.get("suspend") is True and parent.suspended_for is None
    return replicas if isinstance(replicas, int) and not suspended else 0


def _engine_status(parent: ParsedDeployment, desired: DesiredState, observation: Observation) -> _EngineStatus:
    outcome, earlier = desired.outcome, EngineCounts.of_earlier(observation.workload)
    if observation.blocked:
        return _unproven(observation.blocked, earlier, "NotLaunched")
    if isinstance(outcome, NotLaunched):
        return _unproven(outcome.readiness, earlier, "NotLaunched")
    if isinstance(outcome, Launch):
        return _launched(parent, outcome, observation)
    rollout = rollout_of(outcome, observation)
    if isinstance(outcome, Gated):
        reason, readiness = "WaitsAtGate", held_readiness(outcome.held, rollout)
    elif isinstance(outcome, InCanary):
        reason, readiness = "InCanary", canary_decision(outcome, observation).readiness(rollout)
    else:
        failure, reason = outcome.failure, ROLLED_BACK
        if failure.reason == CANARY_FAILED:
            readiness = rolled_back(rollout, failure.message, "the canary of this spec failed")
        else:
            readiness = rolled_back(rollout, str(failure))
    return _unproven(without_engines(outcome.facts.spec) or readiness, EngineCounts.of_rollout(rollout), reason)


def _unproven(readiness: Readiness, counts: EngineCounts, reason: str) -> _EngineStatus:
    why = "No engine is launched for this spec" if reason == "NotLaunched" else "Engines run an earlier spec"
    return _EngineStatus(readiness, counts, [ConditionUpdate(type_, UNKNOWN, reason, why) for type_ in _PROOFS])


def _launched(parent: ParsedDeployment, launch: Launch, observation: Observation) -> _EngineStatus:
    facts, plan, readings = launch.facts, launch.plan, observation.readings
    rollout = rollout_of(launch, observation)
    residual = budget_residual(facts, plan, readings)
    figures = parent.status.observed
    if not observation.missed:
        figures = steady(observed_status(facts, residual, readings), figures, figures_due=observation.figures_due)
    speculation, features = prove_speculation(facts, plan.chosen.tensor, readings, figures, observation.recent)
    proofs = [speculation, budget_condition(facts, plan, residual, readings), settings_condition(facts, readings)]
    before = {condition.type: condition for condition in parent.status.conditions}
    if observation.missed:
        proofs = [kept(before.get(each.type), parent.generation) or each for each in proofs]
        if parent.status.observed_generation == parent.generation:
            features = parent.status.speculation
    paused = facts.spec.rollout.paused
    readiness = without_engines(facts.spec) or summarize(
        rollout, proofs[0], before.get("Ready"), parent.generation, paused=paused
    )
    return _EngineStatus(
        readiness,
        EngineCounts.of_rollout(rollout),
        proofs,
        figures,
        features,
        replays=facts.replay is not None and rollout.wanted > 0,
        declined=decay_condition(observation.decay),
    )
