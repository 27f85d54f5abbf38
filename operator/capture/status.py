"""Compose the status of a SpecDecodeCapture: phase, conditions, result, deletion time."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import RegressionStatus
from specdecode_operator.api.capture_status import (
    ArmVerdict,
    BorrowStatus,
    CapturePhase,
    CaptureSummary,
    ComparisonStatus,
    SpecDecodeCaptureStatus,
)
from specdecode_operator.capture.golden_gate import holds_condition
from specdecode_operator.capture.gpu_sharing import QUEUED, due_at, is_unsettled
from specdecode_operator.capture.job_manifest import published_folder
from specdecode_operator.capture.observation import Capture, Progress
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, Blocked, ConditionUpdate, stamp
from specdecode_operator.deployment.requeue import Requeue
from specdecode_operator.deployment.rollout.readiness import Readiness, readiness_of, stalled, working


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


_PAYS = {ArmVerdict.PAYS: TRUE, ArmVerdict.DOES_NOT_PAY: FALSE}
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_LONG_ENOUGH_S = 3600


def compose_status(capture: Capture, decision: Decision, now: datetime) -> SpecDecodeCaptureStatus:
    """Say in the status what is decided."""
    words = decision.waiting_for_gpus
    waiting = ConditionUpdate("WaitingForGPUs", FALSE, "NotWaiting", "")
    if words is not None:
        waiting = ConditionUpdate("WaitingForGPUs", TRUE, "Unschedulable", words)
    findings = [*decision.readiness.conditions(), decision.accepted, waiting, decision.succeeded]
    if capture.compares:
        findings.append(_pays(decision))
    if capture.spec.get("against"):
        over = decision.succeeded.status is not UNKNOWN
        findings.append(holds_condition(decision.regression, over=over))
    has_files = decision.phase is CapturePhase.SUCCEEDED
    return SpecDecodeCaptureStatus(
        observed_generation=capture.generation,
        phase=decision.phase,
        conditions=stamp(findings, capture.status.conditions, capture.generation, now),
        job=capture.job_name if decision.accepted.status is TRUE else None,
        operator_image=decision.operator_image,
        claim=decision.claim,
        path=published_folder(capture) if has_files else None,
        started_at=decision.started_at,
        finished_at=decision.finished_at,
        summary=decision.result,
        comparison=decision.comparison,
        regression=decision.regression,
        borrow=decision.borrow,
        engine=decision.engine or capture.status.engine,
    )


def _pays(decision: Decision) -> ConditionUpdate:
    """Return whether the second arm pays, compared with the first; unknown while nobody can tell."""
    comparison = decision.comparison
    if comparison is None or not comparison.arms:
        over = decision.succeeded.status is not UNKNOWN
        message = "nothing was compared: the condition Succeeded tells more" if over else "arms are compared at its end"
        return ConditionUpdate("Pays", UNKNOWN, "NotCompared", message)
    arm = comparison.arms[0]
    message = f"{arm.name} against {comparison.baseline}: {arm.message}"
    return ConditionUpdate("Pays", _PAYS.get(arm.verdict, UNKNOWN), arm.verdict, message)


def is_outlived(capture: Capture, now: datetime, agreed_s: float) -> bool:
    """Whether a capture ended so long ago that it is to be deleted.

    Its end is when the operator wrote it down, if that is later: what its node or Job says may be of another clock.

    Parameters
    ----------
    capture
        The capture, without times in the future.
    now
        The API server's time.
    agreed_s
        For how many seconds the API server's answers have agreed on the time. A jump may make a capture look old, so
        these must be as many as the capture is kept for, and an hour is enough.
    """
    ttl_s, finished_at = capture.spec.get("ttlSecondsAfterFinished"), capture.status.finished_at
    if ttl_s is None or finished_at is None or capture.ended is None or agreed_s < min(ttl_s, _LONG_ENOUGH_S):
        return False
    ends = (finished_at, capture.ended.last_transition_time)
    finished = max(datetime.strptime(each, _TIME).replace(tzinfo=UTC) for each in ends)
    return now >= finished + timedelta(seconds=ttl_s)


def capture_attention(capture: Capture) -> Requeue:
    """Return when a capture is to be looked at again without an event.

    It changes by itself until it has ended, until its deployment has been seen to serve again, and if it is to be
    deleted some time after its end.
    """
    goes_on = capture.ended is None or is_unsettled(capture.status.borrow)
    timeout_s = capture.spec.get("borrowTimeoutSeconds")
    due = due_at(capture.status.borrow, timeout_s if isinstance(timeout_s, int) else 0)
    return Requeue(
        is_close=goes_on or capture.spec.get("ttlSecondsAfterFinished") is not None,
        due_at_s=due.timestamp() if due is not None and capture.ended is None else None,
    )
