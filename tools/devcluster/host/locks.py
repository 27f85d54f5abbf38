"""A lock between processes that leaves no file behind."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from devcluster.host.progress import say


@contextmanager
def exclusive(path: Path, waiting_for: str) -> Iterator[None]:
    """Hold the lock at `path`; say `waiting_for` when another process has it.

    The kernel drops the lock when its holder dies, however it dies.
    """
    descriptor = _acquire(path, waiting_for)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(path: Path, waiting_for: str) -> int:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # another holder has just removed the directory
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting: {waiting_for}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # The holder before us removed the file: then our lock is on a file that nobody else sees.
        with suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                return descriptor
        os.close(descriptor)
