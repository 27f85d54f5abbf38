"""A work queue that holds each key once and works on each key once at a time."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from specdecode_operator.cluster.cache import Key

Work = Callable[[Key], Awaitable[None]]

_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 60.0

_logger = logging.getLogger(__name__)


class WorkQueue:
    """Runs one coroutine a key, again after a failure, and again when the key came back meanwhile."""

    def __init__(self, workers: int = 8) -> None:
        self._workers = workers
        self._queue: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: set[Key] = set()
        self._running: set[Key] = set()
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}

    def add(self, key: Key) -> None:
        """Ask for work on a key; asking twice before it starts is asking once."""
        if key in self._running:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._queue.put_nowait(key)

    def forget(self, key: Key) -> None:
        """Drop what is remembered of a key that is gone."""
        self._failures.pop(key, None)
        self._again.discard(key)

    async def run(self, work: Work) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(self._run_worker(work))

    async def _run_worker(self, work: Work) -> None:
        while True:
            key = await self._queue.get()
            self._waiting.discard(key)
            self._running.add(key)
            try:
                await work(key)
            except Exception as error:  # noqa: BLE001  one object must not stop the others
                self._retry_later(key, error)
            else:
                self._failures.pop(key, None)
            finally:
                self._running.discard(key)
            if key in self._again:
                self._again.discard(key)
                self.add(key)

    def _retry_later(self, key: Key, error: Exception) -> None:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay_s = min(_FIRST_RETRY_S * 2 ** (failures - 1), _LAST_RETRY_S)
        kind = type(error).__name__
        _logger.warning("%s: %s: %s; next try in %.0f s", key, kind, error, delay_s, exc_info=failures == 1)
        asyncio.get_running_loop().call_later(delay_s, self.add, key)
