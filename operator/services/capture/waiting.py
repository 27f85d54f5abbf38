"""Why a capture does not start."""

from dataclasses import dataclass


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
