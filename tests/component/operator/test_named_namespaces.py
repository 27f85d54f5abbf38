"""An operator of one namespace, with the Roles of the chart and no others, beside one of the whole cluster."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from devcluster import chart
from devcluster.cluster.cluster import Cluster
from specdecode_operator.kube.rights import SERVES
from tests.support.audit import asked
from tests.support.conditions import wait_for
from tests.support.kubectl import Kubectl
from tests.support.objects import H200, pair_70b, tiny_cpu
from tests.support.operator_process import NAMESPACE, USER, OperatorProcess, service_account_kubeconfig
from tests.support.waiting import eventually

ACCOUNT = "team-specdecode-operator"
ITS_USER = USER.replace("specdecode-operator", ACCOUNT)
FLEET = f'--set-json=fleet.nodes=[{{"name":"given","product":"{H200}","gpus":8}}]'


@pytest.fixture
def named(crds: Cluster, kubectl: Kubectl, operator: OperatorProcess, tmp_path: Path) -> Iterator[OperatorProcess]:
    """An operator of the test's namespace, as the chart installs it; its nodes are those of the values."""
    del operator  # of the whole cluster, which runs beside it
    admin = Kubectl(crds.kubeconfig, NAMESPACE)
    options = (f"--set=watchNamespaces={{{kubectl.namespace}}}", "--set=userRoles.create=false", FLEET)
    objects = [each for each in yaml.safe_load_all(chart.template(*options, release="team")) if each]
    kept = [each for each in objects if each["kind"] != "Deployment"]
    assert all("namespace" in each["metadata"] for each in kept)
    for each in kept:
        place = Kubectl(crds.kubeconfig, each["metadata"]["namespace"])
        place.must("apply", "--server-side", "--filename=-", stdin=yaml.safe_dump(each))
    (config_map,) = (each for each in kept if each["kind"] == "ConfigMap")
    nodes = tmp_path / "nodes.json"
    nodes.write_text(config_map["data"]["nodes.json"])
    kubeconfig = service_account_kubeconfig(admin, tmp_path / "kubeconfig", ACCOUNT)
    arguments = (f"--namespace={kubectl.namespace}", f"--nodes={nodes}")
    process = OperatorProcess(kubeconfig, tmp_path / "log", arguments=arguments)
    process.start()
    yield process
    assert process.stop() == 0


def apply(kubectl: Kubectl, name: str, spec: object) -> None:
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": name}}
    answer = kubectl.apply(yaml.safe_dump({**body, "spec": spec}))
    assert answer.returncode == 0, answer.stderr


def test_each_namespace_has_one_operator_with_no_more_rights_than_it_needs(
    crds: Cluster, kubectl: Kubectl, operator: OperatorProcess, named: OperatorProcess
) -> None:
    left = f"namespace {kubectl.namespace} is left alone"
    eventually(lambda: left in operator.tail(100_000), "the operator of the cluster sees the claim")
    apply(kubectl, "pair", pair_70b())
    assert H200 in wait_for(kubectl, "pair", "Planned", "Fits"), "this control plane has no node with GPUs"
    apply(kubectl, "tiny", tiny_cpu())
    wait_for(kubectl, "tiny", "Planned", "Fits")
    eventually(lambda: len(kubectl.objects("deployments")) == 2, "its engines are started")

    here = [each for each in asked(crds) if each.namespace == kubectl.namespace]
    writers = {each.user for each in here if each.permission.startswith(("create", "patch", "delete"))}
    assert writers == {ITS_USER}
    its = [each for each in asked(crds) if each.user == ITS_USER]
    assert {each.namespace for each in its} == {kubectl.namespace}, "it asks about no other, nor the cluster"
    assert [each.named for each in its if not each.allowed] == []

    assert named.stop() == 0
    assert not kubectl.object("lease", SERVES)["spec"].get("holderIdentity")
    kubectl.must("scale", "sdd", "tiny", "--replicas=2")
    eventually(
        lambda: kubectl.object("deployment", "tiny")["spec"]["replicas"] == 2,
        "the operator of the cluster takes the namespace on",
    )
