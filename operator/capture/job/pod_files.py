"""Lay out the files that a capture's containers share: volume folders, recorder, image ID.

A plugin, such as the recorder, is copied as a package with its distribution metadata into a folder on the
PYTHONPATH of an unmodified vLLM. The volume is checked for write access and free space before the engine starts.
"""

import asyncio
import errno
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from specdecode_operator.capture.files.formats import CLIENT, PART_SUFFIX, CaptureError, PartialManifest
from specdecode_operator.capture.files.publish import UNFINISHED, flush, label_partial, reject_finished
from specdecode_operator.capture.files.segments import FOLDER
from specdecode_operator.capture.recorder.segment_format import CLOSE_FILE
from specdecode_operator.vllm.plugin_bundle import RECORDER

# Folder that the engine and the load generator share, with orders and states.
SWITCH_FOLDER: Final = "/specdecode/switch"


def switcher_command(recorder: str, folder: str = SWITCH_FOLDER) -> list[str]:
    """Return the command of an engine's container that starts engines on orders.

    ``recorder`` is the folder of the bundle. ``-I`` ignores the image's Python variables, which are only for engines.
    """
    return ["python3", "-I", f"{recorder}/{RECORDER.package}/switcher.py", folder]


# File of a ConfigMap that the operator writes from the pod's status: one line, ``<UID of the pod> <image id>``.
IMAGE_ID_FILE: Final = Path("/specdecode/podinfo/engine-image-id")
_POLL_S: Final = 0.5


async def engine_image_id(file: Path, pod_uid: str, until_s: float) -> str | None:
    """Return the image ID with its digest; None if it does not come in time, or no ConfigMap is mounted."""
    # The ID of an earlier attempt's pod is ignored. ``until_s`` is on the monotonic clock.
    while (found := _read_image_id(file, pod_uid)) is None:
        if not file.parent.is_dir() or time.monotonic() >= until_s:
            return None
        await asyncio.sleep(_POLL_S)
    return found


def _read_image_id(file: Path, pod_uid: str) -> str | None:
    try:
        uid, _, image_id = file.read_text(encoding="utf-8").strip().partition(" ")
    except (OSError, UnicodeDecodeError):
        return None
    return image_id if uid == pod_uid and image_id else None


ARM: Final = "as-deployed"


@dataclass(frozen=True)
class Places:
    """Folders of one attempt at one repetition of one arm."""

    root: Path
    namespace: str
    capture: str
    attempt: str  # UID of the pod
    arm: str = ARM
    repetition: int = 1

    @property
    def of_capture(self) -> Path:
        """Folder of all arms."""
        return self.root / self.namespace / self.capture

    @property
    def final(self) -> Path:
        """Folder of the published files."""
        return self.of_capture / self.arm / str(self.repetition)

    @property
    def folder(self) -> Path:
        """Folder of the files until they are published, and of a failed attempt."""
        return self.final.with_name(f"{self.repetition}{PART_SUFFIX}-{self.attempt}")

    @property
    def segments(self) -> Path:
        """Folder of the recorders' files."""
        return self.folder / FOLDER

    @property
    def close_file(self) -> Path:
        """File that orders the recorders to finish."""
        return self.segments / CLOSE_FILE

    @property
    def client_file(self) -> Path:
        """File of the load generator."""
        return self.folder / f"{CLIENT}{PART_SUFFIX}"

    @property
    def path(self) -> str:
        """Final folder, relative to the volume's root."""
        return str(self.final.relative_to(self.root))


_SMALLEST_FREE_BYTES: Final = 32 * 2**20  # a minute of a small engine
_REASONS: Final = {
    errno.EROFS: ("VolumeReadOnly", "is read-only: mount a volume that can be written"),
    errno.EACCES: ("VolumeNotWritable", "may not be written by this user: set fsGroup, or another volume"),
    errno.EPERM: ("VolumeNotWritable", "may not be written by this user: set fsGroup, or another volume"),
    errno.ENOSPC: ("DiskFull", "is full: free some of it, or use a larger one"),
    errno.EDQUOT: ("DiskFull", "is over its quota: free some of it, or use a larger one"),
}


@contextmanager
def volume_errors(root: Path) -> Iterator[None]:
    """Convert an OSError of a volume to a CaptureError with a reason."""
    try:
        yield
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        reason, what = _REASONS.get(error.errno or 0, ("VolumeFailed", f"failed: {why}"))
        raise CaptureError(reason, f"the volume at {root} {what} ({error.filename or root})") from error


def look_at_volume(places: Places, smallest_free_bytes: int = _SMALLEST_FREE_BYTES) -> None:
    """Raise a CaptureError if the volume cannot take an attempt, or already holds the published files."""
    with volume_errors(places.root):
        if not places.root.is_dir():
            raise CaptureError("VolumeMissing", f"{places.root}: no volume is mounted here")
        reject_finished(places.final)
        free_bytes = shutil.disk_usage(places.root).free
        if free_bytes < smallest_free_bytes:
            free, needed = (f"{size / 2**20:.0f} MiB" for size in (free_bytes, smallest_free_bytes))
            raise CaptureError(
                "VolumeTooSmall",
                f"the volume at {places.root} has {free} free of the {needed} that the shortest capture needs:"
                " free some of it, or use a larger one",
            )


def begin(places: Places) -> None:
    """Create the folders of an attempt, and label it as unfinished."""
    with volume_errors(places.root):
        if places.client_file.exists() or (places.segments.exists() and any(places.segments.iterdir())):
            raise CaptureError(
                "AttemptInterrupted",
                f"{places.folder.name} was interrupted: its files are kept, and a new pod starts another attempt",
            )
        places.segments.mkdir(parents=True, exist_ok=True)
        for folder in (places.folder, places.segments):
            folder.chmod(0o777)  # the engine runs as the user of its image
        # A power failure must not lose the names of folders whose files are flushed.
        for folder in (places.folder, *places.folder.parents):
            flush(folder)
            if folder == places.root:
                break
        label_attempt(places, UNFINISHED, "the attempt runs, or was killed before it could report a reason")


def label_attempt(places: Places, reason: str, message: str) -> None:
    """Label the files of an attempt as partial."""
    manifest = PartialManifest(
        namespace=places.namespace, capture=places.capture, attempt=places.attempt, reason=reason, message=message
    )
    label_partial(places.folder, manifest)
