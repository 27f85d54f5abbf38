"""Define the lines of a segment file, and the environment variables that configure the recorder.

Lines are written in the engine's process and read by the load generator's container; ``k`` tags the kind of line. There
is one file per API server. Every time is in seconds: ``*_monotonic_s``, ``chunk_s``, ``queued_s``, ``scheduled_s``
and ``t`` are CLOCK_MONOTONIC of this host, ``*_wall_s`` are seconds since 1970.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

EMULATED = "emulated"  # prefix of the GPU name of an emulated engine (replay/emulated), which computes nothing
RECORDER_VERSION = "0.1.0"  # changes with the recorded data, unlike the operator's version, which the manifest also has
SCHEMA = 1
FNV1A64, SALTED_BLAKE2B = "fnv1a64", "blake2b-salted"
"""Recipes of block hashes. FNV can be inverted, so that hashes of users' prompts would give the prompts away."""
LONGEST_LINE_BYTES = 16 * 2**20
"""Limit of the collector of a live capture."""
STOP_STRING, STOP_TOKEN = "string", "token"  # stop reasons in a live capture
# Reasons for closing a segment: on order, end of the engine, full disk, unknown engine, broken disk.
ORDERED, EXIT, DISK_FULL, UNKNOWN_SHAPE, WRITE_ERROR = "ordered", "exit", "disk_full", "unknown_shape", "write_error"


