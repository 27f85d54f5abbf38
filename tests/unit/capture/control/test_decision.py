"""From a capture and what was seen to objects: what is refused, waited for, borrowed and cleaned up."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.capture.decision import blocked_by_cluster, not_observed
from specdecode_operator.capture.gpu_sharing import preempting_capture
from specdecode_operator.capture.observation import read_capture
from specdecode_operator.capture.status import compose_status, is_outlived
from specdecode_operator.cluster.manifests import owner_reference
from specdecode_operator.cluster.resources import CAPTURED_ENGINE_ANNOTATION, QUEUE_LABEL, SCHEDULE_LABEL
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.rollout.readiness import stalled
from tests.support.capture_decisions import NOW, after, decided, words
from tests.support.captures import (
    capture,
    capture_pod,
    capture_spec,
    claim,
    ended,
    job,
    observed_deployment,
    running,
    surroundings,
)


def test_a_capture_that_nothing_hinders_gets_its_claim_and_its_job() -> None:
    decision, status = decided(capture())
    assert decision.writes.claim is not None
    assert decision.writes.job is not None
    assert decision.writes.job["spec"]["suspend"] is False
    assert status.phase == "Pending"
    assert words(status)["Accepted"] == ("True", "Valid")
    assert words(status)["Ready"] == ("Unknown", "Starting")
    assert status.claim == "demo-capture"
    assert status.path is None, "there are no files yet"


def test_a_claim_that_an_earlier_capture_of_the_name_left_is_used_again() -> None:
    left = claim(labels={"specdecode.io/capture": "demo"})
    decision, _ = decided(capture(), surroundings(claim=left))
    assert decision.writes.claim is None
    assert decision.writes.job is not None, "what it holds are partial files"


def test_published_files_are_not_in_the_way_of_another_name() -> None:
    given = claim("mine", labels={"specdecode.io/capture": "other", "specdecode.io/published": "true"})
    decision, _ = decided(
        capture(capture_spec(storage={"persistentVolumeClaim": {"claimName": "mine"}})), surroundings(claim=given)
    )
    assert decision.writes.job is not None


def test_a_claim_that_still_goes_with_an_earlier_capture_is_waited_for() -> None:
    left = claim(labels={"specdecode.io/capture": "demo"})
    left["metadata"]["ownerReferences"] = [{"uid": "earlier"}]
    _, status = decided(capture(), surroundings(claim=left))
    assert words(status)["Ready"] == ("Unknown", "WaitingForCleanup")


class TestRetain:
    def test_a_claim_that_is_kept_has_no_owner(self) -> None:
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
    def test_the_retention_of_a_schedule_counts_claims_of_its_own_captures_alone(
        self, owners: list[Body], *, counted: bool
    ) -> None:
        """Who gives a capture the label would push out good data of the schedule's."""
        decision, _ = decided(capture(labels={SCHEDULE_LABEL: "nightly"}, ownerReferences=owners))
        assert decision.writes.claim is not None
        assert (decision.writes.claim["metadata"]["labels"].get(SCHEDULE_LABEL) == "nightly") is counted

    def test_one_that_is_not_kept_goes_with_the_capture(self) -> None:
        decision, _ = decided(capture(capture_spec(storage={"retain": False, "size": "1Gi"})))
        assert decision.writes.claim is not None
        assert [owner["uid"] for owner in decision.writes.claim["metadata"]["ownerReferences"]] == ["capture-uid"]
        assert decision.writes.claim["spec"]["resources"] == {"requests": {"storage": "1Gi"}}

    def test_a_change_of_mind_is_carried_out(self) -> None:
        kept = claim(labels={"specdecode.io/capture": "demo"})
        decision, _ = decided(capture(capture_spec(storage={"retain": False})), surroundings(claim=kept, job=job()))
        owners = decision.writes.claim_metadata["ownerReferences"]
        assert [owner["uid"] for owner in owners] == ["capture-uid"]
        kept["metadata"]["ownerReferences"] = owners
        decision, _ = decided(capture(), surroundings(claim=kept, job=job()))
        assert decision.writes.claim_metadata == {"ownerReferences": [], "uid": kept["metadata"]["uid"]}

    def test_a_claim_tells_for_good_that_it_holds_published_files(self) -> None:
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

    def test_a_claim_that_holds_the_files_of_an_earlier_capture_of_the_name_tells_so_too(self) -> None:
        made = claim(labels={"specdecode.io/capture": "demo"})
        said = {"error": {"reason": "AlreadyPublished", "message": "holds a finished capture"}}
        pod = capture_pod(phase="Failed", initContainerStatuses=[ended("prepare", 1, said)])
        decision, _ = decided(capture(), surroundings(claim=made, job=job("Failed"), pods=[pod]))
        assert decision.succeeded.reason == "AlreadyPublished"
        assert decision.writes.claim_metadata["labels"] == {"specdecode.io/published": "true"}

    def test_a_given_claim_is_nobodys(self) -> None:
        spec = capture_spec(storage={"persistentVolumeClaim": {"claimName": "mine"}, "retain": False})
        decision, status = decided(capture(spec), surroundings(claim=claim("mine")))
        assert decision.writes.claim is None
        assert decision.writes.claim_metadata == {}
        assert status.claim == "mine"


