"""The operator against a real API server: objects, ownership, status, failures."""

import json
from typing import Any

import pytest
import yaml

from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.calibration import Calibration, CalibrationEntry, serialize_calibration
from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl
from tests.support.objects import H100, H200, pair_70b, tiny_cpu
from tests.support.operator_process import OperatorProcess, may
from tests.support.rest import Rest
from tests.support.waiting import eventually

LAUNCHED = "Unschedulable"
"""Reason of Ready once everything was done that can be done in a cluster without nodes."""
CHILD_KINDS = "deployments,services,configmaps,poddisruptionbudgets"
OURS = "--selector=app.kubernetes.io/managed-by=specdecode-operator"


@pytest.fixture(autouse=True)
def _running(operator: OperatorProcess) -> None:
    pass


def apply(kubectl: Kubectl, name: str, spec: dict[str, Any]) -> None:
    body = {
        "apiVersion": "specdecode.io/v1alpha1",
        "kind": "SpecDecodeDeployment",
        "metadata": {"name": name},
        "spec": spec,
    }
    answer = kubectl.write(yaml.safe_dump(body))
    assert answer.returncode == 0, answer.stderr


def children(kubectl: Kubectl) -> set[tuple[str, str]]:
    return {(body["kind"], body["metadata"]["name"]) for body in kubectl.objects(CHILD_KINDS, OURS)}


def test_deployment_gets_children_without_finalizers_or_annotations(kubectl: Kubectl) -> None:
    apply(kubectl, "tiny", tiny_cpu(replicas=2))
    wait_for(kubectl, "tiny", "Ready", LAUNCHED)
    assert children(kubectl) == {
        ("Deployment", "tiny"),
        ("Service", "tiny"),
        ("ConfigMap", "tiny-plan"),
        ("ConfigMap", "specdecode-recorder"),
        ("PodDisruptionBudget", "tiny"),
    }
    body = kubectl.object("sdd", "tiny")
    assert "finalizers" not in body["metadata"]
    assert "annotations" not in body["metadata"]
    assert body["status"]["observedGeneration"] == body["metadata"]["generation"] == 1
    assert json.loads(kubectl.object("configmap", "tiny-plan")["data"]["plan.json"])["verdict"] == "Fits"


def test_describe_shows_event_for_the_plan(kubectl: Kubectl) -> None:
    apply(kubectl, "tiny", tiny_cpu())
    wait_for(kubectl, "tiny", "Ready", LAUNCHED)
    described = eventually(
        lambda: (text := kubectl.must("describe", "sdd", "tiny")) and "Planned is True" in text and text,
        "an Event tells of the plan",
    )
    assert "fits: " in str(described)


def test_budget_is_deleted_when_scaled_to_one_replica(kubectl: Kubectl) -> None:
    apply(kubectl, "tiny", tiny_cpu(replicas=2))
    eventually(lambda: ("PodDisruptionBudget", "tiny") in children(kubectl), "the budget exists")
    kubectl.must("scale", "sdd", "tiny", "--replicas=1")
    eventually(lambda: ("PodDisruptionBudget", "tiny") not in children(kubectl), "the budget is gone")
    assert kubectl.object("deployment", "tiny")["spec"]["replicas"] == 1


def test_scaled_deployment_and_deleted_service_are_restored(kubectl: Kubectl) -> None:
    apply(kubectl, "tiny", tiny_cpu())
    eventually(lambda: ("Deployment", "tiny") in children(kubectl), "the Deployment exists")
    kubectl.must("scale", "deployment", "tiny", "--replicas=5")
    eventually(lambda: kubectl.object("deployment", "tiny")["spec"]["replicas"] == 1, "it is scaled back")
    kubectl.must("delete", "service", "tiny")
    eventually(lambda: ("Service", "tiny") in children(kubectl), "the Service is back")


def test_service_of_other_owner_is_not_changed(kubectl: Kubectl) -> None:
    kubectl.must("create", "service", "clusterip", "tiny", "--tcp=80")
    before = kubectl.object("service", "tiny")
    apply(kubectl, "tiny", tiny_cpu())
    message = wait_for(kubectl, "tiny", "Ready", "ChildNameConflict")
    assert "Service tiny" in message
    assert condition(kubectl, "tiny", "Stalled")[0] == "True"
    assert kubectl.object("service", "tiny") == before
    assert children(kubectl) == set(), "nothing is half-created"
    kubectl.must("delete", "service", "tiny")
    wait_for(kubectl, "tiny", "Ready", LAUNCHED)
    assert ("Service", "tiny") in children(kubectl)


def test_objects_deleted_during_reconcile_leave_no_children(kubectl: Kubectl) -> None:
    for _ in range(5):
        apply(kubectl, "tiny", tiny_cpu())
        kubectl.must("delete", "sdd", "tiny")
    eventually(lambda: not children(kubectl), "the garbage collector removed all children")
    apply(kubectl, "tiny", tiny_cpu())
    wait_for(kubectl, "tiny", "Ready", LAUNCHED)


