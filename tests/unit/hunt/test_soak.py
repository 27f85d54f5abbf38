"""Test the report of a soak."""

import math
from collections import Counter
from random import Random

import pytest

from hunt.soak import Sample, Soaked, next_step, slope_per_hour
from hunt.states import States
from hunt.steps import Sequence


def test_slope_starts_at_the_last_start_of_the_operator() -> None:
    before = [Sample(at, 500.0, at) for at in range(0, 3600, 60)]  # As many as after the start.
    since = [Sample(at, 100 + at / 60, (at - 3600) * 0.1) for at in range(3600, 7200, 60)]
    slope = slope_per_hour([*before, *since])
    assert slope.growth == pytest.approx(60)
    assert not slope.is_flat
    assert slope_per_hour(before[:1]).margin == math.inf


@pytest.mark.parametrize(("growth_mib", "is_flat"), [(0.0, True), (10.0, False)])
def test_slope_tells_growth_from_noise(growth_mib: float, is_flat: bool) -> None:
    noise = Random(7)
    samples = [Sample(at, 200 + growth_mib * at / 3600 + noise.gauss(0, 3), at * 0.1) for at in range(0, 10_800, 5)]
    slope = slope_per_hour(samples)
    assert slope.growth == pytest.approx(growth_mib, abs=slope.margin)
    assert slope.is_flat is is_flat


def test_falling_memory_is_reported() -> None:
    samples = [Sample(at, 200 - at / 60, at * 0.1) for at in range(0, 3600, 60)]
    assert str(slope_per_hour(samples)) == "slope -60.0 ± 0.0 MiB/h (falls)"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (180, "no slope: only 3 minutes since the last start; at least 15 needed"),
        (1800, "slope +60.0 ± 0.0 MiB/h (grows) in the 30 minutes since the last start"),
    ],
)
def test_run_shorter_than_15_minutes_gives_no_slope(seconds: int, said: str) -> None:
    samples = [Sample(at, 100 + at / 60, at * 0.1) for at in range(0, seconds + 1, 60)]
    assert said in str(Soaked([], Counter(), samples, storms=1, kills=0))


def test_number_of_captures_in_a_soak_stays_bounded() -> None:
    """Each that was kept took memory of the operator: what grew with the time of a soak was taken for a leak."""
    sequence, chance, states, there = Sequence(()), Random(1), States(1), []
    for _ in range(400):
        step = next_step(sequence, chance, states)
        sequence = Sequence((*sequence.steps, step))
        if step.kind == "capture":
            there.append(step.number)
        elif step.kind == "discard":
            assert step.number == there.pop(0), "the oldest"
        assert len(there) <= 3
    assert len(there) == len(set(there)) > 0
