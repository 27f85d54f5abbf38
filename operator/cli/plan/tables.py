"""Lays text out in columns."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, left: int = 1, indent: str = "  ") -> list[str]:
    """Return the rows as lines: the first columns aligned to the left, the rest to the right.

    Parameters
    ----------
    rows
        Cells; all rows have as many.
    left
        How many columns are aligned to the left.
    indent
        What each line begins with.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "   ".join(cells)).rstrip())
    return lines
