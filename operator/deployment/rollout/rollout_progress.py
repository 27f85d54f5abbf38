"""Rollout progress and blockers, from the workload's status and pods.

A Deployment has a deadline and restart counters. A LeaderWorkerSet recreates all pods of a group when one fails:
restart counters start at zero, last log lines are lost, and there is no deadline. `GroupHistory` therefore records
the restarts of each group. Crashes are also stored in the object's ConfigMap (`rollback.LastGood`), so they survive
a restart of the operator.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.drift import Identity
from specdecode_operator.cluster.resources import (
    DEPLOYMENT,
    ENGINE_CONTAINER,
    LEADER_WORKER_SET,
    POD,
    SIDECAR,
    TEMPLATE_HASH_ANNOTATION,
)
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.rollout.blocked_pods import (
    POD_REJECTED,
    backs_off_after,
    blocked_pod,
    condition_of,
    container_statuses,
    first_blocked,
    last_end,
    rejected_pod,
    rejections,
)
from specdecode_operator.deployment.rollout.engine_workload import engine_pods, serving_pods, serving_template

_CONTAINERS: Final = re.compile(r'containers? ((?:"[^"]+"(?:, )?)+)')


def name_pod_security_field(refusal: str) -> str:
    """Add the fields to change to the API server's message about a rejected pod.

    The message is ``pods "x" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false
    (container "a" must set …), restricted volume types (volume "models" uses restricted volume type "hostPath")``
    (k8s.io/pod-security-admission, policy).
    """
    if "violates PodSecurity" not in refusal:
        return refusal
    said = refusal.partition("violates PodSecurity")[2]
    names = [name for listed in _CONTAINERS.findall(said) for name in re.findall(r'"([^"]+)"', listed)]
    rows = (
        (("runAsNonRoot", "runAsUser=0"), ["spec.podTemplate.spec.securityContext"]),
        (("",), [f"securityContext of {name} in spec.podTemplate.spec.containers" for name in names]),
        (("hostPath",), ["spec.models.volume.hostPath (use a persistentVolumeClaim)"]),
        (("volume",), ["spec.podTemplate.spec.volumes"]),
        (("host namespaces",), ["hostNetwork, hostPID and hostIPC of spec.podTemplate.spec"]),
    )
    fields = dict.fromkeys(field for words, found in rows if any(word in said for word in words) for field in found)
    level = "or set another level for the namespace (pod-security.kubernetes.io/enforce)"
    return f"{refusal}: change {', '.join(fields) or 'spec.podTemplate'}, {level}"


@dataclass(frozen=True)
class Rollout:
    """Progress of a rollout: wanted, existing, updated and available engines."""

    wanted: int
    replicas: int
    updated: int
    available: int
    settled: bool
    blocked: Blocked | None
    overdue: bool = False
    deadline_s: int | None = None
    # Most restarts of an unready engine container among pods of the current template, or the number of pods rejected
    # in a row if that is larger.
    crashes: int = 0

    @property
    def complete(self) -> bool:
        """Whether every wanted engine serves the current spec, and no engine of an earlier spec is left."""
        return self.settled and self.replicas <= self.updated and min(self.updated, self.available) >= self.wanted

    @property
    def earlier_engines(self) -> str:
        """Count of the serving engines, for messages while those of a new spec do not serve."""
        return f"{self.available} of {self.wanted} engines of an earlier spec serve"


def read_rollout(deployment: Body | None, pods: list[Body], wanted: int) -> Rollout:
    """Return the rollout of a Deployment; without one, it has zero engines."""
    if deployment is None:
        return Rollout(wanted, 0, 0, 0, settled=False, blocked=None)
    status = deployment.get("status", {})
    settled = status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
    blocked, failure = first_blocked(pods), condition_of(deployment, "ReplicaFailure")
    if blocked is None and settled and failure.get("status") == "True":
        why = name_pod_security_field(failure.get("message", ""))
        blocked = Blocked("PodsRefused", f"no engine pod can be created: {why}", waits=True)
    statuses = [each for pod in pods for each in pod.get("status", {}).get("containerStatuses") or []]
    failing = [each for each in statuses if each["name"] == ENGINE_CONTAINER and not each.get("ready")]
    return Rollout(
        wanted=wanted,
        replicas=status.get("replicas", 0),
        updated=status.get("updatedReplicas", 0),
        available=status.get("availableReplicas", 0),
        settled=settled,
        blocked=blocked,
        overdue=settled and condition_of(deployment, "Progressing").get("reason") == "ProgressDeadlineExceeded",
        deadline_s=deployment.get("spec", {}).get("progressDeadlineSeconds"),
        crashes=max([*(int(each.get("restartCount", 0)) for each in failing), len(rejections(pods))]),
    )


def with_replaced(rollout: Rollout, replaced_workload: Body | None) -> Rollout:
    """Add the remaining engines of a replaced workload of another kind."""
    status = (replaced_workload or {}).get("status", {})
    available = status.get("availableReplicas", status.get("readyReplicas", 0))
    return replace(
        rollout, replicas=rollout.replicas + status.get("replicas", 0), available=rollout.available + available
    )


def current_pods(pods: list[Body], workload: Body | None) -> list[Body]:
    """Return the pods of the current template; problems of older pods are not about this spec."""
    return [] if workload is None else [pod for pod in pods if template_hash(pod) == serving_hash(workload)]


def template_hash(body: Body) -> str | None:
    """Return the hash in the annotation of a pod or pod template."""
    value: str | None = (body["metadata"].get("annotations") or {}).get(TEMPLATE_HASH_ANNOTATION)
    return value


def serving_hash(workload: Body) -> str | None:
    """Return the template hash of a workload's serving pods."""
    return template_hash(serving_template(workload))


