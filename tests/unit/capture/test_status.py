"""Status of a capture."""

import json
from datetime import timedelta
from typing import Any

import pytest

from specdecode_operator.capture.decision import decide
from specdecode_operator.capture.observation import read_capture
from specdecode_operator.capture.status import compose_status
from tests.support.capture_decisions import NOW, after, decided, words
from tests.support.captures import (
    capture,
    capture_pod,
    capture_spec,
    ended,
    job,
    running,
    surroundings,
)
from tests.support.objects import Body, waiting
from tests.support.scheduler_words import NO_ROOM, UNMOUNTABLE

SUMMARY = {
    "requests": {"sent": 8, "completed": 8},
    "acceptancePercent": 71,
    "acceptance": "71%",
    "files": [{"name": "trace.jsonl", "bytes": 12, "lines": 9, "sha256": "0" * 64}],
    "unheardOf": 1,
}
DISK_FULL = {"error": {"reason": "DiskFull", "message": "use a larger one"}}
PROGRESS = "\n".join(json.dumps({"phase": phase, "sent": 3, "rate": 0.5}) for phase in ("single", "closed-16"))
"""The end of a log, which Kubernetes hands over for a message that was never written."""

KILLED = "no cause was reported; the node may have run out of memory"
TOLD_TO_STOP = {"error": {"reason": "Cancelled", "message": "stopped before its end: SIGTERM received"}}

DRAINED = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "EvictionByEvictionAPI",
    "message": "Eviction API: evicting",
}


class TestProgress:
    def test_phase_and_reason_follow_pod_state(self) -> None:
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
            _, status = decided(body, surroundings(job=job(), pods=pods))
            assert (status.phase, words(status)["Ready"]) == (phase, ("Unknown", reason))
            assert words(status)["WaitingForGPUs"][0] == str(phase == "WaitingForGPUs")
            assert words(status)["Accepted"][0] == "True"

    def test_evicted_pod_is_node_lost_once_deleted(self) -> None:
        pod = capture_pod(containerStatuses=[running("load")], conditions=[DRAINED])
        _, status = decided(capture(), surroundings(job=job(), pods=[pod]))
        assert words(status)["Ready"] == ("Unknown", "Loading"), "it is told to leave only when it is deleted"
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:05:00Z"
        _, status = decided(capture(), surroundings(job=job(), pods=[pod]))
        assert words(status)["Ready"] == ("Unknown", "NodeLost")

    @pytest.mark.parametrize("words_of_scheduler", NO_ROOM)
    def test_waiting_for_gpus_quotes_scheduler_message(self, words_of_scheduler: str) -> None:
        unscheduled = {"type": "PodScheduled", "status": "False", "message": words_of_scheduler}
        pods = [capture_pod(phase="Pending", conditions=[unscheduled])]
        _, status = decided(capture(), surroundings(job=job(), pods=pods))
        conditions = {each.type: each for each in status.conditions}
        assert words_of_scheduler in conditions["Ready"].message
        assert conditions["WaitingForGPUs"].status.value == "True"
        assert conditions["WaitingForGPUs"].message == "See condition Ready"

    @pytest.mark.parametrize("message", UNMOUNTABLE)
    def test_unmountable_volume_is_waiting_for_volume_not_gpus(self, message: str) -> None:
        unscheduled = {"type": "PodScheduled", "status": "False", "message": message}
        pods = [capture_pod(phase="Pending", conditions=[unscheduled])]
        _, status = decided(capture(), surroundings(job=job(), pods=pods))
        assert (status.phase, words(status)["Ready"][1]) == ("Pending", "WaitingForVolume")
        (said,) = (each.message for each in status.conditions if each.type == "Ready")
        assert said.startswith(f"no node can mount the volumes: {message}; the claims of spec.storage, the dataset")
        assert words(status)["WaitingForGPUs"][0] == "False"

    def test_engine_crash_loop_fails_capture_and_removes_job(self) -> None:
        crashed = {
            "name": "engine",
            "restartCount": 3,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"exitCode": 1, "message": "ValueError: no such thing"}},
        }
        seen = surroundings(job=job(), pods=[capture_pod(phase="Pending", initContainerStatuses=[crashed])])
        body = after(capture(), seen)
        assert words(decided(body, seen)[1])["Succeeded"] == ("False", "EngineFailed")
        decision, status = decided(body, seen)
        assert decision.writes.remove_job
        assert status.phase == "Failed"
        assert status.finished_at is not None

    def test_engine_that_crashed_once_is_still_starting(self) -> None:
        crashed = {
            "name": "engine",
            "restartCount": 1,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"exitCode": 1, "message": "boom"}},
        }
        pods = [capture_pod(phase="Pending", initContainerStatuses=[crashed])]
        _, status = decided(capture(), surroundings(job=job(), pods=pods))
        assert (status.phase, words(status)["Ready"]) == ("Starting", ("Unknown", "EngineFailed"))

    def test_image_pull_failure_is_reported(self) -> None:
        pods = [
            capture_pod(
                phase="Pending", initContainerStatuses=[waiting("ErrImagePull", "no such image", container="prepare")]
            )
        ]
        _, status = decided(capture(), surroundings(job=job(), pods=pods))
        assert words(status)["Ready"] == ("Unknown", "ImagePullFailed")


