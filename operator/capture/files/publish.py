"""Publish the files of a capture atomically.

Every file is flushed and checksummed under its ``.part`` name, then renamed. The manifest comes next. Renaming the
folder to its final name comes last. An attempt that is killed before the manifest exists stays unchanged, labelled
by its manifest.partial.json. An attempt with a manifest is complete: the next attempt of the same capture renames
its folder.
"""

import errno
import hashlib
import os
import shutil
import stat
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from specdecode_operator.capture.files.formats import (
    DATA_FILES,
    GZIP_SUFFIX,
    MANIFEST,
    PART_SUFFIX,
    PARTIAL_MANIFEST,
    CaptureError,
    FileEntry,
    Manifest,
    PartialManifest,
    open_to_read,
)
from specdecode_operator.capture.files.segments import FOLDER
from specdecode_operator.problems import printable

UNFINISHED: Final = "Unfinished"
_LONGEST_NAME_BYTES: Final = 255  # limit of Linux
_CHUNK_BYTES: Final = 2**20
_MOST_MANIFEST_BYTES: Final = 16 * 2**20
_Kind = TypeVar("_Kind")
_TAKEN: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})


class UnreadableManifestError(Exception):
    """A manifest is not a regular file, is too large, or cannot be decoded."""


def seal(attempt: Path) -> dict[str, FileEntry]:
    """Flush, checksum and rename an attempt's ``.part`` files; sealed files do not change."""
    entries = {}
    for name in DATA_FILES:
        part, sealed = attempt / f"{name}{PART_SUFFIX}", attempt / name
        if part.exists():
            flush(part)
            entries[name] = file_entry(part)
            os.rename(part, sealed)  # noqa: PTH104  the module is tested by failing its every os call
    flush(attempt)
    return entries


def publish(attempt: Path, final: Path, manifest: Manifest) -> None:
    """Rename a sealed attempt to ``final``, in the same folder.

    Raises
    ------
    CaptureError
        If a finished capture is there already; the attempt stays.
    """
    reject_finished(final)
    write_whole(attempt / MANIFEST, manifest)
    _appear(attempt, final)


def finish_publication(final: Path, capture_uid: str) -> None:
    """Publish the attempt of this capture that was complete when it was killed, if there is one.

    Attempts are in the folder of ``final``.
    """
    if final.exists():
        # Killed after the renaming. The label of a capture of another object was removed long ago.
        _take_label_away(final)
        return
    for attempt in sorted(final.parent.glob(f"{final.name}{PART_SUFFIX}-*")):
        manifest = read_manifest(attempt)
        if manifest is not None and manifest.capture_uid == capture_uid and not verify(attempt):
            _appear(attempt, final)
            return


def _appear(attempt: Path, final: Path) -> None:
    # The recorders' raw lines are in the files now, and a published capture never changes again.
    shutil.rmtree(attempt / FOLDER, ignore_errors=True)
    flush(attempt)
    try:
        os.rename(attempt, final)  # noqa: PTH104
    except OSError as error:
        if error.errno in _TAKEN:
            raise _finished(final) from error
        raise
    flush(final.parent)
    # Last: until the rename is on disk, the label says that the attempt is not published.
    _take_label_away(final)


def _take_label_away(final: Path) -> None:
    with suppress(OSError):  # a leftover label does no harm
        (final / PARTIAL_MANIFEST).unlink()


def reject_finished(final: Path) -> None:
    """Raise a CaptureError if a finished capture is there."""
    if final.exists():
        raise _finished(final)


def read_manifest(final: Path) -> Manifest | None:
    """Return the manifest of a finished capture; None if it is missing or cannot be read."""
    try:
        return decode_manifest(final / MANIFEST, Manifest)
    except (FileNotFoundError, NotADirectoryError, UnreadableManifestError):
        return None


def decode_manifest(path: Path, kind: type[_Kind]) -> _Kind:
    """Return the JSON of a manifest, or of a file beside it, as a type.

    Raises
    ------
    UnreadableManifestError
        If it is not a regular file of at most 16 MiB, or cannot be decoded.
    OSError
        If it cannot be opened or read.
    """
    # Does not wait for the writer of a FIFO.
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise UnreadableManifestError("not a regular file")
        with os.fdopen(opened, "rb", closefd=False) as stream:
            text = stream.read(_MOST_MANIFEST_BYTES + 1)
    finally:
        os.close(opened)
    if len(text) > _MOST_MANIFEST_BYTES:
        raise UnreadableManifestError(f"larger than {_MOST_MANIFEST_BYTES >> 20} MiB")
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableManifestError(str(error)) from error


