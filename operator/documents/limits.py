"""How large a text from others may be, and what is said of one that cannot be read."""

from collections.abc import Iterable
from typing import Any, Final

MAX_BYTES: Final = 32 * 2**20
"""Of a text: a list of a thousand nodes as kubectl prints it has 15 MB; one object has 1.5 MB at most, says etcd."""

MAX_DEPTH: Final = 100
"""Of objects and lists in one another: the deepest of published CRDs, a schema of pods, has 60."""

MAX_DIGITS: Final = 308
"""Of a number: the largest that a program can compute with has so many."""

MANY_VALUES: Final = 50_000
"""Values that a YAML text may have in any case: the largest CRDs in use have as many."""

BYTES_PER_VALUE: Final = 12
"""A larger YAML text may have a value in so many bytes; what kubectl prints has one in 25. Each takes 3 microseconds
to read, so that what is made to take long ends within a third of a second for each megabyte."""


class UnreadableTextError(ValueError):
    """A text that is not what it should be, or is made to hurt: where, what, and what to do, in one line."""

    line: int | None = None
    """Where that is one line of the text, from 1."""


def check_size(text: str | bytes, most_bytes: int = MAX_BYTES) -> None:
    """Refuse a text that is too large.

    Raises
    ------
    UnreadableTextError
        When it is.
    """
    if len(text) > most_bytes:
        raise too_large(most_bytes)


def too_large(most_bytes: int = MAX_BYTES) -> UnreadableTextError:
    """Return what is said of a text that is too large."""
    size = f"{most_bytes // 2**20} MiB" if most_bytes >= 2**20 else f"{most_bytes // 2**10} KiB"
    return UnreadableTextError(f"has more than {size}: write less, or split it")


def inner_values(level: Iterable[Any]) -> list[Any]:
    """Return what lies in objects and lists, one level deeper: what is nested deep must not be walked by recursion."""
    return [
        inner
        for outer in level
        for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
    ]
