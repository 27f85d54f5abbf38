"""Merge the segments of the recorders and the load generator's log, if any, into the files of a capture.

SQLite sorts and joins everything in tables on the volume, so memory does not grow with the capture:

1. Requests of all segments are joined with the client's line of their id, which gives each its phase and leaves out
   warm-up requests. Requests with tokens are sorted by the engine's timestamp of the last chunk, the order in which
   they finished.
2. Steps of all engines are sorted by the engine's timestamp. Steps before the first measured request are left out.

An index is created before its table is filled. Otherwise SQLite sorts in /var/tmp or /tmp, which is the node's
storage.

A live capture has no client, so every recorded request and step is measured. Its segments come from several hosts, and
each line is first put on the clock of the capture (``live.Placement``).

With several API servers, one step of an engine yields one message per API server, with the requests of that server
only, microseconds apart, and the step's statistics go to one of them. Messages of one engine that are closer than
half of its shortest step count as one step. This takes about 40 bytes per step and request.
"""

import errno
import sqlite3
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import quote

import msgspec

from specdecode_operator.capture.files.config_hash import gpu_label, header_hash
from specdecode_operator.capture.files.formats import (
    ABORTED,
    CLIENT,
    MANIFEST_SCHEMA,
    PART_SUFFIX,
    STEP_STATS,
    TRACE,
    AbortedRecord,
    CaptureError,
    ClientRecord,
    FinishReason,
    ItlContext,
    StepStats,
    TraceMeta,
    TraceRecord,
    encode,
    encode_meta,
    read_lines,
)
from specdecode_operator.capture.files.live import ALL_PERCENT, Placement, Recorded
from specdecode_operator.capture.files.segments import FOLDER, Segment, Torn, list_segments, read_segment
from specdecode_operator.capture.recorder.segment_format import Header, Request, Step

CACHE_KIB: Final = 8 * 1024
"""Size of SQLite's page cache."""

SCRATCH_SUFFIX: Final = ".scratch"


@contextmanager
def scratch_database(folder: Path, name: str, *tables: str) -> Iterator[sqlite3.Connection]:
    """Open a database with tables and indexes in a folder; its file is deleted at the end.

    Raises
    ------
    OSError
        If the volume is full or fails.
    """
    path = folder / f"{name}{SCRATCH_SUFFIX}"
    path.unlink(missing_ok=True)  # of a merge that was killed
    # No other process opens it, so it needs no locks, which some network file systems lack. It is never read after a
    # crash, so it needs no journal: all is one transaction without a commit.
    uri = f"file:{quote(str(path))}?vfs=unix-none"
    try:
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as database:
            for setting in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{CACHE_KIB}"):
                database.execute(f"PRAGMA {setting}")
            for statement in ("BEGIN", *tables):
                database.execute(statement)
            yield database
    except sqlite3.Error as error:
        full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from error
    finally:
        path.unlink(missing_ok=True)


def client_id(external_id: str) -> str:
    """Return the X-Request-Id behind an engine's external id.

    ``cmpl-X-0`` is prompt 0 of the completion that came with X (entrypoints/openai/completion/serving.py), and
    ``chatcmpl-X`` a chat. The n answers to one prompt share the external id; only their internal ids differ
    (``0_cmpl-X-0-1f2e3d4c``, ``1_cmpl-X-0-...``; v1/engine/parallel_sampling.py and input_processor.py).
    """
    if external_id.startswith("chatcmpl-"):
        return external_id.removeprefix("chatcmpl-")
    name, _, prompt = external_id.removeprefix("cmpl-").rpartition("-")
    return name if external_id.startswith("cmpl-") and name and prompt.isdigit() else external_id


_SHORTEST_STEP_S: Final = 1e-4
"""Shorter gaps between two stamps of one API server are not a step of a model."""


class _Samples:
    """Numbers by time, added in any order."""

    def __init__(self) -> None:
        self.times = array("d")
        self.values = array("Q")

    def add(self, time_s: float, value: int) -> None:
        self.times.append(time_s)
        self.values.append(value)

    def sort(self) -> None:
        order = sorted(range(len(self.times)), key=self.times.__getitem__)
        self.times = array("d", (self.times[i] for i in order))
        self.values = array("Q", (self.values[i] for i in order))


