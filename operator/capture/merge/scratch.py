"""Tables for what memory does not hold: SQLite orders and joins them in a file on the volume.

An index is made before its table is filled. To make it afterwards, or to order rows without one, SQLite sorts in a file
in /var/tmp or /tmp, and that is the node's storage, not the volume.
"""

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

CACHE_KIB: Final = 8 * 1024
"""What SQLite holds of a database in memory."""

SUFFIX: Final = ".scratch"


@contextmanager
def scratch_database(folder: Path, name: str) -> Iterator[sqlite3.Connection]:
    """Open a database in a folder for as long as the block lasts; its file goes with it.

    Raises
    ------
    OSError
        When the volume is full or fails.
    """
    path = folder / f"{name}{SUFFIX}"
    path.unlink(missing_ok=True)  # of a merge that was killed
    # Nobody else opens it, so no locks, which some network file systems do not have. It is never read after a crash,
    # so no journal either: all is one transaction that nobody commits.
    uri = f"file:{quote(str(path))}?vfs=unix-none"
    try:
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as database:
            for setting in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{CACHE_KIB}"):
                database.execute(f"PRAGMA {setting}")
            database.execute("BEGIN")
            yield database
    except sqlite3.Error as error:
        full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from error
    finally:
        path.unlink(missing_ok=True)