class Speculative(msgspec.Struct, frozen=True, kw_only=True):
    """Speculation settings of the engine, with vLLM's names."""

    method: str | None = None
    num_speculative_tokens: int | None = None
    model: str | None = None
    parallel_drafting: bool | None = None  # whether a draft model or head proposes all tokens in one pass


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Resolved settings of the engine; null if its version lacks one."""

    max_num_seqs: int | None = None
    block_size: int | None = None  # tokens in a block of the KV cache, and of a block hash
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    data_parallel: int | None = None
    gpu_memory_utilization: float | None = None
    enforce_eager: bool | None = None
    enable_prefix_caching: bool | None = None
    async_scheduling: bool | None = None
    speculative: Speculative | None = None


class Header(msgspec.Struct, tag_field="k", tag="header", frozen=True, kw_only=True):
    """First line: recorder, process and engine settings."""

    schema: int
    recorder: str  # RECORDER_VERSION
    vllm: str
    boot: str  # random, one for each start of a process, or each live capture of it
    host: str
    pid: int
    client_index: int  # index of the API server among client_count
    client_count: int
    engines: list[int]
    wall_s: float
    monotonic_s: float
    model: str | None
    config: EngineConfig
    gpu: str | None  # None on CPU
    token_ids: bool
    steps: bool
    start: str | None = None  # common to all API servers of one start of the engine; None if unknown
    gpu_uuids: list[str] = []  # empty if unknown
    recorder_tried: bool = True  # tested with this version of vLLM; if not, all classes it uses match the tested ones
    live: bool = False  # traffic of users: identifiers and block hashes are salted
    sample_percent: int = 100  # share of the requests that have a line
    block_hash: str = FNV1A64


class Request(msgspec.Struct, tag_field="k", tag="request", frozen=True, kw_only=True, omit_defaults=True):
    """A request that finished, was aborted, or was unfinished when the segment was closed.

    The arrays ``chunk_s``, ``chunk_tokens``, ``num_running`` and ``prefill_tokens`` have one entry for each engine
    output with tokens, before trimming.
    """

    id: str
    external_id: str | None  # derived from X-Request-Id by the API server
    engine: int | None  # None if no engine ran it
    arrival_monotonic_s: float
    arrival_wall_s: float
    prompt_tokens: int
    concurrency: int  # requests in flight at this API server at arrival, this one included
    temperature: float | None
    queued_s: float | None
    scheduled_s: float | None
    preemptions: int
    cached_tokens: int | None
    chunk_s: list[float]
    chunk_tokens: list[int]
    num_running: list[int]  # after the step
    prefill_tokens: list[int]  # full prompt lengths of the requests whose first token came in the step
    block_hashes: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    ended_by: str  # engine, stop_string, abort or unfinished
    # Tokens of the last chunk that the client got, if a stop string cut it. vLLM before 0.32 does not report them.
    kept_tokens: int | None = None
    token_ids: list[int] | None = None  # generated tokens, if requested
    prompt_token_ids: list[int] | None = None  # only in a live capture, if requested and allowed


class Step(msgspec.Struct, tag_field="k", tag="step", frozen=True):
    """Scheduler statistics of one engine step."""

    engine: int
    t: float
    scheduler: dict[str, Any] | None = None  # None if another API server got them


class Anchor(msgspec.Struct, tag_field="k", tag="anchor", frozen=True, omit_defaults=True):
    """Both clocks, read together, and in a live capture the requests so far, as in the tally."""

    monotonic_s: float
    wall_s: float
    admitted: int | None = None
    sampled_out: int | None = None


class Counters(msgspec.Struct, tag_field="k", tag="counters", frozen=True):
    """vLLM's own counters of this process, read between two messages of the engine, when a live capture starts or ends.

    The keys are ``requests_finished``, ``generation_tokens``, ``prompt_tokens``, ``drafts``, ``draft_tokens`` and
    ``accepted_tokens``; one that this vLLM does not count is absent.
    """

    monotonic_s: float
    values: dict[str, float]


class Tally(msgspec.Struct, tag_field="k", tag="tally", frozen=True, kw_only=True):
    """All requests of this process in the window of a live capture, recorded or not."""

    admitted: int  # arrived in the window: recorded + sampled_out + dropped
    recorded: int
    sampled_out: int  # not in the sample, or a canary prompt of the sidecar
    dropped: int  # selected, but lost
    older: int  # running when the window opened
    after: int  # arrived after its end, while recorded requests still ran
    finished: int  # that vLLM counts as finished between the two readings of its counters
    generated_tokens: int  # that vLLM counts between the two readings


class Refused(msgspec.Struct, tag_field="k", tag="refused", frozen=True):
    """Only line of a recorder that cannot record for a live capture."""

    reason: str


class Off(msgspec.Struct, tag_field="k", tag="off", frozen=True):
    """The recorder turned itself off; the engine continued."""

    reason: str


class Closed(msgspec.Struct, tag_field="k", tag="closed", frozen=True):
    """Last line: reason, and counts of the lines before it."""

    reason: str  # ORDERED, EXIT, DISK_FULL, UNKNOWN_SHAPE or WRITE_ERROR
    requests: int
    steps: int
    # Samples dropped by the queue or not written, plus one for each error in a hook. Above 0 the capture is incomplete.
    dropped: int
    unfinished: int  # requests that had not ended
    errors: int
    first_error: str | None


SegmentLine = Header | Request | Step | Anchor | Counters | Tally | Refused | Off | Closed


def _as_plain(value: Any) -> Any:
    """Encode types that msgspec does not know: connector statistics may hold anything."""
    return getattr(value, "__dict__", None) or str(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_as_plain)


def encode(line: msgspec.Struct) -> bytes:
    """Return one line of a segment, with its newline."""
    return _ENCODER.encode(line) + b"\n"


FOLDER_VARIABLE = "SPECDECODE_RECORD_DIR"
TOKEN_IDS_VARIABLE = "SPECDECODE_RECORD_TOKEN_IDS"  # noqa: S105 (no password)
STEPS_VARIABLE = "SPECDECODE_RECORD_STEPS"
LIVE_FOLDER_VARIABLE = "SPECDECODE_LIVE_DIR"
LIVE_TOKEN_IDS_VARIABLE = "SPECDECODE_LIVE_TOKEN_IDS"  # noqa: S105 (no password)
CLOSE_FILE = "close"  # file beside the segments by which the load generator orders the recorders to finish


@dataclass(frozen=True)
class Settings:
    """Settings of the recorder."""

    folder: Path  # for one segment per API server
    token_ids: bool = False  # record generated tokens; prompts are never recorded
    steps: bool = True

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Settings | None":
        """Return the settings, or None if recording is off."""
        folder = environment.get(FOLDER_VARIABLE)
        if not folder:
            return None
        return cls(
            folder=Path(folder),
            token_ids=environment.get(TOKEN_IDS_VARIABLE, "0") == "1",
            steps=environment.get(STEPS_VARIABLE, "1") != "0",
        )


@dataclass(frozen=True)
class LiveSettings:
    """Settings of a recorder that sleeps until a live capture connects to its socket."""

    folder: Path  # for one socket per API server
    may_send_answers: bool = False  # token ids of answers, if the capture requests them
    may_send_prompts: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "LiveSettings | None":
        """Return the settings, or None if live captures are off."""
        folder = environment.get(LIVE_FOLDER_VARIABLE)
        if not folder:
            return None
        allowed = {word.strip() for word in environment.get(LIVE_TOKEN_IDS_VARIABLE, "").split(",")}
        return cls(Path(folder), may_send_answers="answers" in allowed, may_send_prompts="prompts" in allowed)
