"""Preconditions, Job and order of a live capture."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from specdecode_operator.api.base import Body
from specdecode_operator.capture.job.collect_settings import MOST_PODS
from specdecode_operator.capture.job_manifest import wrap_up_s
from specdecode_operator.capture.live_capture import recorded_first
from specdecode_operator.capture.observation import CaptureObservation, ObservedDeployment, read_capture
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.cluster.resources import CAPTURED_ENGINE_ANNOTATION, QUEUE_LABEL, TEMPLATE_HASH_ANNOTATION
from specdecode_operator.deployment.conditions import UNKNOWN
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.enums import LiveTokenIds
from tests.support.capture_decisions import NOW, after, decided, words
from tests.support.captures import (
    JOB_UID,
    TOKEN,
    capture,
    capture_pod,
    claim,
    ended,
    engine_pod,
    golden,
    live_spec,
    observed_deployment,
    running,
    serving,
    surroundings,
)
from tests.support.decisions import desired_state
from tests.support.documents import ROOT
from tests.support.objects import H100, parent, tiny_cpu
from tests.support.replay_field_cases import replaying

STARTED_S = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
"""When the pod of `capture_pod` started."""


def seen(**changes: Any) -> CaptureObservation:
    return surroundings(**{"deployment": serving(), **changes})


def created_job(spec: Body | None = None, **changes: Any) -> Body:
    """The Job of a live capture as the API server has it."""
    decision, _ = decided(capture(live_spec() if spec is None else spec), seen(**changes))
    assert decision.writes.job is not None
    job = decision.writes.job
    return {**job, "metadata": {**job["metadata"], "uid": JOB_UID}, "status": {}}


def collector(job: Body) -> Body:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return dict(container)


def settings(job: Body) -> Body:
    (text,) = (each["value"] for each in collector(job)["env"] if each["name"] == "SPECDECODE_CAPTURE")
    told: Body = json.loads(text)
    return told


def live(spec: Body | None = None, **meta: Any) -> Body:
    return capture(live_spec() if spec is None else spec, **meta)


class TestStart:
    def test_live_capture_creates_only_collector_and_claim(self) -> None:
        decision, status = decided(live(), seen())
        assert decision.writes.claim is not None
        assert decision.writes.live_order is None, "no collector listens yet"
        assert words(status)["Accepted"] == ("True", "Valid")
        pod = created_job()["spec"]["template"]["spec"]
        assert "initContainers" not in pod
        assert [each["name"] for each in pod["containers"]] == ["collect"]
        assert pod["automountServiceAccountToken"] is False

    def test_speculation_on_cpu_may_lose_temperatures_of_users(self) -> None:
        decision, status = decided(live(), seen())
        accepted = next(each for each in status.conditions if each.type == "Accepted")
        assert (accepted.status, "vllm#55005" in accepted.message) == ("True", True)
        (warning,) = decision.warnings
        assert warning in accepted.message
        job = {**created_job(), "status": {}}
        kept = decided(after(live(), seen()), seen(job=job))[1]
        assert warning in next(each for each in kept.conditions if each.type == "Accepted").message
        plain, _ = decided(live(), seen(deployment=serving(observed_deployment(tiny_cpu(speculation=None)))))
        assert plain.writes.job is not None
        assert plain.warnings == ()

    def test_collector_requests_no_gpu(self) -> None:
        resources = collector(created_job())["resources"]
        assert resources["requests"] == {"cpu": "100m", "memory": "256Mi"}
        assert set(resources["limits"]) == {"memory"}

    def test_collector_settings_have_pods_duration_and_sample(self) -> None:
        spec = live_spec(live={"durationSeconds": 600, "samplePercent": 25}, record={"promptTokenIds": True})
        told = settings(created_job(spec))
        assert told["live"] == {
            "port": 8470,
            "token": TOKEN,
            "pods": ["llama-a", "llama-b"],
            "join_seconds": 150,
            "duration_seconds": 600,
            "requests": None,
            "sample_percent": 25,
            "drain_seconds": 60,
        }
        assert told["deadline_seconds"] is None
        assert told["record"] == {"tokenIds": False, "promptTokenIds": True, "stepStats": True}
        assert told["context"]["deployment"]["name"] == "llama"

    def test_recording_by_requests_has_a_deadline(self) -> None:
        told = settings(created_job(live_spec(live={"requests": 10}, deadlineSeconds=1200)))
        assert (told["live"]["requests"], told["live"]["duration_seconds"]) == (10, None)
        assert told["deadline_seconds"] == 1200

    @pytest.mark.parametrize(
        ("spec", "window_s"),
        [
            (live_spec(live={"durationSeconds": 7200}), 7200),
            (live_spec(live={"requests": 10}, deadlineSeconds=1000), 1000),
        ],
    )
    def test_pod_deadline_covers_join_record_drain_and_publish(self, spec: Body, window_s: int) -> None:
        deadline_s = created_job(spec)["spec"]["template"]["spec"]["activeDeadlineSeconds"]
        assert deadline_s >= 150 + window_s + 60 + 30 + wrap_up_s(window_s)

    def test_job_has_hash_of_recorded_engines(self) -> None:
        job = created_job(deployment=replace(serving(), engine="0123456789abcdef"))
        assert job["metadata"]["annotations"][CAPTURED_ENGINE_ANNOTATION] == "0123456789abcdef"

    def test_only_created_volume_gets_fs_group(self) -> None:
        assert created_job()["spec"]["template"]["spec"]["securityContext"]["fsGroup"] == 65532
        spec = live_spec(storage={"persistentVolumeClaim": {"claimName": "mine"}})
        existing = created_job(spec, claim=claim("mine"))
        assert "fsGroup" not in existing["spec"]["template"]["spec"]["securityContext"]

    def test_only_named_pods_are_recorded(self) -> None:
        spec = live_spec(live={"requests": 10, "pods": ["llama-b", "llama-b"]})
        assert settings(created_job(spec))["live"]["pods"] == ["llama-b"]

    def test_unready_pods_and_workers_are_left_out(self) -> None:
        deployment = serving()
        worker = engine_pod("llama-worker", deployment)
        worker["metadata"]["labels"] = {"specdecode.io/computes-for": "llama"}
        starting = engine_pod("llama-c", deployment, ready=False)
        pods = [*deployment.pods, worker, starting]
        told = settings(created_job(deployment=replace(deployment, pods=pods)))
        assert told["live"]["pods"] == ["llama-a", "llama-b"]

    def test_live_capture_job_ignores_queue_label(self) -> None:
        decision, status = decided(live(labels={QUEUE_LABEL: "gpus"}), seen())
        assert decision.writes.job is not None
        assert decision.writes.job["spec"]["suspend"] is False
        assert QUEUE_LABEL not in decision.writes.job["metadata"]["labels"]
        assert words(status)["Ready"] == ("Unknown", "Starting")

    def test_context_has_engine_command_without_recorder_shell(self) -> None:
        deployment = serving()
        workload = deployment.desired.workload
        assert workload is not None
        (engine,) = workload["spec"]["template"]["spec"]["containers"]
        assert engine["command"][0] == "/bin/sh"
        template = {**workload["spec"]["template"]}
        template["spec"] = {**template["spec"], "imagePullSecrets": [{"name": "registry"}]}
        changed = {**workload, "spec": {**workload["spec"], "template": template}}
        desired = replace(deployment.desired, children=[changed])
        job = created_job(deployment=replace(deployment, desired=desired))
        assert settings(job)["context"]["command"][:2] == ["vllm", "serve"]
        assert job["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "registry"}]

    def test_context_has_command_of_multi_node_engine(self) -> None:
        spec = yaml.safe_load((ROOT / "examples/llama-405b-two-nodes.yaml").read_text())["spec"]
        nodes = tuple(NodeFacts(f"node-{number}", H100, 8) for number in range(2))
        desired = desired_state(parse_deployment(parent(spec)), nodes, has_leader_worker_sets=True)
        deployment = serving(replace(observed_deployment(), desired=desired))
        command = settings(created_job(deployment=deployment))["context"]["command"]
        assert any(each.startswith("--nnodes") for each in command)

    def test_dollar_signs_in_command_are_escaped(self) -> None:
        spec = tiny_cpu()
        spec["serving"]["servedModelNames"] = ["$(HOME)"]
        job = created_job(deployment=serving(observed_deployment(spec)))
        (text,) = (each["value"] for each in collector(job)["env"] if each["name"] == "SPECDECODE_CAPTURE")
        assert "$$(HOME)" in text
        assert "$(HOME)" in json.loads(text.replace("$$", "$"))["context"]["command"]


def rolling() -> ObservedDeployment:
    deployment = serving()
    old = engine_pod("llama-old", deployment)
    old["metadata"]["annotations"] = {TEMPLATE_HASH_ANNOTATION: "before"}
    return replace(deployment, pods=[*deployment.pods, old])


def unready() -> ObservedDeployment:
    deployment = observed_deployment()
    return replace(deployment, pods=[engine_pod("llama-a", deployment, ready=False)])


class TestWaits:
    @pytest.mark.parametrize(
        ("deployment", "named"),
        [
            (replace(serving(), wants_engines=False), "suspended"),
            (replace(serving(), pods=[]), "none of the 0 engine pods"),
            (unready(), "none of the 1 engine pods"),
            (rolling(), "llama-old"),
            (
                replace(
                    serving(),
                    pods=[
                        {**each, "metadata": {**each["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
                        for each in serving().pods
                    ],
                ),
                "none of the 0",
            ),
        ],
    )
    def test_live_capture_waits_until_engines_serve(self, deployment: ObservedDeployment, named: str) -> None:
        decision, status = decided(live(), seen(deployment=deployment))
        assert decision.writes.job is None
        assert decision.writes.claim is None
        assert words(status)["Ready"] == ("Unknown", "WaitingForDeployment")
        assert named in decision.readiness.message
        assert "continues when" in decision.readiness.message

    def test_live_capture_waits_for_named_pod(self) -> None:
        spec = live_spec(live={"requests": 10, "pods": ["llama-a", "llama-x"]})
        decision, status = decided(live(spec), seen())
        assert decision.writes.job is None
        assert words(status)["Ready"] == ("Unknown", "WaitingForDeployment")
        assert decision.readiness.message.startswith("spec.live.pods: llama-x: ")
        assert "ready: llama-a, llama-b" in decision.readiness.message

    def test_live_capture_waits_for_other_live_capture(self) -> None:
        decision, status = decided(live(), seen(goes_first="live capture other goes first"))
        assert decision.writes.job is None
        assert words(status)["Ready"] == ("Unknown", "WaitingForDeployment")

    def test_live_capture_waits_for_missing_claim(self) -> None:
        spec = live_spec(storage={"persistentVolumeClaim": {"claimName": "mine"}})
        _, status = decided(live(spec), seen())
        assert words(status)["Ready"] == ("Unknown", "ClaimNotFound")


class TestRefused:
    @pytest.mark.parametrize("field", ["tokenIds", "promptTokenIds"])
    def test_token_ids_need_permission_in_the_namespace(self, field: str) -> None:
        allowed = {"tokenIds": LiveTokenIds.NONE, "promptTokenIds": LiveTokenIds.ANSWERS}[field]
        decision, status = decided(live(live_spec(record={field: True})), seen(token_ids_allowed=allowed))
        assert decision.writes.job is None
        assert words(status)["Accepted"] == ("False", "TokenIdsNotAllowed")
        assert words(status)["Stalled"][0] == "True"
        assert decision.accepted.message.startswith(f"spec.record.{field}: true: ")
        assert "liveCapture.tokenIds" in decision.accepted.message

    def test_replayed_engine_is_refused(self) -> None:
        deployment = serving(observed_deployment(replaying()))
        decision, status = decided(live(), seen(deployment=deployment))
        assert decision.writes.job is None
        assert words(status)["Accepted"] == ("False", "RecorderNotInEngines")
        assert "spec.engine.replay" in decision.accepted.message

    def test_too_many_pods_are_refused_unless_named(self) -> None:
        names = [f"llama-{number}" for number in range(MOST_PODS + 1)]
        _, status = decided(live(), seen(deployment=serving(None, *names)))
        assert words(status)["Accepted"] == ("False", "TooManyPods")
        spec = live_spec(live={"requests": 1, "pods": names[:MOST_PODS]})
        decision, _ = decided(live(spec), seen(deployment=serving(None, *names)))
        assert decision.writes.job is not None

    def test_claim_with_published_files_is_refused(self) -> None:
        published = claim(labels={"specdecode.io/capture": "demo", "specdecode.io/published": "true"})
        decision, status = decided(live(), seen(claim=published))
        assert decision.writes.job is None
        assert words(status)["Accepted"] == ("False", "AlreadyPublished")

    def test_seed_of_live_capture_is_refused(self) -> None:
        decision, status = decided(live(live_spec(seed=3)), seen())
        assert decision.writes.job is None
        assert words(status)["Accepted"] == ("False", "Invalid")
        assert decision.accepted.message.startswith("spec.seed: 3: ")

    def test_live_capture_is_refused_as_golden(self) -> None:
        judged = {"deployment": "llama", "against": {"capture": "golden"}}
        _, status = decided(capture(judged), surroundings(golden=golden(of=live_spec())))
        assert words(status)["Accepted"] == ("False", "GoldenDiffers")


def others(*bodies: Body) -> list[Body]:
    return [live(name="own", creationTimestamp="2026-01-01T00:05:00Z"), *bodies]


def first(*bodies: Body, begun: tuple[str, ...] = (), ready: tuple[str, ...] = ("llama-0",)) -> bool:
    """Whether another capture goes first."""
    own, *_ = found = others(*bodies)
    told = recorded_first(read_capture(own), found, begun, ready)
    assert told is None or "live capture other of deployment llama goes first" in told
    return told is not None


class TestTurn:
    def test_older_live_capture_goes_first(self) -> None:
        assert first(live(name="other", creationTimestamp="2026-01-01T00:04:00Z"))
        assert not first(live(name="other", creationTimestamp="2026-01-01T00:06:00Z"))

    def test_started_live_capture_goes_first(self) -> None:
        younger = live(name="other", creationTimestamp="2026-01-01T00:06:00Z")
        assert first(younger, begun=("other",))
        assert not first(younger, begun=("other", "own"))

    def test_blocked_live_capture_is_skipped(self) -> None:
        spec = live_spec(storage={"persistentVolumeClaim": {"claimName": "missing"}})
        older = live(spec, name="other", creationTimestamp="2026-01-01T00:04:00Z")
        assert not first(after(older, seen()))

    def test_one_that_waits_for_a_named_pod_is_passed_over(self) -> None:
        spec = live_spec(live={"requests": 1, "pods": ["llama-0", "llama-1"]})
        older = live(spec, name="other", creationTimestamp="2026-01-01T00:04:00Z")
        assert not first(older)
        assert first(older, ready=("llama-0", "llama-1"))
        assert first(older, begun=("other",))

    def test_live_capture_waiting_for_same_engines_goes_first(self) -> None:
        older = live(name="other", creationTimestamp="2026-01-01T00:04:00Z")
        assert first(after(older, seen(deployment=unready())))

    @pytest.mark.parametrize("spec", [live_spec(suspend=True), {"deployment": "llama"}])
    def test_suspended_or_ordinary_capture_is_skipped(self, spec: Body) -> None:
        assert not first(live(spec, name="other", creationTimestamp="2026-01-01T00:04:00Z"))

    def test_ended_live_capture_is_skipped(self) -> None:
        done = golden("other", of=live_spec())
        done["metadata"]["creationTimestamp"] = "2026-01-01T00:04:00Z"
        assert not first(done)


def collecting(**status: Any) -> Body:
    return capture_pod(**{"podIP": "10.1.2.3", "containerStatuses": [running("collect")], **status})


def order(job: Body, pod: Body, body: Body | None = None) -> Body | None:
    """What the recorders are told."""
    decision, _ = decided(body or live(), seen(job=job, pods=[pod]))
    written = decision.writes.live_order
    if written is None:
        return None
    assert written["metadata"]["name"] == "llama-live-order"
    assert [each["uid"] for each in written["metadata"]["ownerReferences"]] == ["capture-uid"]
    told: Body = json.loads(written["data"]["order.json"])
    return told


class TestOrder:
    def test_order_has_collector_address_and_deadline(self) -> None:
        job = created_job()
        deadline_s = job["spec"]["template"]["spec"]["activeDeadlineSeconds"]
        assert order(job, collecting()) == {
            "capture": "default/demo",
            "uid": "capture-uid",
            "address": "10.1.2.3:8470",
            "token": TOKEN,
            "until_wall_s": STARTED_S + deadline_s,
        }

    def test_restarted_operator_keeps_the_token(self) -> None:
        job = created_job()
        decision, _ = decided(live(), seen(job=job, pods=[collecting()], token="another one"))
        assert decision.writes.live_order is not None
        assert TOKEN in decision.writes.live_order["data"]["order.json"]

    def test_ipv6_address_is_in_brackets(self) -> None:
        told = order(created_job(), collecting(podIP="fd00::7"))
        assert told is not None
        assert told["address"] == "[fd00::7]:8470"

    @pytest.mark.parametrize(
        "status",
        [
            {"podIP": None},
            {"podIP": "a host"},
            {"containerStatuses": [{"name": "collect", "state": {"waiting": {"reason": "ContainerCreating"}}}]},
            {"containerStatuses": [ended("collect", 0)]},
            {"startTime": None},
        ],
    )
    def test_no_order_is_written_unless_collector_listens(self, status: Body) -> None:
        assert order(created_job(), collecting(**status)) is None

    def test_no_order_is_written_for_terminating_collector(self) -> None:
        pod = collecting()
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:10:00Z"
        assert order(created_job(), pod) is None

    @pytest.mark.parametrize("condition", ["Complete", "Failed"])
    def test_no_order_is_written_after_job_ended(self, condition: str) -> None:
        done = {"type": condition, "status": "True", "lastTransitionTime": "2026-01-01T00:10:00Z"}
        job = {**created_job(), "status": {"conditions": [done], "completionTime": "2026-01-01T00:10:00Z"}}
        assert order(job, collecting(phase="Failed")) is None

    def test_no_order_is_written_for_job_without_settings(self) -> None:
        job = created_job()
        collector(job)["env"].clear()
        assert order(job, collecting()) is None


class TestProgress:
    def test_phase_is_recording_while_collector_runs(self) -> None:
        _, status = decided(live(), seen(job=created_job(), pods=[collecting()]))
        assert status.phase == "Recording"
        assert words(status)["Ready"] == ("Unknown", "Recording")

    def test_unschedulable_collector_is_not_waiting_for_gpus(self) -> None:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: cpu"}
        pod = capture_pod(phase="Pending", conditions=[condition])
        _, status = decided(live(), seen(job=created_job(), pods=[pod]))
        assert status.phase == "Pending"
        assert words(status)["Ready"] == ("Unknown", "Unschedulable")
        assert words(status)["WaitingForGPUs"] == ("False", "NotWaiting")

    def test_collector_failure_reason_is_reported(self) -> None:
        said = {"error": {"reason": "NoEngineJoined", "message": "no recorder connected within 150 s"}}
        failed = {"type": "Failed", "status": "True", "lastTransitionTime": "2026-01-01T00:10:00Z"}
        job = {**created_job(), "status": {"conditions": [failed]}}
        pod = capture_pod(phase="Failed", containerStatuses=[ended("collect", 1, said)])
        decision, status = decided(live(), seen(job=job, pods=[pod]))
        assert status.phase == "Failed"
        assert decision.succeeded.reason == "NoEngineJoined"

    def test_collector_summary_is_in_status(self) -> None:
        said = {"requests": {"sent": 431, "completed": 430}, "acceptance": "71%"}
        done = {"type": "Complete", "status": "True"}
        finished = {"conditions": [done], "completionTime": "2026-01-01T00:10:00Z"}
        pod = capture_pod(phase="Succeeded", containerStatuses=[ended("collect", 0, said)])
        _, status = decided(live(), seen(job={**created_job(), "status": finished}, pods=[pod], claim=claim()))
        assert status.phase == "Succeeded"
        assert status.path == "default/demo/as-deployed/1"
        assert status.summary is not None
        assert status.summary.requests.completed == 430

    def test_earlier_capture_does_not_end_recording(self) -> None:
        decision, status = decided(live(), seen(job=created_job(), pods=[collecting()], goes_first="another"))
        assert decision.writes.live_order is not None
        assert not decision.writes.remove_job
        assert status.phase == "Recording"

    def test_rollout_does_not_end_recording(self) -> None:
        decision, status = decided(live(), seen(job=created_job(), pods=[collecting()], deployment=rolling()))
        assert decision.writes.live_order is not None
        assert status.phase == "Recording"

    def test_suspending_live_capture_removes_its_job(self) -> None:
        body = live(live_spec(suspend=True))
        decision, status = decided(body, seen(job=created_job(), pods=[collecting()]))
        assert decision.writes.remove_job
        assert decision.writes.live_order is None
        assert status.phase == "Cancelled"
        assert decision.succeeded.status is UNKNOWN
        resumed = {**live(), "status": after(body, seen(), NOW)["status"]}
        decision, _ = decided(resumed, seen())
        assert decision.writes.job is not None
