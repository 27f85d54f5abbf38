"""How far the rollout of a Deployment is, read from its status and its pods."""

from dataclasses import dataclass, replace

from specdecode_operator.api.base import Body
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.deployment.objects.workload import serving_template
from specdecode_operator.deployment.pods.blocked_pods import first_blocked
from specdecode_operator.deployment.pods.pod_security import with_field
from specdecode_operator.deployment.pods.rejected_pods import rejections
from specdecode_operator.deployment.spec.pod_template_merge import ENGINE_CONTAINER
from specdecode_operator.kube.labels import TEMPLATE_HASH_ANNOTATION


@dataclass(frozen=True)
class Rollout:
    """State of the engine pods against what is wanted."""

    wanted: int
    replicas: int
    updated: int
    available: int
    settled: bool
    """Whether the controller has seen the current template."""

    blocked: Blocked | None
    overdue: bool = False
    """Whether the current template is given up: no progress within its deadline."""

    deadline_s: int | None = None
    """How long engines of the current template are given; None where nobody waits for them."""

    crashes: int = 0
    """How often the engine container that failed most was started anew, among pods of the current template, or how many
    of these were rejected in a row."""

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
        overdue=settled and _is_overdue(status),
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


def _is_overdue(status: Body) -> bool:
    return any(
        condition["type"] == "Progressing" and condition.get("reason") == "ProgressDeadlineExceeded"
        for condition in status.get("conditions") or []
    )


def _restarts(pod: Body) -> int:
    """How often the engine of a pod that does not serve was started anew."""
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
    """Why there are no pods at all: a quota, or a policy that admits none."""
    for condition in status.get("conditions") or []:
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            why = with_field(condition.get("message", ""))
            return Blocked("PodsRefused", f"no engine pod can be created: {why}", waits=True)
    return None
