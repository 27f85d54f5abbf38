"""Decide the desired objects and the status of one training.

This module does no I/O: the reconciler passes in the observed state and carries out the decision.
"""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture_status import SpecDecodeCaptureStatus
from specdecode_operator.api.spec_problems import parsed_spec
from specdecode_operator.api.training import DEFAULT_SIZE, SpecDecodeTrainingSpec
from specdecode_operator.api.training_status import TrainedHead, TrainingPhase
from specdecode_operator.capture import volumes
from specdecode_operator.capture.gpu_sharing import in_line
from specdecode_operator.capture.job_status import is_suspended, newest_pod
from specdecode_operator.capture.observation import has_ended
from specdecode_operator.capture.preconditions import captured_deployment
from specdecode_operator.cluster.clock import is_ahead, told_ahead
from specdecode_operator.deployment.conditions import OPERATOR_IMAGE_UNKNOWN, TRUE, UNKNOWN, Blocked, ConditionUpdate
from specdecode_operator.deployment.rollout.readiness import Readiness, readiness_of, working
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.training import preconditions, status
from specdecode_operator.training.job_manifest import TrainingInputs, render_job
from specdecode_operator.training.job_status import read_progress
from specdecode_operator.training.judge import better, is_forged, judging_capture
from specdecode_operator.training.observation import Training, TrainingObservation
from specdecode_operator.training.trainer_args import arguments_blocked

_TIME: Final = "%Y-%m-%dT%H:%M:%SZ"
_WAITING: Final = "WaitingForDeployment"


@dataclass(frozen=True)
class References:
    """Names of the objects that a training's spec refers to and that it does not own."""

    captures: tuple[str, ...] = ()
    claim: str | None = None
    rows_config_map: str | None = None
    rows_claim: str | None = None
    head_claim: str | None = None


def references_of(training: Training) -> References:
    """Return the references of a training; empty if its spec is invalid."""
    try:
        spec = SpecDecodeTrainingSpec.parse(training.spec, newer=True)
    except ValidationError:
        return References()
    rows, head = spec.dataset, spec.from_
    config_map = rows.config_map if rows else None
    claims = [each.persistent_volume_claim if each else None for each in (rows, head)]
    return References(
        tuple(spec.captures),
        volumes.claim_of(training, spec.storage),
        config_map.name if config_map else None,
        *(each.claim_name if each else None for each in claims),
    )


def decide(training: Training, observed: TrainingObservation, now: datetime) -> status.Decision:
    """Return the next writes and the status of a training."""
    try:
        spec = parsed_spec(SpecDecodeTrainingSpec, training.spec, newer=True)
    except InvalidSpecError as error:
        invalid = Blocked("Invalid", "; ".join(map(str, error.problems)), permanent=True)
        return _with_known(training, status.blocked_decision(invalid))
    decision = _with_known(training, _next_step(training, spec, observed))
    if decision.phase in (TrainingPhase.COMPLETE, TrainingPhase.FAILED) and decision.finished_at is None:
        decision = replace(decision, finished_at=now.strftime(_TIME))
    decision = _without_times_ahead(training, decision, now)
    changes: Body = {}
    storage = spec.storage
    # A claim of the user is never changed.
    if not storage.existing_claim and observed.claim and not volumes.claim_blocked(training, storage, observed.claim):
        # Label the claim only after the status has the head, because no training can start on a labelled claim.
        is_recorded = decision.succeeded.status is TRUE and training.trained is not None
        published = is_recorded or decision.succeeded.reason == volumes.ALREADY_PUBLISHED
        changes = volumes.claim_changes(training, storage, observed.claim, published=published)
    return replace(
        decision,
        claim=volumes.claim_of(training, storage),
        promoted=observed.promoted,
        writes=replace(decision.writes, claim_metadata=changes),
    )


def _with_known(training: Training, decision: status.Decision) -> status.Decision:
    """Fill gaps in the decision from the recorded status, because pods and captures may be deleted."""
    known = training.status
    return replace(
        decision,
        claim=decision.claim or known.claim,
        rows=decision.rows or known.rows,
        head=decision.head or known.head,
        verdict=decision.verdict or known.verdict,
        started_at=known.started_at or decision.started_at,
        finished_at=known.finished_at or decision.finished_at,
    )


def _without_times_ahead(training: Training, decision: status.Decision, now: datetime) -> status.Decision:
    """Replace future times of pod and Job, whose clocks may be ahead, with the recorded time or now."""
    times: dict[str, str | None] = {}
    told = []
    for field, name in (("started_at", "status.startedAt"), ("finished_at", "status.finishedAt")):
        time, recorded = getattr(decision, field), getattr(training.status, field)
        if time and is_ahead(time, now):
            told += [] if recorded else [told_ahead(name, time, now)]
            time = recorded or now.strftime(_TIME)
        times[field] = time
    return replace(decision, started_at=times["started_at"], finished_at=times["finished_at"], times_ahead=tuple(told))


