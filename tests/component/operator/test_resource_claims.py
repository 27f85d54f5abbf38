"""Engines claim devices of ResourceSlices, and the real scheduler allocates them, on nodes without a kubelet."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from devcluster.builds import binaries
from devcluster.cluster.cluster import Cluster
from tests.component.operator.conftest import MANIFESTS, installed_operator
from tests.support.conditions import condition, wait_for
from tests.support.devices import GPUS, claiming, gpu, resource_slice
from tests.support.kubectl import Kubectl
from tests.support.kubernetes import MINOR
from tests.support.objects import H200, Body
from tests.support.operator_process import NAMESPACE, OperatorProcess
from tests.support.waiting import eventually

EXAMPLE: Final = Path(__file__).parents[3] / "examples/qwen3-8b-claim.yaml"
TEMPLATES: Final = "resourceclaimtemplates"
ROLE: Final = "specdecode-operator"
IS_OLD: Final = MINOR == binaries.OLDEST
needs_api = pytest.mark.skipif(IS_OLD, reason="this Kubernetes has no resource.k8s.io/v1")
# Nobody plays the kubelet, so the nodes are tainted after a while.
WITHOUT_KUBELET: Final = {
    "spec": {
        "tolerations": [
            {"key": f"node.kubernetes.io/{state}", "operator": "Exists"} for state in ("not-ready", "unreachable")
        ]
    }
}


@pytest.fixture(scope="module")
def operator(
    bare_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, asked_elsewhere: set[str]
) -> Iterator[OperatorProcess]:
    """The operator with its own rights and under its guard; at first, it may not read claims."""
    folder = tmp_path_factory.mktemp("operator")
    with installed_operator(
        bare_cluster, folder, asked_elsewhere, prepare=take_rights, may_be_denied="resource.k8s.io"
    ) as process:
        yield process


def take_rights(admin: Kubectl) -> None:
    """Take the rights to resource.k8s.io, as in the role of an older release."""
    rules = [rule for rule in role(admin)["rules"] if "resource.k8s.io" not in rule["apiGroups"]]
    admin.must("patch", "clusterrole", ROLE, "--type=merge", f"--patch={json.dumps({'rules': rules})}")


def role(admin: Kubectl) -> Body:
    found: Body = json.loads(admin.must("get", "clusterrole", ROLE, "--output=json"))
    return found


def give_rights(kubectl: Kubectl) -> None:
    kubectl.within(NAMESPACE).must("apply", "--server-side", "--force-conflicts", f"--kustomize={MANIFESTS}")


@pytest.fixture
def kubectl(bare_cluster: Cluster, operator: OperatorProcess) -> Iterator[Kubectl]:
    """kubectl in the cluster of this module, whose objects of ours go with the test."""
    kubectl = Kubectl(bare_cluster.kubeconfig)
    yield kubectl
    kubectl.remove("sdd")
    kubectl.must("delete", "pods", "--all", "--force", "--grace-period=0")


@pytest.fixture
def claims(kubectl: Kubectl) -> Kubectl:
    """kubectl where the operator may claim devices: two nodes with two H200 each, and one with an A100."""
    give_rights(kubectl)
    write(kubectl, GPUS)
    for name in ("h200-0", "h200-1"):
        add_node(kubectl, name, gpu(), gpu())
    add_node(kubectl, "a100-0", gpu("NVIDIA A100-SXM4-40GB", 40_960))
    return kubectl


def write(kubectl: Kubectl, body: Body) -> None:
    answer = kubectl.write(yaml.safe_dump(body))
    assert answer.returncode == 0, answer.stderr


def add_node(kubectl: Kubectl, name: str, *devices: Body) -> None:
    """Add a node without the device plugin and its ResourceSlice, as often as one likes."""
    if name not in [each["metadata"]["name"] for each in kubectl.objects("nodes")]:
        write(kubectl, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
        room = {"cpu": "64", "memory": "512Gi", "pods": "110"}
        patch = json.dumps({"status": {"capacity": room, "allocatable": room}})
        kubectl.must("patch", "node", name, "--subresource=status", "--type=merge", f"--patch={patch}")
    write(kubectl, resource_slice(name, *devices))


def apply(kubectl: Kubectl, name: str, accelerator: Body | None = None, **spec: Any) -> None:
    body = yaml.safe_load(EXAMPLE.read_text())
    body["metadata"]["name"] = name
    body["spec"] |= {"podTemplate": WITHOUT_KUBELET, **({"accelerator": accelerator} if accelerator else {}), **spec}
    answer = kubectl.apply(yaml.safe_dump(body))
    assert answer.returncode == 0, answer.stderr


def allocated(kubectl: Kubectl, name: str) -> list[Body]:
    """Return the devices of the first pod of an object that the scheduler has bound."""
    selector = f"--selector=specdecode.io/deployment={name}"

    def look() -> list[Body] | None:
        for pod in kubectl.objects("pods", selector):
            for status in pod["status"].get("resourceClaimStatuses") or []:
                claim = kubectl.object("resourceclaims", status["resourceClaimName"])
                allocation = (claim.get("status") or {}).get("allocation")
                if allocation and pod["spec"].get("nodeName"):
                    return [{**each, "node": pod["spec"]["nodeName"]} for each in allocation["devices"]["results"]]
        return None

    return eventually(look, f"a pod of {name} has its devices")


def templates(kubectl: Kubectl) -> set[str]:
    return {each["metadata"]["name"] for each in kubectl.objects(TEMPLATES)}


@pytest.mark.skipif(not IS_OLD, reason="only for a Kubernetes without resource.k8s.io/v1")
def test_old_kubernetes_is_reported(kubectl: Kubectl) -> None:
    give_rights(kubectl)
    apply(kubectl, "old")
    assert "1.34" in wait_for(kubectl, "old", "Ready", "ResourceClaimsMissing")


@needs_api
def test_operator_continues_when_it_may_claim_devices(kubectl: Kubectl) -> None:
    apply(kubectl, "early")
    message = wait_for(kubectl, "early", "Ready", "ResourceClaimsMissing")
    assert "spec.accelerator.resourceClaim" in message
    give_rights(kubectl)
    assert "gpu.nvidia.com" in wait_for(kubectl, "early", "Ready", "DeviceClassNotFound")
    write(kubectl, GPUS)
    wait_for(kubectl, "early", "Planned", "NoMatchingDevices")
    add_node(kubectl, "h200-0", gpu(), gpu())
    wait_for(kubectl, "early", "Planned", "Fits")
    assert allocated(kubectl, "early")[0]["pool"] == "h200-0"


@needs_api
def test_example_gets_a_device_that_it_was_sized_for(claims: Kubectl) -> None:
    claims.must("apply", f"--filename={EXAMPLE}")
    patch = json.dumps({"spec": {"podTemplate": WITHOUT_KUBELET}})
    claims.must("patch", "sdd", EXAMPLE.stem, "--type=merge", f"--patch={patch}")
    (device,) = allocated(claims, EXAMPLE.stem)
    assert device["driver"] == "gpu.nvidia.com"
    assert device["pool"] == device["node"]
    assert device["node"].startswith("h200")
    assert claims.object("sdd", EXAMPLE.stem)["status"]["plan"]["product"] == H200


@needs_api
def test_engine_on_two_gpus_claims_both_and_the_next_one_waits(claims: Kubectl) -> None:
    apply(claims, "wide", parallelism={"tensor": 2}, replicas=2)
    assert len(allocated(claims, "wide")) == 2
    eventually(lambda: len([each for each in claims.objects("resourceclaims") if each.get("status")]) == 2, "both")
    apply(claims, "narrow")
    message = wait_for(claims, "narrow", "Ready", "Unschedulable")
    assert "spec.accelerator.resourceClaim" in message


@needs_api
def test_templates_are_repaired_and_replaced(claims: Kubectl) -> None:
    apply(claims, "kept")
    eventually(lambda: templates(claims), "there is a template")
    before = templates(claims)
    claims.must("delete", TEMPLATES, "--all")
    eventually(lambda: templates(claims) == before, "the template is back")

    apply(claims, "kept", suspend=True)
    claims.must("delete", "pods", "--all", "--force", "--grace-period=0")  # as its kubelet would
    apply(claims, "kept", claiming(selectors=["device.driver != ''"]), suspend=True)
    eventually(lambda: len(templates(claims)) == 1 and templates(claims) != before, "another template replaces it")


@needs_api
def test_selector_that_the_api_server_rejects_is_reported(claims: Kubectl) -> None:
    apply(claims, "typo", claiming(selectors=["device.nosuch == 'a'"], products=[H200], perNode=2))
    assert "nosuch" in wait_for(claims, "typo", "Ready", "ChildRefused")
    assert condition(claims, "typo", "Stalled")[0] == "True"
