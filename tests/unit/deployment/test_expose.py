"""HTTPRoute and InferencePool of the engines: what they select, and the condition from the status of the Gateways."""

from typing import Any

import pytest

from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import engine_spec_hash_of, parse_deployment
from specdecode_operator.deployment.rollout.readiness import stalled
from tests.support.decisions import decide
from tests.support.objects import H100, Body, parent, tiny_cpu

PUBLIC = {"name": "public"}
HTTPS = {"name": "edge", "namespace": "infra", "sectionName": "https"}
ACCEPTED = ("Accepted", "True", "Accepted")
RESOLVED = ("ResolvedRefs", "True", "ResolvedRefs")
NOT_ALLOWED = ("Accepted", "False", "NotAllowedByListeners")
REMOVED = ("ResolvedRefs", "False", "BackendNotFound")
PICKER = {"endpointPickerRef": {"name": "epp"}}


def asked(*gateways: Body, **fields: Any) -> Body:
    return {"httpRoute": {"parentRefs": list(gateways or (PUBLIC,)), **fields}}


def routes(spec: Body, kind: str = "HTTPRoute") -> list[Body]:
    desired, _, _ = decide(parent(spec))
    return [child for child in desired.children if child["kind"] == kind]


def rendered(*gateways: Body, serving: Body | None = None, **fields: Any) -> Body:
    spec = tiny_cpu(expose=asked(*gateways, **fields))
    spec["serving"] |= serving or {}
    (route,) = routes(spec)
    return route


def test_no_route_or_pool_is_made_unless_it_is_asked_for() -> None:
    for kind in ("HTTPRoute", "InferencePool"):
        assert routes(tiny_cpu(), kind) == []
        assert routes(tiny_cpu(expose={}), kind) == []
    assert "Exposed" not in decide(parent(tiny_cpu()))[2]


def test_the_route_goes_from_the_gateways_to_the_service() -> None:
    route = rendered(PUBLIC, HTTPS, serving={"port": 9000}, hostnames=["llm.example.com"])
    assert (route["apiVersion"], route["metadata"]["name"]) == ("gateway.networking.k8s.io/v1", "llama")
    assert [owner["uid"] for owner in route["metadata"]["ownerReferences"]] == ["uid-1"]
    assert route["spec"]["parentRefs"] == [PUBLIC, HTTPS]
    assert route["spec"]["hostnames"] == ["llm.example.com"]
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "llama", "port": 9000}]


@pytest.mark.parametrize(
    ("path", "is_forwarded"),
    [
        ("/v1/chat/completions", True),
        ("/v1/completions", True),
        ("/v1/models", True),
        ("/v1/responses/resp_1/cancel", True),
        ("/v1/messages/count_tokens", True),
        ("/metrics", False),
        ("/health", False),
        ("/version", False),
        ("/tokenize", False),
        ("/sleep", False),
        ("/collective_rpc", False),
        ("/v1/load_lora_adapter", False),
    ],
)
def test_only_the_api_of_clients_is_forwarded(path: str, is_forwarded: bool) -> None:
    (rule,) = rendered()["spec"]["rules"]
    matches = [match["path"] for match in rule["matches"]]
    assert {match["type"] for match in matches} == {"PathPrefix"}
    assert any(f"{path}/".startswith(f"{match['value']}/") for match in matches) == is_forwarded


@pytest.mark.parametrize(("fields", "limit"), [({}, "0s"), ({"requestTimeoutSeconds": 600}, "600s")])
def test_answers_take_as_long_as_they_need_unless_a_limit_is_set(fields: Body, limit: str) -> None:
    (rule,) = rendered(**fields)["spec"]["rules"]
    assert rule["timeouts"] == {"request": limit}


def test_requests_are_selected_by_headers_on_every_forwarded_path() -> None:
    off, batch = ({"headers": [{"name": "X-Speculation", "value": value}]} for value in ("off", "batch"))
    plain, matching = rendered()["spec"]["rules"], rendered(matches=[off, batch])["spec"]["rules"]
    paths = [match["path"] for match in plain[0]["matches"]]
    assert [[match["path"] for match in rule["matches"]] for rule in matching] == [paths, paths]
    selected = [{match["headers"][0]["value"] for match in rule["matches"]} for rule in matching]
    assert selected == [{"off"}, {"batch"}]
    assert [rule["backendRefs"] for rule in matching] == [plain[0]["backendRefs"]] * 2


