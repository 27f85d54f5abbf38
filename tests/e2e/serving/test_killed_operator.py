"""Killing the operator again and again on the way changes nothing in the outcome."""

from pathlib import Path

import pytest
import yaml

from devcluster.install import NAMESPACE
from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl
from tests.support.small_pair import small_pair
from tests.support.waiting import eventually

EXAMPLES = Path(__file__).parents[3] / "examples"
READY_DEADLINE_S = 900
pytestmark = pytest.mark.long


def works(system: Kubectl) -> bool:
    """Whether there is one operator, and it says that it works; one that waits for the Lease says that."""
    (pod,) = system.objects("pods")
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}:8080/proxy/readyz"
    return system.must("get", "--raw", path) == "ok"


def test_deployment_becomes_ready_while_operator_is_killed_repeatedly(kubectl: Kubectl) -> None:
    system = kubectl.within(NAMESPACE)
    kubectl.must("apply", f"--filename={EXAMPLES / 'tiny-models.yaml'}")
    kubectl.wait("job/tiny-models", "condition=Complete", 300)
    assert kubectl.apply(yaml.safe_dump(small_pair())).returncode == 0
    kills = 0

    def kill_until_ready() -> bool:
        nonlocal kills
        if condition(kubectl, "tiny", "Ready")[0] == "True":
            return True
        # Each lives until it works, once the Lease of the one before is over: it dies in the middle of what it began.
        system.must("delete", "pod", "--all", "--grace-period=0", "--force")
        kills += 1
        eventually(lambda: works(system), "the next operator works")
        return False

    eventually(kill_until_ready, "it is Ready", READY_DEADLINE_S)
    assert kills > 1
    assert wait_for(kubectl, "tiny", "Ready", "Serving")
    # Once it serves its strategy changes, and its template never.
    assert len(kubectl.objects("replicasets")) == 1, "its engines were launched once"
    (pod,) = kubectl.objects("pods", "--selector=specdecode.io/deployment=tiny")
    assert sum(status["restartCount"] for status in pod["status"]["containerStatuses"]) == 0
