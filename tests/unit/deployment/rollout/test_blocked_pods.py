"""Why a pod does not run: the reason, the message, and when the operator stops making more."""

from datetime import datetime
from typing import Any

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.rollout.blocked_pods import (
    backs_off,
    blocked_pod,
    first_blocked,
    rejections,
    waits_for_claim,
)
from specdecode_operator.deployment.rollout.rollout_progress import (
    NO_GROUP_HISTORY,
    GroupHistory,
    group_history_as_data,
    group_history_from_data,
    observe_groups,
)
from specdecode_operator.handlers.apply_children import resting
from tests.support.decisions import desired_state
from tests.support.objects import ended, parent, pod, tiny_cpu, waiting
from tests.unit.deployment.group_pods import WIDE, spec_at
from tests.unit.deployment.test_groups import FOUR_H100

NO_CPU = "Pod was rejected: Node didn't have enough resource: cpu, requested: 1000, used: 7900, capacity: 8000"
RUNNING: Body = {"phase": "Running", "containerStatuses": [waiting("PodInitializing")]}


def rejected(second: int = 0, reason: str = "OutOfcpu", message: str = NO_CPU) -> Body:
    created = f"2026-01-01T00:00:{second:02}Z"
    return pod(f"llama-{second}", created=created, phase="Failed", reason=reason, message=message)


def at_s(second: int) -> float:
    return datetime.fromisoformat("2026-01-01T00:00:00Z").timestamp() + second


@pytest.mark.parametrize(
    ("reason", "message", "fix"),
    [
        ("OutOfcpu", NO_CPU, "remove nodeName from spec.podTemplate"),
        ("OutOfnvidia.com/gpu", "Pod Node didn't have enough resource: nvidia.com/gpu", "free that much on the node"),
        ("NodeAffinity", "Pod was rejected: Predicate NodeAffinity failed", "labels that the pod requires"),
        ("UnexpectedAdmissionError", "Allocate failed due to no healthy devices present", "check its device plugin"),
        ("UnexpectedAdmissionError", "", "check its device plugin"),
        ("TopologyAffinityError", "Resources cannot be allocated with Topology locality", "topology manager policy"),
        ("Evicted", "Pod was rejected: The node had condition: [DiskPressure].", "kubectl describe on the node"),
        ("SysctlForbidden", "Pod was rejected: forbidden sysctl", "kubectl describe on the node"),
    ],
)
def test_rejected_pod_is_reported_with_kubelet_reason_and_fix(reason: str, message: str, fix: str) -> None:
    blocked = first_blocked([rejected(0, reason, message)])
    assert blocked is not None
    assert blocked.reason == "PodRejected"
    assert not blocked.permanent
    assert not blocked.waits, "it does not go away by waiting, so a new spec is rolled back"
    for words in ("llama-0", reason, message.rstrip("."), fix):
        assert words in blocked.message


