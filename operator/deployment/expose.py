"""Render the HTTPRoute and InferencePool of `spec.expose`, and read from their status whether the Gateways accept them.

The route has one backend, the Service or the InferencePool. Both select the pods of a canary too. A second backend with
a weight would get its share of the requests while its engines start or fail, and clients would see errors.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Expose, HttpRoute, InferencePool, Key
from specdecode_operator.cluster.manifests import owned
from specdecode_operator.cluster.resources import HTTP_ROUTE, INFERENCE_POOL, Resource, selector_labels
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
MODEL_NAME_HEADER: Final = "X-Gateway-Model-Name"
"""Header with the model name of a request's body, set by the body-based router of the Inference Extension.

https://github.com/kubernetes-sigs/gateway-api-inference-extension/tree/v1.5.0/pkg/bbr
"""
KIND_MISSING: Final = {
    HTTP_ROUTE.kind: Blocked(
        "GatewayApiMissing",
        "spec.expose.httpRoute: the cluster has no HTTPRoutes (gateway.networking.k8s.io/v1), or the operator may not"
        " list them: install the Gateway API 1.2 or newer and a gateway controller, or update the operator's role; the"
        " operator then creates the route. Engines keep serving",
    ),
    INFERENCE_POOL.kind: Blocked(
        "InferencePoolMissing",
        "spec.expose.inferencePool: the cluster has no InferencePools (inference.networking.k8s.io/v1), or the operator"
        " may not list them: install the Gateway API Inference Extension 1.0 or newer, or update the operator's role;"
        " the operator then creates the pool. Until then, it does not create or change the HTTPRoute. Engines keep"
        " serving",
    ),
}
"""Reason and message of the condition if the cluster lacks a kind."""

REFUSED_HINT: Final = (
    "; routes need the Gateway API 1.2 or newer, pools the Gateway API Inference Extension 1.0 or newer"
)
_FIXES: Final = {
    "InvalidExtensionRef": "create the Service of the endpoint picker, or correct"
    " expose.inferencePool.endpointPickerRef",
    "InvalidKind": "use a gateway that supports InferencePools, or remove expose.inferencePool",
    "NoMatchingListenerHostname": "use a hostname of a listener in expose.httpRoute.hostnames",
    "NoMatchingParent": "correct sectionName or port in expose.httpRoute.parentRefs",
    "NotAllowedByListeners": "allow routes from namespace {namespace} in allowedRoutes of the Gateway's listeners",
    "NotSupportedByParent": "use a gateway that supports InferencePools, or remove expose.inferencePool",
    "RefNotPermitted": "allow the reference from namespace {namespace} with a ReferenceGrant in the other namespace",
}
"""Fix for each reason of a gateway controller.

