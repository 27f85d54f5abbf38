"""Terminal output: coloured verdicts, lines folded to the terminal's width, and text in columns."""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import Final, TextIO

import typer

from specdecode_operator.problems import printable
from specdecode_operator.redaction import redact
from specdecode_operator.untrusted import whole_number

_COLOURS: Final = {"Fits": 32, "Tight": 33, "Unknown": 33, "DoesNotFit": 31, "Invalid": 31}
"""Green, yellow and red of ECMA-48, as the terminal's owner has chosen them."""

_VERDICT: Final = re.compile(rf"(?<![\w.-])({'|'.join(_COLOURS)})(?![\w-])")


def coloured(text: str) -> str:
    """Return a text with its verdicts in colour."""
    return _VERDICT.sub(lambda found: f"\x1b[{_COLOURS[found[1]]}m{found[1]}\x1b[0m", text)


def wants_colour(stream: TextIO) -> bool:
    """Whether a stream shows colours and its reader wants them (no-color.org, force-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def say(text: object, *, err: bool = False, nl: bool = True, verdicts: bool = False) -> None:
    """Print lines for people: what others wrote in them is shown, whatever a terminal would make of it.

    ``verdicts`` are shown in colour where the reader wants colours.
    """
    # A private key has several lines: it is masked before the lines are taken apart.
    lines = "\n".join(map(printable, redact(str(text)).split("\n")))
    in_colour = verdicts and wants_colour(sys.stderr if err else sys.stdout)
    typer.echo(coloured(lines) if in_colour else lines, err=err, nl=nl, color=in_colour)


def say_line(text: object, *, err: bool = False) -> None:
    """Print what is one line, whatever others wrote in it."""
    say(printable(str(text)), err=err)


def line_width() -> int | None:
    """Return how wide lines may be; None where no terminal shows them and COLUMNS does not say."""
    if columns := whole_number(os.environ.get("COLUMNS")):
        return columns
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def folded(line: str, width: int | None) -> list[str]:
    """Return a sentence as lines; those after the first are indented two further."""
    if width is None or len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(line, width, subsequent_indent=f"{indent}  ", break_on_hyphens=False)


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
    while sum(widths) > room and foldable:
        widest = max(foldable, key=widths.__getitem__)
        if widths[widest] <= _NARROWEST:
            return
        widths[widest] -= 1
