"""Record the traffic of users on request: a socket per API server, through which a live capture wakes the hooks.

The connection is the lease: when it ends, the recorder forgets everything and sleeps again. While it sleeps, its only
thread waits for a connection.
"""

import atexit
import logging
import os
import secrets
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from .canary_metrics import publish
from .collector import BoundedQueue
from .head_update import VERDICT_TIMEOUT_S, Head, HeadUpdater, Judged
from .live_collector import LiveCollector
from .method_hooks import Switch
from .salting import Salt
from .segment_format import (
    EXIT,
    ORDERED,
    SALTED_BLAKE2B,
    Header,
    LiveSettings,
    Refused,
    Settings,
    encode,
)
from .writer import LiveLines, SegmentWriteError, Writer, whole_lines

logger = logging.getLogger("vllm.specdecode_recorder")

QUEUE_BYTES = 32 * 2**20
TURN_EVERY_S = 0.05
STALLED_S = 30.0  # time without progress of a write, after which the recording ends
EXIT_TIMEOUT_S = 10.0
LONGEST_ORDER_BYTES = 64 * 2**10
LONGEST_DRAIN_S = 24 * 3600.0
SMALLEST_BLOCK_SIZE = 16
_MOST_CONNECTIONS = 4
_BACKLOG = 8
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: unix(7) SO_PEERCRED
_TIMEVAL = struct.Struct("@ll")


class Arm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Order to start recording."""

    salt: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    sample_percent: Annotated[int, msgspec.Meta(ge=1, le=100)]
    token_ids: bool
    prompt_token_ids: bool
    steps: bool


class Disarm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Order to stop recording."""

    drain_s: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_DRAIN_S)]  # time for recorded requests to end


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the collector or of the sidecar."""

    arm: Arm | None = None
    disarm: Disarm | None = None
    canary: Any = None  # verdict of the sidecar, as `publish` takes it
    head: Head | None = None
    judged: Judged | None = None


_ORDER = msgspec.json.Decoder(Order)


class Refusal(Exception):  # noqa: N818 (an answer, no error of this program)
    """The recorder does not follow an order; the message is the reason."""


class ConnectionEnded(Exception):  # noqa: N818 (the usual end)
    """The other side is gone."""


class Orders:
    """Orders that arrive through a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def next(self, timeout_s: float | None) -> Order | None:
        """Return the next order, or None if none comes in time; raise Refusal or ConnectionEnded."""
        while b"\n" not in self._buffer:
            if len(self._buffer) > LONGEST_ORDER_BYTES:
                raise Refusal(f"an order is longer than {LONGEST_ORDER_BYTES} bytes")
            if not self._poll.poll(None if timeout_s is None else timeout_s * 1000):
                return None
            try:
                received = self._connection.recv(LONGEST_ORDER_BYTES)
            except OSError as error:
                raise ConnectionEnded from error
            if not received:
                raise ConnectionEnded
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            order = _ORDER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refusal(f"invalid order: {error}") from error
        fields = Order.__struct_fields__
        if [getattr(order, each) for each in fields].count(None) != len(fields) - 1:
            raise Refusal(f"invalid order: expected one of {', '.join(fields)}")
        return order


class SocketSink:
    """Sends lines through a connection. It blocks, and fails after STALLED_S without progress."""

    def __init__(self, connection: socket.socket, stalled_s: float) -> None:
        self._connection = connection
        self._failure: str | None = None
        seconds, rest = divmod(round(stalled_s * 1e6), 10**6)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(seconds, rest))

    def append(self, lines: Sequence[bytes]) -> None:
        """Send lines."""
        if self._failure is not None:  # at once, instead of another wait
            raise SegmentWriteError(OSError(self._failure))
        left = memoryview(b"".join(lines))
        total = len(left)
        try:
            while left:
                left = left[self._connection.send(left) :]
        except OSError as error:
            self._failure = str(error)
            written, _ = whole_lines(lines, total - len(left))
            raise SegmentWriteError(error, written) from error

    def sync(self) -> None:
        """Do nothing; there is no disk."""

    def close(self, last_lines: Sequence[bytes]) -> None:
        """Send the last lines."""
        self.append(last_lines)


@dataclass(frozen=True)
class Parts:
    """Parts of the engine's process that a live recorder uses."""

    switch: Switch | None  # None if this engine is not supported
    problem: str  # why not
    header: Callable[[str, Settings], Header]  # of a boot id and settings
    read_counters: Callable[[], dict[str, float]]
    heads: HeadUpdater | None = None


