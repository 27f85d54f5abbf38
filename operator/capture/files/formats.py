"""Define the files of a capture: names, lines, checks and manifest; read JSONL, plain or gzip.

The trace and the step statistics are those that vllm-vcr reads (its crates sim-trace and sim-protocol, release
0.2.1). Fields that it does not know are extra; it ignores them. docs/reference/trace-format.md and the
pages that it links explain every field. All times are milliseconds since the run's zero, which the manifest gives on
both clocks.

``checks.json`` is next to the first manifest of an arm. It holds the answers to requests that do not measure
speed: every arm gets the same ones, one after the other, so that batching cannot change an answer. It stores no
text of prompts or answers, only the token ids of greedy answers.
"""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal, cast

import msgspec
from msgspec import Meta, Struct

from specdecode_operator.capture.recorder.segment_format import EngineConfig
from specdecode_operator.enums import METHODS_OF_BLOCKS


class CaptureError(Exception):
    """A capture cannot continue."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason  # one word in CamelCase, for conditions and scripts
        self.message = message  # what happened, where, and what to do


FinishReason = Literal["stop", "length", "abort", "error", "repetition"]
Outcome = Literal["completed", "http_rejected", "disconnected", "timed_out", "cancelled", "not_sent"]

Count = Annotated[int, Meta(ge=0)]
Word = Annotated[int, Meta(ge=0, le=2**32 - 1)]

TRACE: Final = "trace.jsonl"
STEP_STATS: Final = "step-stats.jsonl"
CLIENT: Final = "client.jsonl"
ABORTED: Final = "aborted.jsonl"
CHECKS: Final = "checks.json"
MANIFEST: Final = "manifest.json"
PARTIAL_MANIFEST: Final = "manifest.partial.json"
PART_SUFFIX: Final = ".part"
DATA_FILES: Final = (TRACE, STEP_STATS, CLIENT, ABORTED, CHECKS)
"""Everything that is checksummed, in the order in which it is published."""

MESSAGE_BYTES: Final = 4096
"""Kubernetes keeps no more of a termination message."""


class TraceMeta(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """First line of a trace, inside ``{"meta": ...}``."""

    model: str | None = None
    gpu: str | None = None  # short name, such as ``H200``; ``cpu`` without one
    tp: Word | None = None  # tensor-parallel size
    max_num_seqs: Count | None = None  # requests in one batch at most
    source: str | None = None
    block_size: Count | None = None  # tokens in a block, which is what ``block_hashes`` are over
    config_hash: str | None = None  # as vllm-vcr computes it (scheme v3)
    vllm_version: str | None = None
    ready_response_hex: str | None = None  # written by vllm-vcr's tap only
    schema: int | None = None  # version of our further fields
    capture: str | None = None
    attempt: str | None = None
    # The run's zero by CLOCK_MONOTONIC and in seconds since 1970.
    zero_monotonic_s: float | None = None
    zero_wall_s: float | None = None
    engine_hash: str | None = None  # our fuller hash: also GPU name, image and every setting
    speculative: dict[str, Any] | None = None  # method, K and draft model; absent without speculation
    # Only in a live capture: recipe of the salted ``block_hashes``, and the share of the requests if it is below 100.
    block_hash: str | None = None
    sample_percent: int | None = None

    @property
    def drafts_in_one_pass(self) -> bool:
        """Whether the draft is known to propose all tokens in one pass."""
        said = self.speculative or {}
        return said.get("parallel_drafting") is True or said.get("method") in METHODS_OF_BLOCKS


class ItlSummary(Struct, kw_only=True, frozen=True):
    """Summary of gaps that were not measured one by one; never written by us."""

    mean_ms: float
    count: Count


class ItlContext(Struct, kw_only=True, frozen=True):
    """The batch in which each gap was measured; both arrays are parallel to ``itl_ms``."""

    num_running: list[Word]  # requests running after the step that closed the gap
    prefill_tokens: list[Word]  # full prompt lengths of the requests whose first token came in that step


class Record(Struct, kw_only=True, frozen=True):
    """One request in a trace, with the fields and defaults of vllm-vcr's reader."""

    prompt_tokens: Count
    cached_tokens: Count = 0  # prompt tokens found in the prefix cache
    output_tokens: Count  # sum of all chunks
    ttft_ms: float  # from arrival at the engine's client to the first chunk
    itl_ms: list[float] | None = None  # time before each chunk after the first
    # Tokens in each of those chunks; absent if all are 1. The first chunk has the rest of ``output_tokens``.
    itl_tokens: list[Word] | None = None
    itl_summary: ItlSummary | None = None
    concurrency: Count = 1  # requests in flight at arrival, this one included
    arrival_ms: float | None = None  # arrival at the engine's client, since the run's zero
    itl_ctx: ItlContext | None = None
    block_hashes: list[Count] | None = None  # chained FNV-1a hashes (64 bits) of the prompt's full blocks
    mm_hashes: list[str] | None = None  # of images and the like; never written by us
    output_token_ids: list[Word] | None = None  # where ``record.tokenIds`` asks for them
    finish_reason: FinishReason | None = None  # absent for a request that was unfinished when recording ended


