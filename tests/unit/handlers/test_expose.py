"""Write and delete the HTTPRoute and the InferencePool of an object apart from its engines."""

import pytest

from specdecode_operator.cluster.resources import (
    DEPLOYMENT,
    HORIZONTAL_POD_AUTOSCALER,
    HTTP_ROUTE,
    INFERENCE_POOL,
    SERVICE,
    SPECDECODE_DEPLOYMENT,
)
from tests.support.objects import Body, tiny_cpu
from tests.unit.handlers.reconciler_world import World

ROUTED = tiny_cpu(expose={"httpRoute": {"parentRefs": [{"name": "public"}]}})
ROUTES = HTTP_ROUTE.qualified_plural
POOLS = INFERENCE_POOL.qualified_plural
POOL = {"inferencePool": {"endpointPickerRef": {"name": "epp"}}}
POOLED = tiny_cpu(expose=ROUTED["expose"] | POOL)
ALL = frozenset({HTTP_ROUTE.kind, INFERENCE_POOL.kind})


@pytest.fixture
def routed(world: World) -> World:
    """A world with the Gateway API and an object that asks for a route."""
    world.cache.optional_kinds = frozenset({HTTP_ROUTE.kind})
    world.add(ROUTED)
    return world


def change(world: World, spec: Body) -> None:
    meta = {**world.object["metadata"], "generation": world.object["metadata"].get("generation", 1) + 1}
    world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=spec, metadata=meta)


async def test_the_route_is_written_once(routed: World) -> None:
    await routed.look()
    assert routed.api.names(HTTP_ROUTE) == ["llama"]
    assert routed.said("Exposed")[:2] == ("Unknown", "RoutePending")
    await routed.look()
    assert await routed.look() == [], "another look changes nothing"


async def test_without_the_gateway_api_engines_start_and_the_route_waits(routed: World) -> None:
    routed.cache.optional_kinds = frozenset()
    await routed.look()
    assert routed.said("Exposed")[:2] == ("Unknown", "GatewayApiMissing")
    assert routed.api.names(DEPLOYMENT, SERVICE) == ["llama", "llama"]
    assert routed.api.names(HTTP_ROUTE) == []
    assert await routed.look() == [], "nothing is written again"
    routed.cache.optional_kinds = frozenset({HTTP_ROUTE.kind})
    await routed.look()
    assert routed.api.names(HTTP_ROUTE) == ["llama"]


async def test_a_route_stays_while_the_operator_may_not_list_routes(routed: World) -> None:
    await routed.look()
    routed.cache.optional_kinds = frozenset()
    change(routed, {**ROUTED, "replicas": 2})
    await routed.look()
    assert routed.said("Exposed")[1] == "GatewayApiMissing"
    assert routed.api.names(HTTP_ROUTE) == ["llama"]


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (403, ("Unknown", "Forbidden")),
        (404, ("Unknown", "ApiServerError")),
        (422, ("False", "ChildRefused")),
    ],
)
async def test_a_refused_route_does_not_hold_the_engines_up(
    routed: World, status: int, outcome: tuple[str, str]
) -> None:
    message = f'User "operator" cannot patch resource "{ROUTES}"' if status == 403 else "no"
    routed.api.refusals[f"patch {ROUTES}"] = (status, message)
    await routed.look()
    assert routed.said("Exposed")[:2] == outcome
    assert routed.said()[1] not in {"Forbidden", "ApiServerError", "ChildRefused"}
    assert routed.api.names(DEPLOYMENT) == ["llama"]
    routed.api.refusals.clear()
    await routed.look()
    assert routed.api.names(HTTP_ROUTE) == ["llama"]


async def test_a_route_of_another_owner_is_left_alone(routed: World) -> None:
    theirs = routed.api.create(HTTP_ROUTE, {"metadata": {"namespace": "team", "name": "llama"}, "spec": {}})
    await routed.look()
    assert routed.said("Exposed")[:2] == ("False", "ChildNameConflict")
    assert routed.said()[1] != "ChildNameConflict"
    assert routed.api.find(HTTP_ROUTE, "llama") == theirs
    change(routed, tiny_cpu())
    await routed.look()
    assert routed.api.find(HTTP_ROUTE, "llama") == theirs


async def test_the_route_goes_with_its_field_even_if_the_spec_does_not_fit(routed: World) -> None:
    await routed.look()
    change(routed, {**ROUTED, "speculation": {"method": "unknown"}})
    await routed.look()
    assert routed.api.names(HTTP_ROUTE) == ["llama"], "an invalid spec says nothing about it"
    huge = tiny_cpu(serving={"maxModelLen": 1024, "minConcurrency": 60_000})
    change(routed, {**huge, "expose": ROUTED["expose"]})
    await routed.look()
    assert routed.said("Planned")[1] == "DoesNotFit"
    assert routed.api.names(HTTP_ROUTE) == ["llama"], "its engines still serve"
    change(routed, huge)
    await routed.look()
    assert routed.api.names(HTTP_ROUTE) == []
    assert routed.api.names(DEPLOYMENT) == ["llama"]


def backend(world: World) -> str:
    """Kind of the route's backend."""
    route = world.api.find(HTTP_ROUTE, "llama")
    assert route is not None
    return str(route["spec"]["rules"][0]["backendRefs"][0].get("kind", "Service"))


