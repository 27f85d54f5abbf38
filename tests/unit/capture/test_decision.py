"""Whether a capture may start, and what to do next."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.api.deployment import Key
from specdecode_operator.capture.borrowing import lending_to
from specdecode_operator.capture.comparison.regression import AGAINST_MOUNT, AGAINST_VARIABLE
from specdecode_operator.capture.decision import blocked_by_cluster, decide, not_observed
from specdecode_operator.capture.gpu_sharing import preempting_capture
from specdecode_operator.capture.job.pod_files import IMAGE_ID_FILE, engine_image_id
from specdecode_operator.capture.job_manifest import wrap_up_s
from specdecode_operator.capture.observation import CaptureObservation, read_capture
from specdecode_operator.capture.preconditions import workload_blocked
from specdecode_operator.capture.status import compose_status, is_outlived
from specdecode_operator.cluster.manifests import owner_reference
from specdecode_operator.cluster.resources import CAPTURED_ENGINE_ANNOTATION, QUEUE_LABEL, SCHEDULE_LABEL
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.deployment.engine_pod import engine_timeouts
from specdecode_operator.deployment.rollout.readiness import Lending, stalled
from tests.support.capture_decisions import NOW, after, decided, words
from tests.support.captures import (
    SHORT,
    capture,
    capture_pod,
    capture_spec,
    claim,
    ended,
    golden,
    job,
    observed_deployment,
    running,
    surroundings,
)
from tests.support.field_cases import NODES
from tests.support.objects import pair_70b, tiny_cpu
from tests.support.replay_field_cases import replaying


def test_valid_capture_gets_claim_and_job() -> None:
    decision, status = decided(capture())
    assert decision.writes.claim is not None
    assert decision.writes.job is not None
    assert decision.writes.job["spec"]["suspend"] is False
    assert status.phase == "Pending"
    assert words(status)["Accepted"] == ("True", "Valid")
    assert words(status)["Ready"] == ("Unknown", "Starting")
    assert status.claim == "demo-capture"
    assert status.path is None, "there are no files yet"


HOT, COLD = ({**SHORT["phases"][0], "temperature": temperature} for temperature in ("0.7", "0.0"))
MIXED = [{"temperature": "0.0", "sharePercent": 50}, {"temperature": "1.0", "sharePercent": 50}]


@pytest.mark.parametrize(
    ("workload", "warned"),
    [
        ({}, False),
        ({"phases": [HOT]}, True),
        ({"phases": [COLD, {**HOT, "name": "hot"}]}, True),
        ({"phases": SHORT["phases"], "temperatures": MIXED}, True),
        ({"phases": [COLD], "temperatures": MIXED}, False),
    ],
)
def test_sampled_load_on_cpu_is_a_warning(workload: Body, *, warned: bool) -> None:
    body, seen = capture(capture_spec(workload=workload)), surroundings()
    decision, status = decided(body, seen)
    assert decision.writes.job is not None
    assert words(status)["Accepted"] == ("True", "Valid")
    assert len(decision.warnings) == warned
    for each in (status, decided(after(body, seen), surroundings(job=job()))[1]):
        accepted = next(one for one in each.conditions if one.type == "Accepted")
        assert ("vllm#55005" in accepted.message) == warned


def test_sampled_load_is_no_warning_on_a_gpu_or_without_speculation() -> None:
    asked = capture_spec(workload={"phases": [HOT]})
    for spec in (pair_70b(), tiny_cpu(speculation=None)):
        deployment = observed_deployment(spec, nodes=NODES, capture=asked)
        decision, _ = decided(capture(asked), surroundings(deployment=deployment))
        assert decision.writes.job is not None
        assert decision.warnings == ()


def test_claim_left_by_earlier_capture_is_reused() -> None:
    left = claim(labels={"specdecode.io/capture": "demo"})
    decision, _ = decided(capture(), surroundings(claim=left))
    assert decision.writes.claim is None
    assert decision.writes.job is not None, "what it holds are partial files"


def test_published_files_of_other_capture_do_not_block_job() -> None:
    given = claim("mine", labels={"specdecode.io/capture": "other", "specdecode.io/published": "true"})
    decision, _ = decided(
        capture(capture_spec(storage={"persistentVolumeClaim": {"claimName": "mine"}})), surroundings(claim=given)
    )
    assert decision.writes.job is not None


def test_claim_owned_by_earlier_capture_is_awaited() -> None:
    left = claim(labels={"specdecode.io/capture": "demo"})
    left["metadata"]["ownerReferences"] = [{"uid": "earlier"}]
    _, status = decided(capture(), surroundings(claim=left))
    assert words(status)["Ready"] == ("Unknown", "WaitingForCleanup")


class TestRetain:
    def test_retained_claim_has_no_owner(self) -> None:
        decision, _ = decided(capture())
        assert decision.writes.claim is not None
        metadata = decision.writes.claim["metadata"]
        assert metadata["ownerReferences"] == []
        assert metadata["labels"]["specdecode.io/capture"] == "demo"
        assert metadata["labels"]["specdecode.io/captured-deployment"] == "llama"

    @pytest.mark.parametrize(
        ("owners", "counted"),
        [
            ([owner_reference(Key("default", "llama"), "uid-1")], True),
            ([owner_reference(Key("default", "other"), "uid-2")], False),
            ([], False),
        ],
    )
    def test_claim_has_schedule_label_only_if_deployment_owns_capture(
        self, owners: list[Body], *, counted: bool
    ) -> None:
        """Who gives a capture the label would push out good data of the schedule's."""
        decision, _ = decided(capture(labels={SCHEDULE_LABEL: "nightly"}, ownerReferences=owners))
        assert decision.writes.claim is not None
        assert (decision.writes.claim["metadata"]["labels"].get(SCHEDULE_LABEL) == "nightly") is counted

    def test_claim_not_retained_is_owned_by_capture(self) -> None:
        decision, _ = decided(capture(capture_spec(storage={"retain": False, "size": "1Gi"})))
        assert decision.writes.claim is not None
        assert [owner["uid"] for owner in decision.writes.claim["metadata"]["ownerReferences"]] == ["capture-uid"]
        assert decision.writes.claim["spec"]["resources"] == {"requests": {"storage": "1Gi"}}

    def test_changed_retain_updates_claim_owner(self) -> None:
        kept = claim(labels={"specdecode.io/capture": "demo"})
        decision, _ = decided(capture(capture_spec(storage={"retain": False})), surroundings(claim=kept, job=job()))
        owners = decision.writes.claim_metadata["ownerReferences"]
        assert [owner["uid"] for owner in owners] == ["capture-uid"]
        kept["metadata"]["ownerReferences"] = owners
        decision, _ = decided(capture(), surroundings(claim=kept, job=job()))
        assert decision.writes.claim_metadata == {"ownerReferences": [], "uid": kept["metadata"]["uid"]}

    def test_succeeded_capture_labels_its_claim_published(self) -> None:
        made = claim(labels={"specdecode.io/capture": "demo"})
        published = {"labels": {"specdecode.io/published": "true"}, "uid": made["metadata"]["uid"]}
        running_one, _ = decided(capture(), surroundings(claim=made, job=job()))
        assert running_one.writes.claim_metadata == {}
        failed, _ = decided(capture(), surroundings(claim=made, job=job("Failed")))
        assert failed.writes.claim_metadata == {}
        succeeded, _ = decided(capture(), surroundings(claim=made, job=job("Complete")))
        assert succeeded.writes.claim_metadata == published
        ended_one = after(capture(), surroundings(claim=made, job=job("Complete")))
        later, _ = decided(ended_one, surroundings(claim=made))
        assert later.writes.claim_metadata == published, "also where the first time something was in the way"
        made["metadata"]["labels"] |= published["labels"]
        kept = capture(capture_spec(storage={"retain": False}))
        told, _ = decided({**kept, "status": ended_one["status"]}, surroundings(claim=made))
        assert "ownerReferences" in told.writes.claim_metadata, "whether it is kept may be changed all the same"
        told, _ = decided(ended_one, surroundings(claim=made))
        assert told.writes.claim_metadata == {}, "once is enough"
        again, _ = decided(capture(), surroundings(claim=made, job=job("Failed")))
        assert again.writes.claim_metadata == {}, "another one of the name that fails takes nothing away"

    def test_already_published_failure_labels_claim_published(self) -> None:
        made = claim(labels={"specdecode.io/capture": "demo"})
        said = {"error": {"reason": "AlreadyPublished", "message": "holds a finished capture"}}
        pod = capture_pod(phase="Failed", initContainerStatuses=[ended("prepare", 1, said)])
        decision, _ = decided(capture(), surroundings(claim=made, job=job("Failed"), pods=[pod]))
        assert decision.succeeded.reason == "AlreadyPublished"
        assert decision.writes.claim_metadata["labels"] == {"specdecode.io/published": "true"}

    def test_existing_claim_is_not_changed(self) -> None:
        spec = capture_spec(storage={"persistentVolumeClaim": {"claimName": "mine"}, "retain": False})
        decision, status = decided(capture(spec), surroundings(claim=claim("mine")))
        assert decision.writes.claim is None
        assert decision.writes.claim_metadata == {}
        assert status.claim == "mine"


