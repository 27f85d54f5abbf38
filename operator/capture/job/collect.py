"""Run the container `collect` of a live capture: receive the recorders' lines, then merge, validate and publish.

The sidecars of the engine pods connect over TCP, one connection per API server, and name themselves with a Hello. When
all named pods have joined, or after a time limit, the collector arms the recorders, which then send the lines of a
segment (recorder/segment_format.py). At the end of the window it disarms them and waits for their last lines. A
connection that breaks interrupts its segment, and its pod may join again with a new one.

Everything from the network is untrusted: only named pods with the token are heard, sizes are bounded, and each line is
checked before it is written. A wrong line ends its connection.
"""

import asyncio
import hmac
import math
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from specdecode_operator.capture.files.formats import CaptureError, LivePod, LiveWindow, WindowEnd, encode_meta
from specdecode_operator.capture.files.live import LONGEST_JUMP_S, Recorded, Source
from specdecode_operator.capture.files.merge import Clock, step_stats, trace_meta
from specdecode_operator.capture.files.publish import flush
from specdecode_operator.capture.files.segments import Segment
from specdecode_operator.capture.files.totals import BY_ENGINE, is_consistent
from specdecode_operator.capture.files.trace_rules import UnreadableLineError, decode_meta, readable_step
from specdecode_operator.capture.job import pod_files
from specdecode_operator.capture.job.collect_settings import (
    JOINING,
    CollectSettings,
    LiveSettings,
    read_collect_settings,
)
from specdecode_operator.capture.job.entrypoint import label_failure, report, success_message
from specdecode_operator.capture.job.finish import Asked, Published, Run, finish, published_before
from specdecode_operator.capture.load import run_settings
from specdecode_operator.capture.load.engine_client import allow_many_connections
from specdecode_operator.capture.load.runner import TICK_S, print_line
from specdecode_operator.capture.load.shutdown import Stop, beside, stop_on_signals
from specdecode_operator.capture.recorder.segment_format import (
    LONGEST_LINE_BYTES,
    SALTED_BLAKE2B,
    SCHEMA,
    STOP_STRING,
    STOP_TOKEN,
    Anchor,
    Closed,
    Counters,
    Header,
    Off,
    Refused,
    Request,
    SegmentLine,
    Step,
    Tally,
)
from specdecode_operator.capture.trace_reader import MOST_TOKENS
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip

MOST_API_SERVERS: Final = 64  # of a pod
LONGEST_REASON: Final = 300
_LONGEST_TIME_S: Final = 1e12
_LINE: Final[msgspec.json.Decoder[SegmentLine]] = msgspec.json.Decoder(SegmentLine)


class RejectedError(Exception):
    """A peer sent something wrong; its connection ends."""


_HEX_ID: Final = re.compile(r"[0-9a-f]{16}")
_REASON: Final = re.compile(r"[0-9a-z_]{1,64}")
_BOOT: Final = re.compile(r"[0-9A-Za-z_-]{1,64}")
_LONGEST_HEADER_BYTES: Final = 2**16  # it stays in memory
_MOST_ENGINES: Final = 1024
_MOST_COUNTERS: Final = 32
_ENDS: Final = frozenset({BY_ENGINE, "stop_string", "abort", "unfinished"})
_WHOLE: Final = frozenset({BY_ENGINE, "stop_string"})
_FINISH_REASONS: Final = frozenset({None, "stop", "length", "abort", "error", "repetition"})
_U64: Final = 2**64
_CLOCK: Final = Clock(0.0)  # lines are only checked here; the merge places them in time


def _require(truth: bool, what: str) -> None:
    if not truth:
        raise RejectedError(what)


def _are_times(*times_s: float | None) -> bool:
    return all(each is None or abs(each) < _LONGEST_TIME_S for each in times_s)


_NO_SEGMENT: Final = Segment(Path(), None, None)  # type: ignore[arg-type]  # replaced before anyone reads it


