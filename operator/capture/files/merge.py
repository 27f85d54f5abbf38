"""Merges what recorders and load generator wrote into the files of a capture.

Everything is sorted and joined in tables on the volume, so memory does not grow with the capture:

1. Requests of all segments meet the client's line of their id, which gives each its phase and leaves warm-up requests
   out. Those with tokens are sorted by the engine's stamp of the last chunk, which is the order in which they finished.
2. Steps of all engines are sorted by the engine's stamp. Steps before the first measured request are left out.
"""

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from specdecode_operator.capture.files.errors import CaptureError
from specdecode_operator.capture.files.formats import (
    ABORTED,
    CLIENT,
    PART_SUFFIX,
    STEP_STATS,
    TRACE,
    ClientRecord,
    TraceMeta,
    encode,
    encode_meta,
)
from specdecode_operator.capture.files.lines import read_lines
from specdecode_operator.capture.files.segments import FOLDER, Segment, Torn, list_segments, read_segment
from specdecode_operator.capture.merge.convert import (
    Clock,
    aborted_record,
    has_tokens,
    step_stats,
    trace_record,
)
from specdecode_operator.capture.merge.request_ids import client_id
from specdecode_operator.capture.merge.scratch import scratch_database
from specdecode_operator.capture.merge.whole_engine import WholeEngine
from specdecode_operator.capture.recorder.lines import Request, Step

_REQUEST: Final = msgspec.json.Decoder(Request)
_STEP: Final = msgspec.json.Decoder(Step)
_CLIENT: Final = msgspec.json.Decoder(ClientRecord)
_ENCODER: Final = msgspec.json.Encoder()

_REQUEST_TABLE: Final = "CREATE TABLE requests (client TEXT, has_tokens INTEGER, moment_s REAL, line BLOB)"
_CLIENT_TABLE: Final = "CREATE TABLE clients (id TEXT PRIMARY KEY, line BLOB)"
_STEP_TABLE: Final = "CREATE TABLE steps (stamp_s REAL, line BLOB)"
# Lines come nearly in these orders, so an index mostly grows at its end.
_REQUEST_INDEX: Final = "CREATE INDEX in_order ON requests (has_tokens, moment_s, client)"
_STEP_INDEX: Final = "CREATE INDEX in_order ON steps (stamp_s)"

_JOINED: Final = """
    SELECT requests.line, clients.line FROM requests LEFT JOIN clients ON clients.id = requests.client
    WHERE has_tokens = ? ORDER BY moment_s, client, requests.rowid
"""
_STEPS: Final = "SELECT stamp_s, line FROM steps ORDER BY stamp_s, rowid"


@dataclass(frozen=True)
class Merged:
    """What went into the files, and what did not."""

    records: int  # lines of the trace, without its first
    aborted: int  # requests that produced no token
    steps: int
    warmup_records: int
    steps_without_stats: int  # messages whose statistics another API server got
    torn: tuple[Torn, ...]


def merge(folder: Path, meta: TraceMeta, zero_monotonic_s: float) -> Merged:
    """Write ``.part`` files of trace, step statistics and aborted requests from an attempt's segments.

    The attempt's folder holds ``segments`` and ``client.jsonl.part``; ``meta`` becomes the first line of the trace.

    Raises
    ------
    CaptureError
        When a line of a segment or of the client cannot be read.
    OSError
        When the volume is full or fails.
    """
    merging = _Merge(folder, Clock(zero_monotonic_s))
    with scratch_database(folder, "steps") as steps:
        # Closed before the steps are written: the volume holds the segments too.
        with scratch_database(folder, "requests") as requests:
            merging.read_segments(requests, steps)
            merging.read_client(requests)
            records = merging.write_trace(requests, meta)
            aborted = merging.write_aborted(requests)
        step_count = merging.write_steps(steps)
    return Merged(records, aborted, step_count, merging.warmup, merging.without_stats, tuple(merging.torn))


