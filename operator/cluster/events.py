"""Post Events in the background, in order, so that reconciles do not wait for them.

Like client-go's recorder, the queue drops Events when it is full; Events are best effort.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Final

from specdecode_operator.api.base import Body

_MOST: Final = 5_000
"""Maximum number of waiting Events, each up to 2 kB. 1,000 objects post 3,000 Events while they start."""

_END_S: Final = 1.0
"""Maximum time to drain the queue at shutdown. The Lease is released only afterwards."""

_logger = logging.getLogger(__name__)


class EventQueue:
    """Queue of Events to post. ``post`` sends one Event; its errors are logged."""

    def __init__(self, post: Callable[[Body], Awaitable[object]]) -> None:
        self._post = post
        self._waiting: asyncio.Queue[Body] = asyncio.Queue(_MOST)
        self._posting: asyncio.Task[None] | None = None

    def add(self, event: Body) -> None:
        """Add an Event; drop it if too many wait."""
        try:
            self._waiting.put_nowait(event)
        except asyncio.QueueFull:
            _logger.warning("%s: dropped an Event: the queue is full (%d waiting)", _about(event), _MOST)
        if self._posting is None:
            # Use an empty context; otherwise these requests would count towards the caller's reconcile.
            self._posting = asyncio.get_running_loop().create_task(self._run(), context=Context())

    async def join(self) -> None:
        """Wait until all Events are posted."""
        await self._waiting.join()

    async def close(self) -> None:
        """Drain the queue for up to 1 s, then stop."""
        if self._posting is None:
            return
        try:
            async with asyncio.timeout(_END_S):
                await self.join()
        except TimeoutError:
            _logger.warning(
                "dropped %d Events at shutdown: the API server did not respond in time", self._waiting.qsize()
            )
        self._posting.cancel()
        await asyncio.gather(self._posting, return_exceptions=True)
        self._posting = None

    async def _run(self) -> None:
        while True:
            event = await self._waiting.get()
            try:
                await self._post(event)
            except Exception as error:  # noqa: BLE001  one Event must not stop the others
                _logger.warning("%s: failed to post an Event: %s", _about(event), error)
            finally:
                self._waiting.task_done()


def _about(event: Body) -> str:
    about = event["involvedObject"]
    return f"{about['kind']} {about['namespace']}/{about['name']}"