class LiveRecording:
    """Recording of one armed connection, from its first to its last line."""

    def __init__(self, arm: Arm, sink: SocketSink, parts: Parts, switch: Switch) -> None:
        """Wake the hooks; raise Refusal if the event loop does not respond."""
        queue = BoundedQueue(QUEUE_BYTES)
        salt = Salt(bytes.fromhex(arm.salt))
        settings = Settings(Path(), token_ids=arm.token_ids, steps=arm.steps)
        first_line = msgspec.structs.replace(
            parts.header(secrets.token_hex(8), settings),
            live=True,
            sample_percent=arm.sample_percent,
            block_hash=SALTED_BLAKE2B,
        )
        self._collector = collector = LiveCollector(
            queue,
            switch,
            parts.read_counters,
            salt,
            sample_percent=arm.sample_percent,
            token_ids=arm.token_ids,
            steps=arm.steps,
        )

        def ending(recorded: int) -> list[msgspec.Struct]:
            lines: list[msgspec.Struct] = [collector.tally(recorded)]
            return lines if collector.last is None else [*lines, collector.last]

        self._queue = queue
        self._writer = Writer(
            sink,
            collector,
            queue,
            first_line.config.block_size or SMALLEST_BLOCK_SIZE,
            live=LiveLines(salt, arm.prompt_token_ids, ending, collector.so_far),
        )
        self._drained_by_s: float | None = None
        try:
            has_begun = collector.begin()
        except Exception as error:
            raise Refusal(f"the counters of vLLM cannot be read: {type(error).__name__}") from error
        if not has_begun or collector.first is None:
            raise Refusal("the engine's event loop does not respond")
        self._writer.begin(first_line, collector.first)

    @property
    def closed_as(self) -> str | None:
        """Reason in the last line, once that is written."""
        return self._writer.closed_as

    @property
    def pause_s(self) -> float:
        """Time to wait for an order before the next turn."""
        return 0.0 if len(self._queue) else TURN_EVERY_S

    def disarm(self, order: Disarm) -> None:
        """Stop recording new requests, and give the others time to end."""
        self._collector.stop_admitting()
        self._drained_by_s = time.monotonic() + order.drain_s

    def turn(self) -> None:
        """Write queued samples; close when everything has ended."""
        drained_by_s = self._drained_by_s
        if drained_by_s is not None and (self._collector.is_drained or time.monotonic() >= drained_by_s):
            self._writer.close(ORDERED)
        else:
            self._writer.turn()

    def exit(self) -> None:
        """Close because the process ends."""
        self._writer.close(EXIT)

    def forget(self) -> None:
        """Let the hooks sleep, and drop everything."""
        if self.closed_as is None:
            self._collector.close()


