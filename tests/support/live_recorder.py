"""A live recorder around stand-ins of vLLM's classes, and the collector's end of its socket."""

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from specdecode_operator.capture.recorder.live import STALLED_S, LiveRecorder, Parts
from specdecode_operator.capture.recorder.method_hooks import Hooks
from specdecode_operator.capture.recorder.segment_format import Header, LiveSettings, SegmentLine
from tests.support.engine_standins import ApiServer, OlderOutputProcessor, OutputProcessor, engine_classes

SALT = "5a" * 32
ARM = {"salt": SALT, "sample_percent": 100, "token_ids": False, "prompt_token_ids": False, "steps": True}
_LINE = msgspec.json.Decoder(SegmentLine)


def arm(**changes: Any) -> dict[str, Any]:
    """Return an order to record."""
    return {"arm": {**ARM, **changes}}


def disarm(drain_s: float = 60.0) -> dict[str, Any]:
    """Return an order to stop."""
    return {"disarm": {"drain_s": drain_s}}


class Armed:
    """One connection to a recorder, as the sidecar makes it."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(240)
        self.socket.connect(str(path))
        self._received = b""

    def order(self, document: Any) -> None:
        """Send one line."""
        text = document if isinstance(document, bytes) else json.dumps(document).encode() + b"\n"
        self.socket.sendall(text)

    async def line(self) -> Any:
        """Return the next line, or None at the end; the event loop, which is the engine's, goes on meanwhile."""
        return await asyncio.to_thread(self._line)

    async def rest(self) -> list[Any]:
        """Return all lines up to the end."""
        lines = []
        while (line := await self.line()) is not None:
            lines.append(line)
        return lines

    def _line(self) -> Any:
        while b"\n" not in self._received:
            try:
                received = self.socket.recv(65536)
            except ConnectionResetError:
                received = b""
            if not received:
                assert not self._received, "the last line is not whole"
                return None
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return _LINE.decode(line)

    def close(self) -> None:
        """Cut the connection."""
        self.socket.close()


@dataclass
class LiveEngine:
    """An API server whose recorder waits for a live capture."""

    recorder: LiveRecorder
    server: ApiServer
    hooks: Hooks
    path: Path

    def connect(self) -> Armed:
        """Return a connection that is not armed."""
        return Armed(self.path)

    async def arm(self, **changes: Any) -> tuple[Armed, list[Any]]:
        """Return an armed connection, and its first two lines."""
        armed = self.connect()
        armed.order(arm(**changes))
        return armed, [await armed.line(), await armed.line()]

    @property
    def is_asleep(self) -> bool:
        """Whether the hooks pass nothing on, and another connection may be armed."""
        return self.hooks.switch.collector is None and not self.recorder.armed.locked()


@contextmanager
def live_engine(
    folder: Path,
    header: Header,
    allowed: str = "",
    processor: type[OlderOutputProcessor] = OutputProcessor,
    stalled_s: float = STALLED_S,
) -> Iterator[LiveEngine]:
    """Start a recorder that sleeps; end it afterwards."""
    classes = engine_classes(processor)
    hooks = Hooks(classes)
    hooks.install()
    server = ApiServer(classes)
    settings = LiveSettings.from_environment({"SPECDECODE_LIVE_DIR": str(folder), "SPECDECODE_LIVE_TOKEN_IDS": allowed})
    assert settings is not None

    def of_capture(boot: str, chosen: Any) -> Header:
        return msgspec.structs.replace(header, boot=boot, token_ids=chosen.token_ids, steps=chosen.steps)

    parts = Parts(hooks.switch, "", of_capture, lambda: dict(server.counters))
    recorder = LiveRecorder(settings, parts, stalled_s)
    recorder.start()
    try:
        yield LiveEngine(recorder, server, hooks, folder / f"{os.getpid()}.sock")
    finally:
        recorder.end()
        recorder.join()
