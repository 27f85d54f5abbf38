"""The chart's NetworkPolicies against the connections of all tests of this folder; this one runs after them."""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster import chart
from devcluster.install import NAMESPACE
from specdecode_operator.cluster.resources import (
    CAPTURE_LABEL,
    DEPLOYMENT_LABEL,
    MANAGED_BY_LABEL,
    MANAGER,
    READS_FOR_LABEL,
)
from tests.e2e.serving.conftest import Watched
from tests.support.kubectl import Kubectl
from tests.support.network_policies import Connection, Peer, refused

OTHERS = {"test_capture.py", "test_tiny_pair.py"}
KINDS = (DEPLOYMENT_LABEL, CAPTURE_LABEL, READS_FOR_LABEL)
API = "API server"
Address = tuple[str, int]


def pods(watched: Watched) -> dict[str, Peer]:
    """All pods that there were, by address."""
    found: dict[str, Peer] = {}
    text, decoder, at = watched.pods.read_text(), json.JSONDecoder(), 0
    with suppress(json.JSONDecodeError):  # the last one may not be whole yet
        while at < len(text):
            pod, end = decoder.raw_decode(text, at)
            at = end + 1  # the end of a line
            if address := pod["status"].get("podIP"):
                ports = [port for each in pod["spec"]["containers"] for port in each.get("ports", [])]
                named = {port["name"]: port["containerPort"] for port in ports if "name" in port}
                found[address] = Peer(address, pod["metadata"]["namespace"], pod["metadata"].get("labels", {}), named)
    return found


def api_server(kubectl: Kubectl) -> tuple[Address, Address]:
    """The address of its Service, and its own."""
    default = kubectl.within("default")
    spec = default.object("service", "kubernetes")["spec"]
    (subset,) = default.object("endpoints", "kubernetes")["subsets"]
    own = subset["addresses"][0]["ip"], subset["ports"][0]["port"]
    return (spec["clusterIP"], spec["ports"][0]["port"]), own


def connections(watched: Watched, kubectl: Kubectl) -> Iterator[Connection]:
    """What pods opened, and what was opened to them."""
    known, (service, own) = pods(watched), api_server(kubectl)
    services = ip_network(f"{service[0]}/16", strict=False)
    for line in watched.connections.read_text().splitlines()[1:]:
        source, address, port = line.split()
        to = own if (address, int(port)) in (service, own) else (address, int(port))
        # What goes to another Service is seen once more, on its way to a pod behind it.
        if (source in known or address in known) and ip_address(to[0]) not in services:
            end = known.get(to[0], Peer(to[0], labels={API: ""} if to == own else {}))
            yield Connection(known.get(source, Peer(source, is_node=True)), end, to[1])


def kind(peer: Peer) -> str:
    if peer.labels.get(MANAGED_BY_LABEL) == MANAGER:
        return next(label for label in KINDS if label in peer.labels)
    return NAMESPACE if peer.namespace == NAMESPACE else API if API in peer.labels else "other"


def policies(found: list[Connection], tmp_path: Path) -> list[dict[str, Any]]:
    namespaces = {peer.namespace for each in found for peer in (each.source, each.destination)}
    network = {
        "enabled": True,
        "namespaces": sorted(each for each in namespaces if each not in (None, NAMESPACE)),
        "apiServer": {
            "cidrs": ["0.0.0.0/0"],
            "ports": list({each.port for each in found if kind(each.destination) == API}),
        },
    }
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"networkPolicy": network}))
    documents = yaml.safe_load_all(chart.template(f"--values={values}"))
    return [each for each in documents if each and each["kind"] == "NetworkPolicy"]


def told(each: Connection) -> str:
    ends = (f"{kind(peer)} {peer.namespace} {peer.address}" for peer in (each.source, each.destination))
    return f"{' -> '.join(ends)} port {each.port}"


def test_network_policies_allow_all_observed_connections(
    request: pytest.FixtureRequest, watched: Watched, kubectl: Kubectl, tmp_path: Path
) -> None:
    ran = {item.path.name for item in request.session.items}
    if not ran >= OTHERS:
        pytest.skip(f"looks at the connections of other tests: run {' and '.join(sorted(OTHERS))} with it")
    found = list(connections(watched, kubectl))
    written = policies(found, tmp_path)
    held = {told(each): refused(written, each) for each in found}
    assert {connection: by for connection, by in held.items() if by} == {}
    seen: dict[str, set[str]] = defaultdict(set)
    for each in found:
        seen[kind(each.source)].add(kind(each.destination))
    assert seen[NAMESPACE] >= {API, DEPLOYMENT_LABEL}, "the operator was seen at its work"
    assert seen[DEPLOYMENT_LABEL] <= {CAPTURE_LABEL}, "engines connect only to live captures"
    for quiet in (CAPTURE_LABEL, READS_FOR_LABEL):
        assert seen[quiet] == set(), f"pods with {quiet} connect to nobody"
