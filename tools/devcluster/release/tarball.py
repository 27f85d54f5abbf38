"""Compressed archives for a release: the same files give the same bytes."""

import gzip
import io
import tarfile
from collections.abc import Mapping


def tarball(files: Mapping[str, str], *, executable: frozenset[str] = frozenset()) -> bytes:
    """Return a `.tar.gz` with files, by path, in the order of their paths."""
    written = io.BytesIO()
    # No time and no owner: both would differ between two builds.
    with (
        gzip.GzipFile(fileobj=written, mode="wb", filename="", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for path, text in sorted(files.items()):
            content = text.encode()
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o755 if path in executable else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return written.getvalue()