@pytest.mark.parametrize(
    "status",
    [
        {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."},
        {"phase": "Failed", "reason": "DeadlineExceeded"},
        {"phase": "Failed"},
        {"phase": "Pending", "reason": "OutOfcpu"},
        {
            "phase": "Failed",
            "reason": "Evicted",
            "message": NO_CPU,
            "containerStatuses": [{"name": "engine", "state": {"terminated": {"startedAt": "2026-01-01T00:00:00Z"}}}],
        },
    ],
)
def test_pods_that_ran_or_are_pending_are_not_rejected(status: Body) -> None:
    assert rejections([pod(**status)]) == []
    assert getattr(blocked_pod(pod(**status)), "reason", "") != "PodRejected"


def test_rejections_before_the_last_accepted_pod_do_not_count() -> None:
    taken = pod("taken", created="2026-01-01T00:00:02Z", **RUNNING)
    assert len(rejections([rejected(1), rejected(3), taken, rejected(4)])) == 2
    just_made = pod("new", created="2026-01-01T00:00:09Z", phase="Pending")
    assert len(rejections([rejected(1), just_made])) == 1, "nobody has looked at it yet"
    unscheduled = [{"type": "PodScheduled", "status": "False", "message": "no room"}]
    waits = pod("new", created="2026-01-01T00:00:09Z", phase="Pending", conditions=unscheduled)
    assert rejections([rejected(1), waits]) == []
    assert getattr(first_blocked([rejected(1), waits]), "reason", "") == "Unschedulable"


def test_backoff_starts_at_three_rejections_and_grows() -> None:
    assert not backs_off([rejected(1), rejected(2)], at_s(2))
    three = [rejected(1), rejected(2), rejected(3)]
    assert [backs_off(three, at_s(second)) for second in (3, 22, 23)] == [True, True, False]
    four = [*three, rejected(4)]
    assert [backs_off(four, at_s(second)) for second in (4, 43, 44)] == [True, True, False]
    many = [rejected(second) for second in range(60)]
    assert [backs_off(many, at_s(second)) for second in (658, 659)] == [True, False]


def engines(
    spec: Body,
    pods: list[Body],
    second: int,
    groups: GroupHistory = NO_GROUP_HISTORY,
    status: Body | None = None,
    **more: Any,
) -> int:
    """How many engines are asked for."""
    desired = desired_state(parse_deployment(parent(spec)), **more)
    assert desired.workload is not None
    held = resting(desired, {**desired.workload, "status": status or {}}, pods, groups, at_s(second)).workload
    assert held is not None
    assert (held == desired.workload) == (held["spec"]["replicas"] == desired.workload["spec"]["replicas"])
    return int(held["spec"]["replicas"])


def test_backoff_reduces_replicas_to_the_running_engines() -> None:
    three = [rejected(1), rejected(2), rejected(3)]
    running = pod("old", **RUNNING)
    assert engines(tiny_cpu(replicas=2), [running, *three], 4) == 1
    assert engines(tiny_cpu(replicas=2), three, 4) == 0
    assert engines(tiny_cpu(replicas=2), three, 30) == 2
    assert engines(tiny_cpu(replicas=2), three[:2], 4) == 2
    assert engines(tiny_cpu(replicas=1), [running, *three], 4) == 1
    ending = {**running, "metadata": {**running["metadata"], "deletionTimestamp": "2026-01-01T00:00:09Z"}}
    assert engines(tiny_cpu(replicas=2), [ending, *three], 4) == 0


def group_pod(second: int) -> Body:
    labels = {"leaderworkerset.sigs.k8s.io/group-index": "0", "leaderworkerset.sigs.k8s.io/worker-index": "1"}
    body = rejected(second, "UnexpectedAdmissionError", "no healthy devices")
    return {**body, "metadata": {**body["metadata"], "uid": str(second), "labels": labels}}


def test_rejected_pods_of_groups_cause_backoff_too() -> None:
    """A pod of a group is made anew under its name, so that only the history knows of those before."""
    history = NO_GROUP_HISTORY
    for second in (1, 2, 3):
        history = observe_groups(history, None, [group_pod(second)], at_s(second), serve=False)
    again = observe_groups(history, None, [group_pod(3)], at_s(9), serve=False)
    assert (again.crashes, again.rejected_s) == (3, at_s(3))
    assert getattr(again.blocked, "reason", "") == "PodRejected"
    assert group_history_from_data(group_history_as_data(history)) == history, "the next operator knows it"
    spec, nodes = spec_at(WIDE, replicas=2), {"nodes": FOUR_H100, "has_leader_worker_sets": True}
    assert engines(spec, [], 4, history, **nodes) == 0
    assert engines(spec, [], 4, history, {"readyReplicas": 1}, **nodes) == 2, "whichever group serves, it stays"
    assert engines(spec, [], 23, history, **nodes) == 2
    assert engines(spec, [], 4, NO_GROUP_HISTORY, **nodes) == 2


def test_future_creation_timestamps_do_not_extend_the_backoff() -> None:
    now_s = datetime.fromisoformat("2026-01-01T00:10:00Z").timestamp()
    ahead = [rejected() for _ in range(3)]
    for each in ahead:
        each["metadata"]["creationTimestamp"] = "2027-01-01T00:00:00Z"
    assert not backs_off(ahead, now_s), "another pod is made, and its time is right"
    latest = rejected()
    latest["metadata"]["creationTimestamp"] = "2026-01-01T00:09:59Z"
    assert backs_off([*ahead, latest], now_s)
    assert not backs_off([*ahead, latest], now_s + 600)


def unscheduled(**message: str) -> Body:
    return {"type": "PodScheduled", "status": "False", **message}


def image(reason: str, message: str = "") -> Body:
    return {"containerStatuses": [waiting(reason, message)]}


WAITS = {
    "unscheduled, and nobody says why": (
        {"conditions": [unscheduled()]},
        Blocked("Unschedulable", "no node accepts the pod: ", waits=True),
    ),
    "a claim that another pod has": (
        {"conditions": [unscheduled(message="node has pod using PersistentVolumeClaim with ReadWriteOncePod mode")]},
        Blocked(
            "VolumeInUse",
            "a claim in spec.models, spec.speculation.draft or spec.podTemplate is ReadWriteOncePod, and another pod"
            " uses it: node has pod using PersistentVolumeClaim with ReadWriteOncePod mode",
            waits=True,
        ),
    ),
    "a claim that is not there": (
        {"conditions": [unscheduled(message='persistentvolumeclaim "m" not found. not found')]},
        Blocked(
            "WaitingForVolume",
            'persistentvolumeclaim "m" not found (spec.models.volume, the claim of the draft or of an adapter, or a'
            " volume of spec.podTemplate); continues when the claim exists, is bound and can be mounted on a node with"
            " room",
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
        Blocked("OutOfMemory", "engine exceeded its memory limit and was killed"),
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
                f"engine was killed by a signal (exit code {code}), for example by the kubelet after failed probes:"
                " Shutting down",
            ),
        )
        for code in (137, 143)
    },
    "an exit that nobody asked for": (
        {"containerStatuses": [ended(0)]},
        Blocked(
            "EngineFailed",
            "engine ended with exit code 0: no message was logged; it was stopped, or one of its processes was"
            " killed. See kubectl logs --previous of its pod",
        ),
    ),
}


