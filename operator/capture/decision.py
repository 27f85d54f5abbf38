"""Decide the desired objects and the status of one capture.

This module does no I/O: the reconciler passes in the observed state and carries out the decision.
"""

from dataclasses import dataclass, replace
from datetime import datetime

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.api.capture_status import CapturePhase
from specdecode_operator.api.spec_problems import parsed_spec
from specdecode_operator.capture import live_capture, preconditions, status, volumes
from specdecode_operator.capture.arms import arm_notes, captured_arms, sampling_warning
from specdecode_operator.capture.borrowing import Borrowing, released, trial_pod
from specdecode_operator.capture.golden_gate import golden_blocked, is_of_gate, with_golden
from specdecode_operator.capture.gpu_sharing import borrows, due_at, in_line, is_unsettled
from specdecode_operator.capture.job_manifest import image_id_config_map, load_image, render_job
from specdecode_operator.capture.job_status import newest_pod, read_progress
from specdecode_operator.capture.observation import (
    Capture,
    CaptureObservation,
    Progress,
    dataset_claim,
)
from specdecode_operator.cluster.clock import is_ahead, rfc3339, told_ahead
from specdecode_operator.cluster.resources import ACCEPTED_ANNOTATION, CAPTURED_ENGINE_ANNOTATION
from specdecode_operator.deployment.conditions import OPERATOR_IMAGE_UNKNOWN, TRUE, UNKNOWN, Blocked, ConditionUpdate
from specdecode_operator.deployment.parsed_deployment import is_engine_spec_hash
from specdecode_operator.deployment.requeue import Requeue
from specdecode_operator.deployment.rollout.engine_workload import serving_template
from specdecode_operator.deployment.rollout.readiness import Readiness
from specdecode_operator.problems import InvalidSpecError

_WAITING = "WaitingForDeployment"


@dataclass(frozen=True)
class References:
    """Names of the unowned objects that a capture's spec refers to."""

    claim: str | None = None
    dataset_config_map: str | None = None
    dataset_claim: str | None = None
    golden: str | None = None


def references_of(capture: Capture) -> References:
    """Return the references of a capture; empty if its spec is invalid."""
    try:
        spec = SpecDecodeCaptureSpec.parse(capture.spec, newer=True)
    except ValidationError:
        return References()
    dataset = spec.workload.prompts.dataset
    config_map = dataset.config_map if dataset else None
    return References(
        volumes.claim_of(capture, spec.storage),
        config_map.name if config_map else None,
        dataset_claim(spec),
        spec.against.capture if spec.against else None,
    )


def decide(capture: Capture, observed: CaptureObservation, now: datetime) -> status.Decision:
    """Decide the next writes and the status of a capture."""
    try:
        spec = parsed_spec(SpecDecodeCaptureSpec, capture.spec, newer=True)
    except InvalidSpecError as error:
        invalid = Blocked("Invalid", "; ".join(map(str, error.problems)), permanent=True)
        return released(capture, status.blocked_decision(invalid), now)
    storage = spec.storage
    decision = _next_step(capture, spec, observed, now)
    if borrows(capture.spec):
        decision = Borrowing(capture, spec, observed, now).recorded(decision)
    if decision.succeeded.status is not UNKNOWN and decision.finished_at is None:
        decision = replace(decision, finished_at=rfc3339(now))
    decision = _without_times_ahead(capture, decision, now)
    # Engine and message at the start of the capture, from the Job if the status was never written.
    notes = ((observed.job or {}).get("metadata") or {}).get("annotations") or {}
    noted = notes.get(CAPTURED_ENGINE_ANNOTATION, "")
    engine = capture.status.engine or (noted if is_engine_spec_hash(noted) else None)
    words = capture.accepted.message if capture.accepted else notes.get(ACCEPTED_ANNOTATION)
    accepted = (
        replace(status.ACCEPTED, message=words) if decision.accepted is status.ACCEPTED and words else decision.accepted
    )
    changes: Body = {}
    # A claim of the user is never changed.
    if not storage.existing_claim and observed.claim and not volumes.claim_blocked(capture, storage, observed.claim):
        published = decision.succeeded.status is TRUE or decision.succeeded.reason == volumes.ALREADY_PUBLISHED
        changes = volumes.claim_changes(capture, storage, observed.claim, published=published)
    return replace(
        decision,
        accepted=accepted,
        engine=decision.engine or engine,
        operator_image=load_image(observed.job or decision.writes.job) or capture.status.operator_image,
        claim=volumes.claim_of(capture, storage),
        writes=replace(decision.writes, claim_metadata=changes),
    )


