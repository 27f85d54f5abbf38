"""What a pod suffers from, in whole words, and what counts of a Deployment that says little."""

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.rollout.blocked_pods import blocked_pod, first_blocked, waits_for_claim
from specdecode_operator.deployment.rollout.rollout_progress import (
    Rollout,
    read_rollout,
    with_replaced,
)
from tests.support.objects import deployment, ended, pod, waiting


def unscheduled(**message: str) -> Body:
    return {"type": "PodScheduled", "status": "False", **message}


def image(reason: str, message: str = "") -> Body:
    return {"containerStatuses": [waiting(reason, message)]}


WAITS = {
    "unscheduled, and nobody says why": (
        {"conditions": [unscheduled()]},
        Blocked("Unschedulable", "no node takes the pod: ", waits=True),
    ),
    "a claim that another pod has": (
        {"conditions": [unscheduled(message="node has pod using PersistentVolumeClaim with ReadWriteOncePod mode")]},
        Blocked(
            "VolumeInUse",
            "a claim in spec.models or spec.podTemplate takes one pod at a time, and another pod has it: "
            "node has pod using PersistentVolumeClaim with ReadWriteOncePod mode",
            waits=True,
        ),
    ),
    "a claim that is not there": (
        {"conditions": [unscheduled(message='persistentvolumeclaim "m" not found. not found')]},
        Blocked(
            "WaitingForVolume",
            'persistentvolumeclaim "m" not found (spec.models.volume, or a volume of spec.podTemplate); goes on when'
            " the claim is there and bound, and a node with room can mount it",
            waits=True,
        ),
    ),
    "no image": (image("ImagePullBackOff", "denied"), Blocked("ImagePullFailed", "image i:1: denied", waits=True)),
    **{
        f"{reason}, and nobody says more": (
            image(reason),
            Blocked("ImagePullFailed", f"image i:1: {reason}", waits=True),
        )
        for reason in ("ErrImagePull", "ErrImageNeverPull", "InvalidImageName")
    },
    **{
        reason: (image(reason, said), Blocked("ContainerFailed", said or reason))
        for reason, said in (
            ("CreateContainerConfigError", 'configmap "m" not found'),
            ("CreateContainerError", "no such device"),
            ("RunContainerError", ""),
        )
    },
    "memory": (
        {"containerStatuses": [ended(137, "Killed", reason="OOMKilled")]},
        Blocked("OutOfMemory", "engine needed more memory than its limit and was killed"),
    ),
    "download": (
        {"initContainerStatuses": [ended(1, "401", container="download-draft")]},
        Blocked("DownloadFailed", "download-draft ended with exit code 1: 401"),
    ),
    **{
        f"signal {code}": (
            {"containerStatuses": [ended(code, "Shutting down")]},
            Blocked(
                "EngineKilled",
                f"engine was ended by a signal ({code}), by the kubelet after its probes failed too often, or by"
                " somebody: Shutting down",
            ),
        )
        for code in (137, 143)
    },
    "an exit that nobody asked for": (
        {"containerStatuses": [ended(0)]},
        Blocked(
            "EngineFailed",
            "engine ended with exit code 0: it said nothing, as it does when it is told to end, or a process of it was"
            " killed; kubectl logs --previous of its pod tells",
        ),
    ),
}


@pytest.mark.parametrize(("status", "blocked"), WAITS.values(), ids=WAITS)
def test_what_holds_a_pod_up_is_told_whole(status: Body, blocked: Blocked) -> None:
    assert blocked_pod(pod(**status)) == blocked
    assert waits_for_claim(pod(**status)) is (blocked.reason == "VolumeInUse")


SERVES = {"name": "engine", "ready": True}
NOT_BLOCKED = {
    "no status": {},
    "scheduled": {"conditions": [{"type": "PodScheduled", "status": "True", "message": "fine"}]},
    "not ready yet": {"conditions": [{"type": "Ready", "status": "False"}]},
    "pulls": image("ContainerCreating"),
    **{
        said: {"containerStatuses": [waiting("CreateContainerConfigError", said)]}
        for said in (
            "failed to sync secret cache: timed out waiting for the condition",
            "failed to sync configmap cache: timed out waiting for the condition",
            'object "team"/"clients" not registered',
        )
    },
    "starts": {"containerStatuses": [{"name": "engine", "ready": False, "state": {"running": {}}}]},
    "serves after a crash": {"containerStatuses": [{**ended(1, "ValueError: no"), "ready": True}]},
    "download is done": {
        "initContainerStatuses": [{"name": "download-target", "ready": False, "state": {"terminated": {"exitCode": 0}}}]
    },
}


@pytest.mark.parametrize("status", NOT_BLOCKED.values(), ids=NOT_BLOCKED)
def test_a_pod_that_is_on_its_way_is_not_blocked(status: Body) -> None:
    assert blocked_pod(pod(**status)) is None
    assert not waits_for_claim(pod(**status))