class WholeEngine:
    """Collects steps and requests of all API servers, then answers for one instant of one engine.

    If only a sample of the requests is recorded (`sampled`), it cannot count requests, and returns None for them.
    """

    def __init__(self, *, sampled: bool = False) -> None:
        self._sampled = sampled
        self._running: defaultdict[int, _Samples] = defaultdict(_Samples)
        self._prefills: defaultdict[int, _Samples] = defaultdict(_Samples)
        self._shortest_s: dict[int, float] = {}
        self._last_stamp_s: dict[tuple[int, int], float] = {}
        self._arrivals_s = array("d")
        self._ends_s = array("d")

    def add_step(self, segment: int, step: Step) -> None:
        """Add a step that the API server of one segment saw."""
        if (before_s := self._last_stamp_s.get((segment, step.engine))) is not None:
            self._shorten(step.engine, step.t - before_s)
        self._last_stamp_s[segment, step.engine] = step.t
        if step.scheduler is not None:
            self._running[step.engine].add(step.t, int(step.scheduler.get("num_running_reqs", 0)))

    def add_request(self, request: Request) -> None:
        """Add a request of any API server."""
        if not request.chunk_s:
            return  # its end is not known: it would count as in flight for ever
        self._arrivals_s.append(request.arrival_monotonic_s)
        self._ends_s.append(request.chunk_s[-1])
        engine = request.engine or 0
        self._prefills[engine].add(request.chunk_s[0], request.prompt_tokens)
        for before_s, after_s in pairwise(request.chunk_s):
            self._shorten(engine, after_s - before_s)

    def _shorten(self, engine: int, gap_s: float) -> None:
        if _SHORTEST_STEP_S < gap_s < self._shortest_s.get(engine, float("inf")):
            self._shortest_s[engine] = gap_s

    def freeze(self) -> None:
        """Sort the samples and sum up prefills; the methods below need it."""
        self._arrivals_s = array("d", sorted(self._arrivals_s))
        self._ends_s = array("d", sorted(self._ends_s))
        for samples in (*self._running.values(), *self._prefills.values()):
            samples.sort()
        for samples in self._prefills.values():
            samples.values = array("Q", accumulate(samples.values, initial=0))

    def concurrency(self, arrival_s: float) -> int | None:
        """Return the requests in flight at an instant, those that arrive in it included."""
        if self._sampled:
            return None
        return bisect_right(self._arrivals_s, arrival_s) - bisect_right(self._ends_s, arrival_s)

    def num_running(self, engine: int, stamp_s: float) -> int | None:
        """Return the requests that ran after the step with this stamp; None without its statistics."""
        samples = self._running.get(engine, _Samples())
        first, end = self._step(engine, samples.times, stamp_s)
        return int(samples.values[first]) if first < end else None

    def prefill_tokens(self, engine: int, stamp_s: float) -> int | None:
        """Return the prompt lengths of all requests whose first token came in the step with this stamp."""
        if self._sampled:
            return None
        samples = self._prefills.get(engine)
        if samples is None:
            return 0
        first, end = self._step(engine, samples.times, stamp_s)
        return int(samples.values[end] - samples.values[first])

    def _step(self, engine: int, times: "array[float]", stamp_s: float) -> tuple[int, int]:
        half_s = self._shortest_s.get(engine, _SHORTEST_STEP_S) / 2
        return bisect_left(times, stamp_s - half_s), bisect_right(times, stamp_s + half_s)


_DIGITS: Final = 4
"""Decimal digits of a millisecond: a tenth of a microsecond, less than the precision of an engine's stamp."""
_OLDER_READERS: Final[dict[str, Any]] = {
    "encoder_cache_usage": 0.0,
    "waiting_lora_adapters": {},
    "running_lora_adapters": {},
}
"""Fields that vllm-vcr builds for older engines require and vLLM 0.32 does not have."""


@dataclass(frozen=True)
class Clock:
    """Turns an engine's stamps into milliseconds since the run's zero."""

    zero_s: float  # by CLOCK_MONOTONIC

    def ms(self, stamp_s: float) -> float:
        """Return a stamp in milliseconds."""
        return round((stamp_s - self.zero_s) * 1000, _DIGITS)

    def ms_or_none(self, stamp_s: float | None) -> float | None:
        """Return a stamp in milliseconds, if it is known."""
        return None if stamp_s is None else self.ms(stamp_s)


