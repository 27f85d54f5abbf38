"""Read text from files named on the command line, and write files atomically.

Files that a command answers line by line are read with a limit on the length of each line.
"""

import os
import shutil
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO, Final, TextIO

from specdecode_operator.cli.options import fail
from specdecode_operator.problems import printable
from specdecode_operator.untrusted import MAX_BYTES, too_large

STANDARD_INPUT: Final = "-"

_FIX: Final = "name a file that can be read, or - for standard input"
_MOST_ERRORS: Final = 50
"""Of one file: nobody reads more."""


class DocumentError(Exception):
    """A file that cannot be read, in one line that names the file and what to do."""

    file: str | None = None
    """The file as it was named, where manifests are read."""

    line: int | None = None
    """Of the file, from 1, where one line is meant."""


def place_of(file: str) -> str:
    """Return a file's name as messages say it."""
    return "standard input" if file == STANDARD_INPUT else printable(file)


def first_errors(errors: Iterable[DocumentError]) -> Iterator[DocumentError]:
    """Return the first errors of each file, and how many more there are."""
    told: Counter[str | None] = Counter()
    for error in errors:
        told[error.file] += 1
        if told[error.file] <= _MOST_ERRORS:
            yield error
    for file, count in told.items():
        if count > _MOST_ERRORS:
            more = DocumentError(
                f"{place_of(file or '')}: has {count:,} errors: only the first {_MOST_ERRORS} are shown; fix them first"
            )
            more.file = file
            yield more


def read_text(file: str) -> str:
    """Return the text of a file, or of standard input."""
    with open_to_read(file) as stream:
        try:
            content = stream.read(MAX_BYTES + 1)
        except OSError as error:
            raise unreadable(file, error) from error
    if len(content) > MAX_BYTES:
        raise DocumentError(f"{place_of(file)}: {too_large()}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(f"{place_of(file)}: is not UTF-8 text: name a YAML or JSON file") from error


@contextmanager
def open_to_read(file: str) -> Iterator[BinaryIO]:
    """Open a file that somebody named, or standard input, without waiting for who may never write."""
    if file == STANDARD_INPUT:
        if sys.stdin is None:
            raise DocumentError("standard input is closed: name a file")
        yield sys.stdin.buffer
        return
    if not file:
        raise DocumentError(f"the name of a file is empty: {_FIX}")
    try:
        mode = Path(file).stat().st_mode
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from error
    # A shell makes a FIFO of <(command).
    of_shell = stat.S_ISFIFO(mode) and file.startswith(("/dev/stdin", "/dev/fd/", "/proc/self/fd/"))
    if not stat.S_ISREG(mode) and not of_shell:
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(mode), "a device")
        raise DocumentError(f"{place_of(file)}: is {kind}: name a file, or - for standard input")
    try:
        stream = Path(file).open("rb")  # noqa: SIM115  closed below; the errors of who reads are not ours
    except OSError as error:
        raise unreadable(file, error) from error
    with stream:
        yield stream


def unreadable(file: str, error: OSError | ValueError) -> DocumentError:
    """Return what is said of a file that cannot be read."""
    return DocumentError(f"{place_of(file)}: {getattr(error, 'strerror', None) or error}: {_FIX}")


@contextmanager
def replaced_whole(file: Path) -> Iterator[TextIO]:
    """Write a file that is there whole, or not at all: what stood there before stays until the end."""
    # What a link names is written, not the link.
    target = Path(os.path.realpath(file))
    if target.exists() and not target.is_file():
        with target.open("w", encoding="utf-8") as stream:
            yield stream
        return
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name[:64]}.", dir=target.parent)
    except OSError as error:
        error.filename = str(file)  # users do not know the temporary file
        raise
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            yield stream
        temporary.chmod(mode)
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Fill a folder that is there under its name when it is whole, or not at all."""
    if os.path.lexists(folder):
        raise DocumentError(f"{printable(str(folder))}: is there already: name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name[:64]}.", dir=folder.parent))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    """Return the mask of the process, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def opened_line_files(
    source: str, target: str, most_line_bytes: int, option: str = "--in"
) -> Iterator[tuple[Iterator[bytes], TextIO]]:
    """Open the files of ``option`` and --out; end with the exit code of invalid input if one is unusable.

    A line that is too long is cut, so that it need not be held in memory.
    """
    to_stdout = target == STANDARD_INPUT

    def lines(stream: BinaryIO) -> Iterator[bytes]:
        line, is_rest = b"", False
        while True:
            try:
                line = stream.readline(most_line_bytes + 1)
            except OSError as error:
                raise unreadable(source, error) from error
            if not line:
                return
            if not is_rest:
                yield line
            is_rest = len(line) > most_line_bytes and not line.endswith(b"\n")

    try:
        with open_to_read(source) as stream:
            with suppress(OSError, ValueError, AttributeError):
                found = os.fstat(sys.stdout.fileno()) if to_stdout else Path(target).stat()
                if stat.S_ISREG(found.st_mode) and os.path.samestat(os.fstat(stream.fileno()), found):
                    name = "standard output" if to_stdout else place_of(target)
                    fail(f"--out: {name}: is the file of {option}: name another")
            with nullcontext(sys.stdout) if to_stdout else replaced_whole(Path(target)) as written:
                yield lines(stream), written
    except DocumentError as error:
        fail(f"{option}: {error}")
    except OSError as error:
        if to_stdout:
            raise
        fail(f"--out: {place_of(target)}: {error.strerror}: name a file that can be written, or -")
