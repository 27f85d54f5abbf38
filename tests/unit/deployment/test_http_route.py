"""The HTTPRoute to the engines: forwarded paths, and the condition from the status of its Gateways."""

from typing import Any

import pytest

from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import engine_spec_hash_of, parse_deployment
from specdecode_operator.deployment.rollout.readiness import stalled
from tests.support.decisions import decide
from tests.support.objects import Body, parent, tiny_cpu

PUBLIC = {"name": "public"}
HTTPS = {"name": "edge", "namespace": "infra", "sectionName": "https"}
ACCEPTED = ("Accepted", "True", "Accepted")
RESOLVED = ("ResolvedRefs", "True", "ResolvedRefs")
NOT_ALLOWED = ("Accepted", "False", "NotAllowedByListeners")
REMOVED = ("ResolvedRefs", "False", "BackendNotFound")


def asked(*gateways: Body, **fields: Any) -> Body:
    return {"httpRoute": {"parentRefs": list(gateways or (PUBLIC,)), **fields}}


def routes(spec: Body) -> list[Body]:
    desired, _, _ = decide(parent(spec))
    return [child for child in desired.children if child["kind"] == "HTTPRoute"]


def rendered(*gateways: Body, serving: Body | None = None, **fields: Any) -> Body:
    spec = tiny_cpu(expose=asked(*gateways, **fields))
    spec["serving"] |= serving or {}
    (route,) = routes(spec)
    return route


def test_no_route_is_made_unless_it_is_asked_for() -> None:
    assert routes(tiny_cpu()) == []
    assert routes(tiny_cpu(expose={})) == []
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


def test_engines_that_serve_https_need_another_object_which_the_plan_names() -> None:
    spec = tiny_cpu(expose=asked())
    assert "BackendTLSPolicy" not in decide(parent(spec))[2]["Planned"].message
    spec["serving"] |= {"tlsSecret": {"name": "tls"}}
    assert "BackendTLSPolicy" in decide(parent(spec))[2]["Planned"].message


def test_a_route_changes_no_engine() -> None:
    plain, exposed = (
        next(child for child in decide(parent(spec))[0].children if child["kind"] == "Deployment")
        for spec in (tiny_cpu(), tiny_cpu(expose=asked()))
    )
    assert plain == exposed
    hashes = {engine_spec_hash_of(parse_deployment(parent(spec))) for spec in (tiny_cpu(), tiny_cpu(expose=asked()))}
    assert len(hashes) == 1, "neither a rollback nor a policy is judged anew"


def live(*reports: tuple[Body, list[tuple[str, str, str]]], generation: int = 2, seen: int = 2) -> Body:
    """The route as its gateway controllers have reported on it: per Gateway, type, status and reason of conditions."""
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
    route = rendered(PUBLIC, HTTPS)
    metadata = {**route["metadata"], "namespace": "default", "generation": generation}
    return {**route, "metadata": metadata, "status": {"parents": parents}}


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
    observed = {"route_blocked": stalled("ChildNameConflict", "taken")}
    assert exposed(None, **observed) == ("False", "ChildNameConflict", "taken")
    ready = [
        decide(parent(tiny_cpu(expose=asked())), Observation(**each))[2]["Ready"].reason for each in ({}, observed)
    ]
    assert ready[0] == ready[1]


def test_a_route_of_an_earlier_spec_is_still_told_of_while_the_spec_is_invalid() -> None:
    spec = tiny_cpu(speculation={"method": "unknown"})
    assert exposed(live((PUBLIC, FINE), (HTTPS, FINE)), spec)[:2] == ("True", "RouteAccepted")
