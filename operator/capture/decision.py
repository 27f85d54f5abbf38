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
from specdecode_operator.capture.arms import arm_notes, captured_arms
from specdecode_operator.capture.borrowing import Borrowing, released, trial_pod
from specdecode_operator.capture.golden_gate import golden_blocked, is_of_gate, with_golden
from specdecode_operator.capture.gpu_sharing import borrows, in_line
from specdecode_operator.capture.job_manifest import image_id_config_map, load_image, render_job
from specdecode_operator.capture.job_status import newest_pod, read_progress
from specdecode_operator.capture.observation import (
    Capture,
    CaptureObservation,
    Progress,
    dataset_claim,
)
from specdecode_operator.capture.preconditions import (
    captured_deployment,
    dataset_blocked,
    engine_blocked,
    workload_blocked,
)
from specdecode_operator.capture.status import (
    ACCEPTED,
    Decision,
    Writes,
    blocked_decision,
    final,
    finished,
    pending,
    queued,
    suspended,
    under_way,
    withdrawn,
)
from specdecode_operator.capture.volumes import (
    ALREADY_PUBLISHED,
    claim_blocked,
    claim_changes,
    claim_of,
    class_blocked,
    published_blocked,
    render_claim,
    waits_for_binding,
    with_claim,
)
from specdecode_operator.cluster.clock import is_ahead, told_ahead
from specdecode_operator.cluster.resources import ACCEPTED_ANNOTATION, CAPTURED_ENGINE_ANNOTATION
from specdecode_operator.deployment.conditions import OPERATOR_IMAGE_UNKNOWN, TRUE, UNKNOWN, Blocked, ConditionUpdate
from specdecode_operator.deployment.parsed_deployment import is_engine_spec_hash
from specdecode_operator.deployment.rollout.readiness import Readiness
from specdecode_operator.problems import InvalidSpecError

_TIME = "%Y-%m-%dT%H:%M:%SZ"
_WAITING = "WaitingForDeployment"


@dataclass(frozen=True)
class References:
    """Names of the unowned objects that a capture's spec refers to."""

    claim: str | None = None
    dataset_config_map: str | None = None
    dataset_claim: str | None = None
    golden: str | None = None


def references_of(capture: Capture) -> References:
    """Return the references of a capture; none if its spec is invalid."""
    try:
        spec = SpecDecodeCaptureSpec.parse(capture.spec, newer=True)
    except ValidationError:
        return References()
    dataset = spec.workload.prompts.dataset
    config_map = dataset.config_map if dataset else None
    return References(
        claim_of(capture, spec.storage),
        config_map.name if config_map else None,
        dataset_claim(spec),
        spec.against.capture if spec.against else None,
    )


def decide(capture: Capture, observed: CaptureObservation, now: datetime) -> Decision:
    """Decide the next writes and the status of a capture."""
    try:
        spec = parsed_spec(SpecDecodeCaptureSpec, capture.spec, newer=True)
    except InvalidSpecError as error:
        invalid = Blocked("Invalid", "; ".join(map(str, error.problems)), permanent=True)
        return released(capture, blocked_decision(invalid), now)
    status, storage = capture.status, spec.storage
    decision = _next_step(capture, spec, observed, now)
    if borrows(capture.spec):
        decision = Borrowing(capture, spec, observed, now).recorded(decision)
    if decision.succeeded.status is not UNKNOWN and decision.finished_at is None:
        decision = replace(decision, finished_at=now.strftime(_TIME))
    decision = _without_times_ahead(capture, decision, now)
    # Engine and message at the start of the capture, from the Job if the status was never written.
    notes = ((observed.job or {}).get("metadata") or {}).get("annotations") or {}
    noted = notes.get(CAPTURED_ENGINE_ANNOTATION, "")
    engine = status.engine or (noted if is_engine_spec_hash(noted) else None)
    words = capture.accepted.message if capture.accepted else notes.get(ACCEPTED_ANNOTATION)
    accepted = replace(ACCEPTED, message=words) if decision.accepted is ACCEPTED and words else decision.accepted
    changes: Body = {}
    # A claim of the user is never changed.
    if not storage.existing_claim and observed.claim and not claim_blocked(capture, storage, observed.claim):
        published = decision.succeeded.status is TRUE or decision.succeeded.reason == ALREADY_PUBLISHED
        changes = claim_changes(capture, storage, observed.claim, published=published)
    return replace(
        decision,
        accepted=accepted,
        engine=decision.engine or engine,
        operator_image=load_image(observed.job or decision.writes.job) or status.operator_image,
        claim=claim_of(capture, storage),
        writes=replace(decision.writes, claim_metadata=changes),
    )


