"""Runs the commands of the notes that Helm prints after an installation, in their order, as a reader would."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from devcluster import chart
from devcluster.cluster.cluster import Cluster
from specdecode_operator.version import __version__
from tests.support.documents import ROOT
from tests.support.kubectl import Kubectl
from tests.support.objects import H100
from tests.support.operator_process import OperatorProcess
from tests.support.played_node import PlayedNode
from tests.support.waiting import eventually

FILLED = {"REGISTRY": "registry.example.com/team"}
"""Values that a reader fills in for names in capitals."""

FIRST = (
    f"helm upgrade --install {chart.RELEASE} charts/{chart.RELEASE} --namespace {chart.NAMESPACE} --create-namespace "
    f"--set image.repository={FILLED['REGISTRY']}/specdecode-operator"
)
OPERATOR_RUNS = {
    "phase": "Running",
    "conditions": [{"type": "Ready", "status": "True"}],
    "containerStatuses": [
        {"name": "operator", "ready": True, "started": True, "restartCount": 0, "image": "", "imageID": ""}
    ],
}

pytestmark = pytest.mark.long


class Reader:
    """Somebody with a clone, who types what is told."""

    def __init__(self, folder: Path, kubeconfig: Path, programs: Path) -> None:
        path = [str(Path(sys.executable).parent), str(programs), os.environ["PATH"]]
        self._environment = {"PATH": os.pathsep.join(path), "HOME": str(folder), "KUBECONFIG": str(kubeconfig)}
        self._folder = folder
        folder.mkdir()
        (folder / "charts").symlink_to(ROOT / "charts")

    def types(self, command: str) -> str:
        """Return what a command prints that must succeed."""
        done = subprocess.run(**self._bash(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}"
        return str(done.stdout)

    def watches(self, command: str, name: str) -> None:
        """Look at a command that does not end until it names something."""
        with subprocess.Popen(**self._bash(command), stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout
                assert any(name in line for line in process.stdout), f"{command} ended without naming {name}"
            finally:
                process.terminate()

    def _bash(self, command: str) -> dict[str, object]:
        return {
            "args": ["timeout", "120", "bash", "-euo", "pipefail", "-c", command],
            "cwd": self._folder,
            "env": self._environment,
            "text": True,
        }


@pytest.fixture
def reader(cluster: Cluster, programs: Path, tmp_path: Path) -> Reader:
    return Reader(tmp_path / "reader", cluster.kubeconfig, programs)


@pytest.fixture
def operator(cluster: Cluster, tmp_path: Path) -> Iterator[OperatorProcess]:
    """What runs in the pod of the installation."""
    process = OperatorProcess(cluster.kubeconfig, tmp_path / "log", "specdecode-operator-0")
    yield process
    process.stop()


def told(said: str) -> list[str]:
    """Return the commands of a chart's notes: its indented lines, with the reader's values filled in."""
    notes = said.partition("\nNOTES:\n")[2].replace("\\\n", "")
    for name, value in FILLED.items():
        notes = re.sub(rf"\b{name}\b", value, notes)
    return [line.strip() for line in notes.splitlines() if line.startswith("  ")]


def planned(kubectl: Kubectl) -> str | None:
    """Return the status of the condition Planned of the deployment that the notes create."""
    conditions = kubectl.object("sdd", "chat").get("status", {}).get("conditions", [])
    return next((str(each["status"]) for each in conditions if each["type"] == "Planned"), None)


def run_the_pods(kubectl: Kubectl) -> None:
    """Do for the operator's pods what a kubelet would do, until none is awaited."""

    def available() -> bool:
        for pod in kubectl.objects("pods"):
            if pod["status"]["phase"] == "Pending":
                kubectl.patch_pod_status(pod["metadata"]["name"], OPERATOR_RUNS)
        status = kubectl.object("deployment", chart.RELEASE)["status"]
        return status.get("updatedReplicas") == status.get("availableReplicas") == status.get("replicas") == 1

    with PlayedNode(kubectl):
        eventually(available, "the operator's pod is available")


def test_commands_of_the_helm_notes_run_in_order(reader: Reader, cluster: Cluster, operator: OperatorProcess) -> None:
    kubectl = Kubectl(cluster.kubeconfig, chart.NAMESPACE)
    kubectl.add_node("gpus", H100)
    kinds, *_ = told(reader.types(FIRST))
    assert "charts/specdecode-crds" in kinds, "the CRDs are missing"
    (install,) = told(reader.types(kinds))
    kubectl.wait_for_crds(*(f"specdecode{each}.specdecode.io" for each in ("deployments", "captures")))
    commands = told(reader.types(install))
    image = kubectl.object("deployment", chart.RELEASE)["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image == f"{FILLED['REGISTRY']}/specdecode-operator:{__version__}"
    assert len(commands) == 4
    run_the_pods(kubectl)
    operator.start()
    for command in commands:
        if command.endswith("--watch"):
            reader.watches(command, "chat")
        else:
            reader.types(command)
    deployed = Kubectl(cluster.kubeconfig, "default").object("sdd", "chat")
    assert deployed["spec"]["speculation"]["method"] == "eagle3"
    assert "models" not in deployed["spec"], "the models need no token"
    eventually(lambda: planned(Kubectl(cluster.kubeconfig, "default")) == "True", "the plan fits on the H100 node")
