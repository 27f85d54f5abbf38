"""The operator writes routes and pools when asked, in every state of their APIs, and engines never wait for them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from devcluster.builds import binaries
from devcluster.cluster.cluster import Cluster
from tests.component.operator.conftest import installed_operator
from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl
from tests.support.objects import H200, tiny_cpu
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

ROUTES: Final = "httproutes.gateway.networking.k8s.io"
POOLS: Final = "inferencepools.inference.networking.k8s.io"
EXAMPLES: Final = Path(__file__).parents[3] / "examples"
EXAMPLE: Final = EXAMPLES / "qwen3-8b-route.yaml"
TWO_POOLS: Final = EXAMPLES / "qwen3-8b-two-pools.yaml"
GATEWAY: Final = {"name": "public", "namespace": "infra", "sectionName": "https"}
EXPOSE: Final = {"httpRoute": {"parentRefs": [GATEWAY], "hostnames": ["llm.example.com"]}}
POOLED: Final = {**EXPOSE, "inferencePool": {"endpointPickerRef": {"name": "epp"}}}


@pytest.fixture(scope="module")
def operator(
    bare_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, asked_elsewhere: set[str]
) -> Iterator[OperatorProcess]:
    """The operator with its own rights and under its guard, in a cluster that begins without the Gateway API."""
    folder = tmp_path_factory.mktemp("operator")
    with installed_operator(bare_cluster, folder, asked_elsewhere) as process:
        yield process


@pytest.fixture
def kubectl(bare_cluster: Cluster, operator: OperatorProcess) -> Iterator[Kubectl]:
    """kubectl in the cluster of this module, whose objects of ours go with the test."""
    kubectl = Kubectl(bare_cluster.kubeconfig)
    yield kubectl
    kubectl.remove("sdd")


@pytest.fixture
def routed(kubectl: Kubectl) -> Kubectl:
    """kubectl where the Gateway API is installed."""
    install(kubectl)
    return kubectl


def install(kubectl: Kubectl, *, oldest: bool = False) -> None:
    folder: Path = binaries.gateway_api_crds(oldest=oldest)
    file = folder / "gateway.networking.k8s.io_httproutes.yaml"
    kubectl.must("apply", "--server-side", "--force-conflicts", f"--filename={file}")
    kubectl.wait_for_crds(ROUTES)


def install_pools(kubectl: Kubectl) -> None:
    """Install the CRD of InferencePools."""
    file = binaries.inference_extension_crds() / "inference.networking.k8s.io_inferencepools.yaml"
    kubectl.must("apply", "--server-side", f"--filename={file}")
    kubectl.wait_for_crds(POOLS)


def apply(kubectl: Kubectl, name: str, expose: dict[str, Any] | None = EXPOSE) -> None:
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": name}}
    spec = tiny_cpu(**({} if expose is None else {"expose": expose}))
    answer = kubectl.apply(yaml.safe_dump({**body, "spec": spec}))
    assert answer.returncode == 0, answer.stderr


def names(kubectl: Kubectl, kind: str) -> list[str]:
    return [each["metadata"]["name"] for each in kubectl.objects(kind)]


def route_of(kubectl: Kubectl, name: str, kind: str = ROUTES) -> dict[str, Any]:
    """Return the route or the pool of an object as soon as there is one."""
    return eventually(
        lambda: next((each for each in kubectl.objects(kind) if each["metadata"]["name"] == name), None),
        f"there is one of {kind}: {name}",
    )


def backend(kubectl: Kubectl, name: str) -> str:
    """Return the kind of a route's backend."""
    (found,) = route_of(kubectl, name)["spec"]["rules"][0]["backendRefs"]
    return str(found["kind"])