@pytest.mark.parametrize(
    ("name", "value", "is_noted"),
    [
        ("X-Gateway-Model-Name", "llama-plain", False),
        ("X-Gateway-Model-Name", "sql", False),
        ("x-gateway-model-name", "other", True),
        ("X-Tenant", "other", False),
    ],
)
def test_a_model_name_that_the_engines_do_not_serve_is_noted(name: str, value: str, is_noted: bool) -> None:
    matches = [{"headers": [{"name": name, "value": value}]}]
    spec = tiny_cpu(expose=asked(matches=matches))
    spec["serving"] |= {"servedModelNames": ["llama", "llama-plain"]}
    spec["adapters"] = [{"name": "sql", "model": "adapters/sql", "rank": 8}]
    planned = decide(parent(spec))[2]["Planned"]
    assert planned.reason == "Fits"
    assert ("expose.httpRoute.matches[0]" in planned.message) == is_noted


def pooled(expose: Body | None = None, **changes: Any) -> Body:
    spec = tiny_cpu(expose=(expose or {}) | {"inferencePool": PICKER})
    spec["serving"] |= changes
    return spec


def test_a_pool_selects_the_pods_that_the_service_selects() -> None:
    spec = pooled(port=9000)
    ((pool,), (service,)) = (routes(spec, kind) for kind in ("InferencePool", "Service"))
    assert (pool["apiVersion"], pool["metadata"]["name"]) == ("inference.networking.k8s.io/v1", "llama")
    assert [owner["uid"] for owner in pool["metadata"]["ownerReferences"]] == ["uid-1"]
    assert pool["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert pool["spec"]["targetPorts"] == [{"number": 9000}]
    assert pool["spec"]["endpointPickerRef"] == {"name": "epp", "port": {"number": 9002}, "failureMode": "FailClose"}


def test_a_pool_selects_the_leaders_of_engines_on_several_nodes() -> None:
    wide = {
        "target": {"model": "meta-llama/Llama-3.1-405B-Instruct"},
        "speculation": {"method": "ngram", "numSpeculativeTokens": 4},
        "serving": {"maxModelLen": 8192},
        "parallelism": {"tensor": 8, "pipeline": 2},
        "expose": {"inferencePool": PICKER},
    }
    nodes = (NodeFacts("h100-0", H100, 8), NodeFacts("h100-1", H100, 8))
    desired, _, _ = decide(parent(wide), nodes=nodes, has_leader_worker_sets=True)
    children = {child["kind"]: child for child in desired.children}
    wanted = children["InferencePool"]["spec"]["selector"]["matchLabels"].items()
    template = children["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    labels = [template[role]["metadata"]["labels"] for role in ("leaderTemplate", "workerTemplate")]
    assert [wanted <= each.items() for each in labels] == [True, False]


def test_the_route_leads_to_the_pool() -> None:
    (route,) = routes(pooled(asked()))
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "llama"}]


def test_engines_that_serve_https_need_another_object_which_the_plan_names() -> None:
    spec = tiny_cpu(expose=asked())
    assert "BackendTLSPolicy" not in decide(parent(spec))[2]["Planned"].message
    spec["serving"] |= {"tlsSecret": {"name": "tls"}}
    assert "BackendTLSPolicy" in decide(parent(spec))[2]["Planned"].message
    message = decide(parent(pooled(tlsSecret={"name": "tls"})))[2]["Planned"].message
    assert "BackendTLSPolicy for the InferencePool" in message


def test_a_route_changes_no_engine() -> None:
    plain, exposed = (
        next(child for child in decide(parent(spec))[0].children if child["kind"] == "Deployment")
        for spec in (tiny_cpu(), pooled(asked()))
    )
    assert plain == exposed
    hashes = {engine_spec_hash_of(parse_deployment(parent(spec))) for spec in (tiny_cpu(), pooled(asked()))}
    assert len(hashes) == 1, "neither a rollback nor a policy is judged anew"


