"""Which capture has the GPUs of a deployment for the time being.

It follows from the captures that exist, so the deployment gets its GPUs back as soon as the capture ended, was
suspended or deleted, or gave them back, whatever became of the operator meanwhile.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import DuringCapture
from specdecode_operator.capture.control.capture import has_ended
from specdecode_operator.kube.untyped import mapping

_ENDED: Final = frozenset({"Succeeded", "Failed"})
LATE_AT_MOST: Final = timedelta(minutes=5)
"""As long as Kubernetes waits for a node that does not answer before it takes its pods away."""

QUEUED: Final = "Queued"
"""Reason of a capture whose Job waits in a queue, which may take for ever."""


def preempting_capture(captures: Iterable[Body]) -> str | None:
    """Return the name of the capture that has the GPUs of a deployment, the first to borrow them; None if none has.

    ``captures`` are those of one deployment. Their statuses are not parsed: all captures of the cluster are asked.
    """
    holders = [(str(_borrow(body)["since"]), str(body["metadata"]["name"])) for body in captures if _holds(body)]
    return min(holders)[1] if holders else None


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
    return should_be_gone is None or now < datetime.fromisoformat(should_be_gone) + LATE_AT_MOST


def _holds(body: Body) -> bool:
    spec, borrow = body.get("spec") or {}, _borrow(body)
    if "deletionTimestamp" in body["metadata"] or not borrows(spec) or spec.get("suspend"):
        return False
    return bool(borrow.get("since")) and not borrow.get("returnedAt") and not has_ended(body)


def _borrow(body: Body) -> Body:
    return mapping(mapping(body, "status"), "borrow")
