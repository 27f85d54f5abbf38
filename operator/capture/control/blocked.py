"""Why a capture does not start."""

from dataclasses import dataclass
from typing import Final

QUEUED: Final = "Queued"
"""Reason of a capture whose Job waits in a queue, which may take for ever."""


@dataclass(frozen=True)
class Hold:
    """What keeps a capture from starting.

    Attributes
    ----------
    reason
        Word for programs.
    message
        What is wrong, and what to do.
    permanent
        True where only a person can help; otherwise it may pass.
    """

    reason: str
    message: str
    permanent: bool = False
