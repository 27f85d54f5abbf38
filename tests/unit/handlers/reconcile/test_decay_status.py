"""Declines in SpeculationEffective, from look to look of the operator."""

import time
from unittest.mock import AsyncMock, Mock

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.cluster.resources import SPECDECODE_CAPTURE
from specdecode_operator.deployment.observed.decay import LEARNED_WINDOWS
from specdecode_operator.deployment.parsed_deployment import engine_spec_hash
from specdecode_operator.handlers import reconcile_deployment
from tests.support.captures import capture
from tests.support.engine_work import LOOK_S, Working
from tests.support.objects import Body, tiny_cpu
from tests.unit.handlers.reconcile.reconciler_world import World


async def looks(world: World, monkeypatch: pytest.MonkeyPatch, *shares: float) -> None:
    """Let an engine accept such shares of its drafts, look by look."""
    engine = Working(k=3)
    for look, acceptance in enumerate(shares):
        monkeypatch.setattr(
            reconcile_deployment, "time", Mock(monotonic=Mock(return_value=look * LOOK_S), time=time.time)
        )
        monkeypatch.setattr(world.probe, "read_all", AsyncMock(return_value={"llama-1": engine.works(acceptance)}))
        await world.look()


async def start(world: World) -> None:
    world.add(tiny_cpu())
    await world.look()
    world.start_engines()
    world.serve()


def said(world: World) -> list[Body]:
    return [each for each in world.object["status"]["conditions"] if each["type"] == "SpeculationEffective"]


async def test_what_decays_from_look_to_look_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await start(world)
    await looks(world, monkeypatch, *[0.9] * (LEARNED_WINDOWS + 2), *[0.1] * 15)
    assert world.said("SpeculationEffective")[:2] == ("False", "AcceptanceDecayed")
    assert world.told().count("AcceptanceDecayed") == 1


async def test_the_newest_capture_of_the_spec_is_what_engines_are_held_to(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await start(world)
    summary = {"requests": {"sent": 1, "completed": 1}, "acceptancePercent": 90, "meanAcceptanceLength": "3.70"}
    parent, desired = world.reconciler.desired_state_of(world.object)
    assert isinstance(parent.spec, SpecDecodeDeploymentSpec)
    word = engine_spec_hash(parent.spec, desired.outcome.plan_status)
    found = {"phase": "Succeeded", "engine": word, "summary": summary}
    body = capture(status=found, namespace="team")
    body["spec"]["deployment"] = "llama"
    world.cache.put_parent(SPECDECODE_CAPTURE.kind, body)
    await looks(world, monkeypatch, *[0.5] * (LEARNED_WINDOWS + 40))
    (condition,) = said(world)
    assert "50% of the drafted tokens are accepted, and 90% were in capture demo" in condition["message"]
