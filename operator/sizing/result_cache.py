"""LRU caches of sizing results, keyed by arguments or by the content of a JSON object."""

import marshal
from collections.abc import Callable, Hashable, Mapping
from hashlib import sha256
from typing import Any, Final, Generic, TypeVar

from specdecode_operator.untrusted import SharedObject

MEMO_SIZE: Final = 512
"""Answers that each function keeps, the last asked: a plan takes some twenty, and the operator does not grow for ever.

A model's config, of at most a megabyte, comes to half a megabyte: 512 of them leave room under the chart's limit.
"""

_WITHOUT_REFERENCES: Final = 2
"""The last format of marshal in which equal values always have equal bytes."""

_Made = TypeVar("_Made")


class Memo(Generic[_Made]):
    """What was last made, by all that decides it."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._made: dict[Hashable, _Made] = {}

    def get(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """Return what was made for an equal key before, or make it; an error is not remembered."""
        # Threads may ask at once; the last asked stands at the end.
        if (made := self._made.pop(key, None)) is None:
            made = make()
        self._made[key] = made
        if len(self._made) > MEMO_SIZE:
            self._made.pop(next(iter(self._made)), None)
        return made

    def cache_clear(self) -> None:
        """Forget everything."""
        self._made.clear()


class ContentMemo(Generic[_Made]):
    """What was last made of JSON objects, by their content: equal values of equal types. Of each a digest is kept."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._made = Memo[_Made]()

    def get(self, content: Mapping[str, Any], named: tuple[Hashable, ...], make: Callable[[], _Made]) -> _Made:
        """Return what was made of equal content under these names before, or make it; an error is not remembered."""
        try:
            key = named, _digest(content)
        except ValueError:  # it has more in it than JSON
            return make()
        return self._made.get(key, make)

    def cache_clear(self) -> None:
        """Forget everything."""
        self._made.cache_clear()


def _digest(content: Mapping[str, Any]) -> bytes:
    """Return that of an object's content, worked out once of one that lines share: it takes longer than the rest."""
    if isinstance(content, SharedObject) and content.digest is not None:
        return content.digest
    digest = sha256(marshal.dumps(dict(content), _WITHOUT_REFERENCES)).digest()
    if isinstance(content, SharedObject):
        content.digest = digest
    return digest