def _finished(final: Path) -> CaptureError:
    return CaptureError(
        "AlreadyPublished", f"{final} holds a finished capture, which is never overwritten: choose another name"
    )


def label_partial(attempt: Path, manifest: PartialManifest) -> None:
    """Write into an attempt's folder why its files are partial; on a full disk, overwrite the earlier label."""
    sizes = {}
    for path in sorted(attempt.rglob("*")):
        # The recorders still run, and may take a file away that was just listed.
        with suppress(FileNotFoundError):
            if path.is_file() and path.name != PARTIAL_MANIFEST:
                sizes[str(path.relative_to(attempt))] = path.stat().st_size
    manifest = msgspec.structs.replace(manifest, files=sizes)
    try:
        write_whole(attempt / PARTIAL_MANIFEST, manifest)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # The blocks of the label written at the start are still there to be written again.
        with suppress(OSError), (attempt / PARTIAL_MANIFEST).open("r+b") as stream:
            stream.write(_pretty(msgspec.structs.replace(manifest, files={})))
            stream.truncate()


class _Files(msgspec.Struct):
    files: dict[str, FileEntry]


def verify(folder: Path) -> list[str]:
    """Return the differences between a published folder and its manifest, or an empty list."""
    try:
        files = decode_manifest(folder / MANIFEST, _Files).files
    except FileNotFoundError:
        return [f"{MANIFEST} is missing: this is not a published capture"]
    except UnreadableManifestError as error:
        return [f"{MANIFEST} cannot be read: {error}"]
    elsewhere = [name for name in files if not _is_file_name(name)]
    if elsewhere:
        return [f"{printable(elsewhere[0])} in {MANIFEST} is not the name of a capture file"]
    faults = [fault for name, entry in files.items() for fault in _differences(folder / name, entry)]
    extra = [name for name in DATA_FILES if name not in files and (folder / name).exists()]
    return faults + [f"{name} is not in the manifest" for name in extra]


def _is_file_name(name: str) -> bool:
    longest_bytes = _LONGEST_NAME_BYTES - len(GZIP_SUFFIX)
    return name == Path(name).name and "\0" not in name and len(name.encode()) <= longest_bytes


def _differences(path: Path, expected: FileEntry) -> Iterator[str]:
    compressed = path.with_name(f"{path.name}{GZIP_SUFFIX}")
    present = path if path.is_file() or not compressed.is_file() else compressed
    if present.exists() and not present.is_file():
        yield f"{path.name} is not a regular file"  # a device or a pipe might never end
        return
    try:
        found = file_entry(present)
    except FileNotFoundError:
        yield f"{path.name} is missing"
    except (OSError, EOFError, zlib.error) as error:
        yield f"{present.name} cannot be read: {error}"
    else:
        if found.bytes != expected.bytes:
            yield f"{path.name} has {found.bytes} bytes instead of {expected.bytes}"
        elif found != expected:
            yield f"{path.name} does not match its checksum in the manifest"


def file_entry(path: Path) -> FileEntry:
    """Return size, lines and checksum of a file's decompressed content, read piece by piece."""
    digest, size_bytes, lines, last = hashlib.sha256(), 0, 0, b"\n"
    with open_to_read(path) as stream:
        while piece := stream.read(_CHUNK_BYTES):
            digest.update(piece)
            size_bytes += len(piece)
            lines += piece.count(b"\n")
            last = piece[-1:]
    return FileEntry(bytes=size_bytes, lines=lines + (last != b"\n"), sha256=digest.hexdigest())


def _pretty(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def write_whole(path: Path, value: Any) -> None:
    """Write a value as indented JSON, whole or not at all."""
    part = path.with_name(f"{path.name}{PART_SUFFIX}")
    try:
        part.write_bytes(_pretty(value))
        flush(part)
        os.rename(part, path)  # noqa: PTH104
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def flush(path: Path) -> None:
    """Fsync a file or a folder."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
