"""Models on OCI images start only if the API server keeps image volumes."""

from specdecode_operator.cluster.resources import DEPLOYMENT, JOB, SPECDECODE_DEPLOYMENT
from tests.support.objects import tiny_cpu
from tests.unit.handlers.reconciler_world import World

ON_IMAGE = tiny_cpu(models={"volume": {"image": {"reference": "registry.example.com/models/pair:v1"}}})


async def test_engines_start_with_image_volumes(world: World) -> None:
    world.add(ON_IMAGE)
    await world.look()
    (deployment,) = world.all(DEPLOYMENT)
    volumes = {each["name"]: each for each in deployment["spec"]["template"]["spec"]["volumes"]}
    assert "image" in volumes["models"]
    await world.look()
    assert await world.look() == [], "another look asks nothing"


async def test_live_engines_with_image_volumes_spare_later_dry_runs(world: World) -> None:
    metadata = world.add(ON_IMAGE)["metadata"]
    assert "create pods" in await world.look()
    changed = ON_IMAGE | {"serving": {"maxModelLen": 512}}
    world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=changed, metadata=metadata | {"generation": 2})
    writes = await world.look()
    assert "patch deployments.apps llama" in writes
    assert "create pods" not in writes


async def test_nothing_starts_if_the_api_server_drops_image_volumes(world: World) -> None:
    world.api.image_volumes = False
    world.add(ON_IMAGE)
    await world.look()
    assert world.said()[:2] == ("Unknown", "ImageVolumesMissing")
    assert "spec.models.volume.image" in world.said()[2]
    assert world.api.names(DEPLOYMENT, JOB) == []
    world.api.image_volumes = True
    await world.look()
    assert world.api.names(DEPLOYMENT) == ["llama"]


async def test_no_model_is_read_without_image_volumes(world: World) -> None:
    world.api.image_volumes = False
    world.add({**ON_IMAGE, "target": {"model": "pair/target"}})
    await world.look()
    assert world.said()[1] == "ImageVolumesMissing"
    assert world.api.names(DEPLOYMENT, JOB) == []


async def test_other_deployments_need_no_image_volumes(world: World) -> None:
    world.api.image_volumes = False
    world.add(tiny_cpu())
    await world.look()
    assert world.api.names(DEPLOYMENT) == ["llama"]
