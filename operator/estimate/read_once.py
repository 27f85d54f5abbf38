"""Remembers what was read of a part of a case: lines of a batch say the same of models and drafts again and again."""

import marshal
from collections.abc import Callable
from functools import wraps
from hashlib import sha256
from typing import Any, Final, TypeVar

from specdecode_operator.estimate.fields import CaseFields
from specdecode_operator.sizing.base.remembered import MOST_REMEMBERED

_Read = TypeVar("_Read")
_WITHOUT_REFERENCES: Final = 2
"""The last format of marshal in which equal values always have equal bytes."""


def read_once(*keys: str) -> Callable[[Callable[[CaseFields], _Read]], Callable[[CaseFields], _Read]]:
    """Return a decorator of a function that reads some keys of a case, or all: for equal values it is asked once.

    Equal are values of equal types. An error is not remembered, and of the values no more than a digest.
    """

    def decorated(read: Callable[[CaseFields], _Read]) -> Callable[[CaseFields], _Read]:
        found: dict[bytes, _Read] = {}

        @wraps(read)
        def remembered(fields: CaseFields) -> _Read:
            values: Any = [fields.values.get(key) for key in keys] if keys else dict(fields.values)
            content = sha256(marshal.dumps(values, _WITHOUT_REFERENCES)).digest()
            if content in found:
                # The last asked go to the end.
                result = found[content] = found.pop(content)
                return result
            result = found[content] = read(fields)
            if len(found) > MOST_REMEMBERED:
                del found[next(iter(found))]
            return result

        remembered.cache_clear = found.clear  # type: ignore[attr-defined]
        return remembered

    return decorated
