"""Serve the recorders of an engine's pod: connect them to a live capture, ask canary prompts, and order draft heads.

Runs with the python3 of the engine's image, with only the standard library. The order to connect, the prompts and the
heads are files of mounted ConfigMaps. Every connection passes through small buffers, so that a slow collector slows
down the recorder.

    python3 -I recorder.zip [FILES [SOCKETS]]
"""

import asyncio
import ipaddress
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .canary import Canaries, Engine, is_number, tell_recorder
from .head_orders import HeadOrders

FILES_FOLDER = Path("/specdecode/recorder")
SOCKETS_FOLDER = Path("/specdecode/sockets")
_KEYS = {"capture", "uid", "address", "token", "until_wall_s"}
_LARGEST_ORDER_BYTES = 4096
_LONGEST_TEXT = 512
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_UID = re.compile(r"[A-Za-z0-9-]{1,64}")
_TOKEN = re.compile(r"[0-9a-f]{16,256}")
_LARGEST_PORT = 65535
_LATEST_WALL_S = 253_402_300_800  # end of the year 9999
_POLL_S = 1.0
_CONNECT_S = 10.0
_BACKOFF_S = (1.0, 2.0, 5.0)
_STABLE_S = 60.0  # a connection that lasted as long resets the backoff
_STALLED_S = 60.0  # time without progress of a write to the collector
_LAST_WORD_S = 60.0  # time for the collector to read the rest, after the recorder has closed
_BUFFER_BYTES = 64 * 2**10
_MOST_SOCKETS = 64

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class BadOrderError(ValueError):
    """The file is not a valid order."""


class CollectorDoneError(Exception):
    """The collector wants no more connections for this order."""


@dataclass(frozen=True)
class Order:
    """Order to connect to the collector of a capture."""

    capture: str
    uid: str
    host: str
    port: int
    token: str
    until_wall_s: float


def read_order(path: Path) -> Order | None:
    """Return the order in a file, or None without one; raise BadOrderError."""
    try:
        # A projected volume holds links. Does not wait for the writer of a pipe.
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadOrderError(error.strerror) from error
    try:
        text = os.read(opened, _LARGEST_ORDER_BYTES + 1)
    except OSError as error:
        raise BadOrderError(error.strerror) from error
    finally:
        os.close(opened)
    if len(text) > _LARGEST_ORDER_BYTES:
        raise BadOrderError(f"more than {_LARGEST_ORDER_BYTES} bytes")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadOrderError("invalid JSON") from error
    return _order(document)


def _order(document: Any) -> Order:
    if not isinstance(document, dict) or document.keys() != _KEYS:
        raise BadOrderError(f"expected the keys {', '.join(sorted(_KEYS))}")
    for key, pattern in (("capture", _NAME), ("uid", _UID), ("token", _TOKEN)):
        value = document[key]
        if not isinstance(value, str) or len(value) > _LONGEST_TEXT or not pattern.fullmatch(value):
            raise BadOrderError(f"{key} is invalid")
    until_wall_s = document["until_wall_s"]
    if not is_number(until_wall_s, 0, _LATEST_WALL_S):
        raise BadOrderError(f"until_wall_s is not a number from 0 to {_LATEST_WALL_S}")
    host, port = _address(document["address"])
    return Order(document["capture"], document["uid"], host, port, document["token"], float(until_wall_s))


def _address(text: Any) -> tuple[str, int]:
    if not isinstance(text, str):
        raise BadOrderError("address is not text")
    host, _, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    try:
        address = ipaddress.ip_address(host[1:-1] if is_bracketed else host)
        number = int(port) if port.isascii() and port.isdigit() else 0
    except ValueError as error:
        raise BadOrderError("address is not IP:PORT") from error
    if "%" in host or is_bracketed != (address.version == 6) or not 0 < number <= _LARGEST_PORT:  # noqa: PLR2004 (IPv6)
        raise BadOrderError("address is not IP:PORT, with brackets around IPv6")
    # No pod has such an address. A cloud's metadata service has a link-local one.
    reached = (address.version == 6 and address.ipv4_mapped) or address  # noqa: PLR2004 (as above)
    if reached.is_link_local or reached.is_multicast or reached.is_unspecified:
        raise BadOrderError("address is not that of a pod")
    return str(address), number


