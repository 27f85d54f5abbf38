"""Rollouts, rollback and scaling against a real API server: the test plays the kubelet."""

import json
from typing import Any

import pytest
import yaml

from specdecode_operator.cluster.resources import TEMPLATE_HASH_ANNOTATION
from tests.support.conditions import condition, current, wait_for, wait_for_all
from tests.support.gitops.health import told
from tests.support.kubectl import Kubectl
from tests.support.objects import tiny_cpu
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

ENGINES = "--selector=specdecode.io/deployment=tiny"
NEXT = {"serving": {"maxModelLen": 512}}
REFUSED = "vllm: error: unrecognized arguments: --nonsense"


@pytest.fixture(autouse=True)
def _running(operator: OperatorProcess) -> None:
    pass


def apply(kubectl: Kubectl, **changes: Any) -> None:
    body = {
        "apiVersion": "specdecode.io/v1alpha1",
        "kind": "SpecDecodeDeployment",
        "metadata": {"name": "tiny"},
        "spec": tiny_cpu(**changes),
    }
    answer = kubectl.write(yaml.safe_dump(body))
    assert answer.returncode == 0, answer.stderr


def template_hash(body: dict[str, Any]) -> str:
    return str(body["metadata"].get("annotations", {}).get(TEMPLATE_HASH_ANNOTATION))


def wanted_hash(kubectl: Kubectl) -> str:
    """Hash of the engines' template; empty while there are none."""
    return "".join(template_hash(body["spec"]["template"]) for body in kubectl.objects("deployments"))


def engines(kubectl: Kubectl, count: int) -> list[str]:
    """Names of the pods of the wanted template, once there are so many."""

    def look() -> list[str] | None:
        wanted = wanted_hash(kubectl)
        pods = [pod for pod in kubectl.objects("pods", ENGINES) if is_to_run(pod)]
        names = [pod["metadata"]["name"] for pod in pods if template_hash(pod) == wanted]
        return names if len(names) == count else None

    return eventually(look, f"{count} pods of the wanted template")


def is_to_run(pod: dict[str, Any]) -> bool:
    """Whether a pod is neither on its way out nor at its end."""
    return "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") != "Failed"


def report(kubectl: Kubectl, pod: str, *, ready: bool, state: dict[str, Any]) -> None:
    """Write a pod's status as a kubelet would."""
    status = {
        "phase": "Running",
        "conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": str(ready), "lastTransitionTime": "2026-01-01T00:00:00Z"},
        ],
        "containerStatuses": [
            {"name": "engine", "ready": ready, "restartCount": 0, "image": "i:1", "imageID": "", **state}
        ],
    }
    kubectl.patch_pod_status(pod, status)