def _without_times_ahead(capture: Capture, decision: status.Decision, now: datetime) -> status.Decision:
    """Replace future times of pod and Job, which use other clocks, by the recorded time or now."""
    times: dict[str, str | None] = {}
    told = []
    for field, name in (("started_at", "status.startedAt"), ("finished_at", "status.finishedAt")):
        time, recorded = getattr(decision, field), getattr(capture.status, field)
        if time and is_ahead(time, now):
            told += [] if recorded else [told_ahead(name, time, now)]
            time = recorded or rfc3339(now)
        times[field] = time
    return replace(decision, started_at=times["started_at"], finished_at=times["finished_at"], times_ahead=tuple(told))


def internal_error(capture: Capture, error: Exception, now: datetime) -> status.Decision:
    """Return the decision for an object on which the operator failed."""
    message = f"Internal error in the operator ({type(error).__name__}); see its log, and report the error"
    return not_observed(capture, Blocked("InternalError", message), now)


def not_observed(capture: Capture, blocked: Blocked, now: datetime) -> status.Decision:
    """Return the decision for an object that could not be fully observed; its claim stays in the status."""
    known = capture.status
    kept = replace(status.blocked_decision(blocked), claim=known.claim, operator_image=known.operator_image)
    return released(capture, kept, now)


def _next_step(
    capture: Capture, spec: SpecDecodeCaptureSpec, observed: CaptureObservation, now: datetime
) -> status.Decision:
    job, known, ended = observed.job, capture.status, capture.ended
    if ended is not None:
        conditions = job.get("status", {}).get("conditions") or [] if job is not None else []
        is_finished = any(each["type"] in {"Complete", "Failed"} and each["status"] == "True" for each in conditions)
        succeeded = ConditionUpdate(ended.type, ended.status, ended.reason, ended.message)
        return status.Decision(
            phase=CapturePhase.SUCCEEDED if ended.status is TRUE else CapturePhase.FAILED,
            readiness=status.final(succeeded),
            accepted=status.ACCEPTED,
            succeeded=succeeded,
            # A Job that was given up while it ran must free its GPUs; finished ones stay for their logs.
            writes=status.Writes(remove_job=job is not None and not is_finished),
            result=known.summary,
            comparison=known.comparison,
            regression=known.regression,
            started_at=known.started_at,
            finished_at=known.finished_at,
        )
    if job is not None:
        return _with_job(capture, spec, observed, job, now)
    if spec.suspend:
        accepted = ConditionUpdate("Accepted", UNKNOWN, "Suspended", "Checked when the capture starts")
        return status.suspended(accepted, status.Writes())
    return _without_job(capture, spec, observed, now)


def _with_job(
    capture: Capture, spec: SpecDecodeCaptureSpec, observed: CaptureObservation, job: Body, now: datetime
) -> status.Decision:
    progress = read_progress(job, observed.pods)
    if progress.phase is CapturePhase.SUCCEEDED or progress.failure is not None:
        return status.finished(progress, volumes.with_claim(capture, spec.storage, progress.failure))
    is_suspended = bool(job["spec"].get("suspend"))
    if spec.suspend:
        return status.suspended(
            status.ACCEPTED, status.Writes() if is_suspended and not capture.queue_labels else status.withdrawn(capture)
        )
    if borrows(capture.spec):
        lending = Borrowing(capture, spec, observed, now)
        return lending.suspended(job) if is_suspended else lending.running(job, progress)
    return _keeping_engines(capture, observed, job, progress)


