"""Llama-3.1-405B with its 8B draft on two simulated machines, through the real LeaderWorkerSet controller."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from devcluster.cluster.cluster import Cluster
from devcluster.cluster.nodes import parse
from specdecode_operator.deployment.attestation.statement import pods_of
from specdecode_operator.deployment.rollout.engine_workload import pod_templates
from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl
from tests.support.objects import H100, H200
from tests.support.rest import Rest
from tests.support.waiting import eventually

EXAMPLE = Path(__file__).parents[3] / "examples" / "llama-405b-two-nodes.yaml"
OVERLAY = {
    "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}},
    "spec": {"tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}], "terminationGracePeriodSeconds": 31},
}
"""Lets pods of the test onto nodes that only pretend to run them."""

GROUP = "leaderworkerset.sigs.k8s.io/name"
WORKER = "leaderworkerset.sigs.k8s.io/worker-index"
GROUPS = "leaderworkersets.leaderworkerset.x-k8s.io"


def apply(kubectl: Kubectl, **changes: Any) -> str:
    body = yaml.safe_load(EXAMPLE.read_text())
    # Claims of simulated pods are never mounted, but they have to be there.
    body["spec"].pop("models")
    body["spec"] |= {"podTemplate": OVERLAY, **changes}
    answer = kubectl.apply(yaml.safe_dump(body))
    assert answer.returncode == 0, answer.stderr
    return str(body["metadata"]["name"])


def add_fleet(cluster: Cluster, fleet: str) -> None:
    cluster.add_fake_nodes(parse(f"kwok={fleet}").fake)


def engine_pods(kubectl: Kubectl) -> list[dict[str, Any]]:
    pods = kubectl.objects("pods", f"--selector={GROUP}")
    return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))


def running(
    kubectl: Kubectl, count: int, also: Callable[[dict[str, Any]], bool] = lambda _: True
) -> list[dict[str, Any]]:
    """Wait until exactly so many pods of groups run, all of them as wanted."""

    def look() -> list[dict[str, Any]] | None:
        pods = engine_pods(kubectl)
        states = [(pod["metadata"]["name"], pod["status"].get("phase"), also(pod)) for pod in pods]
        assert len(pods) == count, states
        assert all(phase == "Running" and wanted for _, phase, wanted in states), states
        return pods

    return eventually(look, f"{count} pods of groups run")


def value_of(pod: dict[str, Any], flag: str) -> str:
    command = pod["spec"]["containers"][0]["command"]
    value: str = command[command.index(flag) + 1]
    return value


def variables(pod: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}


def test_405b_runs_on_two_nodes_through_rollout_scaling_and_move(cluster: Cluster, kubectl: Kubectl) -> None:
    add_fleet(cluster, "2xH100:8")
    try:
        _waits_until_leaderworkersets_are_there(cluster, kubectl)
        _lies_on_two_nodes(kubectl)
        _rolls_and_scales(cluster, kubectl)
        _goes_over_to_one_node(cluster, kubectl)
    finally:
        kubectl("delete", "sdd", "--all", "--wait=true")
        cluster.remove_fake_nodes()


def _waits_until_leaderworkersets_are_there(cluster: Cluster, kubectl: Kubectl) -> None:
    name = apply(kubectl)
    message = wait_for(kubectl, name, "Ready", "LeaderWorkerSetMissing")
    assert "2 nodes x 8 x NVIDIA-H100-80GB-HBM3" in message
    assert "https://lws.sigs.k8s.io" in message
    assert condition(kubectl, name, "Ready")[0] == "Unknown"
    assert kubectl("get", "service", name).returncode != 0
    cluster.add_lws()
    wait_for(kubectl, name, "Planned", "Fits")


def _lies_on_two_nodes(kubectl: Kubectl) -> None:
    name = "llama-405b"
    leader, worker = running(kubectl, 2)
    assert {pod["spec"]["nodeName"] for pod in (leader, worker)} == {"h100-0", "h100-1"}
    for rank, pod in enumerate((leader, worker)):
        assert pod["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
        assert pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
        assert pod["metadata"]["labels"][WORKER] == str(rank)
        assert value_of(pod, "--nnodes") == "2"
        assert value_of(pod, "--node-rank") == "$(LWS_WORKER_INDEX)"
        env = variables(pod)
        assert env["LWS_WORKER_INDEX"] == str(rank), "what the kubelet puts in for it"
        assert env["LWS_LEADER_ADDRESS"] == f"{name}-lws-0.{name}-lws.{kubectl.namespace}"
    groups = kubectl.object(GROUPS, f"{name}-lws")
    assert groups["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    attested = [pods_of(each) for each in pod_templates(groups)]
    assert [pods_of(leader), pods_of(worker)] == attested, "a webhook that asks for attestations lets them start"
    wait_for(kubectl, name, "Ready", "Serving")
    status = kubectl.object("sdd", name)["status"]
    assert (status["plan"]["nodesPerReplica"], status["plan"]["gpusPerReplica"]) == (2, 16)
    assert (status["replicas"], status["readyReplicas"]) == (1, 1)
    eventually(lambda: _served_by(kubectl, name) == [leader["metadata"]["name"]], "the leader serves")
    before = kubectl.object(GROUPS, f"{name}-lws")["metadata"]["generation"]
    kubectl.must("annotate", "sdd", name, "touched=yes")
    Rest(kubectl).settle()
    assert kubectl.object(GROUPS, f"{name}-lws")["metadata"]["generation"] == before, "a second look changes nothing"


def _served_by(kubectl: Kubectl, name: str) -> list[str]:
    slices = kubectl.objects("endpointslices", f"--selector=kubernetes.io/service-name={name}")
    return sorted(end["targetRef"]["name"] for each in slices for end in each["endpoints"] or [])


def _rolls_and_scales(cluster: Cluster, kubectl: Kubectl) -> None:
    name = "llama-405b"
    old = {pod["metadata"]["uid"] for pod in engine_pods(kubectl)}
    apply(kubectl, serving={"maxModelLen": 4096})
    pods = running(kubectl, 2, lambda pod: value_of(pod, "--max-model-len") == "4096")
    assert not old & {pod["metadata"]["uid"] for pod in pods}
    wait_for(kubectl, name, "Ready", "Serving")

    add_fleet(cluster, "2xH100:8")
    kubectl.must("scale", "sdd", name, "--replicas=2")
    running(kubectl, 4)
    eventually(lambda: kubectl.object("sdd", name)["status"]["readyReplicas"] == 2, "both replicas serve")
    eventually(lambda: _served_by(kubectl, name) == [f"{name}-lws-0", f"{name}-lws-1"], "both leaders serve")
    budget = kubectl.object("poddisruptionbudget", name)
    assert budget["spec"]["selector"]["matchLabels"] == {GROUP: f"{name}-lws"}

    kubectl.must("patch", "sdd", name, "--type=merge", '--patch={"spec":{"suspend":true}}')
    eventually(lambda: not engine_pods(kubectl), "no engine is left")
    wait_for(kubectl, name, "Ready", "Suspended")


def _goes_over_to_one_node(cluster: Cluster, kubectl: Kubectl) -> None:
    """Of a mixed fleet a plan takes what has room: eight H200 hold what two nodes of H100 do."""
    name = "llama-405b"
    add_fleet(cluster, "1xH200:8")
    changes = {"parallelism": {"tensor": 8}, "accelerator": {"products": [H100, H200]}}
    apply(kubectl, suspend=False, replicas=1, **changes)
    wait_for(kubectl, name, "Ready", "Serving")
    eventually(lambda: kubectl("get", GROUPS, f"{name}-lws").returncode != 0, "its groups are removed")
    eventually(lambda: not engine_pods(kubectl), "the groups are gone")
    status = kubectl.object("sdd", name)["status"]
    assert (status["plan"]["product"], status["plan"]["nodesPerReplica"]) == (H200, 1)
    (pod,) = kubectl.objects("pods", f"--selector=specdecode.io/deployment={name}")
    assert pod["spec"]["nodeName"].startswith("h200")
    assert json.loads(kubectl.must("get", "deployment", name, "--output=json"))["status"]["readyReplicas"] == 1