class SegmentReader:
    """Checks the lines of one segment in their order, and adds them up."""

    def __init__(self, settings: CollectSettings, pod: str, uid: str, node: str) -> None:
        self.header: Header | None = None
        self.closed: Closed | None = None
        self.refused: str | None = None
        self.completed = 0
        self._admitted = self._sampled_out = 0  # by the latest report
        # The facts are complete when the segment has its path.
        self.source = Source(_NO_SEGMENT, pod, uid, node, began_s=0.0)
        self._settings = settings
        self._next: Callable[[SegmentLine], None] = self._first

    @property
    def is_complete(self) -> bool:
        """Whether no further line may come."""
        return self.closed is not None or self.refused is not None

    @property
    def sampled_out(self) -> int:
        """Requests outside the sample, as far as reported."""
        return self._sampled_out

    @property
    def seen(self) -> int:
        """Requests in the window, as far as reported."""
        return max(self._admitted, self.source.requests + self._sampled_out)

    def _report(self, admitted: int, sampled_out: int) -> None:
        self._admitted, self._sampled_out = admitted, sampled_out

    def take(self, text: bytes) -> None:
        """Check a line and add it; raise RejectedError if it is wrong or out of order."""
        try:
            line = _LINE.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RejectedError(f"an unreadable line: {clip(printable(str(error)), LONGEST_REASON)}") from error
        _require(
            not isinstance(line, Header) or len(text) <= _LONGEST_HEADER_BYTES,
            f"a header of more than {_LONGEST_HEADER_BYTES} bytes",
        )
        self._next(line)

    def _first(self, line: SegmentLine) -> None:
        if isinstance(line, Refused):
            self.refused = clip(printable(line.reason), LONGEST_REASON)
            return
        _require(isinstance(line, Header), "the first line is not a header")
        assert isinstance(line, Header)  # noqa: S101 - as above
        record, live = self._settings.record, self._settings.live
        _require(line.schema == SCHEMA, f"schema {line.schema} of the recorder instead of {SCHEMA}")
        _require(_BOOT.fullmatch(line.boot) is not None, "an invalid boot id")
        _require(
            line.live and line.sample_percent == live.sample_percent and line.block_hash == SALTED_BLAKE2B,
            "the recorder does not follow the order: it must salt ids and hashes, and record the ordered sample",
        )
        _require(record.token_ids or not line.token_ids, "token ids that were not ordered")
        _require(0 <= line.client_index < line.client_count <= MOST_API_SERVERS, "an invalid index of an API server")
        engines = line.engines
        _require(
            0 < len(engines) <= _MOST_ENGINES and all(0 <= each < _U64 // 2 for each in engines),
            "invalid engine indexes",
        )
        _require(_are_times(line.monotonic_s, line.wall_s), "an invalid time")
        try:
            decode_meta(encode_meta(trace_meta(line)))
        except UnreadableLineError as error:
            raise RejectedError(
                f"invalid settings of the engine: {clip(printable(str(error)), LONGEST_REASON)}"
            ) from error
        self.header = line
        source = self.source
        source.offset_s = source.least_offset_s = source.largest_offset_s = line.wall_s - line.monotonic_s
        self._next = self._second

    def _second(self, line: SegmentLine) -> None:
        self.source.first = _counters(line)
        self._next = self._body

    def _body(self, line: SegmentLine) -> None:
        source = self.source
        if isinstance(line, Request):
            self._check_request(line)
            source.requests += 1
            whole = line.ended_by in _WHOLE
            source.finished += whole
            source.generated_tokens += sum(line.chunk_tokens)
            self.completed += whole
        elif isinstance(line, Step):
            self._add_step(line)
        elif isinstance(line, Anchor):
            _require(_are_times(line.monotonic_s, line.wall_s), "an invalid time")
            offset_s = line.wall_s - line.monotonic_s
            source.least_offset_s = min(source.least_offset_s, offset_s)
            source.largest_offset_s = max(source.largest_offset_s, offset_s)
            if line.admitted is not None and line.sampled_out is not None:
                _require(0 <= line.sampled_out <= line.admitted < _U64, "an invalid number of requests")
                self._report(line.admitted, line.sampled_out)
        elif isinstance(line, Off):
            source.off = clip(printable(line.reason), LONGEST_REASON)
        elif isinstance(line, Tally):
            _require(all(0 <= each < _U64 for each in msgspec.structs.astuple(line)), "an invalid tally")
            source.tally = line
            self._report(line.admitted, line.sampled_out)
            self._next = self._before_last
        else:
            raise RejectedError(f"a line of the kind {_kind(line)} between requests")

    def _before_last(self, line: SegmentLine) -> None:
        if isinstance(line, Closed):  # the engine's event loop did not respond, so its counters are not known
            self._last(line)
        else:
            self.source.last = _counters(line)
            self._next = self._last

    def _last(self, line: SegmentLine) -> None:
        _require(isinstance(line, Closed), "the last line is not of the kind closed")
        assert isinstance(line, Closed)  # noqa: S101 - as above
        source = self.source
        _require(
            (line.requests, line.steps) == (source.requests, source.steps),
            f"{source.requests} requests and {source.steps} steps arrived of {line.requests} and {line.steps}",
        )
        _require(_REASON.fullmatch(line.reason) is not None, "an invalid reason")
        _require(all(0 <= each < _U64 for each in (line.dropped, line.unfinished, line.errors)), "an invalid count")
        self.closed = line
        self._next = self._none

    @staticmethod
    def _none(line: SegmentLine) -> None:
        raise RejectedError(f"a line of the kind {_kind(line)} after the last one")

    def _check_request(self, line: Request) -> None:
        record = self._settings.record
        chunks = len(line.chunk_s)
        _require(
            chunks == len(line.chunk_tokens) == len(line.num_running) == len(line.prefill_tokens),
            "a request whose arrays have different lengths",
        )
        _require(line.engine is not None or not any(line.chunk_tokens), "a request with tokens and without an engine")
        _require(line.engine is None or self._has_engine(line.engine), "a request of an unknown engine")
        ids = (line.id, line.external_id or line.id)
        _require(all(_HEX_ID.fullmatch(each) is not None for each in ids), "a request whose id is not salted")
        numbers = (
            line.prompt_tokens,
            line.concurrency,
            line.preemptions,
            line.cached_tokens or 0,
            line.kept_tokens or 0,
        )
        arrays = (line.chunk_tokens, line.num_running, line.prefill_tokens)
        _require(
            all(0 <= each <= MOST_TOKENS for each in (*numbers, sum(line.chunk_tokens)))
            and all(0 <= each < 2**32 for array in arrays for each in array)
            and all(0 <= each < _U64 for each in line.block_hashes),
            "a request with an invalid number",
        )
        times_s = (line.arrival_monotonic_s, line.queued_s, line.scheduled_s)
        _require(_are_times(*times_s, *line.chunk_s), "a request with an invalid time")
        stamps_s = [stamp_s for stamp_s, count in zip(line.chunk_s, line.chunk_tokens, strict=True) if count]
        in_order = all(before_s <= after_s for before_s, after_s in pairwise([line.arrival_monotonic_s, *stamps_s]))
        _require(in_order, "a request with chunk times out of order")
        _require(line.ended_by in _ENDS and line.finish_reason in _FINISH_REASONS, "a request with an unknown end")
        _require(
            line.stop_reason in {None, STOP_STRING, STOP_TOKEN} or (record.token_ids and type(line.stop_reason) is int),
            "a request with a stop string or stop token",
        )
        for given, wanted, length in (
            (line.token_ids, record.token_ids, sum(line.chunk_tokens)),
            # A prompt of embeddings has no token ids.
            (line.prompt_token_ids or None, record.prompt_token_ids, line.prompt_tokens),
        ):
            _require(given is None or wanted, "token ids that were not ordered")
            _require(
                given is None or (len(given) == length and all(0 <= each < 2**32 for each in given)), "wrong token ids"
            )

    def _add_step(self, line: Step) -> None:
        _require(self._has_engine(line.engine) and _are_times(line.t), "a step of an unknown engine or time")
        source = self.source
        if (stats := step_stats(line, _CLOCK)) is not None:
            try:
                drafting = readable_step(stats).scheduler.spec_decoding_stats
            except UnreadableLineError as error:
                raise RejectedError(f"a step's statistics: {clip(printable(str(error)), LONGEST_REASON)}") from error
            if drafting is not None:
                _require(is_consistent(drafting), "a step whose acceptance per position is inconsistent")
                source.drafts += drafting.num_drafts
                source.draft_tokens += drafting.num_draft_tokens
                source.accepted_tokens += drafting.num_accepted_tokens
        source.steps += 1

    def _has_engine(self, engine: int) -> bool:
        return self.header is not None and engine in self.header.engines


def _kind(line: SegmentLine) -> str:
    return type(line).__name__.lower()


def _counters(line: SegmentLine) -> Counters:
    if not isinstance(line, Counters):
        raise RejectedError(f"a line of the kind {_kind(line)} instead of counters")
    _require(
        len(line.values) <= _MOST_COUNTERS and all(0 <= each < _U64 for each in line.values.values()),
        "invalid counters",
    )
    return line


_MOST_TORN_BYTES: Final = 32 * LONGEST_LINE_BYTES
CONNECTIONS_PER_POD: Final = MOST_API_SERVERS
_LONGEST_HELLO_BYTES: Final = 4096
_READ_BYTES: Final = 2**18
_HELLO_S: Final = 10.0
_FIRST_LINE_S: Final = 60.0  # until the first recorder begins; it waits up to 30 s for its engine's event loop
_LAST_LINES_S: Final = 60.0  # beyond the drain time, for the same and for lines that are under way
_SYNC_EVERY_S: Final = 5.0
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a lost node is noticed in 30 s

_Name = Annotated[str, Meta(pattern=r"\A[0-9A-Za-z._-]{0,253}\Z")]


class Hello(Struct, frozen=True, forbid_unknown_fields=True):
    """First line of a connection."""

    hello: Literal[1]
    token: Annotated[str, Meta(max_length=256)]
    pod: _Name
    pod_uid: _Name
    node: _Name
    socket: Annotated[str, Meta(pattern=r"\A[0-9]{1,10}\.sock\Z")] | None  # of one API server; None if there is none
    sockets: Annotated[int, Meta(ge=0, le=CONNECTIONS_PER_POD)]  # of all API servers in the pod
    note: Annotated[str, Meta(max_length=1024)] | None = None


_HELLO: Final = msgspec.json.Decoder(Hello)
_BYE: Final = b'{"bye": true}\n'


class _Memory:
    """Bytes of unfinished lines of all connections."""

    def __init__(self) -> None:
        self.used_bytes = 0


class _Lines:
    """Whole lines of a connection, with a bound on their length, and on the unfinished lines of all connections."""

    def __init__(self, reader: asyncio.StreamReader, memory: _Memory) -> None:
        self.longest_bytes = _LONGEST_HELLO_BYTES
        self._memory = memory
        self._reader = reader
        self._torn: list[bytes] = []
        self._torn_bytes = 0

    async def some(self) -> list[bytes]:
        """Return at least one whole line; none at the end of the connection."""
        while piece := await self._reader.read(_READ_BYTES):
            first, found, rest = piece.partition(b"\n")
            self._torn.append(first)
            self._keep(self._torn, self._torn_bytes + len(first))
            if found:
                *whole, torn = (b"".join(self._torn) + b"\n" + rest).split(b"\n")
                self._keep([torn], len(torn))
                self._bound(max(map(len, whole)))
                return whole
        return []

    def _keep(self, torn: list[bytes], size_bytes: int) -> None:
        self._memory.used_bytes += size_bytes - self._torn_bytes
        self._torn, self._torn_bytes = torn, size_bytes
        self._bound(size_bytes)
        if self._memory.used_bytes > _MOST_TORN_BYTES:
            raise RejectedError("too many long lines at a time")

    def release(self) -> None:
        """Forget an unfinished line."""
        self._memory.used_bytes -= self._torn_bytes
        self._torn, self._torn_bytes = [], 0

    def _bound(self, size_bytes: int) -> None:
        if size_bytes > self.longest_bytes:
            raise RejectedError(f"a line of more than {self.longest_bytes} bytes")


class Peer:
    """One connection of a named pod, and the segment that it sends."""

    def __init__(self, hello: Hello, lines: _Lines, writer: asyncio.StreamWriter, settings: CollectSettings) -> None:
        self.hello = hello
        self.lines = lines
        self.reader = SegmentReader(settings, hello.pod, hello.pod_uid, hello.node)
        self.armed_wall_s: float | None = None
        self.clock_ahead_s: tuple[float, float] | None = None  # bounds for the host's wall clock
        self.file: _SegmentFile | None = None
        self.writer = writer

    @property
    def has_segment(self) -> bool:
        """Whether its recorder has begun to record."""
        return self.reader.header is not None

    def send(self, line: Mapping[str, object]) -> None:
        """Send an order; orders are short and need no flow control."""
        self.writer.write(msgspec.json.encode(line) + b"\n")

    def arm(self, order: Mapping[str, object]) -> None:
        """Order the recorder to record."""
        self.lines.longest_bytes = LONGEST_LINE_BYTES
        self.armed_wall_s = time.time()
        self.send(order)

    def end(self, reason: str) -> None:
        """Close the connection; a segment without its last line is interrupted."""
        if self.has_segment and self.reader.closed is None and self.reader.source.interrupted is None:
            self.reader.source.interrupted = clip(printable(reason), LONGEST_REASON)
        self.writer.close()

    def take(self, lines: list[bytes]) -> tuple[bytes, str | None]:
        """Check lines; return the good ones as they are written, and the fault of the next one."""
        good: list[bytes] = []
        if self.armed_wall_s is None:
            return b"", "a line before the order to record"
        try:
            for text in lines:
                self.reader.take(text)
                good.append(text + b"\n")
                self._bound_clock(self.armed_wall_s)
        except RejectedError as error:
            return b"".join(good), str(error)
        except Exception as error:  # noqa: BLE001  the line of one engine must not end the capture
            return b"".join(good), f"validating a line failed with {type(error).__name__}"
        return b"".join(good), None

    def _bound_clock(self, armed_wall_s: float) -> None:
        """Bound the host's clock: its first reading was after the order left, and before its line arrived."""
        if self.clock_ahead_s is None and (header := self.reader.header) is not None:
            self.clock_ahead_s = header.wall_s - time.time(), header.wall_s - armed_wall_s


class _Complaints:
    """Reports rejected connections in the log, at most once per second."""

    def __init__(self) -> None:
        self._count = 0
        self._last_s = -math.inf

    def add(self, writer: asyncio.StreamWriter, reason: str) -> None:
        self._count += 1
        if time.monotonic() - self._last_s < 1.0:
            return
        address = (writer.get_extra_info("peername") or ("unknown",))[0]
        more = f", {self._count} since the last such line" if self._count > 1 else ""
        print_line(f"rejected a connection from {address}: {reason}{more}")
        self._count, self._last_s = 0, time.monotonic()


@dataclass
class _Pod:
    """One named pod."""

    name: str
    hello: Hello | None = None  # the last one
    peers: dict[str, Peer] = field(default_factory=dict)  # by socket
    refused: dict[str, str] = field(default_factory=dict)  # reasons, by socket
    ended: str | None = None  # why its last connection ended without a segment

    @property
    def has_joined(self) -> bool:
        return self.hello is not None and 0 < self.hello.sockets <= len(self.peers)

    def missing(self, port: int) -> str:
        """Return why none of its API servers recorded."""
        if self.hello is None:
            return (
                "its sidecar never connected: check that the pod has the container recorder (spec.engine.recorder),"
                f" and that no NetworkPolicy denies its connections to TCP port {port} of the collector"
            )
        if self.refused:
            return "; ".join(f"API server {name}: {reason}" for name, reason in sorted(self.refused.items()))
        note = f": {clip(printable(self.hello.note), LONGEST_REASON)}" if self.hello.note else ""
        if self.hello.socket is None:
            return f"its sidecar found no API server with a recorder{note}"
        return f"its recorder did not begin{note or (f': {self.ended}' if self.ended else '')}"


_OPEN, _OVER = "live", "draining"


class Collection:
    """One live capture under way."""

    def __init__(self, settings: CollectSettings, places: pod_files.Places, stop: Stop) -> None:
        self._settings = settings
        self._live: LiveSettings = settings.live
        self._places = places
        self._stop = stop
        self._failure: CaptureError | None = None
        self._pods = {name: _Pod(name) for name in self._live.pods}
        self._peers: list[Peer] = []  # with a segment, in the order of their start
        self._state = JOINING
        self._zero_s = 0.0
        self._until_s: float | None = None
        self._changed = asyncio.Event()
        self._handlers: set[asyncio.Task[None]] = set()
        self._silent: dict[asyncio.Task[None], asyncio.StreamWriter] = {}  # without a valid hello, oldest first
        self._closing: list[asyncio.Task[None]] = []
        """Segments of ended connections."""
        self._complaints = _Complaints()
        self._memory = _Memory()
        self._salt = os.urandom(32).hex()

    async def run(self, listener: socket.socket) -> Recorded:
        """Record, and return the facts about the segments in the attempt's folder.

        Raises
        ------
        CaptureError
            If no engine joins, the volume fails, or the run is stopped.
        """
        allow_many_connections()
        server = await asyncio.start_server(self._accept, sock=listener)
        try:
            async with beside(self._follow_stop(), self._sync(), self._progress()):
                return await self._record()
        finally:
            server.close()
            for handler in self._handlers:
                handler.cancel()
            await asyncio.gather(*self._handlers, return_exceptions=True)
            await asyncio.gather(*self._closing)

    async def _record(self) -> Recorded:
        live = self._live
        joining_since_s = time.monotonic()
        await self._wait(self._all_joined, joining_since_s + live.join_seconds)
        if not any(pod.peers for pod in self._pods.values()):
            raise self._nobody(time.monotonic() - joining_since_s)
        self._zero_s, zero_wall_s = time.monotonic(), time.time()
        duration_s, deadline_s = live.duration_seconds or math.inf, self._settings.deadline_seconds or math.inf
        self._until_s = self._zero_s + min(duration_s, deadline_s)
        self._state = _OPEN
        for peer in self._open_peers():
            self._arm(peer)
        began = await self._wait(lambda: bool(self._peers), self._zero_s + _FIRST_LINE_S)
        if not began:
            raise self._nobody(time.monotonic() - joining_since_s)
        enough = await self._wait(self._has_enough, self._until_s)
        ended_s = time.monotonic()
        self._state = _OVER
        await self._disarm()
        ended_by: WindowEnd = "requests" if enough else "deadline" if deadline_s < duration_s else "duration"
        window = LiveWindow(
            started_wall_s=zero_wall_s,
            seconds=round(ended_s - self._zero_s, 3),
            ended_by=ended_by,
            duration_seconds=live.duration_seconds,
            requests=live.requests,
        )
        pods = [self._pod_entry(pod) for pod in self._pods.values()]
        return Recorded(
            sources=[peer.reader.source for peer in self._peers],
            pods=pods,
            window=window,
            sample_percent=live.sample_percent,
            zero_s=self._zero_s,
            notes=[note for pod in pods if (note := _clock_note(pod)) is not None],
        )

    async def _disarm(self) -> None:
        """End the window, and wait for the last lines of all recorders."""
        drain_s = self._live.drain_seconds
        for peer in self._open_peers():
            if peer.has_segment:
                peer.send({"disarm": {"drain_s": drain_s}})
            else:
                peer.end("the window is over")
        within_s = drain_s + _LAST_LINES_S
        await self._wait(lambda: not self._open_peers(), time.monotonic() + within_s)
        for peer in self._open_peers():
            peer.end(f"the recorder did not finish within {within_s:g} s")
        await self._wait(lambda: not self._open_peers(), time.monotonic() + _LAST_LINES_S)
        await asyncio.gather(*self._closing)
        if self._failure is not None:
            raise self._failure

    async def _wait(self, condition: Callable[[], bool], until_s: float) -> bool:
        """Wait for a condition or a time; return whether the condition holds. Raise if the run must end."""
        while not condition():
            if self._stop.is_set:
                raise self._failure or CaptureError("Cancelled", f"stopped before its end: {self._stop.reason}")
            self._changed.clear()
            try:
                async with asyncio.timeout_at(None if math.isinf(until_s) else until_s):
                    await self._changed.wait()
            except TimeoutError:
                return condition()
        return True

    @property
    def connections(self) -> int:
        """Number of open connections, of anyone."""
        return len(self._handlers)

    def connected(self, pod: str) -> int:
        """Return the number of API servers of a pod that are connected."""
        return len(self._pods[pod].peers)

    def _all_joined(self) -> bool:
        return all(pod.has_joined for pod in self._pods.values())

    def _has_enough(self) -> bool:
        return self._live.requests is not None and self._recorded() >= self._live.requests

    def _recorded(self) -> int:
        return sum(peer.reader.source.requests for peer in self._peers)

    def _open_peers(self) -> list[Peer]:
        return [peer for pod in self._pods.values() for peer in pod.peers.values()]

    def _nobody(self, after_s: float) -> CaptureError:
        said = "; ".join(f"pod {pod.name}: {pod.missing(self._live.port)}" for pod in self._pods.values())
        return CaptureError("NoEngineJoined", f"no recorder joined within {after_s:.0f} s: {said}")

    def _pod_entry(self, pod: _Pod) -> LivePod:
        peers = [peer for peer in self._peers if peer.hello.pod == pod.name]
        bounds_s = [peer.clock_ahead_s for peer in peers if peer.clock_ahead_s is not None]
        ahead_ms = None
        if bounds_s:
            low_s, high_s = max(low for low, _ in bounds_s), min(high for _, high in bounds_s)
            ahead_ms = round(min(low_s, high_s) * 1000, 3), round(max(low_s, high_s) * 1000, 3)
        return LivePod(
            pod=pod.name,
            uid=pod.hello.pod_uid if pod.hello else None,
            node=pod.hello.node if pod.hello else None,
            api_servers=len({peer.reader.source.segment.header.client_index for peer in peers}),
            missing=None if peers else pod.missing(self._live.port),
            clock_ahead_ms=ahead_ms,
        )

    # Connections

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - asyncio runs this as a task
        lines = _Lines(reader, self._memory)
        try:
            if len(self._handlers) >= len(self._pods) * CONNECTIONS_PER_POD and not self._close_oldest_silent():
                self._complaints.add(writer, "too many connections")
                return
            self._handlers.add(task)
            self._silent[task] = writer
            _keep_alive(writer)
            hello = await self._hello(lines)
            del self._silent[task]
            pod = self._pods.get(hello.pod)
            if pod is None or self._state == _OVER:
                writer.write(_BYE)
                await writer.drain()
                if pod is None:
                    self._complaints.add(writer, f"pod {hello.pod} is not named")
                return
            pod.hello = hello
            if hello.socket is not None:
                await self._follow(Peer(hello, lines, writer, self._settings), pod)
        except RejectedError as error:
            self._complaints.add(writer, str(error))
        except TimeoutError:
            self._complaints.add(writer, f"no hello within {_HELLO_S:g} s")
        except OSError:
            pass  # it is gone
        finally:
            self._handlers.discard(task)
            self._silent.pop(task, None)
            lines.release()
            writer.close()
            self._changed.set()

    def _close_oldest_silent(self) -> bool:
        """Close the oldest connection without a valid hello; return whether there was one.

        Otherwise clients without the token could keep all sidecars out.
        """
        for task, writer in self._silent.items():
            self._complaints.add(writer, "too many connections, and no hello yet")
            task.cancel()
            self._handlers.discard(task)
            del self._silent[task]
            return True
        return False

    async def _hello(self, lines: _Lines) -> Hello:
        async with asyncio.timeout(_HELLO_S):
            found = await lines.some()
        try:
            (text,) = found
            hello = _HELLO.decode(text)
        except (ValueError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise RejectedError("no valid hello") from None
        if not hmac.compare_digest(hello.token.encode(), self._live.token.encode()):
            raise RejectedError("wrong token")
        return hello

    async def _follow(self, peer: Peer, pod: _Pod) -> None:
        """Write the lines of a connection until it ends."""
        name = str(peer.hello.socket)
        if (older := pod.peers.get(name)) is not None:
            older.end("the sidecar connected again")
        pod.peers[name] = peer
        self._changed.set()
        if self._state == _OPEN:
            self._arm(peer)
        reason = "the connection ended"
        try:
            while lines := await peer.lines.some():
                data, problem = peer.take(lines)
                await self._write(peer, data)
                self._changed.set()
                if problem is not None:
                    reason = problem
                    self._complaints.add(peer.writer, problem)
                if peer.reader.closed is not None and self._state == _OVER:
                    peer.send({"bye": True})
                if problem is not None or peer.reader.is_complete:
                    return
        except RejectedError as error:
            reason = str(error)
            raise
        except OSError as error:
            reason = f"the connection broke: {error.strerror or type(error).__name__}"
        finally:
            self._leave(peer, pod, reason)

    def _leave(self, peer: Peer, pod: _Pod, reason: str) -> None:
        name = str(peer.hello.socket)
        peer.end(reason)
        if pod.peers.get(name) is peer:
            del pod.peers[name]
        if peer.reader.refused is not None:
            pod.refused[name] = peer.reader.refused
        elif peer.has_segment:
            source = peer.reader.source
            source.ended_s = time.monotonic()
            source.segment = Segment(source.segment.path, source.segment.header, peer.reader.closed)
            pod.refused.pop(name, None)
        else:
            pod.ended = reason
        if peer.file is not None:
            self._closing.append(asyncio.create_task(self._in_thread(peer.file.close)))
        self._changed.set()

    def _arm(self, peer: Peer) -> None:
        record = self._settings.record
        peer.arm(
            {
                "arm": {
                    "salt": self._salt,
                    "sample_percent": self._live.sample_percent,
                    "token_ids": record.token_ids,
                    "prompt_token_ids": record.prompt_token_ids,
                    "steps": record.step_stats,
                }
            }
        )

    async def _write(self, peer: Peer, data: bytes) -> None:
        if peer.file is None and (header := peer.reader.header) is not None and peer.reader.source.interrupted is None:
            source = peer.reader.source
            path = self._places.segments / f"segment-{header.boot}-{len(self._peers)}.jsonl"
            source.segment = Segment(path, header, None)
            source.began_s = time.monotonic()
            self._peers.append(peer)
            try:
                peer.file = _SegmentFile(path)
            except OSError as error:
                self._fail(error)
        if peer.file is not None and data:
            await self._in_thread(partial(peer.file.write, data))

    async def _in_thread(self, work: Callable[[], None]) -> None:
        """Work on the volume in a thread. An error fails the capture."""
        try:
            await asyncio.to_thread(work)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if self._failure is None:
            try:
                with pod_files.volume_errors(self._places.root):
                    raise error
            except CaptureError as failure:
                self._failure = failure
                self._stop.set(failure.message)

    # Beside

    async def _follow_stop(self) -> None:
        await self._stop.wait()
        self._changed.set()

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(_SYNC_EVERY_S)
            for peer in self._open_peers():
                if peer.file is not None:
                    await self._in_thread(peer.file.flush)

    async def _progress(self) -> None:
        """Print a line of progress each second."""
        while True:
            await asyncio.sleep(TICK_S)
            recorded = self._recorded()
            passed_s = time.monotonic() - self._zero_s if self._state != JOINING else 0.0
            left_s = None if self._until_s is None or math.isinf(self._until_s) else self._until_s - time.monotonic()
            line = {
                "phase": self._state,
                "pods": len(self._pods),
                "joined": sum(pod.has_joined for pod in self._pods.values()),
                "seen": sum(peer.reader.seen for peer in self._peers),
                "recorded": recorded,
                "sampled_out": sum(peer.reader.sampled_out for peer in self._peers),
                "rate": round(recorded / passed_s, 2) if passed_s else None,
                "eta_s": None if left_s is None else round(max(0.0, left_s), 1),
            }
            print_line(msgspec.json.encode(line).decode())


class _SegmentFile:
    """A file of the volume that threads write and flush, and that may be closed meanwhile.

    Raises OSError if the volume fails.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._is_open = True
        self._lock = Lock()

    def write(self, data: bytes) -> None:
        """Append lines."""
        with self._lock:
            left = memoryview(data)
            while left and self._is_open:
                left = left[os.write(self._file, left) :]

    def flush(self) -> None:
        """Write everything to the disk."""
        with self._lock:
            if self._is_open:
                os.fsync(self._file)

    def close(self) -> None:
        """Flush and close it."""
        with self._lock:
            self._is_open = False
            try:
                os.fsync(self._file)
            finally:
                os.close(self._file)


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """Let the kernel notice a peer whose node is gone."""
    connection = writer.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _clock_note(pod: LivePod) -> str | None:
    """Return a note if the clock of a pod's node is wrong by more than the bounds allow."""
    if pod.clock_ahead_ms is None:
        return None
    low_s, high_s = (each / 1000 for each in pod.clock_ahead_ms)
    if low_s <= LONGEST_JUMP_S and high_s >= -LONGEST_JUMP_S:
        return None
    least_s, word = (low_s, "ahead of") if low_s > 0 else (-high_s, "behind")
    node = pod.node or "unknown"
    return f"the clock of node {node} (pod {pod.pod}) is at least {least_s:.1f} s {word} the collector's"


def listen(port: int) -> socket.socket:
    """Return a socket that listens on all addresses, IPv4 and, if the node has it, IPv6."""
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):
        return socket.create_server(("", port))


class CollectJob:
    """One attempt of a live capture."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        text, attempt = run_settings.required(environment)
        try:
            self.settings = read_collect_settings(text)
        except run_settings.InvalidSettingsError as error:
            raise CaptureError("InvalidSettings", str(error)) from error
        settings = self.settings
        self.places = pod_files.Places(Path(settings.root), settings.namespace, settings.capture, attempt)
        self.collection: Collection | None = None  # while it records
        self._asked = Asked(
            capture_uid=settings.capture_uid,
            record=settings.record.model_dump(by_alias=True),
            context=settings.context | ({"slo": settings.slo} if settings.slo else {}),
        )

    async def run(self, listener: socket.socket | None = None) -> Published:
        """Record and publish; a failure leaves the files labelled as partial."""
        if (found := published_before(self.places, self._asked)) is not None:
            return found
        pod_files.look_at_volume(self.places)
        pod_files.begin(self.places)
        with label_failure(self.places):
            stop = Stop()
            stop_on_signals(stop)
            with pod_files.volume_errors(self.places.root):
                self.collection = Collection(self.settings, self.places, stop)
                recorded = await self.collection.run(listener or listen(self.settings.live.port))
                flush(self.places.segments)
            return await asyncio.to_thread(finish, self.places, self._asked, _run(recorded))


def _run(recorded: Recorded) -> Run:
    nodes = {source.node for source in recorded.sources}
    return Run(
        zero_monotonic_s=recorded.zero_s,
        zero_wall_s=recorded.window.started_wall_s,
        segments=[source.segment for source in recorded.sources],
        node=nodes.pop() or None if len(nodes) == 1 else None,
        live=recorded,
    )


def collect_job() -> bytes:
    """Run the container `collect`, and print the summary; return its termination message."""
    published = asyncio.run(CollectJob(os.environ).run())
    print_line(report(published))
    return success_message(published)
