"""Encode samples, and append them to the segment of one API server, in a thread.

A segment is a file, or the connection of a live capture. A file is append-only and contains whole lines only.
"""

import errno
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from .block_hashes import block_hashes, salted_block_hashes
from .collector import BoundedQueue, Collector, RequestSample, Sample, StepSample
from .salting import Salt, http_request
from .segment_format import (
    DISK_FULL,
    LONGEST_LINE_BYTES,
    STOP_STRING,
    STOP_TOKEN,
    UNKNOWN_SHAPE,
    WRITE_ERROR,
    Anchor,
    Closed,
    Header,
    Off,
    Request,
    Step,
    encode,
)

RESERVE_BYTES = 16 * 1024  # reserved on the disk, so that a full one still has room for the last lines
_FULL = {errno.ENOSPC, errno.EDQUOT}


class SegmentWriteError(Exception):
    """The disk did not accept a write."""

    def __init__(self, cause: OSError, written: int = 0) -> None:
        super().__init__(str(cause))
        self.written = written  # lines that are in the file
        self.is_full = cause.errno in _FULL


class Sink(Protocol):
    """Destination of the lines; the methods raise SegmentWriteError."""

    def append(self, lines: Sequence[bytes]) -> None:
        """Write lines, in order."""

    def sync(self) -> None:
        """Make written lines durable."""

    def close(self, last_lines: Sequence[bytes]) -> None:
        """Write the last lines, and close."""


def whole_lines(lines: Sequence[bytes], written_bytes: int) -> tuple[int, int]:
    """Return the number of lines that are completely among the first bytes, and their length in bytes."""
    whole = length = 0
    for line in lines:
        if length + len(line) > written_bytes:
            break
        length += len(line)
        whole += 1
    return whole, length