class Relay:
    """Connections of this pod for the current order."""

    def __init__(self, order_file: Path, sockets_folder: Path, log: Callable[[str], None]) -> None:
        self._order_file = order_file
        self._sockets_folder = sockets_folder
        self._log = log
        self._order: Order | None = None
        self._complaint: str | None = None
        self._pipes: dict[str | None, asyncio.Task[None]] = {}
        self._is_done = False
        self._unanswered = ""  # the last socket without an answer, and why

    async def run(self) -> None:
        """Follow orders until cancelled."""
        while True:
            order = self._read()
            if order != self._order:
                await self._change(order)
            if order is not None and not self._is_done:
                await self._connect_missing(order)
            await asyncio.sleep(_POLL_S)

    def _read(self) -> Order | None:
        complaint = None
        try:
            order = read_order(self._order_file)
        except BadOrderError as error:
            order, complaint = None, f"{self._order_file.name} is ignored: {error}"
        if order is not None and time.time() >= order.until_wall_s:
            complaint = f"{self._order_file.name} is ignored: capture {order.capture}: until_wall_s has passed"
            order = None
        if complaint != self._complaint:
            self._complaint = complaint
            if complaint is not None:
                self._log(complaint)
        return order

    async def _change(self, order: Order | None) -> None:
        if self._order is not None:
            self._log(f"capture {self._order.capture}: the order has ended")
        tasks = list(self._pipes.values())
        self._pipes.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._order, self._is_done = order, False
        if order is not None:
            self._log(f"capture {order.capture}: the collector is {order.host} port {order.port}")

    async def _connect_missing(self, order: Order) -> None:
        """Start a pipe for each socket without one."""
        self._pipes = {name: task for name, task in self._pipes.items() if not task.done()}
        names = sorted(path.name for path in self._sockets_folder.glob("*.sock"))[:_MOST_SOCKETS]
        opened = {}
        for name in names:
            if name not in self._pipes and (streams := await self._open_socket(name)) is not None:
                opened[name] = streams
        if opened and (without := self._pipes.pop(None, None)) is not None:
            without.cancel()
        for name, streams in opened.items():
            self._pipes[name] = asyncio.create_task(self._keep_connected(order, name, streams))
        if not self._pipes:
            note = (
                f"no recorder answers ({self._unanswered})" if names else "no process of the engine has a recorder yet"
            )
            self._pipes[None] = asyncio.create_task(self._keep_connected(order, None, None, note))

    async def _open_socket(self, name: str) -> Streams | None:
        path = str(self._sockets_folder / name)
        try:
            opening = asyncio.open_unix_connection(path, limit=_BUFFER_BYTES)
            return await asyncio.wait_for(opening, _CONNECT_S)
        except (OSError, asyncio.TimeoutError) as error:  # noqa: UP041 (they differ in Python 3.10)
            # Most often left behind by an ended process
            self._unanswered = f"{name}: {(isinstance(error, OSError) and error.strerror) or type(error).__name__}"
            return None

    async def _keep_connected(
        self, order: Order, name: str | None, streams: Streams | None, note: str | None = None
    ) -> None:
        """Connect to the collector again and again, until the recorder has ended or the collector is done."""
        failures = 0
        what = name or "no socket"
        while True:
            began_s = time.monotonic()
            try:
                await self._connect_once(order, name, streams, note)
                ended = "connection closed"
            except CollectorDoneError:
                self._is_done = True
                self._log(f"capture {order.capture}: {what}: done")
                return
            except (OSError, asyncio.TimeoutError, ValueError) as error:  # noqa: UP041 (as above)
                ended = f"connection failed: {str(error) or type(error).__name__}"
            finally:
                if streams is not None:
                    streams[1].close()
            failures = 0 if time.monotonic() - began_s >= _STABLE_S else failures
            wait_s = _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
            failures += 1
            self._log(f"capture {order.capture}: {what}: {ended}; retrying in {wait_s:.0f} s")
            await asyncio.sleep(wait_s)
            if name is not None:
                streams = await self._open_socket(name)
                if streams is None:
                    return

    async def _connect_once(self, order: Order, name: str | None, streams: Streams | None, note: str | None) -> None:
        """Say Hello, and pipe in both directions until either side closes; raise CollectorDoneError."""
        opening = asyncio.open_connection(order.host, order.port, limit=_BUFFER_BYTES)
        reader, writer = await asyncio.wait_for(opening, _CONNECT_S)
        try:
            self._log(f"capture {order.capture}: {name or 'no socket'}: connected")
            _detect_lost_peer(writer.get_extra_info("socket"))
            writer.transport.set_write_buffer_limits(high=_BUFFER_BYTES)
            writer.write(json.dumps(self._hello(order, name, note)).encode() + b"\n")
            await asyncio.wait_for(writer.drain(), _STALLED_S)
            if streams is None:
                await _pass_orders(reader, None)
            else:
                await _pipe((reader, writer), streams)
            writer.close()
            await asyncio.wait_for(writer.wait_closed(), _STALLED_S)
        except (OSError, asyncio.TimeoutError):  # noqa: UP041 (as above)
            writer.transport.abort()  # its buffered data would never be sent
            raise
        finally:
            writer.close()

    def _hello(self, order: Order, name: str | None, note: str | None) -> dict[str, Any]:
        return {
            "hello": 1,
            "token": order.token,
            "pod": os.environ.get("POD_NAME", ""),
            "pod_uid": os.environ.get("POD_UID", ""),
            "node": os.environ.get("NODE_NAME", ""),
            "socket": name,
            "sockets": sum(each is not None for each in self._pipes),
            "note": note,
        }


