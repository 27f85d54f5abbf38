"""Read the progress, result or failure of a capture from its Job, pods and termination messages."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import RegressionStatus
from specdecode_operator.api.capture_status import CapturePhase, CaptureSummary, ComparisonStatus
from specdecode_operator.capture.gpu_sharing import in_line
from specdecode_operator.capture.job_manifest import LOAD, PREPARE, SWITCH_VOLUME
from specdecode_operator.capture.observation import Progress
from specdecode_operator.cluster.drift import is_owned
from specdecode_operator.cluster.resources import ENGINE_CONTAINER
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.rollout.blocked_pods import blocked_pod, is_about_volumes, rejected_pod
from specdecode_operator.deployment.rollout.engine_errors import dead_core, error_lines, find_error, telling_line
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip
from specdecode_operator.untrusted import parse_json

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
    for line in error_lines(str(ended.get("message") or "")):
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


_CRASHES_BELIEVED = 3
"""Starts after the first that an engine gets, as in a deployment."""

_ENDED = frozenset({"Succeeded", "Failed"})
_UNDER_WAY = "the engine serves, the load is under way"
_ENDING = "the load is over, its pod is ending"

_WHERE_GPUS_ARE = (
    "the claims of spec.storage, of a dataset and of the models must be where GPUs are free: a StorageClass with"
    " volumeBindingMode WaitForFirstConsumer sees to it"
)


def read_progress(job: Body, pods: Sequence[Body]) -> Progress:
    """Return how far the Job of a capture is."""
    pod = newest_pod(job, pods)
    conditions = {
        each["type"]: each for each in job.get("status", {}).get("conditions") or [] if each["status"] == "True"
    }
    started_at = (pod or {}).get("status", {}).get("startTime")
    finished = conditions.keys() & {"Complete", "Failed"}
    if finished and pod is not None and _is_still_running(pod):
        return Progress(CapturePhase.LOADING, "Finishing", _ENDING, started_at=started_at)
    if done := conditions.get("Complete"):
        finished_at = job["status"].get("completionTime") or done.get("lastTransitionTime")
        summary = read_summary(pod)
        message = f"files are validated and published{_shortfall(summary)}{_doubts(summary)}"
        return Progress(
            CapturePhase.SUCCEEDED,
            "Captured",
            message,
            summary=summary,
            comparison=read_comparison(pod),
            regression=read_regression(pod),
            started_at=started_at,
            finished_at=finished_at,
        )
    if failed := conditions.get("Failed"):
        failure = read_failure(pod, job)
        finished_at = failed.get("lastTransitionTime")
        return Progress(
            CapturePhase.FAILED,
            failure.reason,
            failure.message,
            failure=failure,
            started_at=started_at,
            finished_at=finished_at,
        )
    if pod is None:
        name = job["metadata"]["name"]
        message = f"Job {name} has no pod yet; where a quota or a policy refuses one, kubectl describe job/{name} tells"
        return Progress(CapturePhase.PENDING, "WaitingForPod", message)
    return _of_pod(pod, started_at)


def _shortfall(summary: CaptureSummary | None) -> str:
    """Return how many requests were not answered to the end; nothing where all were.

    The capture has succeeded all the same: what became of each request is what it was to find out.
    """
    if summary is None or (requests := summary.requests).completed >= requests.sent:
        return ""
    counts = {
        "refused by the engine": requests.http_rejected,
        "cut off": requests.disconnected,
        "given up after workload.timeoutSeconds": requests.timed_out,
    }
    why = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    short = f"{requests.sent - requests.completed} of {requests.sent} requests were not answered to the end"
    return f"; {short}{f' ({why})' if why else ''}: client.jsonl has the error of each"


def _doubts(summary: CaptureSummary | None) -> str:
    """Return what is to be known of the engine's version and of the prompts; nothing where there is no doubt."""
    notes = [*(summary.engine_notes or ()), *(summary.prompt_notes or ())] if summary else []
    return "".join(f"; {note}" for note in notes)


def _is_still_running(pod: Body) -> bool:
    """Whether the Job's end was seen before its pod's: what the pod said last is still to come."""
    ending = "deletionTimestamp" in pod["metadata"]
    return not ending and pod.get("status", {}).get("phase") not in _ENDED


