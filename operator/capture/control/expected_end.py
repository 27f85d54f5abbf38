"""When a capture should give the GPUs of a deployment back.

Like the borrowing itself, this is not stored. It follows from the capture's workload, its Job and its pod.
"""

import math
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.api.capture_workload import Pattern
from specdecode_operator.capture.control.admission import workload_blocked
from specdecode_operator.capture.control.job import LOAD, wrap_up_s
from specdecode_operator.capture.control.job_status import newest_pod
from specdecode_operator.capture.load.arrivals import expected_duration_s
from specdecode_operator.deployment.pods.readiness import Lending

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
