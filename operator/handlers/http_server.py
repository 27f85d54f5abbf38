"""HTTP server with limits on the number and duration of connections."""

import socket
from contextlib import suppress
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from threading import Lock, Thread, Timer
from typing import Any, Final, Self

TIMEOUT_S: Final = 10.0
"""Maximum duration of a connection. The API server's default timeout of webhooks is the same."""

_MOST_CONNECTIONS: Final = 32
_HEAD_BYTES: Final = 16 * 2**10
"""Maximum size of a request before its body. Python's own limit is 6 MiB, and parsing takes many times that."""


class Places:
    """Limits the number of connections. A new one replaces the oldest one without a complete request.

    Silent clients therefore cannot block other clients.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._has_asked: dict[socket.socket, bool] = {}
        self._lock = Lock()

    def take(self, connection: socket.socket) -> bool:
        """Return whether the connection gets a place; if all are taken, close a silent connection."""
        with self._lock:
            if len(self._has_asked) >= self._most:
                silent = next((each for each, has_asked in self._has_asked.items() if not has_asked), None)
                if silent is None:
                    return False
                del self._has_asked[silent]
                _hang_up(silent)
            self._has_asked[connection] = False
            return True

    def keep(self, connection: socket.socket) -> None:
        """Protect a connection with a complete request from replacement."""
        with self._lock:
            if connection in self._has_asked:
                self._has_asked[connection] = True

    def leave(self, connection: socket.socket) -> None:
        """Free the place of a connection, if it has one."""
        with self._lock:
            self._has_asked.pop(connection, None)


class BoundedHandler(BaseHTTPRequestHandler):
    """Handler of one request. Subclasses call ``keep_place`` when the request is complete."""

    server: "BoundedServer"

    def setup(self) -> None:
        """Prepare to read the request."""
        super().setup()
        self.rfile = _BoundedHead(self.rfile)

    def keep_place(self) -> None:
        """Protect the connection from replacement."""
        self.server.places.keep(self.connection)

    def log_message(self, *_: Any) -> None:
        """Log no requests."""


class _BoundedHead(BufferedIOBase):
    """Request with a limit on the total size of its head."""

    def __init__(self, request: BufferedIOBase) -> None:
        self._request, self._left_bytes = request, _HEAD_BYTES

    def readline(self, _size: int | None = -1, /) -> bytes:
        line = self._request.readline(self._left_bytes + 1)
        self._left_bytes -= len(line)
        if self._left_bytes < 0:
            raise LineTooLong("header")
        return line

    def read(self, size: int | None = -1, /) -> bytes:
        return self._request.read(size)

    def close(self) -> None:
        self._request.close()
        super().close()


class BoundedServer(ThreadingHTTPServer):
    """HTTP server with a thread for each of a bounded number of connections."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int, handler: type[BoundedHandler]) -> None:
        super().__init__(("", port), handler)
        self.places = Places(_MOST_CONNECTIONS)

    def serve(self, name: str) -> Self:
        """Answer from a thread of that name until the process ends."""
        Thread(target=self.serve_forever, name=name, daemon=True).start()
        return self

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, or close it."""
        if self.places.take(request):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection within a total timeout, even if its bytes arrive slowly."""
        request.settimeout(TIMEOUT_S)
        end = Timer(TIMEOUT_S, _hang_up, [request])
        end.start()
        try:
            super().finish_request(request, client_address)
        finally:
            end.cancel()

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, with or without an error."""
        self.places.leave(request)
        super().shutdown_request(request)

    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any) -> None:
        """Ignore clients that hang up or do not trust the certificate."""


def _hang_up(connection: socket.socket) -> None:
    """Shut down a connection, without close_notify for TLS; its thread closes it."""
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
