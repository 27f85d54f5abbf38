"""What was seen of engines on several nodes, whose pods all go when one of them fails.

A LeaderWorkerSet makes the whole group anew: restart counters begin at zero
and last words are gone with their pods, and it has no deadline of its own. So
what pods said is kept while they were there. After a restart of the operator
crashes are known from the object's ConfigMap (`rollback.LastGood`).
"""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.deployment.pods.blocked_pods import blocked_pod
from specdecode_operator.deployment.pods.rejected_pods import POD_REJECTED, rejected_pod, rests_after

GROUP_INDEX_LABEL: Final = "leaderworkerset.sigs.k8s.io/group-index"
WORKER_INDEX_LABEL: Final = "leaderworkerset.sigs.k8s.io/worker-index"


@dataclass(frozen=True)
class GroupHistory:
    """What was seen of the groups of one template."""

    template: str | None = None
    """Hash of the template; None before any group was seen."""

    first_seen_s: float = 0.0
    """Since when its groups are waited for, in seconds since 1970: that holds for the next operator, too."""

    waited_s: float = 0.0
    """How long ago that is; 0 once all its groups served."""

    served: bool = False
    crashed: frozenset[tuple[str, str, str]] = frozenset()
    """Pods whose container ended, each as group, worker and UID."""

    blocked: Blocked | None = None
    """Why the first of the pods that crashed last did."""

    rejected_s: float = 0.0
    """When a node refused a pod last, in seconds since 1970."""

    @property
    def crashes(self) -> int:
        """How often the pod crashed that did so most."""
        return max(Counter((group, worker) for group, worker, _ in self.crashed).values(), default=0)

    def rests(self, now_s: float) -> bool:
        """Whether no more groups are to be made for a while, because nodes refuse their pods."""
        rejected = self.blocked is not None and self.blocked.reason == POD_REJECTED
        return rejected and rests_after(self.crashes, self.rejected_s, now_s)


UNSEEN: Final = GroupHistory()


def as_data(history: GroupHistory) -> dict[str, Any]:
    """Return a history for JSON."""
    data = asdict(history) | {"crashed": sorted(map(list, history.crashed))}
    data["trouble"] = data.pop("blocked")  # its name in ConfigMaps that exist already
    return data


def from_data(data: dict[str, Any]) -> GroupHistory:
    """Return the history that `as_data` wrote. Raises TypeError or KeyError for anything else."""
    fields, blocked = dict(data), data["trouble"]
    fields["crashed"] = frozenset((str(group), str(worker), str(uid)) for group, worker, uid in data["crashed"])
    fields["blocked"] = Blocked(**blocked) if blocked else None
    del fields["trouble"]
    return GroupHistory(**fields)


def observe_groups(  # noqa: PLR0913  all that is seen at once
    before: GroupHistory,
    template: str | None,
    pods: list[Body],
    now_s: float,
    *,
    serve: bool,
    awaited: bool = True,
) -> GroupHistory:
    """Return the history with what is seen now.

    Parameters
    ----------
    before
        What was seen earlier, perhaps of another template.
    template
        Hash of the template in force.
    pods
        Its pods.
    now_s
        The time in seconds since 1970.
    serve
        Whether all its groups serve.
    awaited
        Whether they should serve by and by: some are wanted, and no pause holds them back. Their time begins with that.
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
    """Return the history with the pods whose container ended."""
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
    """When a container of a pod ended that should run, or the pod was refused; None where nothing of that happened."""
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
