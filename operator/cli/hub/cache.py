"""What was read of models on the hub, kept on this machine: a file for each commit, and one for each revision's commit.

Several processes may use it at once: each file is written whole under another name, and takes its place by a rename. A
file that makes no sense is as good as none.
"""

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from specdecode_operator.resolver.answer import checkpoint_of
from specdecode_operator.resolver.read_model_facts import Checkpoint
from specdecode_operator.version import __version__

_FILE_LIMIT_BYTES: Final = 2**20


class HubCache:
    """Facts of models by hub, id and commit. A folder that cannot be used keeps nothing."""

    def __init__(self, folder: Path | None, endpoint: str) -> None:
        self._folder = folder
        self._endpoint = endpoint

    def commit(self, model: str, revision: str | None) -> str | None:
        """Return the commit that a revision had when it was last asked for."""
        found = self._read({"model": model, "revision": revision})
        return found if isinstance(found, str) else None

    def keep_commit(self, model: str, revision: str | None, commit: str) -> None:
        """Remember which commit a revision is."""
        self._write({"model": model, "revision": revision}, commit)

    def checkpoint(self, model: str, commit: str) -> Checkpoint | None:
        """Return what was read of a model at a commit."""
        try:
            return checkpoint_of(self._read({"model": model, "commit": commit}))
        except (ValueError, LookupError, TypeError, AttributeError):
            return None

    def keep_checkpoint(self, model: str, commit: str, checkpoint: Checkpoint) -> None:
        """Remember what was read of a model at a commit."""
        self._write({"model": model, "commit": commit}, asdict(checkpoint))

    def _read(self, key: dict[str, str | None]) -> Any:
        """Return the value of a key; None where there is none, or another's."""
        path = self._path(key)
        if path is None:
            return None
        try:
            with path.open("rb") as stream:
                entry = json.loads(stream.read(_FILE_LIMIT_BYTES))
            return entry["value"] if entry["key"] == self._whole(key) else None
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None

    def _write(self, key: dict[str, str | None], value: Any) -> None:
        path = self._path(key)
        if path is None:
            return
        text = json.dumps({"key": self._whole(key), "value": value})
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, part = tempfile.mkstemp(dir=path.parent, suffix=".part")
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                    stream.write(text)
                Path(part).replace(path)
            except OSError:
                Path(part).unlink(missing_ok=True)

    def _whole(self, key: dict[str, str | None]) -> dict[str, str | None]:
        # Another version may read other facts of the same files.
        return {"endpoint": self._endpoint, "version": __version__, **key}

    def _path(self, key: dict[str, str | None]) -> Path | None:
        digest = hashlib.sha256(json.dumps(self._whole(key), sort_keys=True).encode()).hexdigest()
        return None if self._folder is None else self._folder / f"{digest[:40]}.json"


def cache_folder() -> Path | None:
    """Return the folder of the cache by the XDG Base Directory Specification; None where there is no home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if given.startswith("/") else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "specdecode" / "hub"
