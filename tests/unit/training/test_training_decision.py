"""Whether a training may start, and what to do next."""

import json
from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.api.training import SpecDecodeTrainingSpec
from specdecode_operator.cluster.manifests import owner_reference
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.cluster.resources import PUBLISHED_LABEL, QUEUE_LABEL, TRAINING_LABEL
from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.deployment.rollout.readiness import stalled, working
from specdecode_operator.training.decision import blocked_by_cluster, decide, internal_error, references_of
from specdecode_operator.training.observation import read_training
from specdecode_operator.training.preconditions import trainer_memory
from specdecode_operator.training.status import compose_status, training_attention
from tests.support.captures import capture, claim, ended, observed_deployment, running
from tests.support.devices import claiming
from tests.support.field_cases import NODES
from tests.support.objects import Body, pair_70b, tiny_cpu
from tests.support.replay_field_cases import replaying
from tests.support.trainings import (
    JOB,
    NOW,
    STEPS,
    after,
    at_step,
    decided,
    job,
    pod,
    published,
    source,
    surroundings,
    training,
    training_spec,
    words,
)

KEY = read_training(training()).key


def on_gpus(spec: Body | None = None, nodes: tuple[NodeFacts, ...] = NODES) -> Any:
    return observed_deployment(spec or pair_70b(), nodes=nodes)


