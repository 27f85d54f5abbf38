"""Read the progress, result or failure of a capture from its Job, pods and termination messages."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError

from specdecode_operator.api.base import ApiModel, Body
from specdecode_operator.api.capture import RegressionStatus
from specdecode_operator.api.capture_status import CapturePhase, CaptureSummary, ComparisonStatus, LiveCounts
from specdecode_operator.capture.gpu_sharing import in_line
from specdecode_operator.capture.observation import COLLECT, LOAD, PREPARE, Progress
from specdecode_operator.capture.volumes import SWITCH_VOLUME
from specdecode_operator.cluster.drift import is_owned
from specdecode_operator.cluster.resources import ENGINE_CONTAINER, TRAINING_LABEL
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.rollout.blocked_pods import blocked_pod, is_about_volumes, rejected_pod
from specdecode_operator.deployment.rollout.engine_errors import dead_core, error_lines, find_error, telling_line
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip
from specdecode_operator.untrusted import mapping, objects, parse_json

_TOLD_TO_STOP = frozenset({0, 137, 143})  # exit codes of an engine that was stopped because the load ended
_MESSAGE_LIMIT = 1024
_LARGEST = 2**53  # largest integer that the API server accepts; an engine's counts are untrusted
SIGNALS = {137: "was killed (exit code 137)", 143: "was terminated (exit code 143)"}
_UNTOLD = {
    137: "no cause was reported; the node may have run out of memory (see kubectl describe node)",
    143: "no cause was reported; the pod may have been deleted",
}
"""Explanations for containers that left no message, by exit code."""

_CRASHES_BELIEVED = 3  # restarts that an engine gets, as in a deployment
_ENDED = frozenset({"Succeeded", "Failed"})
_ENDING = "load or recording finished, pod is terminating"
_PARTIAL = "files recorded so far are kept as partial files"

_Status = TypeVar("_Status", bound=ApiModel)


def read_summary(pod: Body | None) -> CaptureSummary | None:
    """Return the summary in the load generator's termination message, if it is readable."""
    said = _load_said(pod)
    return parsed_status(CaptureSummary, said.get("summary", said)) if said else None


def read_regression(pod: Body | None) -> RegressionStatus | None:
    """Return the verdict against the golden capture in the termination message, if it is readable."""
    return parsed_status(RegressionStatus, _load_said(pod).get("regression"), countable=False)


def _load_said(pod: Body | None) -> Body:
    said = end_message(container_end(pod, LOAD) or container_end(pod, COLLECT)) if pod is not None else None
    return said if isinstance(said, dict) else {}


def parsed_status(kind: type[_Status], value: Any, *, countable: bool = True) -> _Status | None:
    """Return a part of the status in a termination message; None if it is unreadable."""
    try:
        parsed = kind.parse(value, newer=True)
    except ValidationError:
        return None
    return parsed if not countable or _is_countable(parsed.model_dump()) else None


