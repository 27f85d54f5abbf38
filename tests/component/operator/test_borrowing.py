"""A capture takes engines away only if its pod can start, and for no longer than it may, on a real API server.

Bounds are read from the capture's own status, whose times the operator writes; the engines and pods are played.
"""

import json
import logging
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from tests.component.operator.conftest import STORAGE_CLASS
from tests.component.operator.test_captures import (
    CLAIM,
    JOB,
    capture,
    captures_pod,
    deploy,
    make_claim,
    patch,
    ready,
    replicas,
    said,
)
from tests.component.operator.test_lifecycle import serve, wanted_hash
from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

_logger = logging.getLogger(__name__)

TIMEOUT_S = 10
LOOK_S = 15
"""How often the operator looks at a capture by itself."""

SLACK_S = 120
"""How late a busy machine may be with a look."""


@pytest.fixture(autouse=True)
def _serving(kubectl: Kubectl, operator: OperatorProcess) -> None:
    make_claim(kubectl, "tiny-models")
    deploy(kubectl)
    serve(kubectl)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    assert operator.health()


def borrow(kubectl: Kubectl) -> dict[str, Any]:
    found: dict[str, Any] = kubectl.object("sdc", "demo").get("status", {}).get("borrow", {})
    return found


def seconds(earlier: str, later: str) -> float:
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


def never_touched(kubectl: Kubectl) -> bool:
    """Whether the engines were asked for all the time: each change of a spec is a generation."""
    return replicas(kubectl) == 1 and not borrow(kubectl)


