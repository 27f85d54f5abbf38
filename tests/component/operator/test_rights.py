"""What the operator asked real API servers for while all other tests of this folder ran: it comes after them."""

import pytest

from devcluster.builds import binaries
from devcluster.cluster.cluster import Cluster
from specdecode_operator.cluster.rights import RELEASE, Scope, permissions
from tests.support.audit import asked
from tests.support.kubernetes import MINOR
from tests.support.operator_process import USER

ELSEWHERE = {
    "get pods": "its own, which names its image: here it runs in none",
    "watch leaderworkersets.leaderworkerset.x-k8s.io": "kopf misses a kind that comes while it runs, now and then",
    "watch httproutes.gateway.networking.k8s.io": "the same",
    "watch resourceclaimtemplates.resource.k8s.io": "the same",
    "watch scaledobjects.keda.sh": "the same",
    "watch inferencepools.inference.networking.k8s.io": "the same",
    "create leases.coordination.k8s.io": "no replica waits for another here: tests of leader election",
    f"get leases.coordination.k8s.io {RELEASE}": "the same",
    f"patch leases.coordination.k8s.io {RELEASE}": "the same",
}
"""Rights that no test of this folder uses."""
if MINOR == binaries.OLDEST:
    ELSEWHERE |= {each: "has no resource.k8s.io/v1" for each in permissions() if "resource.k8s.io" in each}

TAKEN_AWAY = "services"
"""The kind on which there are no rights in one test: what is asked of it meanwhile depends on when watches end."""


def test_operator_uses_all_granted_permissions_and_is_denied_none(
    request: pytest.FixtureRequest, crds: Cluster, asked_elsewhere: set[str]
) -> None:
    seen = [each for each in asked(crds) if each.user == USER]
    used = asked_elsewhere.union(*(each.rights for each in seen if each.allowed))
    denied = {each.permission for each in seen if not each.allowed}
    assert {each for each in denied if each.split()[1] != TAKEN_AWAY} == set()
    listed = {*permissions(Scope.SERVED, Scope.CLUSTER, Scope.OWN)}
    assert used <= listed
    if {each.path for each in request.session.items} >= {*request.path.parent.glob("test_*.py")}:
        assert listed - used <= ELSEWHERE.keys()
