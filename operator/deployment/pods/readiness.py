"""The summary that people and GitOps tools read: Ready, Reconciling, Stalled."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.status.deployment import Condition, ConditionStatus, PlanStatus
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, ConditionUpdate
from specdecode_operator.deployment.pods.blocked_pods import VOLUME_IN_USE
from specdecode_operator.deployment.pods.rollout import Rollout
from specdecode_operator.deployment.proof.features import OTHERWISE
from specdecode_operator.sizing.choice.plan import CPU_PRODUCT

REPLICAS_LOST = "ReplicasLost"
ROLLED_BACK = "RolledBack"
SUSPENDED_FOR_CAPTURE = "SuspendedForCapture"


@dataclass(frozen=True)
class Readiness:
    """Ready with its reason, and which of the two helpers is true."""

    status: ConditionStatus
    reason: str
    message: str
    reconciling: bool = False
    stalled: bool = False

    def conditions(self) -> list[ConditionUpdate]:
        """Return the three conditions that say this."""

        def helper(type_: str, *, holds: bool) -> ConditionUpdate:
            return ConditionUpdate(type_, TRUE if holds else FALSE, self.reason, self.message if holds else "")

        return [
            ConditionUpdate("Ready", self.status, self.reason, self.message),
            helper("Reconciling", holds=self.reconciling),
            helper("Stalled", holds=self.stalled),
        ]


def stalled(reason: str, message: str) -> Readiness:
    """Only the user can go on from here."""
    return Readiness(FALSE, reason, message, stalled=True)


def working(reason: str, message: str) -> Readiness:
    """On the way, or waiting for something that may appear."""
    return Readiness(UNKNOWN, reason, message, reconciling=True)


def readiness_of(blocked: Blocked) -> Readiness:
    """Return the readiness of an object that something blocks."""
    return (stalled if blocked.permanent else working)(blocked.reason, blocked.message)


def without_engines(spec: SpecDecodeDeploymentSpec) -> Readiness | None:
    """Sum up an object that wants no engine; None for one that does."""
    if spec.suspend:
        return Readiness(TRUE, "Suspended", "spec.suspend is true: no engine runs, everything else is kept")
    if spec.replicas == 0:
        return Readiness(TRUE, "ScaledToZero", "spec.replicas is 0: no engine runs")
    return None


def name_claim_users(summary: Readiness, claim_users: Sequence[str]) -> Readiness:
    """Name the other objects that use a claim, where that is what a pod waits for."""
    if summary.reason != VOLUME_IN_USE:
        return summary
    if claim_users:
        who = (
            f"SpecDecodeDeployment {' and '.join(claim_users)} names it too: give each a claim of its own, suspend one"
        )
    else:
        who = "an earlier pod of this object may be the one: suspend the object first"
    return replace(summary, message=f"{summary.message}; {who}, or use a claim with ReadWriteMany")


def suspended_for_capture(capture: str, plan: PlanStatus | None) -> Readiness:
    """Sum up an object whose GPUs, or place on a node without, a capture has for the time being."""
    what = place_word(plan.product if plan else None)
    message = f"capture {capture} has its {what}; the engines come back when it ended, however"
    return Readiness(TRUE, SUSPENDED_FOR_CAPTURE, message)


def place_word(product: str | None) -> str:
    """Return what engines of a plan wait for and lend, in one word."""
    return "place" if product == CPU_PRODUCT else "GPUs"


def summarize(
    rollout: Rollout, speculation: ConditionUpdate, previous: Condition | None, generation: int, *, paused: bool = False
) -> Readiness:
    """Sum up an object whose plan is in force and that wants engines."""
    if rollout.complete:
        return _serving(rollout, speculation)
    if paused and rollout.updated < rollout.wanted:
        return working("RolloutPaused", _paused(rollout))
    return _not_complete(rollout, was_ready=_was_ready(previous, generation))


def rolled_back(rollout: Rollout, failure: str) -> Readiness:
    """Sum up an object whose spec did not serve, so that the engines that served last are put back."""
    counts = f"{rollout.available} of {rollout.wanted} engines serve"
    message = f"the engines of this spec never served ({failure}); those that served last"
    if rollout.complete:
        message += f" are back, {counts}; this spec is not tried again before it changes"
        return Readiness(FALSE, ROLLED_BACK, message, stalled=True)
    why = f": {rollout.blocked.reason}: {rollout.blocked.message}" if rollout.blocked else ""
    return Readiness(FALSE, ROLLED_BACK, f"{message} are being put back, {counts}{why}", reconciling=True)


def _paused(rollout: Rollout) -> str:
    return (
        f"spec.rollout.paused is true: {rollout.updated} of {rollout.wanted} engines are of this spec,"
        f" {rollout.available} serve in all; it goes on when paused is false"
    )


def _not_complete(rollout: Rollout, *, was_ready: bool) -> Readiness:
    blocked = rollout.blocked
    if blocked is not None and blocked.permanent:
        return readiness_of(blocked)
    if was_ready:
        why = f": {blocked.message}" if blocked else ""
        message = f"{rollout.available} of {rollout.wanted} engines serve{why}"
        return Readiness(FALSE, REPLICAS_LOST, message, reconciling=True)
    if rollout.overdue and not (blocked and blocked.waits):
        why = f"{blocked.reason}: {blocked.message}" if blocked else "the logs of its pods tell how far it got"
        message = f"no engine of this spec was ready within the {rollout.deadline_s} s given to it; {why}"
        return stalled("EngineReadyTimeout", message)
    if blocked is not None:
        return readiness_of(blocked)
    current = min(rollout.available, rollout.updated) if rollout.settled else 0
    return working(
        "Starting", f"{current} of {rollout.wanted} engines serve this spec, {rollout.wanted - current} to come"
    )


def available_condition(rollout: Rollout) -> ConditionUpdate:
    """Whether every wanted engine serves."""
    counts = f"{rollout.available} of {rollout.wanted} engines serve"
    if rollout.wanted == 0:
        return ConditionUpdate("Available", TRUE, "NoEngineWanted", "no engine is asked for")
    if rollout.complete:
        return ConditionUpdate("Available", TRUE, "EnginesServe", counts)
    if rollout.blocked is not None:
        return ConditionUpdate("Available", FALSE, rollout.blocked.reason, f"{counts}: {rollout.blocked.message}")
    return ConditionUpdate("Available", FALSE, "Starting", counts)


def earlier_engines_condition(workload: Body | None) -> ConditionUpdate:
    """Whether engines serve that were launched before something came in the way."""
    status = (workload or {}).get("status", {})
    # Groups of pods are counted when they are ready, and have no other count.
    serving = status.get("availableReplicas", status.get("readyReplicas", 0))
    if serving:
        message = f"{serving} engines that were launched earlier go on serving; nothing is launched for this spec"
        return ConditionUpdate("Available", TRUE, "EarlierEnginesServe", message)
    return ConditionUpdate("Available", UNKNOWN, "NotLaunched", "nothing is launched for this spec")


def _serving(rollout: Rollout, speculation: ConditionUpdate) -> Readiness:
    counts = f"{rollout.available} of {rollout.wanted} engines serve"
    if speculation.status is FALSE and speculation.reason != "Disabled":
        lack = "not all of speculation is in force" if speculation.reason in OTHERWISE else "they do not draft"
        return Readiness(TRUE, "SpeculationInactive", f"{counts}, but {lack}: {speculation.message}")
    return Readiness(TRUE, "Serving", counts)


def _was_ready(previous: Condition | None, generation: int) -> bool:
    """Whether this very spec had been ready before."""
    if previous is None or previous.observed_generation != generation:
        return False
    return previous.reason == REPLICAS_LOST or (
        previous.status is TRUE and previous.reason in {"Serving", "SpeculationInactive"}
    )
