"""Compose the status of a SpecDecodeCapture: phase, conditions, result, deletion time."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from specdecode_operator.api import capture_status
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import RegressionStatus
from specdecode_operator.capture.golden_gate import holds_condition
from specdecode_operator.capture.gpu_sharing import QUEUED, due_at, is_unsettled
from specdecode_operator.capture.job_manifest import published_folder
from specdecode_operator.capture.observation import Capture, Progress
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, Blocked, ConditionUpdate, stamp
from specdecode_operator.deployment.requeue import Requeue
from specdecode_operator.deployment.rollout.readiness import Readiness, readiness_of, stalled, working


@dataclass(frozen=True)
class JobWrites:
    """Writes to the claim and the Job of a capture or training."""

    claim: Body | None = None  # to create
    claim_metadata: Body = field(default_factory=dict)  # changes to the metadata of the created claim
    job: Body | None = None  # to create; a Job is never changed
    job_suspended: bool | None = None  # new value of spec.suspend; None if it is right, or Kueue decides
    remove_job: bool = False


@dataclass(frozen=True)
class Writes(JobWrites):
    """Writes to the cluster for one capture."""

    trial_pod: Body | None = None  # for a dry run; if the API server rejects it, nothing else is written
    image_id: Body | None = None  # ConfigMap to create or change, with the image ID of the engine
    live_order: Body | None = None  # ConfigMap that tells the recorders where to connect; without it, delete it


@dataclass(frozen=True)
class Decision:
    """Desired status and writes of one capture."""

    phase: capture_status.CapturePhase
    readiness: Readiness
    accepted: ConditionUpdate
    succeeded: ConditionUpdate
    writes: Writes = field(default_factory=Writes)
    waiting_for_gpus: str | None = None  # the scheduler's message
    result: capture_status.CaptureSummary | None = None
    comparison: capture_status.ComparisonStatus | None = None
    regression: RegressionStatus | None = None
    started_at: str | None = None
    finished_at: str | None = None
    claim: str | None = None
    engine: str | None = None  # hash that identifies the measured engines; None before the Job is created
    operator_image: str | None = None  # that the Job runs; None before the Job is created
    times_ahead: tuple[str, ...] = ()  # messages about future times of pod or Job, which count as now
    borrow: capture_status.BorrowStatus | None = None
    borrows_now: bool = False  # this decision takes the GPUs from the engines


ACCEPTED = ConditionUpdate("Accepted", TRUE, "Valid", "Capture is valid")


def final(succeeded: ConditionUpdate) -> Readiness:
    """Return the readiness of a capture that ended."""
    if succeeded.status is TRUE:
        return Readiness(TRUE, succeeded.reason, succeeded.message)
    return stalled(succeeded.reason, succeeded.message)


def finished(progress: Progress, failure: Blocked | None) -> Decision:
    """Return the decision for a capture whose Job ended, or cannot succeed."""
    succeeded = ConditionUpdate("Succeeded", TRUE, progress.reason, progress.message)
    if failure is not None:
        succeeded = ConditionUpdate("Succeeded", FALSE, failure.reason, failure.message)
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
    return replace(
        pending(progress.reason, progress.message),
        phase=progress.phase,
        waiting_for_gpus=progress.message if progress.waiting_for_gpus else None,
        started_at=progress.started_at,
    )


def pending(reason: str, message: str) -> Decision:
    """Return the decision for an accepted capture that waits."""
    succeeded = ConditionUpdate("Succeeded", UNKNOWN, reason, message)
    return Decision(capture_status.CapturePhase.PENDING, working(reason, message), ACCEPTED, succeeded)


def queued(capture: Capture) -> Decision:
    """Return the decision for a capture whose Job Kueue has not admitted."""
    return pending(QUEUED, f"Job {capture.job_name} is queued until Kueue admits it")


def suspended(accepted: ConditionUpdate, writes: Writes) -> Decision:
    """Return the decision for a suspended capture."""
    message = "spec.suspend is true: no engine and no load; files recorded so far are kept as partial files"
    succeeded = ConditionUpdate("Succeeded", UNKNOWN, "Suspended", message)
    return Decision(
        capture_status.CapturePhase.CANCELLED, Readiness(TRUE, "Suspended", message), accepted, succeeded, writes
    )


def withdrawn(capture: Capture) -> Writes:
    """Return the writes that remove a capture's pod."""
    # Kueue would resume a suspended Job. The Job of a live capture names engine pods that may be gone later.
    removes = bool(capture.queue_labels) or capture.is_live
    return Writes(remove_job=removes, job_suspended=None if removes else True)


