"""Live captures against a real API server: rights, the order, and its end. Pods are answered for here."""

import json
from typing import Any

import pytest

from tests.component.operator.test_captures import (
    ENGINES,
    JOB,
    captures_pod,
    deploy,
    patch,
    place_engine,
    ready,
    said,
    staying,
)
from tests.component.operator.test_captures import capture as any_capture
from tests.support.kubectl import Kubectl
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

ORDER = "tiny-live-order"
SUMMARY = {"requests": {"sent": 431, "completed": 430}, "acceptance": "71%", "acceptancePercent": 71}


@pytest.fixture(autouse=True)
def _running(operator: OperatorProcess) -> None:
    pass


def serve(kubectl: Kubectl) -> str:
    """Deploy, and let the engine serve; return the name of its pod."""
    deploy(kubectl)
    place_engine(kubectl)
    (pod,) = staying(kubectl, ENGINES)
    name = str(pod["metadata"]["name"])
    conditions = [{"type": each, "status": "True"} for each in ("PodScheduled", "ContainersReady", "Ready")]
    kubectl.patch_pod_status(name, {"phase": "Running", "conditions": conditions})
    return name


def capture(kubectl: Kubectl, name: str = "demo") -> None:
    any_capture(kubectl, name=name, source="Live", live={"durationSeconds": 600})


def collect(kubectl: Kubectl, phase: str, state: dict[str, Any]) -> None:
    """Write into the status of the collector's pod what its kubelet would."""
    container = {"name": "collect", "ready": phase == "Running", "restartCount": 0, "image": "i:1", "imageID": ""}
    status = {
        "phase": phase,
        "podIP": "10.1.2.3",
        "podIPs": [{"ip": "10.1.2.3"}],
        "startTime": "2026-01-01T00:00:00Z",
        "conditions": [{"type": "PodScheduled", "status": "True"}],
        "containerStatuses": [{**container, "state": state}],
    }
    kubectl.patch_pod_status(captures_pod(kubectl)["metadata"]["name"], status)


def order(kubectl: Kubectl) -> dict[str, Any] | None:
    """The order ConfigMap, if there is one."""
    return next((each for each in kubectl.objects("configmaps") if each["metadata"]["name"] == ORDER), None)


def recording(kubectl: Kubectl) -> dict[str, Any]:
    """Start a live capture, and return its order once the collector runs."""
    capture(kubectl)
    ready(kubectl, "Unschedulable")
    assert order(kubectl) is None
    collect(kubectl, "Running", {"running": {}})
    ready(kubectl, "Recording")
    return dict(eventually(lambda: order(kubectl), "the recorders are told"))


def test_live_capture_records_running_engines_until_its_summary(kubectl: Kubectl, operator: OperatorProcess) -> None:
    engine = serve(kubectl)
    found = recording(kubectl)
    (container,) = captures_pod(kubectl)["spec"]["containers"]
    (settings,) = (each["value"] for each in container["env"] if each["name"] == "SPECDECODE_CAPTURE")
    told = json.loads(found["data"]["order.json"])
    assert json.loads(settings)["live"]["pods"] == [engine]
    assert json.loads(settings)["live"]["token"] == told["token"]
    assert told["address"] == "10.1.2.3:8470"
    assert kubectl.object("sdc", "demo")["status"]["phase"] == "Recording"
    operator.kill()
    ended = {"exitCode": 0, "message": json.dumps(SUMMARY), "reason": "Completed"}
    collect(kubectl, "Succeeded", {"terminated": ended})
    operator.start()
    ready(kubectl, "Captured")
    eventually(lambda: order(kubectl) is None, "the recorders sleep again")
    assert kubectl.object("sdc", "demo")["status"]["summary"]["requests"]["completed"] == 430
    (pod,) = staying(kubectl, ENGINES)
    assert pod["metadata"]["name"] == engine, "no engine was restarted"


def test_suspended_or_deleted_live_capture_removes_its_order(kubectl: Kubectl) -> None:
    serve(kubectl)
    recording(kubectl)
    patch(kubectl, suspend=True)
    ready(kubectl, "Suspended")
    eventually(
        lambda: order(kubectl) is None and not kubectl.objects("jobs", f"--field-selector=metadata.name={JOB}"),
        "it ends",
    )
    patch(kubectl, suspend=False)
    ready(kubectl, "Unschedulable")
    collect(kubectl, "Running", {"running": {}})
    eventually(lambda: order(kubectl), "the recorders are told again")
    kubectl.must("delete", "sdc", "demo")
    eventually(lambda: order(kubectl) is None, "the order goes with the capture")


def test_live_capture_waits_for_engines_and_for_order_of_other_owner(kubectl: Kubectl) -> None:
    kubectl.must("create", "configmap", ORDER, "--from-literal=mine=1")
    deploy(kubectl)
    capture(kubectl)
    assert "continues when one is ready" in ready(kubectl, "WaitingForDeployment")
    assert said(kubectl, "Accepted")[0] == "True"
    serve(kubectl)
    ready(kubectl, "ChildNameConflict")
    assert not kubectl.objects("jobs")
    assert kubectl.object("configmap", ORDER)["data"] == {"mine": "1"}
    kubectl.must("delete", "configmap", ORDER)
    ready(kubectl, "Unschedulable")