@pytest.mark.parametrize(("status", "blocked"), WAITS.values(), ids=WAITS)
def test_each_blocked_pod_status_gives_its_full_report(status: Body, blocked: Blocked) -> None:
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
def test_starting_and_ready_pods_are_not_blocked(status: Body) -> None:
    assert blocked_pod(pod(**status)) is None
    assert not waits_for_claim(pod(**status))


def test_newest_blocked_pod_is_reported() -> None:
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


LOST = "llama-1 was removed from its node: {}; a replacement starts on a node where it fits"
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
def test_pod_lost_with_its_node_reports_the_cause(status: Body, why: str) -> None:
    assert first_blocked([pod(**status)]) == Blocked("NodeLost", LOST.format(why), waits=True)


def with_sidecar(sidecar: Body, *engine: Body) -> Body:
    return pod(phase="Running", initContainerStatuses=[sidecar], containerStatuses=[*engine])


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        (ended(1, "OSError: no sockets", "recorder"), "RecorderFailed", "exit code 1: OSError: no sockets"),
        (ended(0, "", "recorder"), "RecorderFailed", "exit code 0"),
        (ended(137, "", "recorder", "OOMKilled"), "RecorderFailed", "memory limit"),
        (waiting("RunContainerError", "no such file: /bin/sh", "recorder"), "RecorderFailed", "no such file"),
        (waiting("ImagePullBackOff", "not found", "recorder"), "ImagePullFailed", "image i:1: not found"),
        (
            waiting("CreateContainerConfigError", 'secret "a" not found', "recorder"),
            "WaitingForSecret",
            'secret "a"',
        ),
    ],
)
def test_failing_recorder_sidecar_is_reported_apart_from_the_engine(status: Body, reason: str, words: str) -> None:
    blocked = blocked_pod(with_sidecar(status, {"name": "engine", "ready": True}))
    assert blocked is not None
    assert (blocked.reason, blocked.permanent, blocked.waits) == (reason, False, True)
    assert words in blocked.message
    assert ("spec.engine.recorder" in blocked.message) == (reason == "RecorderFailed")


def test_engine_crash_is_reported_before_a_sidecar_crash() -> None:
    blocked = blocked_pod(with_sidecar(ended(1, "", "recorder"), ended(1, "ValueError: no model")))
    assert blocked is not None
    assert blocked.reason == "EngineFailed"


def test_sidecar_crashes_do_not_count_as_group_crashes() -> None:
    crashed = {**ended(1, "", "recorder"), "restartCount": 5}
    leader = with_sidecar(crashed, {"name": "engine", "ready": True})
    leader["metadata"] |= {"uid": "leader", "labels": {}}
    assert observe_groups(NO_GROUP_HISTORY, None, [leader], 0.0, serve=False).crashes == 0