async def test_pool_and_route_are_written_once(world: World) -> None:
    world.cache.optional_kinds = ALL
    world.add(POOLED)
    await world.look()
    assert world.api.names(INFERENCE_POOL, HTTP_ROUTE) == ["llama", "llama"]
    assert world.said("Exposed")[:2] == ("Unknown", "RoutePending")
    await world.look()
    assert await world.look() == [], "another look changes nothing"


async def test_a_route_leads_to_the_service_until_the_cluster_has_pools(routed: World) -> None:
    await routed.look()
    change(routed, POOLED)
    await routed.look()
    assert routed.said("Exposed")[:2] == ("Unknown", "InferencePoolMissing")
    assert routed.said()[1] != "InferencePoolMissing"
    assert backend(routed) == "Service"
    assert await routed.look() == [], "nothing is written again"
    routed.cache.optional_kinds = ALL
    await routed.look()
    assert routed.api.names(INFERENCE_POOL) == ["llama"]
    assert backend(routed) == "InferencePool"


@pytest.mark.parametrize(("status", "outcome"), [(403, ("Unknown", "Forbidden")), (422, ("False", "ChildRefused"))])
async def test_a_refused_pool_holds_up_neither_engines_nor_the_route_to_them(
    routed: World, status: int, outcome: tuple[str, str]
) -> None:
    await routed.look()
    routed.cache.optional_kinds = ALL
    message = f'User "operator" cannot patch resource "{POOLS}"' if status == 403 else "no"
    routed.api.refusals[f"patch {POOLS}"] = (status, message)
    change(routed, POOLED)
    await routed.look()
    assert routed.said("Exposed")[:2] == outcome
    assert routed.said()[1] not in {"Forbidden", "ChildRefused"}
    assert backend(routed) == "Service"


async def test_a_pool_of_another_owner_is_left_alone_and_gets_no_route(world: World) -> None:
    theirs = world.api.create(INFERENCE_POOL, {"metadata": {"namespace": "team", "name": "llama"}, "spec": {}})
    world.cache.optional_kinds = ALL
    world.add(POOLED)
    await world.look()
    assert world.said("Exposed")[:2] == ("False", "ChildNameConflict")
    assert world.api.find(INFERENCE_POOL, "llama") == theirs
    assert world.api.names(HTTP_ROUTE) == []


async def test_the_route_leaves_the_pool_before_it_is_deleted(world: World) -> None:
    world.cache.optional_kinds = ALL
    world.add(POOLED)
    await world.look()
    huge = tiny_cpu(serving={"maxModelLen": 1024, "minConcurrency": 60_000})
    change(world, {**huge, "expose": ROUTED["expose"]})
    await world.look()
    assert world.said("Planned")[1] == "DoesNotFit"
    assert world.api.names(INFERENCE_POOL) == ["llama"], "the route still leads to it"
    change(world, ROUTED)
    writes = await world.look()
    assert world.api.names(INFERENCE_POOL) == []
    assert backend(world) == "Service"
    written = [each for each in writes if ROUTES in each or POOLS in each]
    assert written == [f"patch {ROUTES} llama", f"delete {POOLS} llama"]


async def test_pool_and_route_go_with_their_fields(world: World) -> None:
    world.cache.optional_kinds = ALL
    world.add(POOLED)
    await world.look()
    change(world, tiny_cpu())
    await world.look()
    assert world.api.names(INFERENCE_POOL, HTTP_ROUTE) == []
    assert world.api.names(DEPLOYMENT) == ["llama"]


async def test_the_pool_stays_as_long_as_its_route_cannot_be_deleted(world: World) -> None:
    world.cache.optional_kinds = ALL
    world.add(POOLED)
    await world.look()
    world.api.refusals[f"delete {ROUTES}"] = (403, f'User "operator" cannot delete resource "{ROUTES}"')
    change(world, tiny_cpu())
    await world.look()
    assert world.said("Exposed")[:2] == ("Unknown", "Forbidden")
    assert world.api.names(INFERENCE_POOL, HTTP_ROUTE) == ["llama", "llama"]
    world.api.refusals.clear()
    await world.look()
    assert world.api.names(INFERENCE_POOL, HTTP_ROUTE) == []


async def test_the_route_goes_with_its_field_even_if_its_pool_is_refused(routed: World) -> None:
    await routed.look()
    change(routed, tiny_cpu(expose={"inferencePool": POOLED["expose"]["inferencePool"]}))
    await routed.look()
    assert routed.said("Exposed")[:2] == ("Unknown", "InferencePoolMissing")
    assert routed.api.names(HTTP_ROUTE) == []


async def test_a_blocked_pool_does_not_hold_the_autoscaler_up(routed: World) -> None:
    scaled = tiny_cpu(autoscaling={"maxReplicas": 4, "metric": "RunningRequests", "target": 64})
    change(routed, {**scaled, "expose": POOLED["expose"]})
    await routed.look()
    assert routed.said("Exposed")[1] == "InferencePoolMissing"
    assert routed.said("Autoscaled")[1] == "AutoscalerPending"
    assert routed.api.names(HORIZONTAL_POD_AUTOSCALER) == ["llama"]
