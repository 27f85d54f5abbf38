"""Which capture has the GPUs of a deployment for the time being.

Nothing is stored: it follows from the captures that there are, so that the
deployment has its GPUs back as soon as the capture ended, was suspended or
deleted, whatever became of the operator meanwhile.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import DuringCapture
from specdecode_operator.api.status.deployment import ConditionStatus
from specdecode_operator.capture.control.capture import Capture, read_capture

_ENDED: Final = frozenset({"Succeeded", "Failed"})
_LATE_AT_MOST: Final = timedelta(minutes=5)
"""As long as Kubernetes waits for a node that does not answer before it takes its pods away."""

QUEUED: Final = "Queued"
"""Reason of a capture whose Job waits in a queue, which may take for ever."""


def preempting_capture(captures: Iterable[Body]) -> str | None:
    """Return the name of the first of a deployment's captures that has its GPUs, if one does."""
    return next((body["metadata"]["name"] for body in captures if _preempts(body)), None)


def borrows(spec: Body) -> bool:
    """Whether a capture's spec asks for the GPUs of its deployment's engines; otherwise it keeps them running."""
    return spec.get("deploymentDuringCapture") == DuringCapture.SUSPEND


def holds_gpus(pod: Body, now: datetime) -> bool:
    """Whether a pod of a deployment keeps GPUs that a capture waits for.

    One that ended holds none, though it may stay as an object: an evicted pod does. One that should long be gone is on
    a node that does not answer, and the deployment would wait for its engines as long as the capture for the pod.
    """
    if pod.get("status", {}).get("phase") in _ENDED:
        return False
    # Kubernetes sets it to the end of the time that the pod has to end.
    should_be_gone = pod["metadata"].get("deletionTimestamp")
    return should_be_gone is None or now < datetime.fromisoformat(should_be_gone) + _LATE_AT_MOST


def _preempts(body: Body) -> bool:
    if "deletionTimestamp" in body["metadata"]:
        return False
    spec = body.get("spec") or {}
    if not borrows(spec) or spec.get("suspend"):
        return False  # before the status is parsed: all captures of the cluster are asked
    capture = read_capture(body)
    return capture.ended is None and _lacks_only_gpus(capture)


def _lacks_only_gpus(capture: Capture) -> bool:
    """Whether nothing but the GPUs is missing: a capture that is refused or waits in a queue takes nobody's away."""
    said = {each.type: each for each in capture.status.conditions}
    is_accepted = "Accepted" in said and said["Accepted"].status is ConditionStatus.TRUE
    return is_accepted and not ("Succeeded" in said and said["Succeeded"].reason == QUEUED)
