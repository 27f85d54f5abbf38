"""Write and delete the autoscaler of an object apart from its engines, and export the load that it follows."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.resources import (
    DEPLOYMENT,
    HORIZONTAL_POD_AUTOSCALER,
    SCALED_OBJECT,
    SPECDECODE_DEPLOYMENT,
)
from specdecode_operator.deployment.observed.replica_load import ReplicaLoad
from tests.support.objects import Body, tiny_cpu
from tests.unit.handlers.reconciler_world import World

AUTOSCALING: Body = {"maxReplicas": 4, "metric": "RunningRequests", "target": 64}
BY_KEDA: Body = {**AUTOSCALING, "keda": {"serverAddress": "http://prometheus:9090"}}
SCALED = tiny_cpu(autoscaling=AUTOSCALING)


def change(world: World, spec: Body) -> None:
    meta = {**world.object["metadata"], "generation": world.object["metadata"].get("generation", 1) + 1}
    world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=spec, metadata=meta)


async def test_the_autoscaler_is_written_once_and_goes_with_its_field(world: World) -> None:
    world.add(SCALED)
    await world.look()
    assert world.api.names(HORIZONTAL_POD_AUTOSCALER) == ["llama"]
    assert world.said("Autoscaled")[1] == "AutoscalerPending"
    await world.look()
    assert await world.look() == [], "another look changes nothing"
    change(world, {**SCALED, "speculation": {"method": "unknown"}})
    await world.look()
    assert world.api.names(HORIZONTAL_POD_AUTOSCALER) == ["llama"], "an invalid spec says nothing about it"
    change(world, tiny_cpu())
    await world.look()
    assert world.api.names(HORIZONTAL_POD_AUTOSCALER) == []
    assert world.api.names(DEPLOYMENT) == ["llama"]


async def test_replicas_that_the_autoscaler_wrote_reach_the_engines(world: World) -> None:
    world.add(SCALED)
    await world.look()
    change(world, {**SCALED, "replicas": 3})
    await world.look()
    (workload,) = world.all(DEPLOYMENT)
    assert workload["spec"]["replicas"] == 3


async def test_without_keda_engines_start_and_the_autoscaler_waits(world: World) -> None:
    world.add(tiny_cpu(autoscaling=BY_KEDA))
    await world.look()
    assert world.said("Autoscaled")[:2] == ("Unknown", "KedaMissing")
    assert world.api.names(DEPLOYMENT) == ["llama"]
    assert await world.look() == [], "nothing is written again"
    world.cache.optional_kinds = frozenset({SCALED_OBJECT.kind})
    await world.look()
    assert world.api.names(SCALED_OBJECT) == ["llama"]


async def test_the_kind_of_the_autoscaler_can_change(world: World) -> None:
    world.cache.optional_kinds = frozenset({SCALED_OBJECT.kind})
    world.add(SCALED)
    await world.look()
    change(world, tiny_cpu(autoscaling=BY_KEDA))
    await world.look()
    assert (world.api.names(HORIZONTAL_POD_AUTOSCALER), world.api.names(SCALED_OBJECT)) == ([], ["llama"])
    change(world, SCALED)
    await world.look()
    assert (world.api.names(HORIZONTAL_POD_AUTOSCALER), world.api.names(SCALED_OBJECT)) == (["llama"], [])


@pytest.mark.parametrize(("status", "reason"), [(403, "Forbidden"), (422, "ChildRefused")])
async def test_a_refused_autoscaler_does_not_hold_the_engines_up(world: World, status: int, reason: str) -> None:
    plural = HORIZONTAL_POD_AUTOSCALER.qualified_plural
    message = f'User "operator" cannot patch resource "{plural}"' if status == 403 else "no"
    world.api.refusals[f"patch {plural}"] = (status, message)
    world.add(SCALED)
    await world.look()
    assert world.said("Autoscaled")[1] == reason
    assert world.said()[1] != reason
    assert world.api.names(DEPLOYMENT) == ["llama"]


async def test_an_autoscaler_of_another_owner_is_left_alone(world: World) -> None:
    theirs = world.api.create(HORIZONTAL_POD_AUTOSCALER, {"metadata": {"namespace": "team", "name": "llama"}})
    world.add(SCALED)
    await world.look()
    assert world.said("Autoscaled")[:2] == ("False", "ChildNameConflict")
    assert world.api.find(HORIZONTAL_POD_AUTOSCALER, "llama") == theirs
    assert world.api.names(DEPLOYMENT) == ["llama"]


async def test_a_capacity_that_was_not_measured_is_reported(world: World) -> None:
    world.add(tiny_cpu(autoscaling={**AUTOSCALING, "metric": "PredictedUtilization", "target": 80}))
    await world.look()
    assert world.said("Autoscaled")[:2] == ("False", "CapacityUnknown")


def test_load_and_capacity_are_exported_until_the_object_is_gone(world: World) -> None:
    registry, key = CollectorRegistry(), Key("team", "llama")
    registry.register(world.metrics)
    labels = {"deployment_namespace": "team", "deployment": "llama"}

    def values() -> tuple[float | None, float | None]:
        names = ("specdecode_load_replicas", "specdecode_replica_capacity_requests")
        found = [registry.get_sample_value(name, labels) for name in names]
        return found[0], found[1]

    assert values() == (None, None)
    world.metrics.set_load(key, ReplicaLoad(24.0, None, ""))
    assert values() == (None, 24.0)
    world.metrics.set_load(key, ReplicaLoad(24.0, 1.5, ""))
    assert values() == (1.5, 24.0)
    world.metrics.set_load(key, None)
    assert values() == (None, None)
    assert b"specdecode_load_replicas" in generate_latest(registry)