def trace_record(
    request: Request, client: ClientRecord | None, clock: Clock, whole: WholeEngine | None = None
) -> TraceRecord:
    """Return the trace's line of a request that has tokens; `whole` is needed if API servers share engines."""
    # A message without tokens, such as one that only says that a request ended, is not a chunk.
    kept = [index for index, count in enumerate(request.chunk_tokens) if count]
    stamps_s = [request.chunk_s[index] for index in kept]
    tokens = [request.chunk_tokens[index] for index in kept]
    running = [request.num_running[index] for index in kept]
    prefill = [request.prefill_tokens[index] for index in kept]
    arrival_s, concurrency = request.arrival_monotonic_s, request.concurrency
    if whole is not None:
        engine = request.engine or 0
        running = [_known(whole.num_running(engine, at_s), own) for at_s, own in zip(stamps_s, running, strict=True)]
        prefill = [_known(whole.prefill_tokens(engine, at_s), own) for at_s, own in zip(stamps_s, prefill, strict=True)]
        concurrency = _known(whole.concurrency(arrival_s), concurrency)
    gaps_ms = [round((after_s - before_s) * 1000, _DIGITS) for before_s, after_s in pairwise([arrival_s, *stamps_s])]
    return TraceRecord(
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens or 0,
        output_tokens=sum(tokens),
        ttft_ms=gaps_ms[0],
        itl_ms=gaps_ms[1:],
        itl_tokens=tokens[1:] if any(count != 1 for count in tokens[1:]) else None,
        concurrency=max(1, concurrency),
        itl_ctx=ItlContext(num_running=[max(1, each) for each in running[1:]], prefill_tokens=prefill[1:]),
        block_hashes=request.block_hashes or None,
        output_token_ids=request.token_ids,
        finish_reason=cast("FinishReason | None", request.finish_reason),
        temperature=request.temperature,
        preemptions=request.preemptions,
        kept_tokens=request.kept_tokens,
        client_ttft_ms=client.ttft_ms if client else None,
        prompt_token_ids=request.prompt_token_ids,
        **_identity(request, client, clock),
    )


def _known(found: int | None, own: int) -> int:
    return own if found is None else found


def aborted_record(request: Request, client: ClientRecord | None, clock: Clock) -> AbortedRecord:
    """Return the line of a request that ended without a token."""
    return AbortedRecord(
        prompt_tokens=request.prompt_tokens,
        finish_reason=request.finish_reason,
        **_identity(request, client, clock),
    )


def step_stats(step: Step, clock: Clock) -> StepStats | None:
    """Return the statistics line of a step; None if another API server of the engine got the statistics."""
    if step.scheduler is None:
        return None
    details = step.scheduler.get("iteration_details")
    return StepStats(
        ts_ms=clock.ms(step.t),
        scheduler=_OLDER_READERS | step.scheduler,
        engine=step.engine,
        duration_ms=details.get("elapsed_ms") if isinstance(details, dict) else None,
    )


def trace_meta(header: Header) -> TraceMeta:
    """Return the first line of a trace, with the fields that a segment's header contains."""
    speculative = header.config.speculative
    return TraceMeta(
        model=header.model,
        gpu=gpu_label(header.gpu),
        tp=header.config.tensor_parallel,
        max_num_seqs=header.config.max_num_seqs,
        source="specdecode-operator",
        block_size=header.config.block_size,
        config_hash=header_hash(header),
        vllm_version=header.vllm,
        schema=MANIFEST_SCHEMA,
        speculative=msgspec.to_builtins(speculative) if speculative else None,
        sample_percent=None if header.sample_percent == ALL_PERCENT else header.sample_percent,
    )


def _identity(request: Request, client: ClientRecord | None, clock: Clock) -> dict[str, Any]:
    """Return the fields that both kinds of lines have in common."""
    return {
        "request_id": client.id if client else client_id(request.external_id or request.id),
        "engine": request.engine,
        "phase": client.phase if client else None,
        "arrival_ms": clock.ms(request.arrival_monotonic_s),
        "queued_ms": clock.ms_or_none(request.queued_s),
        "scheduled_ms": clock.ms_or_none(request.scheduled_s),
        "ended_by": request.ended_by,
        "stop_reason": request.stop_reason,
    }


