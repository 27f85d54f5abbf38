"""Trainings against a real API server: objects, ownership, phases. The kubelet's part is played here."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import yaml

from tests.component.operator.test_captures import deploy, make_claim, place_engine, staying
from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl
from tests.support.operator_process import IMAGE, OperatorProcess
from tests.support.trainings import HEAD, ROWS, STEPS
from tests.support.waiting import eventually

CLAIM = JOB = "head-training"
JUDGE = "head-judge"
CHILDREN = "--selector=specdecode.io/training=head"
PROMPTS = {"dataset": {"configMap": {"name": "prompts"}, "path": "a.jsonl", "format": "JSONL"}}


@pytest.fixture(autouse=True)
def _running(operator: OperatorProcess) -> None:
    pass


def write(kubectl: Kubectl, kind: str, name: str, spec: dict[str, Any], labels: dict[str, str] | None = None) -> None:
    metadata = {"name": name, "labels": labels or {}}
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}
    answer = kubectl.write(yaml.safe_dump(body))
    assert answer.returncode == 0, answer.stderr


def captured(kubectl: Kubectl, name: str = "evening") -> None:
    """Create a suspended capture whose status says that it has succeeded."""
    make_claim(kubectl, f"{name}-files")
    spec = {
        "deployment": "tiny",
        "suspend": True,
        "record": {"tokenIds": True},
        "workload": {"prompts": PROMPTS},
        "storage": {"persistentVolumeClaim": {"claimName": f"{name}-files"}},
    }
    write(kubectl, "SpecDecodeCapture", name, spec)
    wait_for(kubectl, name, "Ready", "Suspended", kind="sdc")
    end(kubectl, name, "True", claim=f"{name}-files", summary={"requests": {"sent": 600, "completed": 600}})


def end(kubectl: Kubectl, name: str, succeeded: str, **status: Any) -> None:
    """Write the end of a capture into its status."""
    outcome = {"type": "Succeeded", "status": succeeded, "reason": "Captured", "message": "done"}
    stamp = {"observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z"}
    kubectl.patch_status(name, {"conditions": [{**outcome, **stamp}], **status}, kind="sdc")


def train(kubectl: Kubectl, name: str = "head", labels: dict[str, str] | None = None, **spec: Any) -> None:
    given = {"deployment": "tiny", "captures": ["evening"], "trainer": {"image": "localhost/trainer:1"}, **spec}
    write(kubectl, "SpecDecodeTraining", name, given, labels)


def serve(kubectl: Kubectl) -> None:
    deploy(kubectl)
    place_engine(kubectl)
    captured(kubectl)


def patch(kubectl: Kubectl, **spec: Any) -> None:
    kubectl.must("patch", "sdtr", "head", "--type=merge", f"--patch={json.dumps({'spec': spec})}")


def ready(kubectl: Kubectl, reason: str, name: str = "head") -> str:
    return wait_for(kubectl, name, "Ready", reason, kind="sdtr")


def said(kubectl: Kubectl, type_: str) -> tuple[str, str, str]:
    return condition(kubectl, "head", type_, kind="sdtr")


def status_of(kubectl: Kubectl) -> dict[str, Any]:
    found: dict[str, Any] = kubectl.object("sdtr", "head")["status"]
    return found


def trainings_pod(kubectl: Kubectl) -> str:
    """The pod that the Job controller has made."""

    def look() -> str | None:
        return next((str(each["metadata"]["name"]) for each in staying(kubectl, CHILDREN)), None)

    return eventually(look, "the training has a pod")


def play(kubectl: Kubectl, phase: str, *states: dict[str, Any]) -> None:
    """Write the states of the first containers into the pod's status, as its kubelet would."""
    statuses = [
        {"name": name, "ready": "running" in state, "restartCount": 0, "image": "i:1", "imageID": "", "state": state}
        for name, state in zip(STEPS, states, strict=False)
    ]
    last = [each for each in statuses if each["name"] == "publish"]
    kubectl.patch_pod_status(
        trainings_pod(kubectl),
        {
            "phase": phase,
            "startTime": "2026-01-01T00:00:00Z",
            "conditions": [{"type": "PodScheduled", "status": "True"}],
            "initContainerStatuses": [each for each in statuses if each["name"] != "publish"],
            "containerStatuses": last,
        },
    )


def ended(message: Any = None, exit_code: int = 0) -> dict[str, Any]:
    text = json.dumps(message) if message is not None else ""
    return {"terminated": {"exitCode": exit_code, "message": text, "reason": "Completed"}}


RUNNING: dict[str, Any] = {"running": {}}