def _without_times_ahead(capture: Capture, decision: Decision, now: datetime) -> Decision:
    """Replace times of pod and Job that lie in the future: they come from other clocks.

    Such a time counts as now, and then stays as the status records it.
    """
    times: dict[str, str | None] = {}
    told = []
    for field, name in (("started_at", "status.startedAt"), ("finished_at", "status.finishedAt")):
        time, recorded = getattr(decision, field), getattr(capture.status, field)
        if time and is_ahead(time, now):
            told += [] if recorded else [told_ahead(name, time, now)]
            time = recorded or now.strftime(_TIME)
        times[field] = time
    return replace(decision, started_at=times["started_at"], finished_at=times["finished_at"], times_ahead=tuple(told))


def internal_error(capture: Capture, error: Exception, now: datetime) -> Decision:
    """Return the decision for an object on which the operator failed."""
    message = f"the operator failed on this object ({type(error).__name__}); its log tells more, please report it"
    return not_observed(capture, Blocked("InternalError", message), now)


def not_observed(capture: Capture, blocked: Blocked, now: datetime) -> Decision:
    """Return the decision for an object that could not be fully observed; its claim stays in the status."""
    status = capture.status
    kept = replace(blocked_decision(blocked), claim=status.claim, operator_image=status.operator_image)
    return released(capture, kept, now)


def _next_step(capture: Capture, spec: SpecDecodeCaptureSpec, observed: CaptureObservation, now: datetime) -> Decision:
    job, status, ended = observed.job, capture.status, capture.ended
    if ended is not None:
        conditions = job.get("status", {}).get("conditions") or [] if job is not None else []
        is_finished = any(each["type"] in {"Complete", "Failed"} and each["status"] == "True" for each in conditions)
        succeeded = ConditionUpdate(ended.type, ended.status, ended.reason, ended.message)
        return Decision(
            phase=CapturePhase.SUCCEEDED if ended.status is TRUE else CapturePhase.FAILED,
            readiness=final(succeeded),
            accepted=ACCEPTED,
            succeeded=succeeded,
            # A Job that was given up while it ran must free its GPUs; finished ones stay for their logs.
            writes=Writes(remove_job=job is not None and not is_finished),
            result=status.summary,
            comparison=status.comparison,
            regression=status.regression,
            started_at=status.started_at,
            finished_at=status.finished_at,
        )
    if job is not None:
        return _with_job(capture, spec, observed, job, now)
    if spec.suspend:
        accepted = ConditionUpdate("Accepted", UNKNOWN, "Suspended", "it is looked at when it shall start")
        return suspended(accepted, Writes())
    return _without_job(capture, spec, observed, now)


def _with_job(
    capture: Capture, spec: SpecDecodeCaptureSpec, observed: CaptureObservation, job: Body, now: datetime
) -> Decision:
    progress = read_progress(job, observed.pods)
    if progress.phase is CapturePhase.SUCCEEDED or progress.failure is not None:
        return finished(progress, with_claim(capture, spec.storage, progress.failure))
    is_suspended = bool(job["spec"].get("suspend"))
    if spec.suspend:
        return suspended(ACCEPTED, Writes() if is_suspended and not capture.queue_labels else withdrawn(capture))
    if borrows(capture.spec):
        lending = Borrowing(capture, spec, observed, now)
        return lending.suspended(job) if is_suspended else lending.running(job, progress)
    return _keeping_engines(capture, observed, job, progress)


