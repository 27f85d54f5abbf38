"""A capture of a real vLLM that really drafts, driven by the verbs of `specdecode capture`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster.images import operator_image
from devcluster.images.engine_image import VLLM_VERSION
from devcluster.install import NAMESPACE
from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl, program
from tests.support.small_pair import small_pair
from tests.support.waiting import eventually

EXAMPLES = Path(__file__).parents[3] / "examples"
ENGINES = "--selector=specdecode.io/deployment=tiny"
ENGINE_DEADLINE_S = 600
CAPTURE_DEADLINE_S = 900
REQUESTS = 24
FILES = {"trace.jsonl", "step-stats.jsonl", "client.jsonl"}


def deployment() -> dict[str, Any]:
    """The tiny target with a lookup in the prompt: real chunks of several tokens."""
    body: dict[str, Any] = small_pair()
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


def specdecode(kubectl: Kubectl, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `specdecode capture` as a user with this kubeconfig."""
    path = os.pathsep.join([str(Path(program("kubectl")).parent), os.environ["PATH"]])
    home = Path(kubectl.kubeconfig or "").parent
    environment = {
        **os.environ,
        "PATH": path,
        "KUBECONFIG": str(kubectl.kubeconfig),
        "KUBECACHEDIR": str(home / "kubectl-cache"),
    }
    command = [str(Path(sys.executable).with_name("specdecode")), "capture", *arguments]
    if arguments[0] != "validate":
        command.append(f"--namespace={kubectl.namespace}")
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=CAPTURE_DEADLINE_S, check=False
    )


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `capture run` fetches to."""
    return tmp_path_factory.mktemp("captures") / "demo"


@pytest.fixture(scope="module")
def captured(kubectl: Kubectl, fetched: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A capture that took the GPUs of a deployment that served, from `up` to the end of `run`."""
    kubectl.must("apply", f"--filename={EXAMPLES / 'tiny-models.yaml'}")
    kubectl.wait("job/tiny-models", "condition=Complete", 300)
    assert kubectl.apply(yaml.safe_dump(deployment())).returncode == 0
    wait_for(kubectl, "tiny", "Ready", "Serving", ENGINE_DEADLINE_S)
    file = tmp_path_factory.mktemp("input") / "capture.yaml"
    file.write_text(yaml.safe_dump(capture()))
    up = specdecode(kubectl, "up", str(file))
    assert up.returncode == 0, up.stderr
    assert condition(kubectl, "tiny", "Available")[:2] == ("False", "SuspendedForCapture")
    run = specdecode(kubectl, "run", "demo", f"--out={fetched}")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "files are validated and published" in run.stdout
    return kubectl.object("sdc", "demo")


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

    eventually(ended, f"{name} ended")
    return kubectl.must("logs", name)


def test_every_sent_request_is_completed(captured: dict[str, Any]) -> None:
    requests = captured["status"]["summary"]["requests"]
    assert requests["sent"] == requests["completed"] == REQUESTS


def test_status_summarizes_speculation(captured: dict[str, Any]) -> None:
    status = captured["status"]
    summary = status["summary"]
    assert status["phase"] == "Succeeded"
    assert summary["engineVersion"] == VLLM_VERSION
    assert "engineNotes" not in summary, "the recorder was tried with it, and it is what was planned for"
    assert summary["acceptance"] == f"{summary['acceptancePercent']}%"
    assert 1 <= float(summary["meanAcceptanceLength"]) <= 5
    assert len(summary["perPositionPercent"]) == 4
    assert float(summary["ttftMs"]["p50"]) <= float(summary["ttftMs"]["p99"])
    assert status["claim"] == "demo-capture"
    assert status["path"] == f"{captured['metadata']['namespace']}/demo/as-deployed/1"


def test_capture_files_are_valid_and_match_the_status(kubectl: Kubectl, captured: dict[str, Any]) -> None:
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
    (pod,) = kubectl.objects("pods", "--selector=specdecode.io/capture=demo")
    (engine,) = (each for each in pod["status"]["initContainerStatuses"] if each["name"] == "engine")
    assert manifest["image_id"] == engine["imageID"], "what its node made of the tag"
    assert manifest["config"]["speculative"]["method"] == "ngram"
    assert manifest["gates"]["engine_counters"]["value"] == 0, "step statistics are what /metrics counted"
    drafting = manifest["summary"]["speculation"]
    for counter in ("drafts", "draft_tokens", "accepted_tokens"):
        assert manifest["engine_counters"][counter] == drafting[counter] > 0


