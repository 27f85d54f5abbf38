"""What the recorder is told, through the environment of the engine."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER_VARIABLE = "SPECDECODE_RECORD_DIR"
TOKEN_IDS_VARIABLE = "SPECDECODE_RECORD_TOKEN_IDS"  # noqa: S105 (no password)
STEPS_VARIABLE = "SPECDECODE_RECORD_STEPS"

CLOSE_FILE = "close"
"""Made beside the segments by the load generator: the order to finish."""


@dataclass(frozen=True)
class Settings:
    """Where to record, and what apart from the requests."""

    folder: Path  # takes one segment of every API server of the engine
    token_ids: bool = False  # whether what was generated is recorded too. Prompts never are
    steps: bool = True

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Settings | None":
        """Return what the variables say, or None where nothing is to be recorded."""
        folder = environment.get(FOLDER_VARIABLE)
        if not folder:
            return None
        return cls(
            folder=Path(folder),
            token_ids=environment.get(TOKEN_IDS_VARIABLE, "0") == "1",
            steps=environment.get(STEPS_VARIABLE, "1") != "0",
        )