class TestSuspend:
    def test_suspending_running_capture_cancels_it(self) -> None:
        body = capture(capture_spec(suspend=True))
        decision, status = decided(body, surroundings(job=job(), pods=[capture_pod()]))
        assert decision.writes.job_suspended is True
        assert status.phase == "Cancelled"
        assert words(status)["Ready"] == ("True", "Suspended")
        assert words(status)["Succeeded"] == ("Unknown", "Suspended")
        decision, _ = decided(body, surroundings(job=job(suspend=True)))
        assert decision.writes.job_suspended is None, "once is enough"

    def test_resuming_capture_resumes_its_job(self) -> None:
        decision, _ = decided(capture(), surroundings(job=job(suspend=True)))
        assert decision.writes.job_suspended is False

    def test_suspended_capture_creates_no_job(self) -> None:
        decision, status = decided(capture(capture_spec(suspend=True)))
        assert decision.writes.job is None
        assert status.phase == "Cancelled"

    def test_job_failure_during_cancellation_is_failed(self) -> None:
        _, status = decided(capture(capture_spec(suspend=True)), surroundings(job=job("Failed")))
        assert status.phase == "Failed"


QUEUED = {QUEUE_LABEL: "gpus", "kueue.x-k8s.io/priority-class": "low", "team": "serving"}
BORROWS = capture_spec(deploymentDuringCapture="Suspend")


def suspended_job() -> Body:
    """The Job of a capture that borrows GPUs, as it is created."""
    decision, _ = decided(capture(BORROWS))
    assert decision.writes.job is not None
    return {**job(), "spec": decision.writes.job["spec"]}


class TestQueue:
    def test_job_with_queue_label_is_created_suspended(self) -> None:
        decision, _ = decided(capture(labels=QUEUED))
        assert decision.writes.job is not None
        assert decision.writes.job["spec"]["suspend"] is True
        labels = decision.writes.job["metadata"]["labels"]
        assert labels[QUEUE_LABEL] == "gpus"
        assert labels["kueue.x-k8s.io/priority-class"] == "low"
        assert "team" not in labels
        pod_labels = decision.writes.job["spec"]["template"]["metadata"]["labels"]
        assert QUEUE_LABEL not in pod_labels, "the Job is queued, not its pod"

    def test_queued_capture_borrows_no_gpus_before_admission(self) -> None:
        body = capture(BORROWS, labels=QUEUED)
        assert preempting_capture([after(body, surroundings())]) is None
        assert preempting_capture([after(body, surroundings(job=job(suspend=True)))]) is None
        assert preempting_capture([after(body, surroundings(job=job()))]) == "demo"

    def test_queued_job_is_not_resumed_by_operator(self) -> None:
        decision, status = decided(capture(labels=QUEUED), surroundings(job=job(suspend=True)))
        assert decision.writes.job_suspended is None
        assert words(status)["Ready"] == ("Unknown", "Queued")

    @pytest.mark.parametrize("admitted", [False, True])
    def test_cancelled_capture_removes_its_queued_job(self, *, admitted: bool) -> None:
        body = capture(capture_spec(suspend=True), labels=QUEUED)
        decision, _ = decided(body, surroundings(job=job(suspend=not admitted)))
        assert decision.writes.remove_job
        assert decision.writes.job_suspended is None


