"""Lines of JSONL files, plain or gzip, one at a time however large the file is."""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

GZIP_SUFFIX = ".gz"

LONGEST_LINE_BYTES = 2**27
"""An answer of a million tokens has a third of that. Zeros that gzip packed a thousandfold would fill the memory."""


@dataclass(frozen=True)
class Line:
    """One line of a file."""

    number: int  # from 1
    text: bytes  # without white space at either end
    whole: bool  # it ends with a line feed; only a file's last line may not


class NoTrailerError(Exception):
    """A gzip stream ends without its trailer, as its writer still runs or was killed; all whole lines came before."""


class BrokenGzipError(Exception):
    """What a gzip file holds is damaged, or a line does not end: nothing after this place can be read."""


def read_lines(path: Path) -> Iterator[Line]:
    """Return the lines of a file that are not blank; a name that ends in ``.gz`` is decompressed.

    Raises
    ------
    NoTrailerError
        After the last whole line of an unfinished gzip stream.
    BrokenGzipError
        Where compressed data is damaged, or a line is longer than any.
    """
    with open_to_read(path) as stream:
        number = 0
        while raw := _next_line(stream, number + 1):
            number += 1
            if text := raw.strip():
                yield Line(number, text, whole=raw.endswith(b"\n"))


def open_to_read(path: Path) -> BinaryIO:
    """Return the bytes of a file, decompressed where its name ends in ``.gz``."""
    if path.name.endswith(GZIP_SUFFIX):
        return cast("BinaryIO", gzip.open(path, "rb"))
    return path.open("rb")


def _next_line(stream: BinaryIO, number: int) -> bytes:
    try:
        raw = stream.readline(LONGEST_LINE_BYTES + 1)
    except EOFError as error:
        raise NoTrailerError(f"line {number}: the gzip stream ends without its trailer") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise BrokenGzipError(f"line {number}: {error}") from error
    if len(raw) > LONGEST_LINE_BYTES:
        raise BrokenGzipError(f"line {number}: has more than {LONGEST_LINE_BYTES:,} bytes")
    return raw
