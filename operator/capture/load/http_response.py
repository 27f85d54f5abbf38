"""One HTTP/1.1 response, fed with bytes as they come: h11 reads it."""

from contextlib import suppress
from typing import Final

import h11

LONGEST_HEAD_BYTES: Final = 64 * 1024
"""Of the head, and of the line before a chunk: an answer that is longer is none."""

_MOST_INFORMATIONAL: Final = 16
"""Responses like ``100 Continue`` before the response itself; an engine sends one at most."""

# What a response may be depends on what was asked. The requests themselves are made before their time (`EngineClient`).
_ASKED: Final = h11.Request(
    method="POST", target="/", headers=[("Host", "engine"), ("Content-Length", "0"), ("Connection", "close")]
)


class HttpResponse:
    """Hands out the status of a response and the bytes of its body, as soon as they are there."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.complete = False  # the body's end was seen
        self._informational = 0
        self._connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=LONGEST_HEAD_BYTES)
        self._connection.send(_ASKED)
        self._connection.send(h11.EndOfMessage())

    def feed(self, data: bytes) -> bytes:
        """Return the bytes of the body in what arrived.

        Raises
        ------
        h11.RemoteProtocolError
            It is not HTTP, or never comes to the response itself.
        """
        if data:  # nothing would be the end of the connection
            self._connection.receive_data(data)
        return self._body()

    def end_of_connection(self) -> None:
        """Note that nothing more comes: the end of a body without a length, and of no other."""
        with suppress(h11.RemoteProtocolError):
            self._connection.receive_data(b"")
            self._body()

    def _body(self) -> bytes:
        body = []
        while not self.complete and (event := self._connection.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Data):
                body.append(event.data)
            elif isinstance(event, h11.InformationalResponse):
                self._informational += 1
                if self._informational > _MOST_INFORMATIONAL:
                    raise h11.RemoteProtocolError("too many informational responses")
            elif isinstance(event, h11.Response):
                self.status = event.status_code
            elif isinstance(event, h11.EndOfMessage):
                self.complete = True
        return b"".join(body)
