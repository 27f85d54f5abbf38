"""HTTP as uvicorn reads it, with an end to how much a request may send before it has been read."""

from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from specdecode_operator.replay.server.wire import ABANDON

_LARGEST_HEAD_BYTES: Final = 2**20
"""Of a request's line and headers, or of what stands between and after its body's chunks."""


class BoundedHttp(HttpToolsProtocol):
    """Closes a connection whose headers do not end: the parser keeps them all, and copies them at every piece."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unread_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Take what a client sent."""
        self._unread_bytes += len(data)
        before = self._unread_bytes
        super().data_received(data)
        if before > _LARGEST_HEAD_BYTES and self._unread_bytes and not self.transport.is_closing():
            self.logger.warning("A request was refused whose headers do not end.")
            self.send_400_response("The headers of the request are too large.")

    def on_headers_complete(self) -> None:
        """Take the end of headers."""
        self._unread_bytes = 0
        self.scope["extensions"] = {ABANDON: {"close": self._abandon}}
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Take the end of a request."""
        self._unread_bytes = 0
        super().on_message_complete()

    def _abandon(self, unread_bytes: int) -> None:
        self.logger.warning("A connection was closed whose client had %s bytes to read and did not.", unread_bytes)
        self.transport.abort()
