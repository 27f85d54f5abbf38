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
from specdecode_operator.capture.gpu_sharing import (
    LATE_AT_MOST,
    MOST_ATTEMPTS,
    backs_off,
    borrowed,
    is_held,
    overdue,
    returned,
    settled,
    watched,
)
from specdecode_operator.capture.job_manifest import LOAD, image_id_config_map, wrap_up_s
from specdecode_operator.capture.job_status import is_suspended, left_pod, newest_pod, runs_engine
from specdecode_operator.capture.load.arrivals import expected_duration_s
from specdecode_operator.capture.observation import Capture, CaptureObservation, ObservedDeployment, Progress
from specdecode_operator.capture.preconditions import workload_blocked
from specdecode_operator.capture.status import (
    ACCEPTED,
    Decision,
    Writes,
    blocked_decision,
    final,
    pending,
    queued,
    under_way,
    withdrawn,
)
from specdecode_operator.capture.volumes import mounts_blocked
from specdecode_operator.deployment.conditions import FALSE, UNKNOWN, Blocked, ConditionUpdate
from specdecode_operator.deployment.rollout.readiness import Lending, place_word
from specdecode_operator.untrusted import mapping

_USUAL_GRACE_S: Final = 30
"""What Kubernetes gives a pod to end that says nothing else."""

_BACKING_OFF: Final = "BackingOff"


@dataclass(frozen=True)
class Borrowing:
    """One look at a capture that borrows the GPUs of its deployment."""

    capture: Capture
    spec: SpecDecodeCaptureSpec
    observed: CaptureObservation
    now: datetime

    @property
    def _record(self) -> BorrowStatus:
        return self.capture.status.borrow or BorrowStatus()

    @property
    def _are_gone(self) -> bool:
        """Whether no engine of the deployment has GPUs any more."""
        deployment = self.observed.deployment
        return deployment is None or not deployment.holds_gpus

    def suspended(self, job: Body) -> Decision:
        """Return what is next while the Job has no pod yet, or none any more."""
        record = self._record
        if self.capture.queue_labels:
            # Kueue has not given it a place, or took that back.
            back = returned(record, self.now, None, self.spec.borrow_timeout_seconds) if is_held(record) else None
            return replace(queued(self.capture), borrow=back)
        if is_held(record):
            return self._suspended_with_gpus(record)
        if (waits := self.waits()) is not None:
            return waits
        borrow = watched(borrowed(record, self.now), self.now, free=self._are_gone, in_use=False)
        trial = Writes(trial_pod=trial_pod(self.capture, job))
        return replace(self._waiting_for_engines(), borrow=borrow, borrows_now=True, writes=trial)

    def _suspended_with_gpus(self, record: BorrowStatus) -> Decision:
        late, deployment = self._overdue(record), self.observed.deployment
        blocked = mounts_blocked(self.capture, self.spec, self.observed.mounted)
        if late is not None or blocked is not None:
            failure = blocked or Blocked("WaitingForDeployment", f"its pod {late}")
            return self._given_back(record, failure)
        if deployment is not None and deployment.lent_to is not None:
            back = returned(record, self.now, None, self.spec.borrow_timeout_seconds)
            return replace(_lent_to_another(deployment), borrow=back)
        record = watched(record, self.now, free=self._are_gone, in_use=False)
        if not self._are_gone:
            return replace(self._waiting_for_engines(), borrow=record)
        return replace(pending("Starting", "the Job is started"), borrow=record, writes=Writes(job_suspended=False))

    def running(self, job: Body, progress: Progress) -> Decision:
        """Return what is next while the Job is not suspended and has not ended."""
        record, pod = self._record, newest_pod(job, self.observed.pods)
        in_use, borrows_now = runs_engine(job, pod), not is_held(record)
        if borrows_now:
            if not in_use and (waits := self._not_lent()) is not None:
                return replace(waits, writes=withdrawn(self.capture))
            record = borrowed(record, self.now)
        record = watched(record, self.now, free=self._are_gone, in_use=in_use)
        if not in_use and (late := self._overdue(record)) is not None:
            failure = Blocked(progress.reason, f"its pod {late}: {progress.message}")
            return replace(self._given_back(record, failure), started_at=progress.started_at)
        image_id = Writes(image_id=image_id_config_map(self.capture, pod))
        return replace(under_way(progress), borrow=record, borrows_now=borrows_now, writes=image_id)

    def _not_lent(self) -> Decision | None:
        """Return what a Job waits for that runs though its capture has no GPUs; None if it may borrow them now.

        Kueue starts Jobs. Any other was started by somebody else, or its status was lost.
        """
        waits = self.waits()
        if waits is not None or self.capture.queue_labels:
            return waits
        return pending("Starting", "the Job is suspended until the capture has the GPUs of its deployment")

    def waits(self) -> Decision | None:
        """Return why the capture may not borrow the GPUs now; None if it may."""
        record, deployment = self._record, self.observed.deployment
        if record.failed_attempts >= MOST_ATTEMPTS:
            return self._given_up(record)
        is_lent = deployment is not None and deployment.lent_to is not None
        if backs_off(record, self.now) or (record.failed_attempts and not is_lent and not serves(deployment)):
            return pending(_BACKING_OFF, self._back_off_words(record))
        if deployment is not None and is_lent:
            return _lent_to_another(deployment)
        if left := self._left_pod():
            return pending("WaitingForCleanup", f"pod {left} of an earlier attempt has not ended; goes on when it has")
        blocked = mounts_blocked(self.capture, self.spec, self.observed.mounted)
        return None if blocked is None else blocked_decision(blocked)

    def _left_pod(self) -> str | None:
        job = self.observed.job
        return left_pod(job, self.observed.pods) if job is not None and is_suspended(job) else None

    def recorded(self, decision: Decision) -> Decision:
        """Return a decision with the record of the GPUs; one that does not keep them gives them back."""
        record, timeout_s = decision.borrow or self.capture.status.borrow, self.spec.borrow_timeout_seconds
        if decision.borrow is None and record is not None and is_held(record):
            is_over = self.spec.suspend or decision.succeeded.status is not UNKNOWN
            failure = None if is_over else Blocked(decision.readiness.reason, decision.readiness.message)
            record = returned(record, self.now, failure, timeout_s)
        if record is not None and self.spec.suspend:  # it begins anew when it goes on
            fresh = {"failed_attempts": 0, "last_failure": None, "next_attempt_at": None}
            record = record.model_copy(update=fresh)
        return replace(decision, borrow=settled(record, self.now, serves=serves(self.observed.deployment)))

    def _given_back(self, record: BorrowStatus, failure: Blocked) -> Decision:
        """Return the decision that gives the GPUs back to the engines, and takes the pod away first."""
        record = returned(record, self.now, failure, self.spec.borrow_timeout_seconds)
        if record.failed_attempts >= MOST_ATTEMPTS:
            return replace(self._given_up(record), borrow=record)
        back = pending(_BACKING_OFF, self._back_off_words(record))
        return replace(back, borrow=record, writes=withdrawn(self.capture))

    def _given_up(self, record: BorrowStatus) -> Decision:
        message = (
            f"{record.failed_attempts} attempts to start on the GPUs of deployment {self.spec.deployment} failed; the"
            f" last one: {record.last_failure}; create another capture when that is mended"
        )
        succeeded = ConditionUpdate("Succeeded", FALSE, "NotStarted", message)
        return Decision(
            phase=CapturePhase.FAILED,
            readiness=final(succeeded),
            accepted=ACCEPTED,
            succeeded=succeeded,
            writes=Writes(remove_job=True),
        )

    def _back_off_words(self, record: BorrowStatus) -> str:
        return (
            f"deployment {self.spec.deployment} has its GPUs back, because the capture did not start:"
            f" {record.last_failure}; attempt {record.failed_attempts} of {MOST_ATTEMPTS}; the next one comes after"
            f" {record.next_attempt_at}, when the deployment serves"
        )

    def _waiting_for_engines(self) -> Decision:
        deployment = self.observed.deployment
        what = place_word(None if deployment is None else _product(deployment))
        message = f"the engines of {self.spec.deployment} are ending; then the capture has their {what}"
        return pending("WaitingForDeployment", message)

    def _overdue(self, record: BorrowStatus) -> str | None:
        ending_s = _grace_s(self.observed.deployment) + int(LATE_AT_MOST.total_seconds())
        return overdue(record, self.now, timeout_s=self.spec.borrow_timeout_seconds, ending_s=ending_s)


