"""The ConfigMap with the recorder that the objects of a namespace share: one write, repairs, and its end."""

import asyncio
from typing import Any

import pytest

from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.resources import (
    CONFIG_MAP,
    DEPLOYMENT,
    RECORDER_NAME,
    SERVICE,
    SPECDECODE_CAPTURE,
    SPECDECODE_DEPLOYMENT,
)
from specdecode_operator.deployment.live_recorder import recorder_config_map
from specdecode_operator.handlers.apply_children import SharedConfigMaps
from specdecode_operator.handlers.main import OperatorState
from specdecode_operator.handlers.settings import Settings
from tests.support.api_server import ApiServer
from tests.support.embedded_operator import until
from tests.support.objects import Body, tiny_cpu
from tests.unit.handlers.reconciler_world import World
from tests.unit.handlers.resync_rounds import Rounds, stop

WRITE = f"patch configmaps {RECORDER_NAME}"
OBJECTS = tuple(f"llama-{number}" for number in range(16))


def recorder(world: World) -> Body | None:
    return world.api.find(CONFIG_MAP, RECORDER_NAME)


def zip_of(body: Body | None) -> Any:
    return (body or {}).get("binaryData")


OURS = zip_of(recorder_config_map("team"))


async def test_second_object_of_a_namespace_writes_no_recorder(world: World) -> None:
    for name in ("llama", "other"):
        world.add(tiny_cpu(), name)
    assert WRITE in await world.look()
    written = await world.look("other")
    assert "patch deployments.apps other" in written
    assert WRITE not in written
    assert zip_of(recorder(world)) == OURS


async def test_many_reconciles_at_once_create_one_recorder(world: World) -> None:
    for name in OBJECTS:
        world.add(tiny_cpu(), name)
    world.see()
    await asyncio.gather(*(world.reconciler.reconcile(Key("team", name)) for name in OBJECTS))
    assert world.api.requests.count(WRITE) == 1
    assert f"get configmaps {RECORDER_NAME}" not in world.api.requests
    assert world.api.names(DEPLOYMENT) == sorted(OBJECTS)


async def test_recorder_precedes_the_workload_and_follows_the_service(world: World) -> None:
    world.add(tiny_cpu())
    written = await world.look()
    assert written.index("patch services llama") < written.index(WRITE) < written.index("patch deployments.apps llama")


async def test_recorder_that_no_watch_has_reported_is_kept(world: World) -> None:
    """An earlier try created it, and its response was lost."""
    world.api.create(CONFIG_MAP, recorder_config_map("team"))
    world.add(tiny_cpu())
    world.cache.put_parent(SPECDECODE_DEPLOYMENT.kind, world.object)
    await world.reconciler.reconcile(Key("team", "llama"))
    assert zip_of(recorder(world)) == OURS
    assert world.api.names(DEPLOYMENT) == ["llama"]


async def test_config_map_of_another_owner_blocks_and_stays(world: World) -> None:
    before = world.api.create(
        CONFIG_MAP, {"metadata": {"namespace": "team", "name": RECORDER_NAME}, "data": {"a": "b"}}
    )
    world.add(tiny_cpu())
    await world.look()
    assert world.said()[:2] == ("False", "ChildNameConflict")
    assert world.api.names(DEPLOYMENT) == []
    assert recorder(world) == before
    world.api.remove(CONFIG_MAP, RECORDER_NAME)
    assert "patch deployments.apps llama" in await world.look()
    assert zip_of(recorder(world)) == OURS


async def test_config_map_of_another_owner_does_not_block_engines_without_a_recorder(world: World) -> None:
    world.api.create(CONFIG_MAP, {"metadata": {"namespace": "team", "name": RECORDER_NAME}})
    world.add(tiny_cpu(engine={"image": "i:1", "recorder": False}))
    assert "patch deployments.apps llama" in await world.look()


async def test_edited_recorder_is_repaired_by_one_of_its_objects(world: World) -> None:
    for name in ("llama", "other"):
        world.add(tiny_cpu(), name)
        await world.look(name)
        await world.look(name)
    world.api.change(CONFIG_MAP, RECORDER_NAME, binaryData={"recorder.zip": "AA=="})
    assert await world.look() == [WRITE]
    assert zip_of(recorder(world)) == OURS
    assert world.told().count("DriftRepaired") == 1
    assert await world.look("other") == []


async def test_deleted_recorder_is_created_again(world: World) -> None:
    world.add(tiny_cpu())
    await world.look()
    world.api.remove(CONFIG_MAP, RECORDER_NAME)
    assert await world.look() == [WRITE]
    assert zip_of(recorder(world)) == OURS
    assert await world.look() == []


async def test_restarted_operator_leaves_the_recorder_alone(world: World) -> None:
    world.add(tiny_cpu())
    await world.look()
    world.restart()
    assert await world.look() == []


