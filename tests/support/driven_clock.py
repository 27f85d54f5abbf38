"""Clocks that a test puts forward instead of waiting."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from email.utils import format_datetime

import pytest

from specdecode_operator.cluster.clock import ServerTime


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


class DrivenServerTime(ServerTime):
    """The API server's time, of an API server that answers as often as a test says."""

    def __init__(self, now: datetime) -> None:
        self._passed_s = 0.0
        self._told = now
        super().__init__(steady=lambda: self._passed_s)
        self.answer(now)

    def hear(self, date: str | None, asked_s: float) -> None:
        """Ignore answers but those of `answer`."""

    def answer(self, now: datetime) -> None:
        """Let an answer tell the time."""
        self._told = now
        super().hear(format_datetime(now, usegmt=True), self._passed_s)

    def advance(self, seconds: float) -> None:
        """Let time pass while the API server's clock runs evenly and an answer comes each minute."""
        left_s = seconds
        while left_s > 0:
            step_s = min(60.0, left_s)
            self._passed_s, left_s = self._passed_s + step_s, left_s - step_s
            self.answer(self._told + timedelta(seconds=step_s))

    def jump(self, seconds: float) -> None:
        """Set the API server's clock, and let answers tell so until they are believed."""
        self._told += timedelta(seconds=seconds)
        while abs((self.now() - self._told).total_seconds()) > 1:
            self.advance(60)
