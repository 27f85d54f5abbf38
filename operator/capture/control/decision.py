"""Decides, from all that is known of one capture, what should exist and what its status says.

No I/O: the reconciler brings what it saw and carries out what is decided.
"""

from dataclasses import dataclass, replace
from datetime import datetime

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import DuringCapture, SpecDecodeCaptureSpec
from specdecode_operator.api.capture_status import CapturePhase
from specdecode_operator.api.status import ConditionStatus
from specdecode_operator.capture.control.admission import (
    dataset_claim,
    dataset_hold,
    deployment_hold,
    engine_hold,
    workload_hold,
)
from specdecode_operator.capture.control.image_note import image_note
from specdecode_operator.capture.control.job import Source, render_job
from specdecode_operator.capture.control.preemption import QUEUED
from specdecode_operator.capture.control.progress import Progress, newest_pod, read_progress
from specdecode_operator.capture.control.subject import Capture
from specdecode_operator.capture.control.surroundings import Decision, Surroundings, Writes
from specdecode_operator.capture.control.volume import (
    ALREADY_PUBLISHED,
    claim_changes,
    claim_hold,
    claim_of,
    naming_claim,
    published_hold,
    render_claim,
)
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, ConditionUpdate
from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.deployment.pods.readiness import Readiness, stalled, working
from specdecode_operator.deployment.spec.parsing import spec_problems

_TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class Sources:
    """Names of objects that a capture's spec refers to, and that nothing of ours need be on."""

    claim: str | None = None
    dataset_config_map: str | None = None
    dataset_claim: str | None = None


def sources_of(capture: Capture) -> Sources:
    """Return what a capture refers to; nothing where its spec is invalid."""
    try:
        spec = SpecDecodeCaptureSpec.model_validate(capture.spec, extra="ignore")
    except ValidationError:
        return Sources()
    dataset = spec.workload.prompts.dataset
    config_map = dataset.config_map if dataset else None
    return Sources(claim_of(capture, spec.storage), config_map.name if config_map else None, dataset_claim(spec))


_ACCEPTED = ConditionUpdate("Accepted", TRUE, "Valid", "the deployment's engine can be captured")


def decide(capture: Capture, seen: Surroundings, now: datetime) -> Decision:
    """Decide what should exist for a capture, and how far it is."""
    try:
        spec = SpecDecodeCaptureSpec.model_validate(capture.spec, extra="ignore")
    except ValidationError as error:
        return _held(Blocked("Invalid", "; ".join(map(str, spec_problems(error))), permanent=True))
    claim = claim_of(capture, spec.storage)
    decision = _course(capture, spec, seen)
    if decision.succeeded.status is not UNKNOWN and decision.finished_at is None:
        decision = replace(decision, finished_at=now.strftime(_TIME))
    changes = _claim_changes(capture, spec, seen, decision)
    return replace(decision, claim=claim, writes=replace(decision.writes, claim_metadata=changes))


def broken(capture: Capture, error: Exception) -> Decision:
    """Return the decision for an object that the operator itself stumbles over."""
    message = f"the operator failed on this object ({type(error).__name__}); its log tells more, please report it"
    return blind(capture, Blocked("InternalError", message))


def blind(capture: Capture, hold: Blocked) -> Decision:
    """Return the decision for an object of which not all could be seen: what was known of its claim stays."""
    return replace(_held(hold), claim=capture.status.claim)


def _course(capture: Capture, spec: SpecDecodeCaptureSpec, seen: Surroundings) -> Decision:
    if capture.ended is not None:
        return _ended(capture, seen)
    if seen.job is not None:
        return _with_job(capture, spec, seen, seen.job)
    if spec.suspend:
        return _suspended(_before_acceptance("Suspended"), Writes())
    return _without_job(capture, spec, seen)