def internal_error(training: Training, error: Exception) -> status.Decision:
    """Return the decision for an object on which the operator failed."""
    message = f"Internal error in the operator ({type(error).__name__}); report it with the operator's log"
    return not_observed(training, Blocked("InternalError", message))


def not_observed(training: Training, blocked: Blocked) -> status.Decision:
    """Return the decision for an object that could not be fully observed."""
    decision = _with_known(training, status.blocked_decision(blocked))
    return decision if training.trained is None else _trained(training, decision)


def _trained(training: Training, decision: status.Decision) -> status.Decision:
    """Return the decision with the conditions that a training keeps after its Job has ended."""
    return replace(
        decision,
        phase=training.status.phase or decision.phase,
        accepted=status.ACCEPTED,
        succeeded=training.recorded("Succeeded") or decision.succeeded,
        better=training.recorded("Better") or decision.better,
    )


def _next_step(training: Training, spec: SpecDecodeTrainingSpec, observed: TrainingObservation) -> status.Decision:
    if training.has_ended:
        return _ended(training, observed)
    trained, head = training.trained, training.status.head
    if trained is not None and trained.status is TRUE and head is not None:
        return _judging(training, spec, observed, head)
    if observed.job is not None:
        return _with_job(training, spec, observed, observed.job)
    if spec.suspend:
        accepted = ConditionUpdate("Accepted", UNKNOWN, "Suspended", "Checked when the training starts")
        return status.suspended(accepted, status.Writes())
    return _without_job(training, spec, observed)


def _ended(training: Training, observed: TrainingObservation) -> status.Decision:
    """Return the recorded end, and remove a Job that still runs. A finished Job stays for its logs."""
    conditions = (observed.job or {}).get("status", {}).get("conditions") or []
    is_finished = any(each["type"] in {"Complete", "Failed"} and each["status"] == "True" for each in conditions)
    writes = status.Writes(remove_job=observed.job is not None and not is_finished)
    recorded = _trained(training, status.pending("Unknown", ""))
    return replace(recorded, readiness=status.end_of(recorded), writes=writes)


def _with_job(
    training: Training, spec: SpecDecodeTrainingSpec, observed: TrainingObservation, job: Body
) -> status.Decision:
    progress = read_progress(job, observed.pods)
    if progress.failure is not None:
        failure = volumes.with_claim(training, spec.storage, progress.failure) or progress.failure
        return status.finished(progress, failure)
    if progress.head is not None:
        # Ignore the path in the result, because it is untrusted.
        folder = f"{training.key.namespace}/{training.key.name}/head"
        head = progress.head.model_copy(update={"path": folder})
        # Write the result to the status before the measurement begins, because only the pod has it.
        return replace(_published(head), rows=progress.rows, head=head, started_at=progress.started_at)
    if spec.suspend:
        settled = is_suspended(job) and not training.queue_labels
        decision = status.suspended(status.ACCEPTED, status.Writes() if settled else status.withdrawn(training))
        return replace(decision, rows=progress.rows, started_at=progress.started_at)
    if is_suspended(job):
        return _resumed(training, observed)
    if observed.goes_first is not None and in_line(newest_pod(job, observed.pods)):
        return replace(status.pending(_WAITING, observed.goes_first), writes=status.withdrawn(training))
    return status.under_way(progress)


def _resumed(training: Training, observed: TrainingObservation) -> status.Decision:
    """Start a suspended Job, unless Kueue or engines go first."""
    if training.queue_labels:
        return status.queued(training)
    if observed.goes_first is not None:
        return status.pending(_WAITING, observed.goes_first)
    return replace(status.pending("Starting", "Job is starting"), writes=status.Writes(job_suspended=False))


def _published(head: TrainedHead) -> status.Decision:
    """Return the decision for a published head that is not measured yet."""
    return status.Decision(
        phase=TrainingPhase.JUDGING,
        readiness=working("Judging", "Measuring the head on held-out prompts"),
        accepted=status.ACCEPTED,
        succeeded=ConditionUpdate("Succeeded", TRUE, "HeadPublished", f"Head is published in the claim: {head.path}"),
        better=status.NOT_YET_JUDGED,
    )


def _judging(
    training: Training, spec: SpecDecodeTrainingSpec, observed: TrainingObservation, head: TrainedHead
) -> status.Decision:
    """Measure the published head, or end without a measurement."""
    decision = _published(head)
    if not spec.judgement.enabled:
        message = "spec.judgement.enabled is false, so the head was not measured"
        return _complete(decision, ConditionUpdate("Better", UNKNOWN, status.NOT_JUDGED, message))
    live = observed.judging
    if live is not None and is_forged(live, training, spec):
        message = f"capture {live['metadata']['name']} was not created by the operator: delete it to measure the head"
        blocked = Blocked("ChildNameConflict", message, permanent=True)
        return replace(decision, readiness=readiness_of(blocked))
    if spec.suspend:
        is_stopped = live is not None and _is_stopped(live)
        message = "spec.suspend is true: the measurement of the published head is stopped"
        return replace(
            decision,
            phase=TrainingPhase.SUSPENDED,
            readiness=Readiness(TRUE, "Suspended", message),
            better=ConditionUpdate("Better", UNKNOWN, "Suspended", message),
            writes=status.Writes(resumed_capture=None if live is None or is_stopped else (live, True)),
        )
    if live is None and observed.written is None:
        message = f"spec.deployment: {spec.deployment}: not found, or its spec is invalid; the measurement needs it"
        return replace(decision, readiness=working(_WAITING, message))
    if live is None:
        assert observed.written is not None  # noqa: S101  checked above
        capture = judging_capture(training, spec, head, observed.written, observed.served)
        return replace(decision, writes=status.Writes(capture=capture))
    return _measured(decision, live)