_STARTING: Final = frozenset({None, "ContainerCreating", "PodInitializing"})
"""Waiting reasons of a container that starts normally; None if it does not wait."""

_LIVE_PHASES: Final = frozenset({None, "Pending", "Running"})

_REVISION: Final = "deployment.kubernetes.io/revision"
"""Annotation that the Deployment controller writes."""


def only_startup_changes(key: Key, before: Mapping[Identity, Body], now: Mapping[Identity, Body]) -> bool:
    """Return whether the children changed only through start-up steps, which do not change the object's status.

    An engine causes about ten events, such as the scheduling of its pod, before it is ready or fails. A pod that
    becomes ready is ignored until its Deployment reports it, which causes another event.
    """
    if before == now:
        return True
    kinds = {kind for kind, _ in now}
    pods = engine_pods([body for (kind, _), body in now.items() if kind == POD.kind], key)
    # After the kubelet rejects a pod, each start-up step of its replacement matters; see `rejections`.
    has_failed = any((pod.get("status") or {}).get("phase") == "Failed" for pod in pods)
    if has_failed or LEADER_WORKER_SET.kind in kinds or not before.keys() <= now.keys():
        return False
    deployments = [body for (kind, _), body in now.items() if kind == DEPLOYMENT.kind]
    counted = sum((each.get("status") or {}).get("readyReplicas", 0) for each in deployments)
    ready = sum(_is_ready(pod) and "deletionTimestamp" not in pod["metadata"] for pod in pods)
    has_uncounted_pods = bool(deployments) and ready > counted
    changed = [(name[0], before.get(name), body) for name, body in now.items() if before.get(name) != body]
    return all(
        (bool(engine_pods([new], key)) and _is_pod_startup(old, new, has_uncounted_pods=has_uncounted_pods))
        if kind == POD.kind
        else kind == DEPLOYMENT.kind and old is not None and _is_deployment_startup(old, new)
        for kind, old, new in changed
    )


def _is_pod_startup(old: Body | None, new: Body, *, has_uncounted_pods: bool) -> bool:
    if old is not None and (
        _is_ready(old) or not _has_no_problem(old) or _labels_and_annotations(old) != _labels_and_annotations(new)
    ):
        return False
    return _has_no_problem(new) and (has_uncounted_pods or not _is_ready(new))


