"""Termination messages of a capture's pod: a summary, or why there is none."""

from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.golden import RegressionStatus
from specdecode_operator.api.status.capture import CaptureSummary
from specdecode_operator.api.status.comparison import ComparisonStatus
from specdecode_operator.capture.control.job import LOAD, PREPARE
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.deployment.pods.engine_errors import dead_core, find_error, telling_line
from specdecode_operator.deployment.pods.last_words import lines_of
from specdecode_operator.deployment.pods.rejected_pods import rejected_pod
from specdecode_operator.deployment.spec.pod_template_merge import ENGINE_CONTAINER
from specdecode_operator.documents.json_text import parse_json
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip

_TOLD_TO_STOP = frozenset({0, 137, 143})
"""Exit codes of an engine that ended because the load did."""

_TOLD_BY_SIGNAL = "Cancelled"
"""What the load generator says when it was told to stop."""

_ATTEMPTS_USED_UP = "BackoffLimitExceeded"
"""Reason of a Job that failed because its pods did."""

_MESSAGE_LIMIT = 1024

_LARGEST = 2**53
"""Of a whole number, as the API server takes it; engines say how many tokens they made, and may say anything."""

_SIGNALS = {137: "was killed (exit code 137)", 143: "was told to end (exit code 143)"}
"""What exit codes of containers mean that a signal ended."""

_UNTOLD = {
    137: "nobody said why: its node may have run out of memory (kubectl describe node tells), or somebody killed it",
    143: "nobody said why: its pod may have been deleted",
}
"""What is to be said where the container could not."""


def read_summary(pod: Body | None) -> CaptureSummary | None:
    """Return the summary in the load generator's termination message, if it can be read."""
    said = _said(_ended(pod, LOAD)) if pod is not None else None
    if not isinstance(said, dict):
        return None
    try:
        summary = CaptureSummary.parse(said.get("summary", said), newer=True)
    except ValidationError:
        return None
    return summary if _is_countable(summary.model_dump()) else None


def read_comparison(pod: Body | None) -> ComparisonStatus | None:
    """Return what the load generator's termination message says of several arms, if it can be read."""
    said = _said(_ended(pod, LOAD)) if pod is not None else None
    if not isinstance(said, dict) or "comparison" not in said:
        return None
    try:
        comparison = ComparisonStatus.parse(said["comparison"], newer=True)
    except ValidationError:
        return None
    names = [arm.name for arm in comparison.arms]
    # The API server takes no two of one name.
    return comparison if len(set(names)) == len(names) and _is_countable(comparison.model_dump()) else None


def read_regression(pod: Body | None) -> RegressionStatus | None:
    """Return how a capture was judged by a golden one, if its termination message tells."""
    said = _said(_ended(pod, LOAD)) if pod is not None else None
    try:
        return RegressionStatus.parse(said.get("regression"), newer=True) if isinstance(said, dict) else None
    except ValidationError:
        return None