def _measured(decision: status.Decision, live: Body) -> status.Decision:
    """Return the progress or the verdict of the capture that measures the head."""
    if has_ended(live):
        update, verdict = better(live)
        return replace(_complete(decision, update), verdict=verdict)
    resumed = status.Writes(resumed_capture=(live, False) if _is_stopped(live) else None)
    message = f"Capture {live['metadata']['name']} measures the head: {_progress_of(live)}"
    return replace(
        decision,
        readiness=working("Judging", message),
        better=ConditionUpdate("Better", UNKNOWN, "Judging", message),
        writes=resumed,
    )


def _is_stopped(capture: Body) -> bool:
    return bool((capture.get("spec") or {}).get("suspend"))


def _progress_of(capture: Body) -> str:
    """Return the progress of a capture that has not ended."""
    try:
        known = SpecDecodeCaptureStatus.parse(capture.get("status") or {}, newer=True)
    except ValidationError:
        known = SpecDecodeCaptureStatus()
    ready = next((each for each in known.conditions if each.type == "Ready"), None)
    return f"{ready.reason}: {ready.message}" if ready is not None else "not started"


def _complete(decision: status.Decision, update: ConditionUpdate) -> status.Decision:
    ended = replace(decision, phase=TrainingPhase.COMPLETE, better=update)
    return replace(ended, readiness=status.end_of(ended))


def _without_job(training: Training, spec: SpecDecodeTrainingSpec, observed: TrainingObservation) -> status.Decision:
    """Start a training, or report the reason why it cannot start."""
    source = captured_deployment(spec.deployment, observed.deployment)
    if not isinstance(source, Blocked):
        source = (
            preconditions.deployment_blocked(source)
            or arguments_blocked(spec.trainer.args)
            or preconditions.trainer_blocked(spec, source)
            or preconditions.rows_blocked(spec, observed)
            or preconditions.head_blocked(spec, source, observed.starting_head)
            or volumes.claim_blocked(training, spec.storage, observed.claim)
            or volumes.published_blocked(training, spec.storage, observed.claim)
            or preconditions.claim_too_small(training, spec, source, observed)
            or _in_use(training, spec, observed.rival)
            or source
        )
    if isinstance(source, Blocked) or observed.operator_image is None:
        return status.blocked_decision(source if isinstance(source, Blocked) else OPERATOR_IMAGE_UNKNOWN)
    if observed.goes_first is not None:
        return status.pending(_WAITING, observed.goes_first)
    wants_claim = spec.storage.existing_claim is None and observed.claim is None
    claim = volumes.render_claim(training, spec.deployment, spec.storage, DEFAULT_SIZE) if wants_claim else None
    captures = tuple(body for name in spec.captures if (body := observed.captures.get(name)) is not None)
    inputs = TrainingInputs(captures, preconditions.trainer_gpus(spec, source))
    job = render_job(training, spec, source, inputs, observed.operator_image)
    waiting = status.queued(training) if training.queue_labels else status.pending("Starting", "Job is being created")
    return replace(waiting, writes=status.Writes(claim=claim, job=job))


def _in_use(training: Training, spec: SpecDecodeTrainingSpec, rival: str | None) -> Blocked | None:
    return preconditions.claim_in_use(volumes.claim_of(training, spec.storage), rival) if rival else None


def blocked_by_cluster(decision: status.Decision, readiness: Readiness) -> status.Decision:
    """Return the decision after the cluster rejected a write."""
    if decision.succeeded.status is TRUE:
        if decision.writes.capture is None:
            return decision
        better_ = ConditionUpdate("Better", UNKNOWN, readiness.reason, readiness.message)
        return replace(decision, readiness=readiness, better=better_)
    if decision.succeeded.status is not UNKNOWN:
        return decision
    accepted = decision.accepted
    if decision.writes.job is not None:
        accepted = ConditionUpdate("Accepted", UNKNOWN, readiness.reason, readiness.message)
    return replace(
        decision,
        phase=TrainingPhase.PENDING,
        readiness=readiness,
        accepted=accepted,
        succeeded=ConditionUpdate("Succeeded", UNKNOWN, readiness.reason, readiness.message),
    )
