"""Define the lines of a segment file, and the environment variables that configure the recorder.

Lines are written beside the engine and read by the load generator's container; ``k`` tags the kind of line. There
is one file per API server. Every time is in seconds: ``*_monotonic_s``, ``chunk_s``, ``queued_s``, ``scheduled_s``
and ``t`` are CLOCK_MONOTONIC of this host, ``*_wall_s`` are seconds since 1970.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

EMULATED = "emulated"
"""Before the name of the GPU of a header: nothing was computed, see replay/emulated."""

RECORDER_VERSION = "0.1.0"
"""Raised when what is recorded, or how, changes.

Not the operator's version, which a capture's manifest names beside it: that changes where captures do not.
"""

SCHEMA = 1

ORDERED, EXIT, DISK_FULL, UNKNOWN_SHAPE, WRITE_ERROR = "ordered", "exit", "disk_full", "unknown_shape", "write_error"
"""Why a segment was closed: told to, the engine ended, no room, an engine this is not made for, a broken disk."""


class Speculative(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine speculates, in vLLM's words: ``ngram`` or ``draft_model``, K, and the draft model."""

    method: str | None = None
    num_speculative_tokens: int | None = None
    model: str | None = None
    parallel_drafting: bool | None = None  # whether a draft model or head proposes all tokens in one pass


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine resolved its settings to; what its version does not have is null."""

    max_num_seqs: int | None = None
    block_size: int | None = None  # tokens in a block of the KV cache, which is what block hashes are over
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
    """First line: who records, where, and with which settings the engine runs."""

    schema: int
    recorder: str  # RECORDER_VERSION
    vllm: str
    boot: str  # random, one for each start of a process
    host: str
    pid: int
    client_index: int  # which API server of client_count
    client_count: int
    engines: list[int]
    wall_s: float
    monotonic_s: float
    model: str | None
    config: EngineConfig
    gpu: str | None  # None on CPU
    token_ids: bool
    steps: bool
    start: str | None = None  # the same for all API servers of one start of the engine, where that can be told
    gpu_uuids: list[str] = []  # empty where the driver does not tell
    recorder_tried: bool = True  # with this version of vLLM; if not, all that it uses is as in those that were


class Request(msgspec.Struct, tag_field="k", tag="request", frozen=True, kw_only=True, omit_defaults=True):
    """A request that ended: finished, aborted, or unfinished when the segment was closed.

    The arrays ``chunk_s``, ``chunk_tokens``, ``num_running`` and ``prefill_tokens`` have one entry an engine
    output that carried tokens, with the tokens as the engine produced them.
    """

    id: str
    external_id: str | None  # what the API server made of X-Request-Id
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
    kept_tokens: int | None = None
    """How many tokens of the last chunk the client could get, where a stop string cut it.
    Absent where nothing was cut or vLLM does not tell (before 0.32)."""
    token_ids: list[int] | None = None  # what was generated; absent unless asked for


class Step(msgspec.Struct, tag_field="k", tag="step", frozen=True):
    """The statistics of one engine step, as the scheduler made them."""

    engine: int
    t: float
    scheduler: dict[str, Any] | None = None  # None where another API server got those of this step


class Anchor(msgspec.Struct, tag_field="k", tag="anchor", frozen=True):
    """Both clocks at one moment."""

    monotonic_s: float
    wall_s: float


class Off(msgspec.Struct, tag_field="k", tag="off", frozen=True):
    """The recorder turned itself off; the engine went on."""

    reason: str


class Closed(msgspec.Struct, tag_field="k", tag="closed", frozen=True):
    """Last line: why, and how much there is before it."""

    reason: str  # ORDERED, EXIT, DISK_FULL, UNKNOWN_SHAPE or WRITE_ERROR
    requests: int
    steps: int
    dropped: int
    """Everything that could not be recorded: what the queue had no room for, what was not written,
    and one for each error in a hook. A capture with any of them is incomplete."""
    unfinished: int  # how many of the requests had not ended
    errors: int
    first_error: str | None


SegmentLine = Header | Request | Step | Anchor | Off | Closed


def _as_plain(value: Any) -> Any:
    """Return something that can be encoded for what msgspec does not know (connector statistics hold anything)."""
    return getattr(value, "__dict__", None) or str(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_as_plain)


def encode(line: msgspec.Struct) -> bytes:
    """Return one line of a segment, with its newline."""
    return _ENCODER.encode(line) + b"\n"


FOLDER_VARIABLE = "SPECDECODE_RECORD_DIR"
TOKEN_IDS_VARIABLE = "SPECDECODE_RECORD_TOKEN_IDS"  # noqa: S105 (no password)
STEPS_VARIABLE = "SPECDECODE_RECORD_STEPS"

CLOSE_FILE = "close"
"""Made beside the segments by the load generator: the order to finish."""


@dataclass(frozen=True)
class Settings:
    """Where to record, and what apart from the requests."""

    folder: Path  # takes one segment of every API server of the engine
    token_ids: bool = False  # whether what was generated is recorded too. Prompts never are
    steps: bool = True

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Settings | None":
        """Return what the variables say, or None where nothing is to be recorded."""
        folder = environment.get(FOLDER_VARIABLE)
        if not folder:
            return None
        return cls(
            folder=Path(folder),
            token_ids=environment.get(TOKEN_IDS_VARIABLE, "0") == "1",
            steps=environment.get(STEPS_VARIABLE, "1") != "0",
        )
