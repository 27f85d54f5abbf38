"""Why a pod does not run: read from its conditions, its containers, and their last words."""

import re

from specdecode_operator.api.base import Body
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.deployment.pods.engine_errors import dead_core, find_error, telling_line
from specdecode_operator.deployment.pods.missing_secret import told_with_field
from specdecode_operator.deployment.pods.rejected_pods import rejected_pod, rejections, told
from specdecode_operator.deployment.spec.pod_template_merge import ENGINE_CONTAINER

_SIGNALLED = (137, 143)
"""Exit codes of a process that SIGKILL or SIGTERM ended."""

_WORDLESS = (
    ", as it does when it is told to end, or a process of it was killed; kubectl logs --previous of its pod tells"
)

VOLUME_IN_USE = "VolumeInUse"
_EXCLUSIVE = "ReadWriteOncePod"
"""Access mode of which the scheduler speaks when it holds a pod back (pkg/scheduler, volumerestrictions)."""

_OF_VOLUMES = (
    "persistentvolume",
    "persistent volume",
    "pvc(s)",
    "volume node affinity",
    "volume zone",
    "volume count",
    "free storage",
    "available disk",
)
"""What, in small letters, each of the scheduler's reasons has in it that is about volumes: "node(s) didn't match
PersistentVolume's node affinity" ("had volume node affinity conflict" before Kubernetes 1.34) or "pod has unbound
immediate PersistentVolumeClaims" (volumebinding, volumezone, volumerestrictions and nodevolumelimits in
pkg/scheduler/framework/plugins)."""

_LOST_REASONS = frozenset({"NodeLost", "NodeShutdown", "Shutdown", "Terminated", "Evicted"})
"""Reasons of pods that failed through their node, not through their engine."""


_NOT_LOADED = re.compile(r"failed to sync \w+ cache: |object .+ not registered$")
"""A kubelet that has not loaded a Secret or ConfigMap yet: it tries again in seconds, and says then if there is none
(pkg/kubelet/util/manager/watch_based_manager.go, Get)."""


def first_blocked(pods: list[Body]) -> Blocked | None:
    """Return why the newest pod that is blocked is; None where none is."""
    if rejected := told(rejections(pods)):
        return rejected
    newest_first = sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp", ""), reverse=True)
    staying = [pod for pod in newest_first if "deletionTimestamp" not in pod["metadata"] and not rejected_pod(pod)]
    # A pod whose node is gone is being deleted too; it says why one is missing when no other does.
    found = [*map(blocked_pod, staying), *map(_blocked_by_node, newest_first)]
    return next((blocked for blocked in found if blocked is not None), None)


def _blocked_by_node(pod: Body) -> Blocked | None:
    """Why the node took the pod away."""
    status = pod.get("status", {})
    for condition in status.get("conditions") or []:
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            return _lost(pod, condition.get("message") or condition.get("reason", ""))
    if status.get("reason") in _LOST_REASONS:
        return _lost(pod, status.get("message") or status["reason"])
    return None


def _lost(pod: Body, why: str) -> Blocked:
    name = pod["metadata"]["name"]
    return Blocked("NodeLost", f"{name} was taken from its node: {why}; another is started where one fits", waits=True)


def blocked_pod(pod: Body) -> Blocked | None:
    """Return why a pod does not run; None while nothing blocks it."""
    if rejected := rejected_pod(pod):
        return rejected
    status = pod.get("status", {})
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _unscheduled(condition.get("message", ""))
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        if container.get("ready"):
            continue
        blocked = _blocked_container(pod, container)
        if blocked is not None:
            return blocked
    return None


def waits_for_claim(pod: Body) -> bool:
    """Whether a pod waits for a claim that takes one pod at a time."""
    blocked = blocked_pod(pod)
    return blocked is not None and blocked.reason == VOLUME_IN_USE


def is_about_volumes(unscheduled: str) -> bool:
    """Whether the scheduler finds no node because of the pod's volumes, in its words.

    It looks at them on nodes that have all else, GPUs too, so where it speaks of both the volumes are what is missing.
    """
    return any(words in unscheduled.lower() for words in _OF_VOLUMES)


def _unscheduled(message: str) -> Blocked:
    if _EXCLUSIVE in message:
        what = f"a claim in spec.models or spec.podTemplate takes one pod at a time, and another pod has it: {message}"
        return Blocked(VOLUME_IN_USE, what, waits=True)
    if is_about_volumes(message):
        where = "spec.models.volume, or a volume of spec.podTemplate"
        what = message.removesuffix(". not found")
        fix = "goes on when the claim is there and bound, and a node with room can mount it"
        return Blocked("WaitingForVolume", f"{what} ({where}); {fix}", waits=True)
    return Blocked("Unschedulable", f"no node takes the pod: {message}", waits=True)


def _blocked_container(pod: Body, container: Body) -> Blocked | None:
    waiting = container.get("state", {}).get("waiting") or {}
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    match reason:
        case "CreateContainerConfigError" if _NOT_LOADED.match(message):
            pass
        case "CreateContainerConfigError" if "secret" in message.lower():
            return Blocked("WaitingForSecret", told_with_field(pod, message), waits=True)
        case "ImagePullBackOff" | "ErrImagePull" | "ErrImageNeverPull" | "InvalidImageName":
            return Blocked("ImagePullFailed", f"image {container.get('image')}: {message or reason}", waits=True)
        case "CreateContainerConfigError" | "CreateContainerError" | "RunContainerError":
            return Blocked("ContainerFailed", message or reason)
    ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated")
    if ended and (ended.get("exitCode") or container["name"] == ENGINE_CONTAINER):
        return _ended(container["name"], ended)
    return None


def _ended(name: str, ended: Body) -> Blocked:
    """Last words of a container that should run."""
    exit_code, said = ended.get("exitCode", 0), ended.get("message", "")
    if ended.get("reason") == "OOMKilled":
        return Blocked("OutOfMemory", f"{name} needed more memory than its limit and was killed")
    if name.startswith("download-"):
        return Blocked("DownloadFailed", f"{name} ended with exit code {exit_code}: {telling_line(said)}")
    if known := find_error(said):
        error, words = known
        return Blocked(error.reason, f"{words}: {error.fix}", error.permanent)
    if dead := dead_core(said):
        return Blocked("EngineKilled", f"{dead} (the engine ended with exit code {exit_code})")
    if exit_code in _SIGNALLED:
        why = "by the kubelet after its probes failed too often, or by somebody"
        return Blocked("EngineKilled", f"engine was ended by a signal ({exit_code}), {why}: {telling_line(said)}")
    line = telling_line(said) + ("" if exit_code or said.strip() else _WORDLESS)
    return Blocked("EngineFailed", f"engine ended with exit code {exit_code}: {line}")
