"""A work queue that holds each key once and works on each key once at a time."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from specdecode_operator.api.key import Key

Work = Callable[[Key], Awaitable[None]]

_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 60.0
_MOST_DOUBLINGS = 10

_logger = logging.getLogger(__name__)


class WorkQueue:
    """Runs one coroutine a key, again after a failure, and again when the key came back meanwhile."""

    def __init__(self, workers: int = 16) -> None:
        self._workers = workers
        self._queue: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: dict[Key, float] = {}
        self._running: set[Key] = set()
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._retries: dict[Key, asyncio.TimerHandle] = {}
        self._last_done_s = time.monotonic()

    def add(self, key: Key) -> None:
        """Ask for work on a key; asking twice before it starts is asking once."""
        if key in self._running:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting[key] = time.monotonic()
            self._queue.put_nowait(key)

    def add_unless_failing(self, key: Key) -> None:
        """Ask for work on a key, but leave one that keeps failing to its own slower rhythm."""
        if key not in self._retries:
            self.add(key)

    def forget(self, key: Key) -> None:
        """Drop what is remembered of a key that is gone."""
        self._failures.pop(key, None)
        self._again.discard(key)
        self._cancel_retry(key)

    def longest_wait_s(self) -> float:
        """How long the oldest key has waited for a worker."""
        oldest = next(iter([*self._waiting.values()]), None)  # a copy, for another thread asks
        return 0.0 if oldest is None else time.monotonic() - oldest

    def idle_s(self) -> float:
        """How long no work was done."""
        return time.monotonic() - self._last_done_s

    async def run(self, work: Work) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(self._run_worker(work))

    async def _run_worker(self, work: Work) -> None:
        while True:
            key = await self._queue.get()
            del self._waiting[key]
            self._running.add(key)
            self._cancel_retry(key)
            try:
                await work(key)
            except Exception as error:  # noqa: BLE001  one object must not stop the others
                self._retry_later(key, error)
            else:
                self._failures.pop(key, None)
            finally:
                self._running.discard(key)
                self._last_done_s = time.monotonic()
            if key in self._again:
                self._again.discard(key)
                self.add(key)

    def _retry_later(self, key: Key, error: Exception) -> None:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        # The exponent is bounded too: an object may fail for days.
        delay_s = min(_FIRST_RETRY_S * 2 ** min(failures - 1, _MOST_DOUBLINGS), _LAST_RETRY_S)
        kind = type(error).__name__
        _logger.warning("%s: %s: %s; next try in %.0f s", key, kind, error, delay_s, exc_info=failures == 1)
        self._retries[key] = asyncio.get_running_loop().call_later(delay_s, self.add, key)

    def _cancel_retry(self, key: Key) -> None:
        if handle := self._retries.pop(key, None):
            handle.cancel()
