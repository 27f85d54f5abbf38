"""LeaderWorkerSets may come after the operator, and go again."""

from collections.abc import Iterator

import pytest
import yaml

from devcluster import binaries
from devcluster.cluster import Cluster
from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl
from tests.support.objects import H100, pair_70b
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

GROUPS = "leaderworkersets.leaderworkerset.x-k8s.io"
RESYNC_DEADLINE_S = 60
SPEC = pair_70b(
    target={"model": "meta-llama/Llama-3.1-405B-Instruct"},
    parallelism={"tensor": 16},
    # For nodes that are still to come.
    accelerator={"product": [H100], "perNode": 8},
)


@pytest.fixture
def their_crd(crds: Cluster) -> Iterator[str]:
    """The file with their kind, which is gone again afterwards: other tests want an API server without it."""
    (file,) = (binaries.lws_sources() / "crd" / "bases").glob("*.yaml")
    yield str(file)
    Kubectl(crds.kubeconfig)("delete", f"--filename={file}", "--ignore-not-found")


def test_the_operator_notices_that_they_come_and_go(
    operator: OperatorProcess, kubectl: Kubectl, their_crd: str
) -> None:
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": "wide"}}
    assert kubectl.apply(yaml.safe_dump({**body, "spec": SPEC})).returncode == 0
    assert "2 nodes x 8 x NVIDIA-H100-80GB-HBM3" in wait_for(kubectl, "wide", "Planned", "LeaderWorkerSetMissing")
    assert condition(kubectl, "wide", "Ready")[0] == "Unknown"
    assert kubectl.objects("deployments,services") == []

    kubectl.must("apply", "--server-side", f"--filename={their_crd}")
    wait_for(kubectl, "wide", "Planned", "Fits", RESYNC_DEADLINE_S)
    groups = eventually(lambda: kubectl.objects(GROUPS), "a group is asked for")
    assert [each["metadata"]["name"] for each in groups] == ["wide-lws"]
    owner = kubectl.object("sdd", "wide")["metadata"]["uid"]
    assert [each["uid"] for each in groups[0]["metadata"]["ownerReferences"]] == [owner]

    # Somebody changes it, which is undone.
    kubectl.must("patch", GROUPS, "wide-lws", "--type=merge", '--patch={"spec":{"replicas":7}}')
    eventually(
        lambda: kubectl.object(GROUPS, "wide-lws")["spec"]["replicas"] == 1, "drift is undone", RESYNC_DEADLINE_S
    )

    kubectl.must("delete", f"--filename={their_crd}")
    wait_for(kubectl, "wide", "Planned", "LeaderWorkerSetMissing", RESYNC_DEADLINE_S)
    assert "Traceback" not in operator.log.read_text()
