"""The folder on this machine that gets a capture's files, and what else may be in it: nothing."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from specdecode_operator.documents.json_text import parse_json
from specdecode_operator.problems import printable

MANIFEST: Final = "manifest.json"
PARTIAL_SUFFIX: Final = ".fetching"
BEGUN: Final = f"{MANIFEST}{PARTIAL_SUFFIX}"
"""The manifest of files that are on their way: whose they are is known before the first of them comes."""

_SHOWN: Final = 3
_BLOCK_BYTES: Final = 1 << 20


class FetchError(Exception):
    """The files could not be had, in one line that says what to do."""


@dataclass(frozen=True)
class RemoteFile:
    """One file on the volume, and what its copy must be like."""

    name: str
    bytes: int
    sha256: str


def refuse_others(out: Path, capture: str, manifest: bytes, files: Sequence[RemoteFile]) -> None:
    """Make sure that a folder holds nothing but files of the capture with this manifest.

    Raises
    ------
    FetchError
        When it does: replacing them would lose them, and leaving them would make them pass for the capture's.
    """
    if not _is_folder(out):
        return
    begun = [path for name in (MANIFEST, BEGUN) if (path := out / name).is_file()]
    if any(path.read_bytes() != manifest for path in begun):
        raise _holds_others(out, capture)
    known = {MANIFEST, BEGUN} if begun else set()
    for file in files:
        if begun:
            known |= {file.name, f"{file.name}{PARTIAL_SUFFIX}"}
        elif is_right(out / file.name, file):
            known.add(file.name)
    _refuse(out, capture, [path.name for path in _entries(out) if path.name not in known or not _is_plain(path)])


def refuse_strangers(out: Path, capture: str, known: Collection[str]) -> None:
    """Make sure that the folder of several arms holds nothing but theirs, by their names.

    Raises
    ------
    FetchError
        When it does.
    """
    if _is_folder(out):
        _refuse(out, capture, [path.name for path in _entries(out) if path.name not in known or path.is_symlink()])


def _refuse(out: Path, capture: str, strangers: Sequence[str]) -> None:
    if strangers:
        shown = ", ".join(printable(name) for name in strangers[:_SHOWN])
        more = f" and {len(strangers) - _SHOWN} more" if len(strangers) > _SHOWN else ""
        raise FetchError(
            f"{out}: holds {shown}{more}, which capture {capture} has not: name another folder, or move it away"
        )


def refuse_earlier(out: Path, capture: str, uid: str | None) -> None:
    """Make sure, before a load is sent, that a folder can take the files of a capture; its UID is None before it is.

    Raises
    ------
    FetchError
        When it holds those of another one.
    """
    if not _is_folder(out):
        return
    if uid is None and _entries(out):
        raise FetchError(f"{out}: holds files already: name another folder for those of capture {capture} (--out)")
    held = _held(out).get("capture_uid")
    if held is not None and held != uid:
        raise _holds_others(out, capture)


def is_right(path: Path, file: RemoteFile) -> bool:
    """Whether a file is here as the manifest says."""
    if not _is_plain(path) or path.stat().st_size != file.bytes:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as content:
        while block := content.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest() == file.sha256


def _is_folder(out: Path) -> bool:
    """Whether there is something to look into."""
    if not out.exists():
        return False
    if not out.is_dir():
        raise FetchError(f"{out}: is no folder: name another")
    return True


def _is_plain(path: Path) -> bool:
    """Whether a path is a file itself: what is written through a link lands somewhere else."""
    return path.is_file() and not path.is_symlink()


def _entries(out: Path) -> list[Path]:
    return sorted(out.iterdir())


def _holds_others(out: Path, capture: str) -> FetchError:
    held = _held(out)
    name = f"{printable(str(held.get('namespace')))}/{printable(str(held['capture']))}" if held.get("capture") else ""
    whose = f"capture {name}, recorded at another time," if name.endswith(f"/{capture}") else f"capture {name}"
    return FetchError(
        f"{out}: holds files of {whose if name else 'something else'}: name another folder for those of capture"
        f" {capture}, or move these away"
    )


def _held(out: Path) -> dict[str, Any]:
    """Return the manifest in a folder; empty where it has none that can be read."""
    of_arms = sorted(path for name in (MANIFEST, BEGUN) for path in out.glob(f"*/*/{name}"))
    for path in (out / MANIFEST, out / BEGUN, *of_arms[:1]):
        try:
            found = parse_json(path.read_bytes())
        except (OSError, ValueError):
            continue
        return found if isinstance(found, dict) else {}
    return {}
