"""A real API server for the whole session, and a namespace of its own for each test."""

import itertools
import os
from collections.abc import Iterator

import pytest

from devcluster.cluster.cluster import Cluster
from tests.support.kubectl import Kubectl
from tests.support.kubernetes import MINOR
from tests.support.operator_process import OperatorProcess
from tests.support.played_node import PlayedNode
from tests.support.waiting import eventually

_numbers = itertools.count(1)

OperatorProcess.forks = True


@pytest.fixture(scope="session")
def api_server() -> Iterator[Cluster]:
    """A control plane without our CRDs and without nodes, where pods run as tests say."""
    cluster = Cluster(f"test-component-{os.getpid()}")
    try:
        cluster.up("none", MINOR)
        with PlayedNode(Kubectl(cluster.kubeconfig)):
            yield cluster
    finally:
        cluster.down()


@pytest.fixture(scope="module")
def bare_cluster() -> Iterator[Cluster]:
    """A control plane of a module's own that has never seen our CRDs, for what others would notice."""
    cluster = Cluster(f"test-bare-{os.getpid()}")
    try:
        cluster.up("none", MINOR)
        yield cluster
    finally:
        cluster.down()


@pytest.fixture(scope="session")
def crds(api_server: Cluster) -> Cluster:
    """The API server with our CRDs installed."""
    Kubectl(api_server.kubeconfig).install_crds()
    return api_server


@pytest.fixture
def namespace(api_server: Cluster) -> str:
    """A namespace that no other test uses, in which pods can be made. It goes with the cluster."""
    kubectl = Kubectl(api_server.kubeconfig, f"test-{next(_numbers)}")
    kubectl.create_namespace()
    eventually(lambda: kubectl.object("serviceaccount", "default"), "pods have their account")
    return kubectl.namespace


@pytest.fixture
def kubectl(crds: Cluster, namespace: str) -> Kubectl:
    """kubectl in the test's own namespace of an API server with our CRDs."""
    return Kubectl(crds.kubeconfig, namespace)
