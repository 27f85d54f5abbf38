"""Starts the cluster of the benchmark: an API server, simulated nodes and engines, and byte counters."""

import json
import math
import os
import signal
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from devcluster.cluster.cluster import Cluster
from devcluster.cluster.settings import Settings
from devcluster.host import packages
from tests.support.api_client import ApiClient
from tests.support.kubectl import Kubectl
from tests.support.operator_process import NAMESPACE, SERVICE_ACCOUNT, may, service_account_kubeconfig
from tests.support.waiting import eventually

NAMESPACES: Final = tuple(f"team-{number}" for number in range(8))
"""Namespaces of the objects."""

ENGINE_PORT: Final = 8000
_GPUS_A_NODE: Final = 8
_SPARE_NODES: Final = 4
"""Room for changes that add a replica."""

_GO_DEFAULTS: Final = {"GOGC": "100", "GOMEMLIMIT": "off"}
"""Defaults of Go for the control plane and the peer, which other development clusters change."""

_MANIFESTS: Final = Path(__file__).parents[3] / "manifests"


@dataclass(frozen=True)
class Stand:
    """A cluster that is ready for an operator."""

    cluster: Cluster
    kubectl: Kubectl
    api: ApiClient
    folder: Path
    """Files of this run."""

    operator_kubeconfig: Path
    """Service account of the operator, with an address of the API server that only the operator uses."""

    def operator_bytes(self) -> int:
        """Return the bytes between the operator and the API server, including TLS and headers."""
        answer = self.cluster.in_namespace(["nft", "--json", "list", "counters"])
        answer.check_returncode()
        entries = json.loads(answer.stdout)["nftables"]
        return sum(int(entry["counter"]["bytes"]) for entry in entries if "counter" in entry)

    def etcd_writes(self) -> int:
        """Return the number of the API server's writes to etcd, for all clients."""
        page = self.kubectl.must("get", "--raw=/metrics")
        written = 0.0
        for line in page.splitlines():
            if line.startswith("etcd_requests_total{") and 'operation="get"' not in line and '="list' not in line:
                written += float(line.rsplit(" ", 1)[1])
        return int(written)

    def homes(self, operators: int) -> tuple[str, ...]:
        """Return a namespace for the Lease of each operator; create those that do not exist yet."""
        others = tuple(f"platform-{number}" for number in range(2, operators + 1))
        for namespace in others:
            self.kubectl.within(namespace).create_namespace()
        if others:
            rights = ("--verb=*", "--resource=leases,configmaps")
            self.kubectl.must("create", "clusterrole", "bench-leases", *rights)
            account = f"--serviceaccount={NAMESPACE}:{SERVICE_ACCOUNT}"
            self.kubectl.must("create", "clusterrolebinding", "bench-leases", "--clusterrole=bench-leases", account)
        return NAMESPACE, *others

    def nodes_file(self) -> Path:
        """Write the nodes to a file for operators without permission to list them, and return its path."""
        file = self.folder / "nodes.yaml"
        file.write_text(self.kubectl.must("get", "nodes", "--output=yaml"))
        return file

    def has_pods(self) -> bool:
        """Return whether there are pods outside the operator's namespace."""
        query = f"limit=1&fieldSelector=metadata.namespace!={NAMESPACE}"
        return bool(json.loads(self.kubectl.must("get", f"--raw=/api/v1/pods?{query}"))["items"])


@contextmanager
def stand(name: str, objects: int) -> Iterator[Stand]:
    """Start a cluster with room for a number of objects of one GPU each, and remove it at the end or on a signal."""
    cluster = Cluster(name)
    signal.signal(signal.SIGTERM, _end)
    os.environ.update(_GO_DEFAULTS)
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        try:
            packages.ensure(("nft",))
            cluster.up(f"kwok={math.ceil(objects / _GPUS_A_NODE) + _SPARE_NODES}xH100:{_GPUS_A_NODE}")
            yield _equipped(cluster, Path(folder))
        finally:
            cluster.down()


def _end(*_: object) -> None:
    """Handle SIGTERM like Ctrl-C, so that the cluster is removed."""
    raise KeyboardInterrupt


def _equipped(cluster: Cluster, folder: Path) -> Stand:
    kubectl = Kubectl(cluster.kubeconfig)
    kubectl.install_crds()
    admin = kubectl.within(NAMESPACE)
    admin.must("apply", "--server-side", f"--kustomize={_MANIFESTS}")
    eventually(lambda: may(admin, "watch", "nodes"), "the operator has its rights")
    for namespace in NAMESPACES:
        kubectl.within(namespace).create_namespace()
    _start_engines(cluster)
    kubeconfig = service_account_kubeconfig(admin, folder / "kubeconfig")
    _use_own_address(cluster, kubeconfig)
    return Stand(cluster, kubectl, ApiClient(cluster.kubeconfig.read_text()), folder, kubeconfig)


def _start_engines(cluster: Cluster) -> None:
    """Route the addresses of all simulated pods to one process."""
    addresses = _settings(cluster).addresses
    _sh(cluster, f"ip route add local {addresses.fake_pods} dev lo")
    repository = Path(__file__).parents[3]
    start = f"cd {repository} && exec {sys.executable} -m bench.operator.engines {ENGINE_PORT}"
    cluster.start_beside("engines", ["/bin/sh", "-c", start])


def _use_own_address(cluster: Cluster, kubeconfig: Path) -> None:
    """Give the operator the address of the API server's Service, and count the bytes at this address."""
    settings = _settings(cluster)
    address, port = settings.addresses.api_service, settings.api_port
    _sh(
        cluster,
        f"ip addr add {address}/32 dev lo",
        "nft add table ip bench",
        *(f"nft add counter ip bench {direction}" for direction in ("asked", "answered")),
        "nft 'add chain ip bench input { type filter hook input priority 0; }'",
        "nft 'add chain ip bench output { type filter hook output priority 0; }'",
        f"nft add rule ip bench input ip daddr {address} tcp dport {port} counter name asked",
        f"nft add rule ip bench output ip saddr {address} tcp sport {port} counter name answered",
    )
    config = yaml.safe_load(kubeconfig.read_text())
    for each in config["clusters"]:
        each["cluster"]["server"] = f"https://{address}:{port}"
    kubeconfig.write_text(yaml.safe_dump(config))


def _settings(cluster: Cluster) -> Settings:
    settings = Settings.load(cluster.state)
    if settings is None:
        raise RuntimeError(f"cluster {cluster.name} does not exist")
    return settings


def _sh(cluster: Cluster, *lines: str) -> None:
    answer = cluster.in_namespace(["/bin/sh", "-euc", "\n".join(lines)])
    if answer.returncode:
        raise RuntimeError(answer.stderr)


def scrape(port: int) -> str:
    """Return the metrics page of the operator."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return str(answer.read().decode())
