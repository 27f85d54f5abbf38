"""Objects of which any field may be given, because others decide what is in them: how much of them is read."""

from typing import Any, Final

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

_MOST_VALUES: Final = 10_000
"""The largest config.json in use, with a list of layers that are not quantized, has some thousand."""

_DEEPEST: Final = 32
"""The deepest that a pod can be given, an affinity, has 10."""


def _bounded(whole: dict[str, Any]) -> dict[str, Any]:
    """Look level by level: what is nested deep must not be walked by recursion, and all that follows takes its time."""
    count, level = 0, [whole]
    for _ in range(_DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
        ]
        count += len(level)
        if count > _MOST_VALUES:
            raise PydanticCustomError(
                "too_large", f"has more than {_MOST_VALUES:,} values: leave out what is not needed"
            )
        if not level:
            return whole
    raise PydanticCustomError("too_deep", f"is nested more than {_DEEPEST} deep, which nothing of use is: write less")


BOUNDED: Final = AfterValidator(_bounded)
"""Annotates such an object."""
