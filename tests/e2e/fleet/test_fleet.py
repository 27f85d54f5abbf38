"""Llama-3.1-70B with its 8B draft on simulated H100 and H200 machines."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster.cluster.cluster import Cluster
from devcluster.cluster.nodes import parse
from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl
from tests.support.objects import H100, H200
from tests.support.waiting import eventually

EXAMPLES = Path(__file__).parents[3] / "examples"
OURS = "--selector=app.kubernetes.io/managed-by=specdecode-operator"
SIMULATED = {"spec": {"tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]}}
"""Lets pods of the test onto nodes that only pretend to run them."""


@pytest.fixture(autouse=True)
def _no_fleet_left(cluster: Cluster, kubectl: Kubectl) -> Iterator[None]:
    yield
    kubectl.must("delete", "sdd", "--all")
    cluster.remove_fake_nodes()


def apply_example(kubectl: Kubectl, example: str) -> str:
    body = yaml.safe_load((EXAMPLES / example).read_text())
    body["spec"]["podTemplate"] = SIMULATED
    answer = kubectl.apply(yaml.safe_dump(body))
    assert answer.returncode == 0, answer.stderr
    name: str = body["metadata"]["name"]
    return name


def pods_of(kubectl: Kubectl, name: str) -> list[dict[str, Any]]:
    return kubectl.objects("pods", f"--selector=specdecode.io/deployment={name}")


def running_pod(kubectl: Kubectl, name: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        pods = [pod for pod in pods_of(kubectl, name) if pod["status"].get("phase") == "Running"]
        return pods[0] if pods else None

    return eventually(look, f"a pod of {name} runs")


def product_of_node(kubectl: Kubectl, pod: dict[str, Any]) -> str:
    product: str = kubectl.object("node", pod["spec"]["nodeName"])["metadata"]["labels"]["nvidia.com/gpu.product"]
    return product


def argument(pod: dict[str, Any], flag: str) -> str:
    command = pod["spec"]["containers"][0]["command"]
    value: str = command[command.index(flag) + 1]
    return value


def add_fleet(cluster: Cluster, fleet: str) -> None:
    cluster.add_fake_nodes(parse(f"kwok={fleet}").fake)


def test_bf16_does_not_fit_h100_and_runs_on_h200_once_added(cluster: Cluster, kubectl: Kubectl) -> None:
    add_fleet(cluster, "2xH100:8")
    name = apply_example(kubectl, "llama-70b.yaml")
    message = wait_for(kubectl, name, "Ready", "DoesNotFit")
    assert "weights" in message
    assert "target.quantization: FP8" in message
    assert condition(kubectl, name, "Stalled")[0] == "True"
    assert pods_of(kubectl, name) == []
    assert kubectl("get", "deployment", name).returncode != 0

    add_fleet(cluster, "1xH200:8")
    wait_for(kubectl, name, "Planned", "Fits")
    pod = running_pod(kubectl, name)
    assert product_of_node(kubectl, pod) == H200
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert argument(pod, "--tensor-parallel-size") == "2"
    assert argument(pod, "--max-model-len") == "8192"
    assert '"num_speculative_tokens":5' in argument(pod, "--speculative-config")
    status = kubectl.object("sdd", name)["status"]
    assert status["plan"]["kvCacheTokens"] == 237_168, "the row 2xH200 BF16/BF16 of docs/design/sizing.md"


def test_fp8_target_runs_on_h100(cluster: Cluster, kubectl: Kubectl) -> None:
    add_fleet(cluster, "1xH100:8")
    name = apply_example(kubectl, "llama-70b-fp8.yaml")
    wait_for(kubectl, name, "Planned", "Fits")
    pod = running_pod(kubectl, name)
    assert product_of_node(kubectl, pod) == H100
    assert argument(pod, "--quantization") == "fp8_per_tensor"
    assert kubectl.object("sdd", name)["status"]["plan"]["kvCacheTokens"] == 125_280
    wait_for(kubectl, name, "Ready", "Serving")
    wait_for(kubectl, name, "SpeculationActive", "Unreachable")


def test_plan_chooses_tensor_parallelism_if_spec_omits_it(cluster: Cluster, kubectl: Kubectl) -> None:
    add_fleet(cluster, "1xH100:8")
    name = apply_example(kubectl, "llama-8b-ngram.yaml")
    wait_for(kubectl, name, "Planned", "Fits")
    pod = running_pod(kubectl, name)
    assert argument(pod, "--tensor-parallel-size") == "1"
    assert '"method":"ngram"' in argument(pod, "--speculative-config")