def test_engines_serve_again_after_the_capture(kubectl: Kubectl, captured: dict[str, Any]) -> None:
    wait_for(kubectl, "tiny", "Ready", "Serving", ENGINE_DEADLINE_S)
    assert len(kubectl.objects("pods", ENGINES)) == 1


def test_files_fetched_by_capture_run_are_complete_and_valid(
    kubectl: Kubectl, captured: dict[str, Any], fetched: Path
) -> None:
    assert {path.name for path in fetched.iterdir()} == FILES | {"manifest.json"}
    answer = specdecode(kubectl, "validate", str(fetched))
    assert answer.returncode == 0, answer.stdout
    assert len((fetched / "trace.jsonl").read_text().splitlines()) == 1 + REQUESTS, "the meta line and the records"


def test_capture_down_after_the_end_changes_nothing_and_names_the_claim(
    kubectl: Kubectl, captured: dict[str, Any]
) -> None:
    for _ in range(2):
        answer = specdecode(kubectl, "down")
        assert answer.returncode == 0, answer.stderr
        assert f"claim demo-capture in namespace {kubectl.namespace}" in answer.stdout
    assert kubectl.object("sdc", "demo")["spec"].get("suspend", False) is False


def test_fetch_works_after_capture_deletion_and_resumes_partial_files(
    kubectl: Kubectl, captured: dict[str, Any], fetched: Path, tmp_path: Path
) -> None:
    image = captured["status"]["operatorImage"]
    kubectl.must("delete", "sdc", "demo")
    eventually(lambda: not kubectl.objects("jobs", "--selector=specdecode.io/capture=demo"), "the Job goes")
    whole = (fetched / "step-stats.jsonl").read_bytes()
    out = tmp_path / "again"
    out.mkdir()
    (out / "step-stats.jsonl.fetching").write_bytes(whole[: len(whole) // 2])
    # Whose it is: half a file of nobody knows whom would be refused.
    (out / "manifest.json.fetching").write_bytes((fetched / "manifest.json").read_bytes())
    (out / "client.jsonl").write_text("not what was published\n")
    refused = specdecode(kubectl, "fetch", "demo", str(out))
    assert refused.returncode == 2, "without the capture's status no image is trusted"
    answer = specdecode(kubectl, "fetch", "demo", str(out), "--image", image)
    assert answer.returncode == 0, answer.stderr
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in fetched.iterdir()
    }
    helpers = "--selector=app.kubernetes.io/component=capture-fetch"
    eventually(lambda: not kubectl.objects("pods", helpers), "its pod goes")


def test_fetch_of_unknown_capture_fails_with_one_line(kubectl: Kubectl, captured: dict[str, Any]) -> None:
    answer = specdecode(kubectl, "fetch", "nothing", "nowhere")
    assert answer.returncode == 2
    assert answer.stderr == (
        "error: capture nothing: no capture or claim found in this namespace: check the name, or set -n\n"
    )


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
    answer = specdecode(kubectl, "down", "second")
    assert answer.returncode == 0, answer.stderr
    wait_for(kubectl, "second", "Ready", "Suspended", kind="sdc")
    eventually(lambda: not kubectl.objects("pods", "--selector=specdecode.io/capture=second"), "its pods go")


@pytest.mark.long
@pytest.mark.usefixtures("captured")
class TestCancelled:
    """Runs after the others, on the same deployment."""

    @pytest.mark.usefixtures("cancelled")
    def test_engines_serve_again_after_cancellation(self, kubectl: Kubectl) -> None:
        wait_for(kubectl, "tiny", "Ready", "Serving", ENGINE_DEADLINE_S)

    @pytest.mark.usefixtures("cancelled")
    def test_cancelled_capture_keeps_records_labelled_as_partial(self, kubectl: Kubectl) -> None:
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
