"""What NetworkPolicies let through, for whoever has to say so without a network that enforces them.

Semantics: https://kubernetes.io/docs/concepts/services-networking/network-policies/. What the node of a pod sends to it
is always let through, and so is what a pod sends to itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

Policy = Mapping[str, Any]


@dataclass(frozen=True)
class Peer:
    """One end of a connection: a pod, or an address that is none."""

    address: str
    namespace: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)
    is_node: bool = False


@dataclass(frozen=True)
class Connection:
    """A connection that somebody wants."""

    source: Peer
    destination: Peer
    port: int
    protocol: str = "TCP"


def refused(policies: Sequence[Policy], wanted: Connection) -> list[str]:
    """Return which policies do not let a connection through, as NAMESPACE/NAME; several that select a pod add up."""
    if wanted.source == wanted.destination:
        return []
    found = _refused(policies, "Egress", wanted.source, wanted.destination, wanted)
    if not wanted.source.is_node:
        found += _refused(policies, "Ingress", wanted.destination, wanted.source, wanted)
    return found


def _refused(policies: Iterable[Policy], direction: str, pod: Peer, other: Peer, wanted: Connection) -> list[str]:
    selecting = [policy for policy in policies if direction in policy["spec"]["policyTypes"] and _selects(policy, pod)]
    key, whom = ("egress", "to") if direction == "Egress" else ("ingress", "from")
    for policy in selecting:
        for rule in policy["spec"].get(key) or []:
            named = wanted.destination.ports
            if _has_port(rule.get("ports"), wanted, named) and _has_peer(rule.get(whom), other, _namespace(policy)):
                return []
    return [f"{_namespace(policy)}/{policy['metadata']['name']}" for policy in selecting]


def _namespace(policy: Policy) -> str:
    found: str = policy["metadata"]["namespace"]
    return found


def _selects(policy: Policy, pod: Peer) -> bool:
    return pod.namespace == _namespace(policy) and matches(policy["spec"]["podSelector"], pod.labels)


def _has_port(ports: Sequence[Mapping[str, Any]] | None, wanted: Connection, named: Mapping[str, int]) -> bool:
    if not ports:
        return True
    for each in ports:
        first = each["port"] if isinstance(each["port"], int) else named.get(each["port"], -1)
        if each.get("protocol", "TCP") == wanted.protocol and first <= wanted.port <= each.get("endPort", first):
            return True
    return False


def _has_peer(peers: Sequence[Mapping[str, Any]] | None, other: Peer, namespace: str) -> bool:
    return not peers or any(_is_peer(each, other, namespace) for each in peers)


def _is_peer(peer: Mapping[str, Any], other: Peer, namespace: str) -> bool:
    if block := peer.get("ipBlock"):
        address = ip_address(other.address)
        inside = [address in ip_network(each) for each in [block["cidr"], *block.get("except", [])]]
        return inside[0] and not any(inside[1:])
    if other.namespace is None:
        return False
    of_namespace = peer.get("namespaceSelector")
    if of_namespace is None:
        in_place = other.namespace == namespace
    else:
        in_place = matches(of_namespace, {"kubernetes.io/metadata.name": other.namespace})
    return in_place and matches(peer.get("podSelector") or {}, other.labels)


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector selects what has these labels."""
    equal = all(labels.get(name) == value for name, value in (selector.get("matchLabels") or {}).items())
    return equal and all(_holds(each, labels) for each in selector.get("matchExpressions") or [])


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    has, operator = expression["key"] in labels, expression["operator"]
    if operator in ("Exists", "DoesNotExist"):
        return has is (operator == "Exists")
    listed = labels.get(expression["key"]) in expression["values"]
    return listed if operator == "In" else not listed
