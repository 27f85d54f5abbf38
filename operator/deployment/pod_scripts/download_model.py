"""Downloads one model from the hub into a cache that others share.

It runs in a Job with the engine's image, so it is one file for Python 3.10 and
newer that needs nothing but the standard library and huggingface_hub. The
answer is the container's termination message::

    {"commit": "0123…"}
    {"error": {"reason": "NoSpaceLeft", "message": "..."}}

The cache is the hub's own: files lie by content, each is moved to its place
when it is complete, and a lock keeps two downloads from fetching the same one
(huggingface_hub/file_download.py). So several may run at once, and what is
there is not fetched again.
"""

import argparse
import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

MESSAGE_LIMIT = 600
_LONGEST_CAUSE = 200
_GIB = 2**30
_SPARE_BYTES = 64 * 2**20
"""Left free beside the files themselves: folders, locks, links."""

_CUT_OFF_S = 1800.0
"""A file that is being fetched is written to all the time: one that was not for so long is nobody's."""

_NEVER = ("original/*", "metal/*", "onnx/*", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.tflite", "*.ot")
"""Copies of the weights for other engines; ``original`` of a Llama is as large as all the rest."""

_PICKLES = ("*.bin", "*.pt", "*.pth")
_MEANINGS = {
    "GatedRepoError": ("ModelGated", "is gated, and this token, or nobody without one, may not read it"),
    "RevisionNotFoundError": ("RevisionNotFound", "has no such revision"),
    "RepositoryNotFoundError": ("ModelNotFound", "does not exist, or this token may not see it"),
    "HFValidationError": ("ModelNotFound", "is no hub id"),
}
"""What errors of the hub's client mean: its classes differ between versions, their names do not."""

_DENIED = (401, 403)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DownloadError(Exception):
    """A model that cannot be downloaded; the reason is one word for programs."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def download(model: str, revision: str | None, cache: str) -> str:
    """Fetch what the cache lacks of a model and return the commit, or raise DownloadError."""
    where = f"{model} at revision {revision}" if revision else model
    try:
        return _download(model, revision, cache)
    except DownloadError:
        raise
    except Exception as error:
        raise _told(where, cache, error) from error


def left_out(names: list[str]) -> tuple[str, ...]:
    """Return patterns of the files that no engine reads; pickles only where there are safetensors."""
    return _NEVER + (_PICKLES if any(name.endswith(".safetensors") for name in names) else ())


def _download(model: str, revision: str | None, cache: str) -> str:
    import huggingface_hub  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415

    Path(cache).mkdir(parents=True, exist_ok=True)
    info = huggingface_hub.HfApi().model_info(model, revision=revision, files_metadata=True, timeout=30)
    sizes: dict[str, int] = {file.rfilename: file.size or 0 for file in info.siblings or []}
    ignored = left_out(list(sizes))
    wanted = set(huggingface_hub.utils.filter_repo_objects(list(sizes), ignore_patterns=list(ignored)))
    folder = Path(cache, f"models--{model.replace('/', '--')}")
    snapshot = folder / "snapshots" / info.sha
    _clear_up(folder)
    _check_space(
        cache, {name: size for name, size in sizes.items() if name in wanted and not (snapshot / name).exists()}
    )
    huggingface_hub.snapshot_download(model, revision=info.sha, cache_dir=cache, ignore_patterns=list(ignored))
    return str(info.sha)


def _clear_up(folder: Path) -> None:
    """Remove what downloads left that were killed: each has a name of its own, so that nobody goes on with it."""
    for file in folder.glob("blobs/*.incomplete"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > _CUT_OFF_S:
                file.unlink()


def _check_space(cache: str, lacking: Mapping[str, int]) -> None:
    """Say before an hour of downloading that it will not fit."""
    needed, free = sum(lacking.values()), shutil.disk_usage(cache).free
    if lacking and needed + _SPARE_BYTES > free:
        message = (
            f"{len(lacking)} files of {needed / _GIB:.1f} GiB are to be fetched, and {free / _GIB:.1f} GiB are free"
        )
        raise DownloadError("NoSpaceLeft", message)


def _told(where: str, cache: str, error: Exception) -> DownloadError:
    """Our own error for whatever went wrong."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return DownloadError("NoSpaceLeft", f"{where}: the volume is full: {error.strerror}")
    if isinstance(error, OSError) and error.errno in _NOT_WRITABLE:
        by = f"user {os.getuid()} and group {os.getgid()}"
        return DownloadError(
            "VolumeNotWritable", f"{error.filename or cache} cannot be written by {by}: {error.strerror}"
        )
    for kind in type(error).__mro__:
        if kind.__name__ in _MEANINGS:
            reason, meaning = _MEANINGS[kind.__name__]
            return DownloadError(reason, f"{where} {meaning}")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in _DENIED:
        return DownloadError("ModelGated", f"{where}: the hub answers HTTP {status}")
    reason = "HubUnreachable" if status is not None or _is_of_network(error) else "DownloadFailed"
    return DownloadError(reason, f"{where}: {type(error).__name__}: {_clipped(str(error), _LONGEST_CAUSE)}")


def _clipped(text: str, limit: int) -> str:
    """Return whole words of a text, at most ``limit`` characters of it.

    This script runs without the operator's package, so the operator masks secrets later. It recognizes only whole
    ones: a word that does not fit is left out, never cut.
    """
    if len(text) <= limit:
        return text
    return text[:limit].rpartition(" ")[0].rstrip() + "…"


def _is_of_network(error: BaseException | None) -> bool:
    """Whether a connection failed somewhere below: the client wraps it in errors of its own."""
    while error is not None:
        if isinstance(error, (ConnectionError, TimeoutError)) or type(error).__module__.partition(".")[0] in (
            "httpx", "httpcore", "requests", "urllib3", "socket",
        ):  # fmt: skip
            return True
        error = error.__cause__ or error.__context__
    return False


def _answer(body: dict[str, Any], path: str) -> None:
    Path(path).write_text(json.dumps(body), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Download the model that the arguments name and write the answer; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--revision")
    parser.add_argument("--cache", required=True)
    parser.add_argument("--message", default="/dev/termination-log")
    given = parser.parse_args(arguments)
    try:
        commit = download(given.model, given.revision, given.cache)
    except DownloadError as error:
        print(f"{error.reason}: {error.message}", file=sys.stderr)  # noqa: T201
        _answer({"error": {"reason": error.reason, "message": _clipped(error.message, MESSAGE_LIMIT)}}, given.message)
        return 1
    _answer({"commit": commit}, given.message)
    return 0


if __name__ == "__main__":
    sys.exit(main())
