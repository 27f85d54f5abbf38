"""Download one model from the hub into a shared cache.

The script runs in a Job with the engine's image, so it is one file for Python
3.10 and newer that imports only the standard library and huggingface_hub. The
answer is the container's termination message::

    {"commit": "0123…"}
    {"error": {"reason": "NoSpaceLeft", "message": "..."}}

The cache has the layout of huggingface_hub: files are stored by content, moved
into place when complete, and locked during the download (file_download.py). So
downloads can run in parallel and skip files that exist.
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
"""Space for folders, locks and links."""

_CUT_OFF_S = 1800.0
"""Age of the last write after which an incomplete file counts as abandoned."""

_NEVER = ("original/*", "metal/*", "onnx/*", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.tflite", "*.ot")
"""Copies of the weights for other engines; ``original`` of a Llama doubles the download."""

_PICKLES = ("*.bin", "*.pt", "*.pth")
_MEANINGS = {
    "GatedRepoError": ("ModelGated", "is gated; access needs a token of an account that accepted its license"),
    "RevisionNotFoundError": ("RevisionNotFound", "has no such revision"),
    "RepositoryNotFoundError": ("ModelNotFound", "does not exist, or is private and this token has no access"),
    "HFValidationError": ("ModelNotFound", "is not a valid hub ID"),
}
"""Reasons by name of the hub client's error; the names are the same in all versions, the classes are not."""

_DENIED = (401, 403)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DownloadError(Exception):
    """A model cannot be downloaded; `reason` is a CamelCase word for programs."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def download(model: str, revision: str | None, cache: str) -> str:
    """Download the missing files of a model and return its commit. Raises DownloadError."""
    where = f"{model} at revision {revision}" if revision else model
    try:
        return _download(model, revision, cache)
    except DownloadError:
        raise
    except Exception as error:
        raise _told(where, cache, error) from error


def left_out(names: list[str]) -> tuple[str, ...]:
    """Return patterns of files to skip: formats of other engines, and pickles if there are safetensors files."""
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
    """Remove incomplete files of killed downloads; each has a unique name, so no download resumes them."""
    for file in folder.glob("blobs/*.incomplete"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > _CUT_OFF_S:
                file.unlink()


def _check_space(cache: str, lacking: Mapping[str, int]) -> None:
    """Fail before the download starts if its files do not fit."""
    needed, free = sum(lacking.values()), shutil.disk_usage(cache).free
    if lacking and needed + _SPARE_BYTES > free:
        message = f"{len(lacking)} files need {needed / _GIB:.1f} GiB, but only {free / _GIB:.1f} GiB are free"
        raise DownloadError("NoSpaceLeft", message)


def _told(where: str, cache: str, error: Exception) -> DownloadError:
    """Return the DownloadError for any error."""
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
    """Shorten a text to whole words, at most ``limit`` characters.

    The operator masks secrets when it reads the answer, and recognizes only complete ones, so words are never cut.
    """
    if len(text) <= limit:
        return text
    return text[:limit].rpartition(" ")[0].rstrip() + "…"


def _is_of_network(error: BaseException | None) -> bool:
    """Whether a connection error is in the chain of causes; the hub client wraps such errors."""
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
    """Download a model and write the answer; return the exit code."""
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
