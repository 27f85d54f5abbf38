"""Decides, from all that is known of one capture, what should exist and what its status says.

No I/O: the reconciler brings what it saw and carries out what is decided.
"""

from dataclasses import dataclass, field, replace
from datetime import datetime

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import DuringCapture, SpecDecodeCaptureSpec, Storage
from specdecode_operator.api.golden import RegressionStatus
from specdecode_operator.api.status.capture import CapturePhase, CaptureSummary
from specdecode_operator.api.status.comparison import ComparisonStatus
from specdecode_operator.api.status.deployment import ConditionStatus
from specdecode_operator.capture.control.admission import (
    captured_deployment,
    dataset_blocked,
    dataset_claim,
    engine_blocked,
    workload_blocked,
)
from specdecode_operator.capture.control.arms import arm_notes, captured_arms
from specdecode_operator.capture.control.capture import Capture
from specdecode_operator.capture.control.golden.against import golden_blocked, with_golden
from specdecode_operator.capture.control.golden.gate import is_of_gate
from specdecode_operator.capture.control.image_id import image_id_config_map
from specdecode_operator.capture.control.job import load_image, render_job
from specdecode_operator.capture.control.job_status import Progress, newest_pod, read_progress
from specdecode_operator.capture.control.observation import CaptureObservation
from specdecode_operator.capture.control.preemption import QUEUED
from specdecode_operator.capture.control.serving_first import in_line
from specdecode_operator.capture.control.volume import (
    ALREADY_PUBLISHED,
    claim_blocked,
    claim_changes,
    claim_of,
    published_blocked,
    render_claim,
    with_claim,
)
from specdecode_operator.deployment.blocked import OPERATOR_IMAGE_UNKNOWN, Blocked
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, ConditionUpdate
from specdecode_operator.deployment.pods.readiness import Readiness, place_word, readiness_of, stalled, working
from specdecode_operator.deployment.spec.engine_fields import is_engine_word
from specdecode_operator.deployment.spec.pydantic_problems import parsed_spec
from specdecode_operator.kube.future_times import is_ahead, told_ahead
from specdecode_operator.kube.labels import ACCEPTED_ANNOTATION, CAPTURED_ENGINE_ANNOTATION
from specdecode_operator.problems import InvalidSpecError

_TIME = "%Y-%m-%dT%H:%M:%SZ"


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
    """What to tell of times of its pod or Job that lie in the future, and that count as now."""


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


_ACCEPTED = ConditionUpdate("Accepted", TRUE, "Valid", "the deployment's engine can be captured")


def decide(capture: Capture, observed: CaptureObservation, now: datetime) -> Decision:
    """Decide what should exist for a capture, and how far it is."""
    try:
        spec = parsed_spec(SpecDecodeCaptureSpec, capture.spec, newer=True)
    except InvalidSpecError as error:
        return _blocked(Blocked("Invalid", "; ".join(map(str, error.problems)), permanent=True))
    claim = claim_of(capture, spec.storage)
    decision = _next_step(capture, spec, observed)
    if decision.succeeded.status is not UNKNOWN and decision.finished_at is None:
        decision = replace(decision, finished_at=now.strftime(_TIME))
    decision = _without_times_ahead(capture, decision, now)
    engine, words = _noted(capture, observed.job)
    if decision.accepted is _ACCEPTED and words:
        # What was noted of its arms when it began is still so.
        decision = replace(decision, accepted=replace(_ACCEPTED, message=words))
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
        capture.status.engine or (engine if is_engine_word(engine) else None),
        capture.accepted.message if capture.accepted else notes.get(ACCEPTED_ANNOTATION),
    )


def internal_error(capture: Capture, error: Exception) -> Decision:
    """Return the decision for an object that the operator itself stumbles over."""
    message = f"the operator failed on this object ({type(error).__name__}); its log tells more, please report it"
    return not_observed(capture, Blocked("InternalError", message))


def not_observed(capture: Capture, blocked: Blocked) -> Decision:
    """Return the decision for an object of which not all could be observed: what was known of its claim stays."""
    return replace(_blocked(blocked), claim=capture.status.claim, operator_image=capture.status.operator_image)


def _next_step(capture: Capture, spec: SpecDecodeCaptureSpec, observed: CaptureObservation) -> Decision:
    if capture.ended is not None:
        return _ended(capture, observed)
    if observed.job is not None:
        return _with_job(capture, spec, observed, observed.job)
    if spec.suspend:
        accepted = ConditionUpdate("Accepted", UNKNOWN, "Suspended", "it is looked at when it shall start")
        return _suspended(accepted, Writes())
    return _without_job(capture, spec, observed)


