"""Trainings of a schedule on a real API server; captures and trainings that have ended are played here."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml

from tests.component.operator.test_captures import make_claim
from tests.component.operator.test_trainings import PROMPTS, end
from tests.support.conditions import wait_for
from tests.support.kubectl import Kubectl
from tests.support.objects import tiny_cpu
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

NOT_TODAY = "0 0 29 2 *"
FORMAT = "%Y-%m-%dT%H:%M:%SZ"
TEMPLATE = {"record": {"tokenIds": True}, "workload": {"prompts": PROMPTS}, "storage": {"size": "1Gi"}}
TRAINING = {
    "when": "Always",
    "gpuHoursPerMonth": 0,
    "template": {"trainer": {"image": "localhost/trainer:1"}, "maxTokens": 1000, "storage": {"size": "1Gi"}},
}
SCHEDULE = {
    "name": "weekly",
    "schedule": NOT_TODAY,
    "queue": {"name": "gpus"},
    "template": TEMPLATE,
    "training": TRAINING,
}


@pytest.fixture(autouse=True)
def _running(operator: OperatorProcess) -> None:
    pass


def deploy(kubectl: Kubectl, **schedule: Any) -> None:
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": "tiny"}}
    answer = kubectl.write(yaml.safe_dump({**body, "spec": tiny_cpu(captures=[{**SCHEDULE, **schedule}])}))
    assert answer.returncode == 0, answer.stderr


def told(kubectl: Kubectl, reason: str) -> dict[str, Any]:
    """Wait for what the deployment says of the schedule's trainings."""

    def look() -> dict[str, Any]:
        (schedule,) = kubectl.object("sdd", "tiny").get("status", {}).get("captures") or [{}]
        found: dict[str, Any] = schedule.get("training") or {}
        assert found.get("reason") == reason, found
        return found

    return eventually(look, f"the schedule says {reason}")


def capture(kubectl: Kubectl, after: str) -> None:
    """Create a capture of the schedule a second after a time, whose status says that it has succeeded."""
    make_claim(kubectl, "weekly-files")
    uid = kubectl.object("sdd", "tiny")["metadata"]["uid"]
    at = datetime.strptime(after, FORMAT).replace(tzinfo=UTC) + timedelta(seconds=1)
    owner = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "name": "tiny", "uid": uid}
    body = {
        "apiVersion": "specdecode.io/v1alpha1",
        "kind": "SpecDecodeCapture",
        "metadata": {
            "name": "weekly-1",
            "labels": {"specdecode.io/schedule": "weekly"},
            "annotations": {"specdecode.io/scheduled-at": at.strftime(FORMAT)},
            "ownerReferences": [owner],
        },
        "spec": {
            **TEMPLATE,
            "deployment": "tiny",
            "suspend": True,
            "storage": {"persistentVolumeClaim": {"claimName": "weekly-files"}},
        },
    }
    answer = kubectl.write(yaml.safe_dump(body))
    assert answer.returncode == 0, answer.stderr
    wait_for(kubectl, "weekly-1", "Ready", "Suspended", kind="sdc")
    counts = {"sent": 600, "completed": 600}
    end(kubectl, "weekly-1", "True", phase="Succeeded", claim="weekly-files", summary={"requests": counts})


def test_successful_capture_is_trained_on_once(kubectl: Kubectl) -> None:
    make_claim(kubectl, "tiny-models")
    deploy(kubectl)
    capture(kubectl, told(kubectl, "WaitingForCapture")["lastCaptureTime"])
    running = told(kubectl, "TrainingRunning")["running"]
    (training,) = eventually(lambda: kubectl.objects("sdtr"), "the training is created")
    assert training["metadata"]["name"] == running["name"]
    assert training["metadata"]["ownerReferences"][0]["name"] == "tiny"
    assert training["metadata"]["labels"]["specdecode.io/schedule"] == "weekly"
    assert (training["spec"]["deployment"], training["spec"]["captures"]) == ("tiny", ["weekly-1"])
    assert training["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    wait_for(kubectl, running["name"], "Ready", "WaitingForDeployment", kind="sdtr")
    eventually(lambda: kubectl.objects("events", "--field-selector=reason=RefreshStarted"), "it is reported")

    stamp = {"observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z"}
    failed = {"type": "Succeeded", "status": "False", "reason": "TrainingFailed", "message": "lost", **stamp}
    kubectl.patch_status(running["name"], {"phase": "Failed", "conditions": [failed]}, kind="sdtr")
    assert told(kubectl, "WaitingForCapture").get("running") is None
    deploy(kubectl, failedHistoryLimit=0)
    eventually(lambda: not kubectl.objects("sdtr"), "the failed training is deleted")
    assert told(kubectl, "WaitingForCapture")["usedGpuSeconds"] == 0


def test_schedule_that_cannot_train_is_rejected(kubectl: Kubectl) -> None:
    random = {**SCHEDULE, "template": {"record": {"tokenIds": True}}}
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": "tiny"}}
    answer = kubectl.write(yaml.safe_dump({**body, "spec": tiny_cpu(captures=[random])}))
    assert answer.returncode != 0
    assert "spec.captures[0].template.workload.prompts" in answer.stderr
