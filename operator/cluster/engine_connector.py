"""Connections to engines, which say little beside what they are asked for.

aiohttp reads as many interim answers, and as small chunks, as a server sends: a page of 2 MiB of them takes a second of
CPU time each, and engines run what others wrote.
"""

import asyncio
from functools import partial
from typing import Any, Final

import aiohttp
from aiohttp.client_proto import ResponseHandler

MOST_FRAMING_BYTES: Final = 2**15
"""Of one answer, all that is not its body: head, interim answers, sizes of chunks. A head has some 200, and a page of
2 MiB in chunks of 1 KiB has 16,000."""

_PIECE_BYTES: Final = 2**12
"""After so many it is looked at how many there were: up to 256 KiB come at once."""


class FramingError(aiohttp.ClientError):
    """An answer has more beside its body than any server needs."""


class EngineConnector(aiohttp.TCPConnector):
    """Makes connections of one answer each."""

    def __init__(self, **settings: Any) -> None:
        # Between two looks a connection would be idle for longer than engines keep one.
        super().__init__(force_close=True, **settings)
        # aiohttp has no setting for it. What holds an answer within bounds is tested against servers that exceed them.
        self._factory = partial(_one_answer, asyncio.get_running_loop())


def _one_answer(loop: asyncio.AbstractEventLoop) -> ResponseHandler:
    return _OneAnswer(loop)


class _OneAnswer(ResponseHandler):
    """Reads one answer of an engine, and ends the connection when its framing is too much.

    The buffer of its body must be larger than any body: of what the parser holds back, nobody knows what it is.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._received_bytes = 0

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            self._received_bytes += len(piece)
            super().data_received(piece)
            body_bytes = 0 if self._payload is None else self._payload.total_bytes
            if self._received_bytes - body_bytes > MOST_FRAMING_BYTES:
                self._refuse()
                return

    def _refuse(self) -> None:
        """End the connection, and tell who waits for the answer or for its body why."""
        error, payload = FramingError(), self._payload
        self.set_exception(error)
        if payload is not None:
            payload.set_exception(error)
            self._payload = None  # or the end of the connection would be told in its place
        if self.transport is not None:
            self.transport.abort()