def released(capture: Capture, decision: Decision, now: datetime) -> Decision:
    """Return a decision on a capture of which too little is known to let it keep the GPUs."""
    record = capture.status.borrow
    if record is not None and is_held(record):
        failure = Blocked(decision.readiness.reason, decision.readiness.message)
        timeout_s = capture.spec.get("borrowTimeoutSeconds")
        record = returned(record, now, failure, timeout_s if isinstance(timeout_s, int) else 0)
    return replace(decision, borrow=record)


def serves(deployment: ObservedDeployment | None) -> bool:
    """Whether a deployment has what it lent: an engine that serves, if it wants any and no other capture has them."""
    if deployment is None or not deployment.wants_engines:
        return True
    return deployment.serves or deployment.lent_to is not None


def trial_pod(capture: Capture, job: Body) -> Body:
    """Return the pod that a Job would create, to ask the API server about it."""
    template = job["spec"]["template"]
    metadata = {**mapping(template, "metadata"), "namespace": capture.key.namespace}
    # Job controllers name their pods so, and the API server fills in the rest.
    metadata = {**metadata, "generateName": f"{capture.job_name}-"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def _lent_to_another(deployment: ObservedDeployment) -> Decision:
    what = place_word(_product(deployment))
    message = f"capture {deployment.lent_to} has the {what} of deployment {deployment.key.name}; goes on when it ended"
    return pending("WaitingForDeployment", message)


def _product(deployment: ObservedDeployment) -> str | None:
    plan = deployment.desired.outcome.plan_status
    return plan.product if plan else None


def _grace_s(deployment: ObservedDeployment | None) -> int:
    """Return how long an engine may take to end."""
    workload = deployment.desired.workload if deployment is not None else None
    pod = mapping(mapping(mapping(workload or {}, "spec"), "template"), "spec")
    grace_s = pod.get("terminationGracePeriodSeconds")
    return grace_s if isinstance(grace_s, int) else _USUAL_GRACE_S


_OPEN_ENDED: Final = frozenset({Pattern.CLOSED, Pattern.MULTITURN, Pattern.RECORDED})
"""Patterns whose duration depends on the engine or on a trace, unless the phase sets one."""

_ENGINES_STOP: Final = timedelta(minutes=13)
"""How long engines may take to stop before a capture is overdue; then its pod has borrowTimeoutSeconds to start."""


def lending_to(capture: Body, job: Body | None, pods: Sequence[Body], since: datetime | None) -> Lending:
    """Return how long a capture should hold the GPUs that it borrows.

    Parameters
    ----------
    capture
        The SpecDecodeCapture.
    job
        Its Job; None before there is one.
    pods
        The pods of the capture.
    since
        When the deployment said that it lends its GPUs; None before it did.
    """
    name = capture["metadata"]["name"]
    if job is None or job["spec"].get("suspend"):
        return Lending(name, overdue_from=None if since is None else since + _start(capture))
    pod = newest_pod(job, pods) or {}
    pod_started = _time((pod.get("status") or {}).get("startTime"))
    latest = _latest_end(job, pod_started)
    try:
        spec = SpecDecodeCaptureSpec.parse(capture.get("spec") or {}, newer=True)
    except ValidationError:
        return Lending(name, latest_end=latest, overdue_from=latest)
    load_s = _load_s(spec)
    expected = None if load_s is None else _expected_end(spec, load_s, job, pod, pod_started)
    if load_s is None or expected is None or (latest is not None and expected > latest):
        return Lending(name, latest_end=latest, overdue_from=latest)
    # Answers in flight end, and files are merged and validated, after the load.
    overdue = _later(expected, wrap_up_s(math.ceil(load_s)))
    return Lending(name, expected, latest, min(filter(None, [overdue, latest]), default=None))


def _load_s(spec: SpecDecodeCaptureSpec) -> float | None:
    """Return how long the load takes, in seconds; None if the engine or a trace decides, or the workload is invalid."""
    phases = spec.workload.phases
    if any(phase.duration_seconds is None and phase.pattern in _OPEN_ENDED for phase in phases):
        return None
    return None if workload_blocked(spec) else expected_duration_s(spec.workload)


def _expected_end(
    spec: SpecDecodeCaptureSpec, load_s: float, job: Body, pod: Body, pod_started: datetime | None
) -> datetime | None:
    """Return when the load should end.

    Before it starts, or if engines are started by turns, the engine is given all the time that it may take to start.
    """
    runs = spec.starts * max(1, len(spec.arms))
    load_started = _load_started(pod)
    if load_started is not None and runs == 1:
        return _later(load_started, load_s)
    deadline_s = _pod_spec(job).get("activeDeadlineSeconds")
    if deadline_s is None:
        return None
    reserved_s = runs * (spec.deadline_seconds + wrap_up_s(spec.deadline_seconds) - load_s)
    return _later(pod_started or _job_started(job), deadline_s - reserved_s)


def _start(capture: Body) -> timedelta:
    """Return how long engines and Job may take together until the capture's pod starts."""
    try:
        spec = SpecDecodeCaptureSpec.parse(capture.get("spec") or {}, newer=True)
    except ValidationError:
        return _ENGINES_STOP
    return _ENGINES_STOP + timedelta(seconds=spec.borrow_timeout_seconds)


def _latest_end(job: Body, pod_started: datetime | None) -> datetime | None:
    """Return when the deadline of the Job, or that of its only pod, stops the capture."""
    ends = [_later(_job_started(job), job["spec"].get("activeDeadlineSeconds"))]
    if job["spec"].get("backoffLimit") == 0:
        ends.append(_later(pod_started, _pod_spec(job).get("activeDeadlineSeconds")))
    return min(filter(None, ends), default=None)


def _job_started(job: Body) -> datetime | None:
    return _time((job.get("status") or {}).get("startTime"))


def _pod_spec(job: Body) -> Body:
    spec: Body = (job["spec"].get("template") or {}).get("spec") or {}
    return spec


def _load_started(pod: Body) -> datetime | None:
    containers = (pod.get("status") or {}).get("containerStatuses") or []
    states = ((each.get("state") or {}).get("running") or {} for each in containers if each["name"] == LOAD)
    return next((_time(state.get("startedAt")) for state in states), None)


def _time(text: Any) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def _later(time: datetime | None, seconds: float | None) -> datetime | None:
    """Return a time so many seconds later; None if either is unknown or the sum is beyond the calendar."""
    if time is None or seconds is None:
        return None
    try:
        return time + timedelta(seconds=seconds)
    except OverflowError:
        return None