def test_reconcile_without_changes_writes_nothing(kubectl: Kubectl, rest: Rest) -> None:
    apply(kubectl, "tiny", tiny_cpu())
    wait_for(kubectl, "tiny", "Ready", LAUNCHED)
    rest.reach()
    kubectl.must("label", "sdd", "tiny", "touched=1")
    kubectl.must("annotate", "service", "tiny", "somebody=else")
    rest.settle()
    assert rest.changes() == []


def test_restarted_operator_handles_changes_made_while_it_was_down(kubectl: Kubectl, operator: OperatorProcess) -> None:
    apply(kubectl, "before", tiny_cpu())
    wait_for(kubectl, "before", "Ready", LAUNCHED)
    uid = kubectl.object("deployment", "before")["metadata"]["uid"]
    operator.kill()
    apply(kubectl, "meanwhile", tiny_cpu())
    kubectl.must("scale", "sdd", "before", "--replicas=3")
    operator.start()
    wait_for(kubectl, "meanwhile", "Ready", LAUNCHED)
    eventually(lambda: kubectl.object("deployment", "before")["spec"]["replicas"] == 3, "the change is carried out")
    assert kubectl.object("deployment", "before")["metadata"]["uid"] == uid


def test_missing_permission_is_reported_and_reconcile_continues_once_granted(kubectl: Kubectl) -> None:
    role = kubectl.object("clusterrole", "specdecode-operator")
    rules = [rule for rule in role["rules"] if rule["resources"] != ["services"]]
    without = {**role, "rules": rules}
    for body in (without, role):
        body["metadata"] = {"name": role["metadata"]["name"]}
    assert without["rules"] != role["rules"]
    try:
        kubectl.must("replace", "--filename=-", stdin=json.dumps(without))
        eventually(lambda: not may(kubectl, "create", "services"), "the permission is gone")
        apply(kubectl, "tiny", tiny_cpu())
        message = wait_for(kubectl, "tiny", "Ready", "Forbidden")
        assert "services" in message
        assert condition(kubectl, "tiny", "Ready")[0] == "Unknown"
    finally:
        kubectl.must("replace", "--filename=-", stdin=json.dumps(role))
    wait_for(kubectl, "tiny", "Ready", LAUNCHED)


def test_invalid_spec_change_does_not_change_running_engines(kubectl: Kubectl) -> None:
    apply(kubectl, "tiny", tiny_cpu())
    eventually(lambda: ("Deployment", "tiny") in children(kubectl), "the Deployment exists")
    before = kubectl.object("deployment", "tiny")["spec"]
    apply(kubectl, "tiny", tiny_cpu(engine={"image": "localhost/engine:1", "extraArgs": ["--swap-space=4"]}))
    message = wait_for(kubectl, "tiny", "Ready", "Invalid")
    assert "spec.engine.extraArgs[0]" in message
    assert kubectl.object("deployment", "tiny")["spec"] == before
    apply(kubectl, "tiny", tiny_cpu(suspend=True))
    wait_for(kubectl, "tiny", "Ready", "Suspended")
    assert kubectl.object("deployment", "tiny")["spec"]["replicas"] == 0


def test_pod_template_refused_by_the_api_server_is_reported(kubectl: Kubectl) -> None:
    apply(kubectl, "tiny", tiny_cpu(podTemplate={"spec": {"tolerationz": []}}))
    message = wait_for(kubectl, "tiny", "Ready", "ChildRefused")
    assert "tolerationz" in message
    assert condition(kubectl, "tiny", "Stalled")[0] == "True"
    apply(kubectl, "tiny", tiny_cpu())
    wait_for(kubectl, "tiny", "Ready", LAUNCHED)


def refused_by_quota(kubectl: Kubectl, *command: str) -> None:
    """Wait until the API server enforces a quota: first its controller has to count what is there."""
    eventually(lambda: "exceeded quota" in kubectl(*command, "--dry-run=server").stderr, "the quota is in force")


def test_exhausted_quota_is_reported_and_retried(kubectl: Kubectl) -> None:
    kubectl.must("create", "quota", "small", "--hard=count/services=0")
    refused_by_quota(kubectl, "create", "service", "clusterip", "one", "--tcp=80")
    apply(kubectl, "tiny", tiny_cpu())
    message = wait_for(kubectl, "tiny", "Ready", "RefusedForNow")
    assert "exceeded quota: small" in message
    kubectl.must("delete", "quota", "small")
    wait_for(kubectl, "tiny", "Ready", LAUNCHED)


def test_pods_refused_by_quota_are_reported(kubectl: Kubectl) -> None:
    kubectl.must("create", "quota", "no-pods", "--hard=pods=0")
    refused_by_quota(kubectl, "run", "one", "--image=i:1")
    apply(kubectl, "tiny", tiny_cpu())
    assert "no-pods" in wait_for(kubectl, "tiny", "Ready", "PodsRefused")