def _is_countable(value: Any) -> bool:
    """Check that a status may hold all integers in a value: a capture whose status is rejected would never end."""
    if isinstance(value, dict | list):
        return all(map(_is_countable, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or abs(value) <= _LARGEST


def read_failure(pod: Body | None, job: Body) -> Blocked:
    """Return the cause of a capture's failure, from the most specific source that reports one."""
    if pod is not None:
        for container in (PREPARE, LOAD, COLLECT):
            ended = container_end(pod, container)
            if ended and ended.get("exitCode"):
                return _with_engine(pod, _failure_of(container, ended, pod))
        if lost := disrupted(pod):
            return _with_engine(pod, lost)
    conditions: list[Body] = (job.get("status") or {}).get("conditions") or []
    condition = next((each for each in conditions if each["type"] in {"Failed", "FailureTarget"}), {})
    reason, message = condition.get("reason") or "Failed", condition.get("message") or "its Job failed"
    if pod is None and condition.get("reason") == "BackoffLimitExceeded":
        # A pod that ends by itself stays as long as its Job.
        reason = "NodeLost"
        message = "pod removed: its node was drained or lost, or the pod was preempted or deleted"
    return Blocked(reason, f"{message}; {_PARTIAL}", permanent=True)


def known_failure(container: str, ended: Body, pod: Body) -> Blocked | None:
    """Return the cause of a container's failure that pod, container or kubelet report; None without one."""
    said = end_message(ended)
    error = said.get("error") if isinstance(said, dict) else None
    reason = error.get("reason") if isinstance(error, dict) else None
    # A container that a signal stopped does not know why; the pod does.
    if reason in (None, "Cancelled") and (lost := disrupted(pod) or deleted_pod(pod)):
        return lost
    if isinstance(error, dict) and reason:
        return Blocked(str(reason), clip(str(error.get("message", "")), _MESSAGE_LIMIT), permanent=True)
    if ended.get("reason") == "OOMKilled":
        return Blocked("OutOfMemory", f"{container} exceeded its memory limit and was killed", permanent=True)
    return None


def _failure_of(container: str, ended: Body, pod: Body) -> Blocked:
    if known := known_failure(container, ended, pod):
        return known
    # Without a message, Kubernetes returns the end of the log. Its lines of progress are JSON.
    code = int(ended.get("exitCode", 0))
    during, words = "", []
    for line in error_lines(str(ended.get("message") or "")):
        said = _parsed(line)
        if not isinstance(said, dict):
            words.append(line)
        elif isinstance(said.get("phase"), str):
            during = f" in phase {printable(said['phase'])}"
    why = telling_line("\n".join(words)) if "".join(words).strip() else _UNTOLD.get(code, "no message was logged")
    how = SIGNALS.get(code, f"ended with exit code {code}")
    return Blocked("CaptureFailed", f"{container} {how}{during}: {why}", permanent=True)


def disrupted(pod: Body) -> Blocked | None:
    """Return why a pod was ended, or is being ended, from outside: by its node, a deadline or the scheduler."""
    if rejected := rejected_pod(pod):
        return replace(rejected, permanent=True)
    status = pod.get("status", {})
    name = pod["metadata"]["name"]
    if status.get("reason") == "DeadlineExceeded":
        limit = "spec.deadlineSeconds and the time allowed for the engine start"
        if TRAINING_LABEL in (pod["metadata"].get("labels") or {}):
            limit = "spec.deadlineSeconds"
        if _is_collector(pod):
            limit = "the time for the recording (spec.live) and for publishing its files"
        return Blocked("DeadlineExceeded", f"{name} did not end within {limit}", permanent=True)
    for condition in status.get("conditions") or []:
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            why = condition.get("message") or condition.get("reason", "")
            return Blocked("NodeLost", f"{name} was removed from its node: {why}", permanent=True)
    if status.get("reason"):
        return Blocked(str(status["reason"]), f"{name}: {status.get('message', '')}", permanent=True)
    return None


def _with_engine(pod: Body, failure: Blocked) -> Blocked:
    """Add the last log lines of an engine that ended unexpectedly: they are usually the cause."""
    for status in _engine_statuses(pod):
        last, state = ((status.get(field) or {}).get("terminated") for field in ("lastState", "state"))
        if ended := last or (state if state and state.get("exitCode") not in _TOLD_TO_STOP else None):
            said = str(ended.get("message") or "")
            known = find_error(said)
            words = f"{known[1]}: {known[0].fix}" if known else dead_core(said) or telling_line(said)
            message = f"{failure.message}; the engine had exited with code {ended.get('exitCode')}: {words}"
            return Blocked(failure.reason, message, permanent=True)
    # After the pod has ended, the kubelet keeps only the number of earlier ends of the engine.
    again = _engine_restarts(pod)
    return replace(failure, message=f"{failure.message}; the engine was restarted ({again})") if again else failure


def _engine_statuses(pod: Body) -> list[Body]:
    statuses = pod.get("status", {}).get("initContainerStatuses") or []
    return [each for each in statuses if each["name"] == ENGINE_CONTAINER]


def _engine_restarts(pod: Body) -> int:
    return max((int(each.get("restartCount", 0)) for each in _engine_statuses(pod)), default=0)


def container_end(pod: Body, container: str) -> Body | None:
    """Return how a container of a pod ended; None if it has not."""
    status = pod.get("status", {})
    for each in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        if each["name"] == container:
            ended: Body | None = (each.get("state") or {}).get("terminated")
            return ended
    return None


def end_message(ended: Body | None) -> Any:
    """Return the JSON in the termination message of a container; None if it is unreadable."""
    return _parsed(str((ended or {}).get("message") or "null"))


def _parsed(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None


def read_progress(job: Body, pods: Sequence[Body]) -> Progress:
    """Return the progress of a capture from its Job and pods."""
    pod = newest_pod(job, pods)
    conditions = {
        each["type"]: each for each in job.get("status", {}).get("conditions") or [] if each["status"] == "True"
    }
    started_at = (pod or {}).get("status", {}).get("startTime")
    finished = conditions.keys() & {"Complete", "Failed"}
    # The Job's end may be seen before its pod's, whose last message is still to come.
    if finished and pod is not None and "deletionTimestamp" not in pod["metadata"] and not _has_ended(pod):
        phase = CapturePhase.RECORDING if collects(job) else CapturePhase.LOADING
        return Progress(phase, "Finishing", _ENDING, started_at=started_at)
    if done := conditions.get("Complete"):
        summary, comparison = read_summary(pod), parsed_status(ComparisonStatus, _load_said(pod).get("comparison"))
        names = [arm.name for arm in comparison.arms] if comparison else []
        return Progress(
            CapturePhase.SUCCEEDED,
            "Captured",
            f"files are validated and published{_reservations(summary)}",
            summary=summary,
            comparison=comparison if len(set(names)) == len(names) else None,  # the API server rejects duplicates
            regression=read_regression(pod),
            started_at=started_at,
            finished_at=job["status"].get("completionTime") or done.get("lastTransitionTime"),
        )
    if failed := conditions.get("Failed"):
        failure = read_failure(pod, job)
        return Progress(
            CapturePhase.FAILED,
            failure.reason,
            failure.message,
            failure=failure,
            started_at=started_at,
            finished_at=failed.get("lastTransitionTime"),
        )
    if pod is None:
        name = job["metadata"]["name"]
        message = f"Job {name} has no pod yet; kubectl describe job/{name} shows if a quota or a policy rejects it"
        return Progress(CapturePhase.PENDING, "WaitingForPod", message)
    return _of_pod(pod, started_at, is_live=collects(job))


def _reservations(summary: CaptureSummary | None) -> str:
    """Return the number of incomplete requests, which do not fail a capture, and the notes on engine and prompts."""
    if summary is None:
        return ""
    requests, short = summary.requests, []
    if summary.live is not None:
        short = _live_reservations(summary.live)
    elif requests.completed < requests.sent:
        counts = {
            "rejected by the engine": requests.http_rejected,
            "disconnected": requests.disconnected,
            "timed out after workload.timeoutSeconds": requests.timed_out,
        }
        why = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        words = f"{requests.sent - requests.completed} of {requests.sent} requests did not complete"
        short = [f"{words}{f' ({why})' if why else ''}; see client.jsonl for the errors"]
    return "".join(f"; {each}" for each in [*short, *(summary.engine_notes or ()), *(summary.prompt_notes or ())])


def _live_reservations(live: LiveCounts) -> list[str]:
    found = []
    if live.missing_pods:
        found.append(f"{live.missing_pods} of {live.pods + live.missing_pods} pods were not recorded")
    if live.gaps:
        lost = "an unknown number of" if live.lost_requests is None else live.lost_requests
        gaps = f"{live.gaps} gap{'s' * (live.gaps != 1)}"
        found.append(f"{gaps} in the recording, with {lost} requests; see live.lost in manifest.json")
    return found


def _has_ended(pod: Body) -> bool:
    return pod.get("status", {}).get("phase") in _ENDED


def _pods_of(job: Body, pods: Sequence[Body]) -> list[Body]:
    return [pod for pod in pods if is_owned(pod, job["metadata"]["uid"])]


def newest_pod(job: Body, pods: Sequence[Body]) -> Body | None:
    """Return the newest pod of a Job."""
    return max(_pods_of(job, pods), key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), default=None)


def is_to_start(job: Body | None, pods: Sequence[Body]) -> bool:
    """Return whether a capture still waits for its place: only then priority matters."""
    return job is None or is_suspended(job) or in_line(newest_pod(job, pods))


def deleted_pod(pod: Body) -> Blocked | None:
    """Return the failure of a pod that someone has deleted, until its Job has seen that."""
    if "deletionTimestamp" not in pod["metadata"]:
        return None
    return Blocked("NodeLost", f"{pod['metadata']['name']} was deleted", permanent=True)


def is_suspended(job: Body | None) -> bool:
    """Return whether there is a suspended Job."""
    return job is not None and bool(job["spec"].get("suspend"))


def collects(job: Body) -> bool:
    """Return whether a Job belongs to a live capture."""
    return _is_collector(mapping(mapping(job, "spec"), "template"))


def _is_collector(pod: Body) -> bool:
    return any(each.get("name") == COLLECT for each in objects(mapping(pod, "spec"), "containers"))


def runs_engine(job: Body, pod: Body | None) -> bool:
    """Return whether the engine of a capture's pod runs, or an init container that its deployment has too."""
    if pod is None or "deletionTimestamp" in pod["metadata"] or _has_ended(pod):
        return False
    if is_running(pod, LOAD) or _is(pod, LOAD, "terminated"):
        return True
    containers = ((job["spec"].get("template") or {}).get("spec") or {}).get("initContainers") or []
    ends = {each["name"] for each in containers if each.get("restartPolicy") != "Always"} - {PREPARE}
    statuses = pod["status"].get("initContainerStatuses") or []
    running = {each["name"] for each in statuses if "running" in (each.get("state") or {})}
    # A restarted engine counts only after the load has begun, because it may crash in a loop.
    return _engine_restarts(pod) == 0 if ENGINE_CONTAINER in running else bool(running & ends)


def left_pod(job: Body, pods: Sequence[Body]) -> str | None:
    """Return the name of a pod of the Job that has not ended, if there is one."""
    return min((pod["metadata"]["name"] for pod in _pods_of(job, pods) if not _has_ended(pod)), default=None)


def _unscheduled(pod: Body, *, is_live: bool) -> Progress | None:
    """Return the progress of a pod that no node takes; None if it has a node, or the scheduler has not tried."""
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            message = condition.get("message", "")
            if is_live:
                words = f"no node takes the collector's pod, which needs no GPU: {message}"
                return Progress(CapturePhase.PENDING, "Unschedulable", words)
            if is_about_volumes(message):
                words = (
                    f"no node can mount the volumes: {message}; the claims of spec.storage, the dataset and the models"
                    " must be on nodes with free GPUs; use a StorageClass with volumeBindingMode WaitForFirstConsumer"
                )
                return Progress(CapturePhase.PENDING, "WaitingForVolume", words)
            words = f"no node takes the capture's pod: {message}"
            return Progress(CapturePhase.WAITING_FOR_GPUS, "WaitingForGPUs", words, waiting_for_gpus=True)
    return None


def _of_pod(pod: Body, started_at: str | None, *, is_live: bool) -> Progress:
    if unscheduled := _unscheduled(pod, is_live=is_live):
        return unscheduled
    phase, failure = CapturePhase.RECORDING if is_live else CapturePhase.LOADING, None
    is_alive = pod.get("status", {}).get("phase") in {"Pending", "Running"}
    if "deletionTimestamp" in pod["metadata"] and (taken := disrupted(pod)):
        # The end of pods on a lost node is never reported.
        reason, message = taken.reason, f"{taken.message}; waiting for the pod to end"
    elif is_running(pod, LOAD):
        switches = any(each["name"] == SWITCH_VOLUME for each in pod.get("spec", {}).get("volumes") or [])
        reason, message = "Loading", "engine ready, load is running"
        message = "arms run and are loaded in turn" if switches else message
    elif is_running(pod, COLLECT):
        reason = "Recording"
        message = "engines are recorded while they serve; specdecode capture status NAME shows how far"
    elif _is(pod, LOAD, "terminated") or _is(pod, COLLECT, "terminated"):
        reason, message = "Finishing", _ENDING
    elif blocked := blocked_pod(pod) if is_alive else rejected_pod(pod):
        phase, reason, message = CapturePhase.STARTING, blocked.reason, blocked.message
        if blocked.permanent or _engine_restarts(pod) >= _CRASHES_BELIEVED:
            what = "collector" if is_live else "engine"
            phase, message = CapturePhase.FAILED, f"the {what} did not start: {blocked.message}"
            failure = Blocked(blocked.reason, message, permanent=True)
    else:
        phase, reason = CapturePhase.STARTING, "Starting"
        message = "starting the collector" if is_live else "checking the volume, then starting the engine"
    return Progress(phase, reason, message, failure=failure, started_at=started_at)


def is_running(pod: Body, container: str) -> bool:
    """Return whether a container of a pod runs; not an init container."""
    return _is(pod, container, "running")


def _is(pod: Body, container: str, state: str) -> bool:
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return any(each["name"] == container and state in (each.get("state") or {}) for each in statuses)
