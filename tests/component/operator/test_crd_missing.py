"""The operator may be started before its CRDs are there."""

from pathlib import Path

import yaml

from devcluster.cluster.cluster import Cluster
from tests.support.kubectl import Kubectl
from tests.support.objects import tiny_cpu
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually


def test_operator_waits_for_missing_crd_and_then_plans(bare_cluster: Cluster, tmp_path: Path) -> None:
    operator = OperatorProcess(bare_cluster.kubeconfig, tmp_path / "log")
    operator.start()
    try:
        kubectl = Kubectl(bare_cluster.kubeconfig)
        eventually(lambda: "CRD" in operator.log.read_text(), "the log says that a CRD is missing")
        kubectl.install_crds()
        body = {
            "apiVersion": "specdecode.io/v1alpha1",
            "kind": "SpecDecodeDeployment",
            "metadata": {"name": "tiny"},
            "spec": tiny_cpu(),
        }
        assert kubectl.apply(yaml.safe_dump(body)).returncode == 0
        eventually(lambda: "plan" in kubectl.object("sdd", "tiny").get("status", {}), "the object is planned")
    finally:
        assert operator.stop() == 0