class TraceRecord(Record, kw_only=True, frozen=True):
    """One request in our trace, in order of finishing: vllm-vcr's fields and these."""

    request_id: str | None = None  # joins it with client.jsonl
    engine: int | None = None
    phase: str | None = None  # phase of the workload; absent for a request that the load generator did not send
    temperature: float | None = None
    # When the engine queued it, and first scheduled it.
    queued_ms: float | None = None
    scheduled_ms: float | None = None
    preemptions: int | None = None
    ended_by: str | None = None  # ``engine``, ``stop_string``, ``abort`` or ``unfinished``
    stop_reason: int | str | None = None  # stop string or token, as vLLM says it
    kept_tokens: int | None = None  # tokens of the last chunk that a stop string left
    client_ttft_ms: float | None = None  # TTFT as the client saw it, over HTTP
    prompt_token_ids: list[Word] | None = None  # in a live capture where ``record.promptTokenIds`` asks for them

    def chunk_sizes(self) -> list[int]:
        """Return the tokens of every chunk, the first included."""
        later = self.itl_tokens if self.itl_tokens is not None else [1] * len(self.itl_ms or ())
        return [self.output_tokens - sum(later), *later]


class AbortedRecord(Struct, kw_only=True, frozen=True):
    """One request that reached the engine and produced no token."""

    request_id: str  # joins it with client.jsonl
    arrival_ms: float  # arrival at the engine's client, since the run's zero
    prompt_tokens: int
    ended_by: str
    engine: int | None = None  # absent if none took it
    phase: str | None = None
    queued_ms: float | None = None
    scheduled_ms: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class StepStats(Struct, kw_only=True, frozen=True):
    """One step of an engine."""

    ts_ms: float  # the engine's stamp at the end of the step, since the run's zero
    scheduler: dict[str, Any]  # vLLM's SchedulerStats, whole
    engine: int = 0
    duration_ms: float | None = None  # how long the step took, where the engine says it


class ClientRecord(Struct, kw_only=True, frozen=True):
    """One request as the load generator saw it, in order of sending."""

    id: str  # x-Request-Id: ``<capture>-<phase>-<index>``
    phase: str
    index: int  # in its phase
    outcome: Outcome
    warmup: bool = False  # left out of trace, statistics and accounting
    scheduled_ms: float | None = None  # when it was due
    sent_ms: float | None = None
    late_ms: float | None = None  # from due to sent
    first_token_ms: float | None = None
    last_token_ms: float | None = None
    finished_ms: float | None = None
    # From sending to the first token, and to the last one: as vLLM's own benchmark has them.
    ttft_ms: float | None = None
    latency_ms: float | None = None
    http_status: int | None = None
    error: str | None = None
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    completion_tokens: int | None = None  # as the server reports it
    chunks: int = 0  # events with tokens in the answer's stream
    temperature: float | None = None
    n: int = 1
    session: str | int | None = None  # conversation, in multi-turn phases
    turn: int | None = None


_ENCODER: Final = msgspec.json.Encoder()


