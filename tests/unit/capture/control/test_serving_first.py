"""A capture that keeps its deployment's engines takes no place that engines are about to have."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from specdecode_operator.api.deployment import Key
from specdecode_operator.capture.gpu_sharing import read_serving, serving_goes_first
from specdecode_operator.deployment.conditions import FALSE, UNKNOWN, stamp
from specdecode_operator.deployment.rollout.readiness import Readiness, lent_since
from tests.support.capture_decisions import decided, words
from tests.support.captures import capture, capture_pod, capture_spec, job, surroundings
from tests.support.objects import Body
from tests.unit.capture.control.test_preemption import borrowing

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
LLAMA = Key("default", "llama")
PLACED: Body = {"conditions": [{"type": "PodScheduled", "status": "True"}], "phase": "Pending"}
UNPLACED: Body = {"conditions": [{"type": "PodScheduled", "status": "False"}], "phase": "Pending"}
ON_GPUS: Body = {"spec": {"containers": [{}, {"resources": {"limits": {"nvidia.com/gpu": "1"}}}]}, "status": PLACED}
LENT = ("False", "SuspendedForCapture")
LENT_BEFORE_AN_UPGRADE = ("True", "SuspendedForCapture")
WAITS = {"goes_first": "deployment llama has 0 of 1 engine pods on nodes"}


def serving(  # noqa: PLR0913  what a deployment is known by
    *pods: Body,
    name: str = "llama",
    namespace: str = "default",
    ready: tuple[str, str] = ("Unknown", "Starting"),
    since: datetime = NOW - timedelta(minutes=1),
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
    return serving_goes_first(LLAMA, servings, NOW)


class TestItsOwnDeployment:
    @pytest.mark.parametrize(
        "pods",
        [(), (UNPLACED,), ({},), ({"phase": "Failed"},), ({"metadata": {"deletionTimestamp": "x"}, "status": PLACED},)],
    )
    def test_goes_first_while_an_engine_that_is_wanted_has_no_node(self, pods: tuple[Body, ...]) -> None:
        said = first(serving(*pods, since=NOW - timedelta(days=9)))
        assert said is not None
        assert "deployment llama has 0 of 1 engine pods on nodes" in said

    @pytest.mark.parametrize("pod", [PLACED, {"phase": "Running"}])
    def test_does_not_once_all_have_one(self, pod: Body) -> None:
        assert first(serving(pod)) is None
        assert first(serving(pod, replicas=2)) is not None
        assert first(serving(pod, plan={"nodesPerReplica": 2})) is not None, "half a group serves nobody"
        assert first(serving(pod, UNPLACED)) is not None, "a rollout starts the new engine first"

    def test_goes_first_while_it_lends_its_gpus_and_until_its_engines_are_back(self) -> None:
        said = first(serving(ready=LENT, captures=(borrowing(),)))
        assert said is not None
        assert "deployment llama has lent its GPUs to capture demo" in said
        assert first(serving(ready=LENT)) is not None, "the capture ended, or was deleted, and nothing is scaled yet"

    def test_has_no_gpus_to_lend_on_cpu(self) -> None:
        said = first(serving(ready=LENT, captures=(borrowing(),), plan={"product": "CPU"}))
        assert "deployment llama has lent its place to capture demo" in str(said)

    def test_wants_nothing_where_nothing_is_asked_for(self) -> None:
        assert first(serving(suspend=True)) is None
        assert first(serving(replicas=0, captures=(borrowing(),))) is None

    def test_that_is_deleted_is_waited_for_no_more(self) -> None:
        assert first(serving(name="other", ready=("True", "Available"))) is None
        assert first() is None


class TestOthers:
    def others(self, **other: Any) -> str | None:
        return first(serving(PLACED), serving(**{"name": "other", **other}))

    def test_go_first_while_they_lend(self) -> None:
        said = self.others(ready=LENT, since=NOW - timedelta(days=1), captures=(borrowing(),))
        assert said is not None
        assert "deployment other has lent its GPUs to capture demo" in said
        assert self.others(ready=LENT) is not None, "also just after the capture was deleted"
        assert self.others(ready=LENT, since=NOW - timedelta(days=1)) is not None, "however long it had lent them"
        assert self.others(ready=LENT_BEFORE_AN_UPGRADE) is not None
        assert self.others(ready=("True", "Available"), captures=(borrowing(),)) is not None, "from the start"

    def test_go_first_while_their_engines_come_back_but_not_for_ever(self) -> None:
        assert self.others(since=NOW - timedelta(minutes=9, seconds=59)) is not None
        assert self.others(since=NOW - timedelta(minutes=10)) is None
        assert self.others(ready=("True", "Available")) is None, "one that serves has what it needs"

    def test_that_only_lend_are_not_coming_back_yet(self) -> None:
        """Without GPUs in their namespace they would otherwise hold up every capture of the cluster."""
        assert self.others(namespace="secret", ready=LENT) is None

    @pytest.mark.parametrize("reason", ["GateFailed", "Starting"])
    def test_are_given_their_ten_minutes_from_the_end_of_the_capture_on(self, reason: str) -> None:
        """Also if Ready is False again after the capture that judged them, as at a gate."""
        lent = Readiness(FALSE, "SuspendedForCapture", "", reconciling=True).conditions()
        before = stamp(lent, [], 1, NOW - timedelta(days=1))
        back = Readiness(FALSE if reason == "GateFailed" else UNKNOWN, reason, "").conditions()
        after = stamp(back, before, 1, NOW - timedelta(minutes=9))
        (ready,) = (each for each in after if each.type == "Ready")
        since = datetime.fromisoformat(ready.last_transition_time)
        assert self.others(ready=(ready.status.value, ready.reason), since=since) is not None
        assert stamp(back, after, 1, NOW)[0].last_transition_time == ready.last_transition_time
        assert lent_since(before) == NOW - timedelta(days=1)
        again = stamp(lent, after, 1, NOW)
        assert lent_since(again) == NOW
        assert lent_since(after) is None

    def test_without_a_plan_want_nothing(self) -> None:
        assert self.others(plan={"product": None}) is None
        own = serving(PLACED, plan={"product": None})
        assert first(own, serving(name="other", plan={"product": None})) is None

    def test_on_other_gpus_are_not_in_the_way(self) -> None:
        assert self.others(plan={"product": "NVIDIA-H100"}, ready=LENT) is None

    def test_in_other_namespaces_are_waited_for_but_not_named(self) -> None:
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
    def test_in_other_namespaces_that_have_no_gpus_hold_up_nobody(self, pod: Body) -> None:
        lends: dict[str, Any] = {"namespace": "secret", "ready": LENT, "captures": (borrowing(),)}
        assert self.others(**lends) is None
        assert self.others(**lends, capture_pods=(pod,)) is None
        assert first(serving(PLACED), serving(PLACED, name="other", replicas=2, **lends)) is None
        ends = {**ON_GPUS, "metadata": {"deletionTimestamp": "x"}}
        assert first(serving(PLACED), serving(ends, name="other", **lends)) is not None, "its engines are about to go"

    def test_that_can_be_named_are_named_before_those_that_cannot(self) -> None:
        servings = [serving(PLACED), serving(name="a", namespace="a"), serving(name="z")]
        assert "deployment z has 0 of 1" in str(first(*servings))

    def test_may_be_several_in_one_place_the_first_by_name_is_named(self) -> None:
        servings = [serving(PLACED), serving(name="z"), serving(name="y")]
        assert "deployment y has 0 of 1" in str(first(*servings))


class TestTheCapture:
    def test_is_not_begun(self) -> None:
        decision, status = decided(capture(), surroundings(**WAITS))
        assert decision.writes.job is None
        assert decision.writes.claim is None
        assert words(status)["Ready"] == ("Unknown", "WaitingForDeployment")
        assert WAITS["goes_first"] in next(each.message for each in status.conditions if each.type == "Ready")
        decision, _ = decided(capture(), surroundings())
        assert decision.writes.job is not None, "it begins once nobody goes before it"

    def test_that_could_not_begin_anyway_says_why(self) -> None:
        _, status = decided(capture(), surroundings(**WAITS, deployment=None))
        assert words(status)["Ready"][1] == "DeploymentNotFound"

    @pytest.mark.parametrize("pods", [[], [capture_pod(**UNPLACED)]])
    def test_leaves_the_scheduler_s_line(self, pods: list[Body]) -> None:
        decision, status = decided(capture(), surroundings(**WAITS, job=job(), pods=pods))
        assert decision.writes.job_suspended is True
        assert words(status)["Ready"][1] == "WaitingForDeployment"
        decision, _ = decided(capture(), surroundings(**WAITS, job=job(suspend=True)))
        assert decision.writes.job_suspended is None, "once is enough"
        decision, _ = decided(capture(), surroundings(job=job(suspend=True)))
        assert decision.writes.job_suspended is False, "and stands in it again"

    @pytest.mark.parametrize("pod", [capture_pod(), capture_pod(**PLACED), capture_pod(phase="Failed")])
    def test_goes_on_once_it_has_its_place(self, pod: Body) -> None:
        decision, _ = decided(capture(), surroundings(**WAITS, job=job(), pods=[pod]))
        assert decision.writes.job_suspended is None

    def test_in_a_queue_keeps_its_place_there_until_it_was_admitted(self) -> None:
        body = capture(labels={"kueue.x-k8s.io/queue-name": "gpus"})
        decision, status = decided(body, surroundings(**WAITS, job=job(suspend=True)))
        assert (decision.writes.remove_job, words(status)["Ready"][1]) == (False, "Queued")
        decision, _ = decided(body, surroundings(**WAITS, job=job()))
        assert decision.writes.remove_job, "suspended, Kueue would start it again"

    def test_can_be_cancelled_meanwhile(self) -> None:
        body = capture(capture_spec(suspend=True))
        _, status = decided(body, surroundings(**WAITS, job=job(suspend=True)))
        assert words(status)["Ready"] == ("True", "Suspended")
