"""Compute the desired objects and the status of one capture.

This module does no I/O: the reconciler passes in the observed state and carries out the decision.
"""

from dataclasses import dataclass, replace
from datetime import datetime

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import SpecDecodeCaptureSpec, Storage
from specdecode_operator.api.capture_status import CapturePhase
from specdecode_operator.api.deployment_status import ConditionStatus
from specdecode_operator.api.spec_problems import parsed_spec
from specdecode_operator.capture.arms import arm_notes, captured_arms
from specdecode_operator.capture.borrowing import Borrowing, released, trial_pod
from specdecode_operator.capture.golden_gate import golden_blocked, is_of_gate, with_golden
from specdecode_operator.capture.gpu_sharing import borrows, in_line
from specdecode_operator.capture.job_manifest import image_id_config_map, load_image, render_job
from specdecode_operator.capture.job_status import newest_pod, read_progress
from specdecode_operator.capture.observation import (
    Capture,
    CapturedDeployment,
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


@dataclass(frozen=True)
class References:
    """Names of objects that a capture's spec refers to, and that nothing of ours need be on."""

    claim: str | None = None
    dataset_config_map: str | None = None
    dataset_claim: str | None = None
    golden: str | None = None


def references_of(capture: Capture) -> References:
    """Return what a capture refers to; nothing where its spec is invalid."""
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
    """Decide what should exist for a capture, and how far it is."""
    try:
        spec = parsed_spec(SpecDecodeCaptureSpec, capture.spec, newer=True)
    except InvalidSpecError as error:
        invalid = Blocked("Invalid", "; ".join(map(str, error.problems)), permanent=True)
        return released(capture, blocked_decision(invalid), now)
    claim = claim_of(capture, spec.storage)
    decision = _next_step(capture, spec, observed, now)
    if borrows(capture.spec):
        decision = Borrowing(capture, spec, observed, now).recorded(decision)
    if decision.succeeded.status is not UNKNOWN and decision.finished_at is None:
        decision = replace(decision, finished_at=now.strftime(_TIME))
    decision = _without_times_ahead(capture, decision, now)
    engine, words = _noted(capture, observed.job)
    if decision.accepted is ACCEPTED and words:
        # What was noted of its arms when it began is still so.
        decision = replace(decision, accepted=replace(ACCEPTED, message=words))
    image = load_image(observed.job or decision.writes.job) or capture.status.operator_image
    decision = replace(decision, engine=decision.engine or engine, operator_image=image)
    changes = _claim_changes(capture, spec.storage, observed.claim, decision)
    return replace(decision, claim=claim, writes=replace(decision.writes, claim_metadata=changes))


def _without_times_ahead(capture: Capture, decision: Decision, now: datetime) -> Decision:
    """Return a decision whose times from pod and Job, which are of other clocks, do not lie in the future.

    Such a time counts as now, and then stays as the status has it.
    """
    status, told = capture.status, []
    started_at, finished_at = decision.started_at, decision.finished_at
    if started_at and is_ahead(started_at, now):
        told += [] if status.started_at else [told_ahead("status.startedAt", started_at, now)]
        started_at = status.started_at or now.strftime(_TIME)
    if finished_at and is_ahead(finished_at, now):
        told += [] if status.finished_at else [told_ahead("status.finishedAt", finished_at, now)]
        finished_at = status.finished_at or now.strftime(_TIME)
    return replace(decision, started_at=started_at, finished_at=finished_at, times_ahead=tuple(told))


def _noted(capture: Capture, job: Body | None) -> tuple[str | None, str | None]:
    """Return the engine and what was said of the arms when a capture began; its Job tells if the status never did."""
    notes = ((job or {}).get("metadata") or {}).get("annotations") or {}
    engine = notes.get(CAPTURED_ENGINE_ANNOTATION, "")
    return (
        capture.status.engine or (engine if is_engine_spec_hash(engine) else None),
        capture.accepted.message if capture.accepted else notes.get(ACCEPTED_ANNOTATION),
    )


def internal_error(capture: Capture, error: Exception, now: datetime) -> Decision:
    """Return the decision for an object that the operator itself stumbles over."""
    message = f"the operator failed on this object ({type(error).__name__}); its log tells more, please report it"
    return not_observed(capture, Blocked("InternalError", message), now)


def not_observed(capture: Capture, blocked: Blocked, now: datetime) -> Decision:
    """Return the decision for an object of which not all could be observed: what was known of its claim stays."""
    status = capture.status
    kept = replace(blocked_decision(blocked), claim=status.claim, operator_image=status.operator_image)
    return released(capture, kept, now)


def _next_step(capture: Capture, spec: SpecDecodeCaptureSpec, observed: CaptureObservation, now: datetime) -> Decision:
    if capture.ended is not None:
        return _ended(capture, observed)
    if observed.job is not None:
        return _with_job(capture, spec, observed, observed.job, now)
    if spec.suspend:
        accepted = ConditionUpdate("Accepted", UNKNOWN, "Suspended", "it is looked at when it shall start")
        return suspended(accepted, Writes())
    return _without_job(capture, spec, observed, now)


def _ended(capture: Capture, observed: CaptureObservation) -> Decision:
    """Repeat of a capture that ended what its status said when it did."""
    ended = capture.ended
    assert ended is not None  # noqa: S101  the caller's condition
    succeeded = ConditionUpdate(ended.type, ended.status, ended.reason, ended.message)
    good = ended.status is ConditionStatus.TRUE
    return Decision(
        phase=CapturePhase.SUCCEEDED if good else CapturePhase.FAILED,
        readiness=final(succeeded),
        accepted=ACCEPTED,
        succeeded=succeeded,
        # One that was given up while it ran frees its GPUs; others stay for their logs.
        writes=Writes(remove_job=observed.job is not None and not _is_finished(observed.job)),
        result=capture.status.summary,
        comparison=capture.status.comparison,
        regression=capture.status.regression,
        started_at=capture.status.started_at,
        finished_at=capture.status.finished_at,
    )


def _is_finished(job: Body) -> bool:
    conditions = job.get("status", {}).get("conditions") or []
    return any(each["type"] in {"Complete", "Failed"} and each["status"] == "True" for each in conditions)


def _with_job(
    capture: Capture, spec: SpecDecodeCaptureSpec, observed: CaptureObservation, job: Body, now: datetime
) -> Decision:
    """How far a capture is that was started."""
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
    """How far a capture is that keeps the engines of its deployment, and whose Job has not ended."""
    if job["spec"].get("suspend"):
        return _with_suspended_job(capture, observed)
    pod = newest_pod(job, observed.pods)
    if observed.goes_first is not None and in_line(pod):
        return replace(_waiting(observed), writes=withdrawn(capture))
    return replace(under_way(progress), writes=Writes(image_id=image_id_config_map(capture, pod)))


def _with_suspended_job(capture: Capture, observed: CaptureObservation) -> Decision:
    """What a Job waits for that keeps the engines and was withdrawn, or that Kueue has not started."""
    if capture.queue_labels:
        return queued(capture)
    if observed.goes_first is not None:
        return _waiting(observed)
    return replace(pending("Starting", "the Job is started"), writes=Writes(job_suspended=False))


def _waiting(observed: CaptureObservation) -> Decision:
    return pending("WaitingForDeployment", str(observed.goes_first))


def _without_job(
    capture: Capture, spec: SpecDecodeCaptureSpec, observed: CaptureObservation, now: datetime
) -> Decision:
    """Start a capture, or say what blocks it first."""
    source = _accepted(capture, spec, observed)
    if isinstance(source, Blocked):
        return blocked_decision(source)
    arms = captured_arms(spec, source, observed.deployment.arms if observed.deployment else ())
    if isinstance(arms, Blocked) or observed.operator_image is None:
        return blocked_decision(arms if isinstance(arms, Blocked) else OPERATOR_IMAGE_UNKNOWN)
    if observed.goes_first is not None:
        return _waiting(observed)
    wants_claim = spec.storage.existing_claim is None and observed.claim is None
    claim = render_claim(capture, spec.deployment, spec.storage) if wants_claim else None
    if borrows(capture.spec) and (waits := _waits_to_borrow(capture, spec, observed, claim, now)):
        return waits
    words = "; ".join([ACCEPTED.message, *arm_notes(arms)])
    engine = observed.deployment.engine if observed.deployment else None
    job = with_golden(render_job(capture, spec, source, arms, observed.operator_image), capture, spec, observed.golden)
    writes = Writes(
        claim=claim,
        job=_with_notes(job, engine, words),
        trial_pod=trial_pod(capture, job) if borrows(capture.spec) else None,
    )
    waiting = queued(capture) if capture.queue_labels else pending("Starting", "the Job is created")
    return replace(waiting, accepted=replace(ACCEPTED, message=words), writes=writes, engine=engine)


def _accepted(
    capture: Capture, spec: SpecDecodeCaptureSpec, observed: CaptureObservation
) -> CapturedDeployment | Blocked:
    """Return the deployment that is captured, or what blocks the capture of it."""
    if blocked := workload_blocked(spec):
        return blocked
    source = captured_deployment(
        spec.deployment, observed.deployment, gate_capture=capture.key.name if is_of_gate(capture) else None
    )
    if isinstance(source, Blocked):
        return source
    return (
        engine_blocked(source.launch.facts, source.launch.plan)
        or claim_blocked(capture, spec.storage, observed.claim)
        or published_blocked(spec.storage, observed.claim)
        or dataset_blocked(spec, observed.dataset)
        or golden_blocked(spec, observed.golden)
        or source
    )


def _waits_to_borrow(
    capture: Capture,
    spec: SpecDecodeCaptureSpec,
    observed: CaptureObservation,
    claim: Body | None,
    now: datetime,
) -> Decision | None:
    """Return what a capture waits for before it gets the Job that borrows GPUs; ``claim`` is one to create."""
    if claim is not None:
        if blocked := class_blocked(spec, observed.mounted):
            return blocked_decision(blocked)
        if blocked := waits_for_binding(spec, observed.mounted):
            return replace(blocked_decision(blocked), writes=Writes(claim=claim))
    return Borrowing(capture, spec, observed, now).waits()


def _with_notes(job: Body, engine: str | None, words: str) -> Body:
    """Return a Job that says what the status is to say of its beginning: the operator may end between the two."""
    notes = {CAPTURED_ENGINE_ANNOTATION: engine, ACCEPTED_ANNOTATION: words if words != ACCEPTED.message else None}
    annotations = (job["metadata"].get("annotations") or {}) | {name: each for name, each in notes.items() if each}
    return {**job, "metadata": {**job["metadata"], "annotations": annotations}}


def _claim_changes(capture: Capture, storage: Storage, claim: Body | None, decision: Decision) -> Body:
    """Return what the claim that was created is to say of its owner and its files; one that is given is not changed."""
    if storage.existing_claim is not None or claim is None or claim_blocked(capture, storage, claim) is not None:
        return {}
    published = decision.succeeded.status is TRUE or decision.succeeded.reason == ALREADY_PUBLISHED
    return claim_changes(capture, storage, claim, published=published)


def blocked_by_cluster(capture: Capture, decision: Decision, readiness: Readiness) -> Decision:
    """Return the decision where the cluster refuses one of its writes.

    A capture that could not be started takes no GPUs away meanwhile; one that ended has ended nevertheless.
    """
    if decision.succeeded.status is not UNKNOWN:
        return decision
    accepted = decision.accepted
    if decision.writes.job is not None or decision.writes.trial_pod is not None:
        accepted = ConditionUpdate("Accepted", UNKNOWN, readiness.reason, readiness.message)
    succeeded = ConditionUpdate("Succeeded", UNKNOWN, readiness.reason, readiness.message)
    return replace(
        decision,
        phase=CapturePhase.PENDING,
        readiness=readiness,
        accepted=accepted,
        succeeded=succeeded,
        borrow=capture.status.borrow if decision.borrows_now else decision.borrow,
    )
