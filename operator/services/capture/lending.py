"""Which capture has the GPUs of a deployment for the time being.

Nothing is stored: it follows from the captures that there are, so that the
deployment has its GPUs back as soon as the capture ended, was suspended or
deleted, whatever became of the operator meanwhile.
"""

from collections.abc import Iterable

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import DuringCapture
from specdecode_operator.api.status import ConditionStatus
from specdecode_operator.services.capture.subject import Capture, read_capture


def borrower(captures: Iterable[Body]) -> str | None:
    """Return the name of the first of a deployment's captures that has its GPUs; None where it keeps them."""
    return next((body["metadata"]["name"] for body in captures if _borrows(body)), None)


def _borrows(body: Body) -> bool:
    if "deletionTimestamp" in body["metadata"]:
        return False
    capture = read_capture(body)
    asks = capture.spec.get("deploymentDuringCapture") == DuringCapture.SUSPEND and not capture.spec.get("suspend")
    return asks and capture.ended is None and _is_accepted(capture)


def _is_accepted(capture: Capture) -> bool:
    """Whether nothing but the GPUs is missing: a capture that is refused takes nobody's away."""
    return any(each.type == "Accepted" and each.status is ConditionStatus.TRUE for each in capture.status.conditions)
