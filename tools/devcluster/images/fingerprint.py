"""When an image or an environment has to be made again: when one of its inputs changed."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path


def fingerprint(root: Path, inputs: Iterable[str], *also: str) -> str:
    """Return a short hash over the files (or all files of the folders) `inputs` and the texts `also`.

    Compiled Python files do not count. The mode does: an entry point has to stay executable.
    """
    digest = hashlib.sha256()
    for file in sorted(_files(root, inputs)):
        content = file.read_bytes()
        executable = file.stat().st_mode & 0o100
        digest.update(f"{file.relative_to(root)} {executable} {len(content)}\n".encode())
        digest.update(content)
    digest.update(repr(also).encode())
    return digest.hexdigest()[:12]


def forget_others(current: Path, pattern: str) -> None:
    """Delete the siblings of `current` that match `pattern`: archives of what was built before."""
    for archive in current.parent.glob(pattern):
        if archive != current:
            archive.unlink(missing_ok=True)


def _files(root: Path, inputs: Iterable[str]) -> Sequence[Path]:
    paths = [root / name for name in inputs]
    folders = [path for path in paths if path.is_dir()]
    found = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    files = [path for path in paths if not path.is_dir()]
    return [*files, *(file for file in found if "__pycache__" not in file.parts)]
