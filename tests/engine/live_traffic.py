"""Users of a tiny engine, a sidecar beside it, and the collector of a live capture."""

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from specdecode_operator.vllm.plugin_bundle import RECORDER
from tests.engine.engine_process import Engine
from tests.engine.recorder_clients import TIMEOUT_S, WORDS, prompt
from tests.engine.recorder_server import Line
from tests.support.waiting import eventually

TOKEN = "c0ffee" * 8
STOP = "3" * 40
"""An answer of token 20 alone is stopped by it."""


@dataclass
class Asked:
    """One request as its user saw it.

    Attributes
    ----------
    tokens
        Of all its answers, by the usage that the engine reports; None: the user left.
    """

    name: str
    kind: str
    began_s: float
    ended_s: float = 0.0
    status: int = 0
    tokens: int | None = None


@dataclass
class Users:
    """Threads that ask one question after the other, each its own kind."""

    url: str
    asked: list[Asked] = field(default_factory=list)
    _ends: threading.Event = field(default_factory=threading.Event)

    def _ask(self, kind: str, number: int) -> None:
        name = f"{kind}-{number}"
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": prompt(40 + number % 30, number),
            "max_tokens": 20 + 7 * (number % 9),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "allowed_token_ids": WORDS,
        }
        if kind == "stopped":
            body |= {"stop": [STOP], "allowed_token_ids": [20], "max_tokens": 400}
        elif kind == "pair":
            body |= {"prompt": [prompt(50, number), prompt(60, number)]}
        elif kind == "leaver":
            body |= {"max_tokens": 900}
        asked = Asked(name, kind, time.monotonic())
        headers = {"X-Request-Id": name}
        with (
            httpx.Client(base_url=self.url, trust_env=False, verify=False, timeout=TIMEOUT_S) as client,
            client.stream("POST", "/v1/completions", json=body, headers=headers) as response,
        ):
            asked.status = response.status_code
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                if kind == "leaver":
                    break
                if usage := json.loads(line.removeprefix("data: ")).get("usage"):
                    asked.tokens = usage["completion_tokens"]
        asked.ended_s = time.monotonic()
        self.asked.append(asked)

    def _go_on(self, kind: str) -> None:
        number = 0
        while not self._ends.is_set():
            try:
                self._ask(kind, number)
            except httpx.HTTPError:
                self.asked.append(Asked(f"{kind}-{number}", kind, 0.0))
            number += 1

    @contextmanager
    def busy(self, kinds: tuple[str, ...]) -> Iterator[None]:
        """Keep one user of each kind busy."""
        threads = [threading.Thread(target=self._go_on, args=(kind,)) for kind in kinds]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ends.set()
            for thread in threads:
                thread.join()


class Received:
    """One connection of a recorder, as the collector has it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(TIMEOUT_S)
        self._connection = connection
        self._file = connection.makefile("rb")
        self.hello: Line = json.loads(self._file.readline())
        self.lines: list[Line] = []

    def send(self, order: Line) -> None:
        self._connection.sendall(json.dumps(order).encode() + b"\n")

    def read(self, until: Callable[[list[Line]], bool] | None = None) -> list[Line]:
        """Read lines until a condition holds, or to the end; return all so far."""
        while until is None or not until(self.lines):
            line = self._file.readline()
            if not line:
                assert until is None, self.lines[-3:]
                return self.lines
            self.lines.append(json.loads(line))
        return self.lines

    def close(self) -> None:
        self._file.close()
        self._connection.close()


class Collector:
    """The collector, and the folder in which the sidecar finds its orders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.order_file = folder / "order.json"
        self.sockets = folder / "sockets"
        self.sockets.mkdir()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(TIMEOUT_S)
        self._orders = 0

    def call(self) -> None:
        """Order the sidecar to connect."""
        self._orders += 1
        order = {
            "capture": "tests/live",
            "uid": str(self._orders),
            "address": f"127.0.0.1:{self._listener.getsockname()[1]}",
            "token": TOKEN,
            "until_wall_s": time.time() + 3600,
        }
        part = self.order_file.with_suffix(".part")
        part.write_text(json.dumps(order))
        part.replace(self.order_file)

    def accept(self) -> Received:
        return Received(self._listener.accept()[0])

    def dismiss(self) -> None:
        """End the order."""
        self.order_file.unlink()

    @contextmanager
    def beside(self, engine: Engine, **env: str) -> Iterator[None]:
        """Run the sidecar with the engine's Python."""
        program = self.folder / "recorder.zip"
        program.write_bytes(RECORDER.zipped())
        command = [str(engine.python), "-I", str(program), str(self.folder), str(self.sockets)]
        log = self.folder / "sidecar.log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stderr=output, env=os.environ | {"POD_NAME": "tiny-0", **env})
        try:
            yield
            assert process.poll() is None, log.read_text()
        finally:
            process.terminate()
            process.wait()
            self._listener.close()


def wait_for_traffic(users: Users, more: int) -> None:
    """Wait until this number of further requests have ended."""
    before = len(users.asked)
    eventually(lambda: len(users.asked) >= before + more, f"{more} more requests", TIMEOUT_S)
