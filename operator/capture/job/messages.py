"""What a capture's pod says at its end: termination messages, and the last lines of its log."""

from typing import Any, Final

import msgspec

from specdecode_operator.capture.comparison.result import Comparison
from specdecode_operator.capture.comparison.status import comparison_status
from specdecode_operator.capture.files.errors import CaptureError
from specdecode_operator.capture.job.finish import Published
from specdecode_operator.capture.validation.summary import MESSAGE_BYTES, summary_text
from specdecode_operator.redaction import clip

_MESSAGE_CHARACTERS: Final = 2000


def error_message(error: CaptureError) -> bytes:
    """Return the termination message of a failure."""
    message = clip(error.message, _MESSAGE_CHARACTERS)
    while len(text := msgspec.json.encode({"error": {"reason": error.reason, "message": message}})) > MESSAGE_BYTES:
        message = clip(message, len(message) * 3 // 4)
    return text


def success_message(published: Published, comparison: Comparison | None = None) -> bytes:
    """Return the termination message of a success: ``status.summary``, small enough for Kubernetes.

    With several arms it is under that name, without its files, and ``status.comparison`` beside it.
    """
    status: dict[str, Any] = dict(published.status)
    compared = None
    if comparison is not None:
        del status["files"]
        compared = comparison_status(comparison)
    text = _message(status, compared)
    for dropped in ("files", "perPositionPercent", "lateMs", "latencyMs"):
        if len(text) <= MESSAGE_BYTES:
            return text
        status.pop(dropped, None)
        text = _message(status, compared)
    if comparison is not None and len(text) > MESSAGE_BYTES:
        left = MESSAGE_BYTES - len(_message(status, {}))
        return _message(status, comparison_status(comparison, left))
    return text


def _message(summary: dict[str, Any], comparison: dict[str, Any] | None) -> bytes:
    return msgspec.json.encode(summary if comparison is None else {"summary": summary, "comparison": comparison})


def comparison_report(comparison: Comparison) -> str:
    """Return what the container's log says of the arms."""
    return "\n".join(f"{arm.name}: {arm.verdict}: {arm.message}" for arm in comparison.arms if arm.verdict is not None)


def report(published: Published) -> str:
    """Return what the container's log ends with."""
    return f"{summary_text(published.summary)}\n{published.manifest.accounting.equation}\n{published.status['path']}"
