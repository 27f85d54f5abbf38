"""Terminal output: coloured verdicts, lines folded to the terminal's width, and text in columns."""

import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from itertools import zip_longest
from typing import Final, TextIO, TypeVar

import typer

from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip, redact
from specdecode_operator.untrusted import whole_number

_COLOURS: Final = {"Fits": 32, "Tight": 33, "Unknown": 33, "DoesNotFit": 31, "Invalid": 31}
"""Green, yellow and red in ECMA-48."""
_MOST_CHARACTERS: Final = 240
"""Longest text of a cell that is not whole."""
_VERDICT: Final = re.compile(rf"(?<![\w.-])({'|'.join(_COLOURS)})(?![\w-])")


def coloured(text: str) -> str:
    """Return a text with its verdicts in colour."""
    return _VERDICT.sub(lambda found: f"\x1b[{_COLOURS[found[1]]}m{found[1]}\x1b[0m", text)


def wants_colour(stream: TextIO) -> bool:
    """Return whether to colour output to a stream (see no-color.org and force-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def say(text: object, *, err: bool = False, nl: bool = True, verdicts: bool = False) -> None:
    """Print a text, with secrets masked and control characters escaped.

    ``verdicts`` colours the verdicts in it if the stream is to be coloured.
    """
    # Mask first: a private key spans several lines.
    lines = "\n".join(map(printable, redact(str(text)).split("\n")))
    in_colour = verdicts and wants_colour(sys.stderr if err else sys.stdout)
    typer.echo(coloured(lines) if in_colour else lines, err=err, nl=nl, color=in_colour)


def say_line(text: object, *, err: bool = False) -> None:
    """Print a text on one line: its line breaks are escaped too."""
    say(printable(str(text)), err=err)


_Found = TypeVar("_Found")
_POLL_S: Final = 2.0
_CLEAR: Final = "\x1b[H\x1b[2J"


def show_live(find: Callable[[], _Found], show: Callable[[_Found], None], *, watch: bool) -> None:
    """Show the result of ``find``; with ``watch``, show it again after each change, until Ctrl-C.

    A terminal is cleared in between. Other output gets an empty line.
    """
    last: _Found | None = None
    while True:
        found = find()
        if found != last:
            if watch and sys.stdout.isatty():
                typer.echo(_CLEAR, nl=False)
            elif last is not None:
                typer.echo()
            show(found)
            last = found
        if not watch:
            return
        time.sleep(_POLL_S)


def age_text(time: object, now: datetime) -> str:
    """Return the age in kubectl's format: 75s, 90m, 30h, 5d."""
    try:
        age = now - datetime.fromisoformat(str(time))
    except (ValueError, TypeError):
        return "-"
    seconds = max(0, int(age / timedelta(seconds=1)))
    for unit, size, until in (("s", 1, 120), ("m", 60, 120 * 60), ("h", 3600, 48 * 3600)):
        if seconds < until:
            return f"{seconds // size}{unit}"
    return f"{seconds // 86400}d"


def line_width() -> int | None:
    """Return the maximum line width; None if output is not a terminal and COLUMNS is not set."""
    if columns := whole_number(os.environ.get("COLUMNS")):
        return columns
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def folded(line: str, width: int | None) -> list[str]:
    """Wrap a sentence into lines; continuation lines are indented by two more spaces."""
    if width is None or len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(line, width, subsequent_indent=f"{indent}  ", break_on_hyphens=False)


_GAP: Final = "   "
_NARROWEST: Final = 12
"""Minimum width of a folded column, in characters."""


def cell(value: object) -> str:
    """Return a value as the text of a cell, shortened if it is long; ``-`` for no value."""
    return clip(whole_cell(value), _MOST_CHARACTERS)


def whole_cell(value: object) -> str:
    """Return a value as the text of a cell; ``-`` for no value."""
    return printable(str("-" if value in (None, "") else value))


def labelled(rows: Iterable[tuple[str, object]]) -> list[str]:
    """Return whole values as lines with their labels, folded to the terminal's width."""
    found = [(f"{label}:", whole_cell(value)) for label, value in rows]
    return aligned(found, left=2, width=line_width(), foldable=(1,)) if found else []


def aligned(
    rows: Sequence[Sequence[str]],
    *,
    left: int = 1,
    indent: str = "  ",
    width: int | None = None,
    foldable: Sequence[int] = (),
) -> list[str]:
    """Return rows as lines: the first columns aligned to the left, the rest to the right.

    Cells of the ``foldable`` columns may take several lines to keep lines within ``width``.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = None if width is None else width - len(indent) - len(_GAP) * (len(widths) - 1)
    while room is not None and foldable and sum(widths) > room:
        widest = max(foldable, key=widths.__getitem__)
        if widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
    lines = []
    for row in rows:
        folded = [
            [cell] if len(cell) <= wide else textwrap.wrap(cell, wide) for cell, wide in zip(row, widths, strict=True)
        ]
        for parts in zip_longest(*folded, fillvalue=""):
            cells = [
                part.ljust(wide) if index < left else part.rjust(wide)
                for index, (part, wide) in enumerate(zip(parts, widths, strict=True))
            ]
            lines.append((indent + _GAP.join(cells)).rstrip())
    return lines