def _keeping_engines(capture: Capture, observed: CaptureObservation, job: Body, progress: Progress) -> status.Decision:
    if job["spec"].get("suspend"):
        if capture.queue_labels:
            return status.queued(capture)
        if observed.goes_first is not None:
            return status.pending(_WAITING, observed.goes_first)
        return replace(status.pending("Starting", "Job is starting"), writes=status.Writes(job_suspended=False))
    pod = newest_pod(job, observed.pods)
    if observed.goes_first is not None and in_line(pod):
        return replace(status.pending(_WAITING, observed.goes_first), writes=status.withdrawn(capture))
    if capture.is_live:
        order = live_capture.order_config_map(capture, job, observed.pods)
        return replace(status.under_way(progress), writes=status.Writes(live_order=order))
    return replace(status.under_way(progress), writes=status.Writes(image_id=image_id_config_map(capture, pod)))


def _without_job(
    capture: Capture, spec: SpecDecodeCaptureSpec, observed: CaptureObservation, now: datetime
) -> status.Decision:
    """Start a capture, or return what blocks it."""
    if capture.is_live:
        return _without_live_job(capture, spec, observed)
    gate_capture = capture.key.name if is_of_gate(capture) else None
    source = preconditions.workload_blocked(spec) or preconditions.captured_deployment(
        spec.deployment, observed.deployment, gate_capture=gate_capture
    )
    if not isinstance(source, Blocked):
        source = (
            preconditions.engine_blocked(source.launch.facts, source.launch.plan)
            or preconditions.lengths_blocked(spec, source.launch.facts)
            or volumes.claim_blocked(capture, spec.storage, observed.claim)
            or volumes.published_blocked(capture, spec.storage, observed.claim)
            or preconditions.dataset_blocked(spec, observed.dataset)
            or golden_blocked(spec, observed.golden)
            or source
        )
    if isinstance(source, Blocked):
        return status.blocked_decision(source)
    arms = captured_arms(spec, source, observed.deployment.arms if observed.deployment else ())
    if isinstance(arms, Blocked) or observed.operator_image is None:
        return status.blocked_decision(arms if isinstance(arms, Blocked) else OPERATOR_IMAGE_UNKNOWN)
    if observed.goes_first is not None:
        return status.pending(_WAITING, observed.goes_first)
    wants_claim = spec.storage.existing_claim is None and observed.claim is None
    claim = volumes.render_claim(capture, spec.deployment, spec.storage) if wants_claim else None
    if borrows(capture.spec) and (waits := _waits_to_borrow(capture, spec, observed, claim, now)):
        return waits
    warnings = tuple(filter(None, [sampling_warning(spec, source, arms)]))
    words = "; ".join([status.ACCEPTED.message, *arm_notes(arms), *warnings])
    engine = observed.deployment.engine if observed.deployment else None
    job = with_golden(render_job(capture, spec, source, arms, observed.operator_image), capture, spec, observed.golden)
    job = _with_notes(job, engine, words)
    trial = trial_pod(capture, job) if borrows(capture.spec) else None
    waiting = status.queued(capture) if capture.queue_labels else status.pending("Starting", "Job is being created")
    writes = status.Writes(claim=claim, job=job, trial_pod=trial)
    accepted = replace(status.ACCEPTED, message=words)
    return replace(waiting, accepted=accepted, writes=writes, engine=engine, warnings=warnings)


def _with_notes(job: Body, engine: str | None, accepted: str) -> Body:
    """Return a Job with the engine hash and message of the status, which the operator may not get to write."""
    notes = {
        CAPTURED_ENGINE_ANNOTATION: engine,
        ACCEPTED_ANNOTATION: accepted if accepted != status.ACCEPTED.message else None,
    }
    annotations = (job["metadata"].get("annotations") or {}) | {name: each for name, each in notes.items() if each}
    return {**job, "metadata": {**job["metadata"], "annotations": annotations}}


