"""Stop a run early: on SIGTERM, on SIGINT, or for a reason that a task reports."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Coroutine


class Stop:
    """Request to end a run, with the first reason given. `set` runs in the event loop's thread."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def set(self, reason: str) -> None:
        """End the run for a reason."""
        if self.reason is None:
            self.reason = reason
            self._event.set()

    def set_from_thread(self, reason: str) -> None:
        """End the run from another thread."""
        self._loop.call_soon_threadsafe(self.set, reason)

    @property
    def is_set(self) -> bool:
        """Whether the run must end."""
        return self._event.is_set()

    async def wait(self) -> None:
        """Wait until the run must end."""
        await self._event.wait()

    async def sleep_until(self, when_s: float) -> bool:
        """Wait until a time of the monotonic clock or the end of the run; return whether the run continues."""
        # The event loop uses the monotonic clock, so this is exact to a millisecond.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(when_s):
                await self.wait()
        return not self.is_set


def stop_on_signals(stop: Stop) -> None:
    """End the run on SIGTERM and SIGINT."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set, f"{signal.Signals(number).name} received")


@contextlib.asynccontextmanager
async def beside(*works: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run coroutines in the background until the body ends."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
