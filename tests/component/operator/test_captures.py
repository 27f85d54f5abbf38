"""Captures against a real API server: objects, ownership, borrowed engines. Pods are answered for here."""

import json
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from devcluster.host.errors import ClusterError
from tests.support.conditions import condition, current, wait_for, wait_for_all
from tests.support.gitops.health import told
from tests.support.kubectl import Kubectl
from tests.support.objects import tiny_cpu
from tests.support.operator_process import IMAGE, OperatorProcess
from tests.support.rest import Rest
from tests.support.waiting import eventually

LAUNCHED = "Unschedulable"
CLAIM = "demo-capture"
JOB = "demo-capture"
NOTE = "demo-capture"
ENGINES = "--selector=specdecode.io/deployment=tiny"
SUMMARY = {"requests": {"sent": 8, "completed": 8}, "acceptance": "71%", "acceptancePercent": 71}


@pytest.fixture(autouse=True)
def _running(operator: OperatorProcess) -> None:
    pass


def deploy(kubectl: Kubectl, **changes: Any) -> None:
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": "tiny"}}
    answer = kubectl.write(yaml.safe_dump({**body, "spec": tiny_cpu(**changes)}))
    assert answer.returncode == 0, answer.stderr


def serve(kubectl: Kubectl, **changes: Any) -> None:
    """Deploy, and put the engine on a node: captures that keep it go after it."""
    deploy(kubectl, **changes)
    place_engine(kubectl)


def place_engine(kubectl: Kubectl) -> None:
    eventually(lambda: _engine_is_placed(kubectl), "there is an engine on a node")


def _engine_is_placed(kubectl: Kubectl) -> bool:
    pods = staying(kubectl, ENGINES)
    with suppress(ClusterError):  # an engine of an earlier template goes at any moment
        for pod in pods:
            kubectl.patch_pod_status(pod["metadata"]["name"], {"phase": "Pending"})
        return bool(pods)
    return False


def staying(kubectl: Kubectl, selector: str) -> list[dict[str, Any]]:
    return [pod for pod in kubectl.objects("pods", selector) if "deletionTimestamp" not in pod["metadata"]]


def capture(kubectl: Kubectl, labels: dict[str, str] | None = None, name: str = "demo", **spec: Any) -> None:
    if spec.get("deploymentDuringCapture") == "Suspend":
        make_claim(kubectl, "tiny-models")
        # Tests play the node: on a slow machine that must not give the GPUs back.
        spec = {"borrowTimeoutSeconds": 1800, **spec}
    body = {
        "apiVersion": "specdecode.io/v1alpha1",
        "kind": "SpecDecodeCapture",
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {"deployment": "tiny", **spec},
    }
    answer = kubectl.write(yaml.safe_dump(body))
    assert answer.returncode == 0, answer.stderr


def make_claim(kubectl: Kubectl, name: str, **spec: Any) -> None:
    """Create a claim, as people do for models or datasets; nothing binds it here before it has a pod."""
    wanted = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}, **spec}
    body = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": wanted}
    answer = kubectl.write(yaml.safe_dump(body))
    assert answer.returncode == 0, answer.stderr


def patch(kubectl: Kubectl, **spec: Any) -> None:
    kubectl.must("patch", "sdc", "demo", "--type=merge", f"--patch={json.dumps({'spec': spec})}")


def ready(kubectl: Kubectl, reason: str) -> str:
    return wait_for(kubectl, "demo", "Ready", reason, kind="sdc")


def said(kubectl: Kubectl, type_: str) -> tuple[str, str, str]:
    return condition(kubectl, "demo", type_, kind="sdc")


def captures_pod(kubectl: Kubectl) -> dict[str, Any]:
    """The pod that the Job controller has made."""

    def look() -> dict[str, Any] | None:
        return next(iter(staying(kubectl, "--selector=specdecode.io/capture=demo")), None)

    return eventually(look, "the capture has a pod")


def write_pod_status(kubectl: Kubectl, phase: str, load: dict[str, Any]) -> None:
    """Write into the pod's status what its kubelet would."""
    pod = captures_pod(kubectl)
    container = {
        "name": "load",
        "ready": phase == "Running",
        "restartCount": 0,
        "image": "i:1",
        "imageID": "",
        "state": load,
    }
    conditions = [{"type": "PodScheduled", "status": "True"}]
    status = {"phase": phase, "conditions": conditions, "containerStatuses": [container]}
    kubectl.patch_pod_status(pod["metadata"]["name"], status)