def _is_ready(pod: Body) -> bool:
    return bool(condition_of(pod, "Ready").get("status") == "True")


def _has_no_problem(pod: Body) -> bool:
    """Return whether a pod starts or runs without a problem, such as a failed scheduling or container."""
    status, containers = pod.get("status") or {}, container_statuses(pod)
    if "deletionTimestamp" in pod["metadata"] or condition_of(pod, "PodScheduled").get("status") == "False":
        return False
    if condition_of(pod, "DisruptionTarget").get("status") == "True":
        return False
    waits = {((each.get("state") or {}).get("waiting") or {}).get("reason") for each in containers}
    has_failed = any(each.get("restartCount") or (last_end(each) or {}).get("exitCode") for each in containers)
    has_ended = any(map(last_end, status.get("containerStatuses") or []))
    return not has_failed and not has_ended and waits <= _STARTING and status.get("phase") in _LIVE_PHASES


def _labels_and_annotations(body: Body) -> list[Body]:
    metadata = body["metadata"]
    annotations = {name: text for name, text in (metadata.get("annotations") or {}).items() if name != _REVISION}
    return [metadata.get("labels") or {}, annotations]


def _is_deployment_startup(old: Body, new: Body) -> bool:
    """Return whether a Deployment still has no ready pods, the same spec and pod count, and no failure."""
    rest = [
        {**body["metadata"], "annotations": None, "resourceVersion": None}
        | {"spec": body["spec"], "pods": pod_count({**body, "kind": DEPLOYMENT.kind})}
        for body in (old, new)
    ]
    if rest[0] != rest[1] or _labels_and_annotations(old) != _labels_and_annotations(new) or new["spec"].get("paused"):
        return False
    statuses = [body.get("status") or {} for body in (old, new)]
    if any(each.get("readyReplicas") or each.get("availableReplicas") for each in statuses):
        return False
    failed = [condition_of(body, "ReplicaFailure").get("status") == "True" for body in (old, new)]
    overdue = [condition_of(body, "Progressing").get("status") == "False" for body in (old, new)]
    return not any(failed + overdue)


def pod_count(workload: Body) -> int:
    """Return the number of pods of a workload that exist or are being created.

    Counting only those that exist would change the status of each object again as soon as its workload is created.
    """
    status = workload.get("status", {})
    pods: list[int] = [status.get("replicas", 0)]
    if workload.get("kind") == DEPLOYMENT.kind:
        if status.get("observedGeneration", 0) < workload["metadata"].get("generation", 0):
            pods.append(workload["spec"].get("replicas", 1))
        else:  # This sum includes pods that the ReplicaSets have yet to create.
            pods.append(status.get("availableReplicas", 0) + status.get("unavailableReplicas", 0))
    return max(pods)


GROUP_INDEX_LABEL: Final = "leaderworkerset.sigs.k8s.io/group-index"
WORKER_INDEX_LABEL: Final = "leaderworkerset.sigs.k8s.io/worker-index"


@dataclass(frozen=True)
class GroupHistory:
    """History of the groups of one template."""

    template: str | None = None  # Hash of the template; None before any group was seen
    first_seen_s: float = 0.0  # Unix time from which the groups are awaited; it survives an operator restart
    waited_s: float = 0.0
    served: bool = False
    crashed: frozenset[tuple[str, str, str]] = frozenset()
    blocked: Blocked | None = None
    rejected_s: float = 0.0

    @property
    def crashes(self) -> int:
        """Most crashes of one pod position, given by group and worker index."""
        return max(Counter((group, worker) for group, worker, _ in self.crashed).values(), default=0)

    def rests(self, now_s: float) -> bool:
        """Whether to create no more groups at ``now_s``, because nodes reject their pods."""
        rejected = self.blocked is not None and self.blocked.reason == POD_REJECTED
        return rejected and backs_off_after(self.crashes, self.rejected_s, now_s)


NO_GROUP_HISTORY: Final = GroupHistory()


