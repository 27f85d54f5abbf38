"""What is watched while all these tests run."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from devcluster.cluster.cluster import Cluster
from tests.support import traffic_recorder
from tests.support.kubectl import program
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
