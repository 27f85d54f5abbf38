"""Finds the shortest part of a list that still fails, as delta debugging does."""

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def shrink(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool], attempts: int) -> Sequence[Item]:
    """Return a part of ``items``, in their order, that still fails and of which nothing could be left out.

    Parameters
    ----------
    items
        They fail together.
    fails
        Whether a part fails; it may take minutes.
    attempts
        So often it is asked at most: then what was found by then is returned.
    """
    size = max(1, len(items) // 2)
    while attempts > 0:
        before = items
        at = 0
        while at < len(items) and attempts > 0:
            shorter = [*items[:at], *items[at + size :]]
            attempts -= 1
            if shorter and fails(shorter):
                items = shorter
            else:
                at += size
        if size == 1 and len(items) == len(before):
            break
        size = max(1, size // 2)
    return items
