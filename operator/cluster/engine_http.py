"""HTTP as engines are asked over it: of what comes beside a page, which costs more to read than a page, little is read.

aiohttp reads as many interim answers, and as small chunks, as a server sends, and engines run what others wrote.
"""

import asyncio
import functools
from http import HTTPStatus
from typing import Final

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawResponseMessage

MOST_FRAMING_BYTES: Final = 2**14
"""Of status lines, headers and what is around chunks: that of 2 MiB in chunks of 1 KiB. vLLM's uvicorn needs some 150
bytes. As costly to read as can be, it takes some 5 ms of CPU time."""

_PIECE_BYTES: Final = 2**12
"""After so many it is counted again: the event loop hands over up to 256 KiB."""


class FramingError(aiohttp.ClientPayloadError):
    """An answer has more beside its page than HTTP needs."""


def engine_session(most_bytes: int) -> aiohttp.ClientSession:
    """Return a session for pages of up to so many bytes: nothing is unpacked, or kept as a cookie.

    An engine is reached at its pod address: proxies of the environment do not apply. Its certificate is for the
    Service's name, by an authority that only its Secret knows, and Secrets are not read: so it is not verified.
    Nothing secret is sent, and figures of a pod are no more to be trusted than the pod.
    """
    return aiohttp.ClientSession(
        connector=_Connector(),
        headers={"Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        read_bufsize=most_bytes,  # aiohttp holds up a connection at twice as much: never, as _Answer needs it
    )


class _Connector(aiohttp.TCPConnector):
    """Connects for one question: between two looks a connection would be idle for longer than engines keep one."""

    def __init__(self) -> None:
        super().__init__(ssl=False, limit=0, force_close=True)
        # aiohttp offers no other way to see what comes. Where it does not use this, tests of endless answers fail.
        answer: type[ResponseHandler] = _Answer
        self._factory = functools.partial(answer, loop=asyncio.get_running_loop())


class _Answer(ResponseHandler):
    """What comes on one connection, counted as it is read.

    Not counted is how often little comes, which the sender's speed and the time for an answer bound. Beneath TLS
    asyncio unpacks records of whatever size.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._came_bytes = 0
        self._page: aiohttp.StreamReader | None = None

    def feed_data(self, data: tuple[RawResponseMessage, aiohttp.StreamReader], size: int = 0) -> None:
        """Take an answer whose head was read: others, of status 1xx, may come before the one that has the page."""
        message, page = data
        if self._page is None and message.code >= HTTPStatus.OK:
            self._page = page
        super().feed_data(data, size)

    def data_received(self, data: bytes) -> None:
        """Read what came, unless the question is answered meanwhile, or it is too much."""
        for start in range(0, len(data), _PIECE_BYTES):
            if self.transport is None:
                return
            piece = data[start : start + _PIECE_BYTES]
            super().data_received(piece)
            self._came_bytes += len(piece)
            page_bytes = 0 if self._page is None else self._page.total_bytes
            if self._came_bytes - page_bytes > MOST_FRAMING_BYTES:
                self._refuse()

    def _refuse(self) -> None:
        self.abort()
        error = FramingError()
        self.set_exception(error)
        if self._page is not None:
            self._page.set_exception(error)