class TestBorrowing:
    def test_borrowing_job_is_created_suspended(self) -> None:
        decision, _ = decided(capture(BORROWS))
        assert decision.writes.job is not None
        assert decision.writes.job["spec"]["suspend"] is True, "what stands in its way is known before GPUs are taken"
        assert decision.writes.job["spec"]["activeDeadlineSeconds"] > 1800, "it cannot keep them for ever"

    @pytest.mark.parametrize("held", [{"engines_wanted": 1}, {"pods": [{}]}])
    def test_borrowing_job_waits_for_last_engine_pod(self, held: dict[str, Any]) -> None:
        suspended = suspended_job()
        seen = surroundings(deployment=observed_deployment(**held), job=suspended)
        decision, status = decided(capture(BORROWS), seen)
        assert decision.writes.job_suspended is None
        assert words(status)["Ready"] == ("Unknown", "WaitingForDeployment")
        borrowed = after(capture(BORROWS), seen)
        assert preempting_capture([borrowed]) == "demo"
        decision, _ = decided(borrowed, seen)
        assert decision.writes.job_suspended is None
        decision, _ = decided(borrowed, surroundings(job=suspended))
        assert decision.writes.job_suspended is False

    def test_borrowing_job_resumes_if_deployment_is_deleted(self) -> None:
        seen = surroundings(deployment=None, job=suspended_job())
        decision, _ = decided(after(capture(BORROWS), seen), seen)
        assert decision.writes.job_suspended is False

    def test_job_running_without_borrowed_gpus_is_suspended_unless_loading(self) -> None:
        """A restored backup lacks statuses; a person may start the Job."""
        decision, _ = decided(capture(BORROWS), surroundings(job=job()))
        assert decision.writes.job_suspended is True
        loading = capture_pod(containerStatuses=[running("load")])
        seen = surroundings(job=job(), pods=[loading])
        assert preempting_capture([after(capture(BORROWS), seen)]) == "demo"

    def test_only_one_capture_borrows_gpus_at_a_time(self) -> None:
        lent = observed_deployment(lent_to="other")
        seen = surroundings(deployment=lent, job=suspended_job())
        body = after(capture(BORROWS), seen)
        assert preempting_capture([body]) is None
        _, status = decided(body, seen)
        assert words(status)["Ready"] == ("Unknown", "WaitingForDeployment")
        borrowed = after(capture(BORROWS), surroundings(job=suspended_job()))
        again = after(borrowed, seen)
        assert preempting_capture([again]) is None, "the one that borrowed them later at one moment yields"
        assert "failedAttempts" not in again["status"]["borrow"] or again["status"]["borrow"]["failedAttempts"] == 0


def test_name_conflict_blocks_capture_start() -> None:
    decision, _ = decided(capture())
    subject = read_capture(capture())
    blocked = blocked_by_cluster(subject, decision, stalled("ChildNameConflict", "taken"))
    status = compose_status(subject, blocked, NOW)
    assert words(status)["Accepted"] == ("Unknown", "ChildNameConflict")
    assert words(status)["Ready"] == ("False", "ChildNameConflict")


def test_cleanup_error_does_not_change_completed_capture() -> None:
    decision, _ = decided(capture(), surroundings(job=job("Complete")))
    assert blocked_by_cluster(read_capture(capture()), decision, stalled("Forbidden", "no")) == decision


def test_refused_trial_pod_prevents_borrowing() -> None:
    subject = read_capture(capture(BORROWS))
    decision, _ = decided(capture(BORROWS), surroundings(job=suspended_job()))
    assert decision.writes.trial_pod is not None
    status = compose_status(subject, blocked_by_cluster(subject, decision, stalled("PodRefused", "no")), NOW)
    assert words(status)["Accepted"] == ("Unknown", "PodRefused")
    assert status.borrow is None


def test_unobservable_capture_returns_gpus() -> None:
    borrowed = after(capture(BORROWS), surroundings(job=suspended_job()))
    subject = read_capture(borrowed)
    status = compose_status(subject, not_observed(subject, Blocked("Forbidden", "no"), NOW), NOW)
    assert status.borrow is not None
    assert status.borrow.returned_at is not None
    assert status.borrow.last_failure == "Forbidden: no"


def test_finished_capture_expires_after_its_ttl() -> None:
    body = after(capture(capture_spec(ttlSecondsAfterFinished=60)), surroundings(job=job("Complete")))
    subject = read_capture(body)
    finished = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)
    assert not is_outlived(subject, finished + timedelta(seconds=59), 60)
    assert is_outlived(subject, finished + timedelta(seconds=60), 60)
    assert not is_outlived(subject, finished + timedelta(seconds=60), 59)
    assert not is_outlived(read_capture(capture(capture_spec(ttlSecondsAfterFinished=0))), finished, 60)


def test_invalid_spec_field_is_named() -> None:
    _, status = decided(capture({"deployment": "llama", "seed": "seven"}))
    assert words(status)["Accepted"] == ("False", "Invalid")
    (message,) = (each.message for each in status.conditions if each.type == "Ready")
    assert "spec.seed" in message


def test_engine_is_read_from_job_annotation_if_status_was_not_written() -> None:
    first = surroundings(deployment=replace(observed_deployment(), engine="0123456789abcdef"))
    decision, status = decided(capture(), first)
    made = decision.writes.job
    assert made is not None
    again = {**job(), "metadata": {**job()["metadata"], "annotations": made["metadata"]["annotations"]}}
    _, later = decided(capture(), surroundings(deployment=None, job=again))
    assert later.engine == status.engine == "0123456789abcdef"
    forged = {**again, "metadata": {**again["metadata"], "annotations": {CAPTURED_ENGINE_ANNOTATION: "x" * 300}}}
    assert decided(capture(), surroundings(job=forged))[1].engine is None


# A workload that no load can be made of is refused as the API server refuses it: by the rules of the CRD.