def _ended(capture: Capture, observed: CaptureObservation) -> Decision:
    """Repeat of a capture that ended what its status said when it did."""
    ended = capture.ended
    assert ended is not None  # noqa: S101  the caller's condition
    succeeded = ConditionUpdate(ended.type, ended.status, ended.reason, ended.message)
    good = ended.status is ConditionStatus.TRUE
    return Decision(
        phase=CapturePhase.SUCCEEDED if good else CapturePhase.FAILED,
        readiness=_final(succeeded),
        accepted=_ACCEPTED,
        succeeded=succeeded,
        # One that was given up while it ran frees its GPUs; others stay for their logs.
        writes=Writes(remove_job=observed.job is not None and not _is_finished(observed.job)),
        result=capture.status.summary,
        comparison=capture.status.comparison,
        regression=capture.status.regression,
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


def _with_job(capture: Capture, spec: SpecDecodeCaptureSpec, observed: CaptureObservation, job: Body) -> Decision:
    """How far a capture is that was started."""
    progress = read_progress(job, observed.pods)
    if progress.phase is CapturePhase.SUCCEEDED or progress.failure is not None:
        return _finished(progress, with_claim(capture, spec.storage, progress.failure))
    is_suspended = bool(job["spec"].get("suspend"))
    if spec.suspend:
        return _suspended(_ACCEPTED, Writes() if is_suspended and not capture.queue_labels else _withdrawn(capture))
    if is_suspended:
        return _with_suspended_job(capture, spec, observed)
    pod = newest_pod(job, observed.pods)
    if observed.goes_first is not None and in_line(pod):
        return replace(_waiting(observed), writes=_withdrawn(capture))
    return replace(_under_way(progress), writes=Writes(image_id=image_id_config_map(capture, pod)))


def _with_suspended_job(capture: Capture, spec: SpecDecodeCaptureSpec, observed: CaptureObservation) -> Decision:
    """What a Job waits for that is not started yet, or was withdrawn."""
    if capture.queue_labels:
        return _queued(capture)
    if observed.goes_first is not None:
        return _waiting(observed)
    deployment = observed.deployment
    if spec.deployment_during_capture is DuringCapture.SUSPEND and deployment and deployment.holds_gpus:
        plan = deployment.desired.outcome.plan_status
        what = place_word(plan.product if plan else None)
        message = f"the engines of {deployment.key.name} are ending; then the capture has their {what}"
        return _pending("WaitingForDeployment", message)
    return replace(_pending("Starting", "the Job is started"), writes=Writes(job_suspended=False))


def _withdrawn(capture: Capture) -> Writes:
    """Return what takes a capture's pod away; Kueue would start its Job again, so one in a queue goes."""
    queued = bool(capture.queue_labels)
    return Writes(remove_job=queued, job_suspended=None if queued else True)


def _finished(progress: Progress, failure: Blocked | None) -> Decision:
    if failure is not None:
        succeeded = ConditionUpdate("Succeeded", FALSE, failure.reason, failure.message)
    else:
        succeeded = ConditionUpdate("Succeeded", TRUE, progress.reason, progress.message)
    return Decision(
        phase=progress.phase,
        readiness=_final(succeeded),
        accepted=_ACCEPTED,
        succeeded=succeeded,
        result=progress.summary,
        comparison=progress.comparison,
        regression=progress.regression,
        started_at=progress.started_at,
        finished_at=progress.finished_at,
    )


def _under_way(progress: Progress) -> Decision:
    return Decision(
        phase=progress.phase,
        readiness=working(progress.reason, progress.message),
        accepted=_ACCEPTED,
        succeeded=ConditionUpdate("Succeeded", UNKNOWN, progress.reason, progress.message),
        waiting_for_gpus=progress.message if progress.waiting_for_gpus else None,
        started_at=progress.started_at,
    )


def _pending(reason: str, message: str) -> Decision:
    return Decision(
        phase=CapturePhase.PENDING,
        readiness=working(reason, message),
        accepted=_ACCEPTED,
        succeeded=ConditionUpdate("Succeeded", UNKNOWN, reason, message),
    )


def _waiting(observed: CaptureObservation) -> Decision:
    return _pending("WaitingForDeployment", str(observed.goes_first))


def _queued(capture: Capture) -> Decision:
    return _pending(QUEUED, f"Job {capture.job_name} waits in its queue until Kueue admits it")


def _suspended(accepted: ConditionUpdate, writes: Writes) -> Decision:
    message = "spec.suspend is true: no engine and no load; what was recorded so far is kept as partial files"
    return Decision(
        phase=CapturePhase.CANCELLED,
        readiness=Readiness(TRUE, "Suspended", message),
        accepted=accepted,
        succeeded=ConditionUpdate("Succeeded", UNKNOWN, "Suspended", message),
        writes=writes,
    )


def _without_job(capture: Capture, spec: SpecDecodeCaptureSpec, observed: CaptureObservation) -> Decision:
    """Start a capture, or say what blocks it first."""
    if blocked := workload_blocked(spec):
        return _blocked(blocked)
    source = captured_deployment(
        spec.deployment, observed.deployment, gate_capture=capture.key.name if is_of_gate(capture) else None
    )
    if isinstance(source, Blocked):
        return _blocked(source)
    blocked = (
        engine_blocked(source.launch.facts, source.launch.plan)
        or claim_blocked(capture, spec.storage, observed.claim)
        or published_blocked(spec.storage, observed.claim)
        or dataset_blocked(spec, observed.dataset)
        or golden_blocked(spec, observed.golden)
    )
    if blocked is not None:
        return _blocked(blocked)
    arms = captured_arms(spec, source, observed.deployment.arms if observed.deployment else ())
    if isinstance(arms, Blocked) or observed.operator_image is None:
        return _blocked(arms if isinstance(arms, Blocked) else OPERATOR_IMAGE_UNKNOWN)
    if observed.goes_first is not None:
        return _waiting(observed)
    wants_claim = spec.storage.existing_claim is None and observed.claim is None
    words = "; ".join([_ACCEPTED.message, *arm_notes(arms)])
    engine = observed.deployment.engine if observed.deployment else None
    job = with_golden(render_job(capture, spec, source, arms, observed.operator_image), capture, spec, observed.golden)
    writes = Writes(
        claim=render_claim(capture, spec.deployment, spec.storage) if wants_claim else None,
        job=_with_notes(job, engine, words),
    )
    pending = _queued(capture) if capture.queue_labels else _pending("Starting", "the Job is created")
    return replace(pending, accepted=replace(_ACCEPTED, message=words), writes=writes, engine=engine)


def _with_notes(job: Body, engine: str | None, words: str) -> Body:
    """Return a Job that says what the status is to say of its beginning: the operator may end between the two."""
    notes = {CAPTURED_ENGINE_ANNOTATION: engine, ACCEPTED_ANNOTATION: words if words != _ACCEPTED.message else None}
    annotations = (job["metadata"].get("annotations") or {}) | {name: each for name, each in notes.items() if each}
    return {**job, "metadata": {**job["metadata"], "annotations": annotations}}


def _blocked(blocked: Blocked) -> Decision:
    status = FALSE if blocked.permanent else UNKNOWN
    return Decision(
        phase=CapturePhase.PENDING,
        readiness=readiness_of(blocked),
        accepted=ConditionUpdate("Accepted", status, blocked.reason, blocked.message),
        succeeded=ConditionUpdate("Succeeded", UNKNOWN, blocked.reason, "it has not started"),
    )


def _claim_changes(capture: Capture, storage: Storage, claim: Body | None, decision: Decision) -> Body:
    """Return what the claim that was created is to say of its owner and its files; one that is given is not changed."""
    if storage.existing_claim is not None or claim is None or claim_blocked(capture, storage, claim) is not None:
        return {}
    published = decision.succeeded.status is TRUE or decision.succeeded.reason == ALREADY_PUBLISHED
    return claim_changes(capture, storage, claim, published=published)


def blocked_by_cluster(decision: Decision, readiness: Readiness) -> Decision:
    """Return the decision where the cluster refuses one of its writes.

    A capture that could not be started takes no GPUs away meanwhile; one that ended has ended nevertheless.
    """
    if decision.succeeded.status is not UNKNOWN:
        return decision
    accepted = decision.accepted
    if decision.writes.job is not None:
        accepted = ConditionUpdate("Accepted", UNKNOWN, readiness.reason, readiness.message)
    succeeded = ConditionUpdate("Succeeded", UNKNOWN, readiness.reason, readiness.message)
    return replace(decision, phase=CapturePhase.PENDING, readiness=readiness, accepted=accepted, succeeded=succeeded)
