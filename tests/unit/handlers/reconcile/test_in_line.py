"""Children are not compared again where nothing was to be written and nothing changed since; time passes anyway."""

import copy
from datetime import UTC, datetime

import pytest

from specdecode_operator.cluster.resources import (
    CONFIG_MAP,
    DEPLOYMENT,
    DEPLOYMENT_LABEL,
    KEPT_MANAGERS_ANNOTATION,
    SERVICE,
    SPECDECODE_DEPLOYMENT,
)
from tests.support.driven_clock import DrivenServerTime
from tests.support.objects import tiny_cpu
from tests.unit.handlers.reconcile.reconciler_world import World

REJECTED = {"phase": "Failed", "reason": "OutOfcpu", "message": "Pod was rejected: Node didn't have enough: cpu"}


def wanted(world: World) -> int:
    (deployment,) = world.all(DEPLOYMENT)
    return int(deployment["spec"]["replicas"])


async def test_after_nodes_refused_pods_another_is_asked_for_when_it_is_time(world: World) -> None:
    clock = world.clock = DrivenServerTime(datetime.now(UTC))
    world.restart()
    world.add(tiny_cpu())
    await world.look()
    for number in range(3):
        world.start_engines(f"llama-{number}", **REJECTED)
    await world.look()
    assert wanted(world) == 0
    assert await world.look() == []
    clock.advance(600)
    await world.look()
    assert wanted(world) == 1


@pytest.mark.parametrize("labels", [{DEPLOYMENT_LABEL: "other"}, {}], ids=["of another", "of none"])
async def test_what_is_changed_together_with_its_label_is_undone(world: World, labels: dict[str, str]) -> None:
    world.add(tiny_cpu())
    for _ in range(3):
        await world.look()
    (before,) = world.all(DEPLOYMENT)
    changed = copy.deepcopy(before)
    changed["spec"]["template"]["spec"]["containers"][0]["image"] = "evil/image:1"
    del changed["metadata"]["labels"][DEPLOYMENT_LABEL]
    changed["metadata"]["labels"] |= labels
    world.api.change(DEPLOYMENT, "llama", spec=changed["spec"], metadata=changed["metadata"])
    assert await world.look() == ["patch deployments.apps llama"]
    (after,) = world.all(DEPLOYMENT)
    assert (after["spec"], after["metadata"]["labels"]) == (before["spec"], before["metadata"]["labels"])
    assert await world.look() == []


async def test_whose_fields_are_kept_no_more_loses_them_though_neither_spec_nor_children_change(world: World) -> None:
    metadata = {"namespace": "team", "name": "llama", "annotations": {KEPT_MANAGERS_ANNOTATION: "injector"}}
    world.add(tiny_cpu(), metadata=metadata)
    await world.look()
    service = world.api.find(SERVICE, "llama")
    assert service is not None
    theirs = {"manager": "injector", "fieldsV1": {"f:spec": {"f:sessionAffinity": {}}}}
    world.api.change(SERVICE, "llama", metadata={**service["metadata"], "managedFields": [theirs]})
    for _ in range(2):
        assert await world.look() == []
    world.api.change(SPECDECODE_DEPLOYMENT, "llama", metadata={**world.object["metadata"], "annotations": {}})
    assert "patch services llama" in await world.look()


async def test_what_served_last_is_written_down_later_where_that_was_refused_at_first(world: World) -> None:
    world.add(tiny_cpu())
    await world.look()
    world.start_engines()
    world.serve()
    world.api.refusals = dict.fromkeys(("patch configmaps", "create configmaps"), (403, "no"))
    await world.look()
    assert "llama-last-good" not in world.api.names(CONFIG_MAP)
    await world.look()
    world.api.refusals = {}
    await world.look()
    assert "llama-last-good" in world.api.names(CONFIG_MAP)