def _ended(capture: Capture, seen: Surroundings) -> Decision:
    """What is left to say of a capture that ended: what was said when it did."""
    told = capture.ended
    assert told is not None  # noqa: S101  the caller's condition
    succeeded = ConditionUpdate(told.type, told.status, told.reason, told.message)
    good = told.status is ConditionStatus.TRUE
    return Decision(
        phase=CapturePhase.SUCCEEDED if good else CapturePhase.FAILED,
        summary=_final(succeeded),
        accepted=_ACCEPTED,
        succeeded=succeeded,
        # One that was given up while it ran frees its GPUs; others stay for their logs.
        writes=Writes(remove_job=seen.job is not None and not _is_finished(seen.job)),
        result=capture.status.summary,
        started_at=capture.status.started_at,
        finished_at=capture.status.finished_at,
    )


def _final(succeeded: ConditionUpdate) -> Readiness:
    if succeeded.status is TRUE:
        return Readiness(TRUE, succeeded.reason, succeeded.message)
    return stalled(succeeded.reason, succeeded.message)


def _is_finished(job: Body) -> bool:
    conditions = job.get("status", {}).get("conditions") or []
    return any(each["type"] in {"Complete", "Failed"} and each["status"] == "True" for each in conditions)


def _with_job(capture: Capture, spec: SpecDecodeCaptureSpec, seen: Surroundings, job: Body) -> Decision:
    """How far a capture is that was started."""
    progress = read_progress(job, seen.pods)
    if progress.phase is CapturePhase.SUCCEEDED or progress.failure is not None:
        return _finished(progress, naming_claim(capture, spec.storage, progress.failure))
    is_suspended = bool(job["spec"].get("suspend"))
    if spec.suspend:
        queued = bool(capture.queue_labels)
        # Kueue would start it again: a Job in a queue goes.
        writes = Writes(remove_job=queued, job_suspended=None if queued or is_suspended else True)
        return _suspended(_ACCEPTED, writes)
    if not is_suspended:
        note = image_note(capture, newest_pod(job, seen.pods))
        return replace(_under_way(progress), writes=Writes(image_note=note))
    if capture.queue_labels:
        return _queued(capture)
    if spec.deployment_during_capture is DuringCapture.SUSPEND and seen.deployment and seen.deployment.holds_gpus:
        name = seen.deployment.key.name
        return _pending("WaitingForDeployment", f"the engines of {name} are ending; then their GPUs are the capture's")
    return replace(_pending("Starting", "the Job is started"), writes=Writes(job_suspended=False))


def _finished(progress: Progress, failure: Blocked | None) -> Decision:
    if failure is not None:
        succeeded = ConditionUpdate("Succeeded", FALSE, failure.reason, failure.message)
    else:
        succeeded = ConditionUpdate("Succeeded", TRUE, progress.reason, progress.message)
    return Decision(
        phase=progress.phase,
        summary=_final(succeeded),
        accepted=_ACCEPTED,
        succeeded=succeeded,
        result=progress.summary,
        started_at=progress.started_at,
        finished_at=progress.finished_at,
    )


def _under_way(progress: Progress) -> Decision:
    return Decision(
        phase=progress.phase,
        summary=working(progress.reason, progress.message),
        accepted=_ACCEPTED,
        succeeded=ConditionUpdate("Succeeded", UNKNOWN, progress.reason, progress.message),
        waiting_for_gpus=progress.message if progress.waiting_for_gpus else None,
        started_at=progress.started_at,
    )


def _pending(reason: str, message: str) -> Decision:
    return Decision(
        phase=CapturePhase.PENDING,
        summary=working(reason, message),
        accepted=_ACCEPTED,
        succeeded=ConditionUpdate("Succeeded", UNKNOWN, reason, message),
    )


def _queued(capture: Capture) -> Decision:
    return _pending(QUEUED, f"Job {capture.job_name} waits in its queue until Kueue admits it")


def _suspended(accepted: ConditionUpdate, writes: Writes) -> Decision:
    message = "spec.suspend is true: no engine and no load; what was recorded so far is kept as partial files"
    return Decision(
        phase=CapturePhase.CANCELLED,
        summary=Readiness(TRUE, "Suspended", message),
        accepted=accepted,
        succeeded=ConditionUpdate("Succeeded", UNKNOWN, "Suspended", message),
        writes=writes,
    )


