"""Explain why a pod does not run: scheduling, volume, Secret, kubelet rejection, last log lines.

A pod that the kubelet rejects is Failed before a container ran (pkg/kubelet/lifecycle/predicate.go and
cm/admission/errors.go in Kubernetes). Its controller replaces it immediately and without limit: a Deployment created
310 pods in 4 minutes. After 3 rejections in a row, the operator therefore backs off for up to 10 minutes.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.cluster.clock import AHEAD
from specdecode_operator.cluster.resources import ENGINE_CONTAINER, SIDECAR
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.rollout.engine_errors import dead_core, find_error, telling_line
from specdecode_operator.vllm.environment import API_KEY_VARIABLE

POD_REJECTED: Final = "PodRejected"
REJECTIONS_BEFORE_BACKOFF: Final = 3  # Rejections in a row
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 20.0, 600.0
# Fixes by prefix of the kubelet's reason, such as OutOfcpu, OutOfmemory or OutOfnvidia.com/gpu.
_FIXES: Final = {
    "OutOf": "free that much on the node, or remove nodeName from spec.podTemplate",
    "NodeAffinity": "add the labels that the pod requires to the node, or remove nodeName from spec.podTemplate",
    "UnexpectedAdmissionError": "the node cannot allocate the pod's GPUs or cores: check its device plugin and its"
    " kubelet log, or cordon it",
    "TopologyAffinityError": "the pod's GPUs and cores are not on one NUMA node: ask for fewer, or relax the kubelet's"
    " topology manager policy",
    "TaintToleration": "tolerate the node's taint in spec.podTemplate, or remove nodeName from it",
    "Preempting": "the node runs a critical pod instead: cordon it, or set a priorityClassName for the engines",
}
_OTHER_FIX: Final = "run kubectl describe on the node to see the cause; fix it, or cordon the node"


def condition_of(body: Body, type_: str) -> Body:
    """Return a condition of this type in the status of a pod or workload, or an empty object."""
    conditions: list[Body] = (body.get("status") or {}).get("conditions") or []
    return next((each for each in conditions if each["type"] == type_), {})


def container_statuses(pod: Body) -> list[Body]:
    """Return the statuses of a pod's init containers and containers, in this order."""
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def last_end(container: Body) -> Body | None:
    """Return how a container ended last, by its status; None if it never did."""
    ended: Body | None = next(
        filter(None, ((container.get(state) or {}).get("terminated") for state in ("state", "lastState"))), None
    )
    return ended


def rejected_pod(pod: Body) -> Blocked | None:
    """Return why the kubelet rejected a pod; None if it accepted the pod, or the pod has no node yet."""
    status = pod.get("status", {})
    reason = str(status.get("reason") or "")
    states = [each.get("state") or {} for each in container_statuses(pod)]
    has_run = any((state.get("terminated") or {}).get("startedAt") or state.get("running") for state in states)
    if status.get("phase") != "Failed" or not reason or has_run:
        return None
    fix = next((fix for begin, fix in _FIXES.items() if reason.startswith(begin)), None)
    said = str(status.get("message") or "no further message")
    # The kubelet starts each rejection like this. The reason Evicted, for example, also applies to pods that ran.
    if fix is None and not said.startswith("Pod was rejected"):
        return None
    node = f"node {name}" if (name := pod.get("spec", {}).get("nodeName")) else "its node"
    message = f"{pod['metadata']['name']} was rejected by {node}: {reason}: {said.rstrip('. ')}: {fix or _OTHER_FIX}"
    return Blocked(POD_REJECTED, message)


def rejections(pods: Sequence[Body]) -> list[Body]:
    """Return the rejected pods since the kubelet last accepted one, newest first."""
    found = []
    for pod in sorted(pods, key=_made, reverse=True):
        if rejected_pod(pod):
            found.append(pod)
        elif (
            pod.get("status", {}).get("containerStatuses") or condition_of(pod, "PodScheduled").get("status") == "False"
        ):
            break
    return found


def backs_off(pods: Sequence[Body], now_s: float) -> bool:
    """Return whether to create no more pods at ``now_s``, in Unix time.

    The count comes from the pods that exist, so a restart of the operator does not reset it.
    """
    rejected = rejections(pods)
    # Skip pods with a creation time in the future, from a wrong clock: they would extend the back-off by as much.
    made_s = [datetime.fromisoformat(_made(pod)).timestamp() for pod in rejected]
    last_s = next((each for each in made_s if each <= now_s + AHEAD.total_seconds()), -math.inf)
    return backs_off_after(len(rejected), last_s, now_s)


def backs_off_after(count: int, last_s: float, now_s: float) -> bool:
    """Whether to create no more pods after ``count`` rejections in a row; the back-off is exponential."""
    if count < REJECTIONS_BEFORE_BACKOFF:
        return False
    backoff_s = min(_FIRST_BACKOFF_S * 2.0 ** min(count - REJECTIONS_BEFORE_BACKOFF, 10), _LONGEST_BACKOFF_S)
    return now_s < last_s + backoff_s


