"""The chart's FlowSchema: at a busy API server no renewal of the operator's Lease waits behind other accounts."""

import re

from devcluster import chart
from tests.support.kubectl import Kubectl
from tests.support.operator_process import NAMESPACE, SERVICE_ACCOUNT, USER
from tests.support.waiting import eventually

NAME = f"{chart.RELEASE}-leader-election"
LEADER_ELECTION = "leader-election"
"""The API server's own level of priority."""


def test_lease_requests_use_the_leader_election_priority_level(kubectl: Kubectl) -> None:
    made = chart.template("--set=leaderElection.flowSchema=true", "--show-only=templates/flow-schema.yaml")
    kubectl.must("apply", "--server-side", "--filename=-", stdin=made)
    try:
        schema = kubectl.object("flowschema", NAME)
        level = kubectl.object("prioritylevelconfiguration", LEADER_ELECTION)
        assert schema["spec"]["priorityLevelConfiguration"]["name"] == LEADER_ELECTION
        ours = f"{schema['metadata']['uid']} at {level['metadata']['uid']}"
        eventually(lambda: treated(kubectl, "lease", USER) == ours, "it is in force")
        assert treated(kubectl, "configmap", USER) != ours
        assert treated(kubectl, "lease", USER.replace(SERVICE_ACCOUNT, "default")) != ours
    finally:
        kubectl.must("delete", "flowschema", NAME)


def treated(kubectl: Kubectl, kind: str, user: str) -> str:
    """By which FlowSchema and at which level an API server takes what somebody asks for, as its answer says."""
    asked = kubectl("get", kind, "x", f"--namespace={NAMESPACE}", f"--as={user}", "-v=9")
    schema, level = re.findall(r"X-Kubernetes-PF-\w+-UID: (\S+)", asked.stderr, re.IGNORECASE)[-2:]
    return f"{schema} at {level}"
