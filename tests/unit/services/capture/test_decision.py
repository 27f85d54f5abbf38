"""From a capture and what was seen to objects, conditions and a phase."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from specdecode_operator.api.capture_status import SpecDecodeCaptureStatus
from specdecode_operator.services.capture.decision import decide, hindered
from specdecode_operator.services.capture.lending import borrower
from specdecode_operator.services.capture.status import compose_status, is_outlived
from specdecode_operator.services.capture.subject import QUEUE_LABEL, read_capture
from specdecode_operator.services.capture.surroundings import Decision, Surroundings
from specdecode_operator.services.readiness import stalled
from tests.support.captures import (
    capture,
    capture_pod,
    capture_spec,
    claim,
    deployment_seen,
    ended,
    job,
    running,
    surroundings,
)
from tests.support.objects import Body, pair_70b, tiny_cpu, waiting

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SUMMARY = {
    "requests": {"sent": 8, "completed": 8},
    "acceptancePercent": 71,
    "acceptance": "71%",
    "files": [{"name": "trace.jsonl", "bytes": 12, "lines": 9, "sha256": "0" * 64}],
    "unheardOf": 1,
}


TOLD_TO_STOP = {"error": {"reason": "Cancelled", "message": "stopped before its end: SIGTERM received"}}
DISK_FULL = {"error": {"reason": "DiskFull", "message": "use a larger one"}}
DRAINED = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "EvictionByEvictionAPI",
    "message": "Eviction API: evicting",
}


def look(body: Body, seen: Surroundings | None = None) -> tuple[Decision, SpecDecodeCaptureStatus]:
    subject = read_capture(body)
    decision = decide(subject, seen or surroundings(), NOW)
    return decision, compose_status(subject, decision, NOW)


def words(status: SpecDecodeCaptureStatus) -> dict[str, tuple[str, str]]:
    return {each.type: (each.status.value, each.reason) for each in status.conditions}


def after(body: Body, seen: Surroundings) -> Body:
    """The same capture with the status that it then has."""
    _, status = look(body, seen)
    return {**body, "status": status.model_dump(by_alias=True, mode="json", exclude_none=True)}


def test_a_capture_that_nothing_hinders_gets_its_claim_and_its_job() -> None:
    decision, status = look(capture())
    assert decision.writes.claim is not None
    assert decision.writes.job is not None
    assert decision.writes.job["spec"]["suspend"] is False
    assert status.phase == "Pending"
    assert words(status)["Accepted"] == ("True", "Valid")
    assert words(status)["Ready"] == ("Unknown", "Starting")
    assert status.claim == "demo-capture"
    assert status.path is None, "there are no files yet"


BAD: dict[str, tuple[Body, Surroundings, str, bool, str]] = {
    "no deployment": (capture(), surroundings(deployment=None), "DeploymentNotFound", False, "llama"),
    "no plan": (
        capture(),
        surroundings(deployment=deployment_seen(pair_70b())),
        "DeploymentNotPlanned",
        False,
        "NoMatchingNodes",
    ),
    "not accepted": (
        capture(),
        surroundings(deployment=deployment_seen(tiny_cpu(engine={"image": "i:1", "extraArgs": ["--nonsense"]}))),
        "DeploymentNotPlanned",
        False,
        "extraArgs",
    ),
    "tokens held back": (
        capture(),
        surroundings(
            deployment=deployment_seen(tiny_cpu(engine={"image": "i:1", "extraArgs": ["--stream_interval=4"]}))
        ),
        "StreamIntervalNotOne",
        True,
        "--stream-interval 4",
    ),
    "tokens held back by two arguments": (
        capture(),
        surroundings(
            deployment=deployment_seen(tiny_cpu(engine={"image": "i:1", "extraArgs": ["--stream-interval", "2"]}))
        ),
        "StreamIntervalNotOne",
        True,
        "--stream-interval 2",
    ),
    "a frontend without Python": (
        capture(),
        surroundings(
            deployment=deployment_seen(
                tiny_cpu(engine={"image": "i:1", "env": [{"name": "VLLM_USE_RUST_FRONTEND", "value": "1"}]})
            )
        ),
        "RustFrontend",
        True,
        "remove it",
    ),
    "an engine that is too new": (
        capture(),
        surroundings(deployment=deployment_seen(tiny_cpu(engine={"image": "i:1", "version": "0.33"}))),
        "EngineNotSupported",
        True,
        "0.28 to 0.32",
    ),
    "an engine that is too old": (
        capture(),
        surroundings(deployment=deployment_seen(tiny_cpu(engine={"image": "i:1", "version": "0.27"}))),
        "DeploymentNotPlanned",
        False,
        "write 0.28 or newer",
    ),
    "longer than its deadline": (
        capture(capture_spec(deadlineSeconds=179, workload={})),
        surroundings(),
        "WorkloadTooLong",
        True,
        "take 180 s",
    ),
    "a phase without a rate": (
        capture(capture_spec(workload={"phases": [{"name": "a", "pattern": "Constant", "requests": 1}]})),
        surroundings(),
        "Invalid",
        True,
        "requestsPerSecond",
    ),
    "no claim": (
        capture(capture_spec(storage={"existingClaim": "mine"})),
        surroundings(),
        "ClaimNotFound",
        False,
        "spec.storage.existingClaim: mine",
    ),
    "a claim to read only": (
        capture(capture_spec(storage={"existingClaim": "mine"})),
        surroundings(claim=claim("mine", spec={"accessModes": ["ReadOnlyMany"]})),
        "ClaimReadOnly",
        True,
        "mine",
    ),
    "a claim without a volume": (
        capture(capture_spec(storage={"existingClaim": "mine"})),
        surroundings(claim=claim("mine", status={"phase": "Lost"})),
        "ClaimLost",
        True,
        "mine",
    ),
    "a stranger's claim": (
        capture(),
        surroundings(claim=claim()),
        "ChildNameConflict",
        True,
        "existingClaim",
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
    "an operator that does not know itself": (
        capture(),
        surroundings(operator_image=None),
        "OperatorImageUnknown",
        False,
        "SPECDECODE_OPERATOR_IMAGE",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_captured_is_told_and_nothing_is_written(name: str) -> None:
    body, seen, reason, permanent, said = BAD[name]
    decision, status = look(body, seen)
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


def test_a_claim_that_an_earlier_capture_of_the_name_left_is_used_again() -> None:
    left = claim(labels={"specdecode.io/capture": "demo"})
    decision, _ = look(capture(), surroundings(claim=left))
    assert decision.writes.claim is None
    assert decision.writes.job is not None, "whether it holds a finished capture already is seen on the volume"


def test_a_claim_that_still_goes_with_an_earlier_capture_is_waited_for() -> None:
    left = claim(labels={"specdecode.io/capture": "demo"})
    left["metadata"]["ownerReferences"] = [{"uid": "earlier"}]
    _, status = look(capture(), surroundings(claim=left))
    assert words(status)["Ready"] == ("Unknown", "WaitingForCleanup")


class TestRetain:
    def test_a_claim_that_is_kept_has_no_owner(self) -> None:
        decision, _ = look(capture())
        assert decision.writes.claim is not None
        metadata = decision.writes.claim["metadata"]
        assert metadata["ownerReferences"] == []
        assert metadata["labels"]["specdecode.io/capture"] == "demo"
        assert metadata["labels"]["specdecode.io/captured-deployment"] == "llama"

    def test_one_that_is_not_kept_goes_with_the_capture(self) -> None:
        decision, _ = look(capture(capture_spec(storage={"retain": False, "size": "1Gi"})))
        assert decision.writes.claim is not None
        assert [owner["uid"] for owner in decision.writes.claim["metadata"]["ownerReferences"]] == ["capture-uid"]
        assert decision.writes.claim["spec"]["resources"] == {"requests": {"storage": "1Gi"}}

    def test_a_change_of_mind_is_carried_out(self) -> None:
        kept = claim(labels={"specdecode.io/capture": "demo"})
        decision, _ = look(capture(capture_spec(storage={"retain": False})), surroundings(claim=kept, job=job()))
        assert decision.writes.claim_owners is not None
        assert [owner["uid"] for owner in decision.writes.claim_owners] == ["capture-uid"]
        kept["metadata"]["ownerReferences"] = decision.writes.claim_owners
        decision, _ = look(capture(), surroundings(claim=kept, job=job("Complete")))
        assert decision.writes.claim_owners == []

    def test_a_given_claim_is_nobodys(self) -> None:
        spec = capture_spec(storage={"existingClaim": "mine", "retain": False})
        decision, status = look(capture(spec), surroundings(claim=claim("mine")))
        assert decision.writes.claim is None
        assert decision.writes.claim_owners is None
        assert status.claim == "mine"


class TestProgress:
    def test_phases_on_the_way(self) -> None:
        body = capture()
        unscheduled = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: Insufficient nvidia.com/gpu"}
        done = {"terminated": {"exitCode": 0}}
        seen = [
            ([], "Pending", "WaitingForPod"),
            ([capture_pod(phase="Pending", conditions=[unscheduled])], "WaitingForGPUs", "WaitingForGPUs"),
            ([capture_pod(phase="Pending", initContainerStatuses=[running("prepare")])], "Starting", "Starting"),
            ([capture_pod(containerStatuses=[running("load")])], "Loading", "Loading"),
            # The load ended before the engine that stands beside it.
            ([capture_pod(containerStatuses=[{**running("load"), "state": done}])], "Loading", "Finishing"),
        ]
        for pods, phase, reason in seen:
            _, status = look(body, surroundings(job=job(), pods=pods))
            assert (status.phase, words(status)["Ready"]) == (phase, ("Unknown", reason))
            assert words(status)["WaitingForGPUs"][0] == str(phase == "WaitingForGPUs")
            assert words(status)["Accepted"][0] == "True"

    def test_a_pod_that_is_taken_from_its_node_is_no_load_under_way(self) -> None:
        pod = capture_pod(containerStatuses=[running("load")], conditions=[DRAINED])
        _, status = look(capture(), surroundings(job=job(), pods=[pod]))
        assert words(status)["Ready"] == ("Unknown", "Loading"), "it is told to leave only when it is deleted"
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:05:00Z"
        _, status = look(capture(), surroundings(job=job(), pods=[pod]))
        assert words(status)["Ready"] == ("Unknown", "NodeLost")

    def test_gpus_are_waited_for_in_the_schedulers_words(self) -> None:
        unscheduled = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: Insufficient nvidia.com/gpu"}
        pods = [capture_pod(phase="Pending", conditions=[unscheduled])]
        _, status = look(capture(), surroundings(job=job(), pods=pods))
        (message,) = (each.message for each in status.conditions if each.type == "WaitingForGPUs")
        assert "Insufficient nvidia.com/gpu" in message

    @pytest.mark.parametrize(
        "message", ['persistentvolumeclaim "mine" not found', "1 node(s) had volume node affinity conflict"]
    )
    def test_a_volume_that_no_node_can_mount_is_no_lack_of_gpus(self, message: str) -> None:
        unscheduled = {"type": "PodScheduled", "status": "False", "message": message}
        pods = [capture_pod(phase="Pending", conditions=[unscheduled])]
        _, status = look(capture(), surroundings(job=job(), pods=pods))
        assert (status.phase, words(status)["Ready"][1]) == ("Pending", "WaitingForVolume")
        assert words(status)["WaitingForGPUs"][0] == "False"

    def test_an_engine_that_cannot_start_is_given_up_and_frees_its_gpus(self) -> None:
        crashed = {
            "name": "engine",
            "restartCount": 3,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"exitCode": 1, "message": "ValueError: no such thing"}},
        }
        seen = surroundings(job=job(), pods=[capture_pod(phase="Pending", initContainerStatuses=[crashed])])
        body = after(capture(), seen)
        assert words(look(body, seen)[1])["Succeeded"] == ("False", "EngineFailed")
        decision, status = look(body, seen)
        assert decision.writes.remove_job
        assert status.phase == "Failed"
        assert status.finished_at is not None

    def test_an_engine_that_crashed_once_may_yet_start(self) -> None:
        crashed = {
            "name": "engine",
            "restartCount": 1,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"exitCode": 1, "message": "boom"}},
        }
        pods = [capture_pod(phase="Pending", initContainerStatuses=[crashed])]
        _, status = look(capture(), surroundings(job=job(), pods=pods))
        assert (status.phase, words(status)["Ready"]) == ("Starting", ("Unknown", "EngineFailed"))

    def test_an_image_that_cannot_be_pulled_is_told(self) -> None:
        pods = [
            capture_pod(
                phase="Pending", initContainerStatuses=[waiting("ErrImagePull", "no such image", container="prepare")]
            )
        ]
        _, status = look(capture(), surroundings(job=job(), pods=pods))
        assert words(status)["Ready"] == ("Unknown", "ImagePullFailed")


class TestEnd:
    def test_a_capture_that_succeeded_says_what_it_found_and_where(self) -> None:
        pods = [capture_pod(phase="Succeeded", containerStatuses=[ended("load", 0, SUMMARY)])]
        _, status = look(capture(), surroundings(job=job("Complete"), pods=pods))
        assert status.phase == "Succeeded"
        assert words(status)["Succeeded"] == ("True", "Captured")
        assert words(status)["Ready"][0] == "True"
        assert status.summary is not None
        assert (status.summary.requests.completed, status.summary.acceptance_percent) == (8, 71)
        assert status.path == "default/demo/as-deployed/1"
        assert status.started_at == "2026-01-01T00:00:00Z"
        assert status.finished_at == "2026-01-01T00:10:00Z"

    def test_the_end_of_the_job_waits_for_that_of_its_pod(self) -> None:
        pods = [capture_pod(containerStatuses=[running("load")])]
        _, status = look(capture(), surroundings(job=job("Complete"), pods=pods))
        assert words(status)["Succeeded"] == ("Unknown", "Finishing")

    def test_words_that_were_lost_do_not_undo_a_success(self) -> None:
        _, status = look(capture(), surroundings(job=job("Complete")))
        assert words(status)["Succeeded"][0] == "True"
        assert status.summary is None

    def test_what_ended_stays_ended_when_its_job_is_gone(self) -> None:
        pods = [capture_pod(phase="Succeeded", containerStatuses=[ended("load", 0, SUMMARY)])]
        body = after(capture(), surroundings(job=job("Complete"), pods=pods))
        body["metadata"]["generation"] = 2
        body["spec"]["suspend"] = True
        decision, status = look(body, surroundings(deployment=None))
        assert decision.writes.job is None
        assert status.observed_generation == 2
        assert status.phase == "Succeeded"
        assert status.summary is not None
        assert status.summary.requests.completed == 8

    @pytest.mark.parametrize(
        ("container", "exit_code", "message", "pod", "reason", "said"),
        [
            ("load", 1, {"error": {"reason": "Dropped", "message": "3 dropped"}}, {}, "Dropped", "3 dropped"),
            (
                "prepare",
                1,
                {"error": {"reason": "AlreadyPublished", "message": "there"}},
                {},
                "AlreadyPublished",
                "there",
            ),
            ("load", 2, "Traceback\nKeyError: 'x'", {}, "CaptureFailed", "load ended with exit code 2: KeyError: 'x'"),
            ("load", 137, "", {"reason": "DeadlineExceeded"}, "DeadlineExceeded", "spec.deadlineSeconds"),
            ("load", 143, "", {"reason": "Evicted", "message": "disk"}, "Evicted", "disk"),
            ("load", 1, TOLD_TO_STOP, {"reason": "DeadlineExceeded"}, "DeadlineExceeded", "spec.deadlineSeconds"),
            ("load", 1, TOLD_TO_STOP, {"conditions": [DRAINED]}, "NodeLost", "Eviction API"),
            ("load", 1, TOLD_TO_STOP, {}, "Cancelled", "SIGTERM"),
            ("load", 1, DISK_FULL, {"conditions": [DRAINED]}, "DiskFull", "a larger one"),
        ],
    )
    def test_a_failure_is_told_by_who_knows_most(  # noqa: PLR0913, PLR0917  what a pod says
        self, container: str, exit_code: int, message: Any, pod: Body, reason: str, said: str
    ) -> None:
        status_field = "initContainerStatuses" if container == "prepare" else "containerStatuses"
        failed = capture_pod(phase="Failed", **{status_field: [ended(container, exit_code, message)]}, **pod)
        _, status = look(capture(), surroundings(job=job("Failed"), pods=[failed]))
        assert status.phase == "Failed"
        assert words(status)["Succeeded"] == ("False", reason)
        assert words(status)["Stalled"][0] == "True"
        (text,) = (each.message for each in status.conditions if each.type == "Succeeded")
        assert said in text

    def test_the_last_words_of_an_engine_that_died_are_added(self) -> None:
        engine = {
            "name": "engine",
            "state": {"terminated": {"exitCode": 0}},
            "lastState": {"terminated": {"exitCode": 1, "message": "RuntimeError: CUDA out of memory. Tried"}},
        }
        error = {"error": {"reason": "EngineInterrupted", "message": "another boot"}}
        pod = capture_pod(phase="Failed", initContainerStatuses=[engine], containerStatuses=[ended("load", 1, error)])
        _, status = look(capture(), surroundings(job=job("Failed"), pods=[pod]))
        (text,) = (each.message for each in status.conditions if each.type == "Succeeded")
        assert text.startswith("another boot; the engine had ended with 1: CUDA out of memory")

    def test_an_engine_that_died_and_came_back_is_told_when_its_words_are_gone(self) -> None:
        """What the kubelet leaves of it when the pod has ended."""
        engine = {"name": "engine", "restartCount": 1, "state": {"terminated": {"exitCode": 0}}, "lastState": {}}
        error = {"error": {"reason": "EngineExited", "message": "nothing listens"}}
        pod = capture_pod(phase="Failed", initContainerStatuses=[engine], containerStatuses=[ended("load", 1, error)])
        _, status = look(capture(), surroundings(job=job("Failed"), pods=[pod]))
        (text,) = (each.message for each in status.conditions if each.type == "Succeeded")
        assert text == "nothing listens; the engine was restarted (1)"

    def test_a_failed_job_without_a_pod_says_what_it_can(self) -> None:
        _, status = look(capture(), surroundings(job=job("Failed")))
        assert words(status)["Succeeded"] == ("False", "Failed")

    def test_a_pod_that_was_taken_away_says_nothing_more(self) -> None:
        failed = job("Failed")
        failed["status"]["conditions"][0]["reason"] = "BackoffLimitExceeded"
        _, status = look(capture(), surroundings(job=failed))
        assert words(status)["Succeeded"] == ("False", "NodeLost")

    def test_pods_of_an_earlier_job_say_nothing(self) -> None:
        stranger = capture_pod(containerStatuses=[running("load")])
        stranger["metadata"]["ownerReferences"][0]["uid"] = "another"
        _, status = look(capture(), surroundings(job=job(), pods=[stranger]))
        assert status.phase == "Pending"


class TestSuspend:
    def test_a_running_capture_is_cancelled(self) -> None:
        body = capture(capture_spec(suspend=True))
        decision, status = look(body, surroundings(job=job(), pods=[capture_pod()]))
        assert decision.writes.job_suspended is True
        assert status.phase == "Cancelled"
        assert words(status)["Ready"] == ("True", "Suspended")
        assert words(status)["Succeeded"] == ("Unknown", "Suspended")
        decision, _ = look(body, surroundings(job=job(suspend=True)))
        assert decision.writes.job_suspended is None, "once is enough"

    def test_it_begins_anew(self) -> None:
        decision, _ = look(capture(), surroundings(job=job(suspend=True)))
        assert decision.writes.job_suspended is False

    def test_one_that_was_not_started_writes_nothing(self) -> None:
        decision, status = look(capture(capture_spec(suspend=True)))
        assert decision.writes.job is None
        assert status.phase == "Cancelled"

    def test_one_that_fails_while_it_is_cancelled_has_failed(self) -> None:
        _, status = look(capture(capture_spec(suspend=True)), surroundings(job=job("Failed")))
        assert status.phase == "Failed"


QUEUED = {QUEUE_LABEL: "gpus", "kueue.x-k8s.io/priority-class": "low", "team": "serving"}
BORROWS = capture_spec(deploymentDuringCapture="Suspend")


class TestQueue:
    def test_the_job_waits_in_the_queue(self) -> None:
        decision, _ = look(capture(labels=QUEUED))
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
        assert borrower([after(body, surroundings())]) is None
        assert borrower([after(body, surroundings(job=job(suspend=True)))]) is None
        assert borrower([after(body, surroundings(job=job()))]) == "demo"

    def test_nobody_but_kueue_starts_it(self) -> None:
        decision, status = look(capture(labels=QUEUED), surroundings(job=job(suspend=True)))
        assert decision.writes.job_suspended is None
        assert words(status)["Ready"] == ("Unknown", "Queued")

    def test_cancelled_it_leaves_the_queue(self) -> None:
        body = capture(capture_spec(suspend=True), labels=QUEUED)
        decision, _ = look(body, surroundings(job=job()))
        assert decision.writes.remove_job
        assert decision.writes.job_suspended is None


class TestBorrowing:
    def test_the_job_is_there_but_waits(self) -> None:
        decision, _ = look(capture(BORROWS))
        assert decision.writes.job is not None
        assert decision.writes.job["spec"]["suspend"] is True, "what stands in its way is known before GPUs are taken"
        assert decision.writes.job["spec"]["activeDeadlineSeconds"] > 1800, "it cannot keep them for ever"

    @pytest.mark.parametrize("held", [{"engines_wanted": 1}, {"pods": [{}]}])
    def test_it_waits_for_the_last_engine(self, held: dict[str, Any]) -> None:
        seen = surroundings(deployment=deployment_seen(**held), job=job(suspend=True))
        decision, status = look(capture(BORROWS), seen)
        assert decision.writes.job_suspended is None
        assert words(status)["Ready"] == ("Unknown", "WaitingForDeployment")
        decision, _ = look(capture(BORROWS), surroundings(job=job(suspend=True)))
        assert decision.writes.job_suspended is False

    def test_a_deployment_that_is_gone_has_no_gpus_to_wait_for(self) -> None:
        decision, _ = look(capture(BORROWS), surroundings(deployment=None, job=job(suspend=True)))
        assert decision.writes.job_suspended is False


def test_what_hinders_the_start_takes_no_gpus_away() -> None:
    decision, _ = look(capture())
    subject = read_capture(capture())
    status = compose_status(subject, hindered(decision, stalled("ChildNameConflict", "taken")), NOW)
    assert words(status)["Accepted"] == ("Unknown", "ChildNameConflict")
    assert words(status)["Ready"] == ("False", "ChildNameConflict")


def test_what_hinders_the_clean_up_does_not_undo_the_end() -> None:
    decision, _ = look(capture(), surroundings(job=job("Complete")))
    assert hindered(decision, stalled("Forbidden", "no")) == decision


def test_a_finished_capture_is_deleted_when_its_time_is_over() -> None:
    body = after(capture(capture_spec(ttlSecondsAfterFinished=60)), surroundings(job=job("Complete")))
    subject = read_capture(body)
    finished = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)
    assert not is_outlived(subject, finished + timedelta(seconds=59))
    assert is_outlived(subject, finished + timedelta(seconds=60))
    assert not is_outlived(read_capture(capture(capture_spec(ttlSecondsAfterFinished=0))), finished)


def test_a_status_that_says_the_same_is_the_same() -> None:
    seen = surroundings(job=job(), pods=[capture_pod(containerStatuses=[running("load")])])
    body = after(capture(), seen)
    later = compose_status(read_capture(body), decide(read_capture(body), seen, NOW), NOW + timedelta(hours=1))
    assert later == read_capture(body).status


def test_a_spec_of_another_version_of_the_crd_is_refused_by_name() -> None:
    _, status = look(capture({"deployment": "llama", "seed": "seven"}))
    assert words(status)["Accepted"] == ("False", "Invalid")
    (message,) = (each.message for each in status.conditions if each.type == "Accepted")
    assert "spec.seed" in message
