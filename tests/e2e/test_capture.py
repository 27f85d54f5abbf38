"""A capture of a real vLLM that really drafts: apply, wait, files on the volume that can be trusted."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster.images import operator_image
from devcluster.install import NAMESPACE
from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl
from tests.support.waiting import eventually

EXAMPLES = Path(__file__).parents[2] / "examples"
ENGINES = "--selector=specdecode.io/deployment=tiny"
ENGINE_DEADLINE_S = 240
CAPTURE_DEADLINE_S = 420
READ_DEADLINE_S = 90
REQUESTS = 24
FILES = {"trace.jsonl", "step-stats.jsonl", "client.jsonl"}


def deployment() -> dict[str, Any]:
    """The tiny target with a lookup in the prompt: real chunks of several tokens."""
    body: dict[str, Any] = yaml.safe_load((EXAMPLES / "tiny-cpu.yaml").read_text())
    body["spec"]["speculation"] = {
        "method": "ngram",
        "numSpeculativeTokens": 4,
        "ngram": {"promptLookupMin": 1, "promptLookupMax": 3},
    }
    return body


def capture() -> dict[str, Any]:
    body: dict[str, Any] = yaml.safe_load((EXAMPLES / "capture-tiny.yaml").read_text())
    body["spec"]["workload"]["phases"] = [
        {"name": "closed-4", "pattern": "Closed", "concurrency": 4, "requests": REQUESTS}
    ]
    return body


@pytest.fixture(scope="module")
def captured(kubectl: Kubectl) -> dict[str, Any]:
    """A capture that took the GPUs of a deployment that served."""
    kubectl.must("apply", f"--filename={EXAMPLES / 'tiny-models.yaml'}")
    kubectl.wait("job/tiny-models", "condition=Complete", 120)
    assert kubectl.apply(yaml.safe_dump(deployment())).returncode == 0
    wait_for(kubectl, "tiny", "Ready", "Serving", ENGINE_DEADLINE_S)
    assert kubectl.apply(yaml.safe_dump(capture())).returncode == 0
    wait_for(kubectl, "tiny", "Ready", "SuspendedForCapture", READ_DEADLINE_S)

    def ended() -> dict[str, Any] | None:
        status, reason, message = condition(kubectl, "demo", "Succeeded", kind="sdc")
        assert status != "False", f"{reason}: {message}"
        return kubectl.object("sdc", "demo") if status == "True" else None

    return eventually(ended, "the capture succeeded", CAPTURE_DEADLINE_S)


def on_the_volume(kubectl: Kubectl, name: str, *command: str, claim: str = "demo-capture") -> str:
    """Run the operator's image on a capture's volume; return what it printed."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": "look",
                    "image": operator_image.REFERENCE,
                    "command": list(command),
                    "volumeMounts": [{"name": "capture", "mountPath": "/capture", "readOnly": True}],
                }
            ],
            "volumes": [{"name": "capture", "persistentVolumeClaim": {"claimName": claim}}],
        },
    }
    assert kubectl.apply(yaml.safe_dump(pod)).returncode == 0

    def ended() -> bool:
        phase = kubectl.object("pod", name).get("status", {}).get("phase")
        assert phase != "Failed", kubectl.must("logs", name)
        return bool(phase == "Succeeded")

    eventually(ended, f"{name} ended", READ_DEADLINE_S)
    return kubectl.must("logs", name)


def test_every_request_is_accounted_for(captured: dict[str, Any]) -> None:
    requests = captured["status"]["summary"]["requests"]
    assert requests["sent"] == requests["completed"] == REQUESTS


def test_the_status_tells_what_drafting_gave(captured: dict[str, Any]) -> None:
    status = captured["status"]
    summary = status["summary"]
    assert status["phase"] == "Succeeded"
    assert summary["acceptance"] == f"{summary['acceptancePercent']}%"
    assert 1 <= float(summary["meanAcceptanceLength"]) <= 5
    assert len(summary["perPositionPercent"]) == 4
    assert float(summary["ttftMs"]["p50"]) <= float(summary["ttftMs"]["p99"])
    assert status["claim"] == "demo-capture"
    assert status["path"] == f"{captured['metadata']['namespace']}/demo/as-deployed/1"