def encode(line: Struct) -> bytes:
    """Return one line of JSON without fields that have no value: absent and null mean the same to every reader."""
    return _ENCODER.encode({name: value for name, value in msgspec.structs.asdict(line).items() if value is not None})


def encode_meta(meta: TraceMeta) -> bytes:
    """Return the first line of a trace."""
    return _ENCODER.encode({"meta": meta})


GZIP_SUFFIX = ".gz"

LONGEST_LINE_BYTES = 2**27
"""An answer of a million tokens has a third of that. Zeros that gzip packed a thousandfold would fill the memory."""


@dataclass(frozen=True)
class Line:
    """One line of a file."""

    number: int  # from 1
    text: bytes  # without white space at either end
    whole: bool  # it ends with a line feed; only a file's last line may not


class NoTrailerError(Exception):
    """A gzip stream ends without its trailer, as its writer still runs or was killed; all whole lines came before."""


class BrokenGzipError(Exception):
    """A gzip file is damaged, or a line does not end: the file cannot be read beyond this point."""


def read_lines(path: Path) -> Iterator[Line]:
    """Return the lines of a file that are not blank; a name that ends in ``.gz`` is decompressed.

    Raises
    ------
    NoTrailerError
        After the last whole line of an unfinished gzip stream.
    BrokenGzipError
        If compressed data is damaged, or a line is too long.
    """
    with open_to_read(path) as stream:
        for number in count(1):
            try:
                raw = stream.readline(LONGEST_LINE_BYTES + 1)
            except EOFError as error:
                raise NoTrailerError(f"line {number}: the gzip stream ends without its trailer") from error
            except (gzip.BadGzipFile, zlib.error) as error:
                raise BrokenGzipError(f"line {number}: {error}") from error
            if len(raw) > LONGEST_LINE_BYTES:
                raise BrokenGzipError(f"line {number}: has more than {LONGEST_LINE_BYTES:,} bytes")
            if not raw:
                return
            if text := raw.strip():
                yield Line(number, text, whole=raw.endswith(b"\n"))


def open_to_read(path: Path) -> BinaryIO:
    """Return the bytes of a file, decompressed if its name ends in ``.gz``."""
    if path.name.endswith(GZIP_SUFFIX):
        return cast("BinaryIO", gzip.open(path, "rb"))
    return path.open("rb")


MOST_CHECK_PROMPTS: Final = 64
MOST_CHECK_TOKENS: Final = 128
_LONGEST_REASON: Final = 512

CheckReason = Annotated[str, Meta(max_length=_LONGEST_REASON)]


class GreedyAnswer(Struct, kw_only=True, frozen=True):
    """The most likely tokens after a prompt."""

    prompt_sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]  # of the prompt's JSON, by which arms are paired
    prompt_tokens: Count
    tokens: Annotated[list[Word], Meta(max_length=MOST_CHECK_TOKENS)]
    # For each token the difference of log probability between the two likeliest: how close it was; null where the
    # engine did not say both. As long as ``tokens``.
    top2_margin: Annotated[list[float | None], Meta(max_length=MOST_CHECK_TOKENS)]


class GreedyCheck(Struct, kw_only=True, frozen=True):
    """Answers at temperature 0, in request order; all arms get the same prompts."""

    answers: Annotated[list[GreedyAnswer], Meta(max_length=MOST_CHECK_PROMPTS)] = []
    not_measured: CheckReason | None = None  # why there are none


class ParsingCheck(Struct, kw_only=True, frozen=True):
    """Answers that must have a form."""

    asked: Count = 0
    parsed: Count = 0  # how many of them had it
    failures: Annotated[list[CheckReason], Meta(max_length=5)] = []  # why the first ones had not, without their content
    not_measured: CheckReason | None = None  # why nothing was asked


class Checks(Struct, kw_only=True, frozen=True):
    """All checks of one arm."""

    greedy: GreedyCheck
    structured: ParsingCheck  # JSON of a given schema
    tool_calls: ParsingCheck  # calls of a named function


MANIFEST_SCHEMA: Final = 1
"""Version of the manifest and of our fields in the files."""