def _is_countable(value: Any) -> bool:
    """Whether a status may hold all numbers of a value: a capture whose status is refused would never end."""
    if isinstance(value, dict | list):
        return all(map(_is_countable, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or abs(value) <= _LARGEST


def read_failure(pod: Body | None, job: Body) -> Blocked:
    """Return why a capture failed, in the words of what knows most about it."""
    if pod is not None:
        for container in (PREPARE, LOAD):
            ended = _ended(pod, container)
            if ended and ended.get("exitCode"):
                return _with_engine(pod, _failure_of(container, ended, pod))
        if lost := disrupted(pod):
            return _with_engine(pod, lost)
    condition = next((each for each in _conditions(job) if each["type"] in {"Failed", "FailureTarget"}), {})
    if pod is None and condition.get("reason") == _ATTEMPTS_USED_UP:
        # A pod that ends by itself stays for as long as its Job.
        message = "its pod was taken away: its node was drained or lost, or it was preempted or deleted"
        return Blocked("NodeLost", f"{message}; what was recorded is kept as partial files", permanent=True)
    reason, message = condition.get("reason") or "Failed", condition.get("message") or "its Job failed"
    return Blocked(reason, f"{message}; what was recorded is kept as partial files", permanent=True)


def _failure_of(container: str, ended: Body, pod: Body) -> Blocked:
    said = _said(ended)
    error = said.get("error") if isinstance(said, dict) else None
    reason = error.get("reason") if isinstance(error, dict) else None
    # One that was told to stop does not know why, and who ended its pod does.
    if reason in (None, _TOLD_BY_SIGNAL) and (lost := disrupted(pod)):
        return lost
    if isinstance(error, dict) and reason:
        return Blocked(str(reason), clip(str(error.get("message", "")), _MESSAGE_LIMIT), permanent=True)
    if ended.get("reason") == "OOMKilled":
        return Blocked("OutOfMemory", f"{container} needed more memory than its limit and was killed", permanent=True)
    return Blocked("CaptureFailed", _last_words(container, ended), permanent=True)


def _last_words(container: str, ended: Body) -> str:
    """Return how a container ended that left no message: killed, or by an error that nobody expected.

    Kubernetes then hands over the end of its log, whose lines of progress are for programs.
    """
    code = int(ended.get("exitCode", 0))
    how = _SIGNALS.get(code, f"ended with exit code {code}")
    phase, words = None, []
    for line in lines_of(str(ended.get("message") or "")):
        said = _parsed(line)
        if not isinstance(said, dict):
            words.append(line)
        elif isinstance(said.get("phase"), str):
            phase = printable(said["phase"])
    during = f" in phase {phase}" if phase else ""
    why = telling_line("\n".join(words)) if "".join(words).strip() else _UNTOLD.get(code, "it said nothing")
    return f"{container} {how}{during}: {why}"


def disrupted(pod: Body) -> Blocked | None:
    """Return why a pod was ended, or is being ended, from outside: by its node, a deadline or the scheduler."""
    if rejected := rejected_pod(pod):
        return replace(rejected, permanent=True)
    status = pod.get("status", {})
    name = pod["metadata"]["name"]
    if status.get("reason") == "DeadlineExceeded":
        message = f"{name} did not end within spec.deadlineSeconds and the time that an engine may take to start"
        return Blocked("DeadlineExceeded", message, permanent=True)
    for condition in status.get("conditions") or []:
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            why = condition.get("message") or condition.get("reason", "")
            return Blocked("NodeLost", f"{name} was taken from its node: {why}", permanent=True)
    if status.get("reason"):
        return Blocked(str(status["reason"]), f"{name}: {status.get('message', '')}", permanent=True)
    return None


def _with_engine(pod: Body, failure: Blocked) -> Blocked:
    """Add the engine's last words where it died of itself: they are the cause more often than not."""
    ended = _engine_death(pod)
    if ended is None:
        # When its pod has ended, the kubelet keeps no word of an earlier end of the engine but their number.
        again = engine_restarts(pod)
        return replace(failure, message=f"{failure.message}; the engine was restarted ({again})") if again else failure
    said = str(ended.get("message") or "")
    known = find_error(said)
    words = f"{known[1]}: {known[0].fix}" if known else dead_core(said) or telling_line(said)
    return Blocked(
        failure.reason, f"{failure.message}; the engine had ended with {ended.get('exitCode')}: {words}", True
    )


def engine_restarts(pod: Body) -> int:
    """Return how often the engine was started again."""
    statuses = pod.get("status", {}).get("initContainerStatuses") or []
    return max((int(each.get("restartCount", 0)) for each in statuses if each["name"] == ENGINE_CONTAINER), default=0)


def _engine_death(pod: Body) -> Body | None:
    for status in pod.get("status", {}).get("initContainerStatuses") or []:
        if status["name"] == ENGINE_CONTAINER:
            for state in (status.get("lastState") or {}, status.get("state") or {}):
                ended: Body | None = state.get("terminated")
                if ended and (state is not status.get("state") or ended.get("exitCode") not in _TOLD_TO_STOP):
                    return ended
    return None


def _ended(pod: Body, container: str) -> Body | None:
    status = pod.get("status", {})
    for each in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        if each["name"] == container:
            ended: Body | None = (each.get("state") or {}).get("terminated")
            return ended
    return None


def _said(ended: Body | None) -> Any:
    return _parsed(str((ended or {}).get("message") or "null"))


def _parsed(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None


def _conditions(body: Body) -> list[Body]:
    return (body.get("status") or {}).get("conditions") or []
