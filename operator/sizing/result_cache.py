"""LRU caches of sizing results, keyed by arguments or by the content of a JSON object."""

import marshal
from collections.abc import Callable, Hashable, Mapping
from hashlib import sha256
from typing import Any, Final, Generic, TypeVar

from specdecode_operator.untrusted import SharedObject

MEMO_SIZE: Final = 512
"""Results that each function keeps, the last used: a plan needs some twenty, and the operator's memory is bounded.

A model's config of at most a megabyte takes half a megabyte: 512 of them leave room under the chart's limit.
"""

_WITHOUT_REFERENCES: Final = 2
"""The last format of marshal in which equal values always have equal bytes."""

_Made = TypeVar("_Made")


class Memo(Generic[_Made]):
    """LRU cache of results; errors are not cached."""

    def __init__(self) -> None:
        self._made: dict[Hashable, _Made] = {}

    def get(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """Return the cached result of a key, or make it."""
        if (made := self.find(key)) is None:
            made = self._made[key] = make()
            if len(self._made) > MEMO_SIZE:
                self._made.pop(next(iter(self._made)), None)
        return made

    def find(self, key: Hashable) -> _Made | None:
        """Return the cached result of a key, if there is one."""
        # Threads may call at once; the last used key is at the end.
        if (made := self._made.pop(key, None)) is not None:
            self._made[key] = made
        return made

    def cache_clear(self) -> None:
        """Forget everything."""
        self._made.clear()


class ContentMemo(Generic[_Made]):
    """LRU cache of results made of JSON objects, by a digest of their content: equal values of equal types."""

    def __init__(self) -> None:
        self._made = Memo[_Made]()

    def get(self, content: Mapping[str, Any], named: tuple[Hashable, ...], make: Callable[[], _Made]) -> _Made:
        """Return the cached result of equal content under these names, or make it."""
        # Lines share objects; a digest takes longer than the rest.
        digest = content.digest if isinstance(content, SharedObject) else None
        if digest is None:
            try:
                digest = sha256(marshal.dumps(dict(content), _WITHOUT_REFERENCES)).digest()
            except ValueError:  # not JSON alone
                return make()
            if isinstance(content, SharedObject):
                content.digest = digest
        return self._made.get((named, digest), make)

    def cache_clear(self) -> None:
        """Forget everything."""
        self._made.cache_clear()
