"""Render the HTTPRoute of `spec.expose`, and read from its status whether the Gateways accept it.

The route has one backend, the Service, which also selects the pods of a canary. A second backend with a weight would
get its share of the requests while its engines start or fail, and clients would see errors.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import HttpRoute, Key
from specdecode_operator.cluster.manifests import owned
from specdecode_operator.cluster.resources import HTTP_ROUTE
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, Blocked, ConditionUpdate
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment
from specdecode_operator.deployment.rollout.readiness import Readiness
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.untrusted import mapping, objects

EXPOSED: Final = "Exposed"
CLIENT_PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/models", "/v1/responses")
"""Prefixes of the paths that the route forwards. All of them require the key of `serving.apiKeySecret`.

https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
"""
GATEWAY_API_MISSING: Final = Blocked(
    "GatewayApiMissing",
    "spec.expose.httpRoute: the cluster has no HTTPRoutes (gateway.networking.k8s.io/v1), or the operator may not list"
    " them: install the Gateway API 1.2 or newer and a gateway controller, or update the operator's role; the operator"
    " then creates the route. Engines keep serving",
)
REFUSED_HINT: Final = "; the route needs the Gateway API 1.2 or newer"


def wanted_route(parent: ParsedDeployment) -> HttpRoute | None:
    """Return the route of a spec; None without one, or if the spec is invalid."""
    return None if isinstance(parent.spec, InvalidSpecError) else parent.spec.expose.http_route


def render_route(key: Key, uid: str, route: HttpRoute, port: int) -> Body:
    """Return the HTTPRoute to the Service of an object, whose port is ``port``."""
    spec: dict[str, Any] = {
        "parentRefs": [each.model_dump(by_alias=True, exclude_none=True) for each in route.parent_refs],
        **({"hostnames": list(route.hostnames)} if route.hostnames else {}),
        "rules": [
            {
                "matches": [{"path": {"type": "PathPrefix", "value": path}} for path in CLIENT_PATHS],
                "backendRefs": [{"name": key.name, "port": port}],
                # Without the field, the limit depends on the gateway; 0s disables it.
                "timeouts": {"request": f"{route.request_timeout_seconds}s"},
            }
        ],
    }
    body = {"apiVersion": HTTP_ROUTE.api_version, "kind": HTTP_ROUTE.kind, "metadata": {"name": key.name}, "spec": spec}
    return owned(body, key, uid)


def exposed_condition(parent: ParsedDeployment, live: Body | None, blocked: Readiness | None) -> list[ConditionUpdate]:
    """Return the condition Exposed of an object; empty if there is no route and none is wanted.

    ``live`` is the object's route in the cluster, and ``blocked`` is why it could not be written.
    """
    if blocked is not None:
        return [ConditionUpdate(EXPOSED, blocked.status, blocked.reason, blocked.message)]
    if live is not None:
        return [_seen_by_gateways(live)]
    if wanted_route(parent) is None:
        return []
    message = f"HTTPRoute {parent.key.name} is created together with the engines"
    return [ConditionUpdate(EXPOSED, UNKNOWN, "RoutePending", message)]


def _seen_by_gateways(route: Body) -> ConditionUpdate:
    """Return the condition that sums up what the Gateways report about a route."""
    found = [_seen_by(route, reference) for reference in objects(mapping(route, "spec"), "parentRefs")]
    for status in (FALSE, UNKNOWN, TRUE):
        reasons = [reason for each, reason, _ in found if each is status]
        if reasons:
            message = "; ".join(message for each, _, message in found if each is status)
            return ConditionUpdate(EXPOSED, status, reasons[0], message)
    raise AssertionError  # the schema requires a parent


def _seen_by(route: Body, reference: Mapping[str, Any]) -> tuple[Any, str, str]:
    """Return status, reason and message of one Gateway of a route."""
    namespace = route["metadata"]["namespace"]
    gateway = _gateway(reference, namespace)
    name = f"Gateway {gateway[0]}/{gateway[1]}" + "".join(f", {part}" for part in gateway[2:] if part)
    reports = [
        each
        for each in objects(mapping(route, "status"), "parents")
        if _gateway(mapping(each, "parentRef"), namespace) == gateway
    ]
    if not reports:
        return (
            *(UNKNOWN, "RoutePending"),
            f"{name}: no gateway controller has reported yet; check that the Gateway exists and is Programmed",
        )
    for report in reports:
        conditions = {str(each.get("type")): each for each in _current(route, report)}
        if bad := next(_failures(conditions), None):
            reason, condition = bad
            return FALSE, reason, f"{name}: {condition.get('reason')}: {condition.get('message')}"
        if not {"Accepted", "ResolvedRefs"} <= conditions.keys():
            return UNKNOWN, "RoutePending", f"{name}: the gateway controller has not processed the last change yet"
    return TRUE, "RouteAccepted", f"{name} accepts the route"


def _gateway(reference: Mapping[str, Any], namespace: str) -> tuple[str, str, str, str]:
    """Return namespace, name, listener and port of a Gateway."""
    listener, port = reference.get("sectionName"), reference.get("port")
    return (
        str(reference.get("namespace") or namespace),
        str(reference.get("name")),
        f"listener {listener}" if listener else "",
        f"port {port}" if port else "",
    )


def _current(route: Body, report: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the conditions of a report that are about the current generation of the route."""
    generation = route["metadata"].get("generation", 0)
    for condition in objects(report, "conditions"):
        seen = condition.get("observedGeneration", generation)
        if condition.get("status") in {"True", "False"} and isinstance(seen, int) and seen >= generation:
            yield condition


def _failures(conditions: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield our reason and the condition for each problem that a gateway controller reports."""
    for type_, bad, reason in (
        ("Accepted", "False", "RouteNotAccepted"),
        ("ResolvedRefs", "False", "RouteNotResolved"),
        ("PartiallyInvalid", "True", "RouteNotAccepted"),
    ):
        if type_ in conditions and conditions[type_]["status"] == bad:
            yield reason, conditions[type_]
