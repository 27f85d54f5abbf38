"""Objects of which any field may be given, because others decide what is in them: how much of them is read."""

from typing import Any, Final

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from specdecode_operator.documents.limits import inner_values

_MOST_VALUES: Final = 10_000
"""The largest config.json in use, with a list of layers that are not quantized, has some thousand."""

_DEEPEST: Final = 32
"""The deepest that a pod can be given, an affinity, has 10."""


def _bounded(whole: dict[str, Any]) -> dict[str, Any]:
    """Return it, or say how it is too much: all that follows takes its time with each value."""
    count = 0
    level: list[Any] = [whole]
    for _ in range(_DEEPEST):
        level = inner_values(level)
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