class LiveRecorder(threading.Thread):
    """Listens on the socket of this API server."""

    def __init__(self, settings: LiveSettings, parts: Parts, stalled_s: float = STALLED_S) -> None:
        super().__init__(name="specdecode-recorder", daemon=True)
        self.settings = settings
        self.parts = parts
        self.stalled_s = stalled_s
        self.armed = threading.Lock()  # held by the connection that records
        self.connections = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self.process_ends = threading.Event()
        self._path = settings.folder / f"{os.getpid()}.sock"
        self._process = os.getpid()
        self._armed_connection: Connection | None = None
        self._listener = _listen(self._path)
        atexit.register(self.end)
        if parts.switch is not None:
            logger.info("recorder: ready for live captures at %s", self._path)

    def run(self) -> None:
        """Accept connections until the process ends."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self.process_ends.is_set():
                    return
                logger.warning("recorder: cannot accept a connection: %s", error)
                time.sleep(1.0)  # too many open files, for example
                continue
            uid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[
                1
            ]
            if uid != os.geteuid():
                logger.warning("recorder: rejected a connection of user %d", uid)
                connection.close()
            elif not self.connections.acquire(blocking=False):
                _refuse(connection, f"{_MOST_CONNECTIONS} connections are open")
                connection.close()
            else:
                Connection(self, connection).start()

    def begin(self, connection: "Connection", arm: Arm, sink: SocketSink) -> LiveRecording:
        """Start the recording of a connection, which holds the lock; raise Refusal."""
        switch = self.parts.switch
        if switch is None:
            raise Refusal(f"this engine is not supported: {self.parts.problem}")
        for wanted, allowed, what in (
            (arm.token_ids, self.settings.may_send_answers, "answers"),
            (arm.prompt_token_ids, self.settings.may_send_prompts, "prompts"),
        ):
            if wanted and not allowed:
                raise Refusal(f"token ids of {what} are not allowed in this pod")
        self._armed_connection = connection
        return LiveRecording(arm, sink, self.parts, switch)

    def end(self) -> None:
        """Close the recording and the socket when the process ends."""
        if os.getpid() != self._process:  # a fork does not have the threads
            return
        self.process_ends.set()
        with suppress(OSError):
            self._path.unlink()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept
        connection = self._armed_connection
        if connection is not None:
            connection.join(EXIT_TIMEOUT_S)


class Connection(threading.Thread):
    """Thread of one connection: it reads orders, and writes while it records."""

    def __init__(self, recorder: LiveRecorder, connection: socket.socket) -> None:
        super().__init__(name="specdecode-recording", daemon=True)
        self._recorder = recorder
        self._connection = connection

    def run(self) -> None:
        """Follow the orders of one live capture."""
        try:
            self._follow(Orders(self._connection))
        except Refusal as refusal:
            logger.info("recorder: refused an order: %s", refusal)
            _refuse(self._connection, str(refusal))
        except ConnectionEnded:
            pass
        except Exception:
            logger.exception("recorder: a live capture failed")
        finally:
            self._connection.close()
            self._recorder.connections.release()

    def _follow(self, orders: Orders) -> None:
        order = orders.next(None)
        if order is not None and order.canary is not None:
            try:
                publish(order.canary)
            except ValueError as error:
                raise Refusal(str(error)) from error
            return
        if order is not None and order.head is not None:
            self._update_head(order.head, orders)
            return
        if order is None or order.arm is None:
            raise Refusal("expected arm")
        if not self._recorder.armed.acquire(blocking=False):
            raise Refusal("another connection is armed")
        try:
            self._record(order.arm, orders)
        finally:
            self._recorder.armed.release()

    def _update_head(self, head: Head, orders: Orders) -> None:
        heads = self._recorder.parts.heads
        if heads is None:
            raise Refusal("this engine replaces no heads")

        def verdict() -> Judged | None:
            try:
                order = orders.next(VERDICT_TIMEOUT_S)
            except (Refusal, ConnectionEnded):
                return None
            return order.judged if order is not None else None

        def answer(message: dict[str, str]) -> None:
            with suppress(OSError):
                self._connection.sendall(msgspec.json.encode(message) + b"\n")

        heads.follow(head, verdict, answer)

    def _record(self, arm: Arm, orders: Orders) -> None:
        recording = self._recorder.begin(self, arm, SocketSink(self._connection, self._recorder.stalled_s))
        logger.info("recorder: on, for a live capture of %d %% of the requests", arm.sample_percent)
        try:
            while recording.closed_as is None:
                recording.turn()
                if self._recorder.process_ends.is_set():
                    recording.exit()
                order = None if recording.closed_as else orders.next(recording.pause_s)
                if order is not None:
                    if order.disarm is None:
                        raise Refusal("already armed")
                    recording.disarm(order.disarm)
        finally:
            recording.forget()
            logger.info("recorder: asleep again (%s)", recording.closed_as or "the connection has ended")


def _refuse(connection: socket.socket, reason: str) -> None:
    with suppress(OSError):
        connection.send(encode(Refused(reason)), socket.MSG_DONTWAIT)


def _listen(path: Path) -> socket.socket:
    """Return a listening socket that only this user may connect to; remove sockets of ended processes."""
    for other in path.parent.glob("*.sock"):
        if other == path or not _is_served(other):
            with suppress(OSError):
                other.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), stat.S_IRUSR | stat.S_IWUSR)  # of the file that bind creates, on Linux
        # Renamed when it listens, because another API server removes sockets that refuse connections.
        begun = path.with_suffix(".begun")
        with suppress(FileNotFoundError):
            begun.unlink()
        listener.bind(str(begun))
        listener.listen(_BACKLOG)
        begun.rename(path)
    except BaseException:
        listener.close()
        raise
    return listener


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(1.0)
        try:
            trial.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            pass  # a full backlog, for example
    return True
