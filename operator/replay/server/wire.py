"""Writes an answer piece by piece from plain callbacks: no task, and no queue, for every token."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from typing import Any, Final

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

ABANDON: Final = "specdecode.abandon"
"""Extension of the ASGI scope: closes the connection at once, and takes for the log how much was unread."""

_SENT_AT_ONCE_BYTES: Final = 2**16
MOST_UNREAD_BYTES: Final = 2**28


class Unread:
    """What clients of one server have not read yet: where all of it is too much, who has most to read is given up."""

    def __init__(self) -> None:
        self._bytes = 0
        self._of: dict[Wire, int] = {}

    def tell(self, wire: "Wire", unread_bytes: int) -> None:
        """Take how much one client has to read now."""
        self._bytes += unread_bytes - self._of.pop(wire, 0)
        if unread_bytes:
            self._of[wire] = unread_bytes
        while self._bytes > MOST_UNREAD_BYTES:
            max(self._of, key=self._of.__getitem__).give_up()


class Wire:
    """The body of one HTTP response. Each write is one message, until a client reads slower than it is written to.

    ``send`` of an ASGI server is a coroutine that only waits where the connection is full. So it is begun right here,
    and goes on in a task where it waits; what is written meanwhile is kept, and follows in large pieces.
    """

    def __init__(self, send: Send, unread: Unread, abandon: Callable[[int], None]) -> None:
        """Write with ``send``; ``abandon`` ends a connection whose client leaves too many bytes unread."""
        self._send = send
        self._unread = unread
        self._abandon: Callable[[int], None] | None = abandon
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
            if self._abandon is not None:
                self._kept += data
                self._unread.tell(self, len(self._kept))
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

    def give_up(self) -> None:
        """Close the connection: its client is told nothing, as it reads nothing."""
        abandon, kept = self._abandon, self._kept
        self._abandon, self._kept = None, bytearray()
        self._unread.tell(self, 0)
        if abandon is not None:
            abandon(len(kept or ()))

    async def closed(self) -> None:
        """Wait until all is written, or dropped."""
        try:
            await self._closed
        finally:
            if self._task is not None:
                self._task.cancel()
            self._abandon = None
            self._unread.tell(self, 0)
        if self._last:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _catch_up(self, begun: "_Begun | None") -> None:
        if begun is not None:
            await begun
        while self._kept:
            # Whole events, or all where one is so long.
            end = self._kept.rfind(b"\n", 0, _SENT_AT_ONCE_BYTES) + 1 or len(self._kept)
            piece = bytes(self._kept[:end])
            del self._kept[:end]
            self._unread.tell(self, len(self._kept))
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
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
