"""One real cluster for all end-to-end tests: real node, simulated GPU nodes, the operator as a pod."""

import itertools
import os
from collections.abc import Generator, Iterator

import pytest

from devcluster.cluster.cluster import Cluster
from devcluster.install import (
    NAMESPACE,
    OPERATOR,
    install_operator,
    load_engine_image,
    load_operator_image,
    prepare_images,
)
from tests.support.audit import asked
from tests.support.guard import put_guard_in_force
from tests.support.kubectl import Kubectl
from tests.support.operator_process import USER

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster with one real node and the operator installed from its own image, under the guard of its account."""
    prepare_images()
    cluster = Cluster(f"test-e2e-{os.getpid()}")
    try:
        cluster.up("real")
        load_engine_image(cluster)
        load_operator_image(cluster)
        install_operator(Kubectl(cluster.kubeconfig))
        put_guard_in_force(Kubectl(cluster.kubeconfig, NAMESPACE))
        yield cluster
        assert {each.named for each in asked(cluster) if each.user == USER and not each.allowed} == set(), "was denied"
    finally:
        cluster.down()


@pytest.fixture(scope="module")
def kubectl(cluster: Cluster) -> Iterator[Kubectl]:
    """kubectl in a namespace of the module's own, which gives the one real node back in the end."""
    name = f"e2e-{next(_numbers)}"
    Kubectl(cluster.kubeconfig).must("create", "namespace", name)
    yield Kubectl(cluster.kubeconfig, name)
    # Nothing new comes into a namespace that goes, and nobody waits for the drain of what is there.
    everywhere = Kubectl(cluster.kubeconfig)
    everywhere.must("delete", "namespace", name, "--wait=false")
    everywhere.within(name).must("delete", "pods", "--all", "--force", "--grace-period=0")
    everywhere.must("wait", f"namespace/{name}", "--for=delete", "--timeout=600s", timeout_s=610)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the objects and logs of the cluster to the report of a failed test."""
    report = yield
    kubectl = getattr(item, "funcargs", {}).get("kubectl")
    if report.failed and isinstance(kubectl, Kubectl):
        report.sections += [(title, text) for title, text in _evidence(kubectl)]
    return report


def _evidence(kubectl: Kubectl) -> Iterator[tuple[str, str]]:
    system = Kubectl(kubectl.kubeconfig, NAMESPACE)
    yield "objects", kubectl("get", "all,sdd,sdc,pvc,configmaps", "--output=wide").stdout
    yield "descriptions", kubectl("describe", "sdd,sdc,jobs,pods").stdout
    yield "events", kubectl("get", "events", "--sort-by=.lastTimestamp").stdout
    yield "engine log", kubectl("logs", f"--selector=app.kubernetes.io/managed-by={OPERATOR}", "--tail=40").stdout
    yield "operator log", system("logs", f"deployment/{OPERATOR}", "--tail=80").stdout