def given_back(kubectl: Kubectl, cause: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Wait until engines serve again; check the bound, and return what the status says of it."""
    wait = eventually(lambda: borrow(kubectl).get("returnedAt") and borrow(kubectl), "the GPUs are given back")
    assert cause in wait["lastFailure"], wait
    eventually(lambda: replicas(kubectl) == 1, "the engines are back")
    assert kubectl.object("job", JOB)["spec"]["suspend"] is True
    serve(kubectl)
    record = eventually(lambda: borrow(kubectl).get("servedAt") and borrow(kubectl), "it is seen that they serve")
    away_s = seconds(record["since"], record["returnedAt"])
    assert away_s <= TIMEOUT_S + LOOK_S + SLACK_S, record
    assert record["secondsWithoutServing"] == seconds(record["since"], record["servedAt"])
    _logger.warning(
        "%s: GPUs lent for %d s, without serving for %d s",
        request.node.name,
        away_s,
        record["secondsWithoutServing"],
    )
    return record


def start(kubectl: Kubectl, **spec: Any) -> None:
    """Let a capture get the GPUs of the engine that serves."""
    capture(kubectl, deploymentDuringCapture="Suspend", borrowTimeoutSeconds=TIMEOUT_S, **spec)
    eventually(lambda: kubectl.objects("jobs") and not kubectl.object("job", JOB)["spec"]["suspend"], "it begins")


def write_engine(kubectl: Kubectl, state: dict[str, Any], restarts: int = 0, **more: Any) -> None:
    """Write into the status of the capture's pod what its kubelet would of the engine."""
    pod = captures_pod(kubectl)["metadata"]["name"]
    container = {"name": "engine", "ready": False, "restartCount": restarts, "image": "i:1", "imageID": ""}
    scheduled = [{"type": "PodScheduled", "status": "True"}]
    engine = {**container, "state": state, **more}
    status = {"phase": "Pending", "conditions": scheduled, "initContainerStatuses": [engine]}
    kubectl.patch_pod_status(pod, status)


def remove_claim(kubectl: Kubectl, name: str) -> None:
    """Delete a claim whose protection no controller takes away, because it was never bound."""
    kubectl.must("delete", "pvc", name, "--wait=false")
    kubectl("patch", "pvc", name, "--type=merge", '--patch={"metadata":{"finalizers":null}}')
    eventually(lambda: name not in {each["metadata"]["name"] for each in kubectl.objects("pvc")}, "the claim is gone")


def refusal(kubectl: Kubectl, pod: dict[str, Any]) -> str:
    """Return why the API server would not take a pod; empty where it would. Nothing is stored."""
    return kubectl("create", "--dry-run=server", "--filename=-", stdin=json.dumps(pod)).stderr


class TestMissingPrerequisites:
    """It is waited for while the engines serve."""

    def test_missing_storage_class_is_waited_for_without_borrowing(self, kubectl: Kubectl) -> None:
        name = f"{kubectl.namespace}-class"
        capture(kubectl, deploymentDuringCapture="Suspend", storage={"storageClassName": name})
        assert "spec.storage.storageClassName" in ready(kubectl, "StorageClassNotFound")
        assert said(kubectl, "Accepted")[:2] == ("Unknown", "StorageClassNotFound")
        assert CLAIM not in {each["metadata"]["name"] for each in kubectl.objects("pvc")}
        assert never_touched(kubectl)
        assert condition(kubectl, "tiny", "Ready")[1] == "Serving"
        kubectl.must("apply", "--filename=-", stdin=yaml.safe_dump({**STORAGE_CLASS, "metadata": {"name": name}}))
        try:
            eventually(lambda: replicas(kubectl) == 0, "it goes on by itself")
        finally:
            kubectl.must("delete", "storageclass", name)

    def test_missing_claim_of_the_deployment_prevents_borrowing(self, kubectl: Kubectl) -> None:
        capture(kubectl, deploymentDuringCapture="Suspend")
        eventually(lambda: replicas(kubectl) == 0, "nothing is missing")
        patch(kubectl, suspend=True)
        eventually(lambda: replicas(kubectl) == 1, "the engines are back")
        remove_claim(kubectl, "tiny-models")
        patch(kubectl, suspend=False)
        message = ready(kubectl, "ClaimNotFound")
        assert "tiny-models" in message
        assert replicas(kubectl) == 1

    def test_quota_is_checked_without_the_share_of_the_engines(self, kubectl: Kubectl) -> None:
        hard = {"pods": "2", "requests.memory": "1Ti"}
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}, "spec": {"hard": hard}}
        other = {"containers": [{"name": "c", "image": "i:1", "resources": {"requests": {"memory": "1Mi"}}}]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other"}, "spec": other}
        for body in (pod, quota):
            assert kubectl.write(yaml.safe_dump(body)).returncode == 0

        def counted() -> bool:
            used = kubectl.object("resourcequota", "small").get("status", {}).get("used", {})
            return used.get("pods") == "2"

        eventually(counted, "the quota is used up by the engine and another pod")
        capture(kubectl, deploymentDuringCapture="Suspend")
        eventually(lambda: replicas(kubectl) == 0, "the engine makes room in the quota, too")
        patch(kubectl, suspend=True)
        eventually(lambda: replicas(kubectl) == 1, "the engine is back")
        kubectl.must("patch", "quota", "small", "--type=merge", '--patch={"spec":{"hard":{"pods":"0"}}}')
        tried = {**pod, "metadata": {"name": "tried"}}
        # A quota is enforced as its controller has written it into the status.
        eventually(lambda: "limited: pods=0" in refusal(kubectl, tried), "the lower quota is in force")
        patch(kubectl, suspend=False)
        assert "small" in ready(kubectl, "RefusedForNow")
        assert replicas(kubectl) == 1

    def test_pod_refused_by_pod_security_prevents_borrowing(self, kubectl: Kubectl) -> None:
        enforced = json.dumps({"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}})
        # The engine runs already, so the policy does not judge it again.
        before = wanted_hash(kubectl)
        deploy(kubectl, podTemplate={"spec": {"securityContext": {"runAsNonRoot": False, "runAsUser": 0}}})
        eventually(lambda: wanted_hash(kubectl) not in {before, ""}, "the template is another")
        serve(kubectl)
        wait_for(kubectl, "tiny", "Ready", "Serving")
        kubectl.must("patch", "namespace", str(kubectl.namespace), "--type=merge", f"--patch={enforced}")
        root = {"containers": [{"name": "c", "image": "i:1", "securityContext": {"runAsUser": 0}}]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "tried"}, "spec": root}
        eventually(lambda: "restricted" in refusal(kubectl, pod), "the level is enforced")
        capture(kubectl, deploymentDuringCapture="Suspend")
        assert "restricted" in ready(kubectl, "PodRefused")
        assert said(kubectl, "Accepted")[:2] == ("Unknown", "PodRefused")
        assert never_touched(kubectl)


class TestFailuresAfterBorrowing:
    """The engines have their GPUs back in time."""

    def test_engines_return_if_capture_is_unschedulable(self, kubectl: Kubectl, request: pytest.FixtureRequest) -> None:
        start(kubectl)
        given_back(kubectl, "WaitingForGPUs", request)
        message = ready(kubectl, "BackingOff")
        assert "attempt 1 of 5" in message
        eventually(lambda: replicas(kubectl) == 0, "it tries again")
        assert borrow(kubectl)["failedAttempts"] == 1

    def test_engines_return_if_capture_claim_is_deleted(self, kubectl: Kubectl, request: pytest.FixtureRequest) -> None:
        start(kubectl)
        remove_claim(kubectl, CLAIM)
        given_back(kubectl, "WaitingFor", request)
        eventually(lambda: said(kubectl, "Ready")[1] == "ClaimNotFound", "it borrows nothing for that again")

    def test_engines_return_if_storage_class_is_deleted(self, kubectl: Kubectl, request: pytest.FixtureRequest) -> None:
        name = f"{kubectl.namespace}-class"
        kubectl.must("apply", "--filename=-", stdin=yaml.safe_dump({**STORAGE_CLASS, "metadata": {"name": name}}))
        start(kubectl, storage={"storageClassName": name})
        kubectl.must("delete", "storageclass", name)
        given_back(kubectl, "WaitingFor", request)
        eventually(lambda: said(kubectl, "Ready")[1] == "StorageClassNotFound", "it borrows nothing for that again")

    def test_engines_return_on_image_pull_failure(self, kubectl: Kubectl, request: pytest.FixtureRequest) -> None:
        start(kubectl)
        write_engine(kubectl, {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}})
        given_back(kubectl, "ImagePullFailed", request)

    def test_engines_return_if_capture_engine_crashes_at_start(
        self, kubectl: Kubectl, request: pytest.FixtureRequest
    ) -> None:
        start(kubectl)
        crashed = {"terminated": {"exitCode": 1, "message": "RuntimeError: no"}}
        write_engine(kubectl, {"waiting": {"reason": "CrashLoopBackOff"}}, 1, lastState=crashed)
        given_back(kubectl, "EngineFailed", request)

    def test_engines_return_if_the_node_of_the_capture_is_lost(
        self, kubectl: Kubectl, request: pytest.FixtureRequest
    ) -> None:
        start(kubectl)
        write_engine(kubectl, {"running": {"startedAt": "2026-01-01T00:00:00Z"}})
        eventually(lambda: "idleSince" not in borrow(kubectl), "the engine has started")
        kubectl.must("delete", "pod", captures_pod(kubectl)["metadata"]["name"], "--wait=false")
        given_back(kubectl, "", request)

    @pytest.mark.parametrize("step", ["borrowed", "begun", "overdue", "given back"])
    def test_engines_return_if_operator_is_killed(
        self, kubectl: Kubectl, operator: OperatorProcess, request: pytest.FixtureRequest, step: str
    ) -> None:
        capture(kubectl, deploymentDuringCapture="Suspend", borrowTimeoutSeconds=TIMEOUT_S)
        if step == "borrowed":
            eventually(lambda: borrow(kubectl).get("since"), "it borrows")
        else:
            eventually(lambda: borrow(kubectl).get("idleSince"), "its pod is waited for")
        if step == "given back":
            eventually(lambda: borrow(kubectl).get("returnedAt"), "it gives up")
        operator.kill()
        if step == "given back":
            # On a busy machine its next attempt would be due before the engines were seen to serve.
            patch(kubectl, suspend=True)
        if step == "overdue":
            idle = borrow(kubectl)["idleSince"]
            eventually(lambda: seconds(idle, datetime.now(UTC).isoformat()) > TIMEOUT_S, "its time is over")
        operator.start()
        given_back(kubectl, "WaitingForGPUs", request)
