"""Whole loads without an engine, without a network and without waiting: what they ask of an engine, and when.

The load generator is the real one. Its clock jumps to the next thing that is due as soon as nothing is left to do, and
its connections lead to an engine in the same process, which takes a second for every answer.
"""

import asyncio
import json
import selectors
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.capture.load.datasets import BadDatasetError
from specdecode_operator.capture.load.engine_client import Exchange
from specdecode_operator.capture.load.run_settings import WARMUP_PHASE, read_settings
from specdecode_operator.capture.load.runner import run_load
from specdecode_operator.capture.load.shutdown import Stop
from tests.support.completion_server import LAST_CHUNK, OK_HEAD, chunk, token_event, usage_event

Json = dict[str, Any]
DATASETS = {
    name: "".join(
        json.dumps({field: f"{field} {number} of {name}" for field in ("prompt", "question")}) + "\n"
        for number in range(8)
    )
    for name in ("a.jsonl", "b.jsonl")
}
"""Files that a capture may take its prompts from."""

_ANSWER_S = 1.0
_HANGS = "-1"
"""How the ids of requests end that are never answered; warm-up is."""


class _Clock(selectors.DefaultSelector):
    """A clock that stands still while a loop has something to do, and then goes to what is due next."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 1000.0

    def time(self) -> float:
        return self._now_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout is not None:
            self._now_s += timeout
        return ready


class _Connection(asyncio.Transport):
    """A connection of one request to an engine that writes down what it is asked."""

    def __init__(self, exchange: Exchange, take: Callable[[Json], None]) -> None:
        super().__init__()
        self._exchange, self._take, self._is_closing = exchange, take, False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        head, _, body = bytes(data).partition(b"\r\n\r\n")
        request = json.loads(body)
        (name,) = (line.split(b": ")[1].decode() for line in head.split(b"\r\n") if line.startswith(b"X-Request-Id: "))
        self._take({"id": name, **request})
        if not name.endswith(_HANGS) or f"-{WARMUP_PHASE}-" in name:
            asyncio.get_running_loop().call_later(_ANSWER_S, self._answer, request["max_tokens"])

    def _answer(self, tokens: int) -> None:
        if not self._is_closing:
            answer = (
                chunk(token_event(list(range(tokens)))) + chunk(usage_event(1, tokens)) + chunk(b"data: [DONE]\n\n")
            )
            self._exchange.data_received(OK_HEAD + answer + LAST_CHUNK)

    def is_closing(self) -> bool:
        return self._is_closing

    def abort(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self._exchange.connection_lost, None)


class _Loop(asyncio.SelectorEventLoop):
    """A loop whose connections lead to the engine."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__(clock)
        self.requests: list[Json] = []

    async def create_connection(self, protocol_factory: Callable[[], Any], *_: Any, **__: Any) -> Any:
        protocol = protocol_factory()
        if not isinstance(protocol, Exchange):
            raise ConnectionRefusedError("only requests are answered: the engine has no other pages")
        protocol.connection_made(connection := _Connection(protocol, self._take))
        return connection, protocol

    def _take(self, request: Json) -> None:
        self.requests.append({"at_s": round(self.time(), 3), **request})


@cache
def simulated_load(settings: str) -> str:
    """Return what comes of the settings of a capture's Job: each request with its time, and each line of the client.

    Where nothing is sent, this is why.
    """
    clock = _Clock()
    loop = _Loop(clock)
    try:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", clock.time)
            return loop.run_until_complete(_load(loop, settings, Path(folder)))
    finally:
        loop.close()


async def _load(loop: _Loop, settings: str, folder: Path) -> str:
    for name, text in DATASETS.items():
        (folder / name).write_text(text)
    try:
        result = await run_load(read_settings(settings), folder, Stop(), dataset_mount=folder)
    except BadDatasetError as error:
        return str(error).replace(str(folder), "")
    # What happens at the same time happens in any order.
    asked = sorted(json.dumps(request, sort_keys=True) for request in loop.requests)
    lines = sorted(result.client_file.read_text().splitlines())
    return "\n".join([*asked, *lines])
