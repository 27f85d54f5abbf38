"""How often the operator looks through all that it keeps, which takes long where that is much."""

import gc

import pytest

from tests.support.embedded_operator import embedded_operator

KEPT = 200_000
"""Objects that are made and stay: with the thresholds of Python 3.11 all of them are looked through more than once."""


def full_collections() -> int:
    """Return how often all was looked through while objects were made, but for what is there already."""
    gc.freeze()
    try:
        gc.collect()
        before = gc.get_stats()[-1]["collections"]
        kept: list[list[None]] = [[] for _ in range(KEPT)]
        assert len(kept) == KEPT
        return gc.get_stats()[-1]["collections"] - before
    finally:
        gc.unfreeze()


@pytest.mark.usefixtures("api")
async def test_while_objects_come_what_is_kept_is_not_looked_through_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        by_itself = full_collections()
        async with embedded_operator(monkeypatch):
            assert full_collections() == 0 < by_itself
    finally:
        gc.set_threshold(*thresholds)
