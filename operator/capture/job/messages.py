"""What a capture's pod says at its end: termination messages, and the last lines of its log."""

from typing import Any, Final

import msgspec

from specdecode_operator.capture.files.errors import CaptureError
from specdecode_operator.capture.job.finish import Published
from specdecode_operator.capture.validation.summary import MESSAGE_BYTES, summary_text

_MESSAGE_CHARACTERS: Final = 2000


def error_message(error: CaptureError) -> bytes:
    """Return the termination message of a failure."""
    message = error.message[:_MESSAGE_CHARACTERS]
    while len(text := msgspec.json.encode({"error": {"reason": error.reason, "message": message}})) > MESSAGE_BYTES:
        message = message[: len(message) * 3 // 4]
    return text


def success_message(published: Published) -> bytes:
    """Return the termination message of a success: ``status.summary``, small enough for Kubernetes."""
    status: dict[str, Any] = dict(published.status)
    for dropped in ("files", "perPositionPercent", "lateMs", "latencyMs"):
        text = msgspec.json.encode(status)
        if len(text) <= MESSAGE_BYTES:
            return text
        status.pop(dropped, None)
    return msgspec.json.encode(status)


def report(published: Published) -> str:
    """Return what the container's log ends with."""
    return f"{summary_text(published.summary)}\n{published.manifest.accounting.equation}\n{published.status['path']}"
