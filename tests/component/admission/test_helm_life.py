"""The chart from its first installation to its removal: Helm itself, on an API server that has never seen our kinds."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from devcluster import chart
from devcluster.cluster.cluster import Cluster
from devcluster.host.paths import REPOSITORY
from specdecode_operator.version import __version__
from tests.support.captures import capture_spec
from tests.support.kubectl import Kubectl, program
from tests.support.objects import Body, tiny_cpu
from tests.support.waiting import eventually

Helm = Callable[..., subprocess.CompletedProcess[str]]
CRDS = "specdecode-crds"
IMAGE = f"--values={chart.DEVELOPMENT}"
KINDS = tuple(f"specdecode{each}.specdecode.io" for each in ("deployments", "captures", "trainings"))


@pytest.fixture
def helm(bare_cluster: Cluster, tmp_path: Path) -> Helm:
    """Runs Helm as a person would, in the namespace that the documents name."""
    folders = {f"HELM_{each}_HOME": str(tmp_path / each) for each in ("CACHE", "CONFIG", "DATA")}
    environment = {**os.environ, **folders, "KUBECONFIG": str(bare_cluster.kubeconfig)}

    def run(*arguments: object, namespace: str = chart.NAMESPACE) -> subprocess.CompletedProcess[str]:
        command = [program("helm"), *map(str, arguments), f"--namespace={namespace}"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run


def must(answer: subprocess.CompletedProcess[str]) -> str:
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """The charts of a release before: a CRD lacks a field."""
    for folder in (chart.CRDS, chart.CHART):
        shutil.copytree(folder, tmp_path / folder.name)
        file = tmp_path / folder.name / "Chart.yaml"
        file.write_text(file.read_text().replace(__version__, "0.0.9"))
    file = tmp_path / chart.CRDS.name / "files" / "specdecode.io_specdecodedeployments.yaml"
    crd = yaml.safe_load(file.read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["serving"]["properties"]["blockSize"]
    file.write_text(yaml.safe_dump(crd, sort_keys=False))
    return tmp_path


def ours(kind: str, name: str, spec: Body) -> str:
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
    return yaml.safe_dump(body)


def test_objects_survive_helm_upgrade_rollback_and_uninstall(
    helm: Helm, older: Path, bare_cluster: Cluster, tmp_path: Path
) -> None:
    kubectl = Kubectl(bare_cluster.kubeconfig)
    operator = kubectl.within(chart.NAMESPACE)

    def replicas() -> int:
        return int(operator.object("deployment", chart.RELEASE)["spec"]["replicas"])

    def kept() -> dict[str, tuple[str, int, Body]]:
        """What must stay as it is: objects, their status, and the files of a capture."""
        bodies = kubectl.objects("sdd,sdc,pvc")
        return {
            f"{body['kind']} {body['metadata']['name']}": (
                body["metadata"]["uid"],
                body["metadata"].get("generation", 0),
                body.get("status") or {},
            )
            for body in bodies
        }

    must(helm("install", CRDS, older / chart.CRDS.name, "--create-namespace"))
    kubectl.wait_for_crds(*KINDS)
    said = must(helm("install", chart.RELEASE, older / chart.CHART.name, IMAGE))
    assert "rollout status deployment/specdecode-operator" in said
    assert "CRDs are not installed" not in said
    assert kubectl.apply(ours("SpecDecodeDeployment", "tiny", tiny_cpu(replicas=2))).returncode == 0
    assert kubectl.apply(ours("SpecDecodeCapture", "night", capture_spec(deployment="tiny"))).returncode == 0
    kubectl.patch_status("tiny", {"observedGeneration": 1})
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    body = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "night-capture"}, "spec": claim}
    assert kubectl.apply(yaml.safe_dump(body)).returncode == 0
    before = kept()
    assert len(before) == 3

    # A second operator for all namespaces, and a second release of the CRDs.
    refused = helm("install", "another", chart.CHART, IMAGE, "--create-namespace", namespace="elsewhere")
    assert f"namespace {chart.NAMESPACE} ({chart.RELEASE}) already serves all namespaces" in refused.stderr
    assert "upgrade or remove that one" in refused.stderr
    assert CRDS in helm("install", "kinds", chart.CRDS).stderr

    newer = ours("SpecDecodeDeployment", "new", tiny_cpu(serving={"blockSize": 32}))
    assert "unknown field" in kubectl.apply(newer, "--dry-run=server").stderr
    must(helm("upgrade", CRDS, chart.CRDS))
    eventually(lambda: "unknown field" not in kubectl.apply(newer, "--dry-run=server").stderr, "the field is known")
    assert kept() == before

    must(helm("upgrade", chart.RELEASE, chart.CHART, IMAGE, f"--values={chart.EXAMPLES / 'ha.yaml'}"))
    assert (replicas(), kept()) == (2, before)
    assert operator("get", "poddisruptionbudget", chart.RELEASE).returncode == 0
    must(helm("rollback", chart.RELEASE, "1"))
    assert (replicas(), kept()) == (1, before)
    assert operator("get", "poddisruptionbudget", chart.RELEASE).returncode != 0
    assert "unknown field" not in kubectl.apply(newer, "--dry-run=server").stderr, "the CRDs are not rolled back"

    must(helm("uninstall", chart.RELEASE))
    left = {*operator.must("get", "deploy,sa,role,rolebinding,svc,cm", "--output=name").split()}
    assert left == {"serviceaccount/default", "configmap/kube-root-ca.crt"}
    assert chart.RELEASE not in kubectl.must("get", "clusterrole,clusterrolebinding", "--output=name")
    must(helm("uninstall", CRDS))
    assert kept() == before
    # Of those that kubectl has installed, as of those that a release of another name has.
    kubectl.must("apply", "--server-side", f"--kustomize={REPOSITORY / 'crds'}")
    must(helm("install", "kinds", chart.CRDS, "--take-ownership"))
    must(helm("install", CRDS, chart.CRDS, "--take-ownership"))
    assert "kinds" in must(helm("list"))
    must(helm("uninstall", "kinds"))
    assert kept() == before
    must(helm("install", chart.RELEASE, chart.CHART, IMAGE))
    assert (replicas(), kept()) == (1, before)
