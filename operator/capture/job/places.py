"""Where a capture's files are on its volume."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from specdecode_operator.capture.files.formats import CLIENT, PART_SUFFIX
from specdecode_operator.capture.files.segments import FOLDER
from specdecode_operator.capture.recorder.settings import CLOSE_FILE

ARM: Final = "as-deployed"
REPETITION: Final = 1


@dataclass(frozen=True)
class Places:
    """The folders of one attempt at one repetition of one arm."""

    root: Path
    namespace: str
    capture: str
    attempt: str  # UID of the pod
    arm: str = ARM
    repetition: int = REPETITION

    @property
    def of_capture(self) -> Path:
        """What holds all arms of the capture."""
        return self.root / self.namespace / self.capture

    @property
    def final(self) -> Path:
        """Where the files appear when they are complete."""
        return self.of_capture / self.arm / str(self.repetition)

    @property
    def folder(self) -> Path:
        """Where they are until then; for ever, if the attempt fails."""
        return self.final.with_name(f"{self.repetition}{PART_SUFFIX}-{self.attempt}")

    @property
    def segments(self) -> Path:
        """Where the recorders write."""
        return self.folder / FOLDER

    @property
    def close_file(self) -> Path:
        """What orders the recorders to finish."""
        return self.segments / CLOSE_FILE

    @property
    def client_file(self) -> Path:
        """What the load generator writes."""
        return self.folder / f"{CLIENT}{PART_SUFFIX}"

    @property
    def path(self) -> str:
        """The final folder, from the volume's root."""
        return str(self.final.relative_to(self.root))