class TestEnd:
    def test_succeeded_capture_has_summary_and_path(self) -> None:
        pods = [capture_pod(phase="Succeeded", containerStatuses=[ended("load", 0, SUMMARY)])]
        _, status = decided(capture(), surroundings(job=job("Complete"), pods=pods))
        assert status.phase == "Succeeded"
        assert words(status)["Succeeded"] == ("True", "Captured")
        assert words(status)["Ready"][0] == "True"
        assert status.summary is not None
        assert (status.summary.requests.completed, status.summary.acceptance_percent) == (8, 71)
        assert status.path == "default/demo/as-deployed/1"
        assert status.started_at == "2026-01-01T00:00:00Z"
        assert status.finished_at == "2026-01-01T00:10:00Z"

    def test_completed_job_waits_for_its_pod(self) -> None:
        pods = [capture_pod(containerStatuses=[running("load")])]
        _, status = decided(capture(), surroundings(job=job("Complete"), pods=pods))
        assert words(status)["Succeeded"] == ("Unknown", "Finishing")

    def test_unanswered_requests_are_reported_in_ready(self) -> None:
        def told(**requests: int) -> str:
            pods = [capture_pod(phase="Succeeded", containerStatuses=[ended("load", 0, {"requests": requests})])]
            _, status = decided(capture(), surroundings(job=job("Complete"), pods=pods))
            (ready,) = (each for each in status.conditions if each.type == "Ready")
            assert ready.reason == "Captured", "what became of each is what it was to find out"
            return ready.message

        assert told(sent=8, completed=8) == "files are validated and published"
        assert told(sent=8, completed=2, httpRejected=5, timedOut=1) == (
            "files are validated and published; 6 of 8 requests did not complete (5 rejected by the engine,"
            " 1 timed out after workload.timeoutSeconds); see client.jsonl for the errors"
        )

    def test_gaps_of_live_capture_are_reported_in_ready(self) -> None:
        def told(**live: int) -> str:
            counts = {"samplePercent": 50, "windowSeconds": "600.0", "pods": 2, "recorded": 6, "sampledOut": 2} | live
            said = {"requests": {"sent": 8, "completed": 6}, "live": counts}
            pods = [capture_pod(phase="Succeeded", containerStatuses=[ended("load", 0, said)])]
            _, status = decided(capture(), surroundings(job=job("Complete"), pods=pods))
            (ready,) = (each for each in status.conditions if each.type == "Ready")
            return ready.message

        assert told() == "files are validated and published", "a sample has fewer requests, as ordered"
        assert "2 gaps in the recording, with 7 requests" in told(gaps=2, lostRequests=7)
        assert "1 gap in the recording, with an unknown number of requests" in told(gaps=1)
        assert "1 of 3 pods were not recorded" in told(missingPods=1)

    def test_engine_notes_are_reported_in_ready(self) -> None:
        said = SUMMARY | {
            "engineVersion": "0.99.1",
            "engineNotes": ["the recorder is untested", "another was planned for"],
        }
        pods = [capture_pod(phase="Succeeded", containerStatuses=[ended("load", 0, said)])]
        _, status = decided(capture(), surroundings(job=job("Complete"), pods=pods))
        messages = {each.type: each.message for each in status.conditions}
        assert messages["Succeeded"] == "See condition Ready"
        later = decided(after(capture(), surroundings(job=job("Complete"), pods=pods)), surroundings())[1]
        assert {each.type: each.message for each in later.conditions} == messages, "its Job and pod may be gone"
        assert messages["Ready"] == (
            "files are validated and published; the recorder is untested; another was planned for"
        )
        assert status.summary is not None
        assert status.summary.engine_version == "0.99.1"

    def test_random_prompts_are_reported_in_ready(self) -> None:
        said = SUMMARY | {"promptNotes": ["they are random"]}
        pods = [capture_pod(phase="Succeeded", containerStatuses=[ended("load", 0, said)])]
        _, status = decided(capture(), surroundings(job=job("Complete"), pods=pods))
        messages = {each.type: each.message for each in status.conditions}
        assert messages["Ready"] == "files are validated and published; they are random"

    @pytest.mark.parametrize("tokens", [2**53 + 1, -(10**300)])
    def test_summary_with_number_out_of_range_is_dropped(self, tokens: int) -> None:
        pods = [
            capture_pod(phase="Succeeded", containerStatuses=[ended("load", 0, SUMMARY | {"outputTokens": tokens})])
        ]
        _, status = decided(capture(), surroundings(job=job("Complete"), pods=pods))
        assert words(status)["Succeeded"][0] == "True"
        assert status.summary is None

    def test_missing_summary_does_not_undo_success(self) -> None:
        _, status = decided(capture(), surroundings(job=job("Complete")))
        assert words(status)["Succeeded"][0] == "True"
        assert status.summary is None

    def test_succeeded_status_remains_without_job(self) -> None:
        pods = [capture_pod(phase="Succeeded", containerStatuses=[ended("load", 0, SUMMARY)])]
        body = after(capture(), surroundings(job=job("Complete"), pods=pods))
        body["metadata"]["generation"] = 2
        body["spec"]["suspend"] = True
        decision, status = decided(body, surroundings(deployment=None))
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
            ("load", 2, "[" * 4000, {}, "CaptureFailed", "load ended with exit code 2: "),
            (
                "load",
                137,
                PROGRESS,
                {},
                "CaptureFailed",
                f"killed (exit code 137) in phase closed-16: {KILLED}",
            ),
            ("load", 137, "", {}, "CaptureFailed", f"load was killed (exit code 137): {KILLED}"),
            ("load", 143, PROGRESS, {}, "CaptureFailed", "was terminated (exit code 143) in phase closed-16: no cause"),
            (
                "load",
                3,
                PROGRESS,
                {},
                "CaptureFailed",
                "exit code 3 in phase closed-16: no message was logged",
            ),
            ("load", 2, PROGRESS + "\nMemoryError: x", {}, "CaptureFailed", "2 in phase closed-16: MemoryError: x"),
            ("load", 2, '{"phase": "\\u001b[2J"}', {}, "CaptureFailed", "in phase \\x1b[2J: no message was logged"),
            ("prepare", 137, "", {}, "CaptureFailed", "prepare was killed (exit code 137): "),
            ("load", 137, "", {"reason": "DeadlineExceeded"}, "DeadlineExceeded", "spec.deadlineSeconds"),
            ("load", 143, "", {"reason": "Evicted", "message": "disk"}, "Evicted", "disk"),
            ("load", 1, TOLD_TO_STOP, {"reason": "DeadlineExceeded"}, "DeadlineExceeded", "spec.deadlineSeconds"),
            ("load", 1, TOLD_TO_STOP, {"conditions": [DRAINED]}, "NodeLost", "Eviction API"),
            ("load", 1, TOLD_TO_STOP, {}, "Cancelled", "SIGTERM"),
            ("load", 1, DISK_FULL, {"conditions": [DRAINED]}, "DiskFull", "a larger one"),
        ],
    )
    def test_failure_reason_comes_from_most_specific_source(
        self, container: str, exit_code: int, message: Any, pod: Body, reason: str, said: str
    ) -> None:
        status_field = "initContainerStatuses" if container == "prepare" else "containerStatuses"
        failed = capture_pod(phase="Failed", **{status_field: [ended(container, exit_code, message)]}, **pod)
        _, status = decided(capture(), surroundings(job=job("Failed"), pods=[failed]))
        assert status.phase == "Failed"
        assert words(status)["Succeeded"] == ("False", reason)
        assert words(status)["Stalled"][0] == "True"
        (text,) = (each.message for each in status.conditions if each.type == "Ready")
        assert said in text

    def test_a_pod_that_was_deleted_is_the_cause_of_its_end(self) -> None:
        pod = capture_pod(phase="Failed", containerStatuses=[ended("collect", 1, TOLD_TO_STOP)])
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:09:00Z"
        _, status = decided(capture(), surroundings(job=job("Failed"), pods=[pod]))
        assert words(status)["Succeeded"] == ("False", "NodeLost")

    @pytest.mark.parametrize(
        ("storage", "claim_said"),
        [
            ({}, "claim demo-capture (spec.storage.size): "),
            (
                {"persistentVolumeClaim": {"claimName": "mine"}},
                "claim mine (spec.storage.persistentVolumeClaim.claimName): ",
            ),
        ],
    )
    @pytest.mark.parametrize("reason", ["VolumeTooSmall", "VolumeReadOnly", "DiskFull", "AlreadyPublished", "Dropped"])
    def test_volume_failure_names_its_claim(self, storage: Body, claim_said: str, reason: str) -> None:
        said = {"error": {"reason": reason, "message": "the volume at /capture"}}
        pods = [capture_pod(phase="Failed", initContainerStatuses=[ended("prepare", 1, said)])]
        _, status = decided(capture(capture_spec(storage=storage)), surroundings(job=job("Failed"), pods=pods))
        (text,) = (each.message for each in status.conditions if each.type == "Ready")
        assert text == f"{'' if reason == 'Dropped' else claim_said}the volume at /capture"

    def test_exit_message_of_crashed_engine_is_added(self) -> None:
        engine = {
            "name": "engine",
            "state": {"terminated": {"exitCode": 0}},
            "lastState": {"terminated": {"exitCode": 1, "message": "RuntimeError: CUDA out of memory. Tried"}},
        }
        error = {"error": {"reason": "EngineInterrupted", "message": "another boot"}}
        pod = capture_pod(phase="Failed", initContainerStatuses=[engine], containerStatuses=[ended("load", 1, error)])
        _, status = decided(capture(), surroundings(job=job("Failed"), pods=[pod]))
        (text,) = (each.message for each in status.conditions if each.type == "Ready")
        assert text.startswith("another boot; the engine had exited with code 1: CUDA out of memory")

    def test_engine_restart_is_reported_without_exit_message(self) -> None:
        """What the kubelet leaves of it when the pod has ended."""
        engine = {"name": "engine", "restartCount": 1, "state": {"terminated": {"exitCode": 0}}, "lastState": {}}
        error = {"error": {"reason": "EngineExited", "message": "nothing listens"}}
        pod = capture_pod(phase="Failed", initContainerStatuses=[engine], containerStatuses=[ended("load", 1, error)])
        _, status = decided(capture(), surroundings(job=job("Failed"), pods=[pod]))
        (text,) = (each.message for each in status.conditions if each.type == "Ready")
        assert text == "nothing listens; the engine was restarted (1)"

    def test_failed_job_without_pod_is_failed(self) -> None:
        _, status = decided(capture(), surroundings(job=job("Failed")))
        assert words(status)["Succeeded"] == ("False", "Failed")

    def test_failed_job_with_deleted_pod_is_node_lost(self) -> None:
        failed = job("Failed")
        failed["status"]["conditions"][0]["reason"] = "BackoffLimitExceeded"
        _, status = decided(capture(), surroundings(job=failed))
        assert words(status)["Succeeded"] == ("False", "NodeLost")

    def test_pods_of_earlier_job_are_ignored(self) -> None:
        stranger = capture_pod(containerStatuses=[running("load")])
        stranger["metadata"]["ownerReferences"][0]["uid"] = "another"
        _, status = decided(capture(), surroundings(job=job(), pods=[stranger]))
        assert status.phase == "Pending"


def test_unchanged_status_is_equal_later() -> None:
    seen = surroundings(job=job(), pods=[capture_pod(containerStatuses=[running("load")])])
    body = after(capture(), seen)
    later = compose_status(read_capture(body), decide(read_capture(body), seen, NOW), NOW + timedelta(hours=1))
    assert later == read_capture(body).status


def test_future_start_time_is_replaced_by_now_once() -> None:
    """A node whose clock is ahead says when its pod began."""
    pod = capture_pod(startTime="2027-01-01T00:00:00Z")
    first, status = decided(capture(), surroundings(job=job(), pods=[pod]))
    assert status.started_at == NOW.strftime("%Y-%m-%dT%H:%M:%SZ")
    assert [each.split(":")[0] for each in first.times_ahead] == ["status.startedAt"]
    body = after(capture(), surroundings(job=job(), pods=[pod]))
    again = decide(read_capture(body), surroundings(job=job(), pods=[pod]), NOW + timedelta(minutes=5))
    assert (again.started_at, again.times_ahead) == (status.started_at, ())