def serve(kubectl: Kubectl, count: int = 1) -> None:
    for pod in engines(kubectl, count):
        report(kubectl, pod, ready=True, state={"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}})


def refuse(kubectl: Kubectl) -> None:
    (pod,) = engines(kubectl, 1)
    ended = {"exitCode": 2, "reason": "Error", "message": REFUSED}
    report(
        kubectl,
        pod,
        ready=False,
        state={"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": ended}},
    )


def be_guarded(kubectl: Kubectl) -> None:
    """Wait until an edit by hand would end no engine."""
    eventually(
        lambda: kubectl.object("deployment", "tiny")["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0,
        "the Deployment is guarded",
    )


def settle(kubectl: Kubectl) -> None:
    """Wait until the operator has looked at the object again after everything that came before."""
    kubectl.must("patch", "sdd", "tiny", "--type=merge", '--patch={"spec":{"rollout":{"strategy":"Surge"}}}')
    written = kubectl.object("sdd", "tiny")["metadata"]["generation"]
    eventually(
        lambda: kubectl.object("sdd", "tiny")["status"]["observedGeneration"] == written, "the new spec was looked at"
    )


def test_failed_rollout_returns_to_the_template_that_served_without_flapping(
    kubectl: Kubectl, operator: OperatorProcess
) -> None:
    apply(kubectl)
    serve(kubectl)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    assert "successfully rolled out" in kubectl.must("rollout", "status", "deployment/tiny", "--timeout=240s")
    good = wanted_hash(kubectl)
    be_guarded(kubectl)

    apply(kubectl, **NEXT)
    eventually(lambda: wanted_hash(kubectl) != good, "the new spec is tried")
    refuse(kubectl)
    eventually(lambda: wanted_hash(kubectl) == good, "the template that served is back")
    operator.kill()
    operator.start()
    serve(kubectl)
    body = wait_for_all(kubectl, "tiny", Ready=("False", "RolledBack"), Stalled="True", Available="True")
    assert REFUSED in current(body, "Ready")[2]

    be_guarded(kubectl)
    written = kubectl.object("deployment", "tiny")["metadata"]["generation"]
    assert written <= 5, "made, changed and guarded, put back and guarded"

    tried = kubectl.object("sdd", "tiny")["metadata"]["generation"]
    settle(kubectl)
    assert kubectl.object("sdd", "tiny")["metadata"]["generation"] > tried
    assert wanted_hash(kubectl) == good, "another strategy is no new attempt"
    apply(kubectl, serving={"maxModelLen": 256})
    eventually(lambda: wanted_hash(kubectl) != good, "another spec is tried")
    serve(kubectl)
    wait_for(kubectl, "tiny", "Ready", "Serving")


def capture(kubectl: Kubectl, name: str, **spec: Any) -> None:
    body = {
        "apiVersion": "specdecode.io/v1alpha1",
        "kind": "SpecDecodeCapture",
        "metadata": {"name": name},
        "spec": {"deployment": "tiny", "suspend": True, **spec},
    }
    answer = kubectl.write(yaml.safe_dump(body))
    assert answer.returncode == 0, answer.stderr


def end_capture(kubectl: Kubectl, name: str, **found: Any) -> None:
    """Write how a capture ended, as the operator does."""
    ended = {"type": "Succeeded", "status": "True", "reason": "Captured", "message": "", "observedGeneration": 1}
    conditions = [ended | {"lastTransitionTime": "2026-01-01T00:00:00Z"}]
    status = {"conditions": conditions, "phase": "Succeeded", "claim": "files", "path": f"n/{name}/as-deployed/1"}
    patch = json.dumps({"status": status | found})
    kubectl.must("patch", "sdc", name, "--subresource=status", "--type=merge", f"--patch={patch}")


def judge(kubectl: Kubectl, name: str, verdict: str) -> None:
    """End the capture that the operator made to judge another engine."""
    regression = {"against": "golden", "verdict": verdict, "message": "goodput 90 after 100 tokens/s"}
    end_capture(kubectl, name, regression=regression)


def looked_at(kubectl: Kubectl, prefix: str, but: str = "") -> str:
    """Return the name of a capture once the operator has said something of it, which it would write over ours."""

    def look() -> list[str]:
        # A status there is from the start, by the CRD's default.
        found = [(body["metadata"]["name"], body["status"].get("conditions")) for body in kubectl.objects("sdc")]
        return [name for name, said in found if name.startswith(prefix) and name != but and said]

    return eventually(look, f"the operator looked at capture {prefix}")[0]


def names(kubectl: Kubectl) -> list[str]:
    return [body["metadata"]["name"] for body in kubectl.objects("sdc")]


def test_gated_rollout_continues_only_if_the_gate_capture_holds(kubectl: Kubectl, operator: OperatorProcess) -> None:
    gated: dict[str, Any] = {"rollout": {"gate": {"capture": "golden"}}}
    apply(kubectl, **gated)
    serve(kubectl)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    good = wanted_hash(kubectl)

    apply(kubectl, **NEXT, **gated)
    wait_for(kubectl, "tiny", "Ready", "GoldenNotReady")
    assert wanted_hash(kubectl) == good, "without a golden capture nothing rolls out"
    # Its captures wait for that claim, so that nobody writes into the status that the test writes.
    # Its requests are short enough for every spec of this test.
    workload = {"prompts": {"synthetic": {"promptTokens": 64, "outputTokens": 32}}}
    capture(kubectl, "golden", seed=7, storage={"persistentVolumeClaim": {"claimName": "files"}}, workload=workload)
    end_capture(kubectl, looked_at(kubectl, "golden"))
    wait_for(kubectl, "tiny", "Ready", "GateCapturing")
    worse = looked_at(kubectl, "tiny-gate-")
    operator.kill()
    judge(kubectl, worse, "Regressed")
    operator.start()
    body = wait_for_all(kubectl, "tiny", Ready=("False", "GateFailed"), Stalled="True", Available="True")
    assert "goodput 90 after 100 tokens/s" in current(body, "Gate")[2]
    spec = kubectl.object("sdc", worse)["spec"]
    assert (spec["seed"], spec["against"]["capture"]) == (7, "golden")
    assert spec["storage"]["persistentVolumeClaim"] == {"claimName": "files"}
    assert wanted_hash(kubectl) == good, "what is worse never rolls out"
    assert sorted(names(kubectl)) == ["golden", worse], "and is not judged again"

    apply(kubectl, serving={"maxModelLen": 256}, **gated)
    judge(kubectl, looked_at(kubectl, "tiny-gate-", but=worse), "Holds")
    eventually(lambda: wanted_hash(kubectl) != good, "what holds rolls out")
    serve(kubectl)
    wait_for_all(kubectl, "tiny", Ready=("True", "Serving"), Gate=("True", "Passed"))


def test_paused_rollout_does_not_roll_out_changes(kubectl: Kubectl) -> None:
    apply(kubectl)
    serve(kubectl)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    (before,) = engines(kubectl, 1)
    apply(kubectl, rollout={"paused": True}, **NEXT)
    wait_for(kubectl, "tiny", "Ready", "RolloutPaused")
    assert [pod["metadata"]["name"] for pod in kubectl.objects("pods", ENGINES)] == [before]
    apply(kubectl, **NEXT)
    serve(kubectl)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    assert engines(kubectl, 1) != [before]


def test_kubectl_rollout_pause_is_undone(kubectl: Kubectl) -> None:
    apply(kubectl)
    engines(kubectl, 1)
    kubectl.must("rollout", "pause", "deployment/tiny")
    eventually(lambda: not kubectl.object("deployment", "tiny")["spec"].get("paused"), "it goes on")


def test_disruption_budget_allows_one_of_two_and_none_exists_for_one(kubectl: Kubectl) -> None:
    def allowed() -> int:
        budgets = kubectl.objects("poddisruptionbudgets")
        return sum(budget.get("status", {}).get("disruptionsAllowed", 0) for budget in budgets)

    apply(kubectl, replicas=2)
    serve(kubectl, 2)
    eventually(lambda: allowed() == 1, "one may go")
    pod = engines(kubectl, 2)[0]
    report(kubectl, pod, ready=False, state={"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}})
    eventually(lambda: allowed() == 0, "while one is missing, the other stays")
    kubectl.must("scale", "sdd", "tiny", "--replicas=1")
    eventually(lambda: not kubectl.objects("poddisruptionbudgets"), "a lone engine holds no node up")


def test_autoscaler_scales_replicas_and_negative_replicas_are_refused(kubectl: Kubectl) -> None:
    apply(kubectl)
    serve(kubectl)
    patch = json.dumps({"spec": {"replicas": -1}})
    refused = kubectl("patch", "sdd", "tiny", "--subresource=scale", "--type=merge", f"--patch={patch}")
    assert refused.returncode != 0
    assert "greater than or equal to 0" in refused.stderr
    target = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "name": "tiny"}
    cpu = {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}}
    scaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "tiny"},
        "spec": {"scaleTargetRef": target, "minReplicas": 2, "maxReplicas": 3, "metrics": [cpu]},
    }
    kubectl.must("create", "--filename=-", stdin=json.dumps(scaler))
    eventually(lambda: kubectl.object("sdd", "tiny")["spec"]["replicas"] == 2, "it is scaled to the minimum")
    serve(kubectl, 2)
    kubectl.must("delete", "hpa", "tiny")
    kubectl.must("scale", "sdd", "tiny", "--replicas=0")
    asked = {"Ready": ("True", "ScaledToZero"), "Reconciling": "False", "Available": ("False", "ScaledToZero")}
    body = wait_for_all(kubectl, "tiny", **asked)
    assert told(body) == "good", "a sync wave does not wait for a pair that Git asks to park"
    assert kubectl.object("deployment", "tiny")["spec"]["replicas"] == 0
    kubectl.must("patch", "sdd", "tiny", "--type=merge", '--patch={"spec":{"suspend":true}}')
    body = wait_for_all(kubectl, "tiny", Ready=("True", "Suspended"), Available=("False", "Suspended"))
    assert told(body) == "good"


