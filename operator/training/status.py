"""Compose the status of a SpecDecodeTraining: phase, conditions, rows, head, verdict."""

from dataclasses import dataclass, field, replace
from datetime import datetime

from specdecode_operator.api.base import Body
from specdecode_operator.api.training import (
    Promote,
    RowCounts,
    SpecDecodeTrainingStatus,
    TrainedHead,
    TrainingPhase,
    TrainingVerdict,
)
from specdecode_operator.capture.gpu_sharing import QUEUED
from specdecode_operator.capture.status import JobWrites, final
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, Blocked, ConditionUpdate, stamp
from specdecode_operator.deployment.requeue import Requeue
from specdecode_operator.deployment.rollout.readiness import Readiness, readiness_of, working
from specdecode_operator.training.job_status import Progress
from specdecode_operator.training.observation import Training


@dataclass(frozen=True)
class Writes(JobWrites):
    """Writes to the cluster for one training."""

    capture: Body | None = None  # SpecDecodeCapture that measures the head, to create
    resumed_capture: tuple[Body, bool] | None = None  # the existing capture, and the new value of its spec.suspend


@dataclass(frozen=True)
class Decision:
    """Desired status and writes of one training."""

    phase: TrainingPhase
    readiness: Readiness
    accepted: ConditionUpdate
    succeeded: ConditionUpdate
    better: ConditionUpdate
    writes: Writes = field(default_factory=Writes)
    waiting_for_gpus: str | None = None  # the scheduler's message
    claim: str | None = None
    rows: RowCounts | None = None
    head: TrainedHead | None = None
    verdict: TrainingVerdict | None = None
    started_at: str | None = None
    finished_at: str | None = None
    promoted: ConditionUpdate | None = None  # condition Promoted of a better head, from its deployment
    times_ahead: tuple[str, ...] = ()  # messages about future times of pod or Job, which are treated as now


ACCEPTED = ConditionUpdate("Accepted", TRUE, "Valid", "Training is valid")
NOT_JUDGED = "NotJudged"
NOT_YET_JUDGED = ConditionUpdate("Better", UNKNOWN, NOT_JUDGED, "Measured after the training")
NO_HEAD = ConditionUpdate("Better", UNKNOWN, NOT_JUDGED, "No head is published; see condition Succeeded")


def finished(progress: Progress, failure: Blocked) -> Decision:
    """Return the decision for a training whose Job failed, or cannot succeed."""
    succeeded = ConditionUpdate("Succeeded", FALSE, failure.reason, failure.message)
    return Decision(
        phase=TrainingPhase.FAILED,
        readiness=final(succeeded),
        accepted=ACCEPTED,
        succeeded=succeeded,
        better=NO_HEAD,
        rows=progress.rows,
        started_at=progress.started_at,
        finished_at=progress.finished_at,
    )


def end_of(decision: Decision) -> Readiness:
    """Return the readiness of a training that ended."""
    if decision.succeeded.status is not TRUE:
        return final(decision.succeeded)
    return Readiness(TRUE, decision.better.reason, decision.better.message)


def under_way(progress: Progress) -> Decision:
    """Return the decision for a training whose Job runs."""
    return replace(
        pending(progress.reason, progress.message),
        phase=progress.phase,
        waiting_for_gpus=progress.message if progress.waiting_for_gpus else None,
        rows=progress.rows,
        started_at=progress.started_at,
    )


def pending(reason: str, message: str) -> Decision:
    """Return the decision for an accepted training that waits."""
    succeeded = ConditionUpdate("Succeeded", UNKNOWN, reason, message)
    return Decision(TrainingPhase.PENDING, working(reason, message), ACCEPTED, succeeded, NOT_YET_JUDGED)


def queued(training: Training) -> Decision:
    """Return the decision for a training whose Job Kueue has not admitted."""
    return pending(QUEUED, f"Job {training.job_name} is queued until Kueue admits it")


def suspended(accepted: ConditionUpdate, writes: Writes) -> Decision:
    """Return the decision for a suspended training whose head is not published."""
    message = "spec.suspend is true: GPUs are free, rows and checkpoints are kept"
    succeeded = ConditionUpdate("Succeeded", UNKNOWN, "Suspended", message)
    readiness = Readiness(TRUE, "Suspended", message)
    return Decision(TrainingPhase.SUSPENDED, readiness, accepted, succeeded, NOT_YET_JUDGED, writes)


def withdrawn(training: Training) -> Writes:
    """Return the writes that remove a training's pod."""
    # Kueue would resume a suspended Job.
    return Writes(remove_job=bool(training.queue_labels), job_suspended=None if training.queue_labels else True)


def blocked_decision(blocked: Blocked) -> Decision:
    """Return the decision for a training that cannot start."""
    status = FALSE if blocked.permanent else UNKNOWN
    return Decision(
        phase=TrainingPhase.PENDING,
        readiness=readiness_of(blocked),
        accepted=ConditionUpdate("Accepted", status, blocked.reason, blocked.message),
        succeeded=ConditionUpdate("Succeeded", UNKNOWN, blocked.reason, "Not started"),
        better=NOT_YET_JUDGED,
    )


def compose_status(training: Training, decision: Decision, now: datetime) -> SpecDecodeTrainingStatus:
    """Return the status of a training for a decision."""
    waiting = ConditionUpdate("WaitingForGPUs", FALSE, "NotWaiting", "")
    if decision.waiting_for_gpus is not None:
        waiting = ConditionUpdate("WaitingForGPUs", TRUE, "Unschedulable", decision.waiting_for_gpus)
    details = [decision.accepted, waiting, decision.succeeded, decision.better, _promoted(training, decision)]
    findings = decision.readiness.conditions(details)
    return SpecDecodeTrainingStatus(
        observed_generation=training.generation,
        phase=decision.phase,
        conditions=stamp(findings, training.status.conditions, training.generation, now),
        job=training.job_name if decision.accepted.status is TRUE else None,
        claim=decision.claim,
        rows=decision.rows or training.status.rows,
        head=decision.head or training.status.head,
        verdict=decision.verdict,
        started_at=decision.started_at,
        finished_at=decision.finished_at,
    )


def _promoted(training: Training, decision: Decision) -> ConditionUpdate:
    """Return whether the deployment may serve the head."""
    if decision.better.status is FALSE:
        return ConditionUpdate("Promoted", FALSE, "NotBetter", "The head is not better; see condition Better")
    if decision.better.status is not TRUE:
        return ConditionUpdate("Promoted", UNKNOWN, NOT_JUDGED, "No better head; see condition Better")
    if training.spec.get("promote") == Promote.ON_BETTER:
        waits = ConditionUpdate("Promoted", UNKNOWN, "RolloutInProgress", "Waiting for the deployment")
        return decision.promoted or waits
    name = training.key.name
    message = f"spec.promote is Manual: set it to OnBetter, or run specdecode training promote {name}"
    return ConditionUpdate("Promoted", FALSE, "Manual", message)


def training_attention(training: Training) -> Requeue:
    """Return when to requeue a training without an event: until it has ended."""
    return Requeue(is_close=not training.has_ended)
