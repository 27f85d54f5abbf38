"""A clock that a test puts forward instead of waiting."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class DrivenClock:
    """The monotonic clock of this process, an event loop's too, and how far it was put forward."""

    def __init__(self) -> None:
        self._monotonic, self._ahead_s = time.monotonic, 0.0

    def time(self) -> float:
        return self._monotonic() + self._ahead_s

    def advance(self, seconds: float) -> None:
        """Put it forward: what is due by then is called next, after the bytes that have arrived."""
        self._ahead_s += seconds

    @staticmethod
    async def let_arrive() -> None:
        """Let the other side of a connection in this loop read what was written to it."""
        # What is ready was chosen before: the first turn finds the bytes, and the second comes after their reader.
        for _ in range(2):
            await asyncio.sleep(0)


@contextmanager
def driven_clock() -> Iterator[DrivenClock]:
    """Let a test drive the clock until the block ends."""
    clock = DrivenClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", clock.time)
        yield clock
