"""Lays text out in columns."""

import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import Final

_GAP: Final = "   "
_NARROWEST: Final = 12
"""Characters below which no column is folded: its lines would be words."""


def aligned(
    rows: Sequence[Sequence[str]],
    *,
    left: int = 1,
    indent: str = "  ",
    width: int | None = None,
    foldable: Sequence[int] = (),
) -> list[str]:
    """Return the rows as lines: the first columns aligned to the left, the rest to the right.

    Parameters
    ----------
    rows
        Cells; all rows have as many.
    left
        How many columns are aligned to the left.
    indent
        What each line begins with.
    width
        How wide lines may be; None where it does not matter.
    foldable
        Columns whose cells may take several lines for that.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is not None:
        _narrow(widths, foldable, width - len(indent) - len(_GAP) * (len(widths) - 1))
    lines = []
    for row in rows:
        folded = [_folded(cell, wide) for cell, wide in zip(row, widths, strict=True)]
        for parts in zip_longest(*folded, fillvalue=""):
            cells = [
                part.ljust(wide) if index < left else part.rjust(wide)
                for index, (part, wide) in enumerate(zip(parts, widths, strict=True))
            ]
            lines.append((indent + _GAP.join(cells)).rstrip())
    return lines


def _folded(cell: str, width: int) -> list[str]:
    return [cell] if len(cell) <= width else textwrap.wrap(cell, width)


def _narrow(widths: list[int], foldable: Sequence[int], room: int) -> None:
    """Make the widest of the columns that may be folded narrower until all have room, or none can give any."""
    while sum(widths) > room and foldable:
        widest = max(foldable, key=widths.__getitem__)
        if widths[widest] <= _NARROWEST:
            return
        widths[widest] -= 1