Reports = tuple[Body, list[tuple[str, str, str]]]


def live(*reports: Reports, body: Body | None = None, generation: int = 2, seen: int = 2) -> Body:
    """The route, or another child, as its gateway controllers have reported on it.

    A report has a Gateway, and type, status and reason of each condition.
    """
    parents = [
        {
            "parentRef": {"group": "gateway.networking.k8s.io", "kind": "Gateway", **reference},
            "controllerName": "example.com/gateway",
            "conditions": [
                {"type": type_, "status": status, "reason": reason, "message": "told", "observedGeneration": seen}
                for type_, status, reason in conditions
            ],
        }
        for reference, conditions in reports
    ]
    body = body or rendered(PUBLIC, HTTPS)
    metadata = {**body["metadata"], "namespace": "default", "generation": generation}
    return {**body, "metadata": metadata, "status": {"parents": parents}}


def exposed(route: Body | None, spec: Body | None = None, **observed: Any) -> tuple[str, str, str]:
    observation = Observation(route=route, **observed)
    _, _, conditions = decide(parent(spec or tiny_cpu(expose=asked(PUBLIC, HTTPS))), observation)
    found = conditions["Exposed"]
    return found.status, found.reason, found.message


FINE = [ACCEPTED, RESOLVED]


@pytest.mark.parametrize(
    ("reports", "outcome", "words"),
    [
        ([(PUBLIC, FINE), (HTTPS, FINE)], ("True", "RouteAccepted"), ["default/public", "infra/edge"]),
        ([], ("Unknown", "RoutePending"), ["default/public", "infra/edge"]),
        ([(PUBLIC, FINE)], ("Unknown", "RoutePending"), ["infra/edge", "https"]),
        ([(PUBLIC, FINE), ({**HTTPS, "port": 8443}, FINE)], ("Unknown", "RoutePending"), ["infra/edge"]),
        ([(PUBLIC, FINE), (HTTPS, [])], ("Unknown", "RoutePending"), ["infra/edge"]),
        ([(PUBLIC, FINE), (HTTPS, [("Accepted", "Unknown", "Pending"), RESOLVED])], ("Unknown", "RoutePending"), []),
        (
            [(PUBLIC, FINE), (HTTPS, [NOT_ALLOWED, RESOLVED])],
            ("False", "RouteNotAccepted"),
            ["infra/edge", "NotAllowedByListeners"],
        ),
        ([(PUBLIC, [ACCEPTED, REMOVED])], ("False", "RouteNotResolved"), ["default/public", "BackendNotFound"]),
        (
            [(PUBLIC, [*FINE, ("PartiallyInvalid", "True", "UnsupportedValue")]), (HTTPS, FINE)],
            ("False", "RouteNotAccepted"),
            ["UnsupportedValue"],
        ),
        ([(PUBLIC, FINE), ({**HTTPS, "sectionName": "http"}, FINE)], ("Unknown", "RoutePending"), ["infra/edge"]),
    ],
)
def test_the_condition_sums_up_what_gateways_say(
    reports: list[Any], outcome: tuple[str, str], words: list[str]
) -> None:
    *found, message = exposed(live(*reports))
    assert tuple(found) == outcome
    assert [word for word in words if word not in message] == []


def test_what_gateways_said_of_an_earlier_route_does_not_count() -> None:
    assert exposed(live((PUBLIC, FINE), (HTTPS, FINE), seen=1))[:2] == ("Unknown", "RoutePending")
    assert exposed(live((PUBLIC, [NOT_ALLOWED, RESOLVED]), (HTTPS, FINE), seen=1))[:2] == ("Unknown", "RoutePending")


@pytest.mark.parametrize("parents", [None, "x", [None, 1], [{}], [{"parentRef": PUBLIC, "conditions": [{}, None, 3]}]])
def test_a_status_of_any_form_can_be_read(parents: Any) -> None:
    assert exposed({**live(), "status": {"parents": parents}})[:2] == ("Unknown", "RoutePending")


