"""Pods that their node's kubelet refused to run, and how long no more of them are made.

They are Failed before a container ever ran (pkg/kubelet/lifecycle/predicate.go and cm/admission/errors.go in
Kubernetes). Their controller makes another one at once, without an end: a Deployment made 310 in four minutes.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.kube.future_times import AHEAD

POD_REJECTED: Final = "PodRejected"

BELIEVED: Final = 3
"""Rejections in a row after which no more pods are made for a while."""

_FIRST_REST_S, _LONGEST_REST_S = 20.0, 600.0
_MOST_DOUBLINGS: Final = 10

_FIXES: Final = {
    "OutOf": "free that much on the node, or let the scheduler choose one: no nodeName in spec.podTemplate",
    "NodeAffinity": "give the node the labels that the pod asks for, or let the scheduler choose one",
    "UnexpectedAdmissionError": "the node cannot hand out the pod's GPUs or cores: look at its device plugin and its"
    " kubelet's log, or cordon it",
    "TopologyAffinityError": "the pod's GPUs and cores are not on one NUMA node: ask for fewer, or relax the kubelet's"
    " topology manager policy",
    "TaintToleration": "tolerate the node's taint in spec.podTemplate, or let the scheduler choose one",
    "Preempting": "the node takes a critical pod in its place: cordon it, or give the engines a priorityClassName",
}
"""What helps, by how the kubelet's reason begins: OutOfcpu, OutOfmemory, OutOfnvidia.com/gpu."""

_ELSE: Final = "kubectl describe its node tells what it lacks: mend that, or cordon it"

_REJECTED: Final = "Pod was rejected"
"""How a kubelet begins, whatever the reason. One whose node lacks memory or disk is Evicted, as those are that ran."""


def rejected_pod(pod: Body) -> Blocked | None:
    """Return why the kubelet refused a pod; None for one that it took, or that has no node yet."""
    status = pod.get("status", {})
    reason = str(status.get("reason") or "")
    if status.get("phase") != "Failed" or not reason or _has_run(status):
        return None
    fix = next((fix for begin, fix in _FIXES.items() if reason.startswith(begin)), None)
    said = str(status.get("message") or "it said no more")
    if fix is None and not said.startswith(_REJECTED):
        return None
    node = f"node {name}" if (name := pod.get("spec", {}).get("nodeName")) else "its node"
    message = f"{pod['metadata']['name']} was refused by {node}: {reason}: {said.rstrip('. ')}: {fix or _ELSE}"
    return Blocked(POD_REJECTED, message)


def rejections(pods: Sequence[Body]) -> list[Body]:
    """Return the rejected pods since the kubelet last took one, the newest first."""
    found = []
    for pod in sorted(pods, key=_made, reverse=True):
        if rejected_pod(pod):
            found.append(pod)
        elif pod.get("status", {}).get("containerStatuses") or _waits(pod):
            break
    return found


def told(rejected: Sequence[Body]) -> Blocked | None:
    """Return why the newest of some rejected pods was, and whether more are made."""
    blocked = rejected_pod(rejected[0]) if rejected else None
    if blocked is None or len(rejected) < BELIEVED:
        return blocked
    message = (
        f"{blocked.message}; {len(rejected)} in a row, so others are made ever more rarely, at last every 10 minutes"
    )
    return replace(blocked, message=message)


def rests(pods: Sequence[Body], now_s: float) -> bool:
    """Whether no more pods are to be made at a time, in seconds since 1970.

    It is counted from the pods that there are, so that a restart of the operator begins nothing anew.
    """
    rejected = rejections(pods)
    if not rejected:
        return False
    # Without those that were made while a clock was ahead: they would hold back pods for as long.
    made_s = [datetime.fromisoformat(_made(pod)).timestamp() for pod in rejected]
    last_s = next((each for each in made_s if each <= now_s + AHEAD.total_seconds()), -math.inf)
    return rests_after(len(rejected), last_s, now_s)


def rests_after(count: int, last_s: float, now_s: float) -> bool:
    """Whether no more pods are to be made after some rejections in a row, each time for longer."""
    if count < BELIEVED:
        return False
    rest_s = min(_FIRST_REST_S * 2.0 ** min(count - BELIEVED, _MOST_DOUBLINGS), _LONGEST_REST_S)
    return now_s < last_s + rest_s


def running_pods(pods: Sequence[Body]) -> int:
    """Return how many pods their nodes have taken, and that are not over."""
    return sum("deletionTimestamp" not in pod["metadata"] and _is_taken(pod.get("status", {})) for pod in pods)


def _is_taken(status: Body) -> bool:
    return status.get("phase") not in {"Failed", "Succeeded"} and bool(status.get("containerStatuses"))


def _has_run(status: Body) -> bool:
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    states = [each.get("state") or {} for each in containers]
    return any((state.get("terminated") or {}).get("startedAt") or state.get("running") for state in states)


def _waits(pod: Body) -> bool:
    conditions = pod.get("status", {}).get("conditions") or []
    return any(each["type"] == "PodScheduled" and each["status"] == "False" for each in conditions)


def _made(pod: Body) -> str:
    return str(pod["metadata"].get("creationTimestamp", ""))
