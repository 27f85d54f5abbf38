"""The file of one API server: lines are only ever appended, and only whole ones stay."""

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

RESERVE_BYTES = 16 * 1024
"""Held back on the disk, so that a full one still has room for the last lines."""

_FULL = {errno.ENOSPC, errno.EDQUOT}


class SegmentWriteError(Exception):
    """The disk did not take it."""

    def __init__(self, cause: OSError, written: int = 0) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.written = written  # how many of the lines that were to be appended are in the file

    @property
    def is_full(self) -> bool:
        """Whether there is no room, rather than something broken."""
        return self.cause.errno in _FULL


class Segment:
    """A new segment file, beside its reserve."""

    def __init__(self, path: Path) -> None:
        """Create both; fail where one exists."""
        self.path = path
        self._reserve = path.with_suffix(".reserve")
        self._length = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.fchmod(self._file, 0o644)  # the load generator, another user, reads it, whatever the engine's umask
        self._hold_back()
        self._keep_names()

    def _keep_names(self) -> None:
        """Have the names of both files on the disk: flushing a file does not."""
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno not in _FULL:
                raise
        finally:
            os.close(folder)

    def _hold_back(self) -> None:
        file = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            # Noise: a file system that compresses would keep no room for zeros.
            os.write(file, os.urandom(RESERVE_BYTES))
            os.fsync(file)
        except OSError as error:
            if error.errno not in _FULL:
                raise  # a disk that is full already is found out by the first lines
        finally:
            os.close(file)

    def append(self, lines: Sequence[bytes]) -> None:
        """Write lines; where the disk does not take all of them, keep the whole ones and raise SegmentWriteError."""
        left = memoryview(b"".join(lines))
        total = len(left)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            raise SegmentWriteError(error, self._drop_torn_line(lines, total - len(left))) from error
        self._length += total

    def _drop_torn_line(self, lines: Sequence[bytes], written_bytes: int) -> int:
        """Cut off the line of which only a part went in; return how many before it are whole."""
        whole = 0
        for line in lines:
            if written_bytes < len(line):
                break
            written_bytes -= len(line)
            self._length += len(line)
            whole += 1
        with suppress(OSError):  # of a disk that does not even do this, the reader leaves out a torn end
            os.ftruncate(self._file, self._length)
        return whole

    def sync(self) -> None:
        """Have everything on the disk; some file systems notice only here that it is full."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise SegmentWriteError(error) from error

    def close(self, last_lines: Sequence[bytes]) -> None:
        """Give the reserve back, write the last lines into what it leaves, and close."""
        with suppress(OSError):
            self._reserve.unlink()
        try:
            self.append(last_lines)
            self.sync()
        finally:
            os.close(self._file)