def blocked_decision(blocked: Blocked) -> Decision:
    """Return the decision for a capture that may not start."""
    status = FALSE if blocked.permanent else UNKNOWN
    return Decision(
        phase=capture_status.CapturePhase.PENDING,
        readiness=readiness_of(blocked),
        accepted=ConditionUpdate("Accepted", status, blocked.reason, blocked.message),
        succeeded=ConditionUpdate("Succeeded", UNKNOWN, blocked.reason, "Not started"),
    )


_TIME = "%Y-%m-%dT%H:%M:%SZ"


def compose_status(capture: Capture, decision: Decision, now: datetime) -> capture_status.SpecDecodeCaptureStatus:
    """Return the status of a capture for a decision."""
    waiting = ConditionUpdate("WaitingForGPUs", FALSE, "NotWaiting", "")
    if decision.waiting_for_gpus is not None:
        waiting = ConditionUpdate("WaitingForGPUs", TRUE, "Unschedulable", decision.waiting_for_gpus)
    findings = decision.readiness.conditions([decision.accepted, waiting, decision.succeeded])
    over, comparison = decision.succeeded.status is not UNKNOWN, decision.comparison
    if capture.compares and comparison is not None and comparison.arms:
        arm = comparison.arms[0]
        pays = {capture_status.ArmVerdict.PAYS: TRUE, capture_status.ArmVerdict.DOES_NOT_PAY: FALSE}.get(
            arm.verdict, UNKNOWN
        )
        message = f"{arm.name} against {comparison.baseline}: {arm.message}"
        findings.append(ConditionUpdate("Pays", pays, arm.verdict, message))
    elif capture.compares:
        message = "No arms compared; see condition Ready" if over else "Arms are compared when the capture ends"
        findings.append(ConditionUpdate("Pays", UNKNOWN, "NotCompared", message))
    if capture.spec.get("against"):
        findings.append(holds_condition(decision.regression, over=over))
    return capture_status.SpecDecodeCaptureStatus(
        observed_generation=capture.generation,
        phase=decision.phase,
        conditions=stamp(findings, capture.status.conditions, capture.generation, now),
        job=capture.job_name if decision.accepted.status is TRUE else None,
        operator_image=decision.operator_image,
        claim=decision.claim,
        path=published_folder(capture) if decision.phase is capture_status.CapturePhase.SUCCEEDED else None,
        started_at=decision.started_at,
        finished_at=decision.finished_at,
        summary=decision.result,
        comparison=decision.comparison,
        regression=decision.regression,
        borrow=decision.borrow,
        engine=decision.engine or capture.status.engine,
    )


def is_outlived(capture: Capture, now: datetime, agreed_s: float) -> bool:
    """Return whether a finished capture has outlived its TTL."""
    # The API server's responses have agreed on the time for ``agreed_s``. A clock jump may make a capture look old, so
    # they must have agreed for the TTL, or for an hour.
    ttl_s, finished_at = capture.spec.get("ttlSecondsAfterFinished"), capture.status.finished_at
    if ttl_s is None or finished_at is None or capture.ended is None or agreed_s < min(ttl_s, 3600):
        return False
    # Node and Job may use other clocks, so the time at which the operator recorded the end counts too.
    ends = (finished_at, capture.ended.last_transition_time)
    finished = max(datetime.strptime(each, _TIME).replace(tzinfo=UTC) for each in ends)
    return now >= finished + timedelta(seconds=ttl_s)


def capture_attention(capture: Capture) -> Requeue:
    """Return when to requeue a capture without an event: until it ended, its deployment serves and its TTL passed."""
    goes_on = capture.ended is None or is_unsettled(capture.status.borrow)
    timeout_s = capture.spec.get("borrowTimeoutSeconds")
    due = due_at(capture.status.borrow, timeout_s if isinstance(timeout_s, int) else 0)
    return Requeue(
        is_close=goes_on or capture.spec.get("ttlSecondsAfterFinished") is not None,
        due_at_s=due.timestamp() if due is not None and capture.ended is None else None,
    )