def newest_pod(job: Body, pods: Sequence[Body]) -> Body | None:
    """Return the newest pod of a Job."""
    mine = [pod for pod in pods if is_owned(pod, job["metadata"]["uid"])]
    return max(mine, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), default=None)


def is_to_start(job: Body | None, pods: Sequence[Body]) -> bool:
    """Whether a capture is still to get its place: only then it matters who goes before it."""
    return job is None or is_suspended(job) or in_line(newest_pod(job, pods))


def is_suspended(job: Body | None) -> bool:
    """Whether there is a Job that has not been started, or was suspended since."""
    return job is not None and bool(job["spec"].get("suspend"))


def runs_engine(job: Body, pod: Body | None) -> bool:
    """Whether the engine of a capture's pod runs, or one of the init containers that it has in its deployment too.

    One that was restarted counts only when the load has begun: until then it may crash again and again.
    """
    if pod is None or "deletionTimestamp" in pod["metadata"] or pod.get("status", {}).get("phase") in _ENDED:
        return False
    if _is(pod, LOAD, "running") or _is(pod, LOAD, "terminated"):
        return True
    containers = ((job["spec"].get("template") or {}).get("spec") or {}).get("initContainers") or []
    ends = {each["name"] for each in containers if each.get("restartPolicy") != "Always"}
    running = [
        each for each in pod["status"].get("initContainerStatuses") or [] if "running" in (each.get("state") or {})
    ]
    if any(each["name"] == ENGINE_CONTAINER for each in running):
        return engine_restarts(pod) == 0
    return any(each["name"] in ends and each["name"] != PREPARE for each in running)


def left_pod(job: Body, pods: Sequence[Body]) -> str | None:
    """Return the name of a pod of the Job that has not ended yet, if there is one."""
    mine = [pod for pod in pods if is_owned(pod, job["metadata"]["uid"])]
    staying = [pod["metadata"]["name"] for pod in mine if pod.get("status", {}).get("phase") not in _ENDED]
    return min(staying, default=None)


def _of_pod(pod: Body, started_at: str | None) -> Progress:
    """How far a pod is that has not ended, or that its Job has not counted yet."""
    unscheduled = _unscheduled(pod)
    if unscheduled is not None:
        return unscheduled
    if "deletionTimestamp" in pod["metadata"] and (taken := disrupted(pod)):
        # Of a node that is gone nobody hears when its pods have ended.
        message = f"{taken.message}; what comes next is seen when it has ended"
        return Progress(CapturePhase.LOADING, taken.reason, message, started_at=started_at)
    if _is(pod, LOAD, "running"):
        switches = any(each["name"] == SWITCH_VOLUME for each in pod.get("spec", {}).get("volumes") or [])
        what = "each arm is started and gets its load by turns" if switches else _UNDER_WAY
        return Progress(CapturePhase.LOADING, "Loading", what, started_at=started_at)
    if _is(pod, LOAD, "terminated"):
        return Progress(CapturePhase.LOADING, "Finishing", _ENDING, started_at=started_at)
    is_alive = pod.get("status", {}).get("phase") in {"Pending", "Running"}
    blocked = blocked_pod(pod) if is_alive else rejected_pod(pod)
    if blocked is None:
        message = "the volume is looked at, then the engine starts"
        return Progress(CapturePhase.STARTING, "Starting", message, started_at=started_at)
    failure = None
    if blocked.permanent or engine_restarts(pod) >= _CRASHES_BELIEVED:
        failure = Blocked(blocked.reason, f"the engine did not start: {blocked.message}", permanent=True)
    return Progress(
        CapturePhase.FAILED if failure else CapturePhase.STARTING,
        blocked.reason,
        failure.message if failure else blocked.message,
        failure=failure,
        started_at=started_at,
    )


def _unscheduled(pod: Body) -> Progress | None:
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            message = condition.get("message", "")
            if is_about_volumes(message):
                words = f"no node can mount the volumes: {message}; {_WHERE_GPUS_ARE}"
                return Progress(CapturePhase.PENDING, "WaitingForVolume", words)
            words = f"no node takes the capture's pod: {message}"
            return Progress(CapturePhase.WAITING_FOR_GPUS, "WaitingForGPUs", words, waiting_for_gpus=True)
    return None


def _is(pod: Body, container: str, state: str) -> bool:
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return any(each["name"] == container and state in (each.get("state") or {}) for each in statuses)