CLOSED = {"name": "a", "pattern": "Closed", "concurrency": 2, "requests": 5}
RATE = {"name": "a", "pattern": "Constant", "requestsPerSecond": "2", "requests": 5}
CONFIG_MAP = {"configMap": {"name": "p"}, "path": "a.jsonl", "format": "JSONL"}


def _phase(**fields: Any) -> dict[str, Any]:
    return {"phases": [{name: value for name, value in {**CLOSED, **fields}.items() if value is not None}]}


def _blocked(workload: dict[str, Any]) -> str:
    blocked = workload_blocked(SpecDecodeCaptureSpec.model_validate({"deployment": "llama", "workload": workload}))
    if blocked is None:
        return ""
    assert (blocked.reason, blocked.permanent) == ("Invalid", True)
    return blocked.message


@pytest.mark.parametrize(
    "workload",
    [
        {},
        _phase(),
        {"phases": [CLOSED, {**RATE, "name": "b"}]},
        _phase(pattern="Multiturn", turns=3, thinkSeconds=1),
        {"prompts": {"dataset": CONFIG_MAP}},
        {"prompts": {"synthetic": {"promptTokens": 8, "sharedPrefixTokens": 8}}},
    ],
)
def test_valid_workload_is_accepted(workload: dict[str, Any]) -> None:
    assert _blocked(workload) == ""


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (_phase(concurrency=None), "phases[0].concurrency: is missing: pattern Closed needs it"),
        (_phase(turns=3), "phases[0].turns: 3: pattern Closed does not use it"),
        (
            _phase(durationSeconds=9),
            "phases[0].durationSeconds: 9: a phase ends by time",
        ),
        (_phase(requests=None), "phases[0].durationSeconds: is missing: a phase ends"),
        (_phase(name="warmup"), "phases[0].name: warmup: is reserved for the requests before the first phase"),
        ({"phases": [CLOSED, RATE]}, "two phases have one name"),
        (_phase(pattern="Staircase", concurrency=None), "phases[0].stepSeconds: is missing: pattern Staircase needs"),
        (
            {"prompts": {"synthetic": {"promptTokens": 8, "sharedPrefixTokens": 9}}},
            "prompts.synthetic.sharedPrefixTokens: 9: longer than the prompts with promptTokens 8",
        ),
        ({"prompts": {}}, "prompts.synthetic: is missing: prompts have one source"),
        (
            {"prompts": {"dataset": {**CONFIG_MAP, "path": "../a"}}},
            "prompts.dataset.path: ../a: is not a path inside the volume",
        ),
        ({"temperatures": [{"temperature": "0.5", "sharePercent": 30}]}, "the shares add up to 30"),
    ],
)
def test_invalid_workload_is_refused_with_field(workload: dict[str, Any], message: str) -> None:
    assert _blocked(workload).startswith("spec.workload.")
    assert message in _blocked(workload)


# When a capture should give back the GPUs that it borrows, from its workload, Job and pod.

ONE_MINUTE: Body = {
    "phases": [{"name": "steady", "pattern": "Constant", "requestsPerSecond": "1", "durationSeconds": 60}]
}
DEADLINE_S, STARTUP_S = 3600, 300
POD_DEADLINE_S = STARTUP_S + DEADLINE_S + wrap_up_s(DEADLINE_S)
JOB_DEADLINE_S = POD_DEADLINE_S + 1800
JOB_START = datetime(2026, 1, 1, tzinfo=UTC)
POD_START = JOB_START + timedelta(seconds=20)
LOAD_START = JOB_START + timedelta(seconds=100)


def lent(body: Body, live: Body | None, pods: list[Body], since: datetime | None = None) -> Lending:
    return lending_to(body, live, pods, since)


def body_of_job(runs: int = 1, *, started: bool = True, **spec: Any) -> Body:
    pod_deadline_s = runs * POD_DEADLINE_S
    return {
        "metadata": {"namespace": "default", "name": "demo-capture", "uid": "job-uid"},
        "spec": {
            "suspend": not started,
            "activeDeadlineSeconds": pod_deadline_s + 1800,
            "backoffLimit": 0,
            "template": {"spec": {"activeDeadlineSeconds": pod_deadline_s}},
            **spec,
        },
        "status": {"startTime": JOB_START.isoformat()} if started else {},
    }


def borrower(workload: Body = ONE_MINUTE, **spec: Any) -> Body:
    return capture(capture_spec(workload=workload, deploymentDuringCapture="Suspend", **spec))


def pod(load: datetime | None = None, **status: Any) -> Body:
    state = {"waiting": {}} if load is None else {"running": {"startedAt": load.isoformat()}}
    return capture_pod(startTime=POD_START.isoformat(), containerStatuses=[{"name": "load", "state": state}], **status)


def test_expected_end_is_unknown_before_job_starts() -> None:
    for lending in (lent(borrower(), None, []), lent(borrower(), body_of_job(started=False), [])):
        assert (lending.capture, lending.expected_end, lending.latest_end) == ("demo", None, None)
        assert not lending.is_overdue(JOB_START + timedelta(days=365))


def test_unstarted_job_is_overdue_after_15_minutes() -> None:
    for live in (None, body_of_job(started=False)):
        lending = lending_to(borrower(), live, [], JOB_START)
        assert lending.overdue_from == JOB_START + timedelta(minutes=15)
    assert lending_to(borrower(), body_of_job(), [], JOB_START - timedelta(days=1)) == lent(
        borrower(), body_of_job(), []
    )


@pytest.mark.parametrize(
    ("pods", "expected", "latest"),
    [
        ([], JOB_START + timedelta(seconds=STARTUP_S + 60), JOB_START + timedelta(seconds=JOB_DEADLINE_S)),
        ([pod()], POD_START + timedelta(seconds=STARTUP_S + 60), POD_START + timedelta(seconds=POD_DEADLINE_S)),
        ([pod(LOAD_START)], LOAD_START + timedelta(seconds=60), POD_START + timedelta(seconds=POD_DEADLINE_S)),
    ],
    ids=["no pod yet", "the engine starts", "the load runs"],
)
def test_expected_end_follows_engine_startup_and_load(pods: list[Body], expected: datetime, latest: datetime) -> None:
    lending = lent(borrower(), body_of_job(), pods)
    assert (lending.expected_end, lending.latest_end) == (expected, latest)
    assert lending.overdue_from == expected + timedelta(seconds=wrap_up_s(60))
    assert not lending.is_overdue(expected)
    assert lending.is_overdue(expected + timedelta(seconds=wrap_up_s(60)))