def report(kubectl: Kubectl, name: str, kind: str = ROUTES, **conditions: tuple[str, str]) -> None:
    """Write what a gateway controller finds: status and reason of each condition."""
    route = kubectl.object(kind, name)
    found = [
        {
            "type": type_,
            "status": status,
            "reason": reason,
            "message": f"said of {type_}",
            "observedGeneration": route["metadata"]["generation"],
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        for type_, (status, reason) in conditions.items()
    ]
    gateway = {key: value for key, value in GATEWAY.items() if kind == ROUTES or key != "sectionName"}
    parent = {"parentRef": gateway, "controllerName": "example.com/gateway", "conditions": found}
    patch = json.dumps({"status": {"parents": [parent]}})
    kubectl.must("patch", kind, name, "--subresource=status", "--type=merge", f"--patch={patch}")


def test_engines_run_without_the_gateway_api_and_the_route_follows_when_it_comes(kubectl: Kubectl) -> None:
    apply(kubectl, "early")
    wait_for(kubectl, "early", "Exposed", "GatewayApiMissing")
    wait_for(kubectl, "early", "Planned", "Fits")
    assert "early" in names(kubectl, "deployments")
    assert "early" in names(kubectl, "services")

    install(kubectl, oldest=True)  # Its routes have no timeouts.
    assert "1.2" in wait_for(kubectl, "early", "Exposed", "ChildRefused")
    assert names(kubectl, ROUTES) == []
    assert condition(kubectl, "early", "Ready")[1] != "ChildRefused"

    install(kubectl)
    route = route_of(kubectl, "early")
    wait_for(kubectl, "early", "Exposed", "RoutePending")
    (owner,) = route["metadata"]["ownerReferences"]
    assert owner["uid"] == kubectl.object("sdd", "early")["metadata"]["uid"]


def test_what_gateways_say_is_in_the_status(routed: Kubectl) -> None:
    apply(routed, "seen")
    route_of(routed, "seen")
    resolved = {"ResolvedRefs": ("True", "ResolvedRefs")}
    report(routed, "seen", Accepted=("False", "NotAllowedByListeners"), **resolved)
    told = wait_for(routed, "seen", "Exposed", "RouteNotAccepted")
    assert "infra/public" in told
    assert "NotAllowedByListeners" in told
    report(routed, "seen", Accepted=("True", "Accepted"), ResolvedRefs=("False", "RefNotPermitted"))
    assert "RefNotPermitted" in wait_for(routed, "seen", "Exposed", "RouteNotResolved")
    report(routed, "seen", Accepted=("True", "Accepted"), **resolved)
    wait_for(routed, "seen", "Exposed", "RouteAccepted")
    assert condition(routed, "seen", "Exposed")[0] == "True"


def test_drift_is_repaired_and_a_route_that_is_no_longer_asked_for_goes(routed: Kubectl) -> None:
    apply(routed, "kept")
    wanted = route_of(routed, "kept")["spec"]
    backends = [{"name": "other", "port": 80}]
    paths = [{"path": {"type": "PathPrefix", "value": "/"}}]
    change = json.dumps({"spec": {"hostnames": [], "rules": [{"matches": paths, "backendRefs": backends}]}})
    routed.must("patch", ROUTES, "kept", "--type=merge", f"--patch={change}", "--field-manager=somebody")
    eventually(lambda: routed.object(ROUTES, "kept")["spec"] == wanted, "the route is as before")
    routed.must("delete", ROUTES, "kept")
    route_of(routed, "kept")

    apply(routed, "kept", {"httpRoute": {**EXPOSE["httpRoute"], "requestTimeoutSeconds": 90}})
    eventually(
        lambda: routed.object(ROUTES, "kept")["spec"]["rules"][0]["timeouts"] == {"request": "90s"}, "the time is set"
    )
    apply(routed, "kept", expose=None)
    eventually(lambda: "kept" not in names(routed, ROUTES), "the route is deleted")
    eventually(lambda: condition(routed, "kept", "Exposed")[1] == "", "the condition is gone")
    assert "kept" in names(routed, "services")


def test_a_route_of_another_owner_is_left_alone_and_does_not_hold_the_engines_up(routed: Kubectl) -> None:
    theirs = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": "taken"},
        "spec": {"hostnames": ["theirs.example.com"]},
    }
    routed.must("create", "--filename=-", stdin=yaml.safe_dump(theirs))
    before = routed.object(ROUTES, "taken")
    apply(routed, "taken")
    wait_for(routed, "taken", "Exposed", "ChildNameConflict")
    assert condition(routed, "taken", "Exposed")[0] == "False"
    eventually(lambda: "taken" in names(routed, "deployments"), "engines are started")
    assert routed.object(ROUTES, "taken") == before

    routed.must("delete", ROUTES, "taken")
    wait_for(routed, "taken", "Exposed", "RoutePending")
    assert route_of(routed, "taken")["spec"]["hostnames"] == EXPOSE["httpRoute"]["hostnames"]


def test_the_example_gets_its_route(routed: Kubectl) -> None:
    routed.add_node("h200-0", H200)
    routed.must("apply", f"--filename={EXAMPLE}")
    asked_for = yaml.safe_load(EXAMPLE.read_text())["spec"]["expose"]["httpRoute"]
    route = route_of(routed, EXAMPLE.stem)
    assert route["spec"]["hostnames"] == asked_for["hostnames"]
    assert route["spec"]["parentRefs"][0].items() >= asked_for["parentRefs"][0].items()


