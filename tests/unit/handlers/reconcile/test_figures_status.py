"""Figures in the status: written where there are some, every five minutes, and gone with the engines."""

import time
from unittest.mock import AsyncMock, Mock

import pytest

from specdecode_operator.api.deployment_status import FiguresSource, FiguresStatus, FigureStatus
from specdecode_operator.cluster.observed_figures import FiguresReader
from specdecode_operator.cluster.resources import SPECDECODE_DEPLOYMENT
from specdecode_operator.handlers import reconcile_deployment
from tests.support.objects import tiny_cpu
from tests.unit.handlers.reconcile.reconciler_world import World


def figures(value: str) -> FiguresStatus:
    told = [FigureStatus(name="acceptance_rate", value=value)]
    return FiguresStatus(source=FiguresSource.PODS, over_seconds=300, values=told)


async def test_figures_are_written_every_five_minutes_and_go_with_the_engines(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    world.add(tiny_cpu())
    reads = [None, *map(figures, "123")]
    monkeypatch.setattr(FiguresReader, "read", AsyncMock(side_effect=reads))
    for now_s in (0, 15, 30, 300, 315, 330):
        monkeypatch.setattr(reconcile_deployment, "time", Mock(monotonic=Mock(return_value=now_s), time=time.time))
        await world.look()
        told = world.object["status"].get("figures")
        shown.append(told and told["values"][0]["value"])
    assert shown == [None, "1", "1", "1", "2", "2"]
    world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec={**world.object["spec"], "target": {"model": "no/such"}})
    await world.look()
    assert "figures" not in world.object["status"]


async def test_another_process_shows_what_was_known_until_it_knows_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.add(tiny_cpu())
    monkeypatch.setattr(FiguresReader, "read", AsyncMock(side_effect=[figures("1"), None, figures("2")]))
    shown = []
    for _ in range(3):
        await world.look()
        shown.append(world.object["status"]["figures"]["values"][0]["value"])
        if len(shown) == 1:
            world.restart()
    assert shown == ["1", "1", "2"]
