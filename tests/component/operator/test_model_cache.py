"""Models by way of a cache, against a real API server: Jobs, answers, engines. Pods are answered for here."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl
from tests.support.kubernetes import MINOR
from tests.support.objects import H200, tiny_cpu
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

COMMITS = {"pair/target": "a" * 40, "pair/draft": "b" * 40}
LAUNCHED = "Unschedulable"
ON_IMAGE: Final = Path(__file__).parents[3] / "examples/qwen3-8b-image.yaml"


@pytest.fixture(autouse=True)
def _running(operator: OperatorProcess) -> None:
    pass


def apply(kubectl: Kubectl, name: str, **models: Any) -> None:
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": name}}
    answer = kubectl.write(yaml.safe_dump({**body, "spec": tiny_cpu(models=models)}))
    assert answer.returncode == 0, answer.stderr


def downloads(kubectl: Kubectl, name: str) -> dict[str, dict[str, Any]]:
    """The pods that the Job controller has made for the object, by the model that they download."""

    def look() -> dict[str, dict[str, Any]] | None:
        pods = kubectl.objects("pods", f"--selector=specdecode.io/reads-model-for={name}")
        by_model = {pod["spec"]["containers"][0]["args"][0].removeprefix("--model="): pod for pod in pods}
        return by_model if set(by_model) == set(COMMITS) else None

    return eventually(look, f"two pods download models for {name}")


def run(kubectl: Kubectl, pod: dict[str, Any]) -> None:
    """Write into a pod's status what its kubelet would while it runs."""
    container = {"name": "download-model", "ready": True, "restartCount": 0, "image": "i:1", "imageID": ""}
    status = {
        "phase": "Running",
        "conditions": [{"type": "PodScheduled", "status": "True"}],
        "containerStatuses": [{**container, "state": {"running": {}}}],
    }
    kubectl.patch_pod_status(pod["metadata"]["name"], status)


def answer(kubectl: Kubectl, pod: dict[str, Any], message: dict[str, Any], exit_code: int = 0) -> None:
    """Write into a pod's status what its kubelet would."""
    ended = {"terminated": {"exitCode": exit_code, "message": json.dumps(message)}}
    state: dict[str, Any] = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended}
    container: dict[str, Any] = {
        "name": "download-model",
        "ready": False,
        "restartCount": 0,
        "image": "i:1",
        "imageID": "",
    }
    container |= state if exit_code else {"state": ended}
    status = {
        "phase": "Running" if exit_code else "Succeeded",
        "conditions": [{"type": "PodScheduled", "status": "True"}],
        "containerStatuses": [container],
    }
    kubectl.patch_pod_status(pod["metadata"]["name"], status)


CACHE = {"persistentVolumeClaim": {"claimName": "hub"}}


def test_engines_start_after_their_models_are_downloaded(kubectl: Kubectl) -> None:
    apply(kubectl, "tiny", cache=CACHE)
    pods = downloads(kubectl, "tiny")
    for pod in pods.values():
        run(kubectl, pod)
    message = wait_for(kubectl, "tiny", "Ready", "DownloadingModels")
    for pod in pods.values():
        assert pod["metadata"]["labels"]["job-name"] in message
    assert not kubectl.objects("deployments")
    answer(kubectl, pods["pair/target"], {"error": {"reason": "ModelGated", "message": "is gated"}}, exit_code=1)
    assert "hubTokenSecret" in wait_for(kubectl, "tiny", "Ready", "ModelGated")
    for model, pod in pods.items():
        answer(kubectl, pod, {"commit": COMMITS[model]})
    (engines,) = eventually(lambda: kubectl.objects("deployments"), "the engines are launched")
    wait_for(kubectl, "tiny", "Ready", LAUNCHED)
    command = " ".join(engines["spec"]["template"]["spec"]["containers"][0]["command"])
    for commit in COMMITS.values():
        assert f"/snapshots/{commit}" in command
    eventually(lambda: not kubectl.objects("jobs"), "Jobs that are done are removed")
    kept = kubectl.object("configmap", "tiny-downloads")["data"]
    assert {json.loads(each)["model"]: json.loads(each)["commit"] for each in kept.values()} == COMMITS


def test_downloads_repeat_only_after_the_downloads_config_map_is_deleted(kubectl: Kubectl) -> None:
    apply(kubectl, "tiny", cache=CACHE)
    for model, pod in downloads(kubectl, "tiny").items():
        answer(kubectl, pod, {"commit": COMMITS[model]})
    eventually(lambda: kubectl.objects("deployments"), "the engines are launched")
    readers = "--selector=specdecode.io/reads-model-for=tiny"
    eventually(lambda: not kubectl.objects("pods", readers), "nothing else remembers it")
    kubectl.must("patch", "sdd", "tiny", "--type=merge", '--patch={"spec":{"replicas":2}}')
    wait_for(kubectl, "tiny", "Ready", LAUNCHED)
    assert not kubectl.objects("jobs"), "another number of engines downloads nothing"
    kubectl.must("delete", "configmap", "tiny-downloads")
    for pod in downloads(kubectl, "tiny").values():
        run(kubectl, pod)
    wait_for(kubectl, "tiny", "Ready", "DownloadingModels")
    assert kubectl.objects("deployments"), "the engines stay meanwhile"


def test_host_path_cache_volume_is_refused_unless_the_operator_allows_it(kubectl: Kubectl) -> None:
    apply(kubectl, "tiny", volume={"hostPath": {"path": "/etc"}})
    wait_for(kubectl, "tiny", "Accepted", "HostPathNotAllowed")
    status, reason, message = condition(kubectl, "tiny", "Ready")
    assert (status, reason) == ("False", "HostPathNotAllowed")
    assert "--allow-host-path=/etc" in message
    assert not kubectl.objects("deployments")


@pytest.fixture
def _gpus(kubectl: Kubectl) -> Iterator[None]:
    kubectl.add_node("h200-0", H200)
    yield
    kubectl.must("delete", "node", "h200-0")


@pytest.mark.usefixtures("_gpus")
def test_models_on_an_image_need_an_api_server_with_image_volumes(kubectl: Kubectl) -> None:
    kubectl.must("apply", f"--filename={ON_IMAGE}")
    image = yaml.safe_load(ON_IMAGE.read_text())["spec"]["models"]["volume"]["image"]
    if int(MINOR.partition(".")[2]) < 35:  # Off by default before.
        assert "spec.models.volume.image" in wait_for(kubectl, ON_IMAGE.stem, "Ready", "ImageVolumesMissing")
        assert not kubectl.objects("deployments")
    else:
        wait_for(kubectl, ON_IMAGE.stem, "Ready", LAUNCHED)
        (deployment,) = kubectl.objects("deployments")
        volumes = {each["name"]: each for each in deployment["spec"]["template"]["spec"]["volumes"]}
        assert volumes["models"]["image"].items() >= image.items()
