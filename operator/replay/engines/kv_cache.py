"""The blocks of an engine's KV cache: who has how many, and which prompts' blocks are still there to be found.

As in vLLM: a block that nobody uses any more stays findable until another needs its place, the one that was freed
longest ago first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

MOST_KEPT: Final = 1_000_000
"""Blocks that a cache without a size keeps findable."""


class KvCache:
    """Blocks in use and blocks kept, counted; what is in them is known by the hashes of prompts."""

    def __init__(self, num_blocks: int | None, *, prefix_caching: bool) -> None:
        """Begin with an empty cache; without a number of blocks it never fills up, and its usage is 0."""
        self.num_blocks = num_blocks
        self._prefix_caching = prefix_caching
        self._users: dict[int, int] = {}
        """How many requests use the block of each hash."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Hashes of blocks that nobody uses, the one freed longest ago first."""
        self._anonymous = 0
        """Blocks in use that have no hash: ends of prompts, outputs."""

    @property
    def usage(self) -> float:
        """The share of blocks that are in use."""
        return (self._anonymous + len(self._users)) / self.num_blocks if self.num_blocks else 0.0

    def found(self, hashes: Sequence[int]) -> int:
        """Return how many blocks of a prompt are there, from its beginning on."""
        if not self._prefix_caching:
            return 0
        count = 0
        for each in hashes:
            if each not in self._users and each not in self._kept:
                break
            count += 1
        return count

    def admit(self, hashes: Sequence[int], found: int, fresh: int) -> bool:
        """Take a request's found blocks, and so many fresh ones; nothing where there is not enough room."""
        used = hashes[:found]
        revived = sum(1 for each in used if each in self._kept)
        if not self._has_room(fresh + revived):
            return False
        for each in used:
            self._kept.pop(each, None)
            self._users[each] = self._users.get(each, 0) + 1
        self._take(fresh)
        return True

    def grow(self, blocks: int) -> bool:
        """Take fresh blocks; nothing where there is not enough room."""
        if not self._has_room(blocks):
            return False
        self._take(blocks)
        return True

    def name(self, hashes: Sequence[int], named: int) -> int:
        """Make a request's blocks findable, of which the first ones are already; return how many are."""
        if not self._prefix_caching:
            return named
        for each in hashes[named:]:
            self._kept.pop(each, None)
            self._users[each] = self._users.get(each, 0) + 1
        self._anonymous -= max(0, len(hashes) - named)
        return max(named, len(hashes))

    def release(self, hashes: Sequence[int], anonymous: int) -> None:
        """Take blocks back; those with a hash stay findable. The end of a prompt goes first, as its rest is needed."""
        self._anonymous -= anonymous
        for each in reversed(hashes):
            left = self._users[each] - 1
            if left:
                self._users[each] = left
            else:
                del self._users[each]
                self._kept[each] = None
        self._evict()

    def _has_room(self, blocks: int) -> bool:
        return self.num_blocks is None or self._anonymous + len(self._users) + blocks <= self.num_blocks

    def _take(self, fresh: int) -> None:
        self._anonymous += fresh
        self._evict()

    def _evict(self) -> None:
        most = MOST_KEPT if self.num_blocks is None else self.num_blocks - self._anonymous - len(self._users)
        while len(self._kept) > most:
            self._kept.popitem(last=False)
