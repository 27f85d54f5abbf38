"""How often the operator looks through all that it keeps, which takes long where that is much."""

import gc
from collections.abc import Iterator

import pytest

from specdecode_operator.handlers.main import collect_all_rarely

KEPT = 400_000
"""Objects that are made and stay: by itself Python looks through all of them some times meanwhile."""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Leave what other tests keep out of it."""
    thresholds = gc.get_threshold()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def full_collections() -> int:
    """Return how often all was looked through while objects were made."""
    gc.collect()
    before = gc.get_stats()[-1]["collections"]
    kept: list[list[None]] = [[] for _ in range(KEPT)]
    assert len(kept) == KEPT
    return gc.get_stats()[-1]["collections"] - before


def test_while_objects_come_what_is_kept_is_not_looked_through_again_and_again() -> None:
    assert full_collections() > 1
    collect_all_rarely()
    assert full_collections() == 0


def test_garbage_that_refers_to_itself_is_still_freed() -> None:
    collect_all_rarely()
    gc.collect()
    before = gc.get_stats()[0]["collected"]
    for _ in range(KEPT):
        itself: list[object] = []
        itself.append(itself)
    assert gc.get_stats()[0]["collected"] - before > KEPT / 2
