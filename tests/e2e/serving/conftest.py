"""What is watched while all these tests run."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from devcluster.cluster.cluster import Cluster
from tests.support import traffic_recorder
from tests.support.kubectl import Kubectl, program
from tests.support.waiting import eventually


@dataclass(frozen=True)
class Watched:
    """Files that grow: connections, as the recorder writes them, and pods as JSON, whenever one changes."""

    connections: Path
    pods: Path


@pytest.fixture(scope="session", autouse=True)
def watched(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    found = Watched(folder / "connections", folder / "pods")
    # It ends with the cluster.
    recorder = [sys.executable, traffic_recorder.__file__, str(found.connections)]
    threading.Thread(target=cluster.in_namespace, args=(recorder,), daemon=True).start()
    watch = ["get", "pods", "--all-namespaces", "--watch", "--output=json"]
    with found.pods.open("wb") as pods:
        watching = subprocess.Popen([program("kubectl"), f"--kubeconfig={cluster.kubeconfig}", *watch], stdout=pods)
        eventually(lambda: found.connections.exists() and found.connections.stat().st_size, "connections are recorded")
        yield found
        watching.terminate()
        watching.wait()


@pytest.fixture
def small_volume(cluster: Cluster, kubectl: Kubectl) -> Iterator[Callable[[str, int], str]]:
    """Create a claim with exactly the given MiB of room; return its path on the node."""
    made: list[tuple[str, str]] = []

    def make(name: str, mib: int) -> str:
        path = f"{cluster.state}/{name}"
        Path(path).mkdir()
        mounted = cluster.in_namespace(["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=0777", name, path])
        assert mounted.returncode == 0, mounted.stderr
        room = {"storageClassName": "", "accessModes": ["ReadWriteOnce"]}
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": room | {"capacity": {"storage": f"{mib}Mi"}, "hostPath": {"path": path}},
        }
        claim = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name},
            "spec": room | {"volumeName": name, "resources": {"requests": {"storage": f"{mib}Mi"}}},
        }
        assert kubectl.apply(yaml.safe_dump_all([volume, claim])).returncode == 0
        made.append((name, path))
        return path

    yield make
    for name, path in made:
        kubectl.must("delete", "sdc", name)
        kubectl.must("delete", "pvc", name)
        kubectl.must("delete", "pv", name)
        cluster.in_namespace(["umount", "--lazy", path])