_REQUEST: Final = msgspec.json.Decoder(Request)
_STEP: Final = msgspec.json.Decoder(Step)
_CLIENT: Final = msgspec.json.Decoder(ClientRecord)
_ENCODER: Final = msgspec.json.Encoder()

# Lines come nearly in the order of the index, so it mostly grows at its end.
_REQUEST_TABLES: Final = (
    "CREATE TABLE requests (client TEXT, has_tokens INTEGER, moment_s REAL, line BLOB)",
    "CREATE INDEX in_order ON requests (has_tokens, moment_s, client)",
    "CREATE TABLE clients (id TEXT PRIMARY KEY, line BLOB)",
)
_STEP_TABLES: Final = (
    "CREATE TABLE steps (stamp_s REAL, line BLOB)",
    "CREATE INDEX in_order ON steps (stamp_s)",
)
_JOINED: Final = """
    SELECT requests.line, clients.line FROM requests LEFT JOIN clients ON clients.id = requests.client
    WHERE has_tokens = ? ORDER BY moment_s, client, requests.rowid
"""
_STEPS: Final = "SELECT stamp_s, line FROM steps ORDER BY stamp_s, rowid"


@dataclass(frozen=True)
class Merged:
    """Number of lines in the files, and of those left out."""

    records: int  # lines of the trace, without its first
    aborted: int  # requests that produced no token
    steps: int
    warmup_records: int
    steps_without_stats: int  # messages whose statistics another API server got
    torn: tuple[Torn, ...]


def merge(folder: Path, meta: TraceMeta, zero_monotonic_s: float, live: Recorded | None = None) -> Merged:
    """Write ``.part`` files of trace, step statistics and aborted requests from an attempt's segments.

    The attempt's folder holds ``segments`` and, except for a live capture, ``client.jsonl.part``; ``meta`` becomes the
    first line of the trace. The segments of a live capture are put on its own clock, so its zero is not needed.

    Raises
    ------
    CaptureError
        If a line of a segment or of the client cannot be read.
    OSError
        If the volume is full or fails.
    """
    merging = _Merge(folder, Clock(0.0 if live else zero_monotonic_s), live)
    with scratch_database(folder, "steps", *_STEP_TABLES) as steps:
        # Closed before the steps are written: the volume holds the segments too.
        with scratch_database(folder, "requests", *_REQUEST_TABLES) as requests:
            merging.read_segments(requests, steps)
            for client, line in () if live else read_client(folder / f"{CLIENT}{PART_SUFFIX}"):
                # Accounting reports a duplicate id.
                requests.execute("INSERT OR IGNORE INTO clients VALUES (?, ?)", (client.id, line))
            records = merging.write_trace(requests, meta)
            aborted = merging.write_aborted(requests)
        step_count = merging.write_steps(steps)
    return Merged(records, aborted, step_count, merging.warmup, merging.without_stats, tuple(merging.torn))