class Segment:
    """A new segment file, next to its reserve."""

    def __init__(self, path: Path) -> None:
        """Create both; fail if one exists."""
        self.path = path
        self._reserve = path.with_suffix(".reserve")
        self._length = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.fchmod(self._file, 0o644)  # for the load generator, another user, despite the engine's umask
        reserve = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

        def hold_back() -> None:
            os.write(reserve, os.urandom(RESERVE_BYTES))  # a compressing file system would reserve nothing for zeros
            os.fsync(reserve)

        _unless_full(hold_back, reserve)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        _unless_full(lambda: os.fsync(folder), folder)  # for the names of both files

    def append(self, lines: Sequence[bytes]) -> None:
        """Write lines; on a disk error, keep only whole ones and raise SegmentWriteError."""
        left = memoryview(b"".join(lines))
        total = len(left)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            raise SegmentWriteError(error, self._drop_torn_line(lines, total - len(left))) from error
        self._length += total

    def _drop_torn_line(self, lines: Sequence[bytes], written_bytes: int) -> int:
        """Truncate a partial line; return the number of whole lines before it."""
        whole, length = whole_lines(lines, written_bytes)
        self._length += length
        with suppress(OSError):  # a reader skips a torn end
            os.ftruncate(self._file, self._length)
        return whole

    def sync(self) -> None:
        """Flush to disk; some file systems report only here that they are full."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise SegmentWriteError(error) from error

    def close(self, last_lines: Sequence[bytes]) -> None:
        """Free the reserve, write the last lines, and close."""
        with suppress(OSError):
            self._reserve.unlink()
        try:
            self.append(last_lines)
            self.sync()
        finally:
            os.close(self._file)


def _unless_full(step: Callable[[], object], file: int) -> None:
    """Run a step and close a file. The first lines report a full disk."""
    try:
        step()
    except OSError as error:
        if error.errno not in _FULL:
            raise
    finally:
        os.close(file)


ANCHOR_EVERY_S = 10.0
LIVE_ANCHOR_EVERY_S = 1.0  # for the progress that the collector shows
SYNC_EVERY_S = 5.0
_LINES_AT_ONCE = 256
_BATCHES_A_TURN = 16
_WORK_S = 0.0001
_PAUSE_S = 0.0001


class Pace:
    """Makes a busy thread yield every 0.1 ms.

    A computing thread holds the GIL for 5 ms at a time, and would delay a message of the engine by as much. With this
    the delay is 0.1 ms.
    """

    def __init__(self) -> None:
        self.is_relaxed = True  # False at the end, when there is nothing to yield to
        self._since_s = time.perf_counter()

    def pause(self) -> None:
        """Sleep after enough work."""
        if self.is_relaxed and time.perf_counter() - self._since_s > _WORK_S:
            time.sleep(_PAUSE_S)
            self._since_s = time.perf_counter()

    def begin(self) -> None:
        """Restart the clock after a longer rest."""
        self._since_s = time.perf_counter()


class Writer:
    """Writes the queue to the segment."""

    def __init__(  # noqa: PLR0913 (parts of a recorder)
        self,
        segment: Sink,
        collector: Collector,
        queue: BoundedQueue,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        live: "LiveLines | None" = None,
    ) -> None:
        """Prepare to write; ``live`` protects the traffic of users."""
        self.closed_as: str | None = None  # reason in the last line, once that is written
        self._segment = segment
        self._collector = collector
        self._queue = queue
        self._block_size = block_size
        self._clock = clock
        self._live = live
        self._pace = Pace()
        self._anchored_s = self._synced_s = clock()
        self._has_ended = False
        self._unfinished: deque[Sample] = deque()
        self._unfinished_requests = 0
        self._requests = self._steps = self._lost = 0

    @property
    def is_closed(self) -> bool:
        """Whether the last line is written."""
        return self.closed_as is not None

    def begin(self, header: Header, *more: msgspec.Struct) -> None:
        """Write the first lines."""
        self._guarded(lambda: self._segment.append([encode(line) for line in (header, *more)]))

    def turn(self) -> None:
        """Write queued samples, anchor and sync when due; close on a disk error."""
        self._pace.begin()
        self._guarded(self._take_turn)
        if self._collector.is_broken:
            self.turn_off(UNKNOWN_SHAPE, f"the hooks failed: {self._collector.first_error}")

    def close(self, reason: str) -> None:
        """End recording; write queued samples, unfinished requests and the last line."""
        self._end_recording()
        self._guarded(self._write_rest)
        self._write_last([], reason)

    def turn_off(self, reason: str, because: str) -> None:
        """End recording with a line that has the reason, and drop queued samples."""
        self._end_recording()
        self._write_last([Off(because)], reason)

    def _guarded(self, write: Callable[[], None]) -> None:
        """Write, and close the segment on a disk error."""
        try:
            write()
        except SegmentWriteError as error:
            if error.is_full:
                self._end_recording()
                self._write_last([], DISK_FULL)
            else:
                self.turn_off(WRITE_ERROR, str(error))

    def _end_recording(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._pace.is_relaxed = False
            self._unfinished.extend(self._collector.close())
            self._unfinished_requests = len(self._unfinished)

    def _take_turn(self) -> None:
        self._drain(_BATCHES_A_TURN)
        now_s = self._clock()
        if now_s - self._anchored_s >= (ANCHOR_EVERY_S if self._live is None else LIVE_ANCHOR_EVERY_S):
            self._segment.append([self._anchor()])
            self._anchored_s = now_s
        if now_s - self._synced_s >= SYNC_EVERY_S:
            self._segment.sync()
            self._synced_s = now_s

    def _write_rest(self) -> None:
        self._drain()
        self._segment.append([self._anchor()])

    def _anchor(self) -> bytes:
        """Return a line with both clocks, read as close together as possible."""
        so_far = self._live.so_far() if self._live else ()
        before_s = time.monotonic()
        wall_s = time.time()
        return encode(Anchor((before_s + time.monotonic()) / 2, wall_s, *so_far))

    def _write_last(self, lines: list[Off], reason: str) -> None:
        if self.is_closed:
            return
        errors = self._collector.errors
        waiting = len(self._queue) + len(self._unfinished)
        closed = Closed(
            reason=reason,
            requests=self._requests,
            steps=self._steps,
            dropped=self._lost + waiting + self._queue.dropped + errors,
            unfinished=self._unfinished_requests,
            errors=errors,
            first_error=self._collector.first_error,
        )
        self.closed_as = reason
        more = self._live.ending(self._requests) if self._live else ()
        # If even these cannot be written, the missing last line shows it.
        with suppress(SegmentWriteError):
            self._segment.close([encode(line) for line in (*lines, *more, closed)])

    def _drain(self, most_batches: int | None = None) -> None:
        samples: list[Sample] = []
        batches = 0
        while batches != most_batches:
            sample = self._queue.get()
            if sample is None and self._unfinished:
                sample = self._unfinished.popleft()
            if sample is not None:
                samples.append(sample)
            if samples and (sample is None or len(samples) == _LINES_AT_ONCE):
                self._write(samples)
                samples = []
                batches += 1
            elif sample is None:
                return

    def _write(self, samples: list[Sample]) -> None:
        kinds: list[type] = []
        lines: list[bytes] = []
        for sample in samples:
            try:
                line = self._line(sample)
            except Exception as error:  # noqa: BLE001 (connector statistics hold anything)
                self._collector.fail(error)
                continue
            if self._live is not None and len(line) > LONGEST_LINE_BYTES:
                self._lost += 1  # the collector would end the connection
                continue
            lines.append(line)
            kinds.append(type(sample))
            self._pace.pause()
        written = 0
        try:
            self._segment.append(lines)
            written = len(lines)
        except SegmentWriteError as error:
            written = error.written
            raise
        finally:
            steps = kinds[:written].count(StepSample)
            self._lost += len(lines) - written
            self._steps += steps
            self._requests += written - steps

    def _line(self, sample: Sample) -> bytes:
        if isinstance(sample, StepSample):
            return encode(Step(sample.engine, sample.monotonic_s, sample.scheduler_stats))
        if self._live is not None:
            return encode(self._live.request(sample, self._block_size, self._pace.pause))
        hashes = block_hashes(sample.prompt_token_ids, self._block_size, self._pace.pause)
        return encode(_request(sample, hashes))


@dataclass(frozen=True)
class LiveLines:
    """Lines of a live capture, without text that users wrote."""

    salt: Salt
    prompt_token_ids: bool
    ending: Callable[[int], Sequence[msgspec.Struct]]  # lines before the last, given the number of request lines
    so_far: Callable[[], tuple[int, int]]  # requests admitted, and those sampled out

    def request(self, sample: RequestSample, block_size: int, pause: Callable[[], None]) -> Request:
        """Return the line of a request."""
        hashes = salted_block_hashes(sample.prompt_token_ids, block_size, pause, self.salt.key)
        prompt = {"prompt_token_ids": sample.prompt_token_ids.tolist()} if self.prompt_token_ids else {}
        return _request(
            sample,
            hashes,
            id=self.salt.pseudonym(sample.id),
            external_id=self.salt.pseudonym(http_request(sample.id, sample.external_id)),
            stop_reason=_without_content(sample),
            **prompt,
        )


def _without_content(sample: RequestSample) -> int | str | None:
    """Return the stop reason without text, and without a token id if those are not recorded."""
    if isinstance(sample.stop_reason, str):
        return STOP_STRING
    # Clients may list the answers that they expect as stop tokens.
    return STOP_TOKEN if isinstance(sample.stop_reason, int) and sample.token_ids is None else sample.stop_reason


_COMPUTED_FIELDS = {"chunk_s", "chunk_tokens", "num_running", "prefill_tokens", "block_hashes", "prompt_token_ids"}
_SAME_FIELDS = sorted(set(Request.__struct_fields__) - _COMPUTED_FIELDS)


def _request(sample: RequestSample, hashes: list[int], **changes: Any) -> Request:
    moments = sample.moments
    fields = {name: getattr(sample, name) for name in _SAME_FIELDS} | changes
    return Request(
        **fields,
        chunk_s=[moment.monotonic_s for moment in moments],
        chunk_tokens=sample.counts,
        num_running=[moment.num_running for moment in moments],
        prefill_tokens=[moment.prefill_tokens for moment in moments],
        block_hashes=hashes,
    )
