"""Reads from Job and pods how far a capture is, and what holds it up."""

from collections.abc import Sequence
from dataclasses import dataclass

from specdecode_operator.api.base import Body
from specdecode_operator.api.golden import RegressionStatus
from specdecode_operator.api.status.capture import CapturePhase, CaptureSummary
from specdecode_operator.api.status.comparison import ComparisonStatus
from specdecode_operator.capture.control.job import LOAD, PREPARE, SWITCH_VOLUME
from specdecode_operator.capture.control.serving_first import in_line
from specdecode_operator.capture.control.termination import (
    disrupted,
    engine_restarts,
    read_comparison,
    read_failure,
    read_regression,
    read_summary,
)
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.deployment.pods.blocked_pods import blocked_pod, is_about_volumes
from specdecode_operator.deployment.pods.rejected_pods import rejected_pod
from specdecode_operator.deployment.spec.pod_template_merge import ENGINE_CONTAINER
from specdecode_operator.kube.drift import is_owned

_CRASHES_BELIEVED = 3
"""Starts after the first that an engine gets, as in a deployment."""

_ENDED = frozenset({"Succeeded", "Failed"})
_UNDER_WAY = "the engine serves, the load is under way"
_ENDING = "the load is over, its pod is ending"

_WHERE_GPUS_ARE = (
    "the claims of spec.storage, of a dataset and of the models must be where GPUs are free: a StorageClass with"
    " volumeBindingMode WaitForFirstConsumer sees to it"
)


@dataclass(frozen=True)
class Progress:
    """How far a capture is."""

    phase: CapturePhase
    reason: str
    message: str
    waiting_for_gpus: bool = False  # the scheduler finds no place for it
    failure: Blocked | None = None  # why it failed, or will; what is hopeless need not go on
    summary: CaptureSummary | None = None
    comparison: ComparisonStatus | None = None
    regression: RegressionStatus | None = None

    started_at: str | None = None
    finished_at: str | None = None


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
