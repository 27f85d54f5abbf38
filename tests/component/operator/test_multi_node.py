"""LeaderWorkerSets may come after the operator."""

from pathlib import Path
from typing import Any

import yaml

from devcluster.builds import binaries
from devcluster.cluster.cluster import Cluster
from tests.component.operator.conftest import MANIFESTS
from tests.support.audit import asked
from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl
from tests.support.objects import H100, pair_70b
from tests.support.operator_process import NAMESPACE, OperatorProcess, may, service_account_kubeconfig
from tests.support.waiting import eventually

GROUPS = "leaderworkersets.leaderworkerset.x-k8s.io"
OURS = "--selector=app.kubernetes.io/managed-by=specdecode-operator"
SPEC = pair_70b(
    target={"model": "meta-llama/Llama-3.1-405B-Instruct"},
    parallelism={"tensor": 16},
    # For nodes that are still to come.
    accelerator={"products": [H100], "perNode": 8},
)


def test_operator_uses_leader_worker_set_crd_installed_later(
    bare_cluster: Cluster, tmp_path: Path, asked_elsewhere: set[str]
) -> None:
    kubectl = Kubectl(bare_cluster.kubeconfig)
    kubectl.install_crds()
    admin = Kubectl(bare_cluster.kubeconfig, NAMESPACE)
    admin.must("apply", "--server-side", f"--kustomize={MANIFESTS}")
    eventually(lambda: may(admin, "watch", "nodes"), "the operator has its rights")
    operator = OperatorProcess(service_account_kubeconfig(admin, tmp_path / "kubeconfig"), tmp_path / "log")
    operator.start()
    try:
        _comes_and_is_used(kubectl)
    finally:
        assert operator.stop() == 0
    seen = asked(bare_cluster)
    assert not [each.named for each in seen if not each.allowed]
    asked_elsewhere.update(*(each.rights for each in seen))


def models(cache: str) -> dict[str, Any]:
    """Where models come from, and the claim of the compile cache."""
    claims = {"volume": "models", "cache": cache}
    return {place: {"persistentVolumeClaim": {"claimName": name}} for place, name in claims.items()}


def claim(name: str, mode: str) -> str:
    spec = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}}
    return yaml.safe_dump(
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}
    )


def _comes_and_is_used(kubectl: Kubectl) -> None:
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": "wide"}}
    body["spec"] = SPEC | {"models": models("one-node")}
    for name, mode in {"models": "ReadOnlyMany", "one-node": "ReadWriteOnce", "shared": "ReadWriteMany"}.items():
        assert kubectl.write(claim(name, mode)).returncode == 0
    assert kubectl.write(yaml.safe_dump(body)).returncode == 0
    assert "2 nodes x 8 x NVIDIA-H100-80GB-HBM3" in wait_for(kubectl, "wide", "Ready", "LeaderWorkerSetMissing")
    assert condition(kubectl, "wide", "Ready")[0] == "Unknown"
    assert kubectl.objects("deployments,services", OURS) == [], "nothing is launched"

    (file,) = (binaries.lws_sources() / "crd" / "bases").glob("*.yaml")
    kubectl.must("apply", "--server-side", f"--filename={file}")
    wait_for(kubectl, "wide", "Planned", "Fits")
    assert "spec.models.cache" in wait_for(kubectl, "wide", "Ready", "VolumeNotShared")
    assert kubectl.objects(GROUPS) == []
    body["spec"] = SPEC | {"models": models("shared")}
    assert kubectl.write(yaml.safe_dump(body)).returncode == 0
    groups = eventually(lambda: kubectl.objects(GROUPS), "a group is asked for")
    assert [each["metadata"]["name"] for each in groups] == ["wide-lws"]
    owner = kubectl.object("sdd", "wide")["metadata"]["uid"]
    assert [each["uid"] for each in groups[0]["metadata"]["ownerReferences"]] == [owner]
    pods = groups[0]["spec"]["leaderWorkerTemplate"]
    engines = [pods[role]["spec"]["containers"][0] for role in ("leaderTemplate", "workerTemplate")]
    compiled = [[each for each in engine["volumeMounts"] if each["mountPath"] == "/compiled"] for engine in engines]
    assert compiled[0] == compiled[1] != []

    # Somebody changes it, which is undone.
    kubectl.must("patch", GROUPS, "wide-lws", "--type=merge", '--patch={"spec":{"replicas":7}}')
    eventually(lambda: kubectl.object(GROUPS, "wide-lws")["spec"]["replicas"] == 1, "drift is undone")

    # A model that one node holds takes a Deployment; without engines there is nothing to wait for.
    small = {**body["spec"], "replicas": 0, "target": pair_70b()["target"], "parallelism": {"tensor": 8}}
    assert kubectl.apply(yaml.safe_dump({**body, "spec": small})).returncode == 0
    eventually(lambda: not kubectl.objects(GROUPS), "the group is gone")
    assert [each["metadata"]["name"] for each in kubectl.objects("deployments", OURS)] == ["wide"]
    assert kubectl.apply(yaml.safe_dump({**body, "spec": {**body["spec"], "replicas": 0}})).returncode == 0
    eventually(lambda: not kubectl.objects("deployments", OURS), "the Deployment is gone")
