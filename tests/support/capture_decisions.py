"""What becomes of a SpecDecodeCapture, and what its status says."""

from datetime import UTC, datetime

from specdecode_operator.api.capture_status import SpecDecodeCaptureStatus
from specdecode_operator.capture.decision import decide
from specdecode_operator.capture.observation import CaptureObservation, read_capture
from specdecode_operator.capture.status import Decision, compose_status
from tests.support.captures import surroundings
from tests.support.objects import Body

NOW = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)


def decided(
    body: Body, seen: CaptureObservation | None = None, now: datetime = NOW
) -> tuple[Decision, SpecDecodeCaptureStatus]:
    """Return what is decided of a capture and its status; where nothing is given, nothing hinders it."""
    subject = read_capture(body)
    decision = decide(subject, seen or surroundings(), now)
    return decision, compose_status(subject, decision, now)


def words(status: SpecDecodeCaptureStatus) -> dict[str, tuple[str, str]]:
    """Return status and reason of each condition."""
    return {each.type: (each.status.value, each.reason) for each in status.conditions}


def after(body: Body, seen: CaptureObservation, now: datetime = NOW) -> Body:
    """The same capture with the status that it then has."""
    _, status = decided(body, seen, now)
    return {**body, "status": status.model_dump(by_alias=True, mode="json", exclude_none=True)}