class TestSuspend:
    def test_a_running_capture_is_cancelled(self) -> None:
        body = capture(capture_spec(suspend=True))
        decision, status = decided(body, surroundings(job=job(), pods=[capture_pod()]))
        assert decision.writes.job_suspended is True
        assert status.phase == "Cancelled"
        assert words(status)["Ready"] == ("True", "Suspended")
        assert words(status)["Succeeded"] == ("Unknown", "Suspended")
        decision, _ = decided(body, surroundings(job=job(suspend=True)))
        assert decision.writes.job_suspended is None, "once is enough"

    def test_it_begins_anew(self) -> None:
        decision, _ = decided(capture(), surroundings(job=job(suspend=True)))
        assert decision.writes.job_suspended is False

    def test_one_that_was_not_started_writes_nothing(self) -> None:
        decision, status = decided(capture(capture_spec(suspend=True)))
        assert decision.writes.job is None
        assert status.phase == "Cancelled"

    def test_one_that_fails_while_it_is_cancelled_has_failed(self) -> None:
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
    def test_the_job_waits_in_the_queue(self) -> None:
        decision, _ = decided(capture(labels=QUEUED))
        assert decision.writes.job is not None
        assert decision.writes.job["spec"]["suspend"] is True
        labels = decision.writes.job["metadata"]["labels"]
        assert labels[QUEUE_LABEL] == "gpus"
        assert labels["kueue.x-k8s.io/priority-class"] == "low"
        assert "team" not in labels
        pod_labels = decision.writes.job["spec"]["template"]["metadata"]["labels"]
        assert QUEUE_LABEL not in pod_labels, "the Job is queued, not its pod"

    def test_it_borrows_nothing_before_the_queue_lets_it_start(self) -> None:
        body = capture(BORROWS, labels=QUEUED)
        assert preempting_capture([after(body, surroundings())]) is None
        assert preempting_capture([after(body, surroundings(job=job(suspend=True)))]) is None
        assert preempting_capture([after(body, surroundings(job=job()))]) == "demo"

    def test_nobody_but_kueue_starts_it(self) -> None:
        decision, status = decided(capture(labels=QUEUED), surroundings(job=job(suspend=True)))
        assert decision.writes.job_suspended is None
        assert words(status)["Ready"] == ("Unknown", "Queued")

    @pytest.mark.parametrize("admitted", [False, True])
    def test_cancelled_it_leaves_the_queue(self, *, admitted: bool) -> None:
        body = capture(capture_spec(suspend=True), labels=QUEUED)
        decision, _ = decided(body, surroundings(job=job(suspend=not admitted)))
        assert decision.writes.remove_job
        assert decision.writes.job_suspended is None


