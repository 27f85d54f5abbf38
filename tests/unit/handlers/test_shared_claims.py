"""Replicas on several nodes start only with claims that several nodes can mount."""

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.cluster.resources import JOB, LEADER_WORKER_SET, NODE, PERSISTENT_VOLUME_CLAIM
from tests.support.objects import H100, pair_70b
from tests.unit.handlers.reconciler_world import World

CLAIM = {"persistentVolumeClaim": {"claimName": "models"}}
TWO_NODES = {"target": {"model": "meta-llama/Llama-3.1-405B-Instruct"}, "parallelism": {"tensor": 16}}


@pytest.fixture
def wide(world: World) -> World:
    """A cluster with nodes for one replica on two of them."""
    world.cache.optional_kinds = frozenset({LEADER_WORKER_SET.kind})
    for number in range(2):
        metadata = {"name": f"h100-{number}", "labels": {"nvidia.com/gpu.product": H100}}
        world.api.create(NODE, {"metadata": metadata, "status": {"allocatable": {"nvidia.com/gpu": "8"}}})
    return world


def with_claim(world: World, *modes: str) -> None:
    world.api.create(
        PERSISTENT_VOLUME_CLAIM,
        {"metadata": {"namespace": "team", "name": "models"}, "spec": {"accessModes": [*modes]}},
    )


def says_which_claim(world: World, field: str) -> bool:
    status, reason, message = world.said()
    return (status, reason) == ("Unknown", "VolumeNotShared") and f"{field}.persistentVolumeClaim" in message


@pytest.mark.parametrize(
    ("models", "modes", "field"),
    [
        ({"volume": CLAIM}, ["ReadWriteOnce"], "spec.models.volume"),
        ({"volume": CLAIM}, ["ReadWriteOncePod"], "spec.models.volume"),
        ({"volume": CLAIM}, ["ReadOnlyMany"], None),
        ({"volume": CLAIM}, ["ReadWriteOnce", "ReadWriteMany"], None),
        ({"cache": CLAIM}, ["ReadWriteOnce"], "spec.models.cache"),
        ({"cache": CLAIM}, ["ReadOnlyMany"], "spec.models.cache"),
        ({"cache": CLAIM}, ["ReadWriteMany"], None),
    ],
)
async def test_claim_that_one_node_can_mount(wide: World, models: Body, modes: list[str], field: str | None) -> None:
    with_claim(wide, *modes)
    wide.add(pair_70b(**TWO_NODES, models=models))
    await wide.look()
    if field is None:
        assert wide.said()[1] != "VolumeNotShared"
        assert wide.api.names(JOB if "cache" in models else LEADER_WORKER_SET)
    else:
        assert says_which_claim(wide, field)
        assert wide.api.names(JOB, LEADER_WORKER_SET) == [], "nothing is downloaded or started"


async def test_claim_of_a_replica_on_one_node_is_not_read(wide: World) -> None:
    with_claim(wide, "ReadWriteOnce")
    wide.add(pair_70b(accelerator={"products": [H100]}, parallelism={"tensor": 4}, models={"volume": CLAIM}))
    await wide.look()
    assert wide.api.names(LEADER_WORKER_SET) == []
    assert wide.said()[1] != "VolumeNotShared"


async def test_claim_created_later_is_checked(wide: World) -> None:
    wide.add(pair_70b(**TWO_NODES, models={"volume": CLAIM}))
    await wide.look()
    assert wide.said()[1] != "VolumeNotShared"
    with_claim(wide, "ReadWriteOnce")
    await wide.look()
    assert says_which_claim(wide, "spec.models.volume")


async def test_replicas_that_serve_keep_a_claim_whose_storage_ignores_access_modes(wide: World) -> None:
    wide.add(pair_70b(**TWO_NODES, models={"volume": CLAIM}))
    await wide.look()
    (group,) = wide.api.names(LEADER_WORKER_SET)
    wide.api.change(LEADER_WORKER_SET, group, status={"readyReplicas": 1})
    with_claim(wide, "ReadWriteOnce")
    await wide.look()
    assert wide.said()[1] != "VolumeNotShared"
