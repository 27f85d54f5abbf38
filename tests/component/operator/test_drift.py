"""What others change and add on the operator's objects is set back, but for what is theirs."""

import json
from typing import Any, Final

import pytest
import yaml

from tests.support.conditions import wait_for
from tests.support.kubectl import Kubectl
from tests.support.objects import tiny_cpu
from tests.support.operator_process import OperatorProcess
from tests.support.rest import Rest
from tests.support.waiting import eventually

LAUNCHED: Final = "Unschedulable"


@pytest.fixture
def launched(kubectl: Kubectl, operator: OperatorProcess) -> Kubectl:
    """kubectl where one object has its children, and nothing is left to do."""
    operator.ensure()
    apply(kubectl)
    wait_for(kubectl, "tiny", "Ready", LAUNCHED)
    return kubectl


def apply(kubectl: Kubectl, **annotations: str) -> None:
    metadata = {"name": "tiny", "annotations": annotations}
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": metadata}
    answer = kubectl.apply(yaml.safe_dump({**body, "spec": tiny_cpu()}))
    assert answer.returncode == 0, answer.stderr


def patch(kubectl: Kubectl, kind: str, change: Any, name: str = "tiny", type_: str = "strategic") -> None:
    manager = "--field-manager=somebody"
    kubectl.must("patch", kind, name, f"--type={type_}", f"--patch={json.dumps(change)}", manager)


def content(kubectl: Kubectl, kind: str, name: str = "tiny") -> Any:
    body = kubectl.object(kind, name)
    kept = {field: value for field, value in body.items() if field in {"spec", "data", "binaryData"}}
    return {**kept, "owners": body["metadata"]["ownerReferences"]}


def repairs(kubectl: Kubectl) -> list[str]:
    return [each["message"] for each in kubectl.objects("events") if each["reason"] == "DriftRepaired"]


POD_ADDITIONS: Final = {
    "hostNetwork": True,
    "dnsPolicy": "Default",
    "serviceAccountName": "other",
    "priorityClassName": "system-node-critical",
    "containers": [
        {
            "name": "engine",
            "args": ["--nonsense"],
            "env": [{"name": "LD_PRELOAD", "value": "/tmp/x.so"}],
            "securityContext": {"privileged": True, "allowPrivilegeEscalation": True},
        },
        {"name": "miner", "image": "i:1"},
    ],
    "initContainers": [{"name": "first", "image": "i:1"}],
    "volumes": [{"name": "extra", "emptyDir": {}}],
}


def test_fields_added_to_children_are_removed_and_reported(launched: Kubectl) -> None:
    kubectl = launched
    before = {kind: content(kubectl, kind) for kind in ("deployment", "service")}
    plan = content(kubectl, "configmap", "tiny-plan")
    stranger = {"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "b4a5e2f0-0000-0000-0000-000000000000"}
    patch(kubectl, "deployment", {"spec": {"template": {"spec": POD_ADDITIONS}, "minReadySeconds": 9}})
    patch(kubectl, "service", {"spec": {"externalIPs": ["192.0.2.1"], "sessionAffinity": "ClientIP"}})
    patch(kubectl, "service", {"metadata": {"ownerReferences": [stranger]}})
    patch(kubectl, "configmap", {"data": {"extra": "1"}, "binaryData": {"more": "AA=="}}, "tiny-plan")
    eventually(
        lambda: {kind: content(kubectl, kind) for kind in before} == before, "Deployment and Service are as before"
    )
    eventually(lambda: content(kubectl, "configmap", "tiny-plan") == plan, "the plan is as before")
    told = ("Deployment tiny: spec.", "Service tiny: spec.externalIPs", "ConfigMap tiny-plan: ", "by somebody")
    eventually(lambda: all(words in " ".join(repairs(kubectl)) for words in told), "each is told")


def test_fields_added_while_the_operator_was_down_are_removed(launched: Kubectl, operator: OperatorProcess) -> None:
    before = content(launched, "deployment")
    operator.kill()
    patch(launched, "deployment", {"spec": {"template": {"spec": POD_ADDITIONS}}})
    operator.start()
    eventually(lambda: content(launched, "deployment") == before, "the Deployment is as before")
    eventually(lambda: any("by somebody" in each for each in repairs(launched)), "it is told")


def test_wiping_managed_fields_does_not_protect_a_change(launched: Kubectl) -> None:
    before = content(launched, "deployment")
    wiped = {"metadata": {"managedFields": [{}]}, "spec": {"template": {"spec": {"hostNetwork": True}}}}
    patch(launched, "deployment", wiped, type_="merge")
    eventually(lambda: content(launched, "deployment") == before, "the Deployment is as before")


def test_annotations_labels_and_restarts_by_others_stay(launched: Kubectl, rest: Rest) -> None:
    kubectl = launched
    kubectl.must("annotate", "deployment", "tiny", "somebody=else")
    kubectl.must("label", "service", "tiny", "somebody=else")
    kubectl.must("rollout", "restart", "deployment/tiny")
    rest.reach()
    template = kubectl.object("deployment", "tiny")["spec"]["template"]
    assert "kubectl.kubernetes.io/restartedAt" in template["metadata"]["annotations"]
    assert kubectl.object("deployment", "tiny")["metadata"]["annotations"]["somebody"] == "else"
    assert kubectl.object("service", "tiny")["metadata"]["labels"]["somebody"] == "else"
    assert repairs(kubectl) == []


def test_fields_of_managers_in_keep_fields_of_annotation_stay(launched: Kubectl, rest: Rest) -> None:
    before = content(launched, "deployment")
    apply(launched, **{"specdecode.io/keep-fields-of": "injector, somebody"})
    # The object and its child are told of by different watches: the annotation has to be known first.
    rest.settle()
    containers = [{"name": "sidecar", "image": "i:1"}, {"name": "engine", "image": "theirs:1"}]
    patch(launched, "deployment", {"spec": {"replicas": 2, "template": {"spec": {"containers": containers}}}})
    rest.reach()
    spec = launched.object("deployment", "tiny")["spec"]
    images = {each["name"]: each["image"] for each in spec["template"]["spec"]["containers"]}
    assert (spec["replicas"], images) == (2, {"engine": "theirs:1", "sidecar": "i:1"}), "also what the operator renders"
    apply(launched)
    eventually(
        lambda: content(launched, "deployment") == before,
        "without the annotation all is as before",
    )


def test_drift_rewritten_after_each_repair_is_repaired_repeatedly(launched: Kubectl) -> None:
    def written_again() -> bool:
        if launched.object("deployment", "tiny")["spec"]["template"]["spec"].get("hostNetwork") is None:
            patch(launched, "deployment", {"spec": {"template": {"spec": {"hostNetwork": True}}}})
        return len(repairs(launched)) >= 4

    eventually(written_again, "it is repaired a few times")
