"""Leaving the interpreter to the event loop."""

import time

_WORK_S = 0.0001
_PAUSE_S = 0.0001


class Pace:
    """Makes a busy thread step aside after every tenth of a millisecond.

    A thread that computes keeps the interpreter's lock for 5 ms at a time, and a message of the engine
    would wait that long. With this it waits 0.1 ms.
    """

    def __init__(self) -> None:
        self.is_relaxed = True
        """Whether there is anything to step aside for; at the end there is not."""
        self._since_s = time.perf_counter()

    def pause(self) -> None:
        """Sleep, if there has been work for long enough."""
        if self.is_relaxed and time.perf_counter() - self._since_s > _WORK_S:
            time.sleep(_PAUSE_S)
            self._since_s = time.perf_counter()

    def begin(self) -> None:
        """Count from now, after a longer rest."""
        self._since_s = time.perf_counter()
