"""What a terminal is given: verdicts in colour, and lines that it has room for."""

import os
import re
import shutil
import sys
import textwrap
from typing import Final, TextIO

import typer

from specdecode_operator.documents.numbers import whole_number
from specdecode_operator.problems import printable
from specdecode_operator.redaction import redact

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
