"""Before an engine starts: whether the volume can take what it records, and the folders for it."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from specdecode_operator.capture.files.errors import CaptureError
from specdecode_operator.capture.files.manifest import PartialManifest
from specdecode_operator.capture.files.publish import UNFINISHED, flush, label_partial, refuse_finished
from specdecode_operator.capture.job.places import Places

SMALLEST_FREE_BYTES: Final = 32 * 2**20
"""Room for a minute of a small engine; less is a mistake."""

_ANYBODY: Final = 0o777
"""The engine runs as whatever user its image has."""

_REASONS: Final = {
    errno.EROFS: ("VolumeReadOnly", "is read-only: mount a volume that can be written"),
    errno.EACCES: ("VolumeNotWritable", "may not be written by this user: set fsGroup, or another volume"),
    errno.EPERM: ("VolumeNotWritable", "may not be written by this user: set fsGroup, or another volume"),
    errno.ENOSPC: ("DiskFull", "is full: free some of it, or use a larger one"),
    errno.EDQUOT: ("DiskFull", "is over its quota: free some of it, or use a larger one"),
}


def look_at_volume(places: Places, smallest_free_bytes: int = SMALLEST_FREE_BYTES) -> None:
    """Raise a CaptureError when the volume cannot take an attempt, or holds what it would publish already."""
    with volume_errors(places.root):
        _check_volume(places, smallest_free_bytes)


def begin(places: Places) -> None:
    """Make the folders of an attempt, and label it as unfinished.

    Raises
    ------
    CaptureError
        When the volume refuses, or the attempt was begun before.
    """
    with volume_errors(places.root):
        _make_folders(places)
        label_partial(places.folder, _unfinished(places))


@contextmanager
def volume_errors(root: Path) -> Iterator[None]:
    """Turn what a volume refuses into a CaptureError with a reason."""
    try:
        yield
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        reason, what = _REASONS.get(error.errno or 0, ("VolumeFailed", f"failed: {why}"))
        raise CaptureError(reason, f"the volume at {root} {what} ({error.filename or root})") from error


def _check_volume(places: Places, smallest_free_bytes: int) -> None:
    if not places.root.is_dir():
        raise CaptureError("VolumeMissing", f"{places.root}: no volume is mounted here")
    refuse_finished(places.final)
    free_bytes = shutil.disk_usage(places.root).free
    if free_bytes < smallest_free_bytes:
        free, needed = (f"{size / 2**20:.0f} MiB" for size in (free_bytes, smallest_free_bytes))
        raise CaptureError(
            "VolumeTooSmall",
            f"the volume at {places.root} has {free} free of the {needed} that the shortest capture needs:"
            " free some of it, or use a larger one",
        )


def _make_folders(places: Places) -> None:
    if places.client_file.exists() or (places.segments.exists() and any(places.segments.iterdir())):
        raise CaptureError(
            "AttemptInterrupted",
            f"{places.folder.name} was begun and interrupted: its files stay as they are, a new pod begins anew",
        )
    places.segments.mkdir(parents=True, exist_ok=True)
    for folder in (places.folder, places.segments):
        folder.chmod(_ANYBODY)
    # A power failure must not take the names of folders whose files are flushed.
    for folder in (places.folder, *places.folder.parents):
        flush(folder)
        if folder == places.root:
            break


def _unfinished(places: Places) -> PartialManifest:
    return PartialManifest(
        namespace=places.namespace,
        capture=places.capture,
        attempt=places.attempt,
        reason=UNFINISHED,
        message="the attempt runs, or was killed before it could say why",
    )
