"""The operator writes an autoscaler when asked, also when KEDA comes later, and engines never wait for it.

The real HorizontalPodAutoscaler controller runs in this cluster, without a metrics adapter.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from devcluster.builds import binaries
from devcluster.cluster.cluster import Cluster
from tests.component.operator.conftest import installed_operator
from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl
from tests.support.objects import H200, tiny_cpu
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

AUTOSCALERS: Final = "horizontalpodautoscalers.autoscaling"
SCALED_OBJECTS: Final = "scaledobjects.keda.sh"
EXAMPLE: Final = Path(__file__).parents[3] / "examples/qwen3-8b-autoscaling.yaml"
AUTOSCALING: Final = {"minReplicas": 2, "maxReplicas": 4, "metric": "RunningRequests", "target": 24}
KEDA: Final = {"keda": {"serverAddress": "http://prometheus.monitoring:9090"}}


@pytest.fixture(scope="module")
def operator(
    bare_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, asked_elsewhere: set[str]
) -> Iterator[OperatorProcess]:
    """The operator with its own rights and under its guard, in a cluster that begins without KEDA."""
    folder = tmp_path_factory.mktemp("operator")
    with installed_operator(bare_cluster, folder, asked_elsewhere) as process:
        yield process


@pytest.fixture
def kubectl(bare_cluster: Cluster, operator: OperatorProcess) -> Iterator[Kubectl]:
    """kubectl in the cluster of this module, whose objects of ours go with the test."""
    kubectl = Kubectl(bare_cluster.kubeconfig)
    yield kubectl
    kubectl.remove("sdd")


def apply(kubectl: Kubectl, name: str, autoscaling: dict[str, Any] | None, **changes: Any) -> None:
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": name}}
    spec = tiny_cpu(**({} if autoscaling is None else {"autoscaling": autoscaling}), **changes)
    # Server-side apply, which does not own the defaults.
    kubectl.must("apply", "--server-side", "--filename=-", stdin=yaml.safe_dump({**body, "spec": spec}))


def names(kubectl: Kubectl, kind: str) -> list[str]:
    return [each["metadata"]["name"] for each in kubectl.objects(kind)]


def found(kubectl: Kubectl, kind: str, name: str) -> dict[str, Any]:
    """Return an object as soon as it exists."""
    return eventually(
        lambda: next((each for each in kubectl.objects(kind) if each["metadata"]["name"] == name), None),
        f"{kind} {name} exists",
    )


def test_without_a_metrics_adapter_the_status_says_so_and_bounds_hold(kubectl: Kubectl) -> None:
    apply(kubectl, "alone", AUTOSCALING)
    assert "vllm_num_requests_running" in wait_for(kubectl, "alone", "Autoscaled", "MetricsUnavailable")
    assert condition(kubectl, "alone", "Autoscaled")[0] == "False"
    eventually(lambda: kubectl.object("sdd", "alone")["spec"]["replicas"] == 2, "the minimum holds")
    eventually(lambda: kubectl.object("deployment", "alone")["spec"]["replicas"] == 2, "also for the engines")


def test_another_autoscaler_of_the_same_object_is_reported(kubectl: Kubectl) -> None:
    apply(kubectl, "twice", AUTOSCALING)
    found(kubectl, AUTOSCALERS, "twice")
    target = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "name": "twice"}
    theirs = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "theirs"},
        "spec": {"scaleTargetRef": target, "maxReplicas": 9},
    }
    kubectl.must("create", "--filename=-", stdin=yaml.safe_dump(theirs))
    assert "theirs" in wait_for(kubectl, "twice", "Autoscaled", "OtherAutoscaler")
    kubectl.must("delete", AUTOSCALERS, "theirs")
    wait_for(kubectl, "twice", "Autoscaled", "MetricsUnavailable")


def test_drift_is_repaired_and_an_autoscaler_that_is_no_longer_asked_for_goes(kubectl: Kubectl) -> None:
    apply(kubectl, "kept", AUTOSCALING)
    wanted = found(kubectl, AUTOSCALERS, "kept")["spec"]
    change = json.dumps({"spec": {"maxReplicas": 99, "metrics": []}})
    kubectl.must("patch", AUTOSCALERS, "kept", "--type=merge", f"--patch={change}", "--field-manager=somebody")
    eventually(lambda: kubectl.object(AUTOSCALERS, "kept")["spec"] == wanted, "the autoscaler is as before")
    kubectl.must("delete", AUTOSCALERS, "kept")
    found(kubectl, AUTOSCALERS, "kept")
    apply(kubectl, "kept", None)
    eventually(lambda: "kept" not in names(kubectl, AUTOSCALERS), "the autoscaler is deleted")
    eventually(lambda: condition(kubectl, "kept", "Autoscaled")[1] == "", "the condition is gone")
    assert "kept" in names(kubectl, "deployments")


def test_an_object_that_is_suspended_or_at_zero_is_not_scaled(kubectl: Kubectl) -> None:
    apply(kubectl, "stopped", AUTOSCALING, suspend=True)
    wait_for(kubectl, "stopped", "Autoscaled", "AutoscalingPaused")
    behavior = found(kubectl, AUTOSCALERS, "stopped")["spec"]["behavior"]
    assert {behavior[way]["selectPolicy"] for way in ("scaleUp", "scaleDown")} == {"Disabled"}
    apply(kubectl, "stopped", AUTOSCALING)
    wait_for(kubectl, "stopped", "Autoscaled", "MetricsUnavailable")
    kubectl.must("scale", "sdd/stopped", "--replicas=0")
    wait_for(kubectl, "stopped", "Autoscaled", "AutoscalingPaused")

    def disabled() -> bool:
        told = kubectl.object(AUTOSCALERS, "stopped")["status"].get("conditions", [])
        return any(each["reason"] == "ScalingDisabled" for each in told)

    eventually(disabled, "Kubernetes does not scale up from zero")
    assert kubectl.object("sdd", "stopped")["spec"]["replicas"] == 0


def test_replicas_in_the_manifest_are_a_start_and_reported(kubectl: Kubectl) -> None:
    apply(kubectl, "both", {**AUTOSCALING, "minReplicas": 1}, replicas=3)
    eventually(lambda: kubectl.object("deployment", "both")["spec"]["replicas"] == 3, "engines start with that number")
    # The condition reports it once the autoscaler works, which needs metrics.
    wait_for(kubectl, "both", "Autoscaled", "MetricsUnavailable")


def test_engines_run_without_keda_and_the_scaled_object_follows_when_it_comes(kubectl: Kubectl) -> None:
    apply(kubectl, "early", {**AUTOSCALING, **KEDA})
    wait_for(kubectl, "early", "Autoscaled", "KedaMissing")
    assert "early" in names(kubectl, "deployments")
    assert "early" not in names(kubectl, AUTOSCALERS)

    file = binaries.keda_crds() / "keda.sh_scaledobjects.yaml"
    kubectl.must("apply", "--server-side", f"--filename={file}")
    kubectl.wait_for_crds(SCALED_OBJECTS)
    made = found(kubectl, SCALED_OBJECTS, "early")
    assert made["spec"]["scaleTargetRef"]["kind"] == "SpecDecodeDeployment"
    wait_for(kubectl, "early", "Autoscaled", "AutoscalerPending")
    ready = [{"type": "Ready", "status": "True", "reason": "ScaledObjectReady", "message": "m"}]
    patch = json.dumps({"status": {"conditions": ready}})
    kubectl.must("patch", SCALED_OBJECTS, "early", "--subresource=status", "--type=merge", f"--patch={patch}")
    wait_for(kubectl, "early", "Autoscaled", "AutoscalerActive")

    change = json.dumps({"spec": {"maxReplicaCount": 99}})
    kubectl.must("patch", SCALED_OBJECTS, "early", "--type=merge", f"--patch={change}", "--field-manager=somebody")
    eventually(
        lambda: kubectl.object(SCALED_OBJECTS, "early")["spec"]["maxReplicaCount"] == 4, "the ScaledObject is as before"
    )
    apply(kubectl, "early", AUTOSCALING)
    found(kubectl, AUTOSCALERS, "early")
    eventually(lambda: "early" not in names(kubectl, SCALED_OBJECTS), "the ScaledObject is gone")


def test_the_example_gets_its_autoscaler(kubectl: Kubectl) -> None:
    kubectl.add_node("h200-0", H200)
    kubectl.must("apply", f"--filename={EXAMPLE}")
    asked_for = yaml.safe_load(EXAMPLE.read_text())["spec"]["autoscaling"]
    spec = found(kubectl, AUTOSCALERS, EXAMPLE.stem)["spec"]
    assert spec["maxReplicas"] == asked_for["maxReplicas"]
