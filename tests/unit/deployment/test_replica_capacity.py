"""Capacity of a replica from measured arms, and the load in replicas."""

from typing import Any

import pytest

from specdecode_operator.deployment.replica_capacity import replica_load
from specdecode_operator.deployment.speculation_policy import Evidence, Measured, NoEvidence, Point, Setting
from specdecode_operator.vllm.engine_metrics import EngineReading, Unreachable
from tests.support.policy_field_cases import K3


def reading(running: int, waiting: int = 0) -> EngineReading:
    return EngineReading(None, None, None, None, None, 0, running, waiting)


K3_POINTS = (Point(8, 6, 1.4), Point(32, 24, 1.2), Point(64, 60, 0.7))
OFF_POINTS = (Point(8, 8), Point(32, 32), Point(64, 64))
SETTINGS = [Setting("k3", K3_POINTS, drafts=3, acceptance=0.6), Setting("off", OFF_POINTS)]


def measured(in_force: str = "k3", goodput: Any = ((8, 400), (32, 1200), (64, 1400))) -> Measured:
    return Measured(Evidence("nightly", SETTINGS, goodput), {"k3": K3}, K3, in_force)


def capacity(*arguments: Any, **more: Any) -> float | None:
    return replica_load(*arguments, **more).capacity


def test_capacity_is_the_load_with_the_highest_goodput_of_the_setting_in_force() -> None:
    assert capacity(measured(), None, {}) == 24, "1,440 tokens/s at 24 requests, 980 at 60"
    assert capacity(measured("off"), None, {}) == 64, "1,400 tokens/s at 64 requests without drafts"
    falling = ((8, 400), (32, 1200), (64, 600))
    assert capacity(measured("off", falling), None, {}) == 32


def test_a_capacity_at_the_highest_load_is_reported_as_such() -> None:
    assert "highest load" in replica_load(measured("off"), None, {}).message
    assert "highest load" not in replica_load(measured(), None, {}).message


def test_fewer_accepted_tokens_lower_the_capacity() -> None:
    # 1 + 1.8 tokens per step when measured, 1 + 0.9 now
    assert capacity(measured(), 0.3, {}) == pytest.approx(24 * 1.9 / 2.8)
    assert capacity(measured(), 0.9, {}) == 24, "more was not measured"
    assert capacity(measured("off"), 0.3, {}) == 64, "nothing is drafted"


def test_load_counts_running_and_waiting_requests_of_all_engines() -> None:
    found = replica_load(measured(), None, {"a": reading(20, 4), "b": reading(24)})
    assert found.replicas == pytest.approx(2.0)


def test_an_engine_that_misses_a_scrape_counts_as_the_mean_of_the_others() -> None:
    found = replica_load(measured(), None, {"a": reading(24), "b": Unreachable("down")})
    assert found.replicas == pytest.approx(2.0)
    assert replica_load(measured(), None, {"b": Unreachable("down")}).replicas is None
    assert replica_load(measured(), None, {}).replicas is None


@pytest.mark.parametrize("evidence", [NoEvidence("NoEvidence", "no capture"), measured("other")])
def test_without_a_measurement_capacity_is_unknown(evidence: Any) -> None:
    found = replica_load(evidence, None, {"a": reading(10)})
    assert (found.capacity, found.replicas) == (None, None)
    assert found.message
