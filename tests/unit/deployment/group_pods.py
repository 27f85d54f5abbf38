"""Pods and workloads of a LeaderWorkerSet, and specs that need one."""

from datetime import UTC, datetime
from itertools import count
from typing import Any

from specdecode_operator.api.base import Body
from specdecode_operator.deployment.desired_state import DesiredState
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from tests.support.decisions import desired_state
from tests.support.objects import parent
from tests.unit.deployment.test_groups import FOUR_H100, STAGES, ngram

NOW = datetime(2026, 1, 1, tzinfo=UTC)
_uids = count(1)


def pod_of(
    template: Body, group: int, worker: int, *, ready: bool = True, deleted: bool = False, **status: Any
) -> Body:
    """A pod as a LeaderWorkerSet makes it."""
    number = next(_uids)
    metadata = {
        **template["metadata"],
        "name": f"llama-lws-{group}" + (f"-{worker}" if worker else ""),
        "namespace": "default",
        "uid": f"pod-{number}",
        "creationTimestamp": f"2026-01-01T00:{number // 60 % 60:02}:{number % 60:02}Z",
    }
    metadata["labels"] = metadata["labels"] | {
        "leaderworkerset.sigs.k8s.io/group-index": str(group),
        "leaderworkerset.sigs.k8s.io/worker-index": str(worker),
    }
    if deleted:
        metadata["deletionTimestamp"] = "2026-01-01T01:00:00Z"
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {"metadata": metadata, "status": {"conditions": conditions, **status}}


def pods_of(workload: Body, groups: int = 1, *, ready: bool = True) -> list[Body]:
    both = workload["spec"]["leaderWorkerTemplate"]
    return [
        pod
        for group in range(groups)
        for pod in (
            pod_of(both["leaderTemplate"], group, 0, ready=ready),
            pod_of(both["workerTemplate"], group, 1, ready=True),
        )
    ]


def live(workload: Body, *, replicas: int = 1, updated: int = 1, ready: int = 1) -> Body:
    """The workload with the counters that its controller writes."""
    metadata = {**workload["metadata"], "uid": "lws-1", "generation": 1}
    status = {"observedGeneration": 1, "availableReplicas": ready} if workload["kind"] == "Deployment" else {}
    counts = {"replicas": replicas, "updatedReplicas": updated, "readyReplicas": ready}
    return {**workload, "metadata": metadata, "status": status | counts}


def desired_state_of(spec: Body = STAGES) -> DesiredState:
    return desired_state(parse_deployment(parent(spec)), FOUR_H100, has_leader_worker_sets=True)


def workload_of(desired: DesiredState) -> Body:
    assert desired.workload is not None
    return desired.workload


def spec_at(parallelism: dict[str, int], **changes: Any) -> Body:
    return ngram("meta-llama/Llama-3.1-70B-Instruct", parallelism=parallelism, **changes)


WIDE = {"tensor": 8, "pipeline": 2}
