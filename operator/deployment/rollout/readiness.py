"""The conditions that people and GitOps tools read first: Ready, Reconciling, Stalled, Available."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Self

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_status import Condition, ConditionStatus, PlanStatus
from specdecode_operator.deployment.conditions import (
    FALSE,
    OTHERWISE,
    SEE_READY,
    SUSPENDED_FOR_CAPTURE,
    TRUE,
    UNKNOWN,
    Blocked,
    ConditionUpdate,
)
from specdecode_operator.deployment.rollout.blocked_pods import VOLUME_IN_USE
from specdecode_operator.deployment.rollout.rollout_progress import Rollout
from specdecode_operator.sizing.placement import CPU_PRODUCT

REPLICAS_LOST = "ReplicasLost"
ROLLED_BACK = "RolledBack"
CAPTURE_OVERDUE = "CaptureOverdue"


@dataclass(frozen=True)
class Readiness:
    """Condition Ready with its reason, and whether Reconciling or Stalled is true."""

    status: ConditionStatus
    reason: str
    message: str
    reconciling: bool = False
    stalled: bool = False

    def conditions(self, details: Sequence[ConditionUpdate] = ()) -> list[ConditionUpdate]:
        """Return Ready, Reconciling and Stalled, and the details, which refer to Ready if they have its message."""
        helpers = (("Reconciling", self.reconciling), ("Stalled", self.stalled))
        return [
            ConditionUpdate("Ready", self.status, self.reason, self.message),
            *(
                ConditionUpdate(type_, TRUE if holds else FALSE, self.reason, SEE_READY if holds else "")
                for type_, holds in helpers
            ),
            *(replace(each, message=SEE_READY) if each.message == self.message else each for each in details),
        ]


def stalled(reason: str, message: str) -> Readiness:
    """Return the readiness of an object that only its user can fix."""
    return Readiness(FALSE, reason, message, stalled=True)


def working(reason: str, message: str) -> Readiness:
    """Return the readiness of an object that makes progress, or waits for a dependency."""
    return Readiness(UNKNOWN, reason, message, reconciling=True)


def readiness_of(blocked: Blocked) -> Readiness:
    """Return the readiness of a blocked object."""
    return (stalled if blocked.permanent else working)(blocked.reason, blocked.message)


@dataclass(frozen=True)
class Lending:
    """A capture that uses the GPUs of an object's engines, and when it should return them."""

    capture: str
    expected_end: datetime | None = None  # None if the workload does not determine it
    # When the deadline of its Job or pod stops the capture; None before the Job starts.
    latest_end: datetime | None = None
    overdue_from: datetime | None = None  # Time from which the capture is overdue

    def is_overdue(self, now: datetime) -> bool:
        """Return whether the capture holds the GPUs longer than expected."""
        return self.overdue_from is not None and now >= self.overdue_from


def lent_since(conditions: Sequence[Condition]) -> datetime | None:
    """Return the time from which a capture uses the GPUs, from the status; None if no capture does."""
    lent = (each for each in conditions if (each.type, each.reason) == ("Ready", SUSPENDED_FOR_CAPTURE))
    return next((datetime.fromisoformat(each.last_transition_time) for each in lent), None)


@dataclass(frozen=True)
class EngineCounts:
    """Number of ready engines, and why the others are not ready."""

    ready: int
    wanted: int
    blocked: Blocked | None = None
    # Engines of an earlier spec, because none can be launched for the current one.
    earlier: bool = False

    @classmethod
    def of_rollout(cls, rollout: Rollout) -> Self:
        """Return the counts of a rollout."""
        return cls(rollout.available, rollout.wanted, rollout.blocked)

    @classmethod
    def of_earlier(cls, workload: Body | None) -> Self:
        """Return the counts of an earlier spec's workload; zero without one."""
        status = (workload or {}).get("status", {})
        # The status of a LeaderWorkerSet has readyReplicas only.
        ready = status.get("availableReplicas", status.get("readyReplicas", 0))
        return cls(ready, ready, earlier=True)

    def __str__(self) -> str:
        return f"{self.ready} of {self.wanted} engines ready"


def asked_for_zero(*, suspend: bool, replicas: int | None) -> Readiness | None:
    """Return the readiness of an object whose user asked for zero engines; None if any are wanted."""
    if suspend:
        return Readiness(TRUE, "Suspended", "spec.suspend is true: no engine runs")
    return Readiness(TRUE, "ScaledToZero", "spec.replicas is 0: no engine runs") if replicas == 0 else None


def without_engines(spec: SpecDecodeDeploymentSpec) -> Readiness | None:
    """Return the readiness of a spec for zero engines; None if any engine is wanted."""
    return asked_for_zero(suspend=spec.suspend, replicas=spec.replicas)


def name_claim_users(summary: Readiness, claim_users: Sequence[str]) -> Readiness:
    """Name the other objects that use a claim if a pod waits for it."""
    if summary.reason != VOLUME_IN_USE:
        return summary
    who = "an earlier pod of this object may use it; suspend the object first"
    if claim_users:
        name = " and ".join(claim_users)
        who = f"SpecDecodeDeployment {name} also uses it; give each object its own claim, suspend one"
    return replace(summary, message=f"{summary.message}; {who}, or use a claim with ReadWriteMany")