def group_history_as_data(history: GroupHistory) -> dict[str, Any]:
    """Return a history as JSON-compatible data."""
    data = asdict(history) | {"crashed": sorted(map(list, history.crashed))}
    data["trouble"] = data.pop("blocked")  # the name in existing ConfigMaps
    return data


def group_history_from_data(data: dict[str, Any]) -> GroupHistory:
    """Parse the output of `group_history_as_data`. Raises TypeError or KeyError for other data."""
    fields, blocked = dict(data), data["trouble"]
    fields["crashed"] = frozenset((str(group), str(worker), str(uid)) for group, worker, uid in data["crashed"])
    fields["blocked"] = Blocked(**blocked) if blocked else None
    del fields["trouble"]
    return GroupHistory(**fields)


def observe_groups(  # noqa: PLR0913  a complete observation
    before: GroupHistory, template: str | None, pods: list[Body], now_s: float, *, serve: bool, awaited: bool = True
) -> GroupHistory:
    """Return the history with the current observation added.

    ``before`` may be of another template; ``template`` is the hash of the current one and ``pods`` are its pods. The
    waiting time starts when groups are ``awaited``: at least one is wanted, and the rollout is not paused.
    """
    if template != before.template:
        # An earlier operator process already waited for existing pods.
        made_s = [datetime.fromisoformat(pod["metadata"]["creationTimestamp"]).timestamp() for pod in pods]
        before = GroupHistory(template, first_seen_s=min([now_s, *made_s]))
    # Another replica's clock may be ahead: times in the future count as now.
    before = replace(before, first_seen_s=min(before.first_seen_s, now_s), rejected_s=min(before.rejected_s, now_s))
    if not awaited:
        before = replace(before, first_seen_s=now_s)
    elif serve:
        return replace(before, served=True, waited_s=0.0, crashed=frozenset(), blocked=None)
    before = replace(before, waited_s=0.0 if before.served else now_s - before.first_seen_s)
    # A pod that is being deleted ended with its group, so its exit code does not count.
    crashed = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"] and _crash_time(pod)]
    if not crashed:
        return before
    first, named = min(crashed, key=lambda pod: str(_crash_time(pod))), set[tuple[str, str, str]]()
    for pod in crashed:
        labels = pod["metadata"].get("labels") or {}
        named.add((labels.get(GROUP_INDEX_LABEL, ""), labels.get(WORKER_INDEX_LABEL, ""), str(pod["metadata"]["uid"])))
    is_new = any(rejected_pod(pod) for pod in crashed) and not named <= before.crashed
    return replace(
        before,
        crashed=before.crashed | named,
        blocked=blocked_pod(first) or before.blocked,
        rejected_s=now_s if is_new else before.rejected_s,
    )


def _crash_time(pod: Body) -> str | None:
    if rejected_pod(pod):
        return str(pod["metadata"].get("creationTimestamp", ""))
    for container in container_statuses(pod):
        if container["name"] == SIDECAR:
            continue
        ended = last_end(container)
        if ended and (ended.get("exitCode") or container.get("restartCount")):
            return str(ended.get("finishedAt", ""))
    return None


def read_group_rollout(
    groups: Body, pods: list[Body], wanted: int, history: GroupHistory, deadline_s: int | None
) -> Rollout:
    """Return the rollout of a LeaderWorkerSet.

    Its status does not name a template, so numbers are limited to those that pods of the current template confirm.
    ``deadline_s`` is None if the engines have no deadline.
    """
    status = groups.get("status", {})
    leaders = [pod for pod in serving_pods(pods) if "deletionTimestamp" not in pod["metadata"]]
    replicas = status.get("replicas", 0)
    earlier = max(0, replicas - len(leaders))
    ready = sum(map(_is_ready, leaders))
    return Rollout(
        wanted=wanted,
        replicas=replicas,
        updated=min(status.get("updatedReplicas", 0), len(leaders)),
        available=min(status.get("readyReplicas", 0), ready + earlier),
        settled="replicas" in status,
        blocked=first_blocked(pods) or history.blocked,
        overdue=deadline_s is not None and history.waited_s >= deadline_s,
        deadline_s=deadline_s,
        crashes=history.crashes,
    )
