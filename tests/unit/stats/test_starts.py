"""How far engines differ from start to start."""

import math
from random import Random

import pytest

from specdecode_operator.stats.verdict import between_starts, starts_needed, student_quantile


class TestInterval:
    def test_is_the_textbooks_of_two_groups(self) -> None:
        # Means 2 and 5, a pooled variance of (2 + 2) / 2, and 2 degrees of freedom for 2 + 2 starts.
        low, high = between_starts([[1.0, 3.0], [4.0, 6.0]], 1, 0.95) or (0.0, 0.0)
        half = 4.3027 * math.sqrt(2.0 * (1 / 2 + 1 / 2))
        assert (low, high) == (pytest.approx(3 - half, abs=1e-3), pytest.approx(3 + half, abs=1e-3))

    def test_further_arms_tell_of_the_variance_too(self) -> None:
        two = between_starts([[1.0, 1.1], [1.5, 1.6]], 1, 0.95) or (0.0, 0.0)
        four = between_starts([[1.0, 1.1], [1.5, 1.6], [3.0, 3.1], [0.2, 0.3]], 1, 0.95) or (0.0, 0.0)
        assert four[1] - four[0] < two[1] - two[0]

    @pytest.mark.parametrize("arms", [[[1.0], [2.0]], [[1.0, 2.0], []], [[], [1.0, 2.0]]])
    def test_is_none_where_no_arm_has_two_starts_or_one_has_none(self, arms: list[list[float]]) -> None:
        assert between_starts(arms, 1, 0.95) is None

    @pytest.mark.parametrize("starts", [2, 3, 5])
    def test_leaves_out_no_difference_as_often_as_its_level_says(self, starts: int) -> None:
        random, wrong, runs = Random(starts), 0, 2000
        for _ in range(runs):
            arms = [[random.gauss(0, 0.02) for _ in range(starts)] for _ in range(2)]
            low, high = between_starts(arms, 1, 0.95) or (0.0, 0.0)
            wrong += not low <= 0 <= high
        assert wrong / runs == pytest.approx(0.05, abs=0.02)


class TestStartsNeeded:
    def test_are_so_many_that_the_interval_would_leave_out_no_difference(self) -> None:
        arms = [[0.0, 0.02], [0.03, 0.05]]
        variance = 0.0002
        starts = starts_needed(arms, 0.03, 0.95)
        assert starts is not None
        halves = [
            student_quantile(0.975, 2 * (each - 1)) * math.sqrt(2 * variance / each) for each in (starts - 1, starts)
        ]
        assert halves[0] > 0.03 > halves[1]

    def test_are_fewer_where_further_arms_tell_of_the_variance(self) -> None:
        two = [[0.0, 0.02], [0.03, 0.05]]
        starts = [starts_needed([*two, *further], 0.025, 0.95) for further in ([], [[0.1, 0.12]] * 6)]
        assert starts == [4, 3]

    def test_are_not_known_from_one_start_nor_beyond_the_most(self) -> None:
        assert starts_needed([[1.0], [2.0]], 0.1, 0.95) is None
        assert starts_needed([[0.0, 1.0], [0.0, 1.0]], 0.01, 0.95) is None