async def test_upgrade_writes_the_recorder_once_and_no_template(world: World) -> None:
    for name in ("llama", "other"):
        world.add(tiny_cpu(), name)
        await world.look(name)
    earlier = {**(recorder(world) or {})["metadata"], "annotations": {"specdecode.io/applied-hash": "earlier"}}
    world.api.change(CONFIG_MAP, RECORDER_NAME, metadata=earlier, binaryData={"recorder.zip": "AA=="})
    world.restart()
    assert [await world.look(name) for name in ("llama", "other")] == [[WRITE], []]
    assert zip_of(recorder(world)) == OURS
    assert "DriftRepaired" not in world.told()


async def leave(world: World, name: str) -> list[str]:
    """Delete an object; return what is written for that."""
    world.api.remove(SPECDECODE_DEPLOYMENT, name)
    world.cache.drop_parent(SPECDECODE_DEPLOYMENT.kind, world.cache.parent(Key("team", name)) or {})
    return await world.look(name)


async def test_recorder_is_deleted_with_the_last_object_of_its_namespace(world: World) -> None:
    for name in ("llama", "other"):
        world.add(tiny_cpu(), name)
        await world.look(name)
    assert await leave(world, "other") == []
    assert recorder(world) is not None
    assert await leave(world, "llama") == [f"delete configmaps {RECORDER_NAME}"]
    assert recorder(world) is None
    world.add(tiny_cpu(), "new")
    assert WRITE in await world.look("new")


async def test_config_map_that_replaced_the_recorder_is_not_deleted(world: World) -> None:
    world.add(tiny_cpu())
    await world.look()
    world.see()
    world.api.remove(CONFIG_MAP, RECORDER_NAME)
    theirs = world.api.create(CONFIG_MAP, {"metadata": {"namespace": "team", "name": RECORDER_NAME}})
    world.cache.drop_parent(SPECDECODE_DEPLOYMENT.kind, world.object)
    await world.reconciler.reconcile(Key("team", "llama"))
    assert recorder(world) == theirs


async def test_object_that_comes_before_the_deletion_keeps_the_recorder(world: World) -> None:
    world.add(tiny_cpu())
    await world.look()
    world.api.remove(SPECDECODE_DEPLOYMENT, "llama")
    world.cache.drop_parent(SPECDECODE_DEPLOYMENT.kind, world.cache.parent(Key("team", "llama")) or {})
    world.add(tiny_cpu(), "new")
    world.see()
    await world.reconciler.reconcile(Key("team", "llama"))
    assert recorder(world) is not None


@pytest.mark.parametrize("refused", [500, 403])
async def test_failed_write_of_the_recorder_starts_no_engine(world: World, refused: int) -> None:
    world.add(tiny_cpu())
    world.api.before["patch services"] = lambda: world.api.refusals.update({"create configmaps": (refused, "no")})
    await world.look()
    assert world.api.names(SERVICE, DEPLOYMENT) == ["llama"]
    assert world.said()[1] == {500: "ApiServerError", 403: "Forbidden"}[refused]
    world.api.refusals.clear()
    await world.look()
    assert world.api.names(DEPLOYMENT) == ["llama"]


async def test_start_deletes_the_recorder_of_a_namespace_without_objects(api: ApiServer, state: OperatorState) -> None:
    """Its last object was deleted while no operator ran."""
    api.create(CONFIG_MAP, recorder_config_map("team"))
    await state.start()
    await until(lambda: RECORDER_NAME not in api.names(CONFIG_MAP), lambda: "the recorder is deleted")


LIST = f"list {SPECDECODE_DEPLOYMENT.qualified_plural}"


@pytest.mark.parametrize("status", [403, 404])
async def test_start_keeps_the_recorder_of_a_namespace_whose_objects_are_unknown(
    api: ApiServer, rounds: Rounds, status: int
) -> None:
    """Engines in that namespace may still use the recorder."""
    del rounds  # No resync round starts, so the objects stay unknown.

    def refuse_first() -> None:
        api.refusals[LIST] = (status, "no")
        api.before[LIST] = api.refusals.clear

    api.create(CONFIG_MAP, recorder_config_map("team"))
    demo = {"metadata": {"namespace": "team", "name": "demo"}, "spec": {"deployment": "llama"}}
    api.create(SPECDECODE_CAPTURE, demo)
    api.before[LIST] = refuse_first
    state = OperatorState(Settings(namespaces=("team", "other")))
    try:
        await state.start()
        assert api.requests.count(LIST) == {403: 2, 404: 1}[status]
        await until(lambda: "status" in (api.find(SPECDECODE_CAPTURE, "demo") or {}), lambda: "it works")
        await until(lambda: not state.queue.is_pending(Key("team", RECORDER_NAME)), lambda: "the queue is empty")
    finally:
        await stop(state)
    assert api.names(CONFIG_MAP) == [RECORDER_NAME]


async def test_recorder_that_is_being_deleted_is_created_again(api: ApiServer, cluster: Cluster) -> None:
    """A new object comes while the recorder of the last one is deleted."""
    shared = SharedConfigMaps(cluster, Cache(), "team")
    assert await shared.keep_recorder()
    drop = asyncio.create_task(shared.drop_recorder())
    await asyncio.sleep(0)  # The request to delete is under way.
    assert await shared.keep_recorder()
    await drop
    assert api.names(CONFIG_MAP) == [RECORDER_NAME]
