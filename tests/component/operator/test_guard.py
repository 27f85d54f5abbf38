"""What a stolen token of the operator is good for under the chart's guard, and that the operator works under it."""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import yaml

from devcluster import chart
from devcluster.cluster.cluster import Cluster
from tests.support.conditions import wait_for
from tests.support.kubectl import Kubectl
from tests.support.objects import tiny_cpu
from tests.support.operator_process import USER, OperatorProcess
from tests.support.waiting import eventually

OURS = {"app.kubernetes.io/managed-by": "specdecode-operator"}
POD: dict[str, Any] = {"automountServiceAccountToken": False, "containers": [{"name": "c", "image": "i:1"}]}
PODS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"serviceAccountName": "builder"}, "runs as another account"),
    ({"automountServiceAccountToken": True}, "a token of its own"),
    ({"hostNetwork": True}, "hostNetwork"),
    ({"hostPID": True}, "hostPID"),
    ({"hostIPC": True}, "hostIPC"),
    ({"containers": [{"name": "c", "image": "i:1", "securityContext": {"privileged": True}}]}, "is privileged"),
    (
        {"initContainers": [{"name": "d", "image": "i:1", "securityContext": {"capabilities": {"add": ["BPF"]}}}]},
        "capabilities that are not allowed",
    ),
    ({"volumes": [{"name": "v", "hostPath": {"path": "/etc"}}]}, "a directory of its node"),
    (
        {"volumes": [{"name": "v", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]},
        "a token in a volume",
    ),
)


@pytest.fixture
def stolen(crds: Cluster, kubectl: Kubectl, operator: OperatorProcess) -> Iterator[Kubectl]:
    """The test's namespace, where the guard is in force."""
    del operator
    printed = chart.template("--set=operatorGuard.enabled=true")
    guard = [each for each in yaml.safe_load_all(printed) if each and "AdmissionPolicy" in each["kind"]]
    assert len(guard) == 2
    cluster = Kubectl(crds.kubeconfig)
    manifest = yaml.safe_dump_all(guard)
    cluster.must("apply", "--server-side", "--filename=-", stdin=manifest)
    eventually(lambda: "its own children" in refusal(kubectl, config_map(labels={})), "the guard is in force")
    yield kubectl
    cluster.must("delete", "--filename=-", stdin=manifest)


def config_map(labels: dict[str, str], namespace: str | None = None) -> dict[str, Any]:
    where = {"namespace": namespace} if namespace else {}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x", "labels": labels, **where}}


def workload(kind: str, pod: dict[str, Any]) -> dict[str, Any]:
    labels = {"a": "b"}
    template = {"metadata": {"labels": labels}, "spec": pod}
    if kind == "Job":
        spec: dict[str, Any] = {"template": {**template, "spec": {**pod, "restartPolicy": "Never"}}}
    else:
        spec = {"selector": {"matchLabels": labels}, "template": template}
    version = "batch/v1" if kind == "Job" else "apps/v1"
    return {"apiVersion": version, "kind": kind, "metadata": {"name": "x", "labels": OURS}, "spec": spec}


def refusal(kubectl: Kubectl, body: dict[str, Any]) -> str:
    """What whoever has the operator's token is told about something they apply; empty where it goes through."""
    options = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--filename=-", f"--as={USER}")
    answer = kubectl(*options, stdin=json.dumps(body))
    return answer.stderr if answer.returncode else ""


def test_a_stolen_token_gets_no_pod_that_reaches_further(stolen: Kubectl) -> None:
    for kind in ("Deployment", "Job"):
        assert refusal(stolen, workload(kind, POD)) == "", "as its own are"
    for number, (change, told) in enumerate(PODS):
        assert told in refusal(stolen, workload(("Deployment", "Job")[number % 2], {**deepcopy(POD), **change}))


def test_a_stolen_token_writes_nothing_but_the_operators_children(stolen: Kubectl) -> None:
    system = stolen.within("kube-system")
    assert "where the cluster itself runs" in refusal(system, config_map(OURS))
    stolen.must("create", "configmap", "theirs")
    theirs = {**config_map(OURS), "data": {"a": "b"}}
    theirs["metadata"]["name"] = "theirs"
    assert "changes and deletes nothing" in refusal(stolen, theirs)
    assert "changes and deletes nothing" in stolen("delete", "configmap", "theirs", f"--as={USER}").stderr
    capture = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeCapture", "metadata": {"name": "x"}}
    assert "of a SpecDecodeDeployment alone" in refusal(stolen, {**capture, "spec": {"deployment": "tiny"}})


def test_a_stolen_token_evicts_nobody_where_the_cluster_runs(stolen: Kubectl) -> None:
    for namespace, told in ((stolen, ""), (stolen.within("kube-system"), "where the cluster itself runs")):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "evicted"}, "spec": POD}
        namespace.must("create", "--filename=-", stdin=json.dumps(pod))
        path = f"/api/v1/namespaces/{namespace.namespace}/pods/evicted/eviction"
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "evicted"}}
        answer = namespace("create", f"--raw={path}", "--filename=-", f"--as={USER}", stdin=json.dumps(eviction))
        assert told in answer.stderr
        assert bool(told) == bool(answer.returncode), answer.stderr


def test_the_operator_works_under_its_guard(stolen: Kubectl) -> None:
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": "tiny"}}
    assert stolen.apply(yaml.safe_dump({**body, "spec": tiny_cpu(replicas=2)})).returncode == 0
    wait_for(stolen, "tiny", "Planned", "Fits")
    eventually(lambda: stolen.objects("deployments"), "engines are started")
    stolen.must("patch", "service", "tiny", "--type=merge", '--patch={"spec":{"sessionAffinity":"ClientIP"}}')
    stolen.must("label", "deployment", "tiny", "app.kubernetes.io/managed-by-")
    eventually(
        lambda: (
            stolen.object("service", "tiny")["spec"]["sessionAffinity"] == "None"
            and stolen.object("deployment", "tiny")["metadata"]["labels"].items() >= OURS.items()
        ),
        "what somebody changed is put right",
    )
    assert stolen.apply(yaml.safe_dump({**body, "spec": tiny_cpu()})).returncode == 0
    eventually(lambda: not stolen.objects("poddisruptionbudgets"), "a child that is no longer wanted is deleted")
    asked = {**body, "kind": "SpecDecodeCapture", "spec": {"deployment": "tiny", "deploymentDuringCapture": "Suspend"}}
    assert stolen.apply(yaml.safe_dump(asked)).returncode == 0
    eventually(lambda: stolen.objects("jobs") and stolen.objects("pvc"), "a capture gets its claim and its Job")
