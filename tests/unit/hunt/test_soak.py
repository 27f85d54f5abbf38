"""What a soak says of the operator's process."""

from collections import Counter
from random import Random

import pytest

from hunt.soak import Sample, Soaked, next_step, slope_per_hour
from hunt.states import States
from hunt.steps import Sequence


def test_memory_growth_is_per_hour_since_the_last_start() -> None:
    before = [Sample(at, 500.0, at) for at in range(0, 3600, 60)]  # as long as since: more than the third left out
    since = [Sample(at, 100 + at / 60, (at - 3600) * 0.1) for at in range(3600, 7200, 60)]
    assert slope_per_hour([*before, *since]) == pytest.approx(60)
    assert slope_per_hour(before[:1]) == 0


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (180, "no slope told: 3 minutes since the last start are fewer than 15"),
        (1800, "slope +60.0 MiB/h in the 30 minutes since the last start"),
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
