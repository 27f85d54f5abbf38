"""What the real vLLM does with settings that our rules refuse, instead of starting as told."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refused:
    """Parser or configuration end with these words."""

    words: str


@dataclass(frozen=True)
class Later:
    """The configuration stands, and a check of engine_later.py ends with these words."""

    check: str
    words: str


@dataclass(frozen=True)
class Changed:
    """It starts, but not as told: a key of its configuration says something else."""

    key: str
    becomes: Any


@dataclass(frozen=True)
class Ours:
    """It starts as told, and the rule is ours: for what vLLM does then, and where that is written, or for our sake."""

    reason: str


Verdict = Refused | Later | Changed | Ours
"""What the real vLLM does with a line that our rules would never have rendered."""
