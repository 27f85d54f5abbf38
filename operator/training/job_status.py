"""Read the progress, result or failure of a training from its Job, pods and termination messages.

Containers of the trainer's image are untrusted: the status quotes only the JSON that our bundle writes, never the log.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.training import RowCounts, TrainedHead, TrainingPhase
from specdecode_operator.capture.job_status import (
    SIGNALS,
    container_end,
    disrupted,
    end_message,
    known_failure,
    newest_pod,
    parsed_status,
)
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.rollout.blocked_pods import (
    blocked_pod,
    condition_of,
    container_statuses,
    is_about_volumes,
    rejected_pod,
)
from specdecode_operator.redaction import clip
from specdecode_operator.untrusted import mapping

EXPORT, HIDDEN_STATES, TRAIN, PUBLISH = "export", "hidden-states", "train", "publish"
STEPS: Final = {
    EXPORT: (TrainingPhase.EXPORTING, "exporting captured answers as rows"),
    HIDDEN_STATES: (TrainingPhase.GENERATING_HIDDEN_STATES, "generating hidden states of the rows with the target"),
    TRAIN: (TrainingPhase.TRAINING, "training the head; kubectl logs -c train shows the progress"),
    PUBLISH: (TrainingPhase.VALIDATING, "checking and publishing the head"),
}
"""Phase and message of each container, in the order in which they run."""

_FINISHING: Final = "the last step has finished, and the pod is terminating"
_MESSAGE_LIMIT: Final = 1024
_ENDED: Final = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True)
class Progress:
    """Progress of a training's Job and pod."""

    phase: TrainingPhase
    reason: str
    message: str
    waiting_for_gpus: bool = False  # unschedulable
    failure: Blocked | None = None  # why it failed
    rows: RowCounts | None = None
    head: TrainedHead | None = None
    started_at: str | None = None
    finished_at: str | None = None


