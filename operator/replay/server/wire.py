"""Writes an answer piece by piece from plain callbacks: no task, and no queue, for every token."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from typing import Any

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Wire:
    """The body of one HTTP response. Each write is one message, until a client reads slower than it is written to.

    ``send`` of an ASGI server is a coroutine that only waits where the connection is full. So it is begun right here,
    and goes on in a task where it waits; what is written meanwhile is kept, and follows in one piece.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        # What was written while nothing could be sent; None: it can be.
        self._kept: bytearray | None = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last = False

    async def open(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Begin the response: what was written before follows."""
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._catch_up(None)

    def write(self, data: bytes) -> None:
        """Write one message."""
        if self._kept is not None:
            self._kept += data
            return
        sending: Any = self._send({"type": "http.response.body", "body": data, "more_body": True})
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return
        except OSError:  # the client has gone, which is told elsewhere
            return
        self._kept = bytearray()
        self._task = asyncio.get_running_loop().create_task(self._catch_up(_Begun(sending, waits_for)))

    def end(self) -> None:
        """Say that this was all."""
        self._last = True
        if self._kept is None and not self._closed.done():
            self._closed.set_result(None)

    def drop(self) -> None:
        """Write nothing more: nobody reads it."""
        if not self._closed.done():
            self._closed.set_result(None)

    async def closed(self) -> None:
        """Wait until all is written, or dropped."""
        await self._closed
        if self._task is not None:
            self._task.cancel()
        if self._last:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _catch_up(self, begun: "_Begun | None") -> None:
        if begun is not None:
            await begun
        while self._kept:
            kept, self._kept = bytes(self._kept), bytearray()
            await self._send({"type": "http.response.body", "body": kept, "more_body": True})
        self._kept = None
        if self._last:
            self.end()


class _Begun:
    """A coroutine that somebody has run up to where it waits."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        yield self._waits_for
        yield from self._coroutine.__await__()