def test_manual_image_edit_is_repaired_without_ending_serving_engines(kubectl: Kubectl) -> None:
    apply(kubectl)
    serve(kubectl)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    (before,) = engines(kubectl, 1)
    be_guarded(kubectl)
    kubectl.must("set", "image", "deployment/tiny", "engine=localhost/other:1")
    eventually(
        lambda: any(each["reason"] == "DriftRepaired" for each in kubectl.objects("events")), "the image is set back"
    )
    eventually(lambda: kubectl.object("deployment", "tiny")["status"].get("replicas") == 1, "nothing else runs")
    assert engines(kubectl, 1) == [before]
    containers = kubectl.object("deployment", "tiny")["spec"]["template"]["spec"]["containers"]
    assert [each["image"] for each in containers] == ["localhost/engine:1"]


def test_kubectl_rollout_restart_replaces_the_engine(kubectl: Kubectl) -> None:
    apply(kubectl)
    serve(kubectl)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    (before,) = engines(kubectl, 1)
    kubectl.must("rollout", "restart", "deployment/tiny")
    eventually(lambda: before not in engines(kubectl, 1), "its successor takes its place")
    serve(kubectl)
    wait_for(kubectl, "tiny", "Ready", "Serving")


def test_pods_rejected_by_kubelet_are_reported_and_no_more_are_created(kubectl: Kubectl) -> None:
    """Their ReplicaSet makes another one at once, for as long as one is wanted."""
    apply(kubectl)
    rejected = {"phase": "Failed", "reason": "OutOfcpu", "message": "Pod was rejected: Node didn't have enough: cpu"}

    def reject() -> bool:
        for pod in kubectl.objects("pods", ENGINES):
            if pod["status"]["phase"] == "Pending":
                kubectl.patch_pod_status(pod["metadata"]["name"], rejected)
        _, reason, message = condition(kubectl, "tiny", "Ready")
        # Its status may tell of the round before, in which it made one more: only what it saw last counts.
        stopped = [
            body["status"].get("observedGeneration", 0) >= body["metadata"]["generation"]
            and not body["spec"]["replicas"]
            and not body["status"].get("replicas")
            for body in kubectl.objects("replicasets", ENGINES)
        ]
        return reason == "PodRejected" and "in a row" in message and stopped == [True]

    # One that the scheduler finds no node for makes no others, so it is let be, and one more may be asked for where the
    # operator saw it last: this node takes, and rejects, it too.
    eventually(reject, "no more are made, none is left, and their number is told")
    wait_for_all(kubectl, "tiny", Ready="Unknown", Reconciling="True", Available="False")
