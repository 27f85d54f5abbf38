"""Markdown for summaries of CI jobs and notes on merge requests, in which what others wrote is shown and not done."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from specdecode_operator.problems import printable

_MOST_ITEMS: Final = 100
"""GitHub takes 1 MiB a summary, and nobody reads more."""


def code(text: object) -> str:
    """Return a text as a code span: neither a link nor a mention, a picture or HTML comes of it."""
    plain = printable(str(text)).strip()
    fence = "`" * (max(map(len, re.findall("`+", plain)), default=0) + 1)
    # Spaces beside the fence are taken off again, and an empty span is none.
    return f"{fence} {plain or '-'} {fence}" if "`" in plain else f"{fence}{plain or '-'}{fence}"


def table(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table, its cells as code; none without rows."""
    # No escape of a bar holds in every reader after a backslash.
    lines = [f"| {' | '.join(code(str(each).replace('|', '¦')) for each in row)} |" for row in rows]
    return [f"| {' | '.join(heading)} |", f"|{' --- |' * len(heading)}", *limited(lines)] if lines else []


def limited(items: Sequence[str]) -> list[str]:
    """Return the first lines, and how many there are beside them."""
    left = len(items) - _MOST_ITEMS
    return [*items[:_MOST_ITEMS], *([f"\nand {left} more"] if left > 0 else [])]
