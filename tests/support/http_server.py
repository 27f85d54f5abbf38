"""HTTP servers on the loopback that live as long as a test needs them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer
from typing import TypeVar

_POLL_S = 0.02
"""How soon a server sees that it is to end."""

Server = TypeVar("Server", bound=HTTPServer)


class Quiet:
    """For handlers that write no log."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Let a server answer in a thread of its own for the length of the block."""
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
