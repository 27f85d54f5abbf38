"""Files of lines that a command answers one by one: bounded to read, whole when written, never one and the same."""

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO, Final, TextIO

from specdecode_operator.cli.options import fail
from specdecode_operator.cli.text_files import DocumentError, open_to_read, place_of, replaced_whole, unreadable

STANDARD_STREAM: Final = "-"


@contextmanager
def opened_line_files(source: str, target: str, most_line_bytes: int) -> Iterator[tuple[Iterator[bytes], TextIO]]:
    """Open the files of --in and --out; end with the exit code of invalid input where one cannot be used.

    A line that is too long comes without its end, so that nobody has to hold it.
    """
    try:
        with open_to_read(source) as stream:
            _refuse_same_file(stream, target)
            with _opened_to_write(target) as written:
                yield _lines(stream, source, most_line_bytes), written
    except DocumentError as error:
        fail(f"--in: {error}")
    except OSError as error:
        if target == STANDARD_STREAM:
            raise
        fail(f"--out: {place_of(target)}: {error.strerror}: name a file that can be written, or -")


def _refuse_same_file(source: BinaryIO, target: str) -> None:
    """Refuse to write into the file that is read, by whatever name."""
    with suppress(OSError, ValueError, AttributeError):
        found = os.fstat(sys.stdout.fileno()) if target == STANDARD_STREAM else Path(target).stat()
        if stat.S_ISREG(found.st_mode) and os.path.samestat(os.fstat(source.fileno()), found):
            name = "standard output" if target == STANDARD_STREAM else place_of(target)
            fail(f"--out: {name}: is the file of --in: name another")


def _opened_to_write(target: str) -> AbstractContextManager[TextIO]:
    return nullcontext(sys.stdout) if target == STANDARD_STREAM else replaced_whole(Path(target))


def _lines(stream: BinaryIO, source: str, most_bytes: int) -> Iterator[bytes]:
    def read() -> bytes:
        try:
            return stream.readline(most_bytes + 1)
        except OSError as error:
            raise unreadable(source, error) from error

    while line := read():
        rest = line
        while len(rest) > most_bytes and not rest.endswith(b"\n"):
            rest = read()
        yield line
