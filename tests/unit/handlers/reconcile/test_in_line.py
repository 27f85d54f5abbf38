"""Children are not compared again where nothing was to be written and nothing changed since; time passes anyway."""

import time

import pytest

from specdecode_operator.kube.resources import DEPLOYMENT
from tests.support.objects import tiny_cpu
from tests.unit.handlers.reconcile.reconciler_world import World

REJECTED = {"phase": "Failed", "reason": "OutOfcpu", "message": "Pod was rejected: Node didn't have enough: cpu"}


def wanted(world: World) -> int:
    (deployment,) = world.all(DEPLOYMENT)
    return int(deployment["spec"]["replicas"])


async def test_after_nodes_refused_pods_another_is_asked_for_when_it_is_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.add(tiny_cpu())
    await world.look()
    for number in range(3):
        world.start_engines(f"llama-{number}", **REJECTED)
    await world.look()
    assert wanted(world) == 0
    assert await world.look() == []
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 600)
    await world.look()
    assert wanted(world) == 1
