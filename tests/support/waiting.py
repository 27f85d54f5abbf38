"""Waiting for conditions, with a deadline."""

import subprocess
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from devcluster.host.errors import ClusterError

T = TypeVar("T")

DEADLINE_S = 240
"""For all that takes no engine: a resync, garbage collection and a slow machine that does other work as well.

Only a test that fails waits so long.
"""

POLL_S = 0.1
_NOT_YET = (AssertionError, LookupError, ValueError, ClusterError, subprocess.TimeoutExpired)
"""What looking at something ends with that is not there yet, or not wholly, or twice for a moment."""


class Rounds(threading.Event):
    """An event that a loop finds set after some rounds; the loop does not wait between them."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self._left = rounds

    def wait(self, timeout: float | None = None) -> bool:
        del timeout
        self._left -= 1
        if self._left <= 0:
            self.set()
        return self.is_set()


def eventually(look: Callable[[], T | None], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Return what ``look`` finds as soon as it finds something; fail with the last sight of it."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            found = look()
        except _NOT_YET as error:
            last: object = f"{type(error).__name__}: {error}"
        else:
            if found:
                return found
            last = found
        if time.monotonic() > end:
            message = f"not within {deadline_s:.0f} s: {what} (last: {last})"
            raise AssertionError(message)
        time.sleep(POLL_S)
