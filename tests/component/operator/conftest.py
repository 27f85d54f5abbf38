"""The operator as a process beside the control plane, with exactly the rights that it is installed with."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from devcluster.cluster.cluster import Cluster
from tests.support.audit import asked
from tests.support.guard import put_guard_in_force
from tests.support.kubectl import Kubectl
from tests.support.operator_process import NAMESPACE, OperatorProcess, may, service_account_kubeconfig
from tests.support.rest import Rest
from tests.support.waiting import eventually

STORAGE_CLASS = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {"name": "standard", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
    "provisioner": "example.com/none",
    "volumeBindingMode": "WaitForFirstConsumer",
}
"""The default class. No claim is ever bound, because there is no node for its first pod."""

MANIFESTS = Path(__file__).parents[3] / "manifests"


@pytest.fixture(scope="session")
def operator_process(crds: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """The operator with exactly the rights of the installed service account, under the guard; it need not run."""
    admin = Kubectl(crds.kubeconfig, NAMESPACE)
    admin.must("apply", "--server-side", f"--kustomize={MANIFESTS}")
    eventually(lambda: may(admin, "watch", "nodes"), "the operator has its rights")
    put_guard_in_force(admin)
    admin.must("apply", "--server-side", "--filename=-", stdin=yaml.safe_dump(STORAGE_CLASS))
    folder = tmp_path_factory.mktemp("operator")
    process = OperatorProcess(service_account_kubeconfig(admin, folder / "kubeconfig"), folder / "log", "pod-1")
    yield process
    assert process.stop() == 0


@contextmanager
def installed_operator(
    cluster: Cluster,
    folder: Path,
    asked_elsewhere: set[str],
    *,
    prepare: Callable[[Kubectl], None] = lambda _: None,
    may_be_denied: str | None = None,
) -> Iterator[OperatorProcess]:
    """Run the operator in a cluster with nothing else, with its own rights and under its guard.

    ``prepare`` changes the cluster before the start. Only requests that contain ``may_be_denied`` may be denied.
    """
    Kubectl(cluster.kubeconfig).install_crds()
    admin = Kubectl(cluster.kubeconfig, NAMESPACE)
    admin.must("apply", "--server-side", f"--kustomize={MANIFESTS}")
    eventually(lambda: may(admin, "watch", "nodes"), "the operator has its rights")
    prepare(admin)
    put_guard_in_force(admin)
    process = OperatorProcess(service_account_kubeconfig(admin, folder / "kubeconfig"), folder / "log")
    process.start()
    yield process
    assert process.stop() == 0
    seen = asked(cluster)
    denied = [each.named for each in seen if not each.allowed]
    assert not [each for each in denied if may_be_denied is None or may_be_denied not in each]
    asked_elsewhere.update(*(each.rights for each in seen if each.allowed))


@pytest.fixture(autouse=True)
def _remove_what_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Remove the objects of ours that the test leaves, in all namespaces.

    Engines that wait for a node go before the captures of all namespaces for ten minutes: those of the next tests, too.
    Fixtures of a module or the session have made theirs before the test, and keep them.
    """
    if "crds" not in request.fixturenames:
        yield
        return
    kubectl = Kubectl(request.getfixturevalue("crds").kubeconfig)
    before = kubectl.ours()
    yield
    for each in kubectl.ours() - before:
        kubectl.remove_one(*each)


@pytest.fixture
def operator(operator_process: OperatorProcess, kubectl: Kubectl) -> Iterator[OperatorProcess]:
    """The operator, running whatever tests before have done to it; objects of ours go with the test."""
    operator_process.ensure()
    yield operator_process
    kubectl.remove("sdtr,sdc,sdd")


@pytest.fixture(scope="session")
def asked_elsewhere() -> set[str]:
    """What the operator asked API servers of single modules for, for the test of its rights."""
    return set()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Look at what the operator asked for when it has asked for everything."""
    items.sort(key=lambda item: item.path == Path(__file__).with_name("test_rights.py"))


@pytest.fixture
def rest(kubectl: Kubectl) -> Rest:
    """What tells whether the operator leaves the test's namespace alone."""
    return Rest(kubectl)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the objects of the test and the operator's log to the report of a failed test."""
    report = yield
    arguments = getattr(item, "funcargs", {})
    kubectl, operator = arguments.get("kubectl"), arguments.get("operator_process")
    if report.failed and isinstance(kubectl, Kubectl) and isinstance(operator, OperatorProcess):
        report.sections += [
            ("objects", kubectl("get", "all,sdd,sdc,sdtr,pvc,configmaps", "--output=wide").stdout),
            ("descriptions", kubectl("describe", "sdd,sdc,sdtr,jobs,pods").stdout),
            ("events", kubectl("get", "events", "--sort-by=.lastTimestamp").stdout),
            ("operator log", operator.tail(20_000)),
        ]
    return report
