"""A whole cluster on this machine: needs root and the node's packages."""

import os
import re
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from glob import glob
from pathlib import Path

import pytest

from devcluster.cluster.cluster import Cluster
from devcluster.cluster.settings import Settings
from devcluster.host import processes
from devcluster.host.errors import ClusterError
from tests.support.waiting import eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and cgroups need root")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(f"test-devcluster-{os.getpid()}")
    yield cluster
    cluster.down()


def kill(cluster: Cluster, component: str) -> None:
    pid = cluster.component_pid(component)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def own_link(cluster: Cluster) -> str:
    """The machine's end of a cluster's network; other clusters come and go meanwhile."""
    settings = Settings.load(cluster.state)
    assert settings
    return settings.addresses.link


def traces(cluster: Cluster, link: str | None = None) -> list[str]:
    """Return everything of the cluster that a person could find on the machine."""
    mark = cluster.name
    links = subprocess.check_output(["ip", "-details", "link", "show"], text=True).splitlines()
    routes = subprocess.check_output(["ip", "route", "show", "table", "all"], text=True).splitlines()
    rules = subprocess.check_output(["nft", "list", "ruleset"], text=True).splitlines()
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    living = [pid for pid in processes.marked(cluster.state) if processes.alive(pid)]
    found = [line for line in [*links, *mounts] if mark in line]
    found += [line for line in routes if link and re.search(rf"\b{link}\b", line)]
    found += [line for line in rules if "kube-proxy" in line]
    # pathlib fails when a group of another cluster goes while it looks.
    groups = [path for pattern in ("*", "*/*") for path in glob(f"/sys/fs/cgroup/{pattern}")]  # noqa: PTH207
    found += [path for path in groups if mark in Path(path).name]
    found += [str(path) for path in (cluster.state, cluster.state.with_name(f".{mark}.lock")) if path.exists()]
    return found + [f"process {pid}" for pid in living]


def test_lives_repairs_itself_and_leaves_nothing(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.up("real,kwok=1xH100:8")
    link = own_link(cluster)
    assert sorted(n["metadata"]["name"] for n in cluster.api().nodes()) == ["h100-0", "node1"]
    assert traces(cluster, link), "the search finds a cluster that is up"
    server = cluster.component_pid("kube-apiserver")
    capsys.readouterr()

    cluster.up("real,kwok=1xH100:8")
    assert "already up" in capsys.readouterr().err
    assert cluster.component_pid("kube-apiserver") == server, "a second up touches nothing"
    with pytest.raises(ClusterError, match="take it down first"):
        cluster.up("real")

    kill(cluster, "kube-apiserver")
    kill(cluster, "containerd")
    cluster.up("real,kwok=1xH100:8")
    assert all(cluster.component_pid(name) for name in cluster.components())
    assert cluster.api().exists("/api/v1/nodes/h100-0"), "a repair keeps what the cluster holds"

    for component in ("namespace", "etcd", "kubelet"):
        kill(cluster, component)
    cluster.down()
    assert traces(cluster, link) == []


def test_an_interrupted_up_is_removed(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "devcluster", "up", "--name", cluster.name]
    started = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while cluster.component_pid("etcd") is None:
        assert started.poll() is None, "up ended before etcd ran"
    link = own_link(cluster)
    started.kill()
    started.wait()
    assert traces(cluster, link)
    cluster.down()
    assert traces(cluster, link) == []


def test_a_control_plane_without_nodes(cluster: Cluster) -> None:
    cluster.up("none")
    assert cluster.api().exists("/api/v1/namespaces/default")
    assert cluster.api().nodes() == []
    with pytest.raises(ClusterError, match="up with --nodes kwok"):
        cluster.add_fake_nodes([])
    cluster.down()
    assert traces(cluster) == []


def test_strangers_may_only_ask_for_health(cluster: Cluster) -> None:
    cluster.up("none")
    url = f"https://127.0.0.1:{port(cluster)}"

    def status(path: str) -> int:
        unverified = ssl._create_unverified_context()
        try:
            with urllib.request.urlopen(f"{url}{path}", context=unverified, timeout=60) as answer:
                return answer.status
        except urllib.error.HTTPError as refused:
            return refused.code

    # Slow disks make an API server unready for a moment.
    eventually(lambda: [status(path) for path in ("/livez", "/readyz", "/healthz")] == [200] * 3, "all may ask for it")
    assert [status(path) for path in ("/version", "/api", "/api/v1/nodes", "/metrics")] == [401] * 4


def port(cluster: Cluster) -> str:
    return cluster.kubeconfig.read_text().split("https://127.0.0.1:")[1].split('"')[0]
