"""An operator of one namespace, with the Roles of the chart and no others, beside one of the whole cluster."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import yaml

from devcluster import chart
from devcluster.cluster.cluster import Cluster
from specdecode_operator.cluster.rights import SERVES
from tests.support.audit import asked
from tests.support.conditions import wait_for
from tests.support.kubectl import Kubectl
from tests.support.objects import H200, pair_70b, tiny_cpu
from tests.support.operator_process import NAMESPACE, USER, OperatorProcess, service_account_kubeconfig
from tests.support.waiting import eventually

ITS_USER = USER.replace("specdecode-operator", "team-specdecode-operator")
FLEET = f'--set-json=fleet.nodes=[{{"name":"given","product":"{H200}","gpus":8}}]'


@contextmanager
def operator_of(crds: Cluster, namespace: str, release: str, folder: Path) -> Iterator[OperatorProcess]:
    """Run an operator of one namespace, as the chart installs it; its nodes are those of the values."""
    account = f"{release}-specdecode-operator"
    admin = Kubectl(crds.kubeconfig, NAMESPACE)
    options = (f"--set=watchNamespaces={{{namespace}}}", "--set=userRoles.create=false", FLEET)
    objects = [each for each in yaml.safe_load_all(chart.template(*options, release=release)) if each]
    kept = [each for each in objects if each["kind"] != "Deployment"]
    assert all("namespace" in each["metadata"] for each in kept)
    for each in kept:
        place = Kubectl(crds.kubeconfig, each["metadata"]["namespace"])
        place.must("apply", "--server-side", "--filename=-", stdin=yaml.safe_dump(each))
    (config_map,) = (each for each in kept if each["kind"] == "ConfigMap")
    folder.mkdir(exist_ok=True)
    nodes = folder / "nodes.json"
    nodes.write_text(config_map["data"]["nodes.json"])
    kubeconfig = service_account_kubeconfig(admin, folder / "kubeconfig", account)
    served, its_user = admin.within(namespace), f"--as=system:serviceaccount:{NAMESPACE}:{account}"
    eventually(lambda: served("auth", "can-i", "watch", "pods", its_user).returncode == 0, "it has its rights")
    arguments = (f"--namespace={namespace}", f"--nodes={nodes}")
    process = OperatorProcess(kubeconfig, folder / "log", arguments=arguments)
    process.start()
    yield process
    assert process.stop() == 0


@pytest.fixture
def named(crds: Cluster, kubectl: Kubectl, operator: OperatorProcess, tmp_path: Path) -> Iterator[OperatorProcess]:
    """An operator of the test's namespace, beside that of the whole cluster."""
    del operator  # of the whole cluster
    with operator_of(crds, kubectl.namespace, "team", tmp_path) as process:
        yield process


def apply(kubectl: Kubectl, name: str, spec: object) -> None:
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": name}}
    answer = kubectl.apply(yaml.safe_dump({**body, "spec": spec}))
    assert answer.returncode == 0, answer.stderr


def test_namespaced_operator_serves_only_its_namespace_with_minimal_rights(
    crds: Cluster, kubectl: Kubectl, operator: OperatorProcess, named: OperatorProcess
) -> None:
    def may_write(name: str) -> bool:
        own, metadata = Kubectl(crds.kubeconfig, NAMESPACE), {"name": name, "namespace": NAMESPACE}
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
        answer = own("apply", "--server-side", "--filename=-", f"--as={ITS_USER}", stdin=yaml.safe_dump(body))
        return answer.returncode == 0

    left = f"namespace {kubectl.namespace} is skipped"
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

    assert (may_write("team-specdecode-operator-snapshot"), may_write("x")) == (True, False)
    assert named.stop() == 0
    assert not kubectl.object("lease", SERVES)["spec"].get("holderIdentity")
    kubectl.must("scale", "sdd", "tiny", "--replicas=2")
    eventually(
        lambda: kubectl.object("deployment", "tiny")["spec"]["replicas"] == 2,
        "the operator of the cluster takes the namespace on",
    )


@pytest.mark.long
def test_two_namespaced_operators_serve_separate_namespaces(crds: Cluster, kubectl: Kubectl, tmp_path: Path) -> None:
    """Neither asks about what is the other's, and objects of one name are served in both."""
    there = Kubectl(crds.kubeconfig, f"{kubectl.namespace}-there")
    kubectl.must("create", "namespace", there.namespace)
    places = {"here": kubectl, "there": there}
    with ExitStack() as operators:
        for release, place in places.items():
            operators.enter_context(operator_of(crds, place.namespace, release, tmp_path / release))
        for place in places.values():
            apply(place, "tiny", tiny_cpu())
        for place in places.values():
            wait_for(place, "tiny", "Planned", "Fits")
            eventually(partial(place.objects, "deployments"), "its engines are started")
    for release, place in places.items():
        its = [each for each in asked(crds) if each.user.endswith(f":{release}-specdecode-operator")]
        assert {each.namespace for each in its} == {place.namespace}
        assert [each.named for each in its if not each.allowed] == []
    kubectl.must("delete", "namespace", there.namespace, "--wait=false")
