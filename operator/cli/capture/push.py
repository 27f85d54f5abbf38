"""`capture push`: copy a fetched capture to a bucket, and verify the copy by its checksums."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec
import typer

from specdecode_operator.capture.files.formats import MANIFEST, FileEntry
from specdecode_operator.capture.files.publish import file_entry, verify
from specdecode_operator.cli.options import ended, fail
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.problems import printable

if TYPE_CHECKING:
    from obstore.store import ObjectStore, S3Config

_COMPARISON: Final = "comparison.json"
"""Comparison of arms, in the folder above theirs. Manifests do not list it."""
_URL: Final = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/+([A-Za-z0-9._=/-]*))?")
_ENDPOINT: Final = re.compile(r"https?://[^/@?#\s]+/?")
_PIECE_BYTES: Final = 1 << 20
_PART_BYTES: Final = 16 << 20
_MOST_PARTS: Final = 10_000  # limit of S3
_RETRIES: Final = 4
_RETRY_TIMEOUT: Final = timedelta(seconds=60)


class PushFolderError(Exception):
    """The folder holds no complete capture. The message is one line with a fix."""


class PushError(Exception):
    """The upload failed. The message is one line with a fix."""


class Upload(NamedTuple):
    """A file and its place below the prefix."""

    key: str
    path: Path
    entry: FileEntry


class _Files(msgspec.Struct):
    files: dict[str, FileEntry]


def uploads(folder: Path) -> list[Upload]:
    """Return the files of a capture after checking them against its manifests. Manifests come last.

    Raises
    ------
    PushFolderError
        If the folder has no manifest, or a file differs from its manifest.
    """
    parts = (
        [folder] if (folder / MANIFEST).is_file() else sorted(path.parent for path in folder.glob(f"*/*/{MANIFEST}"))
    )
    if not parts:
        raise PushFolderError(f"{folder}: contains no {MANIFEST}: use a folder that specdecode capture fetch wrote")
    data, manifests = list[Upload](), list[Upload]()
    for part in parts:
        if faults := verify(part):
            raise PushFolderError(f"{part}: {faults[0]}: fetch the capture again")
        below = "" if part == folder else f"{part.relative_to(folder).as_posix()}/"
        found = msgspec.json.decode((part / MANIFEST).read_bytes(), type=_Files).files
        if compressed := sorted(name for name in found if not (part / name).is_file()):
            raise PushFolderError(f"{part}: {compressed[0]} is compressed: decompress it, as the manifest names it")
        data += [Upload(f"{below}{name}", part / name, entry) for name, entry in sorted(found.items())]
        manifests.append(_whole(f"{below}{MANIFEST}", part / MANIFEST))
    comparison = folder / _COMPARISON
    above = [_whole(_COMPARISON, comparison)] if parts != [folder] and comparison.is_file() else []
    return [*data, *above, *manifests]


def _whole(key: str, path: Path) -> Upload:
    return Upload(key, path, file_entry(path))


def push(store: "ObjectStore", files: list[Upload]) -> Iterator[tuple[Upload, bool]]:
    """Upload files that are not in the store. Yield each with whether it was uploaded, after its copy is verified.

    Raises
    ------
    PushError
        If an object has other content, or an upload fails. Manifests come last, so there is none after a failure.
    """
    import obstore  # noqa: PLC0415  an optional dependency

    # Another capture's manifest may not describe files of this one.
    for each in files:
        if each.path.name == MANIFEST:
            _is_there(store, each)
    for each in files:
        uploaded = not _is_there(store, each)
        if uploaded:
            part_bytes = max(_PART_BYTES, -(-each.entry.bytes // _MOST_PARTS))
            with _reported(each.key):
                obstore.put(store, each.key, each.path, chunk_size=part_bytes, max_concurrency=4)
            if not _is_there(store, each):
                raise PushError(f"{each.key}: is missing after the upload: check the rules of the bucket")
        yield each, uploaded


def _is_there(store: "ObjectStore", file: Upload) -> bool:
    """Return whether the store has an object with the content of the file, which is read to compare checksums."""
    import obstore  # noqa: PLC0415  an optional dependency

    digest, size_bytes = hashlib.sha256(), 0
    with _reported(file.key):
        try:
            size_bytes = obstore.head(store, file.key)["size"]
            if size_bytes == file.entry.bytes:
                for piece in obstore.get(store, file.key).stream(min_chunk_size=_PIECE_BYTES):
                    digest.update(piece)
        except (FileNotFoundError, obstore.exceptions.NotFoundError):
            return False
    if size_bytes != file.entry.bytes or digest.hexdigest() != file.entry.sha256:
        raise PushError(f"{file.key}: exists with other content: use another prefix, or delete the object")
    return True


@contextmanager
def _reported(key: str) -> Iterator[None]:
    from obstore.exceptions import (  # noqa: PLC0415  as above
        BaseError,
        NotFoundError,
        PermissionDeniedError,
        UnauthenticatedError,
    )

    try:
        yield
    except (FileNotFoundError, NotFoundError) as error:
        raise PushError(f"{key}: the bucket does not exist: create it, or use another") from error
    except (PermissionDeniedError, UnauthenticatedError, PermissionError) as error:
        raise PushError(f"{key}: permission denied: set credentials that may read and write the prefix") from error
    except (BaseError, OSError) as error:
        why = printable(str(error).strip().partition("\n")[0])
        raise PushError(f"{key}: {why}: push again to resume") from error


def push_command(
    folder: Annotated[Path, typer.Argument(help="Folder of a fetched capture.")],
    destination: Annotated[str, typer.Argument(metavar="s3://BUCKET/PREFIX", help="Bucket and prefix of the copy.")],
    *,
    endpoint_url: Annotated[
        str | None, typer.Option(metavar="URL", help="S3 server. Defaults to AWS_ENDPOINT_URL, then to AWS.")
    ] = None,
) -> None:
    """Copy a fetched capture to a bucket, and verify the copy.

    Files are checked against the manifest before the upload, and read back after
    it. Files that the bucket already has are not uploaded again, so that a repeated
    command resumes. The manifest comes last. Other content is never overwritten.

    Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, from a web
    identity token, or from the metadata service. It needs the extra s3.

    For example: specdecode capture push captures/demo s3://bucket/captures/demo

    Exits with 0 when the copy is complete, 1 when an upload fails, 2 when the
    folder holds no complete capture.
    """
    found = _URL.fullmatch(destination)
    if found is None or {".", ".."} & set((found[2] or "").split("/")):
        fail(f"{destination}: is not a bucket with a prefix: use s3://BUCKET/PREFIX")
    if endpoint_url is not None and not _ENDPOINT.fullmatch(endpoint_url):
        fail("--endpoint-url: is not the URL of a server: use http://HOST:PORT or https://HOST")
    bucket, prefix = found[1], (found[2] or "").strip("/")
    try:
        from obstore.store import S3Store  # noqa: PLC0415  an optional dependency
    except ImportError:
        fail("obstore is not installed: pip install '.[s3]' in a clone")
    with ended(PushFolderError):
        files = uploads(folder)
    config: S3Config = {"checksum_algorithm": "SHA256"}
    if endpoint_url is not None:
        config["endpoint"] = endpoint_url
    try:
        with _reported("configuration"):
            store = S3Store(
                bucket,
                prefix=prefix or None,
                config=config,
                client_options={"allow_http": True},
                retry_config={"max_retries": _RETRIES, "retry_timeout": _RETRY_TIMEOUT},
            )
        uploaded = 0
        for file, is_new in push(store, files):
            uploaded += is_new
            say_line(f"{file.key}: {'uploaded' if is_new else 'already there'}, {file.entry.bytes:,} bytes")
    except PushError as error:
        say_line(f"error: {destination}: {error}", err=True)
        raise typer.Exit(1) from error
    say_line(f"{destination}: {len(files)} files, {uploaded} uploaded, all verified")