def test_containers_are_looked_at_though_others_are_ready_or_only_wait() -> None:
    done = {**SERVES, "name": "download-target"}
    assert blocked_pod(pod(initContainerStatuses=[done], containerStatuses=[ended(1, "ValueError: no")])) == Blocked(
        "EngineFailed", "engine ended with exit code 1: ValueError: no"
    )
    beside_it = [waiting("PodInitializing", container="sidecar"), ended(1, "ValueError: no")]
    assert blocked_pod(pod(containerStatuses=beside_it)) is not None


def test_the_newest_pod_says_what_is_wrong() -> None:
    newer = pod("newer", created="2026-01-02T00:00:00Z", **image("ErrImagePull", "denied"))
    older = pod("older", created="2026-01-01T00:00:00Z", containerStatuses=[ended(1, "ValueError: no")])
    undated = {**pod("undated", containerStatuses=[ended(2, "ValueError: no")]), "metadata": {"name": "undated"}}
    for pods in ([newer, older, undated], [undated, older, newer]):
        found = first_blocked(pods)
        assert found is not None
        assert found.reason == "ImagePullFailed"
    assert first_blocked([undated, older]) == blocked_pod(older)
    fine = pod("fine", created="2026-01-03T00:00:00Z", containerStatuses=[SERVES])
    assert first_blocked([older, fine]) == blocked_pod(older)
    assert first_blocked([fine, {"metadata": {"name": "made"}}]) is None


LOST = "llama-1 was taken from its node: {}; another is started where one fits"
LOSSES = {
    "drained": ({"conditions": [{"type": "DisruptionTarget", "status": "True", "message": "drained"}]}, "drained"),
    "evicted, no message": (
        {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]},
        "EvictionByEvictionAPI",
    ),
    "not said": ({"conditions": [{"type": "DisruptionTarget", "status": "True"}]}, ""),
    **{
        reason: ({"phase": "Failed", "reason": reason}, reason)
        for reason in ("NodeLost", "NodeShutdown", "Shutdown", "Terminated", "Evicted")
    },
}


@pytest.mark.parametrize(("status", "why"), LOSSES.values(), ids=LOSSES)
def test_a_pod_that_its_node_lost_says_how(status: Body, why: str) -> None:
    assert first_blocked([pod(**status)]) == Blocked("NodeLost", LOST.format(why), waits=True)


@pytest.mark.parametrize(
    "status",
    [
        {"conditions": [{"type": "DisruptionTarget", "status": "False", "message": "drained"}]},
        {"conditions": [{"type": "Ready", "status": "True", "message": "drained"}]},
        {"phase": "Failed", "reason": "DeadlineExceeded"},
    ],
    ids=["stays", "ready", "failed by itself"],
)
def test_a_pod_that_its_node_keeps_is_not_lost(status: Body) -> None:
    assert first_blocked([pod(**status)]) is None


def test_everything_that_a_deployment_says_is_read() -> None:
    live = deployment(replicas=4, updated=3, available=2)
    live["spec"] = {"progressDeadlineSeconds": 1505}
    refused = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}
    live["status"]["conditions"] = [
        {"type": "Available", "status": "True"},
        {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"},
        refused,
    ]
    refusal = Blocked("PodsRefused", "no engine pod can be created: exceeded quota", waits=True)
    assert read_rollout(live, [], 3) == Rollout(
        wanted=3,
        replicas=4,
        updated=3,
        available=2,
        settled=True,
        blocked=refusal,
        overdue=True,
        deadline_s=1505,
        crashes=0,
    )
    refused["status"] = "False"
    live["status"]["conditions"][1]["reason"] = "NewReplicaSetAvailable"
    found = read_rollout(live, [], 3)
    assert (found.blocked, found.overdue) == (None, False)


def test_crashes_are_those_of_the_engine_that_failed_most() -> None:
    def crashed(name: str, times: int, *, ready: bool = False) -> Body:
        return {"name": name, "ready": ready, "restartCount": times}

    pods = [
        pod("a", containerStatuses=[crashed("engine", 2), crashed("sidecar", 9)]),
        pod("b", containerStatuses=[crashed("engine", 3), {"name": "engine"}]),
        pod("c", containerStatuses=[crashed("engine", 8, ready=True)]),
        pod("d"),
    ]
    live = deployment(replicas=4, updated=4, available=1)
    assert read_rollout(live, pods, 4).crashes == 3
    assert read_rollout(live, [{"metadata": {"name": "e"}}], 4).crashes == 0


@pytest.mark.parametrize(
    ("status", "counts"),
    [
        (None, (2, 1)),
        ({"replicas": 3, "availableReplicas": 2, "readyReplicas": 3}, (5, 3)),
        ({"replicas": 3, "readyReplicas": 1}, (5, 2)),
        ({}, (2, 1)),
    ],
    ids=["none", "deployment", "groups", "new"],
)
def test_engines_of_the_other_kind_of_starter_are_added(status: Body | None, counts: tuple[int, int]) -> None:
    here = read_rollout(deployment(replicas=2, updated=2, available=1), [], 2)
    found = with_replaced(here, None if status is None else {"status": status})
    assert (found.replicas, found.available) == counts
    assert (found.updated, found.wanted) == (2, 2)