async def _pipe(collector: Streams, recorder: Streams) -> None:
    recorder[1].transport.set_write_buffer_limits(high=_BUFFER_BYTES)
    down = asyncio.create_task(_pass_orders(collector[0], recorder[1]))
    up = asyncio.create_task(_pass_lines(recorder[0], collector[1]))
    try:
        await asyncio.wait((down, up), return_when=asyncio.FIRST_COMPLETED)
        if up.done() and up.exception() is None:
            # The recorder has closed. The collector gets the rest, and may answer.
            await asyncio.wait((down,), timeout=_LAST_WORD_S)
        for task in (down, up):
            if task.done() and (error := task.exception()) is not None:
                raise error
    finally:
        for task in (down, up):
            task.cancel()
        await asyncio.gather(down, up, return_exceptions=True)


async def _pass_orders(reader: asyncio.StreamReader, writer: asyncio.StreamWriter | None) -> None:
    """Pass the collector's lines to the recorder; raise CollectorDoneError at its last line."""
    while line := await reader.readline():
        if _is_bye(line):
            raise CollectorDoneError
        if writer is not None and not writer.is_closing():
            writer.write(line)
            await writer.drain()


def _is_bye(line: bytes) -> bool:
    try:
        return bool(json.loads(line) == {"bye": True})
    except (ValueError, RecursionError):
        return False


async def _pass_lines(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass what the recorder writes to the collector, as fast as that reads."""
    while received := await reader.read(_BUFFER_BYTES):
        writer.write(received)
        await asyncio.wait_for(writer.drain(), _STALLED_S)
    writer.write_eof()


def _detect_lost_peer(connection: socket.socket) -> None:
    """End a connection whose other node is gone, although nothing is sent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def log(words: str) -> None:
    """Write a line to the container's log."""
    sys.stderr.write(f"recorder: {words}\n")


def serve(files: Path = FILES_FOLDER, sockets_folder: Path = SOCKETS_FOLDER) -> None:
    """Do all duties until the process ends."""
    if url := os.environ.get("SPECDECODE_ENGINE_URL"):
        engine = Engine(url, os.environ.get("VLLM_API_KEY"))
        canaries = Canaries(engine, files / "canaries.json", partial(tell_recorder, sockets_folder))
        heads = HeadOrders(engine, files / "draft.json", sockets_folder, os.environ.get("POD_NAME", ""))
        for each in (canaries, heads):
            threading.Thread(target=each.run, args=(threading.Event(),), daemon=True).start()
    asyncio.run(Relay(files / "order.json", sockets_folder, log).run())


def run() -> None:
    """Run the program."""
    # The first process of a container ignores SIGTERM without a handler.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    serve(*map(Path, sys.argv[1:3]))