def suspended_for_capture(lending: Lending, plan: PlanStatus | None, now: datetime) -> Readiness:
    """Return the readiness of an object whose engines gave their GPUs, or their place on a CPU node, to a capture."""
    what = place_word(plan.product if plan else None)
    expected, latest = lending.expected_end, lending.latest_end
    bound = f"{_minute(latest)} at the latest" if latest else ""
    and_bound = f", {bound}" if expected and bound else ""
    if lending.is_overdue(now):
        first = expected or latest
        end = f"overdue, expected end was {_minute(first)}{and_bound}" if first else "overdue, its Job has not started"
    elif expected:
        end = f"expected end {_minute(expected)}{and_bound}"
    else:
        end = f"ends {bound}" if bound else "the expected end is known when its Job starts"
    message = f"No engine runs: capture {lending.capture} uses the engines' {what}; {end}"
    return Readiness(FALSE, SUSPENDED_FOR_CAPTURE, message, reconciling=True)


def _minute(time: datetime) -> str:
    return (time.astimezone(UTC) + timedelta(seconds=59)).strftime("%Y-%m-%d %H:%M UTC")


def place_word(product: str | None) -> str:
    """Return the word for the resource that engines occupy: GPUs, or a place on a CPU node."""
    return "place" if product == CPU_PRODUCT else "GPUs"


def summarize(
    rollout: Rollout, speculation: ConditionUpdate, previous: Condition | None, generation: int, *, paused: bool = False
) -> Readiness:
    """Return the readiness of an object with a launched plan and at least one wanted engine."""
    counts, blocked = str(EngineCounts.of_rollout(rollout)), rollout.blocked
    if rollout.complete:
        if speculation.status is not FALSE or speculation.reason == "Disabled":
            return Readiness(TRUE, "Serving", counts)
        lack = "some speculation settings are not in force" if speculation.reason in OTHERWISE else "they do not draft"
        return Readiness(TRUE, "SpeculationInactive", f"{counts}, but {lack}; see condition SpeculationActive")
    if paused and rollout.updated < rollout.wanted:
        state = f"{rollout.updated} of {rollout.wanted} engines run this spec, {counts}; set it to false to continue"
        return working("RolloutPaused", f"spec.rollout.paused is true: {state}")
    was_ready = previous is not None and previous.observed_generation == generation
    if was_ready and previous is not None and previous.reason != REPLICAS_LOST:
        was_ready = previous.status is TRUE and previous.reason in {"Serving", "SpeculationInactive"}
    # With enough engines, the operator itself replaces them, for example by ones with a trained draft.
    lost = rollout.available < rollout.wanted
    if was_ready and lost and not (blocked and blocked.permanent):
        why = f": {blocked.message}" if blocked else ""
        return Readiness(FALSE, REPLICAS_LOST, f"{counts}{why}", reconciling=True)
    return _not_yet_ready(rollout)


def rolled_back(rollout: Rollout, failure: str, what: str = "the engines of this spec never served") -> Readiness:
    """Return the readiness of an object that was rolled back because its spec failed."""
    counts = EngineCounts.of_rollout(rollout)
    message = f"{what} ({failure})"
    if rollout.complete:
        message += f"; rolled back to the previous engines: {counts}; change the spec to try again"
        return Readiness(FALSE, ROLLED_BACK, message, stalled=True)
    why = f": {rollout.blocked.reason}: {rollout.blocked.message}" if rollout.blocked else ""
    return Readiness(FALSE, ROLLED_BACK, f"{message}; rolling back: {counts}{why}", reconciling=True)


def _not_yet_ready(rollout: Rollout) -> Readiness:
    blocked = rollout.blocked
    if rollout.overdue and not (blocked and (blocked.permanent or blocked.waits)):
        why = f"{blocked.reason}: {blocked.message}" if blocked else "see the logs of its pods"
        message = f"no engine of this spec became ready within {rollout.deadline_s} s; {why}"
        return stalled("EngineReadyTimeout", message)
    if blocked is not None:
        return readiness_of(blocked)
    # Available engines may be those of an earlier spec, which the workload's status does not tell apart.
    earlier = rollout.replicas - rollout.updated
    current = max(0, min(rollout.available - earlier, rollout.updated)) if rollout.settled else 0
    return working("Starting", f"{current} of {rollout.wanted} engines of this spec ready")


def available_condition(counts: EngineCounts, readiness: Readiness) -> ConditionUpdate:
    """Return the condition Available; if no engine serves, its reason comes from the pods or from ``readiness``."""
    if counts.wanted == 0 or (counts.ready == 0 and counts.blocked is None):
        return ConditionUpdate("Available", FALSE, readiness.reason, SEE_READY)
    why = f": {counts.blocked.message}" if counts.blocked else ""
    if counts.blocked and counts.blocked.message in readiness.message:
        why = "; see condition Ready"
    if counts.ready == 0 and counts.blocked is not None:
        return ConditionUpdate("Available", FALSE, counts.blocked.reason, f"{counts}{why}")
    if counts.earlier:
        message = f"{counts.ready} engines of an earlier spec ready; the current spec cannot be launched"
        return ConditionUpdate("Available", TRUE, "EarlierEnginesServe", message)
    if counts.ready >= counts.wanted:
        return ConditionUpdate("Available", TRUE, "EnginesServe", str(counts))
    return ConditionUpdate("Available", TRUE, "SomeEnginesServe", f"{counts}{why}")