class FileEntry(Struct, kw_only=True, frozen=True):
    """One file."""

    bytes: int
    lines: int  # how many it has, a trace's first included
    sha256: str


class DraftCounts(Struct, kw_only=True, frozen=True):
    """Counts of drafting."""

    drafts: int = 0  # verifications of one request's draft
    draft_tokens: int = 0
    accepted_tokens: int = 0


class LiveSegment(Struct, kw_only=True, frozen=True):
    """One connection of a recorder to the collector of a live capture."""

    pod: str
    # What the collector received.
    requests: int
    steps: int
    counts: DraftCounts = DraftCounts()  # of these steps
    # All requests of the API server in the window, by the recorder; null if the connection broke.
    tally: dict[str, int] | None = None
    counters: dict[str, float] | None = None  # growth of vLLM's own counters meanwhile; null if the connection broke
    errors: int = 0  # of the recorder inside the engine
    interrupted: str | None = None  # why there are no tally and counters


class SegmentEntry(Struct, kw_only=True, frozen=True):
    """One API server's recorder, by its own report."""

    boot: str  # random, one for each start of a process
    client_index: int
    closed: str | None = None  # why it ended; null where it was interrupted
    # Its own counts; null where it was interrupted.
    requests: int | None = None
    steps: int | None = None
    dropped: int | None = None
    unfinished: int | None = None
    live: LiveSegment | None = None  # only in a live capture


class Gate(Struct, kw_only=True, frozen=True):
    """One measure of a capture's quality."""

    value: float | None  # null where it could not be measured
    limit: float | None  # the most that passes; null where nothing is judged
    passed: bool  # whether it did; what could not be measured passes
    why: str


class EngineCounters(Struct, kw_only=True, frozen=True):
    """Growth of the engine's own counters on /metrics, from before the first measured request until it was idle."""

    generation_tokens: int  # over all ranks
    # Verifications of one request's draft, tokens drafted, and tokens accepted of them; null without speculation.
    drafts: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    # What the engine allocated for the KV cache, of the smallest rank; null where it does not say.
    num_gpu_blocks: int | None = None
    kv_cache_tokens: int | None = None


class AccountingEntry(Struct, kw_only=True, frozen=True):
    """Where every request went: ``sent = http_rejected + never_admitted + sum(engine)``."""

    sent: int  # without warm-up
    http_rejected: int  # rejected by the server before the engine saw them
    never_admitted: int  # given up by the client before the engine saw them
    engine: dict[str, int]  # requests with a record of the engine, by the client's outcome
    records: int  # records of the engine: n for each request
    not_sent: int  # requests of the workload that were never sent, as the time was over
    warmup: int
    mismatches: int
    equation: str


class Experiment(Struct, kw_only=True, frozen=True):
    """The experiment of a capture with several arms; the same in the manifest of each part."""

    arms: list[str]  # in the order of the spec
    baseline: str  # the arm that the others are compared with: the first
    repetitions: int
    order: list[list[str]]  # in which the arms were measured, repetition by repetition; drawn from the seed
    slo: dict[str, int] = {}  # ``ttftMs``, ``tpotMs``, ``latencyMs``: what counts as goodput; all requests where empty
    lossy: dict[str, str] = {}  # arms that may answer otherwise by their settings, and why


WindowEnd = Literal["duration", "requests", "deadline"]


class LiveWindow(Struct, kw_only=True, frozen=True):
    """Time in which the recorders of a live capture took requests."""

    started_wall_s: float  # when the recorders were armed, in seconds since 1970
    seconds: float
    ended_by: WindowEnd
    # As requested; null if not limited.
    duration_seconds: float | None = None
    requests: int | None = None


class LivePod(Struct, kw_only=True, frozen=True):
    """One engine pod that a live capture names."""

    pod: str
    uid: str | None = None
    node: str | None = None
    api_servers: int = 0  # that recorded
    missing: str | None = None  # why none of them did
    # Bounds of how far the clock of its node is ahead of the collector's; null if unknown.
    clock_ahead_ms: tuple[float, float] | None = None