def judge(*, succeeded: str | None = None, suspend: bool = False) -> Body:
    """The capture that measures the head."""
    conditions = []
    if succeeded is not None:
        stamp = {"message": "", "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}
        conditions = [{"type": "Succeeded", "status": succeeded, "reason": "Captured", **stamp}]
    owners = [owner_reference(KEY, "training-uid")]
    made = decided(trained())[0].writes.capture
    assert made is not None
    spec = {**made["spec"], "suspend": suspend}
    return capture(spec, status={"conditions": conditions}, name="head-judge", ownerReferences=owners)


def trained(spec: Body | None = None) -> Body:
    """A training whose head is published and not measured."""
    return after(training(spec), surroundings(job=job("Complete"), pods=[published()]))


class TestStart:
    def test_valid_training_gets_claim_and_job(self) -> None:
        decision, status = decided(training())
        assert decision.writes.claim is not None
        assert decision.writes.claim["spec"]["resources"]["requests"]["storage"] == "200Gi"
        assert decision.writes.claim["metadata"]["labels"][TRAINING_LABEL] == "head"
        assert decision.writes.claim["metadata"]["ownerReferences"] == []
        assert decision.writes.job is not None
        assert decision.writes.job["metadata"]["name"] == JOB
        assert words(status)["Accepted"] == ("True", "Valid")
        assert words(status)["Ready"] == ("Unknown", "Starting")
        assert words(status)["Better"] == ("Unknown", "NotJudged")
        assert words(status)["Promoted"] == ("Unknown", "NotJudged")
        assert (status.phase, status.claim, status.job) == ("Pending", JOB, JOB)

    def test_claim_of_user_is_not_created(self) -> None:
        spec = training_spec(storage={"persistentVolumeClaim": {"claimName": "mine"}})
        decision, status = decided(training(spec), surroundings(claim=claim("mine")))
        assert decision.writes.claim is None
        assert decision.writes.job is not None
        assert decision.writes.claim_metadata == {}
        assert status.claim == "mine"

    def test_claim_is_owned_without_retain(self) -> None:
        decision, _ = decided(training(training_spec(storage={"retain": False})))
        assert decision.writes.claim is not None
        assert decision.writes.claim["metadata"]["ownerReferences"] == [owner_reference(KEY, "training-uid")]

    def test_queued_training_gets_labels_of_queue(self) -> None:
        decision, status = decided(training(labels={QUEUE_LABEL: "team", "other": "label"}))
        assert decision.writes.job is not None
        assert decision.writes.job["spec"]["suspend"] is True
        assert decision.writes.job["metadata"]["labels"][QUEUE_LABEL] == "team"
        assert words(status)["Ready"] == ("Unknown", "Queued")

    def test_suspended_training_does_not_start(self) -> None:
        decision, status = decided(training(training_spec(suspend=True)), surroundings(deployment=None))
        assert decision.writes.job is None
        assert status.phase == "Suspended"
        assert words(status)["Ready"] == ("True", "Suspended")

    def test_engines_go_first(self) -> None:
        decision, status = decided(training(), surroundings(goes_first="deployment other lacks its engines"))
        assert decision.writes.job is None
        assert words(status)["Ready"] == ("Unknown", "WaitingForDeployment")

    def test_references_are_named(self) -> None:
        rows = {"persistentVolumeClaim": {"claimName": "rows"}, "path": "rows.jsonl"}
        head = {"model": "eagle", "persistentVolumeClaim": {"claimName": "old"}}
        spec = {"deployment": "llama", "dataset": rows, "from": head, "trainer": {"image": "i"}}
        found = references_of(read_training(training(spec)))
        assert (found.captures, found.claim, found.rows_claim, found.head_claim) == ((), JOB, "rows", "old")
        assert references_of(read_training(training({}))).claim is None


ROWS_FILE = {"configMap": {"name": "rows"}, "path": "rows.jsonl"}
DATASET = {"deployment": "llama", "dataset": ROWS_FILE, "trainer": {"image": "localhost/trainer:1"}}
FROM_CLAIM = {"from": {"model": "old/head", "persistentVolumeClaim": {"claimName": "heads"}}}
MINE = {"storage": {"persistentVolumeClaim": {"claimName": "mine"}}}
LEFT = {TRAINING_LABEL: "head"}
TRACE = {"dataset": {"configMap": {"name": "trace"}, "path": "a.jsonl", "format": "Trace"}}


@pytest.mark.parametrize(
    ("spec", "seen", "reason", "permanent"),
    [
        ({"trainer": {}}, {}, "Invalid", True),
        ({}, {"deployment": None}, "DeploymentNotFound", False),
        (
            {},
            {"deployment": observed_deployment(tiny_cpu(target={"model": "unknown/model"}))},
            "DeploymentNotPlanned",
            False,
        ),
        ({}, {"deployment": observed_deployment(replaying())}, "EngineReplayed", True),
        ({}, {"captures": {"evening": None}}, "CaptureNotFound", False),
        ({}, {"captures": {"evening": source(succeeded="Unknown")}}, "CaptureNotSucceeded", False),
        ({}, {"captures": {"evening": source(succeeded="False")}}, "CaptureNotSucceeded", True),
        ({}, {"captures": {"evening": source(deployment="other")}}, "CaptureOfOtherDeployment", True),
        ({}, {"captures": {"evening": source(record={})}}, "NoTokenIds", True),
        ({}, {"captures": {"evening": source(workload={})}}, "RandomPrompts", True),
        ({}, {"captures": {"evening": source(workload={"prompts": TRACE})}}, "RandomPrompts", True),
        ({}, {"capture_claims": {"evening-capture": None}}, "CaptureClaimNotFound", False),
        (DATASET, {"rows": None}, "DatasetNotFound", False),
        (DATASET, {"rows": {"data": {"other.jsonl": ""}}}, "DatasetNotFound", False),
        (FROM_CLAIM, {}, "ClaimNotFound", False),
        ({"from": {"model": "team/head", "revision": "v2"}}, {}, "Invalid", True),
        (MINE, {}, "ClaimNotFound", False),
        (MINE, {"claim": claim("mine", spec={"accessModes": ["ReadOnlyMany"]})}, "ClaimReadOnly", True),
        (MINE, {"claim": claim("mine"), "rival": "other"}, "ClaimInUse", False),
        ({}, {"claim": claim(JOB)}, "ChildNameConflict", True),
        ({}, {"claim": claim(JOB, labels={**LEFT, PUBLISHED_LABEL: "true"})}, "AlreadyPublished", True),
        ({}, {"operator_image": None}, "OperatorImageUnknown", False),
        ({"trainer": {"image": "i", "gpus": 1}}, {}, "TrainerGPUsOnCPU", True),
        ({"trainer": {"image": "i", "gpus": 0}}, {"deployment": on_gpus()}, "TrainerWithoutGPUs", True),
        ({"trainer": {"image": "i", "gpus": 1}}, {"deployment": on_gpus()}, "TooFewGPUs", True),
        (
            {"trainer": {"image": "i", "gpus": 4}},
            {"deployment": on_gpus(pair_70b(accelerator=claiming()))},
            "TooManyGPUs",
            True,
        ),
    ],
)
def test_what_blocks_a_training(spec: Body, seen: Body, reason: str, permanent: bool) -> None:
    wanted = spec if spec is DATASET else training_spec(**spec)
    decision, status = decided(training(wanted), surroundings(**seen))
    assert decision.writes.job is None
    assert words(status)["Accepted"] == ("False" if permanent else "Unknown", reason)
    assert words(status)["Stalled"][0] == str(permanent)
    assert (status.phase, status.job) == ("Pending", None)


def test_live_capture_needs_no_dataset() -> None:
    live = source(source="Live", live={"durationSeconds": 60}, workload={})
    decision, _ = decided(training(), surroundings(captures={"evening": live}))
    assert decision.writes.job is not None


def test_head_from_claim_that_exists_is_mounted() -> None:
    decision, _ = decided(training(training_spec(**FROM_CLAIM)), surroundings(starting_head=claim("heads")))
    assert decision.writes.job is not None


class TestSizes:
    def test_too_small_claim_names_both_sizes(self) -> None:
        # 4 layers of 8192 numbers in 16 bits: 65,536 bytes per token.
        spec = training_spec(
            maxTokens=1_000_000, storage={"size": "10Gi"}, trainer={"image": "i", "sequenceLength": 4096}
        )
        _, status = decided(training(spec), surroundings(deployment=on_gpus()))
        (accepted,) = (each for each in status.conditions if each.type == "Ready")
        assert accepted.reason == "TooSmallClaim"
        assert "10.7 GB" in accepted.message
        assert "65.5 GB" in accepted.message

    def test_short_captures_need_less_space(self) -> None:
        # 600 requests of at most 64 tokens.
        spec = training_spec(storage={"size": "10Gi"}, trainer={"image": "i", "sequenceLength": 64})
        decision, _ = decided(training(spec), surroundings(deployment=on_gpus()))
        assert decision.writes.job is not None

    def test_claim_of_exactly_the_size_is_large_enough(self) -> None:
        # 65,536 bytes per token.
        for tokens, is_enough in ((16 * 1024, True), (16 * 1024 + 1, False)):
            spec = training_spec(maxTokens=tokens, storage={"size": "1Gi"})
            decision, _ = decided(training(spec), surroundings(deployment=on_gpus()))
            assert (decision.writes.job is not None) is is_enough

    @pytest.mark.parametrize("completed", [-1, True])
    def test_unreadable_number_of_requests_does_not_lower_the_need(self, completed: object) -> None:
        captured = source()
        captured["status"]["summary"]["requests"]["completed"] = completed
        spec = training_spec(storage={"size": "10Gi"}, trainer={"image": "i", "sequenceLength": 64})
        seen = surroundings(deployment=on_gpus(), captures={"evening": captured})
        assert words(decided(training(spec), seen)[1])["Accepted"] == ("False", "TooSmallClaim")

    def test_long_captures_need_no_more_than_the_most_tokens(self) -> None:
        spec = training_spec(maxTokens=1000, storage={"size": "1Gi"})
        decision, _ = decided(training(spec), surroundings(deployment=on_gpus()))
        assert decision.writes.job is not None

    def test_size_of_existing_claim_counts(self) -> None:
        spec = training_spec(maxTokens=1_000_000, **MINE)
        given = claim("mine", status={"phase": "Bound", "capacity": {"storage": "1Gi"}})
        _, status = decided(training(spec), surroundings(deployment=on_gpus(), claim=given))
        assert words(status)["Accepted"] == ("False", "TooSmallClaim")

    def test_trainer_that_does_not_fit_names_its_estimate(self) -> None:
        spec = training_spec(trainer={"image": "i", "args": ["--num-layers", "16"]})
        _, status = decided(training(spec), surroundings(deployment=on_gpus()))
        (ready,) = (each for each in status.conditions if each.type == "Ready")
        assert ready.reason == "TrainerDoesNotFit"
        assert "estimated" in ready.message

    def test_tied_embeddings_are_kept_in_memory_once(self) -> None:
        spec = SpecDecodeTrainingSpec.parse(training_spec())
        launch = on_gpus().desired.outcome
        assert isinstance(launch, Launch)
        target = launch.facts.pair.target
        tied, untied = (
            trainer_memory(replace(target, tie_word_embeddings=each), spec).frozen_bytes for each in (True, False)
        )
        assert (tied, untied) == (2 * 128_256 * 8192, 2 * tied)

    def test_smaller_head_fits(self) -> None:
        args = ["--draft-vocab-size=32000", "--num-layers=1"]
        spec = training_spec(maxTokens=1000, trainer={"image": "i", "args": args})
        decision, _ = decided(training(spec), surroundings(deployment=on_gpus()))
        assert decision.writes.job is not None
        limits = decision.writes.job["spec"]["template"]["spec"]["initContainers"][-1]["resources"]["limits"]
        assert limits == {"nvidia.com/gpu": "2"}


class TestProgress:
    @pytest.mark.parametrize(
        ("step", "phase"),
        [*zip(STEPS, ["Exporting", "GeneratingHiddenStates", "Training", "Validating"], strict=True)],
    )
    def test_running_container_decides_the_phase(self, step: str, phase: str) -> None:
        decision, status = decided(training(), surroundings(job=job(), pods=[at_step(step)]))
        assert status.phase == phase
        assert words(status)["Ready"] == ("Unknown", phase)
        assert words(status)["Succeeded"][0] == "Unknown"
        assert status.started_at == "2026-01-01T00:10:00Z"
        assert decision.writes.job is None

    def test_phase_between_two_containers_is_that_of_the_next(self) -> None:
        _, status = decided(training(), surroundings(job=job(), pods=[pod(ended("export", 0), phase="Pending")]))
        assert status.phase == "GeneratingHiddenStates"
        assert words(status)["Ready"] == ("Unknown", "Starting")

    def test_rows_are_known_after_the_export(self) -> None:
        rows = {"rows": {"training": 9, "holdout": 1, "duplicates": 0, "tokens": 99}}
        seen = surroundings(job=job(), pods=[at_step("train", said=[rows])])
        body = after(training(), seen)
        assert body["status"]["rows"]["training"] == 9
        _, status = decided(body, surroundings(job=job(), pods=[]))
        assert status.rows is not None, "the pod of the export may be gone"

    def test_pod_that_ends_before_its_job_is_finishing(self) -> None:
        _, status = decided(training(), surroundings(job=job(), pods=[published()]))
        assert words(status)["Ready"] == ("Unknown", "Finishing")
        assert status.phase == "Validating"

    @pytest.mark.parametrize("outcome", ["Complete", "Failed"])
    def test_job_that_ends_before_its_pod_is_finishing(self, outcome: str) -> None:
        _, status = decided(training(), surroundings(job=job(outcome), pods=[at_step("publish")]))
        assert words(status)["Ready"] == ("Unknown", "Finishing")
        assert words(status)["Succeeded"][0] == "Unknown"
        assert status.phase == "Validating"

    def test_unschedulable_pod_waits_for_gpus(self) -> None:
        condition = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes: Insufficient nvidia.com/gpu"}
        _, status = decided(training(), surroundings(job=job(), pods=[pod(phase="Pending", conditions=[condition])]))
        assert words(status)["WaitingForGPUs"] == ("True", "Unschedulable")
        assert words(status)["Ready"] == ("Unknown", "WaitingForGPUs")
        assert status.phase == "Pending"

    def test_pod_whose_volumes_fit_no_node_does_not_wait_for_gpus(self) -> None:
        message = "0/1 nodes: pod has unbound immediate PersistentVolumeClaims"
        condition = {"type": "PodScheduled", "status": "False", "message": message}
        _, status = decided(training(), surroundings(job=job(), pods=[pod(phase="Pending", conditions=[condition])]))
        assert words(status)["Ready"] == ("Unknown", "WaitingForVolume")
        assert words(status)["WaitingForGPUs"][0] == "False"

    def test_unschedulable_pod_makes_room_for_engines(self) -> None:
        condition = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes"}
        seen = surroundings(job=job(), pods=[pod(phase="Pending", conditions=[condition])], goes_first="engines wait")
        decision, status = decided(training(), seen)
        assert decision.writes.job_suspended is True
        assert words(status)["Ready"] == ("Unknown", "WaitingForDeployment")

    def test_running_trainer_does_not_make_room_for_engines(self) -> None:
        scheduled = at_step("train")
        scheduled["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
        seen = surroundings(job=job(), pods=[scheduled], goes_first="engines wait")
        decision, status = decided(training(), seen)
        assert (decision.writes.job_suspended, decision.writes.remove_job) == (None, False)
        assert status.phase == "Training"

    def test_suspended_job_waits_for_engines(self) -> None:
        decision, status = decided(training(), surroundings(job=job(suspend=True), goes_first="engines wait"))
        assert decision.writes.job_suspended is None
        assert words(status)["Ready"] == ("Unknown", "WaitingForDeployment")

    def test_failed_attempt_is_retried(self) -> None:
        failed = pod(ended("export", 1, {"error": {"reason": "DiskFull", "message": "full"}}), phase="Failed")
        _, status = decided(training(), surroundings(job=job(), pods=[failed]))
        assert words(status)["Ready"] == ("Unknown", "Retrying")
        assert status.phase == "Exporting"

    def test_newest_pod_counts(self) -> None:
        failed = pod(ended("train", 1), phase="Failed", name="head-training-a", created="1")
        newest = {**at_step("train")}
        newest["metadata"] = {**newest["metadata"], "creationTimestamp": "2"}
        _, status = decided(training(), surroundings(job=job(), pods=[failed, newest]))
        assert status.phase == "Training"

    def test_recorded_times_stay(self) -> None:
        body = after(training(), surroundings(job=job(), pods=[at_step("export")]))
        later = at_step("train")
        later["status"]["startTime"] = "2026-01-01T01:10:00Z"
        _, status = decided(body, surroundings(job=job(), pods=[later]))
        assert status.started_at == "2026-01-01T00:10:00Z"

    def test_time_ahead_counts_as_now(self) -> None:
        ahead = at_step("export")
        ahead["status"]["startTime"] = "2030-01-01T00:00:00Z"
        decision, status = decided(training(), surroundings(job=job(), pods=[ahead]))
        assert status.started_at == NOW.strftime("%Y-%m-%dT%H:%M:%SZ")
        assert decision.times_ahead


class TestFailure:
    @pytest.mark.parametrize(
        ("container", "message", "more", "reason"),
        [
            ("export", {"error": {"reason": "TooFewRows", "message": "12 of 200"}}, {}, "TooFewRows"),
            ("train", {"error": {"reason": "TrainerDiverged", "message": "NaN"}}, {}, "TrainerDiverged"),
            ("hidden-states", "", {"reason": "OOMKilled"}, "OutOfMemory"),
            ("train", "a line of a conversation", {}, "TrainingFailed"),
            ("publish", json.dumps({"error": "text"}), {}, "TrainingFailed"),
            ("train", {"error": {"reason": "Cancelled", "message": "m"}}, {}, "Cancelled"),
        ],
    )
    def test_reason_comes_from_the_container(self, container: str, message: Any, more: Body, reason: str) -> None:
        before = [ended(name, 0) for name in STEPS[: STEPS.index(container)]]
        failed = pod(*before, ended(container, 1, message, **more), phase="Failed")
        _, status = decided(training(), surroundings(job=job("Failed"), pods=[failed]))
        assert words(status)["Succeeded"] == ("False", reason)
        assert words(status)["Ready"] == ("False", reason)
        assert status.phase == "Failed"
        assert status.finished_at == "2026-01-01T01:00:00Z"

    def test_output_of_the_trainer_is_not_quoted(self) -> None:
        secret = "USER: my password is hunter2"
        failed = pod(ended("export", 0), ended("hidden-states", 0), ended("train", 1, secret), phase="Failed")
        _, status = decided(training(), surroundings(job=job("Failed"), pods=[failed]))
        assert "hunter2" not in status.model_dump_json()

    def test_failure_of_the_volume_names_the_claim(self) -> None:
        failed = pod(ended("export", 1, {"error": {"reason": "DiskFull", "message": "no space"}}), phase="Failed")
        _, status = decided(training(), surroundings(job=job("Failed"), pods=[failed]))
        (ready,) = (each for each in status.conditions if each.type == "Ready")
        assert f"claim {JOB} (spec.storage.size)" in ready.message

    def test_deadline_names_its_field(self) -> None:
        late = pod(running("train"), phase="Failed", reason="DeadlineExceeded")
        _, status = decided(training(), surroundings(job=job("Failed"), pods=[late]))
        assert words(status)["Succeeded"] == ("False", "DeadlineExceeded")

    def test_cancelled_step_of_a_deleted_pod_is_lost(self) -> None:
        told = {"error": {"reason": "Cancelled", "message": "m"}}
        failed = pod(ended("export", 0), ended("hidden-states", 0), ended("train", 1, told), phase="Failed")
        failed["metadata"]["deletionTimestamp"] = "2026-01-01T01:00:00Z"
        _, status = decided(training(), surroundings(job=job("Failed"), pods=[failed]))
        assert words(status)["Succeeded"] == ("False", "NodeLost")

    def test_pod_that_is_removed_from_its_node_is_awaited(self) -> None:
        leaving = at_step("train")
        leaving["metadata"]["deletionTimestamp"] = "2026-01-01T01:00:00Z"
        leaving["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True", "message": "drained"}]
        _, status = decided(training(), surroundings(job=job(), pods=[leaving]))
        assert words(status)["Ready"] == ("Unknown", "NodeLost")
        assert status.phase == "Pending"

    def test_lost_pod(self) -> None:
        gone = job("Failed")
        gone["status"]["conditions"][0]["reason"] = "BackoffLimitExceeded"
        _, status = decided(training(), surroundings(job=gone))
        assert words(status)["Succeeded"] == ("False", "NodeLost")

    @pytest.mark.parametrize("result", [{"head": None}, {"head": {"path": 1}}, {"head": {"bytes": 2**60}}])
    def test_unreadable_result(self, result: Body) -> None:
        _, status = decided(training(), surroundings(job=job("Complete"), pods=[published(**result)]))
        assert words(status)["Succeeded"] == ("False", "ResultUnreadable")

    def test_failure_is_kept_when_its_pod_is_gone(self) -> None:
        failed = pod(ended("export", 1, {"error": {"reason": "TooFewRows", "message": "12"}}), phase="Failed")
        body = after(training(), surroundings(job=job("Failed"), pods=[failed]))
        decision, status = decided(body, surroundings(deployment=None))
        assert words(status)["Succeeded"] == ("False", "TooFewRows")
        assert (status.phase, decision.writes.job) == ("Failed", None)
        assert not training_attention(read_training(body)).is_close


class TestSuspend:
    def test_running_job_is_suspended(self) -> None:
        decision, status = decided(
            training(training_spec(suspend=True)), surroundings(job=job(), pods=[at_step("train")])
        )
        assert decision.writes.job_suspended is True
        assert status.phase == "Suspended"

    def test_suspended_job_is_left_alone(self) -> None:
        decision, _ = decided(training(training_spec(suspend=True)), surroundings(job=job(suspend=True)))
        assert decision.writes.job_suspended is None

    def test_job_is_resumed(self) -> None:
        decision, status = decided(training(), surroundings(job=job(suspend=True)))
        assert decision.writes.job_suspended is False
        assert status.phase == "Pending"

    def test_kueue_resumes_its_jobs(self) -> None:
        queued = training(labels={QUEUE_LABEL: "team"})
        decision, status = decided(queued, surroundings(job=job(suspend=True)))
        assert decision.writes.job_suspended is None
        assert words(status)["Ready"] == ("Unknown", "Queued")

    def test_job_of_queue_is_removed(self) -> None:
        queued = training(training_spec(suspend=True), labels={QUEUE_LABEL: "team"})
        for live in (job(), job(suspend=True)):
            decision, _ = decided(queued, surroundings(job=live))
            assert (decision.writes.remove_job, decision.writes.job_suspended) == (True, None)

    def test_measurement_is_suspended_and_resumed(self) -> None:
        stopped = trained(training_spec(suspend=True))
        live = judge()
        decision, status = decided(stopped, surroundings(judging=live))
        assert decision.writes.resumed_capture == (live, True)
        assert (status.phase, words(status)["Better"]) == ("Suspended", ("Unknown", "Suspended"))
        assert words(status)["Succeeded"] == ("True", "HeadPublished")
        halted = judge(suspend=True)
        assert decided(stopped, surroundings(judging=halted))[0].writes.resumed_capture is None
        assert decided(trained(), surroundings(judging=live))[0].writes.resumed_capture is None
        assert decided(trained(), surroundings(judging=halted))[0].writes.resumed_capture == (halted, False)


class TestJudging:
    def test_published_head_is_measured(self) -> None:
        first, _ = decided(training(), surroundings(job=job("Complete"), pods=[published()]))
        assert first.writes.capture is None, "the status has the result before anything depends on it"
        decision, status = decided(trained())
        assert decision.writes.capture is not None
        assert decision.writes.capture["metadata"]["ownerReferences"] == [owner_reference(KEY, "training-uid")]
        assert words(status)["Succeeded"] == ("True", "HeadPublished")
        assert status.phase == "Judging"
        assert status.head is not None
        assert status.head.path == "default/head/head", "the path that a pod reports is not believed"
        assert status.rows is not None
        assert status.finished_at is None

    def test_claim_with_head_is_labelled(self) -> None:
        own = claim(JOB, labels=LEFT)
        first, _ = decided(training(), surroundings(job=job("Complete"), pods=[published()], claim=own))
        assert first.writes.claim_metadata == {}, "without a status, the training could not start again"
        decision, _ = decided(trained(), surroundings(claim=own))
        assert decision.writes.claim_metadata["labels"] == {PUBLISHED_LABEL: "true"}

    def test_claim_of_user_is_not_labelled(self) -> None:
        mine = claim("mine")
        spec = training_spec(**MINE)
        first = surroundings(job=job("Complete"), pods=[published()], claim=mine)
        decision, _ = decided(after(training(spec), first), surroundings(claim=mine))
        assert decision.writes.claim_metadata == {}, "the next training could not write to it"

    def test_claim_with_a_head_of_another_training_is_labelled(self) -> None:
        told = {"error": {"reason": "AlreadyPublished", "message": "m"}}
        refused = pod(*(ended(name, 0) for name in STEPS[:-1]), ended("publish", 1, told), phase="Failed")
        own = claim(JOB, labels=LEFT)
        decision, status = decided(training(), surroundings(job=job("Failed"), pods=[refused], claim=own))
        assert words(status)["Succeeded"] == ("False", "AlreadyPublished")
        assert decision.writes.claim_metadata["labels"] == {PUBLISHED_LABEL: "true"}

    def test_capture_is_created_once(self) -> None:
        decision, status = decided(trained(), surroundings(judging=judge()))
        assert decision.writes.capture is None
        assert words(status)["Better"] == ("Unknown", "Judging")
        assert status.phase == "Judging"

    def test_result_of_a_forged_capture_is_not_believed(self) -> None:
        forged = judge(succeeded="True")
        forged["spec"]["arms"][0] = {"name": "current", "speculation": {"method": "ngram", "numSpeculativeTokens": 1}}
        decision, status = decided(trained(), surroundings(judging=forged))
        assert words(status)["Ready"] == ("False", "ChildNameConflict")
        assert words(status)["Better"] == ("Unknown", "NotJudged")
        assert (status.phase, status.verdict, decision.writes.capture) == ("Judging", None, None)

    def test_job_and_pods_are_not_needed_any_more(self) -> None:
        decision, status = decided(trained(), surroundings())
        assert decision.writes.capture is not None
        assert decision.writes.job is None
        assert status.head is not None

    def test_result_of_the_capture_completes_the_training(self) -> None:
        body = after(trained(), surroundings(judging=judge(succeeded="True")))
        assert body["status"]["phase"] == "Complete"
        assert body["status"]["verdict"]["capture"] == "head-judge"
        assert body["status"]["finishedAt"] == NOW.strftime("%Y-%m-%dT%H:%M:%SZ")
        decision, status = decided(body, surroundings(deployment=None))
        assert decision.writes.capture is None
        assert status.verdict is not None, "the capture may be deleted"
        assert words(status)["Ready"][0] == "True"

    def test_measurement_waits_for_a_deployment(self) -> None:
        decision, status = decided(trained(), surroundings(written=None))
        assert decision.writes.capture is None
        assert words(status)["Ready"] == ("Unknown", "WaitingForDeployment")
        assert words(status)["Succeeded"] == ("True", "HeadPublished")

    def test_training_without_measurement_is_complete(self) -> None:
        decision, status = decided(trained(training_spec(judgement={"enabled": False})))
        assert decision.writes.capture is None
        assert status.phase == "Complete"
        assert words(status)["Better"] == ("Unknown", "NotJudged")
        assert words(status)["Ready"] == ("True", "NotJudged")

    def test_running_job_of_ended_training_is_removed(self) -> None:
        body = after(trained(training_spec(judgement={"enabled": False})), surroundings())
        assert decided(body, surroundings(job=job()))[0].writes.remove_job
        assert not decided(body, surroundings(job=job("Complete")))[0].writes.remove_job


def better_status(promote: str, better: str) -> dict[str, tuple[str, str]]:
    """Conditions of a training that ended with a verdict, with a value of promote."""
    body = after(trained(), surroundings(judging=judge(succeeded="True")))
    for each in body["status"]["conditions"]:
        if each["type"] == "Better":
            each["status"] = better
    body["spec"] = {**body["spec"], "promote": promote}
    return words(decided(body, surroundings())[1])


@pytest.mark.parametrize(
    ("promote", "better", "promoted"),
    [
        ("Manual", "True", ("False", "Manual")),
        ("OnBetter", "True", ("Unknown", "RolloutInProgress")),
        ("OnBetter", "False", ("False", "NotBetter")),
        ("OnBetter", "Unknown", ("Unknown", "NotJudged")),
    ],
)
def test_promoted(promote: str, better: str, promoted: tuple[str, str]) -> None:
    assert better_status(promote, better)["Promoted"] == promoted


class TestClusterRefuses:
    def test_job(self) -> None:
        decision, _ = decided(training())
        refused = blocked_by_cluster(decision, working("RefusedForNow", "quota"))
        status = compose_status(read_training(training()), refused, NOW)
        assert words(status)["Accepted"] == ("Unknown", "RefusedForNow")

    def test_capture(self) -> None:
        decision, _ = decided(trained())
        refused = blocked_by_cluster(decision, stalled("ChildNameConflict", "taken"))
        status = compose_status(read_training(trained()), refused, NOW)
        assert words(status)["Better"] == ("Unknown", "ChildNameConflict")
        assert words(status)["Succeeded"] == ("True", "HeadPublished")

    def test_other_write_of_an_ended_training(self) -> None:
        body = after(trained(), surroundings(judging=judge(succeeded="True")))
        decision, _ = decided(body)
        assert blocked_by_cluster(decision, working("Forbidden", "no")) is decision

    def test_other_write_of_a_failed_training(self) -> None:
        failed = pod(ended("export", 1, {"error": {"reason": "TooFewRows", "message": "12"}}), phase="Failed")
        decision, _ = decided(training(), surroundings(job=job("Failed"), pods=[failed]))
        assert blocked_by_cluster(decision, working("Forbidden", "no")) is decision


def test_internal_error_keeps_head_and_claim() -> None:
    subject = read_training(trained())
    status = compose_status(subject, internal_error(subject, ValueError("x")), NOW)
    assert words(status)["Ready"] == ("Unknown", "InternalError")
    assert words(status)["Succeeded"] == ("True", "HeadPublished")
    assert status.head is not None
    assert status.phase == "Judging"


def test_decision_is_repeatable() -> None:
    subject, seen = read_training(training()), surroundings()
    assert decide(subject, seen, NOW) == decide(subject, seen, NOW)
