"""Serves /metrics and /version for all simulated engines of a cluster, in one process.

    python -m bench.operator.engines PORT

Runs in the cluster's network namespace, where a local route covers the addresses of all simulated pods. The page has
all metrics of vLLM and never changes, like that of engines under constant load.
"""

import asyncio
import json
import signal
import sys
from dataclasses import dataclass
from typing import Any, Final, cast

from specdecode_operator.replay.server.served_answers import Exposition, Meter

ACCEPTED: Final = [200, 300, 200, 200, 100]
"""Number of drafts of up to four tokens, by number of accepted tokens."""

_BLOCKS: Final = "28400"


@dataclass(frozen=True)
class _EvenLoad:
    """Constant load of an engine."""

    running: int = 8
    waiting: int = 0
    kv_cache_usage: float = 0.2
    prefix_cache_queries: int = 1000
    prefix_cache_hits: int = 500
    preemptions: int = 0

    def load(self) -> "_EvenLoad":
        """Return the load."""
        return self

    def now_ms(self) -> float:
        """Return a constant time."""
        return 0.0


def page() -> bytes:
    """Return the metrics page of every engine: about 20 kB, with all histograms of vLLM."""
    still = cast("Any", _EvenLoad())
    meter = Meter(still, len(ACCEPTED) - 1)
    meter.drafts_by_accepted = ACCEPTED
    meter.draft_tokens = sum(ACCEPTED) * (len(ACCEPTED) - 1)
    meter.generation_tokens = sum(ACCEPTED) + sum(place * drafts for place, drafts in enumerate(ACCEPTED))
    labels = {"block_size": "16", "num_gpu_blocks": _BLOCKS}
    return Exposition(meter, still, "meta-llama/Llama-3.1-8B-Instruct", 1.0, labels).text()


class _Connection(asyncio.Protocol):
    """Connection of one client. Requests have no body."""

    answers: dict[bytes, bytes]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)
        self._received = b""

    def data_received(self, data: bytes) -> None:
        """Answer each complete request."""
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head, self._received = self._received[:end], self._received[end + 4 :]
            path = head.split(b" ", 2)[1]
            self._transport.write(self.answers.get(path, _answer(b"404 Not Found", b"text/plain", b"")))


def _answer(status: bytes, kind: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (status, kind, len(body))
    return head + body


async def serve(port: int) -> None:
    """Serve until SIGTERM."""
    version = json.dumps({"version": "0.33.0"}).encode()
    _Connection.answers = {
        b"/metrics": _answer(b"200 OK", b"text/plain; version=0.0.4", page()),
        b"/version": _answer(b"200 OK", b"application/json", version),
    }
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    server = await asyncio.get_running_loop().create_server(_Connection, "0.0.0.0", port, backlog=1024)  # noqa: S104
    async with server:
        await ended.wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