class _Merge:
    """One merge and what it counts."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.torn: list[Torn] = []
        self.without_stats = 0
        self.warmup = 0
        self._folder = folder
        self._clock = clock
        self._first_arrival_s = float("inf")
        self._whole: WholeEngine | None = None

    def read_segments(self, requests: sqlite3.Connection, steps: sqlite3.Connection) -> None:
        for statement in (_REQUEST_TABLE, _REQUEST_INDEX):
            requests.execute(statement)
        for statement in (_STEP_TABLE, _STEP_INDEX):
            steps.execute(statement)
        segments = list_segments(self._folder / FOLDER)
        whole = WholeEngine() if any(each.header.client_count > 1 for each in segments) else None
        for number, segment in enumerate(segments):
            request_count = step_count = 0
            for line in read_segment(segment.path, self.torn.append):
                if isinstance(line, Request):
                    request_count += 1
                    _add_request(requests, line)
                    if whole:
                        whole.add_request(line)
                elif isinstance(line, Step):
                    step_count += 1
                    self._add_step(steps, line)
                    if whole:
                        whole.add_step(number, line)
            _check_counts(segment, request_count, step_count)
        if whole:
            whole.freeze()
        self._whole = whole

    def _add_step(self, steps: sqlite3.Connection, step: Step) -> None:
        if step.scheduler is None:
            self.without_stats += 1
        else:
            steps.execute("INSERT INTO steps VALUES (?, ?)", (step.t, _ENCODER.encode(step)))

    def read_client(self, requests: sqlite3.Connection) -> None:
        requests.execute(_CLIENT_TABLE)
        for client, line in read_client(self._folder / f"{CLIENT}{PART_SUFFIX}"):
            # Accounting tells of an id that comes twice.
            requests.execute("INSERT OR IGNORE INTO clients VALUES (?, ?)", (client.id, line))

    def write_trace(self, requests: sqlite3.Connection, meta: TraceMeta) -> int:
        def line(request: Request, client: ClientRecord | None) -> bytes:
            return encode(trace_record(request, client, self._clock, self._whole))

        return self._write(TRACE, self._joined(requests, line, has_tokens=True), first=encode_meta(meta))

    def write_aborted(self, requests: sqlite3.Connection) -> int:
        def line(request: Request, client: ClientRecord | None) -> bytes:
            return encode(aborted_record(request, client, self._clock))

        aborted = self._write(ABORTED, self._joined(requests, line, has_tokens=False))
        if not aborted:
            (self._folder / f"{ABORTED}{PART_SUFFIX}").unlink()
        return aborted

    def _joined(
        self,
        requests: sqlite3.Connection,
        to_line: Callable[[Request, ClientRecord | None], bytes],
        *,
        has_tokens: bool,
    ) -> Iterator[bytes]:
        for request_line, client_line in requests.execute(_JOINED, (has_tokens,)):
            request = _REQUEST.decode(request_line)
            client = None if client_line is None else _CLIENT.decode(client_line)
            if client is not None and client.warmup:
                self.warmup += 1
                continue
            self._first_arrival_s = min(self._first_arrival_s, request.arrival_monotonic_s)
            yield to_line(request, client)

    def write_steps(self, steps: sqlite3.Connection) -> int:
        """Write the steps; the requests come first, which say when the first of them arrived."""
        return self._write(STEP_STATS, self._step_lines(steps))

    def _step_lines(self, steps: sqlite3.Connection) -> Iterator[bytes]:
        for stamp_s, line in steps.execute(_STEPS):
            step = _STEP.decode(line)
            if stamp_s >= self._first_arrival_s and step.scheduler is not None:
                yield encode(step_stats(step, step.scheduler, self._clock))

    def _write(self, name: str, lines: Iterator[bytes], first: bytes | None = None) -> int:
        count = 0
        with (self._folder / f"{name}{PART_SUFFIX}").open("wb") as stream:
            if first is not None:
                stream.write(first + b"\n")
            for line in lines:
                stream.write(line + b"\n")
                count += 1
        return count


def _add_request(requests: sqlite3.Connection, request: Request) -> None:
    # What orders the lines of the file that it goes to.
    moment_s = request.chunk_s[-1] if has_tokens(request) else request.arrival_monotonic_s
    row = (client_id(request.external_id or request.id), has_tokens(request), moment_s, _ENCODER.encode(request))
    requests.execute("INSERT INTO requests VALUES (?, ?, ?, ?)", row)


def _check_counts(segment: Segment, requests: int, steps: int) -> None:
    closed = segment.closed
    if closed is not None and (closed.requests, closed.steps) != (requests, steps):
        raise CaptureError(
            "SegmentIncomplete",
            f"{segment.path.name} holds {requests} requests and {steps} steps, but its recorder wrote"
            f" {closed.requests} and {closed.steps}: the volume lost some",
        )


def read_client(path: Path) -> Iterator[tuple[ClientRecord, bytes]]:
    """Return the load generator's lines, decoded and as they are.

    Raises
    ------
    CaptureError
        When a line cannot be read.
    """
    for line in read_lines(path):
        try:
            yield _CLIENT.decode(line.text), line.text
        except msgspec.DecodeError as error:
            raise CaptureError("ClientRecordUnreadable", f"{path.name}, line {line.number}: {error}") from error