class TestBorrowing:
    def test_the_job_is_there_but_waits(self) -> None:
        decision, _ = decided(capture(BORROWS))
        assert decision.writes.job is not None
        assert decision.writes.job["spec"]["suspend"] is True, "what stands in its way is known before GPUs are taken"
        assert decision.writes.job["spec"]["activeDeadlineSeconds"] > 1800, "it cannot keep them for ever"

    @pytest.mark.parametrize("held", [{"engines_wanted": 1}, {"pods": [{}]}])
    def test_it_waits_for_the_last_engine(self, held: dict[str, Any]) -> None:
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

    def test_a_deployment_that_is_gone_has_no_gpus_to_wait_for(self) -> None:
        seen = surroundings(deployment=None, job=suspended_job())
        decision, _ = decided(after(capture(BORROWS), seen), seen)
        assert decision.writes.job_suspended is False

    def test_a_job_that_runs_without_them_is_suspended_unless_its_engine_runs(self) -> None:
        """A restored backup lacks statuses; a person may start the Job."""
        decision, _ = decided(capture(BORROWS), surroundings(job=job()))
        assert decision.writes.job_suspended is True
        loading = capture_pod(containerStatuses=[running("load")])
        seen = surroundings(job=job(), pods=[loading])
        assert preempting_capture([after(capture(BORROWS), seen)]) == "demo"

    def test_one_capture_at_a_time_has_them(self) -> None:
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


def test_what_hinders_the_start_takes_no_gpus_away() -> None:
    decision, _ = decided(capture())
    subject = read_capture(capture())
    blocked = blocked_by_cluster(subject, decision, stalled("ChildNameConflict", "taken"))
    status = compose_status(subject, blocked, NOW)
    assert words(status)["Accepted"] == ("Unknown", "ChildNameConflict")
    assert words(status)["Ready"] == ("False", "ChildNameConflict")


def test_what_hinders_the_clean_up_does_not_undo_the_end() -> None:
    decision, _ = decided(capture(), surroundings(job=job("Complete")))
    assert blocked_by_cluster(read_capture(capture()), decision, stalled("Forbidden", "no")) == decision


def test_who_is_refused_its_pod_borrows_nothing() -> None:
    subject = read_capture(capture(BORROWS))
    decision, _ = decided(capture(BORROWS), surroundings(job=suspended_job()))
    assert decision.writes.trial_pod is not None
    status = compose_status(subject, blocked_by_cluster(subject, decision, stalled("PodRefused", "no")), NOW)
    assert words(status)["Accepted"] == ("Unknown", "PodRefused")
    assert status.borrow is None


def test_who_cannot_be_observed_gives_the_gpus_back() -> None:
    borrowed = after(capture(BORROWS), surroundings(job=suspended_job()))
    subject = read_capture(borrowed)
    status = compose_status(subject, not_observed(subject, Blocked("Forbidden", "no"), NOW), NOW)
    assert status.borrow is not None
    assert status.borrow.returned_at is not None
    assert status.borrow.last_failure == "Forbidden: no"


def test_a_finished_capture_is_deleted_when_its_time_is_over() -> None:
    body = after(capture(capture_spec(ttlSecondsAfterFinished=60)), surroundings(job=job("Complete")))
    subject = read_capture(body)
    finished = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)
    assert not is_outlived(subject, finished + timedelta(seconds=59), 60)
    assert is_outlived(subject, finished + timedelta(seconds=60), 60)
    assert not is_outlived(subject, finished + timedelta(seconds=60), 59)
    assert not is_outlived(read_capture(capture(capture_spec(ttlSecondsAfterFinished=0))), finished, 60)


def test_a_spec_of_another_version_of_the_crd_is_refused_by_name() -> None:
    _, status = decided(capture({"deployment": "llama", "seed": "seven"}))
    assert words(status)["Accepted"] == ("False", "Invalid")
    (message,) = (each.message for each in status.conditions if each.type == "Accepted")
    assert "spec.seed" in message


def test_an_operator_that_ended_before_it_wrote_the_status_says_what_was_measured_all_the_same() -> None:
    first = surroundings(deployment=replace(observed_deployment(), engine="0123456789abcdef"))
    decision, status = decided(capture(), first)
    made = decision.writes.job
    assert made is not None
    again = {**job(), "metadata": {**job()["metadata"], "annotations": made["metadata"]["annotations"]}}
    _, later = decided(capture(), surroundings(deployment=None, job=again))
    assert later.engine == status.engine == "0123456789abcdef"
    forged = {**again, "metadata": {**again["metadata"], "annotations": {CAPTURED_ENGINE_ANNOTATION: "x" * 300}}}
    assert decided(capture(), surroundings(job=forged))[1].engine is None
