"""Check the lines of a live capture's segment, which come from the network, and add them up."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from specdecode_operator.capture.files.live import Source
from specdecode_operator.capture.files.merge import OLDER_READERS
from specdecode_operator.capture.files.segments import Segment
from specdecode_operator.capture.files.totals import BY_ENGINE
from specdecode_operator.capture.files.trace_rules import SchedulerStats
from specdecode_operator.capture.job.collect_settings import CollectSettings
from specdecode_operator.capture.recorder.segment_format import (
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
_BOOT: Final = re.compile(r"[0-9A-Za-z_-]{1,64}")
_LONGEST_HEADER_BYTES: Final = 2**16  # it stays in memory
_MOST_ENGINES: Final = 1024
_MOST_COUNTERS: Final = 32
_ENDS: Final = frozenset({BY_ENGINE, "stop_string", "abort", "unfinished"})
_WHOLE: Final = frozenset({BY_ENGINE, "stop_string"})
_FINISH_REASONS: Final = frozenset({None, "stop", "length", "abort", "error", "repetition"})
_U64: Final = 2**64


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
                _require(0 <= line.sampled_out <= line.admitted, "an invalid number of requests")
                self._report(line.admitted, line.sampled_out)
        elif isinstance(line, Off):
            source.off = clip(printable(line.reason), LONGEST_REASON)
        elif isinstance(line, Tally):
            _require(min(msgspec.structs.astuple(line)) >= 0, "a tally below 0")
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
        _require(min(line.dropped, line.unfinished, line.errors) >= 0, "a count below 0")
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
        source.steps += 1
        if line.scheduler is None:
            return
        try:
            scheduler = msgspec.convert(OLDER_READERS | line.scheduler, SchedulerStats)
        except msgspec.ValidationError as error:
            raise RejectedError(f"a step's statistics: {clip(printable(str(error)), LONGEST_REASON)}") from error
        details = line.scheduler.get("iteration_details")
        elapsed = details.get("elapsed_ms") if isinstance(details, dict) else None
        _require(elapsed is None or (isinstance(elapsed, int | float) and math.isfinite(elapsed)), "a step's duration")
        if (stats := scheduler.spec_decoding_stats) is not None:
            source.drafts += stats.num_drafts
            source.draft_tokens += stats.num_draft_tokens
            source.accepted_tokens += stats.num_accepted_tokens

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