def test_pods_refused_by_limit_range_are_reported(kubectl: Kubectl) -> None:
    limits = {"limits": [{"type": "Container", "min": {"memory": "1Ti"}}]}
    body = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "large-only"}, "spec": limits}
    assert kubectl.write(yaml.safe_dump(body)).returncode == 0
    apply(kubectl, "tiny", tiny_cpu())
    assert "minimum memory usage per Container is 1Ti" in wait_for(kubectl, "tiny", "Ready", "PodsRefused")


def test_pod_security_refusal_names_the_field_and_default_pods_are_admitted(
    kubectl: Kubectl,
) -> None:
    kubectl.must("label", "namespace", str(kubectl.namespace), "pod-security.kubernetes.io/enforce=restricted")
    tried = ("run", "tried", "--image=i:1", "--dry-run=server")
    eventually(lambda: "restricted" in kubectl(*tried).stderr, "the level is enforced")
    root = {"spec": {"securityContext": {"runAsUser": 0}}}
    apply(kubectl, "tiny", tiny_cpu(podTemplate=root))
    assert "change spec.podTemplate.spec.securityContext" in wait_for(kubectl, "tiny", "Ready", "PodsRefused")
    apply(kubectl, "tiny", tiny_cpu())
    wait_for(kubectl, "tiny", "Ready", LAUNCHED)


def test_values_normalized_by_the_api_server_are_not_applied_again(kubectl: Kubectl, rest: Rest) -> None:
    accelerator = {"type": "CPU", "cpuCores": 1, "memoryGiB": 1024, "kvCacheGiB": 1}
    template = {"spec": {"hostNetwork": False, "containers": [{"name": "engine", "env": [{"name": "A", "value": ""}]}]}}
    apply(kubectl, "tiny", tiny_cpu(accelerator=accelerator, podTemplate=template))
    wait_for(kubectl, "tiny", "Ready", LAUNCHED)
    rest.reach()
    kubectl.must("label", "deployment", "tiny", "touched=1")
    rest.settle()
    assert rest.changes() == []


def test_suspend_stops_engines_of_an_invalid_spec(kubectl: Kubectl) -> None:
    apply(kubectl, "tiny", tiny_cpu())
    eventually(lambda: ("Deployment", "tiny") in children(kubectl), "the Deployment exists")
    apply(kubectl, "tiny", tiny_cpu(suspend=True, engine={"image": "localhost/engine:1", "extraArgs": ["--nonsense"]}))
    wait_for(kubectl, "tiny", "Accepted", "Invalid")
    eventually(lambda: kubectl.object("deployment", "tiny")["spec"]["replicas"] == 0, "the engines are stopped")


def test_plan_follows_nodes_added_to_the_cluster(kubectl: Kubectl) -> None:
    apply(kubectl, "llama", pair_70b())
    wait_for(kubectl, "llama", "Planned", "NoMatchingNodes")
    try:
        kubectl.add_node("h100-0", H100)
        message = wait_for(kubectl, "llama", "Ready", "DoesNotFit")
        assert "weights" in message
        assert "target.quantization: FP8" in message
        assert children(kubectl) == {("ConfigMap", "llama-plan")}
        kubectl.add_node("h200-0", H200)
        wait_for(kubectl, "llama", "Planned", "Fits")
        eventually(lambda: ("Deployment", "llama") in children(kubectl), "the engines are launched")
    finally:
        kubectl.must("delete", "node", "--ignore-not-found", "h100-0", "h200-0")


def test_calibration_file_changes_apply_without_a_restart(kubectl: Kubectl, operator: OperatorProcess) -> None:
    entry = CalibrationEntry(
        H200, "0.33", "V2", 2, False, 256, 8192, "draft_model", 5, "measured", "FP8", "BF16", 3 * GIB
    )

    def available_bytes() -> int:
        status = kubectl.object("sdd", "pair").get("status", {})
        return int(status["plan"]["perGpu"]["availableKvBytes"]) if "plan" in status else 0

    try:
        kubectl.add_node("h200-0", H200)
        apply(kubectl, "pair", pair_70b())
        wait_for(kubectl, "pair", "Planned", "Fits")
        before = available_bytes()
        operator.calibration.write_text(serialize_calibration(Calibration((entry,))))
        eventually(lambda: available_bytes() == before - 3 * GIB, "the measurement counts")
        assert "calibrated: 3.0 GiB more" in condition(kubectl, "pair", "Planned")[2]
        operator.calibration.unlink()
        eventually(lambda: available_bytes() == before, "without it the estimate counts again")
    finally:
        operator.calibration.unlink(missing_ok=True)
        kubectl.must("delete", "node", "--ignore-not-found", "h200-0")


def test_operator_restart_changes_no_planned_objects(kubectl: Kubectl, operator: OperatorProcess, rest: Rest) -> None:
    try:
        kubectl.add_node("h200-0", H200)
        apply(kubectl, "llama", pair_70b())
        wait_for(kubectl, "llama", "Ready", LAUNCHED)
        rest.reach()
        operator.kill()
        operator.start()
        rest.settle()
        assert rest.changes() == []
    finally:
        kubectl.must("delete", "node", "--ignore-not-found", "h200-0")
