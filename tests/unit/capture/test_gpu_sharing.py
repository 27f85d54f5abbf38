"""A deployment is without its engines exactly as long as a capture has their GPUs."""

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from specdecode_operator.api.deployment import Key
from specdecode_operator.capture.gpu_sharing import holds_gpus, preempting_capture, read_serving, serving_goes_first
from specdecode_operator.deployment.conditions import FALSE, UNKNOWN, stamp
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.requeue import requeue_for
from specdecode_operator.deployment.rollout.readiness import Lending, Readiness, lent_since
from specdecode_operator.deployment.status import compose_status
from tests.support.capture_decisions import decided, words
from tests.support.captures import capture, capture_pod, capture_spec, job, surroundings
from tests.support.decisions import desired_state
from tests.support.objects import Body, deployment, pair_70b, parent, tiny_cpu
from tests.unit.deployment.test_groups import FOUR_H100

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def condition(type_: str, status: str, reason: str = "R") -> Body:
    return {
        "type": type_,
        "status": status,
        "reason": reason,
        "message": "",
        "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


BORROWED: Body = {"since": "2026-01-01T00:00:00Z"}


def borrowing(*conditions: tuple[str, ...], borrow: Body | None = None, name: str = "demo", **spec: Any) -> Body:
    said = {
        "conditions": [condition(*each) for each in conditions or (("Accepted", "True"), ("Succeeded", "Unknown"))],
        "borrow": BORROWED if borrow is None else borrow,
    }
    return capture(capture_spec(deploymentDuringCapture="Suspend", **spec), status=said, name=name)


def test_unfinished_borrowing_capture_preempts_deployment() -> None:
    assert preempting_capture([borrowing()]) == "demo"


NOT_BORROWING: dict[str, Body] = {
    "Keep": capture(status={"conditions": [condition("Accepted", "True")], "borrow": BORROWED}),
    "new": capture(capture_spec(deploymentDuringCapture="Suspend")),
    "accepted": borrowing(borrow={}),
    "gave them back": borrowing(borrow={**BORROWED, "returnedAt": "2026-01-01T00:02:00Z"}),
    "succeeded": borrowing(("Accepted", "True"), ("Succeeded", "True")),
    "failed": borrowing(("Accepted", "True"), ("Succeeded", "False")),
    "suspended": borrowing(suspend=True),
    "being deleted": {
        **borrowing(),
        "metadata": {**capture()["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"},
    },
}


@pytest.mark.parametrize("name", NOT_BORROWING)
def test_other_captures_do_not_preempt_deployment(name: str) -> None:
    assert preempting_capture([NOT_BORROWING[name]]) is None


def test_first_capture_to_borrow_preempts_deployment() -> None:
    later = borrowing(borrow={"since": "2026-01-01T00:00:01Z"}, name="a")
    assert preempting_capture([NOT_BORROWING["Keep"], later, borrowing()]) == "demo"
    assert preempting_capture([borrowing(name="b"), borrowing(name="a")]) == "a", "at one moment the first by name"


PODS: dict[str, tuple[Body, bool]] = {
    "running": ({"metadata": {}, "status": {"phase": "Running"}}, True),
    "not seen by its node yet": ({"metadata": {}}, True),
    "ending": ({"metadata": {"deletionTimestamp": "2026-01-01T00:00:30Z"}, "status": {"phase": "Running"}}, True),
    "late by just less than five minutes": (
        {"metadata": {"deletionTimestamp": "2025-12-31T23:55:01Z"}, "status": {"phase": "Running"}},
        True,
    ),
    "late by five minutes": (
        {"metadata": {"deletionTimestamp": "2025-12-31T23:55:00Z"}, "status": {"phase": "Running"}},
        False,
    ),
    "evicted, which nobody removes": ({"metadata": {}, "status": {"phase": "Failed"}}, False),
    "over": ({"metadata": {}, "status": {"phase": "Succeeded"}}, False),
    "on a node that is lost": (
        {"metadata": {"deletionTimestamp": "2025-12-31T23:54:59Z"}, "status": {"phase": "Running"}},
        False,
    ),
}


@pytest.mark.parametrize("name", PODS)
def test_pod_holds_gpus_until_ended_or_lost(name: str) -> None:
    pod, holds = PODS[name]
    assert holds_gpus(pod, NOW) is holds


def test_invalid_spec_is_reported_while_gpus_are_lent() -> None:
    owner = parse_deployment(parent(tiny_cpu(engine={"version": "0.1"})), preempted_by="demo")
    status = compose_status(owner, desired_state(owner, ()), Observation(), NOW)
    (found,) = (each for each in status.conditions if each.type == "Ready")
    assert (found.status, found.reason) == ("False", "Invalid")


def summary_of(spec: Body, suspended_for: str | None, nodes: tuple[Any, ...] = (), **seen: Any) -> dict[str, Any]:
    """The conditions of an object without engines, by type: status, reason and message."""
    owner = parse_deployment(parent(spec), preempted_by=suspended_for)
    observation = Observation(deployment(replicas=0, updated=0, available=0), **seen)
    status = compose_status(owner, desired_state(owner, nodes), observation, NOW)
    return {each.type: (each.status.value, each.reason, each.message) for each in status.conditions}


def test_deployment_lending_its_gpus_is_reconciling_not_stalled() -> None:
    said = summary_of(tiny_cpu(), "demo")
    assert said["Ready"][:2] == ("False", "SuspendedForCapture")
    assert (said["Reconciling"][0], said["Stalled"][0]) == ("True", "False")
    assert said["Available"] == ("False", "SuspendedForCapture", "See condition Ready")
    owner = parse_deployment(parent(tiny_cpu()), preempted_by="demo")
    assert desired_state(owner, ()).children[-1]["spec"]["replicas"] == 0


def test_capture_beyond_its_overdue_time_is_reported() -> None:
    lending = Lending("demo", NOW - timedelta(hours=1), overdue_from=NOW)
    assert summary_of(tiny_cpu(), "demo", lending=lending)["Ready"][:2] == ("False", "SuspendedForCapture")
    assert summary_of(tiny_cpu(), "demo", lending=lending)["Available"][:2] == ("False", "CaptureOverdue")
    in_time = replace(lending, overdue_from=NOW + timedelta(seconds=1))
    assert summary_of(tiny_cpu(), "demo", lending=in_time)["Available"][:2] == ("False", "SuspendedForCapture")


def test_deployment_is_requeued_when_capture_becomes_overdue() -> None:
    owner = parse_deployment(parent(tiny_cpu()), preempted_by="demo")
    lending = Lending("demo", overdue_from=NOW + timedelta(minutes=7))
    asked = requeue_for(owner, desired_state(owner, ()), Observation(lending=lending), ())
    assert asked.due_at_s == (NOW + timedelta(minutes=7)).timestamp()


@pytest.mark.parametrize(("spec", "what"), [(tiny_cpu(), "place"), (None, "GPUs")])
def test_message_of_cpu_deployment_does_not_mention_gpus(spec: Body | None, what: str) -> None:
    said = summary_of(spec or pair_70b(parallelism={"tensor": 4}), "demo", () if spec else FOUR_H100)
    assert f"capture demo uses the engines' {what}" in said["Ready"][2]


WANT_ZERO = {"Suspended": tiny_cpu(suspend=True), "ScaledToZero": tiny_cpu(replicas=0)}


@pytest.mark.parametrize("reason", WANT_ZERO)
@pytest.mark.parametrize("suspended_for", [None, "demo"])
def test_deployment_with_zero_engines_wanted_is_ready(reason: str, suspended_for: str | None) -> None:
    said = summary_of(WANT_ZERO[reason], suspended_for)
    assert (said["Ready"][:2], said["Available"][:2]) == (("True", reason), ("False", reason))
    assert (said["Reconciling"][0], said["Stalled"][0]) == ("False", "False")


@pytest.mark.parametrize(
    ("spec", "suspended_for", "reason"),
    [
        (tiny_cpu(engine={"version": "0.1"}), "demo", "SuspendedForCapture"),
        (tiny_cpu(engine={"version": "0.1"}, suspend=True), None, "Suspended"),
        (tiny_cpu(engine={"version": "0.1"}, replicas=0), None, "ScaledToZero"),
        (tiny_cpu(engine={"version": "0.1"}), None, "Invalid"),
    ],
)
def test_available_keeps_its_reason_with_invalid_spec(spec: Body, suspended_for: str | None, reason: str) -> None:
    """An alert tells a user's own suspend from an outage by this reason."""
    said = summary_of(spec, suspended_for)
    assert (said["Ready"][:2], said["Available"][:2]) == (("False", "Invalid"), ("False", reason))


def test_serving_engines_stay_available_during_preemption() -> None:
    owner = parse_deployment(parent(tiny_cpu(engine={"version": "0.1"})), preempted_by="demo")
    serving = Observation(deployment(replicas=1, updated=1, available=1))
    status = compose_status(owner, desired_state(owner, ()), serving, NOW)
    (said,) = (each for each in status.conditions if each.type == "Available")
    assert (said.status, said.reason) == ("True", "EarlierEnginesServe")


def test_lending_gpus_changes_neither_plan_nor_pod_template() -> None:
    own = desired_state(parse_deployment(parent(tiny_cpu())), ())
    lent = desired_state(parse_deployment(parent(tiny_cpu()), preempted_by="demo"), ())
    assert own.outcome.plan_status == lent.outcome.plan_status
    templates = [desired.children[-1]["spec"]["template"] for desired in (own, lent)]
    assert templates[0] == templates[1]


# A capture that keeps its deployment's engines takes no place that engines are about to have.

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
LLAMA = Key("default", "llama")
PLACED: Body = {"conditions": [{"type": "PodScheduled", "status": "True"}], "phase": "Pending"}
UNPLACED: Body = {"conditions": [{"type": "PodScheduled", "status": "False"}], "phase": "Pending"}
ON_GPUS: Body = {"spec": {"containers": [{}, {"resources": {"limits": {"nvidia.com/gpu": "1"}}}]}, "status": PLACED}
LENT = ("False", "SuspendedForCapture")
LENT_BEFORE_AN_UPGRADE = ("True", "SuspendedForCapture")
WAITS = {"goes_first": "deployment llama has 0 of 1 engine pods on nodes"}


def serving(
    *pods: Body,
    name: str = "llama",
    namespace: str = "default",
    ready: tuple[str, str] = ("Unknown", "Starting"),
    since: datetime = NOON - timedelta(minutes=1),
    captures: tuple[Body, ...] = (),
    capture_pods: tuple[Body, ...] = (),
    plan: Body | None = None,
    **spec: Any,
) -> Any:
    condition = {"type": "Ready", "status": ready[0], "reason": ready[1], "lastTransitionTime": since.isoformat()}
    status = {"conditions": [condition], "plan": {"product": "NVIDIA-H200", **(plan or {})}}
    body = {"metadata": {"namespace": namespace, "name": name}, "spec": spec, "status": status}
    bodies = [
        {"metadata": {}, "status": {}, **pod} if "metadata" in pod else {"metadata": {}, "status": pod} for pod in pods
    ]
    return read_serving(body, bodies, captures, [{"metadata": {}, **each} for each in capture_pods])


def first(*servings: Any) -> str | None:
    return serving_goes_first(LLAMA, servings, NOON)


class TestOwnDeployment:
    @pytest.mark.parametrize(
        "pods",
        [(), (UNPLACED,), ({},), ({"phase": "Failed"},), ({"metadata": {"deletionTimestamp": "x"}, "status": PLACED},)],
    )
    def test_own_deployment_goes_first_while_engine_has_no_node(self, pods: tuple[Body, ...]) -> None:
        said = first(serving(*pods, since=NOON - timedelta(days=9)))
        assert said is not None
        assert "deployment llama has 0 of 1 engine pods on nodes" in said

    @pytest.mark.parametrize("pod", [PLACED, {"phase": "Running"}])
    def test_own_deployment_does_not_go_first_once_engines_have_nodes(self, pod: Body) -> None:
        assert first(serving(pod)) is None
        assert first(serving(pod, replicas=2)) is not None
        assert first(serving(pod, plan={"nodesPerReplica": 2})) is not None, "half a group serves nobody"
        assert first(serving(pod, UNPLACED)) is not None, "a rollout starts the new engine first"

    def test_own_deployment_goes_first_until_lent_gpus_are_back(self) -> None:
        said = first(serving(ready=LENT, captures=(borrowing(),)))
        assert said is not None
        assert "deployment llama has lent its GPUs to capture demo" in said
        assert first(serving(ready=LENT)) is not None, "the capture ended, or was deleted, and nothing is scaled yet"

    def test_cpu_deployment_lends_its_place(self) -> None:
        said = first(serving(ready=LENT, captures=(borrowing(),), plan={"product": "CPU"}))
        assert "deployment llama has lent its place to capture demo" in str(said)

    def test_deployment_with_zero_engines_wanted_does_not_go_first(self) -> None:
        assert first(serving(suspend=True)) is None
        assert first(serving(replicas=0, captures=(borrowing(),))) is None

    def test_deleted_deployment_does_not_go_first(self) -> None:
        assert first(serving(name="other", ready=("True", "Available"))) is None
        assert first() is None


class TestOtherDeployments:
    def others(self, **other: Any) -> str | None:
        return first(serving(PLACED), serving(**{"name": "other", **other}))

    def test_lending_deployment_goes_first(self) -> None:
        said = self.others(ready=LENT, since=NOON - timedelta(days=1), captures=(borrowing(),))
        assert said is not None
        assert "deployment other has lent its GPUs to capture demo" in said
        assert self.others(ready=LENT) is not None, "also just after the capture was deleted"
        assert self.others(ready=LENT, since=NOON - timedelta(days=1)) is not None, "however long it had lent them"
        assert self.others(ready=LENT_BEFORE_AN_UPGRADE) is not None
        assert self.others(ready=("True", "Available"), captures=(borrowing(),)) is not None, "from the start"

    def test_starting_deployment_goes_first_for_ten_minutes(self) -> None:
        assert self.others(since=NOON - timedelta(minutes=9, seconds=59)) is not None
        assert self.others(since=NOON - timedelta(minutes=10)) is None
        assert self.others(ready=("True", "Available")) is None, "one that serves has what it needs"

    def test_lending_deployment_of_other_namespace_without_gpus_is_ignored(self) -> None:
        """Without GPUs in their namespace they would otherwise hold up every capture of the cluster."""
        assert self.others(namespace="secret", ready=LENT) is None

    @pytest.mark.parametrize("reason", ["GateFailed", "Starting"])
    def test_ten_minutes_begin_when_capture_ends(self, reason: str) -> None:
        """Also if Ready is False again after the capture that judged them, as at a gate."""
        lent = Readiness(FALSE, "SuspendedForCapture", "", reconciling=True).conditions()
        before = stamp(lent, [], 1, NOON - timedelta(days=1))
        back = Readiness(FALSE if reason == "GateFailed" else UNKNOWN, reason, "").conditions()
        after = stamp(back, before, 1, NOON - timedelta(minutes=9))
        (ready,) = (each for each in after if each.type == "Ready")
        since = datetime.fromisoformat(ready.last_transition_time)
        assert self.others(ready=(ready.status.value, ready.reason), since=since) is not None
        assert stamp(back, after, 1, NOON)[0].last_transition_time == ready.last_transition_time
        assert lent_since(before) == NOON - timedelta(days=1)
        again = stamp(lent, after, 1, NOON)
        assert lent_since(again) == NOON
        assert lent_since(after) is None

    def test_deployment_without_plan_does_not_go_first(self) -> None:
        assert self.others(plan={"product": None}) is None
        own = serving(PLACED, plan={"product": None})
        assert first(own, serving(name="other", plan={"product": None})) is None

    def test_deployment_on_other_gpu_product_does_not_go_first(self) -> None:
        assert self.others(plan={"product": "NVIDIA-H100"}, ready=LENT) is None

    def test_deployment_of_other_namespace_goes_first_unnamed(self) -> None:
        for captures in ((), (borrowing(),)):
            said = self.others(namespace="secret", ready=LENT, captures=captures, capture_pods=(ON_GPUS,))
            assert said is not None
            assert said.startswith("a deployment of another namespace has ")
            assert not re.search(r"\b(secret|other|demo)\b", said)

    @pytest.mark.parametrize(
        "pod",
        [
            {**ON_GPUS, "status": UNPLACED},
            {**ON_GPUS, "status": {**PLACED, "phase": "Failed"}},
            {"status": PLACED},
            {**ON_GPUS, "spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "0"}}}]}},
        ],
        ids=["no node", "ended", "no limits", "no GPU"],
    )
    def test_other_namespace_without_gpu_pods_does_not_go_first(self, pod: Body) -> None:
        lends: dict[str, Any] = {"namespace": "secret", "ready": LENT, "captures": (borrowing(),)}
        assert self.others(**lends) is None
        assert self.others(**lends, capture_pods=(pod,)) is None
        assert first(serving(PLACED), serving(PLACED, name="other", replicas=2, **lends)) is None
        ends = {**ON_GPUS, "metadata": {"deletionTimestamp": "x"}}
        assert first(serving(PLACED), serving(ends, name="other", **lends)) is not None, "its engines are about to go"

    def test_deployment_of_own_namespace_is_named_first(self) -> None:
        servings = [serving(PLACED), serving(name="a", namespace="a"), serving(name="z")]
        assert "deployment z has 0 of 1" in str(first(*servings))

    def test_first_deployment_by_name_is_named(self) -> None:
        servings = [serving(PLACED), serving(name="z"), serving(name="y")]
        assert "deployment y has 0 of 1" in str(first(*servings))


class TestWaitingCapture:
    def test_capture_waits_while_deployment_goes_first(self) -> None:
        decision, status = decided(capture(), surroundings(**WAITS))
        assert decision.writes.job is None
        assert decision.writes.claim is None
        assert words(status)["Ready"] == ("Unknown", "WaitingForDeployment")
        assert WAITS["goes_first"] in next(each.message for each in status.conditions if each.type == "Ready")
        decision, _ = decided(capture(), surroundings())
        assert decision.writes.job is not None, "it begins once nobody goes before it"

    def test_other_blocker_is_reported_instead_of_waiting(self) -> None:
        _, status = decided(capture(), surroundings(**WAITS, deployment=None))
        assert words(status)["Ready"][1] == "DeploymentNotFound"

    @pytest.mark.parametrize("pods", [[], [capture_pod(**UNPLACED)]])
    def test_unscheduled_capture_job_is_suspended_while_waiting(self, pods: list[Body]) -> None:
        decision, status = decided(capture(), surroundings(**WAITS, job=job(), pods=pods))
        assert decision.writes.job_suspended is True
        assert words(status)["Ready"][1] == "WaitingForDeployment"
        decision, _ = decided(capture(), surroundings(**WAITS, job=job(suspend=True)))
        assert decision.writes.job_suspended is None, "once is enough"
        decision, _ = decided(capture(), surroundings(job=job(suspend=True)))
        assert decision.writes.job_suspended is False, "and stands in it again"

    @pytest.mark.parametrize("pod", [capture_pod(), capture_pod(**PLACED), capture_pod(phase="Failed")])
    def test_scheduled_capture_job_is_not_suspended(self, pod: Body) -> None:
        decision, _ = decided(capture(), surroundings(**WAITS, job=job(), pods=[pod]))
        assert decision.writes.job_suspended is None

    def test_queued_capture_keeps_job_until_admitted(self) -> None:
        body = capture(labels={"kueue.x-k8s.io/queue-name": "gpus"})
        decision, status = decided(body, surroundings(**WAITS, job=job(suspend=True)))
        assert (decision.writes.remove_job, words(status)["Ready"][1]) == (False, "Queued")
        decision, _ = decided(body, surroundings(**WAITS, job=job()))
        assert decision.writes.remove_job, "suspended, Kueue would start it again"

    def test_waiting_capture_can_be_cancelled(self) -> None:
        body = capture(capture_spec(suspend=True))
        _, status = decided(body, surroundings(**WAITS, job=job(suspend=True)))
        assert words(status)["Ready"] == ("True", "Suspended")