def finish(kubectl: Kubectl, exit_code: int, message: Any) -> None:
    """Let the load end as its kubelet would tell."""
    ended = {"exitCode": exit_code, "message": json.dumps(message), "reason": "Completed"}
    write_pod_status(kubectl, "Failed" if exit_code else "Succeeded", {"terminated": ended})


def replicas(kubectl: Kubectl) -> int:
    return int(kubectl.object("deployment", "tiny")["spec"]["replicas"])


def test_capture_gets_a_claim_and_a_job(kubectl: Kubectl) -> None:
    serve(kubectl)
    capture(kubectl, storage={"size": "1Gi"})
    message = ready(kubectl, "WaitingForGPUs")
    assert "node" in message
    assert said(kubectl, "WaitingForGPUs")[0] == "True"
    assert said(kubectl, "Accepted")[:2] == ("True", "Valid")
    claim, job, pod = kubectl.object("pvc", CLAIM), kubectl.object("job", JOB), captures_pod(kubectl)
    assert "ownerReferences" not in claim["metadata"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "1Gi"
    assert [owner["name"] for owner in job["metadata"]["ownerReferences"]] == ["demo"]
    assert pod["spec"]["containers"][0]["image"] == IMAGE
    assert [each["name"] for each in pod["spec"]["initContainers"]] == ["prepare", "engine"]
    assert pod["metadata"]["uid"] not in {each["metadata"]["uid"] for each in kubectl.objects("pods", ENGINES)}
    body = kubectl.object("sdc", "demo")
    assert "finalizers" not in body["metadata"]
    assert body["status"]["observedGeneration"] == body["metadata"]["generation"] == 1
    assert body["status"]["phase"] == "WaitingForGPUs"
    assert (body["status"]["claim"], body["status"]["job"]) == (CLAIM, JOB)
    wait_for(kubectl, "tiny", "Ready", "Starting")
    assert replicas(kubectl) == 1, "with Keep the deployment keeps its engines"


def test_capture_reports_loading_and_its_summary_and_does_not_rerun(
    kubectl: Kubectl, operator: OperatorProcess
) -> None:
    serve(kubectl)
    capture(kubectl)
    ready(kubectl, "WaitingForGPUs")
    write_pod_status(kubectl, "Running", {"running": {}})
    ready(kubectl, "Loading")
    operator.kill()
    finish(kubectl, 0, SUMMARY)
    operator.start()
    ready(kubectl, "Captured")
    status = kubectl.object("sdc", "demo")["status"]
    assert status["phase"] == "Succeeded"
    assert status["summary"]["requests"]["completed"] == 8
    assert status["path"].endswith("/demo/as-deployed/1")
    assert said(kubectl, "Succeeded")[0] == "True"
    assert kubectl.object("pvc", CLAIM)["metadata"]["labels"]["specdecode.io/published"] == "true"
    kubectl.must("delete", "job", JOB)
    deploy(kubectl, replicas=2)
    wait_for(kubectl, "tiny", "Ready", LAUNCHED)
    patch(kubectl, suspend=True)
    eventually(lambda: said(kubectl, "Ready")[1] == "Captured", "what ended stays as it is")
    assert not kubectl.objects("jobs", "--selector=specdecode.io/capture=demo"), "it is not run again"


def start_engine(kubectl: Kubectl, image_id: str) -> str:
    """Let the engine run as its kubelet would tell; return the UID of its pod."""
    pod = captures_pod(kubectl)
    engine = {"name": "engine", "ready": True, "restartCount": 0, "image": "i:1", "imageID": image_id}
    scheduled = {"type": "PodScheduled", "status": "True"}
    status = {"conditions": [scheduled], "initContainerStatuses": [{**engine, "state": {"running": {}}}]}
    kubectl.patch_pod_status(pod["metadata"]["name"], status)
    return str(pod["metadata"]["uid"])


def test_engine_image_id_is_passed_to_the_load_generator(kubectl: Kubectl) -> None:
    serve(kubectl)
    capture(kubectl)
    ready(kubectl, "WaitingForGPUs")
    uid = start_engine(kubectl, "i@sha256:1")
    noted = eventually(lambda: kubectl.object("configmap", NOTE).get("data"), "what the node says is passed on")
    assert noted == {"engine-image-id": f"{uid} i@sha256:1\n"}
    kubectl.must("delete", "sdc", "demo")
    eventually(lambda: NOTE not in {each["metadata"]["name"] for each in kubectl.objects("configmaps")}, "it goes too")


def test_capture_continues_if_image_note_belongs_to_other_owner(kubectl: Kubectl) -> None:
    kubectl.must("create", "configmap", NOTE, "--from-literal=mine=1")
    serve(kubectl)
    capture(kubectl)
    ready(kubectl, "WaitingForGPUs")
    start_engine(kubectl, "i@sha256:1")
    ready(kubectl, "Starting")
    write_pod_status(kubectl, "Running", {"running": {}})
    ready(kubectl, "Loading")
    assert kubectl.object("configmap", NOTE)["data"] == {"mine": "1"}, "it is a stranger's"


def test_failed_capture_is_reported_and_stalled(kubectl: Kubectl) -> None:
    serve(kubectl)
    capture(kubectl)
    finish(kubectl, 1, {"error": {"reason": "DiskFull", "message": "the volume at /capture is full"}})
    assert "is full" in ready(kubectl, "DiskFull")
    assert said(kubectl, "Stalled")[0] == "True"
    assert kubectl.object("sdc", "demo")["status"]["phase"] == "Failed"


def test_claim_outlives_capture_and_deployment(kubectl: Kubectl) -> None:
    serve(kubectl)
    capture(kubectl)
    ready(kubectl, "WaitingForGPUs")
    uid = kubectl.object("pvc", CLAIM)["metadata"]["uid"]
    kubectl.must("delete", "sdc,sdd", "--all")
    eventually(lambda: not kubectl.objects("jobs"), "the Job goes")
    eventually(lambda: not kubectl.objects("deployments"), "the engines go")
    # Their pods go after the Deployment: one that is still there would be placed instead of its successor.
    eventually(lambda: not staying(kubectl, ENGINES), "their pods go")
    assert kubectl.object("pvc", CLAIM)["metadata"]["uid"] == uid
    serve(kubectl)
    capture(kubectl)
    ready(kubectl, "WaitingForGPUs")
    assert kubectl.object("pvc", CLAIM)["metadata"]["uid"] == uid, "another capture of the name writes beside it"
    assert_stays(kubectl, CLAIM)


def assert_stays(kubectl: Kubectl, claim: str) -> None:
    """Fail if a claim goes, now or with an owner: one that is protected is there all the same."""
    assert not kubectl.object("pvc", claim)["metadata"].keys() & {"deletionTimestamp", "ownerReferences"}


def test_claim_is_deleted_with_capture_if_retain_is_false(kubectl: Kubectl) -> None:
    serve(kubectl)
    capture(kubectl)
    ready(kubectl, "WaitingForGPUs")
    patch(kubectl, storage={"retain": False})
    eventually(lambda: kubectl.object("pvc", CLAIM)["metadata"].get("ownerReferences"), "the capture owns the claim")
    kubectl.must("delete", "sdc", "demo")

    def left() -> list[dict[str, Any]]:
        # Nothing takes the protection of a claim away where no pod was ever bound to it.
        return [each for each in kubectl.objects("pvc") if "deletionTimestamp" not in each["metadata"]]

    eventually(lambda: not left(), "the claim goes")


class TestBorrowing:
    """The deployment's engines give way, and come back in every outcome."""

    @pytest.fixture(autouse=True)
    def _borrowed(self, kubectl: Kubectl, _running: None) -> None:
        deploy(kubectl)
        eventually(lambda: kubectl.objects("pods", ENGINES), "there is an engine")
        capture(kubectl, deploymentDuringCapture="Suspend")
        wait_for_all(
            kubectl,
            "tiny",
            Ready=("False", "SuspendedForCapture"),
            Reconciling="True",
            Stalled="False",
            Available=("False", "SuspendedForCapture"),
        )
        eventually(lambda: told(kubectl.object("sdd", "tiny")) == "wait", "GitOps tools wait for the engines")
        eventually(lambda: kubectl.object("job", JOB)["spec"]["suspend"] is False, "the capture begins")
        assert not kubectl.objects("pods", ENGINES), "it begins when the last engine is gone"

    def back(self, kubectl: Kubectl) -> None:
        eventually(lambda: replicas(kubectl) == 1, "the engines are back")
        wait_for(kubectl, "tiny", "Ready", LAUNCHED)

    def test_engines_return_after_capture_succeeds(self, kubectl: Kubectl, operator: OperatorProcess) -> None:
        operator.kill()
        finish(kubectl, 0, SUMMARY)
        operator.start()
        ready(kubectl, "Captured")
        self.back(kubectl)

    def test_engines_return_after_capture_fails(self, kubectl: Kubectl) -> None:
        finish(kubectl, 1, {"error": {"reason": "Dropped", "message": "3 records"}})
        ready(kubectl, "Dropped")
        self.back(kubectl)

    def test_engines_return_after_capture_is_deleted(self, kubectl: Kubectl, operator: OperatorProcess) -> None:
        operator.kill()
        kubectl.must("delete", "sdc", "demo")
        operator.start()
        self.back(kubectl)

    def test_engines_return_while_suspended_and_stop_again_on_resume(self, kubectl: Kubectl) -> None:
        patch(kubectl, suspend=True)
        ready(kubectl, "Suspended")
        assert kubectl.object("sdc", "demo")["status"]["phase"] == "Cancelled"
        eventually(lambda: kubectl.object("job", JOB)["spec"]["suspend"] is True, "the Job is suspended")
        self.back(kubectl)
        eventually(lambda: not kubectl.objects("pods", "--selector=specdecode.io/capture=demo"), "its pod goes")
        patch(kubectl, suspend=False)
        wait_for(kubectl, "tiny", "Ready", "SuspendedForCapture")
        eventually(lambda: kubectl.object("job", JOB)["spec"]["suspend"] is False, "the capture goes on")

    def test_expected_end_of_the_capture_is_reported_once_known(self, kubectl: Kubectl) -> None:
        """The load runs for 60 s of one phase and 120 s of the other; the Job and its pod have deadlines."""
        load_start = datetime(2026, 1, 1, tzinfo=UTC)

        def bound() -> bool:
            return "at the latest" in condition(kubectl, "tiny", "Ready")[2]

        eventually(bound, "the deadline of the Job is told")
        write_pod_status(kubectl, "Running", {"running": {"startedAt": load_start.strftime("%Y-%m-%dT%H:%M:%SZ")}})
        body = wait_for_all(
            kubectl, "tiny", Ready=("False", "SuspendedForCapture"), Available=("False", "CaptureOverdue")
        )
        assert "expected end was 2026-01-01 00:03 UTC" in current(body, "Ready")[2]
        patch(kubectl, suspend=True)
        self.back(kubectl)
        body = wait_for_all(kubectl, "tiny", Available="False")
        assert current(body, "Available")[1] not in {"SuspendedForCapture", "CaptureOverdue"}

    def test_plan_and_spec_stay_unchanged_while_borrowed(self, kubectl: Kubectl) -> None:
        assert kubectl.object("sdd", "tiny")["status"]["plan"]["verdict"] == "Fits"
        assert kubectl.object("sdd", "tiny")["spec"]["suspend"] is False, "nothing is written to a spec"


def test_keep_capture_waits_for_engines_that_another_capture_returns(
    kubectl: Kubectl, operator: OperatorProcess, rest: Rest
) -> None:
    serve(kubectl)
    capture(kubectl)
    ready(kubectl, "WaitingForGPUs")
    capture(kubectl, name="lent", deploymentDuringCapture="Suspend")
    assert "has lent its place to capture lent" in ready(kubectl, "WaitingForDeployment")
    eventually(lambda: not kubectl.objects("pods", "--selector=specdecode.io/capture=demo"), "it leaves the line")
    eventually(lambda: kubectl.object("job", "lent-capture")["spec"]["suspend"] is False, "the other one begins")
    operator.kill()
    kubectl.must("delete", "sdc", "lent")
    operator.start()
    eventually(lambda: staying(kubectl, ENGINES), "the engines come back")
    wait_for(kubectl, "tiny", "Ready", LAUNCHED)
    rest.settle()  # what the capture waits for is what it waited for before
    ready(kubectl, "WaitingForDeployment")
    assert kubectl.object("job", JOB)["spec"]["suspend"] is True, "the engines have no place yet"
    place_engine(kubectl)
    ready(kubectl, "WaitingForGPUs")


def test_capture_waits_for_its_deployment(kubectl: Kubectl) -> None:
    capture(kubectl)
    ready(kubectl, "DeploymentNotFound")
    deploy(kubectl, engine={"image": "i:1", "extraArgs": ["--stream-interval=8"]})
    ready(kubectl, "StreamIntervalNotOne")
    assert said(kubectl, "Stalled")[0] == "True"
    assert not kubectl.objects("pvc"), "nothing is written for what is refused"
    deploy(kubectl)
    ready(kubectl, "WaitingForDeployment")
    # While one engine takes the place of another, both may be counted.
    eventually(lambda: "deployment tiny has 0 of 1 engine pods on nodes" in said(kubectl, "Ready")[2], "it says why")
    assert not kubectl.objects("pvc,jobs"), "serving goes first"
    # The engine that is placed may be that of the earlier template, which goes.
    eventually(
        lambda: _engine_is_placed(kubectl) and said(kubectl, "Ready")[1] == "WaitingForGPUs",
        "the capture goes on once its deployment has its place",
    )


def test_missing_claim_named_in_spec_is_waited_for(kubectl: Kubectl) -> None:
    serve(kubectl)
    capture(kubectl, storage={"persistentVolumeClaim": {"claimName": "mine"}})
    assert "mine" in ready(kubectl, "ClaimNotFound")
    make_claim(kubectl, "mine")
    ready(kubectl, "WaitingForGPUs")
    assert kubectl.object("pvc", "mine")["metadata"].get("labels") is None, "it is nobody's but its maker's"


def test_job_of_other_owner_is_not_changed_and_nothing_is_borrowed(kubectl: Kubectl) -> None:
    deploy(kubectl)
    kubectl.must("create", "job", JOB, "--image=i:1")
    before = kubectl.object("job", JOB)["metadata"]["uid"]
    capture(kubectl, deploymentDuringCapture="Suspend")
    assert JOB in ready(kubectl, "ChildNameConflict")
    assert kubectl.object("job", JOB)["metadata"]["uid"] == before
    assert CLAIM not in {each["metadata"]["name"] for each in kubectl.objects("pvc")}, "nothing is half-created"
    wait_for(kubectl, "tiny", "Ready", LAUNCHED)
    assert replicas(kubectl) == 1, "who cannot start borrows nothing"


def test_queued_job_starts_only_when_the_queue_unsuspends_it(kubectl: Kubectl) -> None:
    serve(kubectl)
    capture(kubectl, labels={"kueue.x-k8s.io/queue-name": "gpus"})
    ready(kubectl, "Queued")
    assert kubectl.object("job", JOB)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    kubectl.must("patch", "job", JOB, "--type=merge", '--patch={"spec":{"suspend":false}}')
    ready(kubectl, "WaitingForGPUs")
    patch(kubectl, suspend=True)
    eventually(lambda: not kubectl.objects("jobs"), "cancelled it leaves the queue")


def test_preempted_capture_is_queued_again_and_engines_return(kubectl: Kubectl) -> None:
    """A queue suspends the Job of a workload that it preempts; the engines have their GPUs meanwhile."""
    serve(kubectl)
    queue = {"kueue.x-k8s.io/queue-name": "gpus", "kueue.x-k8s.io/priority-class": "measurements"}
    capture(kubectl, labels=queue, deploymentDuringCapture="Suspend")
    ready(kubectl, "Queued")
    assert queue.items() <= kubectl.object("job", JOB)["metadata"]["labels"].items()
    assert replicas(kubectl) == 1, "engines serve until the queue has admitted the capture"
    for _ in range(2):
        kubectl.must("patch", "job", JOB, "--type=merge", '--patch={"spec":{"suspend":false}}')
        ready(kubectl, "WaitingForGPUs")
        eventually(lambda: replicas(kubectl) == 0, "the engines make room")
        kubectl.must("patch", "job", JOB, "--type=merge", '--patch={"spec":{"suspend":true}}')
        ready(kubectl, "Queued")
        eventually(lambda: replicas(kubectl) == 1, "the engines have their GPUs back")


def test_capture_is_deleted_after_its_ttl_and_its_claim_stays(kubectl: Kubectl) -> None:
    serve(kubectl)
    capture(kubectl, ttlSecondsAfterFinished=0)
    finish(kubectl, 0, SUMMARY)
    eventually(lambda: not kubectl.objects("sdc"), "the capture goes")
    assert_stays(kubectl, CLAIM)


def test_capture_reconcile_without_changes_writes_nothing(
    kubectl: Kubectl, operator: OperatorProcess, rest: Rest
) -> None:
    serve(kubectl)
    capture(kubectl)
    ready(kubectl, "WaitingForGPUs")
    rest.reach()
    operator.kill()
    operator.start()
    for kind, name in (("sdc", "demo"), ("job", JOB), ("pvc", CLAIM)):
        kubectl.must("label", kind, name, "touched=1")
    rest.settle()
    assert rest.changes() == []
