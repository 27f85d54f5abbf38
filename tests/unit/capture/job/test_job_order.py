"""The order in which arms are measured."""

from collections import Counter
from itertools import permutations

import pytest

from specdecode_operator.capture.job.record_part import order_of_arms


@pytest.mark.parametrize("repetitions", [1, 2, 5, 20])
@pytest.mark.parametrize("arms", [["a"], ["a", "b"], [f"arm-{number}" for number in range(8)]], ids=len)
def test_every_repetition_has_every_arm_once(arms: list[str], repetitions: int) -> None:
    order = order_of_arms(arms, repetitions, seed=3)
    assert len(order) == repetitions
    assert all(sorted(each) == sorted(arms) for each in order)


def test_same_seed_same_order() -> None:
    assert order_of_arms(["a", "b", "c"], 6, seed=3) == order_of_arms(["a", "b", "c"], 6, seed=3)


def test_longer_experiment_begins_alike() -> None:
    assert order_of_arms(["a", "b", "c"], 6, seed=3)[:2] == order_of_arms(["a", "b", "c"], 2, seed=3)


@pytest.mark.parametrize("seed", range(10))
def test_what_changes_steadily_meets_all_arms_alike(seed: int) -> None:
    """Over each two repetitions all arms come equally early."""
    order = order_of_arms(["a", "b", "c"], 4, seed)
    for pair in (order[:2], order[2:]):
        assert {sum(each.index(arm) for each in pair) for arm in "abc"} == {2}


def test_every_order_is_drawn_about_as_often() -> None:
    drawn = Counter(tuple(order_of_arms(["a", "b", "c"], 1, seed)[0]) for seed in range(1200))
    assert drawn.keys() == set(permutations("abc"))
    assert all(150 < count < 250 for count in drawn.values())