def test_a_route_leads_to_the_service_until_the_cluster_has_pools(routed: Kubectl) -> None:
    apply(routed, "pooled")
    route_of(routed, "pooled")
    apply(routed, "pooled", POOLED)
    wait_for(routed, "pooled", "Exposed", "InferencePoolMissing")
    assert backend(routed, "pooled") == "Service"

    old = binaries.inference_extension_crds(oldest=True)  # Its pools are v1alpha2, of another group.
    routed.must("apply", "--server-side", f"--filename={old}/inference.networking.x-k8s.io_inferencepools.yaml")
    routed.wait_for_crds("inferencepools.inference.networking.x-k8s.io")
    apply(routed, "pooled", {**POOLED, "httpRoute": {**EXPOSE["httpRoute"], "requestTimeoutSeconds": 90}})
    generation = routed.object("sdd", "pooled")["metadata"]["generation"]
    eventually(
        lambda: routed.object("sdd", "pooled")["status"]["observedGeneration"] == generation, "the change is seen"
    )
    assert condition(routed, "pooled", "Exposed")[1] == "InferencePoolMissing"
    assert backend(routed, "pooled") == "Service"

    install_pools(routed)
    pool = route_of(routed, "pooled", POOLS)
    assert pool["spec"]["endpointPickerRef"]["name"] == "epp"
    (owner,) = pool["metadata"]["ownerReferences"]
    assert owner["uid"] == routed.object("sdd", "pooled")["metadata"]["uid"]
    eventually(lambda: backend(routed, "pooled") == "InferencePool", "the route leads to the pool")


@pytest.fixture
def pooled(routed: Kubectl) -> Kubectl:
    """kubectl where the Gateway API and the Inference Extension are installed."""
    install_pools(routed)
    return routed


def test_what_gateways_say_of_a_pool_is_in_the_status(pooled: Kubectl) -> None:
    apply(pooled, "told", POOLED)
    route_of(pooled, "told", POOLS)
    resolved, accepted = {"ResolvedRefs": ("True", "ResolvedRefs")}, {"Accepted": ("True", "Accepted")}
    eventually(lambda: route_of(pooled, "told"), "there is a route")
    report(pooled, "told", **accepted, **resolved)
    wait_for(pooled, "told", "Exposed", "PoolPending")
    report(pooled, "told", POOLS, **accepted, ResolvedRefs=("False", "InvalidExtensionRef"))
    assert "endpointPickerRef" in wait_for(pooled, "told", "Exposed", "PoolNotResolved")
    report(pooled, "told", POOLS, **accepted, ResolvedRefs=("False", "RefNotPermitted"))
    eventually(lambda: "ReferenceGrant" in condition(pooled, "told", "Exposed")[2], "the fix is told")
    report(pooled, "told", POOLS, **accepted, **resolved)
    wait_for(pooled, "told", "Exposed", "RouteAccepted")


def test_drift_of_a_pool_is_repaired_and_a_pool_that_is_no_longer_asked_for_goes(pooled: Kubectl) -> None:
    apply(pooled, "stays", POOLED)
    wanted = route_of(pooled, "stays", POOLS)["spec"]
    change = json.dumps({"spec": {"targetPorts": [{"number": 1}], "selector": {"matchLabels": {"other": "pods"}}}})
    pooled.must("patch", POOLS, "stays", "--type=merge", f"--patch={change}", "--field-manager=somebody")
    eventually(lambda: pooled.object(POOLS, "stays")["spec"] == wanted, "the pool is as before")
    pooled.must("delete", POOLS, "stays")
    route_of(pooled, "stays", POOLS)

    apply(pooled, "stays", EXPOSE)
    eventually(lambda: "stays" not in names(pooled, POOLS), "the pool is deleted")
    assert backend(pooled, "stays") == "Service"


def test_two_deployments_of_the_example_share_a_hostname(pooled: Kubectl) -> None:
    pooled.add_node("h200-1", H200)
    pooled.must("apply", f"--filename={TWO_POOLS}")
    chat, batch = (route_of(pooled, f"qwen3-8b-{name}") for name in ("chat", "batch"))
    assert chat["spec"]["hostnames"] == batch["spec"]["hostnames"]
    headers = [{match.get("headers", [{}])[0].get("name") for match in rule["matches"]}
               for route in (chat, batch) for rule in route["spec"]["rules"]]  # fmt: skip
    assert headers == [{None}, {"X-Traffic"}, {"X-Gateway-Model-Name"}]
    for name in ("qwen3-8b-chat", "qwen3-8b-batch"):
        pool = route_of(pooled, name, POOLS)
        assert pool["spec"]["selector"]["matchLabels"]["specdecode.io/deployment"] == name
        assert pool["spec"]["endpointPickerRef"]["name"] == f"{name}-epp"