def running_pods(pods: Sequence[Body]) -> int:
    """Return the number of pods that a kubelet accepted and that are not finished or being deleted."""
    statuses = [pod.get("status", {}) for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    return sum(
        bool(status.get("containerStatuses"))
        for status in statuses
        if status.get("phase") not in ("Failed", "Succeeded")
    )


def _made(pod: Body) -> str:
    return str(pod["metadata"].get("creationTimestamp", ""))


# Fields by the environment variable that they set (templates/engine-pod.yaml.j2 and the Jobs).
_FIELDS: Final = {
    API_KEY_VARIABLE: "spec.serving.apiKeySecret",
    "SPECDECODE_TLS_CERTIFICATE": "spec.serving.tlsSecret",
    "HF_TOKEN": "spec.models.hubTokenSecret",
}
_VARIABLES_OF_USERS: Final = "spec.engine.env or spec.podTemplate"
_VOLUMES_OF_USERS: Final = "spec.podTemplate"


def _name_secret_field(pod: Body, message: str) -> str:
    """Add the field that names a Secret, and a fix, to the kubelet's message about it.

    Messages are ``secret "clients" not found`` and ``couldn't find key token in Secret team/clients``
    (pkg/kubelet/kubelet_pods.go, makeEnvironmentVariables).
    """
    spec, fields = pod.get("spec", {}), set()
    for container in [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]:
        for variable in container.get("env") or []:
            if secret := (variable.get("valueFrom") or {}).get("secretKeyRef"):
                name, key = secret.get("name", ""), secret.get("key", "")
                if f'"{name}"' in message or (f"key {key} in" in message and message.endswith(f"/{name}")):
                    fields.add(_FIELDS.get(variable["name"], _VARIABLES_OF_USERS))
    fix = "add the key, or name one that it has" if "find key" in message else "create it, or name another"
    return f"{message} ({' and '.join(sorted(fields)) or _VOLUMES_OF_USERS}): {fix}; retried automatically"


# The sidecar has the image and the API key of the engine.
_OF_ANY_CONTAINER: Final = frozenset({"ImagePullFailed", "WaitingForSecret"})
_WORDLESS = "; it was stopped, or one of its processes was killed. See kubectl logs --previous of its pod"
VOLUME_IN_USE = "VolumeInUse"
# Lower-case parts of the scheduler's reasons about volumes, such as "node(s) didn't match PersistentVolume's node
# affinity" ("had volume node affinity conflict" before Kubernetes 1.34) or "pod has unbound immediate
# PersistentVolumeClaims" (volumebinding, volumezone, volumerestrictions and nodevolumelimits in
# pkg/scheduler/framework/plugins).
_VOLUME_WORDS = (
    "persistentvolume",
    "persistent volume",
    "pvc(s)",
    "volume node affinity",
    "volume zone",
    "volume count",
    "free storage",
    "available disk",
)
# Of the scheduler's reasons about claims of devices (pkg/scheduler/framework/plugins/dynamicresources).
_CLAIM_WORDS = ("resourceclaim", "resource claim", "allocate all claims", "device class")
_CLAIM_PAGE = "Claim GPUs with Dynamic Resource Allocation"
# The scheduler's report on preemption, which repeats the number of nodes.
_PREEMPTION = re.compile(r"\. (?:[^.]*, )?preemption: .*", re.DOTALL)
_LOST_REASONS = frozenset({"NodeLost", "NodeShutdown", "Shutdown", "Terminated", "Evicted"})
# The kubelet has not loaded a Secret or ConfigMap yet. It retries within seconds, and then reports a missing one
# (pkg/kubelet/util/manager/watch_based_manager.go, Get).
_NOT_LOADED = re.compile(r"failed to sync \w+ cache: |object .+ not registered$")


def first_blocked(pods: list[Body]) -> Blocked | None:
    """Return why the newest blocked pod does not run; None if no pod is blocked."""
    rejected = rejections(pods)
    if rejected and (blocked := rejected_pod(rejected[0])):
        if len(rejected) < REJECTIONS_BEFORE_BACKOFF:
            return blocked
        backing_off = "rejections in a row; backing off, at most 10 minutes between pods"
        return replace(blocked, message=f"{blocked.message}; {len(rejected)} {backing_off}")
    newest_first = sorted(pods, key=_made, reverse=True)
    staying = [pod for pod in newest_first if "deletionTimestamp" not in pod["metadata"] and not rejected_pod(pod)]
    if found := next(filter(None, map(blocked_pod, staying)), None):
        return found
    # Pods of a lost node are being deleted, but explain a missing replica if no other pod does.
    for pod in newest_first:
        status, disrupted = pod.get("status", {}), condition_of(pod, "DisruptionTarget")
        if disrupted.get("status") == "True":
            why = disrupted.get("message") or disrupted.get("reason", "")
        elif status.get("reason") in _LOST_REASONS:
            why = status.get("message") or status["reason"]
        else:
            continue
        message = (
            f"{pod['metadata']['name']} was removed from its node: {why}; a replacement starts on a node where it fits"
        )
        return Blocked("NodeLost", message, waits=True)
    return None


def blocked_pod(pod: Body) -> Blocked | None:
    """Return why a pod does not run, or None if it is not blocked."""
    if rejected := rejected_pod(pod):
        return rejected
    scheduled = condition_of(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return _unscheduled(scheduled.get("message", ""))
    # The engine's failure is more important than its sidecar's.
    waiting = sorted(
        (each for each in container_statuses(pod) if not each.get("ready")), key=lambda each: each["name"] == SIDECAR
    )
    return next(filter(None, (_blocked_container(pod, container) for container in waiting)), None)


def waits_for_claim(pod: Body) -> bool:
    """Whether a pod waits for a ReadWriteOncePod claim that another pod uses."""
    blocked = blocked_pod(pod)
    return blocked is not None and blocked.reason == VOLUME_IN_USE


def is_about_volumes(unscheduled: str) -> bool:
    """Whether the scheduler's message names volumes as a reason.

    The scheduler checks volumes only on nodes that meet all other requirements, such as GPUs. If a message names both,
    the volumes are missing.
    """
    return any(words in unscheduled.lower() for words in _VOLUME_WORDS)


def _unscheduled(message: str) -> Blocked:
    if "ReadWriteOncePod" in message:
        fields = "spec.models, spec.speculation.draft or spec.podTemplate"
        what = f"a claim in {fields} is ReadWriteOncePod, and another pod uses it: {message}"
        return Blocked(VOLUME_IN_USE, what, waits=True)
    if is_about_volumes(message):
        where = "spec.models.volume, the claim of the draft or of an adapter, or a volume of spec.podTemplate"
        what = message.removesuffix(". not found")
        fix = "continues when the claim exists, is bound and can be mounted on a node with room"
        return Blocked("WaitingForVolume", f"{what} ({where}); {fix}", waits=True)
    why = _PREEMPTION.sub("", message).removesuffix(".")
    if any(words in message.lower() for words in _CLAIM_WORDS):
        what = (
            f'spec.accelerator.resourceClaim: no node has enough free devices: {why} (documentation: "{_CLAIM_PAGE}")'
        )
        return Blocked("Unschedulable", what, waits=True)
    return Blocked("Unschedulable", f"no node accepts the pod: {why}", waits=True)


def _blocked_container(pod: Body, container: Body) -> Blocked | None:
    blocked = _blocked_by(pod, container)
    if blocked is None or container["name"] != SIDECAR or blocked.reason in _OF_ANY_CONTAINER:
        return blocked
    message = (
        f"sidecar {SIDECAR}, which live captures need, does not run: {blocked.message}; see kubectl logs -c {SIDECAR}"
        f" of pod {pod['metadata']['name']}, or set spec.engine.recorder to false"
    )
    # It waits: the engine works, so another spec would not help.
    return Blocked("RecorderFailed", message, waits=True)


def _blocked_by(pod: Body, container: Body) -> Blocked | None:
    waiting = container.get("state", {}).get("waiting") or {}
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    match reason:
        case "CreateContainerConfigError" if _NOT_LOADED.match(message):
            pass
        case "CreateContainerConfigError" if "secret" in message.lower():
            return Blocked("WaitingForSecret", _name_secret_field(pod, message), waits=True)
        case "ImagePullBackOff" | "ErrImagePull" | "ErrImageNeverPull" | "InvalidImageName":
            return Blocked("ImagePullFailed", f"image {container.get('image')}: {message or reason}", waits=True)
        case "CreateContainerConfigError" | "CreateContainerError" | "RunContainerError":
            return Blocked("ContainerFailed", message or reason)
    ended = last_end(container)
    if ended and container["name"] == SIDECAR:
        return Blocked("RecorderFailed", _words_of_sidecar(ended))
    if ended and (ended.get("exitCode") or container["name"] == ENGINE_CONTAINER):
        return ended_container(container["name"], ended)
    return None


def _words_of_sidecar(ended: Body) -> str:
    if ended.get("reason") == "OOMKilled":
        return "it exceeded its memory limit and was killed"
    return f"it ended with exit code {ended.get('exitCode', 0)}: {telling_line(ended.get('message', ''))}"


def ended_container(name: str, ended: Body) -> Blocked:
    """Return why a container ended that should run, from its exit code and last log lines."""
    exit_code, said = ended.get("exitCode", 0), ended.get("message", "")
    if ended.get("reason") == "OOMKilled":
        return Blocked("OutOfMemory", f"{name} exceeded its memory limit and was killed")
    if name.startswith("download-"):
        return Blocked("DownloadFailed", f"{name} ended with exit code {exit_code}: {telling_line(said)}")
    if known := find_error(said):
        error, words = known
        return Blocked(error.reason, f"{words}: {error.fix}", error.permanent)
    if dead := dead_core(said):
        return Blocked("EngineKilled", f"{dead} (the engine ended with exit code {exit_code})")
    if exit_code in (137, 143):
        why = "for example by the kubelet after failed probes"
        return Blocked(
            "EngineKilled", f"engine was killed by a signal (exit code {exit_code}), {why}: {telling_line(said)}"
        )
    line = telling_line(said) + ("" if exit_code or said.strip() else _WORDLESS)
    return Blocked("EngineFailed", f"engine ended with exit code {exit_code}: {line}")
