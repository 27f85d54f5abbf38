"""Blocks of the KV cache: counted, found again, and given away."""

from specdecode_operator.replay.stepped_engine import KvCache


def test_the_block_freed_longest_ago_is_given_away_first() -> None:
    cache = KvCache(4, prefix_caching=True)
    for first in (0, 10):
        assert cache.admit((), 0, 2)
        named = cache.name([first, first + 1], 0)
        cache.release([first, first + 1][:named], 0)
    assert cache.usage == 0
    assert cache.grow(1)
    # The end of the older prompt went: its beginning is of more use.
    assert (cache.found([0, 1]), cache.found([10, 11])) == (1, 2)
    assert cache.grow(2)
    assert (cache.found([0, 1]), cache.found([10, 11])) == (0, 1)


def test_what_is_in_use_by_two_is_kept_until_both_are_done() -> None:
    cache = KvCache(3, prefix_caching=True)
    assert cache.admit((), 0, 1)
    cache.name([5], 0)
    assert cache.admit([5], 1, 1)
    assert cache.usage == 2 / 3
    cache.release([5], 0)
    assert not cache.grow(2)
    cache.release([5], 1)
    assert cache.usage == 0
    assert cache.grow(3)


def test_found_blocks_count_where_they_come_back_into_use() -> None:
    cache = KvCache(2, prefix_caching=True)
    assert cache.admit((), 0, 2)
    cache.name([1, 2], 0)
    cache.release([1, 2], 0)
    assert not cache.admit([1, 2], 2, 1)
    assert cache.usage == 0
    assert cache.admit([1, 2], 2, 0)
    assert cache.usage == 1
