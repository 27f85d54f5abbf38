"""Merges what recorders and load generator wrote into the files of a capture.

Everything is sorted on the volume in runs of 8 MiB, so memory does not grow with the capture:

1. Requests of all segments are sorted by the client's id, and so are the client's lines. Walking both side by side
   gives each request its phase, and leaves warm-up requests out.
2. Their lines are sorted by the engine's stamp of the last chunk, which is the order in which requests finished.
3. Steps of all engines are sorted by the engine's stamp. Steps before the first measured request are left out.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
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
from specdecode_operator.capture.merge.external_sort import Keyed, Sorter
from specdecode_operator.capture.merge.request_ids import client_id
from specdecode_operator.capture.merge.whole_engine import WholeEngine
from specdecode_operator.capture.recorder.lines import Request, Step

_REQUEST: Final = msgspec.json.Decoder(Request)
_STEP: Final = msgspec.json.Decoder(Step)
_CLIENT: Final = msgspec.json.Decoder(ClientRecord)
_ENCODER: Final = msgspec.json.Encoder()


@dataclass(frozen=True)
class Merged:
    """What went into the files.

    Attributes
    ----------
    records
        Lines of the trace, without its first.
    aborted
        Requests that produced no token.
    steps
        Lines of step statistics.
    warmup_records
        Requests left out because they warmed up.
    steps_without_stats
        Messages whose statistics another API server got.
    torn
        Ends of segments that were cut off.
    """

    records: int
    aborted: int
    steps: int
    warmup_records: int
    steps_without_stats: int
    torn: tuple[Torn, ...]


def merge(folder: Path, meta: TraceMeta, zero_monotonic_s: float) -> Merged:
    """Write ``.part`` files of trace, step statistics and aborted requests from an attempt's segments.

    Parameters
    ----------
    folder
        The attempt's: holds ``segments`` and ``client.jsonl.part``.
    meta
        First line of the trace.
    zero_monotonic_s
        The run's zero.

    Raises
    ------
    CaptureError
        When a line of a segment or of the client cannot be read.
    """
    with ExitStack() as stack:
        sorters = _Sorters(*(stack.enter_context(Sorter(folder, name)) for name in _Sorters.NAMES))
        return _Merge(folder, Clock(zero_monotonic_s), sorters).run(meta)


@dataclass(frozen=True)
class _Sorters:
    NAMES = ("requests", "clients", "steps", "finished", "aborted")

    requests: Sorter
    clients: Sorter
    steps: Sorter
    finished: Sorter
    aborted: Sorter


class _Merge:
    """The three walks of one merge and what they count."""

    def __init__(self, folder: Path, clock: Clock, sorters: _Sorters) -> None:
        self._folder = folder
        self._clock = clock
        self._sorters = sorters
        self._torn: list[Torn] = []
        self._without_stats = 0
        self._warmup = 0
        self._first_arrival_s = float("inf")
        self._whole: WholeEngine | None = None

    def run(self, meta: TraceMeta) -> Merged:
        self._read_segments()
        self._read_client()
        self._join()
        # The volume holds the segments too: what is merged leaves its room to what comes.
        self._sorters.requests.close()
        self._sorters.clients.close()
        records = self._write(TRACE, (line for _, line in self._sorters.finished), first=encode_meta(meta))
        self._sorters.finished.close()
        steps = self._write(STEP_STATS, self._step_lines())
        aborted = self._write(ABORTED, (line for _, line in self._sorters.aborted))
        if not aborted:
            (self._folder / f"{ABORTED}{PART_SUFFIX}").unlink()
        return Merged(records, aborted, steps, self._warmup, self._without_stats, tuple(self._torn))

    def _read_segments(self) -> None:
        segments = list_segments(self._folder / FOLDER)
        whole = WholeEngine() if any(each.header.client_count > 1 for each in segments) else None
        for number, segment in enumerate(segments):
            requests, steps = 0, 0
            for line in read_segment(segment.path, self._torn.append):
                requests, steps = requests + isinstance(line, Request), steps + isinstance(line, Step)
                if isinstance(line, Request):
                    self._sorters.requests.add(client_id(line.external_id or line.id), _ENCODER.encode(line))
                    if whole:
                        whole.add_request(line)
                elif isinstance(line, Step):
                    self._take_step(line)
                    if whole:
                        whole.add_step(number, line)
            _check_counts(segment, requests, steps)
        if whole:
            whole.freeze()
        self._whole = whole

    def _take_step(self, step: Step) -> None:
        if step.scheduler is None:
            self._without_stats += 1
        else:
            self._sorters.steps.add(step.t, _ENCODER.encode(step))

    def _read_client(self) -> None:
        for client, line in read_client(self._folder / f"{CLIENT}{PART_SUFFIX}"):
            self._sorters.clients.add(client.id, line)

    def _join(self) -> None:
        for _, clients, requests in side_by_side(iter(self._sorters.clients), iter(self._sorters.requests)):
            client = _CLIENT.decode(clients[0]) if clients else None
            for line in requests:
                self._take_request(_REQUEST.decode(line), client)

    def _take_request(self, request: Request, client: ClientRecord | None) -> None:
        if client is not None and client.warmup:
            self._warmup += 1
            return
        self._first_arrival_s = min(self._first_arrival_s, request.arrival_monotonic_s)
        if has_tokens(request):
            record = trace_record(request, client, self._clock, self._whole)
            self._sorters.finished.add(request.chunk_s[-1], encode(record))
        else:
            line = encode(aborted_record(request, client, self._clock))
            self._sorters.aborted.add(request.arrival_monotonic_s, line)

    def _step_lines(self) -> Iterator[bytes]:
        for stamp_s, line in self._sorters.steps:
            step = _STEP.decode(line)
            if float(stamp_s) >= self._first_arrival_s and step.scheduler is not None:
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


def side_by_side(left: Iterator[Keyed], right: Iterator[Keyed]) -> Iterator[tuple[str, list[bytes], list[bytes]]]:
    """Return each key of two sorted streams with its lines in either."""
    lefts, rights = groupby(left, itemgetter(0)), groupby(right, itemgetter(0))
    on_left, on_right = _group(lefts), _group(rights)
    while on_left or on_right:
        key = min(group[0] for group in (on_left, on_right) if group)
        of_left = on_left[1] if on_left and on_left[0] == key else []
        of_right = on_right[1] if on_right and on_right[0] == key else []
        yield key, of_left, of_right
        on_left = _group(lefts) if of_left else on_left
        on_right = _group(rights) if of_right else on_right


def _group(groups: "groupby[float | str, Keyed]") -> tuple[str, list[bytes]] | None:
    found = next(groups, None)
    return (str(found[0]), [line for _, line in found[1]]) if found else None