class _Merge:
    """One merge and its counts."""

    def __init__(self, folder: Path, clock: Clock, live: Recorded | None) -> None:
        self.torn: list[Torn] = []
        self.without_stats = 0
        self.warmup = 0
        self._folder = folder
        self._clock = clock
        self._live = live
        # Every step of a live capture counts, as vLLM's own counters do: the first ones serve older requests.
        self._first_arrival_s = float("-inf" if live else "inf")
        self._shared: dict[str, WholeEngine] = {}  # by pod, if several API servers share its engines
        self._pods: dict[int, str] = {}  # of the engines

    def read_segments(self, requests: sqlite3.Connection, steps: sqlite3.Connection) -> None:
        segments = list_segments(self._folder / FOLDER)
        self._share(segments)
        for number, segment in enumerate(segments):
            counts: Counter[type] = Counter()
            placement = self._placement(segment)
            whole = self._shared.get(placement.pod if placement else "")
            for found in read_segment(segment.path, self.torn.append):
                line = found if placement is None else placement.place(found)
                counts[type(line)] += 1
                if isinstance(line, Request):
                    _insert_request(requests, line)
                    if whole:
                        whole.add_request(line)
                elif isinstance(line, Step):
                    self._insert_step(steps, line)
                    if whole:
                        whole.add_step(number, line)
            _check_counts(segment, counts[Request], counts[Step])
        for each in self._shared.values():
            each.freeze()

    def _share(self, segments: list[Segment]) -> None:
        """Find the pods whose engines are shared by several API servers."""
        sampled = self._live is not None and self._live.sample_percent < ALL_PERCENT
        for segment in segments:
            placement = self._placement(segment)
            if placement is not None:
                self._pods |= dict.fromkeys(placement.engines.values(), placement.pod)
            if segment.header.client_count > 1:
                self._shared.setdefault(placement.pod if placement else "", WholeEngine(sampled=sampled))

    def _insert_step(self, steps: sqlite3.Connection, line: Step) -> None:
        if line.scheduler is None:
            self.without_stats += 1
        else:
            steps.execute("INSERT INTO steps VALUES (?, ?)", (line.t, _ENCODER.encode(line)))

    def _placement(self, segment: Segment) -> Placement | None:
        return None if self._live is None else self._live.placements[segment.path.name]

    def _whole_of(self, request: Request) -> WholeEngine | None:
        return self._shared.get(self._pods.get(request.engine or 0, ""))

    def write_trace(self, requests: sqlite3.Connection, meta: TraceMeta) -> int:
        joined = self._joined(requests, has_tokens=True)
        lines = (
            encode(trace_record(request, client, self._clock, self._whole_of(request))) for request, client in joined
        )
        return self._write(TRACE, lines, first=encode_meta(meta))

    def write_aborted(self, requests: sqlite3.Connection) -> int:
        joined = self._joined(requests, has_tokens=False)
        aborted = self._write(ABORTED, (encode(aborted_record(*each, self._clock)) for each in joined))
        if not aborted:
            (self._folder / f"{ABORTED}{PART_SUFFIX}").unlink()
        return aborted

    def _joined(
        self, requests: sqlite3.Connection, *, has_tokens: bool
    ) -> Iterator[tuple[Request, ClientRecord | None]]:
        for request_line, client_line in requests.execute(_JOINED, (has_tokens,)):
            request = _REQUEST.decode(request_line)
            client = None if client_line is None else _CLIENT.decode(client_line)
            if client is not None and client.warmup:
                self.warmup += 1
                continue
            self._first_arrival_s = min(self._first_arrival_s, request.arrival_monotonic_s)
            yield request, client

    def write_steps(self, steps: sqlite3.Connection) -> int:
        """Write the steps since the first arrival, which is known when the requests are written."""
        return self._write(STEP_STATS, map(encode, self._steps(steps)))

    def _steps(self, steps: sqlite3.Connection) -> Iterator[StepStats]:
        for stamp_s, line in steps.execute(_STEPS):
            step = _STEP.decode(line)
            if stamp_s >= self._first_arrival_s and (stats := step_stats(step, self._clock)) is not None:
                yield stats

    def _write(self, name: str, lines: Iterator[bytes], first: bytes | None = None) -> int:
        count = 0
        with (self._folder / f"{name}{PART_SUFFIX}").open("wb") as stream:
            if first is not None:
                stream.write(first + b"\n")
            for line in lines:
                stream.write(line + b"\n")
                count += 1
        return count


def _insert_request(requests: sqlite3.Connection, line: Request) -> None:
    has_tokens = any(line.chunk_tokens)
    # The sort key of the file that it goes to.
    key_s = line.chunk_s[-1] if has_tokens else line.arrival_monotonic_s
    row = (client_id(line.external_id or line.id), has_tokens, key_s, _ENCODER.encode(line))
    requests.execute("INSERT INTO requests VALUES (?, ?, ?, ?)", row)


def _check_counts(segment: Segment, requests: int, steps: int) -> None:
    closed = segment.closed
    if closed is not None and (closed.requests, closed.steps) != (requests, steps):
        raise CaptureError(
            "SegmentIncomplete",
            f"{segment.path.name} holds {requests} requests and {steps} steps, but its recorder wrote"
            f" {closed.requests} and {closed.steps}: the volume lost the rest",
        )


def read_client(path: Path) -> Iterator[tuple[ClientRecord, bytes]]:
    """Yield the load generator's lines, decoded and raw; a line that cannot be read is a CaptureError."""
    for line in read_lines(path):
        try:
            yield _CLIENT.decode(line.text), line.text
        except msgspec.DecodeError as error:
            raise CaptureError("ClientRecordUnreadable", f"{path.name}, line {line.number}: {error}") from error