def _keeping_engines(capture: Capture, observed: CaptureObservation, job: Body, progress: Progress) -> Decision:
    if job["spec"].get("suspend"):
        if capture.queue_labels:
            return queued(capture)
        if observed.goes_first is not None:
            return pending(_WAITING, observed.goes_first)
        return replace(pending("Starting", "the Job is started"), writes=Writes(job_suspended=False))
    pod = newest_pod(job, observed.pods)
    if observed.goes_first is not None and in_line(pod):
        return replace(pending(_WAITING, observed.goes_first), writes=withdrawn(capture))
    return replace(under_way(progress), writes=Writes(image_id=image_id_config_map(capture, pod)))


def _without_job(
    capture: Capture, spec: SpecDecodeCaptureSpec, observed: CaptureObservation, now: datetime
) -> Decision:
    """Start a capture, or return what blocks it."""
    gate_capture = capture.key.name if is_of_gate(capture) else None
    source = workload_blocked(spec) or captured_deployment(
        spec.deployment, observed.deployment, gate_capture=gate_capture
    )
    if not isinstance(source, Blocked):
        source = (
            engine_blocked(source.launch.facts, source.launch.plan)
            or claim_blocked(capture, spec.storage, observed.claim)
            or published_blocked(spec.storage, observed.claim)
            or dataset_blocked(spec, observed.dataset)
            or golden_blocked(spec, observed.golden)
            or source
        )
    if isinstance(source, Blocked):
        return blocked_decision(source)
    arms = captured_arms(spec, source, observed.deployment.arms if observed.deployment else ())
    if isinstance(arms, Blocked) or observed.operator_image is None:
        return blocked_decision(arms if isinstance(arms, Blocked) else OPERATOR_IMAGE_UNKNOWN)
    if observed.goes_first is not None:
        return pending(_WAITING, observed.goes_first)
    wants_claim = spec.storage.existing_claim is None and observed.claim is None
    claim = render_claim(capture, spec.deployment, spec.storage) if wants_claim else None
    if borrows(capture.spec) and (waits := _waits_to_borrow(capture, spec, observed, claim, now)):
        return waits
    words = "; ".join([ACCEPTED.message, *arm_notes(arms)])
    engine = observed.deployment.engine if observed.deployment else None
    job = with_golden(render_job(capture, spec, source, arms, observed.operator_image), capture, spec, observed.golden)
    # The Job records them too, because the operator may stop before it writes the status.
    notes = {CAPTURED_ENGINE_ANNOTATION: engine, ACCEPTED_ANNOTATION: words if words != ACCEPTED.message else None}
    annotations = (job["metadata"].get("annotations") or {}) | {name: each for name, each in notes.items() if each}
    job = {**job, "metadata": {**job["metadata"], "annotations": annotations}}
    trial = trial_pod(capture, job) if borrows(capture.spec) else None
    waiting = queued(capture) if capture.queue_labels else pending("Starting", "the Job is created")
    writes = Writes(claim=claim, job=job, trial_pod=trial)
    return replace(waiting, accepted=replace(ACCEPTED, message=words), writes=writes, engine=engine)


def _waits_to_borrow(
    capture: Capture,
    spec: SpecDecodeCaptureSpec,
    observed: CaptureObservation,
    claim: Body | None,
    now: datetime,
) -> Decision | None:
    """Return why a capture may not get the Job that borrows GPUs yet; ``claim`` is one to create."""
    if claim is not None:
        if blocked := class_blocked(spec, observed.mounted):
            return blocked_decision(blocked)
        if blocked := waits_for_binding(spec, observed.mounted):
            return replace(blocked_decision(blocked), writes=Writes(claim=claim))
    return Borrowing(capture, spec, observed, now).waits()


def blocked_by_cluster(capture: Capture, decision: Decision, readiness: Readiness) -> Decision:
    """Return the decision after the cluster rejected one of its writes.

    A capture that could not be started must not hold GPUs meanwhile; one that ended stays ended.
    """
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