def test_a_route_that_cannot_be_written_is_no_matter_of_the_engines() -> None:
    observed = {"blocked_beside": {"HTTPRoute": stalled("ChildNameConflict", "taken")}}
    assert exposed(None, **observed) == ("False", "ChildNameConflict", "taken")
    ready = [
        decide(parent(tiny_cpu(expose=asked())), Observation(**each))[2]["Ready"].reason for each in ({}, observed)
    ]
    assert ready[0] == ready[1]


def test_a_route_of_an_earlier_spec_is_still_told_of_while_the_spec_is_invalid() -> None:
    spec = tiny_cpu(speculation={"method": "unknown"})
    assert exposed(live((PUBLIC, FINE), (HTTPS, FINE)), spec)[:2] == ("True", "RouteAccepted")


EDGE = {"name": "edge", "namespace": "infra"}
NO_PICKER = ("ResolvedRefs", "False", "InvalidExtensionRef")
NO_POOLS = ("Accepted", "False", "NotSupportedByParent")
NO_GRANT = ("ResolvedRefs", "False", "RefNotPermitted")


def exposed_pool(reports: list[Reports], route: Body | None = None, **expose: Any) -> tuple[str, str, str]:
    """Status, reason and message of Exposed for a pool with these reports."""
    (pool,) = routes(pooled(), "InferencePool")
    return exposed(route, pooled(expose), pool=live(*reports, body=pool))


def routed_pool(*reports: Reports) -> tuple[str, str, str]:
    """The same for the pool of a route that its Gateway accepts."""
    (route,) = routes(pooled(asked(PUBLIC)))
    return exposed_pool(list(reports), live((PUBLIC, FINE), body=route), **asked(PUBLIC))


@pytest.mark.parametrize(
    ("reports", "outcome", "words"),
    [
        ([(PUBLIC, FINE)], ("True", "RouteAccepted"), ["default/public", "InferencePool llama"]),
        ([], ("Unknown", "PoolPending"), ["default/public", "InferencePool llama"]),
        ([(EDGE, FINE)], ("Unknown", "PoolPending"), ["default/public"]),
        ([(PUBLIC, [NO_POOLS, RESOLVED])], ("False", "PoolNotAccepted"), ["expose.inferencePool"]),
        ([(PUBLIC, [ACCEPTED, NO_PICKER])], ("False", "PoolNotResolved"), ["endpointPickerRef"]),
    ],
)
def test_a_route_is_accepted_only_with_its_pool(
    reports: list[Reports], outcome: tuple[str, str], words: list[str]
) -> None:
    *found, message = routed_pool(*reports)
    assert tuple(found) == outcome
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("reports", "outcome"),
    [
        ([], ("Unknown", "PoolPending")),
        ([(EDGE, FINE)], ("True", "PoolAccepted")),
        ([(EDGE, FINE), (PUBLIC, [ACCEPTED, NO_PICKER])], ("False", "PoolNotResolved")),
        ([(EDGE, FINE), ({"kind": "Status", "name": "default"}, [])], ("True", "PoolAccepted")),
    ],
)
def test_a_pool_of_somebody_elses_route_is_told_of_by_its_own_status(
    reports: list[Reports], outcome: tuple[str, str]
) -> None:
    assert exposed_pool(reports)[:2] == outcome


def test_a_pool_that_the_route_does_not_lead_to_yet_does_not_wait_for_its_gateways() -> None:
    status, reason, message = exposed_pool([], live((PUBLIC, FINE), (HTTPS, FINE)), **asked(PUBLIC))
    assert (status, reason) == ("Unknown", "PoolPending")
    assert "HTTPRoute" in message


def test_a_gateway_in_another_namespace_is_told_of_with_the_fix() -> None:
    assert "namespace default in allowedRoutes" in exposed(live((PUBLIC, FINE), (HTTPS, [NOT_ALLOWED, RESOLVED])))[2]
    *found, message = exposed_pool([(EDGE, [ACCEPTED, NO_GRANT])])
    assert found == ["False", "PoolNotResolved"]
    assert "infra/edge" in message
    assert "ReferenceGrant" in message
