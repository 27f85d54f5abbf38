"""What a capture comes to: what is to be written for it, and what its status says."""

from dataclasses import dataclass, field

from specdecode_operator.api.base import Body
from specdecode_operator.api.golden import RegressionStatus
from specdecode_operator.api.status.capture import BorrowStatus, CapturePhase, CaptureSummary
from specdecode_operator.api.status.comparison import ComparisonStatus
from specdecode_operator.capture.control.capture import Capture
from specdecode_operator.capture.control.job_status import Progress
from specdecode_operator.capture.control.preemption import QUEUED
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, ConditionUpdate
from specdecode_operator.deployment.pods.readiness import Readiness, readiness_of, stalled, working


@dataclass(frozen=True)
class Writes:
    """What is to be written for a capture."""

    claim: Body | None = None  # to create
    # What is to change in the metadata of the claim that was created; empty where nothing is.
    claim_metadata: Body = field(default_factory=dict)
    job: Body | None = None  # to create; never changed: a capture that runs is what it was started as
    # Whether the Job shall be suspended; None where it is as it should be, or Kueue decides.
    job_suspended: bool | None = None
    remove_job: bool = False
    # A pod that the API server is asked about without creating it. If it refuses the pod, nothing else is written.
    trial_pod: Body | None = None
    # A ConfigMap to create or change, which tells the load generator what image the engine runs.
    image_id: Body | None = None


@dataclass(frozen=True)
class Decision:
    """What a capture comes to."""

    phase: CapturePhase
    readiness: Readiness
    accepted: ConditionUpdate
    succeeded: ConditionUpdate
    writes: Writes = field(default_factory=Writes)
    waiting_for_gpus: str | None = None
    """In the scheduler's words; None while it does not."""

    result: CaptureSummary | None = None
    comparison: ComparisonStatus | None = None
    regression: RegressionStatus | None = None
    started_at: str | None = None
    finished_at: str | None = None
    claim: str | None = None
    engine: str | None = None
    """What tells the engines that are measured from others; None before its Job is created."""

    operator_image: str | None = None
    """The operator image that its Job runs; None before its Job is created."""

    times_ahead: tuple[str, ...] = ()
    """Messages about times of its pod or Job that lie in the future, and that count as now."""

    borrow: BorrowStatus | None = None
    """The record of the GPUs that it borrows from its deployment."""

    borrows_now: bool = False
    """Whether this decision takes the GPUs from the engines."""


ACCEPTED = ConditionUpdate("Accepted", TRUE, "Valid", "the deployment's engine can be captured")


def final(succeeded: ConditionUpdate) -> Readiness:
    """Return the readiness of a capture that ended."""
    if succeeded.status is TRUE:
        return Readiness(TRUE, succeeded.reason, succeeded.message)
    return stalled(succeeded.reason, succeeded.message)


def finished(progress: Progress, failure: Blocked | None) -> Decision:
    """Return the decision for a capture whose Job ended, or for one that is hopeless."""
    if failure is not None:
        succeeded = ConditionUpdate("Succeeded", FALSE, failure.reason, failure.message)
    else:
        succeeded = ConditionUpdate("Succeeded", TRUE, progress.reason, progress.message)
    return Decision(
        phase=progress.phase,
        readiness=final(succeeded),
        accepted=ACCEPTED,
        succeeded=succeeded,
        result=progress.summary,
        comparison=progress.comparison,
        regression=progress.regression,
        started_at=progress.started_at,
        finished_at=progress.finished_at,
    )


def under_way(progress: Progress) -> Decision:
    """Return the decision for a capture whose Job runs."""
    return Decision(
        phase=progress.phase,
        readiness=working(progress.reason, progress.message),
        accepted=ACCEPTED,
        succeeded=ConditionUpdate("Succeeded", UNKNOWN, progress.reason, progress.message),
        waiting_for_gpus=progress.message if progress.waiting_for_gpus else None,
        started_at=progress.started_at,
    )


def pending(reason: str, message: str) -> Decision:
    """Return the decision for an accepted capture that waits for something."""
    return Decision(
        phase=CapturePhase.PENDING,
        readiness=working(reason, message),
        accepted=ACCEPTED,
        succeeded=ConditionUpdate("Succeeded", UNKNOWN, reason, message),
    )


def queued(capture: Capture) -> Decision:
    """Return the decision for a capture whose Job Kueue has not admitted."""
    return pending(QUEUED, f"Job {capture.job_name} waits in its queue until Kueue admits it")


def suspended(accepted: ConditionUpdate, writes: Writes) -> Decision:
    """Return the decision for a capture that is suspended."""
    message = "spec.suspend is true: no engine and no load; what was recorded so far is kept as partial files"
    return Decision(
        phase=CapturePhase.CANCELLED,
        readiness=Readiness(TRUE, "Suspended", message),
        accepted=accepted,
        succeeded=ConditionUpdate("Succeeded", UNKNOWN, "Suspended", message),
        writes=writes,
    )


def withdrawn(capture: Capture) -> Writes:
    """Return what takes a capture's pod away; Kueue would start its Job again, so one in a queue goes."""
    in_queue = bool(capture.queue_labels)
    return Writes(remove_job=in_queue, job_suspended=None if in_queue else True)


def blocked_decision(blocked: Blocked) -> Decision:
    """Return the decision for a capture that may not start as things are."""
    status = FALSE if blocked.permanent else UNKNOWN
    return Decision(
        phase=CapturePhase.PENDING,
        readiness=readiness_of(blocked),
        accepted=ConditionUpdate("Accepted", status, blocked.reason, blocked.message),
        succeeded=ConditionUpdate("Succeeded", UNKNOWN, blocked.reason, "it has not started"),
    )
