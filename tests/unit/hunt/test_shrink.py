"""The shortest part that still fails."""

from collections.abc import Sequence

import pytest

from hunt.shrink import shrink


@pytest.mark.parametrize("culprits", [{0}, {7}, {2, 5}, {0, 1, 9}])
def test_shrink_keeps_only_the_culprits(culprits: set[int]) -> None:
    assert set(shrink(range(10), culprits.issubset, attempts=200)) == culprits


def test_shrink_stops_after_its_attempts() -> None:
    asked: list[Sequence[int]] = []

    def fails(part: Sequence[int]) -> bool:
        asked.append(part)
        return {99, 1} <= set(part)

    found = shrink(range(100), fails, attempts=3)
    assert len(asked) == 3
    assert {1, 99} <= set(found)
