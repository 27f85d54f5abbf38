"""A real API server takes the installation, and means by it what we mean."""

from pathlib import Path

import pytest

from devcluster.cluster.cluster import Cluster
from tests.support.kubectl import Kubectl
from tests.support.operator_process import may
from tests.support.waiting import eventually

MANIFESTS = Path(__file__).parents[3] / "manifests"


@pytest.fixture(scope="module")
def installed(crds: Cluster) -> Kubectl:
    """kubectl in a cluster where `manifests/` are applied."""
    kubectl = Kubectl(crds.kubeconfig, "specdecode-system")
    answer = kubectl("apply", "--server-side", f"--kustomize={MANIFESTS}")
    assert answer.returncode == 0, answer.stderr
    # Pod security speaks up here when the pod asks for more than `restricted` allows.
    assert "Warning" not in answer.stderr, answer.stderr
    # All rules of a role come into force at once, a little after they are written.
    eventually(lambda: may(kubectl, "watch", "nodes"), "the operator has its rights")
    return kubectl


@pytest.mark.parametrize(
    ("granted", "verb", "resource"),
    [
        (True, "watch", "specdecodedeployments.specdecode.io"),
        (True, "patch", "specdecodedeployments.specdecode.io/status"),
        (True, "create", "deployments.apps"),
        (True, "patch", "poddisruptionbudgets.policy"),
        (True, "watch", "nodes"),
        (True, "create", "events"),
        (False, "patch", "specdecodedeployments.specdecode.io"),
        (False, "delete", "specdecodedeployments.specdecode.io"),
        (False, "get", "secrets"),
        (True, "create", "pods"),
        (True, "create", "specdecodecaptures.specdecode.io"),
        (True, "patch", "specdecodetrainings.specdecode.io/status"),
        (False, "patch", "specdecodetrainings.specdecode.io"),
        (True, "delete", "persistentvolumeclaims"),
        (False, "delete", "persistentvolumes"),
    ],
)
def test_operator_has_exactly_its_rights(installed: Kubectl, verb: str, resource: str, *, granted: bool) -> None:
    assert may(installed, verb, resource) is granted


def test_second_apply_changes_nothing(installed: Kubectl) -> None:
    versions = "-o=jsonpath={range .items[*]}{.metadata.name}={.metadata.generation} {end}"
    query = ("get", "deployments", versions)
    before = installed.must(*query)
    assert before
    installed.must("apply", "--server-side", f"--kustomize={MANIFESTS}")
    assert installed.must(*query) == before