def _before_acceptance(reason: str) -> ConditionUpdate:
    return ConditionUpdate("Accepted", UNKNOWN, reason, "it is looked at when it shall start")


def _without_job(capture: Capture, spec: SpecDecodeCaptureSpec, seen: Surroundings) -> Decision:
    """Start a capture, or say why it does not."""
    hold = _hold(capture, spec, seen)
    if hold is not None:
        return _held(hold)
    deployment, image = seen.deployment, seen.operator_image
    assert deployment is not None  # noqa: S101  it has a plan in force
    assert image is not None  # noqa: S101
    course = deployment.desired.outcome
    assert isinstance(course, Launch)  # noqa: S101
    source = Source(deployment.key, deployment.uid, deployment.generation, course)
    wants_claim = spec.storage.existing_claim is None and seen.claim is None
    writes = Writes(
        claim=render_claim(capture, spec.deployment, spec.storage) if wants_claim else None,
        job=render_job(capture, spec, source, image),
    )
    pending = _queued(capture) if capture.queue_labels else _pending("Starting", "the Job is created")
    return replace(pending, writes=writes)


def _hold(capture: Capture, spec: SpecDecodeCaptureSpec, seen: Surroundings) -> Blocked | None:
    """Return the first thing that keeps a capture from starting."""
    deployment = seen.deployment
    hold = workload_hold(spec) or deployment_hold(spec.deployment, deployment.desired if deployment else None)
    if hold is not None:
        return hold
    assert deployment is not None  # noqa: S101  deployment_hold
    course = deployment.desired.outcome
    assert isinstance(course, Launch)  # noqa: S101  deployment_hold
    return (
        engine_hold(course.facts, course.plan)
        or claim_hold(capture, spec.storage, seen.claim)
        or published_hold(spec.storage, seen.claim)
        or dataset_hold(spec, seen.dataset)
        or _image_hold(seen.operator_image)
    )


def _image_hold(image: str | None) -> Blocked | None:
    if image is not None:
        return None
    message = (
        "the operator does not know its own image, which the load generator runs from: set SPECDECODE_OPERATOR_IMAGE"
        " in its environment, or POD_NAME and POD_NAMESPACE as its manifests do"
    )
    return Blocked("OperatorImageUnknown", message)


def _held(hold: Blocked) -> Decision:
    status = FALSE if hold.permanent else UNKNOWN
    return Decision(
        phase=CapturePhase.PENDING,
        summary=(stalled if hold.permanent else working)(hold.reason, hold.message),
        accepted=ConditionUpdate("Accepted", status, hold.reason, hold.message),
        succeeded=ConditionUpdate("Succeeded", UNKNOWN, hold.reason, "it has not started"),
    )


def _claim_changes(capture: Capture, spec: SpecDecodeCaptureSpec, seen: Surroundings, decision: Decision) -> Body:
    """Return what the claim that was created is to say of its owner and its files; one that is given is not changed."""
    storage, claim = spec.storage, seen.claim
    if storage.existing_claim is not None or claim is None or claim_hold(capture, storage, claim) is not None:
        return {}
    published = decision.succeeded.status is TRUE or decision.succeeded.reason == ALREADY_PUBLISHED
    return claim_changes(capture, storage, claim, published=published)


def hindered(decision: Decision, summary: Readiness) -> Decision:
    """Return the decision with something in its way that only the cluster showed.

    A capture that could not be started takes no GPUs away meanwhile; one that ended has ended nevertheless.
    """
    if decision.succeeded.status is not UNKNOWN:
        return decision
    accepted = decision.accepted
    if decision.writes.job is not None:
        accepted = ConditionUpdate("Accepted", UNKNOWN, summary.reason, summary.message)
    succeeded = ConditionUpdate("Succeeded", UNKNOWN, summary.reason, summary.message)
    return replace(decision, phase=CapturePhase.PENDING, summary=summary, accepted=accepted, succeeded=succeeded)
