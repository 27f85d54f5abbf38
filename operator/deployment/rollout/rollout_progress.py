"""Rollout progress and blockers, from the workload's status and pods.

A Deployment has a deadline and restart counters. A LeaderWorkerSet recreates all pods of a group when one fails:
restart counters start at zero, last log lines are lost, and there is no deadline. `GroupHistory` therefore records
the restarts of each group. Crashes are also stored in the object's ConfigMap (`rollback.LastGood`), so they survive
a restart of the operator.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.cluster.resources import ENGINE_CONTAINER, TEMPLATE_HASH_ANNOTATION
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.rollout.blocked_pods import (
    POD_REJECTED,
    backs_off_after,
    blocked_pod,
    first_blocked,
    rejected_pod,
    rejections,
)
from specdecode_operator.deployment.rollout.engine_workload import serving_pods, serving_template

_REFUSAL: Final = "violates PodSecurity"
_CONTAINERS: Final = re.compile(r'containers? ((?:"[^"]+"(?:, )?)+)')
_CONTEXT: Final = "spec.podTemplate.spec.securityContext"
_USER: Final = ("runAsNonRoot", "runAsUser=0")


def name_pod_security_field(refusal: str) -> str:
    """Return what the API server says of a pod, with the fields of our object that help.

    Its words are ``pods "x" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false
    (container "a" must set …), restricted volume types (volume "models" uses restricted volume type "hostPath")``
    (k8s.io/pod-security-admission, policy).
    """
    if _REFUSAL not in refusal:
        return refusal
    fields = list(dict.fromkeys(_fields(refusal.partition(_REFUSAL)[2])))
    level = "or give the namespace another level (pod-security.kubernetes.io/enforce)"
    return f"{refusal}: look at {', '.join(fields) or 'spec.podTemplate'}, {level}"


def _fields(said: str) -> Iterator[str]:
    if any(words in said for words in _USER):
        yield _CONTEXT
    for listed in _CONTAINERS.findall(said):
        for name in re.findall(r'"([^"]+)"', listed):
            yield f"securityContext of {name} in spec.podTemplate.spec.containers"
    if "hostPath" in said:
        yield "spec.models.volume.hostPath (use a persistentVolumeClaim)"
    if "volume" in said:
        yield "spec.podTemplate.spec.volumes"
    if "host namespaces" in said:
        yield "hostNetwork, hostPID and hostIPC of spec.podTemplate.spec"


@dataclass(frozen=True)
class Rollout:
    """State of the engine pods against what is wanted."""

    wanted: int
    replicas: int
    updated: int
    available: int
    settled: bool
    blocked: Blocked | None
    overdue: bool = False
    # How long engines of the current template are given; None where nobody waits for them.
    deadline_s: int | None = None
    # How often the engine container that failed most was started anew, among pods of the current template, or how many
    # of these were rejected in a row.
    crashes: int = 0

    @property
    def complete(self) -> bool:
        """Whether every wanted engine serves the current spec, and none of an earlier one is left."""
        return self.settled and self.replicas <= self.updated and min(self.updated, self.available) >= self.wanted


def read_rollout(deployment: Body | None, pods: list[Body], wanted: int) -> Rollout:
    """Return how far the engines are; a Deployment that is not there yet counts as nothing."""
    if deployment is None:
        return Rollout(wanted, 0, 0, 0, settled=False, blocked=None)
    status = deployment.get("status", {})
    settled = status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
    return Rollout(
        wanted=wanted,
        replicas=status.get("replicas", 0),
        updated=status.get("updatedReplicas", 0),
        available=status.get("availableReplicas", 0),
        settled=settled,
        blocked=first_blocked(pods) or (_blocked_by_controller(status) if settled else None),
        overdue=settled
        and any(
            condition["type"] == "Progressing" and condition.get("reason") == "ProgressDeadlineExceeded"
            for condition in status.get("conditions") or []
        ),
        deadline_s=deployment.get("spec", {}).get("progressDeadlineSeconds"),
        crashes=max([*map(_restarts, pods), len(rejections(pods))]),
    )


def with_replaced(rollout: Rollout, replaced_workload: Body | None) -> Rollout:
    """Return the same with the engines that a workload of another kind still has."""
    status = (replaced_workload or {}).get("status", {})
    available = status.get("availableReplicas", status.get("readyReplicas", 0))
    return replace(
        rollout, replicas=rollout.replicas + status.get("replicas", 0), available=rollout.available + available
    )


def _restarts(pod: Body) -> int:
    containers = pod.get("status", {}).get("containerStatuses") or []
    engines = [each for each in containers if each["name"] == ENGINE_CONTAINER and not each.get("ready")]
    return max((int(each.get("restartCount", 0)) for each in engines), default=0)


def current_pods(pods: list[Body], workload: Body | None) -> list[Body]:
    """Pods of the template that is in force now; what older ones suffer says nothing of this spec."""
    if workload is None:
        return []
    wanted = template_hash(serving_template(workload))
    return [pod for pod in pods if template_hash(pod) == wanted]


def template_hash(body: Body) -> str | None:
    """Return what tells pods of one template from those of another."""
    value: str | None = (body["metadata"].get("annotations") or {}).get(TEMPLATE_HASH_ANNOTATION)
    return value


def _blocked_by_controller(status: Body) -> Blocked | None:
    for condition in status.get("conditions") or []:
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            why = name_pod_security_field(condition.get("message", ""))
            return Blocked("PodsRefused", f"no engine pod can be created: {why}", waits=True)
    return None


GROUP_INDEX_LABEL: Final = "leaderworkerset.sigs.k8s.io/group-index"
WORKER_INDEX_LABEL: Final = "leaderworkerset.sigs.k8s.io/worker-index"


@dataclass(frozen=True)
class GroupHistory:
    """What was seen of the groups of one template."""

    template: str | None = None  # Hash of the template; None before any group was seen
    # Since when its groups are waited for, in seconds since 1970: that holds for the next operator, too.
    first_seen_s: float = 0.0
    waited_s: float = 0.0
    served: bool = False
    crashed: frozenset[tuple[str, str, str]] = frozenset()
    blocked: Blocked | None = None
    rejected_s: float = 0.0

    @property
    def crashes(self) -> int:
        """How often the pod crashed that did so most."""
        return max(Counter((group, worker) for group, worker, _ in self.crashed).values(), default=0)

    def rests(self, now_s: float) -> bool:
        """Whether no more groups are to be made for a while, because nodes refuse their pods."""
        rejected = self.blocked is not None and self.blocked.reason == POD_REJECTED
        return rejected and backs_off_after(self.crashes, self.rejected_s, now_s)


NO_GROUP_HISTORY: Final = GroupHistory()


def group_history_as_data(history: GroupHistory) -> dict[str, Any]:
    """Return a history for JSON."""
    data = asdict(history) | {"crashed": sorted(map(list, history.crashed))}
    data["trouble"] = data.pop("blocked")  # its name in ConfigMaps that exist already
    return data


def group_history_from_data(data: dict[str, Any]) -> GroupHistory:
    """Return the history that `as_data` wrote. Raises TypeError or KeyError for anything else."""
    fields, blocked = dict(data), data["trouble"]
    fields["crashed"] = frozenset((str(group), str(worker), str(uid)) for group, worker, uid in data["crashed"])
    fields["blocked"] = Blocked(**blocked) if blocked else None
    del fields["trouble"]
    return GroupHistory(**fields)


def observe_groups(  # noqa: PLR0913  all that is seen at once
    before: GroupHistory, template: str | None, pods: list[Body], now_s: float, *, serve: bool, awaited: bool = True
) -> GroupHistory:
    """Return the history with what is seen now.

    ``before``: what was seen earlier, perhaps of another template. ``template``: hash of the template in force.
    ``pods``: its pods. ``now_s``: the time in seconds since 1970. ``serve``: whether all its groups serve.
    ``awaited``: whether they should serve by and by: some are wanted, and no pause holds them back. Their time
    begins with that.
    """
    if template != before.template:
        # Pods that are there already were waited for by an operator that is gone.
        before = GroupHistory(template, first_seen_s=min([now_s, *map(_made_s, pods)]))
    # Times of another operator's may lie in the future, and count as now.
    before = replace(before, first_seen_s=min(before.first_seen_s, now_s), rejected_s=min(before.rejected_s, now_s))
    if not awaited:
        before = replace(before, first_seen_s=now_s)
    elif serve:
        return replace(before, served=True, waited_s=0.0, crashed=frozenset(), blocked=None)
    waited_s = 0.0 if before.served else now_s - before.first_seen_s
    return _with_crashes(replace(before, waited_s=waited_s), pods, now_s)


def _with_crashes(before: GroupHistory, pods: list[Body], now_s: float) -> GroupHistory:
    # A pod that is being deleted was ended with its group, whatever its exit code says.
    crashed = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"] and _crash_time(pod)]
    if not crashed:
        return before
    first, named = min(crashed, key=lambda pod: str(_crash_time(pod))), {_named(pod) for pod in crashed}
    anew = any(rejected_pod(pod) for pod in crashed) and not named <= before.crashed
    return replace(
        before,
        crashed=before.crashed | named,
        blocked=blocked_pod(first) or before.blocked,
        rejected_s=now_s if anew else before.rejected_s,
    )


def _made_s(pod: Body) -> float:
    return datetime.fromisoformat(pod["metadata"]["creationTimestamp"]).timestamp()


def _crash_time(pod: Body) -> str | None:
    if rejected_pod(pod):
        return str(pod["metadata"].get("creationTimestamp", ""))
    status = pod.get("status", {})
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        states = (container.get("state", {}), container.get("lastState", {}))
        ended = next((state["terminated"] for state in states if state.get("terminated")), None)
        if ended and (ended.get("exitCode") or container.get("restartCount")):
            return str(ended.get("finishedAt", ""))
    return None


def _named(pod: Body) -> tuple[str, str, str]:
    labels = pod["metadata"].get("labels") or {}
    return labels.get(GROUP_INDEX_LABEL, ""), labels.get(WORKER_INDEX_LABEL, ""), str(pod["metadata"]["uid"])


def read_group_rollout(
    groups: Body, pods: list[Body], wanted: int, history: GroupHistory, deadline_s: int | None
) -> Rollout:
    """Return how far the engines are.

    The status of a LeaderWorkerSet does not say which template it speaks of, so it counts only as far as pods of
    the present one bear it out. ``groups``: the LeaderWorkerSet. ``pods``: pods of its present template.
    ``wanted``: how many engines are wanted. ``history``: what was seen of its groups before. ``deadline_s``: how
    long they may take to serve; None where nobody waits for them.
    """
    status = groups.get("status", {})
    leaders = [pod for pod in serving_pods(pods) if "deletionTimestamp" not in pod["metadata"]]
    replicas = status.get("replicas", 0)
    updated = min(status.get("updatedReplicas", 0), len(leaders))
    earlier = max(0, replicas - len(leaders))
    return Rollout(
        wanted=wanted,
        replicas=replicas,
        updated=updated,
        available=min(status.get("readyReplicas", 0), sum(map(_is_ready, leaders)) + earlier),
        settled="replicas" in status,
        blocked=first_blocked(pods) or history.blocked,
        overdue=deadline_s is not None and history.waited_s >= deadline_s,
        deadline_s=deadline_s,
        crashes=history.crashes,
    )


def _is_ready(pod: Body) -> bool:
    conditions = pod.get("status", {}).get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
