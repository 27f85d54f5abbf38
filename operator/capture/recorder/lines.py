"""The lines of a segment file, as they are encoded: one structure a kind, tagged by ``k``.

Every time is in seconds. ``*_monotonic_s``, ``chunk_s``, ``queued_s``, ``scheduled_s`` and ``t`` are
CLOCK_MONOTONIC of this host, ``*_wall_s`` are seconds since 1970.
"""

from typing import Any

import msgspec

from .version import RECORDER_VERSION

SCHEMA = 1

Json = dict[str, Any]


class Header(msgspec.Struct, tag_field="k", tag="header", frozen=True, kw_only=True):
    """First line: who records, where, and with which settings the engine runs.

    Attributes
    ----------
    start
        The same for all API servers of one start of the engine, where that can be told.
    gpu_uuids
        What the driver calls the GPUs; empty where it does not tell.
    """

    schema: int = SCHEMA
    recorder: str = RECORDER_VERSION
    vllm: str
    boot: str
    host: str
    pid: int
    client_index: int
    client_count: int
    engines: list[int]
    wall_s: float
    monotonic_s: float
    model: str | None
    config: Json
    gpu: str | None
    token_ids: bool
    steps: bool
    start: str | None = None
    gpu_uuids: list[str] = []


class Request(msgspec.Struct, tag_field="k", tag="request", frozen=True, kw_only=True, omit_defaults=True):
    """A request that ended: finished, aborted, or unfinished when the segment was closed.

    The arrays ``chunk_s``, ``chunk_tokens``, ``num_running`` and ``prefill_tokens`` have one entry an engine
    output that carried tokens, with the tokens as the engine produced them.

    Attributes
    ----------
    kept_tokens
        How many tokens of the last chunk the client could get, where a stop string cut it.
        Absent where nothing was cut or vLLM does not tell (before 0.32).
    token_ids
        What was generated; absent unless asked for.
    """

    id: str
    external_id: str | None
    engine: int | None
    arrival_monotonic_s: float
    arrival_wall_s: float
    prompt_tokens: int
    concurrency: int
    temperature: float | None
    queued_s: float | None
    scheduled_s: float | None
    preemptions: int
    cached_tokens: int | None
    chunk_s: list[float]
    chunk_tokens: list[int]
    num_running: list[int]
    prefill_tokens: list[int]
    block_hashes: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    ended_by: str
    kept_tokens: int | None = None
    token_ids: list[int] | None = None


class Step(msgspec.Struct, tag_field="k", tag="step", frozen=True):
    """The statistics of one engine step, as the scheduler made them."""

    engine: int
    t: float
    scheduler: Any


class Anchor(msgspec.Struct, tag_field="k", tag="anchor", frozen=True):
    """Both clocks at one moment."""

    monotonic_s: float
    wall_s: float


class Off(msgspec.Struct, tag_field="k", tag="off", frozen=True):
    """The recorder turned itself off."""

    reason: str


class Closed(msgspec.Struct, tag_field="k", tag="closed", frozen=True):
    """Last line: why, and how much there is before it.

    Attributes
    ----------
    dropped
        Everything that could not be recorded: what the queue had no room for, what was not written,
        and one for each error in a hook. A capture with any of them is incomplete.
    unfinished
        How many of the requests had not ended.
    errors, first_error
        What went wrong in the hooks, for the one who looks into it.
    """

    reason: str
    requests: int
    steps: int
    dropped: int
    unfinished: int
    errors: int
    first_error: str | None


def _as_plain(value: Any) -> Any:
    """Return something that can be encoded for what msgspec does not know (connector statistics hold anything)."""
    return getattr(value, "__dict__", None) or str(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_as_plain)


def encode(line: msgspec.Struct) -> bytes:
    """Return one line of a segment, with its newline."""
    return _ENCODER.encode(line) + b"\n"
