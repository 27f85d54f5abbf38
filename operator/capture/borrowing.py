"""Decide when a capture borrows the GPUs of its deployment, and when it returns them.

A capture borrows the GPUs only if all other resources of its pod that the operator can see are available. If its
pod does not run on them in time, the capture returns them and tries again later. The expected time of return is not
stored; it is derived from the workload, the Job and the pod.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import Pattern, SpecDecodeCaptureSpec
from specdecode_operator.api.capture_status import BorrowStatus, CapturePhase
from specdecode_operator.capture import gpu_sharing, status
from specdecode_operator.capture.job_manifest import image_id_config_map, wrap_up_s
from specdecode_operator.capture.job_status import is_suspended, left_pod, newest_pod, runs_engine
from specdecode_operator.capture.load.arrivals import expected_duration_s
from specdecode_operator.capture.observation import LOAD, Capture, CaptureObservation, ObservedDeployment, Progress
from specdecode_operator.capture.preconditions import workload_blocked
from specdecode_operator.capture.volumes import mounts_blocked
from specdecode_operator.deployment.conditions import FALSE, UNKNOWN, Blocked, ConditionUpdate
from specdecode_operator.deployment.rollout.readiness import Lending, place_word
from specdecode_operator.untrusted import mapping

_BACKING_OFF: Final = "BackingOff"


@dataclass(frozen=True)
class Borrowing:
    """Decisions on a capture that borrows the GPUs of its deployment."""

    capture: Capture
    spec: SpecDecodeCaptureSpec
    observed: CaptureObservation
    now: datetime

    @property
    def _record(self) -> BorrowStatus:
        return self.capture.status.borrow or BorrowStatus()

    @property
    def _are_gone(self) -> bool:
        """Whether no engine of the deployment holds GPUs."""
        deployment = self.observed.deployment
        return deployment is None or not deployment.holds_gpus

    def _returned(self, record: BorrowStatus, failure: Blocked | None = None) -> BorrowStatus:
        return gpu_sharing.returned(record, self.now, failure, self.spec.borrow_timeout_seconds)

    def suspended(self, job: Body) -> status.Decision:
        """Decide while the Job has no pod yet, or no longer has one."""
        record = self._record
        if self.capture.queue_labels:
            # Kueue has not admitted the Job, or evicted it.
            return replace(
                status.queued(self.capture), borrow=self._returned(record) if gpu_sharing.is_held(record) else None
            )
        if gpu_sharing.is_held(record):
            return self._suspended_with_gpus(record)
        if (waits := self.waits()) is not None:
            return waits
        borrow = gpu_sharing.watched(
            gpu_sharing.borrowed(record, self.now), self.now, free=self._are_gone, in_use=False
        )
        trial = status.Writes(trial_pod=trial_pod(self.capture, job))
        return replace(self._waiting_for_engines(), borrow=borrow, borrows_now=True, writes=trial)

    def _suspended_with_gpus(self, record: BorrowStatus) -> status.Decision:
        late, deployment = self._overdue(record), self.observed.deployment
        failure = mounts_blocked(self.capture, self.spec, self.observed.mounted)
        if failure is not None or late is not None:
            return self._given_back(record, failure or Blocked("WaitingForDeployment", f"its pod {late}"))
        if deployment is not None and deployment.lent_to is not None:
            return replace(_lent_to_another(deployment), borrow=self._returned(record))
        record = gpu_sharing.watched(record, self.now, free=self._are_gone, in_use=False)
        if not self._are_gone:
            return replace(self._waiting_for_engines(), borrow=record)
        return replace(
            status.pending("Starting", "Job is starting"), borrow=record, writes=status.Writes(job_suspended=False)
        )

    def running(self, job: Body, progress: Progress) -> status.Decision:
        """Decide while the Job is active."""
        record, pod = self._record, newest_pod(job, self.observed.pods)
        in_use, borrows_now = runs_engine(job, pod), not gpu_sharing.is_held(record)
        if borrows_now:
            if not in_use:
                # Kueue starts Jobs. Any other Job was started by another client, or its status was lost.
                waits = self.waits()
                if waits is None and not self.capture.queue_labels:
                    message = "Job is suspended until the capture has the GPUs of its deployment"
                    waits = status.pending("Starting", message)
                if waits is not None:
                    return replace(waits, writes=status.withdrawn(self.capture))
            record = gpu_sharing.borrowed(record, self.now)
        record = gpu_sharing.watched(record, self.now, free=self._are_gone, in_use=in_use)
        if not in_use and (late := self._overdue(record)) is not None:
            failure = Blocked(progress.reason, f"its pod {late}: {progress.message}")
            return replace(self._given_back(record, failure), started_at=progress.started_at)
        image_id = status.Writes(image_id=image_id_config_map(self.capture, pod))
        return replace(status.under_way(progress), borrow=record, borrows_now=borrows_now, writes=image_id)

    def waits(self) -> status.Decision | None:
        """Return why the capture may not borrow the GPUs now; None if it may."""
        record, deployment, job = self._record, self.observed.deployment, self.observed.job
        if record.failed_attempts >= gpu_sharing.MOST_ATTEMPTS:
            return self._given_up(record)
        is_lent = deployment is not None and deployment.lent_to is not None
        if gpu_sharing.backs_off(record, self.now) or (
            record.failed_attempts and not is_lent and not serves(deployment)
        ):
            return status.pending(_BACKING_OFF, self._back_off_words(record))
        if deployment is not None and is_lent:
            return _lent_to_another(deployment)
        if job is not None and is_suspended(job) and (left := left_pod(job, self.observed.pods)):
            return status.pending(
                "WaitingForCleanup", f"pod {left} of an earlier attempt has not ended; continues when it has"
            )
        blocked = mounts_blocked(self.capture, self.spec, self.observed.mounted)
        return None if blocked is None else status.blocked_decision(blocked)

    def recorded(self, decision: status.Decision) -> status.Decision:
        """Return a decision with the record of the GPUs; a decision without a record returns them."""
        record = decision.borrow or self.capture.status.borrow
        if decision.borrow is None and record is not None and gpu_sharing.is_held(record):
            is_over = self.spec.suspend or decision.succeeded.status is not UNKNOWN
            record = self._returned(
                record, None if is_over else Blocked(decision.readiness.reason, decision.readiness.message)
            )
        if record is not None and self.spec.suspend:  # a resumed capture starts afresh
            fresh = {"failed_attempts": 0, "last_failure": None, "next_attempt_at": None}
            record = record.model_copy(update=fresh)
        return replace(decision, borrow=gpu_sharing.settled(record, self.now, serves=serves(self.observed.deployment)))

    def _given_back(self, record: BorrowStatus, failure: Blocked) -> status.Decision:
        """Return the GPUs to the engines after the pod is removed."""
        record = self._returned(record, failure)
        if record.failed_attempts >= gpu_sharing.MOST_ATTEMPTS:
            return replace(self._given_up(record), borrow=record)
        back = status.pending(_BACKING_OFF, self._back_off_words(record))
        return replace(back, borrow=record, writes=status.withdrawn(self.capture))

    def _given_up(self, record: BorrowStatus) -> status.Decision:
        message = (
            f"{record.failed_attempts} attempts to start on the GPUs of deployment {self.spec.deployment} failed; last"
            f" failure: {record.last_failure}; fix it, then create another capture"
        )
        succeeded = ConditionUpdate("Succeeded", FALSE, "NotStarted", message)
        return status.Decision(
            CapturePhase.FAILED, status.final(succeeded), status.ACCEPTED, succeeded, status.Writes(remove_job=True)
        )

    def _back_off_words(self, record: BorrowStatus) -> str:
        return (
            f"attempt {record.failed_attempts} of {gpu_sharing.MOST_ATTEMPTS} failed: {record.last_failure}; deployment"
            f" {self.spec.deployment} has its GPUs back; next attempt after {record.next_attempt_at}, when it serves"
        )

    def _waiting_for_engines(self) -> status.Decision:
        deployment = self.observed.deployment
        what = place_word(None if deployment is None else _product(deployment))
        message = f"waiting for the {what} of deployment {self.spec.deployment}, whose engines are terminating"
        return status.pending("WaitingForDeployment", message)

    def _overdue(self, record: BorrowStatus) -> str | None:
        deployment = self.observed.deployment
        workload = deployment.desired.workload if deployment is not None else None
        grace_s = mapping(mapping(mapping(workload or {}, "spec"), "template"), "spec").get(
            "terminationGracePeriodSeconds"
        )
        # 30 s is Kubernetes' default.
        ending_s = (grace_s if isinstance(grace_s, int) else 30) + int(gpu_sharing.LATE_AT_MOST.total_seconds())
        return gpu_sharing.overdue(record, self.now, timeout_s=self.spec.borrow_timeout_seconds, ending_s=ending_s)


def released(capture: Capture, decision: status.Decision, now: datetime) -> status.Decision:
    """Return a decision that releases the GPUs of a capture that could not be observed or parsed."""
    record = capture.status.borrow
    if record is not None and gpu_sharing.is_held(record):
        failure = Blocked(decision.readiness.reason, decision.readiness.message)
        timeout_s = capture.spec.get("borrowTimeoutSeconds")
        record = gpu_sharing.returned(record, now, failure, timeout_s if isinstance(timeout_s, int) else 0)
    return replace(decision, borrow=record)


def serves(deployment: ObservedDeployment | None) -> bool:
    """Return whether a deployment serves again, needs no engines, or lends its GPUs to another capture."""
    if deployment is None or not deployment.wants_engines:
        return True
    return deployment.serves or deployment.lent_to is not None


def trial_pod(capture: Capture, job: Body) -> Body:
    """Return the pod that a Job would create, for a dry run at the API server."""
    template = job["spec"]["template"]
    metadata = {
        **mapping(template, "metadata"),
        "namespace": capture.key.namespace,
        "generateName": f"{capture.job_name}-",  # as the Job controller names its pods
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def _lent_to_another(deployment: ObservedDeployment) -> status.Decision:
    what = place_word(_product(deployment))
    message = f"capture {deployment.lent_to} has the {what} of deployment {deployment.key.name}; continues when it ends"
    return status.pending("WaitingForDeployment", message)


def _product(deployment: ObservedDeployment) -> str | None:
    plan = deployment.desired.outcome.plan_status
    return plan.product if plan else None


# Patterns whose duration depends on the engine or on a trace, unless the phase sets one.
_OPEN_ENDED: Final = frozenset({Pattern.CLOSED, Pattern.MULTITURN, Pattern.RECORDED})
# Time for engines to stop before a capture is overdue; then its pod has borrowTimeoutSeconds to start.
_ENGINES_STOP: Final = timedelta(minutes=13)


def lending_to(capture: Body, job: Body | None, pods: Sequence[Body], since: datetime | None) -> Lending:
    """Return how long a capture is expected to hold the GPUs, from ``since``, when they were lent."""
    name = capture["metadata"]["name"]
    try:
        spec = SpecDecodeCaptureSpec.parse(capture.get("spec") or {}, newer=True)
    except ValidationError:
        spec = None
    if job is None or job["spec"].get("suspend"):
        start = _ENGINES_STOP + timedelta(seconds=spec.borrow_timeout_seconds if spec else 0)
        return Lending(name, overdue_from=None if since is None else since + start)
    pod = newest_pod(job, pods) or {}
    pod_started = _time((pod.get("status") or {}).get("startTime"))
    job_started = _time((job.get("status") or {}).get("startTime"))
    pod_deadline_s = ((job["spec"].get("template") or {}).get("spec") or {}).get("activeDeadlineSeconds")
    ends = [_later(job_started, job["spec"].get("activeDeadlineSeconds"))]
    if job["spec"].get("backoffLimit") == 0:  # this pod is the only one
        ends.append(_later(pod_started, pod_deadline_s))
    latest = min(filter(None, ends), default=None)
    load_s = None if spec is None else _load_s(spec)
    if spec is None or load_s is None:
        return Lending(name, latest_end=latest, overdue_from=latest)
    runs = spec.starts * max(1, len(spec.arms))
    if runs == 1 and (load_started := _load_started(pod)) is not None:
        expected = _later(load_started, load_s)
    elif pod_deadline_s is None:
        expected = None
    else:
        # Before the load, or with several starts, the engine gets all the time that it may take to start.
        reserved_s = runs * (spec.deadline_seconds + wrap_up_s(spec.deadline_seconds) - load_s)
        expected = _later(pod_started or job_started, pod_deadline_s - reserved_s)
    if expected is None or (latest is not None and expected > latest):
        return Lending(name, latest_end=latest, overdue_from=latest)
    # After the load, open requests complete, and files are merged and validated.
    late_from = _later(expected, wrap_up_s(math.ceil(load_s)))
    return Lending(name, expected, latest, min(filter(None, [late_from, latest]), default=None))


def _load_s(spec: SpecDecodeCaptureSpec) -> float | None:
    """Return the duration of the load; None if the engine or a trace decides, or the workload is invalid."""
    phases = spec.workload.phases
    if any(phase.duration_seconds is None and phase.pattern in _OPEN_ENDED for phase in phases):
        return None
    return None if workload_blocked(spec) else expected_duration_s(spec.workload)


def _load_started(pod: Body) -> datetime | None:
    containers = (pod.get("status") or {}).get("containerStatuses") or []
    states = ((each.get("state") or {}).get("running") or {} for each in containers if each["name"] == LOAD)
    return next((_time(state.get("startedAt")) for state in states), None)


def _time(text: Any) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def _later(time: datetime | None, seconds: float | None) -> datetime | None:
    """Add seconds to a time; None if either is unknown or the sum is beyond the calendar."""
    if time is None or seconds is None:
        return None
    try:
        return time + timedelta(seconds=seconds)
    except OverflowError:
        return None
