"""What one look at an object waited for: the API server, and engines."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Wait:
    """Questions to one side, and the time in which at least one was open: some are asked side by side."""

    questions: int = 0
    seconds: float = 0.0
    _open: int = 0
    _since_s: float = 0.0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Take the block for a question."""
        if not self._open:
            self._since_s = time.perf_counter()
        self.questions, self._open = self.questions + 1, self._open + 1
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self.seconds += time.perf_counter() - self._since_s


@dataclass(frozen=True)
class Waits:
    """What a look waits for, and what its tasks do for it."""

    api_server: Wait = field(default_factory=Wait)
    engines: Wait = field(default_factory=Wait)


_current: ContextVar[Waits] = ContextVar("waits")
"""Of the look that the task works for."""

_OF_NO_LOOK = Waits()


@contextmanager
def counted() -> Iterator[Waits]:
    """Count what the block and the tasks that it starts wait for."""
    waits = Waits()
    token = _current.set(waits)
    try:
        yield waits
    finally:
        _current.reset(token)


def for_api_server() -> AbstractContextManager[None]:
    """Return what to put around one question to the API server."""
    return _current.get(_OF_NO_LOOK).api_server.one()


def for_engines() -> AbstractContextManager[None]:
    """Return what to put around the questions to the engines of an object."""
    return _current.get(_OF_NO_LOOK).engines.one()