def read_progress(job: Body, pods: Sequence[Body]) -> Progress:
    """Return the progress of a training from its Job and pods."""
    pod = newest_pod(job, pods)
    conditions = {
        each["type"]: each for each in mapping(job, "status").get("conditions") or [] if each["status"] == "True"
    }
    started_at = mapping(pod or {}, "status").get("startTime")
    rows = _rows(pod)
    # The end of the Job may be observed before the end of its pod, which has the last message.
    is_over = pod is None or "deletionTimestamp" in pod["metadata"] or _has_ended(pod)
    if conditions.keys() & {"Complete", "Failed"} and not is_over:
        return Progress(TrainingPhase.VALIDATING, "Finishing", _FINISHING, rows=rows, started_at=started_at)
    if done := conditions.get("Complete"):
        finished_at = mapping(job, "status").get("completionTime") or done.get("lastTransitionTime")
        return _published(pod, started_at, finished_at)
    if failed := conditions.get("Failed"):
        failure = _read_failure(pod, job)
        at = failed.get("lastTransitionTime")
        return _failed(failure, started_at, at, rows)
    if pod is None:
        name = job["metadata"]["name"]
        message = f"Job {name} has no pod yet; kubectl describe job/{name} shows if a quota or a policy rejects it"
        return Progress(TrainingPhase.PENDING, "WaitingForPod", message)
    scheduled = condition_of(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return _unscheduled(str(scheduled.get("message", "")))
    return _of_pod(pod, started_at, rows)


def _published(pod: Body | None, started_at: str | None, finished_at: str | None) -> Progress:
    said = end_message(container_end(pod, PUBLISH)) if pod is not None else None
    result = said if isinstance(said, dict) else {}
    rows, head = parsed_status(RowCounts, result.get("rows")), parsed_status(TrainedHead, result.get("head"))
    if head is None:
        message = "step publish ended without a readable result; all files stay in the claim: create another training"
        return _failed(Blocked("ResultUnreadable", message, permanent=True), started_at, finished_at, rows)
    message = f"head is published in the claim: {head.path}"
    return Progress(TrainingPhase.JUDGING, "HeadPublished", message, False, None, rows, head, started_at, finished_at)


def _failed(failure: Blocked, started_at: str | None, at: str | None, rows: RowCounts | None) -> Progress:
    return Progress(
        TrainingPhase.FAILED,
        failure.reason,
        failure.message,
        failure=failure,
        rows=rows,
        started_at=started_at,
        finished_at=at,
    )


def _rows(pod: Body | None) -> RowCounts | None:
    """Return the counts in the termination message of the export, if it has ended and reports them."""
    said = end_message(container_end(pod, EXPORT)) if pod is not None else None
    return parsed_status(RowCounts, said.get("rows")) if isinstance(said, dict) else None


def _read_failure(pod: Body | None, job: Body) -> Blocked:
    """Return the cause of a training's failure, from the most specific source that reports one."""
    if pod is not None:
        for container in STEPS:
            ended = container_end(pod, container)
            if ended and ended.get("exitCode"):
                return _failure_of(container, ended, pod)
        if lost := disrupted(pod):
            return lost
    conditions: list[Body] = mapping(job, "status").get("conditions") or []
    condition: Body = next((each for each in conditions if each["type"] in {"Failed", "FailureTarget"}), {})
    if pod is None and condition.get("reason") == "BackoffLimitExceeded":
        # A pod that ends on its own is kept as long as its Job.
        message = "pod was removed: its node was drained or lost, or the pod was preempted or deleted"
        return Blocked("NodeLost", message, permanent=True)
    reason, message = condition.get("reason") or "Failed", condition.get("message") or "the Job failed"
    return Blocked(reason, clip(message, _MESSAGE_LIMIT), permanent=True)


def _failure_of(container: str, ended: Body, pod: Body) -> Blocked:
    if known := known_failure(container, ended, pod):
        return known
    code = int(ended.get("exitCode", 0))
    how = SIGNALS.get(code, f"ended with exit code {code}")
    fix = f"see kubectl logs -c {container} of pod {pod['metadata']['name']}"
    return Blocked("TrainingFailed", f"{container} {how} and left no message; {fix}", permanent=True)


def _of_pod(pod: Body, started_at: str | None, rows: RowCounts | None) -> Progress:
    if "deletionTimestamp" in pod["metadata"] and (taken := disrupted(pod)):
        message = f"{taken.message}; waiting for the pod to end"
        return Progress(TrainingPhase.PENDING, taken.reason, message, started_at=started_at)
    states = {each["name"]: each.get("state") or {} for each in container_statuses(pod)}
    running = next((name for name in STEPS if "running" in states.get(name, {})), None)
    if running is not None:
        phase, message = STEPS[running]
        return Progress(phase, phase.value, message, rows=rows, started_at=started_at)
    failing = next((name for name in STEPS if mapping(states.get(name, {}), "terminated").get("exitCode")), None)
    # The phase between two containers is that of the next one.
    ended = [name for name in STEPS if "terminated" in states.get(name, {})]
    phase = next((STEPS[name][0] for name in STEPS if name not in ended), TrainingPhase.VALIDATING)
    if failing is not None:
        retry = _failure_of(failing, states[failing]["terminated"], pod)
        message = f"this attempt failed ({retry.reason}): {retry.message}"
        return Progress(STEPS[failing][0], "Retrying", message, rows=rows, started_at=started_at)
    if blocked := rejected_pod(pod) if _has_ended(pod) else blocked_pod(pod):
        return Progress(phase, blocked.reason, blocked.message, rows=rows, started_at=started_at)
    if PUBLISH in ended:
        return Progress(phase, "Finishing", _FINISHING, rows=rows, started_at=started_at)
    message = "pod is starting" if not ended else f"step {ended[-1]} has ended, and the next step is starting"
    return Progress(phase if ended else TrainingPhase.PENDING, "Starting", message, rows=rows, started_at=started_at)


def _unscheduled(message: str) -> Progress:
    if is_about_volumes(message):
        words = (
            f"no node can mount the volumes: {message}: a node with free GPUs must be able to mount the claims of"
            " spec.storage, the captures and the models; use a StorageClass with volumeBindingMode WaitForFirstConsumer"
        )
        return Progress(TrainingPhase.PENDING, "WaitingForVolume", words)
    words = f"no node can run the pod: {message}"
    return Progress(TrainingPhase.PENDING, "WaitingForGPUs", words, waiting_for_gpus=True)


def _has_ended(pod: Body) -> bool:
    return mapping(pod, "status").get("phase") in _ENDED