def test_expected_end_covers_all_repetitions_and_arms() -> None:
    lending = lent(borrower(repetitions=3), body_of_job(runs=3), [pod(LOAD_START)])
    assert lending.expected_end == POD_START + timedelta(seconds=3 * (STARTUP_S + 60))
    assert lending.latest_end == POD_START + timedelta(seconds=3 * POD_DEADLINE_S)
    arms = [{"name": "as-deployed"}, {"name": "plain", "speculation": {"method": "none"}}]
    lending = lent(borrower(arms=arms), body_of_job(runs=4), [pod(LOAD_START)])
    assert lending.expected_end == POD_START + timedelta(seconds=4 * (STARTUP_S + 60)), "each arm is started twice"


@pytest.mark.parametrize(
    "phase",
    [
        {"name": "closed", "pattern": "Closed", "concurrency": 2, "requests": 8},
        {"name": "talk", "pattern": "Multiturn", "concurrency": 2, "requests": 8, "turns": 2},
    ],
    ids=lambda phase: phase["pattern"],
)
def test_closed_load_by_requests_has_no_expected_end(phase: Body) -> None:
    lending = lent(borrower({"phases": [*ONE_MINUTE["phases"], phase]}), body_of_job(), [pod(LOAD_START)])
    bound = POD_START + timedelta(seconds=POD_DEADLINE_S)
    assert (lending.expected_end, lending.latest_end, lending.overdue_from) == (None, bound, bound)
    timed = {**{key: each for key, each in phase.items() if key != "requests"}, "durationSeconds": 30}
    lending = lent(borrower({"phases": [*ONE_MINUTE["phases"], timed]}), body_of_job(), [pod(LOAD_START)])
    assert lending.expected_end == LOAD_START + timedelta(seconds=90)


def test_latest_end_with_retries_is_job_deadline() -> None:
    lending = lent(borrower(backoffLimit=1), body_of_job(backoffLimit=1), [pod(LOAD_START)])
    assert lending.latest_end == JOB_START + timedelta(seconds=JOB_DEADLINE_S)


def test_rendered_job_gives_expected_and_latest_end() -> None:
    seen = surroundings(deployment=observed_deployment(engines_wanted=0))
    rendered = decided(borrower(), seen)[0].writes.job
    assert rendered is not None
    launch = observed_deployment().desired.outcome
    assert isinstance(launch, Launch)
    startup_s = engine_timeouts(launch.facts, launch.plan).progress_deadline_s
    live = {**rendered, "status": {"startTime": JOB_START.isoformat()}}
    live["metadata"]["uid"], live["spec"]["suspend"] = body_of_job()["metadata"]["uid"], False
    lending = lent(borrower(), live, [pod()])
    assert lending.expected_end == POD_START + timedelta(seconds=startup_s + 60)
    assert lending.latest_end == POD_START + timedelta(seconds=startup_s + DEADLINE_S + wrap_up_s(DEADLINE_S))


def test_expected_end_is_that_of_newest_pod() -> None:
    old = pod(JOB_START, name="old", created="2026-01-01T00:00:00Z")
    new = pod(LOAD_START, name="new", created="2026-01-01T00:01:00Z")
    expected = LOAD_START + timedelta(seconds=60)
    assert lent(borrower(backoffLimit=1), body_of_job(backoffLimit=1), [new, old]).expected_end == expected


def test_expected_end_beyond_deadline_is_none() -> None:
    late = JOB_START + timedelta(seconds=JOB_DEADLINE_S)
    lending = lent(borrower(), body_of_job(backoffLimit=1), [pod(late)])
    assert (lending.expected_end, lending.latest_end) == (None, late)


@pytest.mark.parametrize(
    ("body", "live"),
    [
        (capture({"deployment": 5}), body_of_job()),
        (borrower({"phases": [{"name": "burst", "pattern": "Burst", "requests": 8}]}), body_of_job()),
        (
            borrower(),
            body_of_job(activeDeadlineSeconds=2**62, template={"spec": {"activeDeadlineSeconds": 2**62}}),
        ),
        (borrower(), body_of_job(activeDeadlineSeconds=None, template={})),
    ],
    ids=["invalid spec", "a phase that lacks fields", "a deadline beyond the calendar", "no deadlines"],
)
def test_expected_end_is_unknown_for_invalid_spec_or_job(body: Body, live: Body) -> None:
    assert lent(body, live, [pod()]).expected_end is None
    assert lent(body, live, []).expected_end is None


# What cannot be captured: told by a reason, and nothing is written.

