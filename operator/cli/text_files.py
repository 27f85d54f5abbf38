"""Read text from files named on the command line, and write files atomically.

Line-based input is read with a limit on the length of each line.
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
from specdecode_operator.sizing.calibration import UNCALIBRATED, Calibration, CalibrationError, parse_calibration
from specdecode_operator.untrusted import MAX_BYTES, too_large

STANDARD_INPUT: Final = "-"

_FIX: Final = "use a readable file, or - for standard input"
_BUFFER_BYTES: Final = 2**16
"""Python's own buffers of 8 KiB hold few lines of a batch."""
_MOST_ERRORS: Final = 50
"""Maximum number of errors shown per file."""


class DocumentError(Exception):
    """A file cannot be read. The message is one line with the file and a fix."""

    file: str | None = None
    """Manifest as named on the command line; None for other files."""

    line: int | None = None
    """Line in the file, from 1; None if the error is not about one line."""


def place_of(file: str) -> str:
    """Return a file's name for messages."""
    return "standard input" if file == STANDARD_INPUT else printable(file)


def first_errors(errors: Iterable[DocumentError]) -> Iterator[DocumentError]:
    """Yield the first errors of each file, and an error with the total number if there are more."""
    told: Counter[str | None] = Counter()
    for error in errors:
        told[error.file] += 1
        if told[error.file] <= _MOST_ERRORS:
            yield error
    for file, count in told.items():
        if count > _MOST_ERRORS:
            more = DocumentError(
                f"{place_of(file or '')}: has {count:,} errors, of which {_MOST_ERRORS} are shown: fix these first"
            )
            more.file = file
            yield more


def read_text(file: str) -> str:
    """Return the text of a file or of standard input."""
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
        raise DocumentError(f"{place_of(file)}: is not UTF-8 text: use a YAML or JSON file") from error


def read_calibration(file: str | None) -> Calibration:
    """Read a calibration file; return an empty calibration without a file."""
    if file is None:
        return UNCALIBRATED
    try:
        return parse_calibration(read_text(file))
    except CalibrationError as error:
        raise DocumentError(f"{file}: {error}") from error


@contextmanager
def open_to_read(file: str) -> Iterator[BinaryIO]:
    """Open a file, a shell's <(command) or standard input. Other FIFOs and devices are rejected, as they may block."""
    if file == STANDARD_INPUT:
        if sys.stdin is None:
            raise DocumentError("standard input is closed: use a file")
        yield sys.stdin.buffer
        return
    if not file:
        raise DocumentError(f"empty file name: {_FIX}")
    try:
        mode = Path(file).stat().st_mode
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from error
    # In a shell, <(command) is a FIFO.
    of_shell = stat.S_ISFIFO(mode) and file.startswith(("/dev/stdin", "/dev/fd/", "/proc/self/fd/"))
    if not stat.S_ISREG(mode) and not of_shell:
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(mode), "a device")
        raise DocumentError(f"{place_of(file)}: is {kind}: use a file, or - for standard input")
    try:
        stream = Path(file).open("rb", _BUFFER_BYTES)  # noqa: SIM115  closed below; the caller handles its own read errors
    except OSError as error:
        raise unreadable(file, error) from error
    with stream:
        yield stream


def unreadable(file: str, error: OSError | ValueError) -> DocumentError:
    """Return the error for a file that cannot be read."""
    return DocumentError(f"{place_of(file)}: {getattr(error, 'strerror', None) or error}: {_FIX}")


@contextmanager
def replaced_whole(file: Path) -> Iterator[TextIO]:
    """Write a file atomically: readers see either the old or the complete new content."""
    # For a symlink, replace its target.
    target = Path(os.path.realpath(file))
    if target.exists() and not target.is_file():
        with target.open("w", encoding="utf-8") as stream:
            yield stream
        return
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name[:64]}.", dir=target.parent)
    except OSError as error:
        error.filename = str(file)  # report the user's file and not the temporary one
        raise
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", _BUFFER_BYTES, encoding="utf-8") as stream:
            yield stream
        temporary.chmod(mode)
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Create a folder atomically: it gets its name after all files are written."""
    if os.path.lexists(folder):
        raise DocumentError(f"{printable(str(folder))}: already exists: use a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name[:64]}.", dir=folder.parent))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    """Return the umask of the process, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def opened_line_files(
    source: str, target: str, most_line_bytes: int, option: str = "--in"
) -> Iterator[tuple[Iterator[bytes], TextIO]]:
    """Open the files of ``option`` and --out; exit with the code for invalid input if one is unusable.

    Overlong lines are truncated, so that they do not have to fit in memory.
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
                    fail(f"--out: {name}: is also the file of {option}: use another")
            with nullcontext(sys.stdout) if to_stdout else replaced_whole(Path(target)) as written:
                yield lines(stream), written
    except DocumentError as error:
        fail(f"{option}: {error}")
    except OSError as error:
        if to_stdout:
            raise
        fail(f"--out: {place_of(target)}: {error.strerror}: use a writable file, or -")