class LiveEngine(Struct, kw_only=True, frozen=True):
    """Where one engine of the files ran. In every pod the first engine calls itself 0."""

    engine: int  # in trace.jsonl and step-stats.jsonl
    pod: str
    node: str | None
    index: int  # in its pod
    config_hash: str


class LiveLoss(Struct, kw_only=True, frozen=True):
    """A gap in the recording of one API server."""

    pod: str
    client_index: int
    reason: str
    seconds: float | None = None  # until the API server recorded again; null if it did not
    # That vLLM counted and the files do not have; null if the API server did not record again, or restarted.
    requests: int | None = None
    tokens: int | None = None


class LiveAccounting(Struct, kw_only=True, frozen=True):
    """Where every request of a live capture went: ``admitted = recorded + sampled_out + dropped``.

    Interrupted segments are left out, except in ``records``; ``lost`` of the manifest has them.
    """

    admitted: int  # arrived in the window
    recorded: int
    sampled_out: int
    dropped: int
    older: int  # running when the window opened, and not recorded
    after: int  # arrived after the window while recorded requests still ran, and not recorded
    finished: int  # by vLLM's rules, of all the requests above
    generated_tokens: int
    records: int  # lines in trace.jsonl and aborted.jsonl
    equation: str


class Live(Struct, kw_only=True, frozen=True):
    """Recording of a live capture."""

    window: LiveWindow
    sample_percent: int  # share of the requests that are recorded
    pods: list[LivePod]
    engines: list[LiveEngine]
    lost: list[LiveLoss]
    accounting: LiveAccounting
    # Largest error of times of one pod compared with those of another; null if unknown.
    clock_uncertainty_ms: float | None = None


class Manifest(Struct, kw_only=True, frozen=True):
    """Everything about a published capture."""

    schema: int = MANIFEST_SCHEMA
    # Which capture, and which part of it
    namespace: str
    capture: str
    arm: str
    repetition: int
    experiment: Experiment | None = None  # null for a capture with one arm
    capture_uid: str | None = None  # UID of its object, by which a later attempt knows these files for its own
    attempt: str  # of the pod that made it
    specdecode: str  # of the operator's image
    # As the engine itself reports them
    vllm: str
    recorder_tried: bool = True  # with this version
    model: str | None
    gpu: str | None
    host: str
    config: EngineConfig
    node: str | None
    # Image that the engine's container ran, with its digest, as Kubernetes has it; null where it is not known.
    image_id: str | None = None
    gpu_uuids: list[str] = []  # what the driver calls the GPUs; empty where it does not tell
    context: dict[str, Any]  # what the operator gave: image, plan, recording flags added and more, as it stands
    workload: dict[str, Any]
    seed: int
    record: dict[str, Any]
    # The run's zero by CLOCK_MONOTONIC and in seconds since 1970.
    zero_monotonic_s: float
    zero_wall_s: float
    published_wall_s: float  # when the files were complete, in seconds since 1970
    config_hash: str  # as vllm-vcr computes it (scheme v3)
    engine_hash: str  # over everything that the engine runs with
    accounting: AccountingEntry | None  # null in a live capture, which has its own in ``live``
    engine_counters: EngineCounters | None  # what /metrics says of the run; null where it did not answer
    files: dict[str, FileEntry]
    gates: dict[str, Gate]
    segments: list[SegmentEntry]
    notes: list[str]  # what else a reader should know, such as torn ends that were left out
    summary: dict[str, Any]
    source: Literal["load", "live"] = "load"  # requests of the load generator, or of users
    live: Live | None = None  # null for a load

    @property
    def equation(self) -> str:
        """Where every request went, in one line."""
        entry = self.live.accounting if self.live is not None else self.accounting
        return entry.equation if entry is not None else ""


class PartialManifest(Struct, kw_only=True, frozen=True):
    """Labels the files of an attempt that was not published."""

    schema: int = MANIFEST_SCHEMA
    namespace: str
    capture: str
    attempt: str
    # Why it ended; ``Unfinished`` while it runs, and for ever if it was killed.
    reason: str
    message: str
    files: dict[str, int] = {}  # bytes of each, as they were