BAD: dict[str, tuple[Body, CaptureObservation, str, bool, str]] = {
    "no deployment": (capture(), surroundings(deployment=None), "DeploymentNotFound", False, "llama"),
    "no plan": (
        capture(),
        surroundings(deployment=observed_deployment(pair_70b())),
        "DeploymentNotPlanned",
        False,
        "NoMatchingNodes",
    ),
    "not accepted": (
        capture(),
        surroundings(deployment=observed_deployment(tiny_cpu(engine={"image": "i:1", "extraArgs": ["--nonsense"]}))),
        "DeploymentNotPlanned",
        True,
        "extraArgs",
    ),
    "tokens held back": (
        capture(),
        surroundings(
            deployment=observed_deployment(tiny_cpu(engine={"image": "i:1", "extraArgs": ["--stream_interval=4"]}))
        ),
        "StreamIntervalNotOne",
        True,
        "--stream-interval 4",
    ),
    "tokens held back by two arguments": (
        capture(),
        surroundings(
            deployment=observed_deployment(tiny_cpu(engine={"image": "i:1", "extraArgs": ["--stream-interval", "2"]}))
        ),
        "StreamIntervalNotOne",
        True,
        "--stream-interval 2",
    ),
    "a frontend without Python": (
        capture(),
        surroundings(
            deployment=observed_deployment(
                tiny_cpu(engine={"image": "i:1", "env": [{"name": "VLLM_USE_RUST_FRONTEND", "value": "1"}]})
            )
        ),
        "RustFrontend",
        True,
        "remove it",
    ),
    "no engine but a recording": (
        capture(),
        surroundings(deployment=observed_deployment(replaying())),
        "EngineReplayed",
        True,
        "specdecode replay serve --record",
    ),
    "an engine that is too old": (
        capture(),
        surroundings(deployment=observed_deployment(tiny_cpu(engine={"image": "i:1", "version": "0.27"}))),
        "DeploymentNotPlanned",
        True,
        'write "0.28" or newer',
    ),
    "longer than its deadline": (
        capture(capture_spec(deadlineSeconds=179, workload={})),
        surroundings(),
        "WorkloadTooLong",
        True,
        "less than the 180 s",
    ),
    "answers longer than the engine allows": (
        capture(capture_spec(workload={**SHORT, "prompts": {"synthetic": {"promptTokens": 900, "outputTokens": 125}}})),
        surroundings(),
        "RequestsTooLong",
        True,
        (
            "spec.workload.prompts.synthetic.outputTokens: 125: the engines allow 1024 tokens for a prompt with its"
            " output, so they end outputs after prompts of 900 tokens at 124; use 124 or less"
        ),
    ),
    "a burst of prompts longer than the engine allows": (
        capture(
            capture_spec(
                workload={
                    "phases": [
                        *SHORT["phases"],
                        {
                            "name": "crowd",
                            "pattern": "Burst",
                            "burstSize": 2,
                            "burstIntervalSeconds": 1,
                            "requests": 2,
                            "promptTokens": 1024,
                        },
                    ]
                }
            )
        ),
        surroundings(),
        "RequestsTooLong",
        True,
        (
            "spec.workload.phases[1].promptTokens: 1024: the engines allow 1024 tokens for a prompt with its output, so"
            " they reject these prompts; use 896 or less"
        ),
    ),
    "conversations longer than the engine allows": (
        capture(
            capture_spec(
                workload={
                    "prompts": {"synthetic": {"promptTokens": 400, "outputTokens": 100, "sharedPrefixTokens": 200}},
                    "phases": [
                        {"name": "talk", "pattern": "Multiturn", "concurrency": 2, "requests": 8, "turns": 3},
                    ],
                }
            )
        ),
        surroundings(),
        "RequestsTooLong",
        True,
        (
            "spec.workload.phases[0].turns: 3: the engines allow 1024 tokens for a prompt with its output, so they do"
            " not finish conversations, which grow to 1100 tokens; use 2 turns or fewer"
        ),
    ),
    "a phase without a rate": (
        capture(capture_spec(workload={"phases": [{"name": "a", "pattern": "Constant", "requests": 1}]})),
        surroundings(),
        "Invalid",
        True,
        "requestsPerSecond",
    ),
    "no claim": (
        capture(capture_spec(storage={"persistentVolumeClaim": {"claimName": "mine"}})),
        surroundings(),
        "ClaimNotFound",
        False,
        "spec.storage.persistentVolumeClaim.claimName: mine",
    ),
    "a claim to read only": (
        capture(capture_spec(storage={"persistentVolumeClaim": {"claimName": "mine"}})),
        surroundings(claim=claim("mine", spec={"accessModes": ["ReadOnlyMany"]})),
        "ClaimReadOnly",
        True,
        "mine",
    ),
    "a claim without a volume": (
        capture(capture_spec(storage={"persistentVolumeClaim": {"claimName": "mine"}})),
        surroundings(claim=claim("mine", status={"phase": "Lost"})),
        "ClaimLost",
        True,
        "mine",
    ),
    "a claim with the files of an earlier capture": (
        capture(capture_spec(deploymentDuringCapture="Suspend")),
        surroundings(claim=claim(labels={"specdecode.io/capture": "demo", "specdecode.io/published": "true"})),
        "AlreadyPublished",
        True,
        "claim demo-capture has the files",
    ),
    "a stranger's claim": (
        capture(),
        surroundings(claim=claim()),
        "ChildNameConflict",
        True,
        "persistentVolumeClaim.claimName",
    ),
    "no dataset": (
        capture(
            capture_spec(
                workload={"prompts": {"dataset": {"configMap": {"name": "p"}, "path": "a.jsonl", "format": "JSONL"}}}
            )
        ),
        surroundings(),
        "DatasetNotFound",
        False,
        "configMap.name: p",
    ),
    "a dataset without the file": (
        capture(
            capture_spec(
                workload={"prompts": {"dataset": {"configMap": {"name": "p"}, "path": "a.jsonl", "format": "JSONL"}}}
            )
        ),
        surroundings(dataset={"data": {"b.jsonl": ""}}),
        "DatasetNotFound",
        False,
        "holds b.jsonl",
    ),
    "a phase of a file that is not there": (
        capture(
            capture_spec(
                workload={
                    "prompts": {"dataset": {"configMap": {"name": "p"}, "path": "a.jsonl", "format": "JSONL"}},
                    "phases": [
                        {"name": name, "pattern": "Closed", "concurrency": 1, "requests": 1, "path": f"{name}.jsonl"}
                        for name in ("a", "b")
                    ],
                }
            )
        ),
        surroundings(dataset={"data": {"a.jsonl": ""}}),
        "DatasetNotFound",
        False,
        "spec.workload.phases.path: b.jsonl: ConfigMap p holds a.jsonl",
    ),
    "an operator that does not know itself": (
        capture(),
        surroundings(operator_image=None),
        "OperatorImageUnknown",
        False,
        "SPECDECODE_OPERATOR_IMAGE",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_impossible_capture_is_not_accepted_and_writes_nothing(name: str) -> None:
    body, seen, reason, permanent, said = BAD[name]
    decision, status = decided(body, seen)
    assert decision.writes.job is None
    assert decision.writes.claim is None
    found = words(status)
    assert found["Ready"] == (("False" if permanent else "Unknown"), reason)
    assert found["Accepted"] == (("False" if permanent else "Unknown"), reason)
    assert found["Stalled"][0] == str(permanent)
    assert found["Reconciling"][0] == str(not permanent)
    assert found["Succeeded"][0] == "Unknown"
    (message,) = (each.message for each in status.conditions if each.type == "Ready")
    assert said in message


@pytest.mark.parametrize(
    ("lengths", "phase"),
    [
        ({"promptTokens": 900, "outputTokens": 124}, {}),
        ({"promptTokens": 2000, "outputTokens": 2000}, {"promptTokens": 1023, "outputTokens": 1}),
        (
            {"promptTokens": 400, "outputTokens": 212, "sharedPrefixTokens": 200},
            {"pattern": "Multiturn", "turns": 2},
        ),
        ({"promptTokens": 512, "outputTokens": 512}, {"pattern": "Multiturn", "turns": 2, "requests": 1}),
    ],
)
def test_load_that_fills_the_longest_request_is_accepted(lengths: Body, phase: Body) -> None:
    phases = [{**SHORT["phases"][0], **phase}]
    body = capture(capture_spec(workload={"prompts": {"synthetic": lengths}, "phases": phases}))
    assert decided(body, surroundings())[0].writes.job is not None


def test_dataset_outputs_may_exceed_the_longest_request() -> None:
    dataset = {"configMap": {"name": "p"}, "path": "a.jsonl", "format": "JSONL", "outputTokens": 4096}
    body = capture(capture_spec(workload={**SHORT, "prompts": {"dataset": dataset}}))
    decision, _ = decided(body, surroundings(dataset={"data": {"a.jsonl": ""}}))
    assert decision.writes.job is not None, "the model may end them earlier"


@pytest.mark.parametrize(
    ("extra_args", "reason"),
    [
        (["--stream-interval=8"], "StreamIntervalNotOne"),
        (["--stream_interval", "8"], "StreamIntervalNotOne"),
        (["--stream-int=8"], "StreamIntervalNotOne"),
        (["--stream-interval=1", "--stream-interval=8"], "StreamIntervalNotOne"),
        (["--stream-interval=8", "--stream-interval=1"], "Starting"),
        (["--config=/settings.yaml"], "DeploymentNotPlanned"),
        (["--scheduler-config", '{"stream_interval": 8}'], "DeploymentNotPlanned"),
        (["-O", '{"stream_interval": 8}'], "DeploymentNotPlanned"),
    ],
)
def test_stream_interval_above_one_is_refused_in_any_spelling(extra_args: list[str], reason: str) -> None:
    deployment = observed_deployment(tiny_cpu(engine={"image": "i:1", "extraArgs": extra_args}))
    _, status = decided(capture(), surroundings(deployment=deployment))
    assert words(status)["Ready"][1] == reason


@pytest.mark.parametrize(
    ("variable", "reason"),
    [
        ({"value": "1"}, "RustFrontend"),
        ({"value": "True"}, "RustFrontend"),
        ({"valueFrom": {"configMapKeyRef": {"name": "a", "key": "b"}}}, "RustFrontend"),
        ({"value": "0"}, "Starting"),
    ],
)
@pytest.mark.parametrize("place", ["engine.env", "podTemplate"])
def test_rust_frontend_is_refused(variable: Body, reason: str, place: str) -> None:
    env = [{"name": "VLLM_USE_RUST_FRONTEND", **variable}]
    changes = {"podTemplate": {"spec": {"containers": [{"name": "engine", "env": env}]}}}
    if place == "engine.env":
        changes = {"engine": {"image": "i:1", "env": env}}
    _, status = decided(capture(), surroundings(deployment=observed_deployment(tiny_cpu(**changes))))
    assert words(status)["Ready"][1] == reason


# What image the engine of a capture runs, on its way from the pod's status to the load generator.

DIGEST = "docker.io/vllm/vllm-openai@sha256:" + "0" * 64


def engine(image_id: str) -> dict[str, Any]:
    return {**running("engine"), "imageID": image_id}


def note(*pods: Body, **seen: Any) -> Body | None:
    decision, _ = decided(capture(), surroundings(**{"job": job(), "pods": pods, **seen}))
    return decision.writes.image_id


def test_image_id_is_that_of_running_pod() -> None:
    first = capture_pod(name="a", created="1", phase="Failed", initContainerStatuses=[engine("sha256:1")])
    second = capture_pod(name="b", created="2", initContainerStatuses=[running("prepare"), engine(DIGEST)])
    told = note(first, second)
    assert told is not None
    assert told["data"] == {"engine-image-id": f"b-uid {DIGEST}\n"}
    assert told["metadata"]["name"] == "demo-capture"
    assert [owner["uid"] for owner in told["metadata"]["ownerReferences"]] == ["capture-uid"], (
        "it goes with the capture"
    )


async def test_load_generator_reads_image_id_of_its_pod(tmp_path: Path) -> None:
    told = note(capture_pod(initContainerStatuses=[engine(DIGEST)]))
    assert told is not None
    ((name, text),) = told["data"].items()
    (tmp_path / name).write_text(text)
    assert await engine_image_id(tmp_path / name, "demo-capture-x-uid", until_s=0) == DIGEST
    assert await engine_image_id(tmp_path / name, "another-uid", until_s=0) is None, "it is of another attempt"


def test_image_id_is_not_written_before_node_reports_it() -> None:
    assert note() is None
    assert note(capture_pod(phase="Pending", initContainerStatuses=[{**running("prepare"), "imageID": DIGEST}])) is None
    assert note(capture_pod(phase="Pending", initContainerStatuses=[engine("")])) is None


def test_image_id_is_not_written_after_end_or_cancellation() -> None:
    for end, phase in (("Complete", "Succeeded"), ("Failed", "Failed")):
        ended = capture_pod(phase=phase, initContainerStatuses=[engine(DIGEST)])
        assert note(ended, job=job(end)) is None
    pod = capture_pod(initContainerStatuses=[engine(DIGEST)])
    cancelled, _ = decided(capture(capture_spec(suspend=True)), surroundings(job=job(), pods=[pod]))
    assert cancelled.writes.image_id is None


def test_image_id_config_map_is_mounted_in_load_container() -> None:
    decision = decide(read_capture(capture()), surroundings(), NOW)
    assert decision.writes.job is not None
    pod = decision.writes.job["spec"]["template"]["spec"]
    (load,) = pod["containers"]
    (mount,) = (each for each in load["volumeMounts"] if each["mountPath"] == "/specdecode/podinfo")
    (volume,) = (each for each in pod["volumes"] if each["name"] == mount["name"])
    told = note(capture_pod(initContainerStatuses=[engine(DIGEST)]))
    assert told is not None
    assert f"{mount['mountPath']}/engine-image-id" == str(IMAGE_ID_FILE)
    assert volume["configMap"] == {
        "name": told["metadata"]["name"],
        "items": [{"key": "engine-image-id", "path": "engine-image-id"}],
        "optional": True,
    }, "the pod starts before there is anything to tell"
    others = [each for each in pod["initContainers"] if mount["name"] in {it["name"] for it in each["volumeMounts"]}]
    assert not others


# A capture may be held against a golden one: when it may start, what its pod is given, and what its status says.

JUDGED = capture_spec(against={"capture": "golden", "maxLossPercent": {"goodput": 3}})
SUMMARY = {"requests": {"sent": 8, "completed": 8}}


def _load(body: Body) -> tuple[Body, list[Body]]:
    pod = body["spec"]["template"]["spec"]
    return pod["containers"][0], pod["volumes"]


def test_golden_claim_is_mounted_read_only() -> None:
    decision, status = decided(capture(JUDGED), surroundings(golden=golden()))
    assert decision.writes.job is not None
    load, volumes = _load(decision.writes.job)
    told = json.loads(next(each["value"] for each in load["env"] if each["name"] == AGAINST_VARIABLE))
    assert (told["capture"], told["folder"]) == ("golden", "default/golden")
    assert told["limits"] == {"goodput": 3, "acceptance": 10, "step_time": 5, "latency": 20}
    mount = next(each for each in load["volumeMounts"] if each["mountPath"] == AGAINST_MOUNT)
    assert mount["readOnly"] is True
    volume = next(each for each in volumes if each["name"] == mount["name"])
    assert volume["persistentVolumeClaim"] == {"claimName": "golden-capture", "readOnly": True}
    assert words(status)["Holds"] == ("Unknown", "NotJudged")


def test_shared_claim_of_golden_and_capture_is_one_volume() -> None:
    spec = {**JUDGED, "storage": {"persistentVolumeClaim": {"claimName": "shared"}}}
    bound = {"metadata": {"name": "shared"}, "spec": {}, "status": {"phase": "Bound"}}
    seen = surroundings(golden=golden(claim="shared"), claim=bound)
    decision, _ = decided(capture(spec), seen)
    assert decision.writes.job is not None
    load, volumes = _load(decision.writes.job)
    claims = [each for each in volumes if "persistentVolumeClaim" in each]
    assert [each["persistentVolumeClaim"]["claimName"] for each in claims].count("shared") == 1
    mounts = {each["mountPath"]: each["name"] for each in load["volumeMounts"]}
    assert mounts[AGAINST_MOUNT] == mounts["/capture"]


def test_capture_without_golden_has_no_holds_condition() -> None:
    decision, status = decided(capture(), surroundings(golden=golden()))
    assert decision.writes.job is not None
    load, _ = _load(decision.writes.job)
    assert AGAINST_VARIABLE not in {each["name"] for each in load["env"]}
    assert "Holds" not in words(status)


OTHER_LOAD = {"phases": [{"name": "short", "pattern": "Closed", "concurrency": 2, "requests": 9}]}


@pytest.mark.parametrize(
    ("seen", "reason", "is_permanent", "message"),
    [
        (None, "GoldenNotFound", False, "there is no SpecDecodeCapture of this name"),
        (capture(name="golden"), "GoldenNotReady", False, "it has not ended"),
        (golden(succeeded="False"), "GoldenFailed", True, "it failed (EngineExited): take another golden capture"),
        (golden(claim=None), "GoldenFailed", True, "take another golden capture"),
        (golden(of=capture_spec(workload=OTHER_LOAD)), "GoldenDiffers", True, "it has another workload"),
        (golden(of=capture_spec(seed=7)), "GoldenDiffers", True, "its seed is 7, not 0"),
        (golden(of=capture_spec(arms=[{"name": "a"}, {"name": "b"}])), "GoldenDiffers", True, "it has several arms"),
        (golden(of={"deployment": 7}), "GoldenDiffers", True, "this operator cannot read its spec"),
    ],
)
def test_unusable_golden_capture_blocks_job(seen: Body | None, reason: str, is_permanent: bool, message: str) -> None:
    decision, status = decided(capture(JUDGED), surroundings(golden=seen))
    assert decision.writes.job is None
    assert words(status)["Accepted"] == ("False" if is_permanent else "Unknown", reason)
    said = next(each.message for each in status.conditions if each.type == "Ready")
    assert said.startswith("spec.against.capture: golden: ")
    assert message in said


def _finished(regression: Any) -> Body:
    said = {"summary": SUMMARY, "regression": regression}
    pod = capture_pod(phase="Succeeded", containerStatuses=[ended("load", 0, said)])
    return after(capture(JUDGED), surroundings(job=job("Complete"), pods=[pod]))


@pytest.mark.parametrize(
    ("verdict", "status"),
    [("Holds", "True"), ("Regressed", "False"), ("Inconclusive", "Unknown"), ("NotComparable", "Unknown")],
)
def test_holds_condition_follows_verdict_and_persists(verdict: str, status: str) -> None:
    done = _finished({"against": "golden", "verdict": verdict, "message": "goodput 90 after 100 tokens/s"})
    # The operator starts anew, and the Job is gone.
    _, found = decided(done, surroundings())
    assert words(found)["Holds"] == (status, verdict)
    assert words(found)["Succeeded"] == ("True", "Captured")
    assert found.regression is not None
    said = next(each.message for each in found.conditions if each.type == "Holds")
    assert said == "against golden: goodput 90 after 100 tokens/s"


@pytest.mark.parametrize("regression", [None, 7, {}, {"against": "g", "verdict": "Great", "message": ""}])
def test_invalid_regression_is_not_judged(regression: Any) -> None:
    _, found = decided(_finished(regression), surroundings())
    assert words(found)["Holds"] == ("Unknown", "NotJudged")
    assert found.regression is None