https://gateway-api.sigs.k8s.io/reference/spec/ and
https://gateway-api-inference-extension.sigs.k8s.io/reference/spec/
"""


@dataclass(frozen=True)
class _Reasons:
    """Reasons of the condition for one kind."""

    pending: str
    accepted: str
    not_accepted: str
    not_resolved: str
    check: str
    """What to check if no gateway controller reports."""


_ROUTE: Final = _Reasons(
    *("RoutePending", "RouteAccepted", "RouteNotAccepted", "RouteNotResolved"),
    "check that the Gateway exists and is Programmed",
)
_POOL: Final = _Reasons(
    *("PoolPending", "PoolAccepted", "PoolNotAccepted", "PoolNotResolved"),
    "check that the Gateway exists, is Programmed and supports InferencePools",
)

_Finding: TypeAlias = tuple[Any, str, str]
"""Status, reason and message of what one Gateway reports."""


def wanted_kinds(parent: ParsedDeployment) -> frozenset[str]:
    """Return the kinds of the objects in `spec.expose`; empty if the spec is invalid."""
    if isinstance(parent.spec, InvalidSpecError):
        return frozenset()
    wishes = {HTTP_ROUTE.kind: parent.spec.expose.http_route, INFERENCE_POOL.kind: parent.spec.expose.inference_pool}
    return frozenset(kind for kind, wish in wishes.items() if wish is not None)


def render_exposed(key: Key, uid: str, expose: Expose, port: int) -> list[Body]:
    """Return the InferencePool and the HTTPRoute of an object, in the order in which to create them."""
    bodies, backend = [], {"name": key.name, "port": port}
    if expose.inference_pool is not None:
        bodies.append(_child(INFERENCE_POOL, key, uid, _pool_spec(key, expose.inference_pool, port)))
        backend = {"group": INFERENCE_POOL.group, "kind": INFERENCE_POOL.kind, "name": key.name}
    if expose.http_route is not None:
        bodies.append(_child(HTTP_ROUTE, key, uid, _route_spec(expose.http_route, backend)))
    return bodies


def _child(resource: Resource, key: Key, uid: str, spec: Body) -> Body:
    body = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": {"name": key.name}, "spec": spec}
    return owned(body, key, uid)


def _pool_spec(key: Key, pool: InferencePool, port: int) -> Body:
    picker = pool.endpoint_picker_ref
    return {
        "selector": {"matchLabels": selector_labels(key.name)},
        "targetPorts": [{"number": port}],
        "endpointPickerRef": {
            "name": picker.name,
            "port": {"number": picker.port},
            "failureMode": picker.failure_mode.value,
        },
    }


def _route_spec(route: HttpRoute, backend: Mapping[str, Any]) -> Body:
    return {
        "parentRefs": [each.model_dump(by_alias=True, exclude_none=True) for each in route.parent_refs],
        **({"hostnames": list(route.hostnames)} if route.hostnames else {}),
        "rules": [
            {
                "matches": [{"path": {"type": "PathPrefix", "value": path}, **headers} for path in CLIENT_PATHS],
                "backendRefs": [dict(backend)],
                # Without the field, the limit depends on the gateway; 0s disables it.
                "timeouts": {"request": f"{route.request_timeout_seconds}s"},
            }
            for headers in ([each.model_dump(by_alias=True) for each in route.matches] or [{}])
        ],
    }


def exposed_condition(
    parent: ParsedDeployment, route: Body | None, pool: Body | None, blocked: Readiness | None
) -> list[ConditionUpdate]:
    """Return the condition Exposed of an object; empty without a route and a pool in the cluster and in the spec.

    ``route`` and ``pool`` are the live children, and ``blocked`` is why one could not be written.
    """
    if blocked is not None:
        return [ConditionUpdate(EXPOSED, blocked.status, blocked.reason, blocked.message)]
    found = [
        *([] if route is None else _route_findings(route)),
        *([] if pool is None else _pool_findings(pool, route)),
    ]
    for status in (FALSE, UNKNOWN, TRUE):
        reasons = [reason for each, reason, _ in found if each is status]
        if reasons:
            message = "; ".join(message for each, _, message in found if each is status)
            return [ConditionUpdate(EXPOSED, status, reasons[0], message)]
    if not (kinds := wanted_kinds(parent)):
        return []
    message = f"{' and '.join(sorted(kinds))} {parent.key.name}: will be created together with the engines"
    return [ConditionUpdate(EXPOSED, UNKNOWN, (_ROUTE if HTTP_ROUTE.kind in kinds else _POOL).pending, message)]


def _route_findings(route: Body) -> Iterator[_Finding]:
    """Yield what each Gateway of a route reports about it."""
    namespace = route["metadata"]["namespace"]
    for reference in objects(mapping(route, "spec"), "parentRefs"):
        gateway = _listener(reference, namespace)
        yield _reported(
            route,
            [each for each in _parents(route) if _listener(mapping(each, "parentRef"), namespace) == gateway],
            _ROUTE,
            f"Gateway {gateway[0]}/{gateway[1]}" + "".join(f", {part}" for part in gateway[2:] if part),
        )


def _pool_findings(pool: Body, route: Body | None) -> Iterator[_Finding]:
    """Yield what each Gateway of a pool reports: the Gateways of its route, or else those in the status of the pool."""
    namespace = pool["metadata"]["namespace"]
    reports = [(_gateway(mapping(each, "parentRef"), namespace), each) for each in _parents(pool)]
    if route is not None and leads_to(route, pool):
        gateways = [_gateway(each, namespace) for each in objects(mapping(route, "spec"), "parentRefs")]
    else:
        gateways = [gateway for gateway, _ in reports]
    name = f"InferencePool {pool['metadata']['name']}"
    if not gateways:
        yield UNKNOWN, _POOL.pending, f"{name}: no Gateway uses it yet; check that an HTTPRoute has it as a backend"
    for gateway in dict.fromkeys(gateways):
        found = [report for each, report in reports if each == gateway]
        yield _reported(pool, found, _POOL, f"Gateway {gateway[0]}/{gateway[1]}, {name}")


def leads_to(route: Body, body: Body) -> bool:
    """Return whether a pool or another object is a backend of a route."""
    return any(
        (backend.get("kind"), backend.get("name")) == (body["kind"], body["metadata"]["name"])
        for rule in objects(mapping(route, "spec"), "rules")
        for backend in objects(rule, "backendRefs")
    )


def _reported(body: Body, reports: Sequence[Mapping[str, Any]], reasons: _Reasons, name: str) -> _Finding:
    """Return the finding about a route or pool from the reports of one Gateway."""
    if not reports:
        return UNKNOWN, reasons.pending, f"{name}: no gateway controller has reported yet; {reasons.check}"
    for report in reports:
        conditions = {str(each.get("type")): each for each in _current(body, report)}
        if bad := next(_failures(conditions, reasons), None):
            reason, condition = bad
            theirs = str(condition.get("reason"))
            fix = _FIXES.get(theirs, "").format(namespace=body["metadata"]["namespace"])
            return FALSE, reason, f"{name}: {theirs}: {condition.get('message')}" + (f"; {fix}" if fix else "")
        if not {"Accepted", "ResolvedRefs"} <= conditions.keys():
            return UNKNOWN, reasons.pending, f"{name}: the gateway controller has not processed the last change yet"
    return TRUE, reasons.accepted, f"{name}: accepted"


def _parents(body: Body) -> list[Mapping[str, Any]]:
    """Return the reports of Gateways in a status. Endpoint pickers may list other kinds of parents."""
    return [
        each
        for each in objects(mapping(body, "status"), "parents")
        if mapping(each, "parentRef").get("kind", "Gateway") == "Gateway"
    ]


def _gateway(reference: Mapping[str, Any], namespace: str) -> tuple[str, ...]:
    return str(reference.get("namespace") or namespace), str(reference.get("name"))


def _listener(reference: Mapping[str, Any], namespace: str) -> tuple[str, ...]:
    """Return namespace, name, listener and port of a Gateway."""
    listener, port = reference.get("sectionName"), reference.get("port")
    return (
        *_gateway(reference, namespace),
        f"listener {listener}" if listener else "",
        f"port {port}" if port else "",
    )


def _current(body: Body, report: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the conditions of a report that are about the current generation of the object."""
    generation = body["metadata"].get("generation", 0)
    for condition in objects(report, "conditions"):
        seen = condition.get("observedGeneration", generation)
        if condition.get("status") in {"True", "False"} and isinstance(seen, int) and seen >= generation:
            yield condition


def _failures(
    conditions: Mapping[str, Mapping[str, Any]], reasons: _Reasons
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield our reason and the condition for each problem that a gateway controller reports."""
    for type_, bad, reason in (
        ("Accepted", "False", reasons.not_accepted),
        ("ResolvedRefs", "False", reasons.not_resolved),
        ("PartiallyInvalid", "True", reasons.not_accepted),
    ):
        if type_ in conditions and conditions[type_]["status"] == bad:
            yield reason, conditions[type_]
