"""Lines of the files that a capture publishes, and how they are written.

The trace and the step statistics are what vllm-vcr reads (its crates sim-trace and sim-protocol, release 0.2.1);
what it does not know stands in further fields, which it passes over. docs/reference/trace-format.md explains every
field. All times are milliseconds since the run's zero, which the manifest names by both clocks.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from specdecode_operator.vocabulary import METHODS_OF_BLOCKS

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

    @property
    def drafts_in_one_pass(self) -> bool:
        """Whether the draft is known to propose all tokens at once."""
        said = self.speculative or {}
        return said.get("parallel_drafting") is True or said.get("method") in METHODS_OF_BLOCKS


class ItlSummary(Struct, kw_only=True, frozen=True):
    """Stands in for gaps that nobody measured one by one; never written by us."""

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
    engine: int | None = None  # index of the engine; absent if none took it
    phase: str | None = None
    # When the engine queued it, and first scheduled it.
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
    # Phase of the workload, and number of the request in it.
    phase: str
    index: int
    outcome: Outcome  # ``completed``, ``http_rejected``, ``disconnected``, ``timed_out``, ``cancelled`` or ``not_sent``
    warmup: bool = False  # left out of trace, statistics and accounting
    # When it was due, and when it was sent
    scheduled_ms: float | None = None
    sent_ms: float | None = None
    late_ms: float | None = None  # how much later it was sent than due
    # When its first token, its last one and its end arrived.
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
    completion_tokens: int | None = None  # what the server said it delivered
    chunks: int = 0  # events with tokens in the answer's stream
    temperature: float | None = None
    n: int = 1
    # Which conversation and which turn of it, in multi-turn phases.
    session: str | int | None = None
    turn: int | None = None


_ENCODER: Final = msgspec.json.Encoder()


def encode(line: Struct) -> bytes:
    """Return one line of JSON without fields that have no value: absent and null mean the same to every reader."""
    return _ENCODER.encode({name: value for name, value in msgspec.structs.asdict(line).items() if value is not None})


def encode_meta(meta: TraceMeta) -> bytes:
    """Return the first line of a trace."""
    return _ENCODER.encode({"meta": meta})
