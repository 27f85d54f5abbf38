"""Settings, folders and failures of the steps in the trainer's image."""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

SETTINGS_VARIABLE = "SPECDECODE_TRAINING"
STEPS = ("hidden-states", "train")
FEWEST_LAYERS = 4  # Minimum for a target: three distinct layers and the last one
_DISK_FULL = {errno.ENOSPC: "is full", errno.EDQUOT: "is over its quota"}


class StepError(Exception):
    """A step failed; ``reason`` is a CamelCase word for programs."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True)
class Settings:
    """Settings of one training, from the operator."""

    root: str  # Mount path of the claim
    folder: str  # Folder of the training, relative to the root
    uid: str  # UID of the SpecDecodeTraining
    method: str
    seed: int
    epochs: int
    learning_rate: str | None
    sequence_length: int
    args: list[str]  # Further arguments of the trainer
    gpus: int  # 0: CPU
    target: str  # Path of the target
    target_layers: int
    hidden_size: int
    command: list[str]  # Command of the engine without speculation
    start_seconds: int  # Time limit for the engine's start
    head: str | None = None  # Path of the head to continue from

    @property
    def places(self) -> "Places":
        """Return the folders of the training."""
        return Places(Path(self.root) / self.folder, self.uid)


@dataclass(frozen=True)
class Places:
    """Folders of one training on its claim."""

    folder: Path
    uid: str

    @property
    def rows(self) -> Path:
        """Folder of the exported rows."""
        return self.folder / "rows"

    @property
    def hidden_states(self) -> Path:
        """Folder of files that are deleted when the head is published: hidden states, their input and logs."""
        return self.folder / "hidden-states"

    @property
    def dataset(self) -> Path:
        """Folder of the dataset that the trainer reads."""
        return self.hidden_states / "dataset"

    @property
    def states(self) -> Path:
        """Folder of the hidden states, one file per row."""
        return self.dataset / "hidden_states"

    @property
    def complete(self) -> Path:
        """File that is written when all hidden states exist."""
        return self.hidden_states / "complete.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints of this training."""
        return self.folder / "checkpoints" / self.uid

    @property
    def logs(self) -> Path:
        """Folder of the output of programs, which may quote rows."""
        return self.hidden_states / "logs"


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Parse the settings in the container's variable."""
    given = json.loads(environment[SETTINGS_VARIABLE])
    return Settings(**{field.name: given[field.name] for field in fields(Settings) if field.name in given})


@contextmanager
def volume_errors(root: str) -> Iterator[None]:
    """Convert an OSError of a full volume to a StepError."""
    try:
        yield
    except OSError as error:
        what = _DISK_FULL.get(error.errno or 0)
        if what is None:
            raise
        raise disk_full(root, what) from error


def disk_full(root: str, what: str = "is full") -> StepError:
    """Return the failure of a step on a full claim."""
    return StepError("DiskFull", f"the volume at {root} {what}: free some space, or use a larger volume")


def open_private(path: Path, mode: str = "w") -> Any:
    """Open a file that only its owner can read."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if "a" in mode else os.O_TRUNC)
    binary = "b" in mode
    return os.fdopen(os.open(path, flags | os.O_NOFOLLOW, 0o600), mode, encoding=None if binary else "utf-8")