def _without_live_job(capture: Capture, spec: SpecDecodeCaptureSpec, observed: CaptureObservation) -> status.Decision:
    """Start a live capture, or return what blocks it."""
    deployment = observed.deployment
    source = live_capture.invalid(spec) or preconditions.captured_deployment(spec.deployment, deployment)
    if not isinstance(source, Blocked):
        source = (
            live_capture.not_recordable(spec, source, observed.token_ids_allowed)
            or volumes.claim_blocked(capture, spec.storage, observed.claim)
            or volumes.published_blocked(capture, spec.storage, observed.claim)
            or source
        )
    if isinstance(source, Blocked) or deployment is None or observed.operator_image is None:
        return status.blocked_decision(source if isinstance(source, Blocked) else OPERATOR_IMAGE_UNKNOWN)
    if waits := live_capture.waits_for_engines(spec, deployment) or observed.goes_first:
        return status.pending(_WAITING, waits)
    assert deployment.desired.workload is not None  # noqa: S101  otherwise it waits
    template = serving_template(deployment.desired.workload)
    pods = live_capture.pods_to_record(spec, deployment)
    if blocked := live_capture.too_many(spec, pods):
        return status.blocked_decision(blocked)
    wants_claim = spec.storage.existing_claim is None and observed.claim is None
    claim = volumes.render_claim(capture, spec.deployment, spec.storage) if wants_claim else None
    collector = live_capture.Collector(pods, template, observed.token, observed.operator_image)
    warnings = tuple(filter(None, [sampling_warning(spec, source)]))
    words = "; ".join([status.ACCEPTED.message, *warnings])
    job = _with_notes(live_capture.render_live_job(capture, spec, source, collector), deployment.engine, words)
    starting = status.pending("Starting", "Job is being created")
    return replace(
        starting,
        accepted=replace(status.ACCEPTED, message=words),
        writes=status.Writes(claim=claim, job=job),
        engine=deployment.engine,
        warnings=warnings,
    )


def _waits_to_borrow(
    capture: Capture,
    spec: SpecDecodeCaptureSpec,
    observed: CaptureObservation,
    claim: Body | None,
    now: datetime,
) -> status.Decision | None:
    """Return why a capture may not get the Job that borrows GPUs yet; ``claim`` is one to create."""
    if claim is not None:
        if blocked := volumes.class_blocked(spec, observed.mounted):
            return status.blocked_decision(blocked)
        if blocked := volumes.waits_for_binding(spec, observed.mounted):
            return replace(status.blocked_decision(blocked), writes=status.Writes(claim=claim))
    return Borrowing(capture, spec, observed, now).waits()


def blocked_by_cluster(capture: Capture, decision: status.Decision, readiness: Readiness) -> status.Decision:
    """Return the decision after the cluster rejected a write: a capture that could not start must hold no GPUs."""
    if decision.succeeded.status is not UNKNOWN:
        return decision
    accepted = decision.accepted
    if decision.writes.job is not None or decision.writes.trial_pod is not None:
        accepted = ConditionUpdate("Accepted", UNKNOWN, readiness.reason, readiness.message)
    return replace(
        decision,
        phase=CapturePhase.PENDING,
        readiness=readiness,
        accepted=accepted,
        succeeded=ConditionUpdate("Succeeded", UNKNOWN, readiness.reason, readiness.message),
        borrow=capture.status.borrow if decision.borrows_now else decision.borrow,
    )


def capture_attention(capture: Capture) -> Requeue:
    """Return when to requeue a capture without an event: until it ended, its deployment serves and its TTL passed."""
    goes_on = capture.ended is None or is_unsettled(capture.status.borrow)
    timeout_s = capture.spec.get("borrowTimeoutSeconds")
    due = due_at(capture.status.borrow, timeout_s if isinstance(timeout_s, int) else 0)
    return Requeue(
        is_close=goes_on or capture.spec.get("ttlSecondsAfterFinished") is not None,
        due_at_s=due.timestamp() if due is not None and capture.ended is None else None,
    )
