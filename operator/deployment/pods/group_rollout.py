"""Reads from LeaderWorkerSet and pods how far engines on several nodes are, and what holds them up."""

from specdecode_operator.api.base import Body
from specdecode_operator.deployment.objects.workload import serving_pods
from specdecode_operator.deployment.pods.blocked_pods import first_blocked
from specdecode_operator.deployment.pods.group_history import GroupHistory
from specdecode_operator.deployment.pods.rollout import Rollout


def read_group_rollout(
    groups: Body, pods: list[Body], wanted: int, history: GroupHistory, deadline_s: int | None
) -> Rollout:
    """Return how far the engines are.

    The status of a LeaderWorkerSet does not say which template it speaks of,
    so it counts only as far as pods of the present one bear it out.

    Parameters
    ----------
    groups
        The LeaderWorkerSet.
    pods
        Pods of its present template.
    wanted
        How many engines are wanted.
    history
        What was seen of its groups before.
    deadline_s
        How long they may take to serve; None where nobody waits for them.
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