def publish(kubectl: Kubectl) -> None:
    steps: Sequence[dict[str, Any]] = [ended(), ended(), ended(), ended({"rows": ROWS, "head": HEAD})]
    play(kubectl, "Succeeded", *steps)


def judge(kubectl: Kubectl) -> dict[str, Any]:
    """The capture that measures the head."""
    return eventually(lambda: next(iter(judges(kubectl)), None), "the head is measured")


def judges(kubectl: Kubectl) -> list[dict[str, Any]]:
    return [each for each in kubectl.objects("sdc") if each["metadata"].get("ownerReferences")]


def test_training_runs_from_claim_to_verdict(kubectl: Kubectl) -> None:
    serve(kubectl)
    train(kubectl, storage={"size": "1Gi"}, maxTokens=1000)
    ready(kubectl, "WaitingForGPUs")
    assert said(kubectl, "Accepted")[:2] == ("True", "Valid")
    claim, job = kubectl.object("pvc", CLAIM), kubectl.object("job", JOB)
    assert "ownerReferences" not in claim["metadata"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "1Gi"
    assert [each["name"] for each in job["metadata"]["ownerReferences"]] == ["head"]
    pod = kubectl.object("pod", trainings_pod(kubectl))
    assert [each["name"] for each in pod["spec"]["initContainers"]] == list(STEPS[:-1])
    assert pod["spec"]["containers"][0]["image"] == IMAGE
    assert pod["metadata"]["name"] not in {
        each["metadata"]["name"] for each in kubectl.objects("pods", "--selector=specdecode.io/deployment=tiny")
    }
    phases = ("Exporting", "GeneratingHiddenStates", "Training", "Validating")
    for number, phase in enumerate(phases):
        play(kubectl, "Running" if number == 3 else "Pending", *[ended()] * number, RUNNING)
        ready(kubectl, phase)
        assert status_of(kubectl)["phase"] == phase
    publish(kubectl)
    capture = judge(kubectl)
    assert [each["kind"] for each in capture["metadata"]["ownerReferences"]] == ["SpecDecodeTraining"]
    ready(kubectl, "Judging")
    status = status_of(kubectl)
    assert said(kubectl, "Succeeded")[:2] == ("True", "HeadPublished")
    assert status["rows"]["training"] == ROWS["training"]
    assert status["head"]["sha256"] == HEAD["sha256"]
    assert kubectl.object("pvc", CLAIM)["metadata"]["labels"]["specdecode.io/published"] == "true"

    def is_complete() -> bool:
        # The operator, which reconciles the capture too, may overwrite its end.
        end(kubectl, capture["metadata"]["name"], "True")
        return bool(status_of(kubectl)["phase"] == "Complete")

    eventually(is_complete, "the training is complete")
    status = status_of(kubectl)
    assert status["finishedAt"]
    assert status["verdict"]["capture"] == capture["metadata"]["name"]
    columns = kubectl.must("get", "sdtr", "head").splitlines()[0].split()
    assert columns == ["NAME", "PHASE", "DEPLOYMENT", "METHOD", "BETTER", "AGE"]
    assert "finalizers" not in kubectl.object("sdtr", "head")["metadata"]


def test_training_starts_when_its_capture_has_succeeded(kubectl: Kubectl) -> None:
    deploy(kubectl)
    place_engine(kubectl)
    train(kubectl)
    ready(kubectl, "CaptureNotFound")
    captured(kubectl)
    ready(kubectl, "WaitingForGPUs")


def test_failure_has_the_reason_of_its_container(kubectl: Kubectl) -> None:
    serve(kubectl)
    train(kubectl, backoffLimit=0)
    play(kubectl, "Failed", ended({"error": {"reason": "TooFewRows", "message": "12 of 200 rows"}}, exit_code=1))
    assert "12 of 200" in ready(kubectl, "TooFewRows")
    assert said(kubectl, "Succeeded")[0] == "False"
    assert said(kubectl, "Stalled")[0] == "True"
    assert status_of(kubectl)["phase"] == "Failed"
    assert not judges(kubectl)


def test_suspended_training_has_no_pod_and_continues(kubectl: Kubectl) -> None:
    serve(kubectl)
    train(kubectl)
    play(kubectl, "Pending", ended(), ended(), RUNNING)
    ready(kubectl, "Training")
    patch(kubectl, suspend=True)
    ready(kubectl, "Suspended")
    eventually(lambda: kubectl.object("job", JOB)["spec"]["suspend"], "the Job is suspended")
    eventually(lambda: not staying(kubectl, CHILDREN), "its pod goes")
    patch(kubectl, suspend=False)
    eventually(lambda: not kubectl.object("job", JOB)["spec"]["suspend"], "the Job is resumed")
    assert trainings_pod(kubectl)
    ready(kubectl, "WaitingForGPUs")


def test_two_trainings_on_one_claim_run_one_after_the_other(kubectl: Kubectl) -> None:
    serve(kubectl)
    make_claim(kubectl, "shared", resources={"requests": {"storage": "1Ti"}})
    storage = {"persistentVolumeClaim": {"claimName": "shared"}}
    train(kubectl, storage=storage, judgement={"enabled": False}, backoffLimit=0)
    ready(kubectl, "WaitingForGPUs")
    train(kubectl, "other", storage=storage)
    assert "training head" in ready(kubectl, "ClaimInUse", "other")
    publish(kubectl)
    ready(kubectl, "NotJudged")
    assert status_of(kubectl)["phase"] == "Complete"
    ready(kubectl, "WaitingForGPUs", "other")


def test_claim_outlives_training_and_is_not_overwritten(kubectl: Kubectl) -> None:
    serve(kubectl)
    train(kubectl, judgement={"enabled": False})
    publish(kubectl)
    ready(kubectl, "NotJudged")
    uid = kubectl.object("pvc", CLAIM)["metadata"]["uid"]
    kubectl.must("delete", "sdtr", "head")
    eventually(lambda: not kubectl.objects("jobs", CHILDREN), "the Job goes")
    claim = kubectl.object("pvc", CLAIM)["metadata"]
    assert claim["uid"] == uid
    assert not claim.keys() & {"deletionTimestamp", "ownerReferences"}
    train(kubectl)
    ready(kubectl, "AlreadyPublished")
    assert not kubectl.objects("jobs", CHILDREN)


def test_claim_goes_with_its_training_without_retain(kubectl: Kubectl) -> None:
    serve(kubectl)
    train(kubectl)
    ready(kubectl, "WaitingForGPUs")
    patch(kubectl, storage={"retain": False})
    eventually(lambda: kubectl.object("pvc", CLAIM)["metadata"].get("ownerReferences"), "the training owns the claim")


def test_restarted_operator_creates_nothing_twice(kubectl: Kubectl, operator: OperatorProcess) -> None:
    serve(kubectl)
    train(kubectl)
    pod = trainings_pod(kubectl)
    job = kubectl.object("job", JOB)["metadata"]["uid"]
    operator.kill()
    play(kubectl, "Pending", ended(), ended(), RUNNING)
    operator.start()
    ready(kubectl, "Training")
    assert (kubectl.object("job", JOB)["metadata"]["uid"], trainings_pod(kubectl)) == (job, pod)
    operator.kill()
    publish(kubectl)
    operator.start()
    uid = judge(kubectl)["metadata"]["uid"]
    operator.kill()
    kubectl.must("delete", "job", JOB)
    operator.start()
    patch(kubectl, promote="OnBetter")
    eventually(
        lambda: status_of(kubectl)["observedGeneration"] == 2 and said(kubectl, "Better")[1] == "Judging",
        "the operator has seen the change",
    )
    assert [each["metadata"]["uid"] for each in judges(kubectl)] == [uid]
    assert not kubectl.objects("jobs", CHILDREN), "a published head is not trained again"


def test_job_of_other_owner_is_left_alone(kubectl: Kubectl) -> None:
    serve(kubectl)
    kubectl.must("create", "job", JOB, "--image=i:1")
    train(kubectl)
    ready(kubectl, "ChildNameConflict")
    assert "ownerReferences" not in kubectl.object("job", JOB)["metadata"]
    assert CLAIM not in {each["metadata"]["name"] for each in kubectl.objects("pvc")}
    kubectl.must("delete", "job", JOB)
    eventually(lambda: kubectl.object("job", JOB)["metadata"].get("ownerReferences"), "the training has its Job")


def test_queued_training_is_started_by_its_queue(kubectl: Kubectl) -> None:
    serve(kubectl)
    train(kubectl, labels={"kueue.x-k8s.io/queue-name": "team"})
    ready(kubectl, "Queued")
    job = kubectl.object("job", JOB)
    assert job["spec"]["suspend"] is True
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    kubectl.must("patch", "job", JOB, "--type=merge", '--patch={"spec": {"suspend": false}}')
    ready(kubectl, "WaitingForGPUs")
    patch(kubectl, suspend=True)
    eventually(lambda: not kubectl.objects("jobs", CHILDREN), "Kueue would resume a suspended Job")
