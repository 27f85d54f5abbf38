"""Lines of the files that a capture publishes, and how they are written.

The trace and the step statistics are what vllm-vcr reads (its crates sim-trace and sim-protocol, release 0.2.1);
what it does not know stands in further fields, which it passes over. docs/reference/trace-format.md explains every
field. All times are milliseconds since the run's zero, which the manifest names by both clocks.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]
Outcome = Literal["completed", "http_rejected", "disconnected", "timed_out", "cancelled", "not_sent"]

Count = Annotated[int, Meta(ge=0)]
Word = Annotated[int, Meta(ge=0, le=2**32 - 1)]

TRACE: Final = "trace.jsonl"
STEP_STATS: Final = "step-stats.jsonl"
CLIENT: Final = "client.jsonl"
ABORTED: Final = "aborted.jsonl"
MANIFEST: Final = "manifest.json"
PARTIAL_MANIFEST: Final = "manifest.partial.json"
PART_SUFFIX: Final = ".part"
DATA_FILES: Final = (TRACE, STEP_STATS, CLIENT, ABORTED)
"""Everything that is checksummed, in the order in which it is published."""


class TraceMeta(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """First line of a trace, inside ``{"meta": ...}``.

    Attributes
    ----------
    model
        What the engine served.
    gpu
        Short name, such as ``H200``; ``cpu`` without one.
    tp
        Tensor-parallel size.
    max_num_seqs
        Requests in one batch at most.
    source
        Who wrote the trace.
    block_size
        Tokens in a block, which is what ``block_hashes`` are over.
    config_hash
        As vllm-vcr computes it (scheme v3).
    vllm_version
        As the engine reports it.
    ready_response_hex
        Written by vllm-vcr's tap only.
    schema
        Version of our further fields.
    capture
        Namespace and name of the SpecDecodeCapture.
    attempt
        Which attempt of it.
    zero_monotonic_s, zero_wall_s
        The run's zero by CLOCK_MONOTONIC and in seconds since 1970.
    engine_hash
        Our fuller hash: also GPU name, image and every setting.
    speculative
        Method, K and draft model; absent without speculation.
    """

    model: str | None = None
    gpu: str | None = None
    tp: Word | None = None
    max_num_seqs: Count | None = None
    source: str | None = None
    block_size: Count | None = None
    config_hash: str | None = None
    vllm_version: str | None = None
    ready_response_hex: str | None = None
    schema: int | None = None
    capture: str | None = None
    attempt: str | None = None
    zero_monotonic_s: float | None = None
    zero_wall_s: float | None = None
    engine_hash: str | None = None
    speculative: dict[str, Any] | None = None


class ItlSummary(Struct, kw_only=True, frozen=True):
    """Stands in for gaps that nobody measured one by one; never written by us.

    Attributes
    ----------
    mean_ms
        Mean gap.
    count
        Number of gaps.
    """

    mean_ms: float
    count: Count


class ItlContext(Struct, kw_only=True, frozen=True):
    """The batch in which each gap was measured; both arrays are parallel to ``itl_ms``.

    Attributes
    ----------
    num_running
        Requests running after the step that closed the gap.
    prefill_tokens
        Full prompt lengths of the requests whose first token came in that step.
    """

    num_running: list[Word]
    prefill_tokens: list[Word]


class Record(Struct, kw_only=True, frozen=True):
    """One request in a trace, with the fields and defaults of vllm-vcr's reader.

    Attributes
    ----------
    prompt_tokens
        Length of the prompt in tokens.
    cached_tokens
        Prompt tokens found in the prefix cache.
    output_tokens
        Sum of all chunks.
    ttft_ms
        From arrival at the engine's client to the first chunk.
    itl_ms
        Time before each chunk after the first.
    itl_tokens
        Tokens in each of those chunks; absent if all are 1. The first chunk has the rest of ``output_tokens``.
    itl_summary
        Instead of ``itl_ms``.
    concurrency
        Requests in flight at arrival, this one included.
    arrival_ms
        Arrival at the engine's client, since the run's zero.
    itl_ctx
        The batch of each gap.
    block_hashes
        Chained FNV-1a hashes (64 bits) of the prompt's full blocks.
    mm_hashes
        Of images and the like; never written by us.
    output_token_ids
        Where ``record.tokenIds`` asks for them.
    finish_reason
        Absent for a request that was unfinished when recording ended.
    """

    prompt_tokens: Count
    cached_tokens: Count = 0
    output_tokens: Count
    ttft_ms: float
    itl_ms: list[float] | None = None
    itl_tokens: list[Word] | None = None
    itl_summary: ItlSummary | None = None
    concurrency: Count = 1
    arrival_ms: float | None = None
    itl_ctx: ItlContext | None = None
    block_hashes: list[Count] | None = None
    mm_hashes: list[str] | None = None
    output_token_ids: list[Word] | None = None
    finish_reason: FinishReason | None = None


class TraceRecord(Record, kw_only=True, frozen=True):
    """One request in our trace, in order of finishing: vllm-vcr's fields and these.

    Attributes
    ----------
    request_id
        Joins it with client.jsonl.
    engine
        Index of the engine (data-parallel rank).
    phase
        Phase of the workload; absent for a request that the load generator did not send.
    temperature
        Of sampling.
    queued_ms, scheduled_ms
        When the engine queued it, and first scheduled it.
    preemptions
        How often it was preempted.
    ended_by
        ``engine``, ``stop_string``, ``abort`` or ``unfinished``.
    stop_reason
        Stop string or token, as vLLM says it.
    kept_tokens
        Tokens of the last chunk that a stop string left.
    client_ttft_ms
        TTFT as the client saw it, over HTTP.
    """

    request_id: str | None = None
    engine: int | None = None
    phase: str | None = None
    temperature: float | None = None
    queued_ms: float | None = None
    scheduled_ms: float | None = None
    preemptions: int | None = None
    ended_by: str | None = None
    stop_reason: int | str | None = None
    kept_tokens: int | None = None
    client_ttft_ms: float | None = None

    def chunk_sizes(self) -> list[int]:
        """Return the tokens of every chunk, the first included."""
        later = self.itl_tokens if self.itl_tokens is not None else [1] * len(self.itl_ms or ())
        return [self.output_tokens - sum(later), *later]


class AbortedRecord(Struct, kw_only=True, frozen=True):
    """One request that reached the engine and produced no token.

    Attributes
    ----------
    request_id
        Joins it with client.jsonl.
    engine
        Index of the engine; absent if none took it.
    phase
        Phase of the workload.
    arrival_ms
        Arrival at the engine's client, since the run's zero.
    prompt_tokens
        Length of the prompt in tokens.
    queued_ms, scheduled_ms
        When the engine queued it, and first scheduled it.
    ended_by, finish_reason, stop_reason
        As in the trace.
    """

    request_id: str
    arrival_ms: float
    prompt_tokens: int
    ended_by: str
    engine: int | None = None
    phase: str | None = None
    queued_ms: float | None = None
    scheduled_ms: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class StepStats(Struct, kw_only=True, frozen=True):
    """One step of an engine.

    Attributes
    ----------
    ts_ms
        The engine's stamp at the end of the step, since the run's zero.
    scheduler
        vLLM's SchedulerStats, whole.
    engine
        Index of the engine.
    duration_ms
        How long the step took, where the engine says it.
    """

    ts_ms: float
    scheduler: dict[str, Any]
    engine: int = 0
    duration_ms: float | None = None


class ClientRecord(Struct, kw_only=True, frozen=True):
    """One request as the load generator saw it, in order of sending.

    Attributes
    ----------
    id
        X-Request-Id: ``<capture>-<phase>-<index>``.
    phase, index
        Phase of the workload, and number of the request in it.
    warmup
        Left out of trace, statistics and accounting.
    scheduled_ms, sent_ms
        When it was due, and when it was sent.
    late_ms
        How much later it was sent than due.
    first_token_ms, last_token_ms, finished_ms
        When its first token, its last one and its end arrived.
    ttft_ms, latency_ms
        From sending to the first token, and to the last one: as vLLM's own benchmark has them.
    outcome
        ``completed``, ``http_rejected``, ``disconnected``, ``timed_out``, ``cancelled`` or ``not_sent``.
    http_status
        Of the answer, if there was one.
    error
        What went wrong, in words.
    prompt_tokens, max_tokens
        What was asked for.
    completion_tokens
        What the server said it delivered.
    chunks
        Events with tokens in the answer's stream.
    temperature, n
        Of sampling, and answers asked for.
    session, turn
        Which conversation and which turn of it, in multi-turn phases.
    """

    id: str
    phase: str
    index: int
    outcome: Outcome
    warmup: bool = False
    scheduled_ms: float | None = None
    sent_ms: float | None = None
    late_ms: float | None = None
    first_token_ms: float | None = None
    last_token_ms: float | None = None
    finished_ms: float | None = None
    ttft_ms: float | None = None
    latency_ms: float | None = None
    http_status: int | None = None
    error: str | None = None
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    completion_tokens: int | None = None
    chunks: int = 0
    temperature: float | None = None
    n: int = 1
    session: str | int | None = None
    turn: int | None = None


_ENCODER: Final = msgspec.json.Encoder()


def encode(line: Struct) -> bytes:
    """Return one line of JSON without fields that have no value: absent and null mean the same to every reader."""
    return _ENCODER.encode({name: value for name, value in msgspec.structs.asdict(line).items() if value is not None})


def encode_meta(meta: TraceMeta) -> bytes:
    """Return the first line of a trace."""
    return _ENCODER.encode({"meta": meta})