def test_the_files_are_whole_and_what_the_status_says(kubectl: Kubectl, captured: dict[str, Any]) -> None:
    path = f"/capture/{captured['status']['path']}"
    answer = json.loads(on_the_volume(kubectl, "validate", "specdecode", "capture", "validate", "-o", "json", path))
    (validated,) = answer["validated"]
    assert validated["passed"], validated
    assert {file["name"] for file in captured["status"]["summary"]["files"]} >= FILES
    text = on_the_volume(kubectl, "manifest", "python3", "-c", f"print(open('{path}/manifest.json').read())")
    manifest = json.loads(text)
    for file in captured["status"]["summary"]["files"]:
        assert manifest["files"][file["name"]]["sha256"] == file["sha256"]
    assert manifest["context"]["recording_flags"] == ["--enable-logging-iteration-details"]
    assert manifest["context"]["deployment"]["name"] == "tiny"
    assert manifest["node"]


def test_the_engines_are_back(kubectl: Kubectl, captured: dict[str, Any]) -> None:
    wait_for(kubectl, "tiny", "Ready", "Serving", ENGINE_DEADLINE_S)
    assert len(kubectl.objects("pods", ENGINES)) == 1


def test_the_data_outlives_the_capture(kubectl: Kubectl, captured: dict[str, Any]) -> None:
    kubectl.must("delete", "sdc", "demo")
    eventually(
        lambda: not kubectl.objects("jobs", "--selector=specdecode.io/capture=demo"), "the Job goes", READ_DEADLINE_S
    )
    path = f"/capture/{captured['status']['path']}/trace.jsonl"
    lines = on_the_volume(kubectl, "trace", "python3", "-c", f"print(open('{path}').read())").strip().splitlines()
    assert len(lines) == 1 + REQUESTS, "the meta line and a record a request"


@pytest.fixture(scope="module")
def cancelled(kubectl: Kubectl) -> None:
    """A capture that is cancelled in the middle of its load, while the operator is being killed."""
    body = capture()
    body["metadata"]["name"] = "second"
    body["spec"]["workload"]["phases"] = [
        {"name": "long", "pattern": "Closed", "concurrency": 2, "durationSeconds": 300}
    ]
    assert kubectl.apply(yaml.safe_dump(body)).returncode == 0
    wait_for(kubectl, "second", "Ready", "Loading", CAPTURE_DEADLINE_S, kind="sdc")
    Kubectl(kubectl.kubeconfig, NAMESPACE).must("delete", "pod", "--all", "--grace-period=0", "--force")
    kubectl.must("patch", "sdc", "second", "--type=merge", '--patch={"spec":{"suspend":true}}')
    wait_for(kubectl, "second", "Ready", "Suspended", READ_DEADLINE_S, kind="sdc")


@pytest.mark.long
@pytest.mark.usefixtures("captured")
class TestCancelled:
    """Runs after the others, on the same deployment."""

    @pytest.mark.usefixtures("cancelled")
    def test_the_engines_come_back(self, kubectl: Kubectl) -> None:
        wait_for(kubectl, "tiny", "Ready", "Serving", ENGINE_DEADLINE_S)
        assert not kubectl.objects("pods", "--selector=specdecode.io/capture=second")

    @pytest.mark.usefixtures("cancelled")
    def test_what_was_recorded_is_kept_and_labelled_as_partial(self, kubectl: Kubectl) -> None:
        script = (
            "import json, pathlib;"
            "(folder,) = pathlib.Path('/capture').glob('*/second/as-deployed/*');"
            "label = json.loads((folder / 'manifest.partial.json').read_text());"
            "print(json.dumps([folder.name, label['reason'], label['files']]))"
        )
        text = on_the_volume(kubectl, "partial", "python3", "-c", script, claim="second-capture")
        folder, reason, files = json.loads(text)
        assert folder.startswith("1.part-"), "nothing is published"
        assert reason == "Cancelled"
        assert [name for name, size in files.items() if name.startswith("segments/") and size]
