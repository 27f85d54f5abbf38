"""Decode and check lines of a trace by the rules of vllm-vcr's reader.

That reader rejects a whole file for one bad line. The rules are restated from release 0.2.1 (crates sim-trace and
sim-protocol). A reader of a trace also rejects a duplicate of a known field, and lines that are not UTF-8. All
functions that decode raise an UnreadableLineError for a line that breaks a rule of its form.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from specdecode_operator.capture.files.formats import (
    Count,
    FinishReason,
    ItlContext,
    ItlSummary,
    Record,
    StepStats,
    TraceMeta,
)
from specdecode_operator.untrusted import MAX_DEPTH

_U64: Final = 2**64
_FINISH_REASONS: Final = " ".join(FinishReason.__args__)  # type: ignore[attr-defined]
_RECORD_FIELDS: Final = tuple(field.encode_name for field in msgspec.structs.fields(Record))
_INNER_FIELDS: Final = {
    name: tuple(field.encode_name for field in msgspec.structs.fields(kind))
    for name, kind in (("itl_ctx", ItlContext), ("itl_summary", ItlSummary))
}
_KEYS: Final = tuple(name.encode() for name in (*_RECORD_FIELDS, *chain(*_INNER_FIELDS.values())))
_WORD: Final = re.compile(rb'"(\w+)"')
_LONG_NUMBER: Final = re.compile(rb"\d{20}")
"""2^64 has 20 digits."""

_Line = TypeVar("_Line")


class CacheStats(Struct, kw_only=True, frozen=True):
    """The prefix cache's counters of one step."""

    reset: bool
    requests: Count
    queries: Count
    hits: Count
    preempted_requests: Count
    preempted_queries: Count
    preempted_hits: Count


class SpeculationStats(Struct, kw_only=True, frozen=True):
    """Counters of drafting in one step; the reader does not need the last one."""

    num_spec_tokens: Count
    num_drafts: Count
    num_draft_tokens: Count
    num_accepted_tokens: Count
    num_accepted_tokens_per_pos: list[Count]
    num_draft_tokens_per_pos: Any = None


class SchedulerStats(Struct, kw_only=True, frozen=True):
    """The fields of vLLM's statistics that a reader needs; builds for older engines need the last three."""

    num_running_reqs: Count
    num_waiting_reqs: Count
    step_counter: Count
    current_wave: Count
    kv_cache_usage: float
    prefix_cache_stats: CacheStats
    kv_cache_eviction_events: list[Any]
    num_skipped_waiting_reqs: Count = 0
    connector_prefix_cache_stats: CacheStats | None = None
    spec_decoding_stats: SpeculationStats | None = None
    iteration_details: Any = None
    encoder_cache_usage: float = 0.0
    waiting_lora_adapters: dict[str, Count] = {}
    running_lora_adapters: dict[str, Count] = {}


class StepLine(Struct, kw_only=True, frozen=True):
    """One line of step statistics; engine and duration are ours."""

    ts_ms: float
    scheduler: SchedulerStats
    engine: int = 0
    duration_ms: float | None = None


class _Header(Struct):
    meta: TraceMeta


@dataclass(frozen=True)
class BrokenRule:
    """One rule that a line breaks."""

    rule: str
    message: str


class UnreadableLineError(Exception):
    """A line that cannot even be decoded."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.broken = BrokenRule(rule, message)


_HEADER: Final = msgspec.json.Decoder(_Header)
_STEP: Final = msgspec.json.Decoder(StepLine)


def is_meta(text: bytes) -> bool:
    """Whether a trace's first line is its header rather than a record."""
    value = decode(msgspec.json.Decoder(), text)
    return isinstance(value, dict) and "meta" in value


def decode_meta(text: bytes) -> TraceMeta:
    """Return the header of a trace."""
    return decode(_HEADER, text).meta


def decode_record(decoder: "msgspec.json.Decoder[_Line]", text: bytes) -> _Line:
    """Return a record of a trace that is not its first line."""
    try:
        record = decode(decoder, text)
    except UnreadableLineError as error:
        if error.broken.rule == "missing-field" and b'"meta"' in text and is_meta(text):
            raise UnreadableLineError(
                "second-meta", "a second meta line: only the first line may be one; remove it"
            ) from error
        raise
    if name := _repeated(text):
        raise UnreadableLineError("repeated-field", f"{name} appears twice")
    return record


def decode_step(text: bytes) -> StepLine:
    """Return one line of step statistics."""
    step = decode(_STEP, text)
    if _LONG_NUMBER.search(text):
        _check_numbers(step)
    return step


def readable_step(stats: StepStats) -> StepLine:
    """Return step statistics as `decode_step` reads their line."""
    try:
        step = msgspec.convert(stats, StepLine, from_attributes=True)
    except msgspec.ValidationError as error:
        raise UnreadableLineError("type", str(error)) from error
    _check_numbers(step)
    return step


def _check_numbers(line: Struct) -> None:
    """Reject a decoded line that is nested too deeply or has an integer of more than 64 bits."""
    level: list[tuple[str, Any]] = [("", line)]
    for _ in range(MAX_DEPTH):
        for name, value in level:
            if isinstance(value, int) and value >= _U64:
                raise UnreadableLineError("type", f"{name}: {value} does not fit into 64 bits")
        level = [part for name, value in level for part in _parts(name, value)]
        if not level:
            return
    raise UnreadableLineError("json", f"nested more than {MAX_DEPTH} deep")


def _parts(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Return the named values inside an object or a list."""
    if isinstance(value, Struct):
        return msgspec.structs.asdict(value).items()
    if isinstance(value, dict):
        return value.items()
    return ((name, part) for part in value) if isinstance(value, list) else ()


def decode(decoder: "msgspec.json.Decoder[_Line]", text: bytes) -> _Line:
    """Return a line as the decoder's type."""
    try:
        text.decode()
        return decoder.decode(text)
    except UnicodeDecodeError as error:
        raise UnreadableLineError("utf-8", f"byte {error.start} is not UTF-8") from error
    except msgspec.ValidationError as error:
        message, rule = str(error), "missing-field" if "missing required field" in str(error) else "type"
        if "finish_reason" in message:
            message = f"{message}: it may be {_FINISH_REASONS}"
            rule = "finish-reason" if rule == "type" else rule
        raise UnreadableLineError(rule, message) from error
    except msgspec.DecodeError as error:
        raise UnreadableLineError("json", f"invalid JSON: {error}") from error
    except RecursionError as error:
        raise UnreadableLineError("json", "invalid JSON: nested too deeply") from error


def _repeated(text: bytes) -> str | None:
    """Return a duplicate field that the reader uses; a search for words first avoids a second parse."""
    words = _WORD.findall(text)
    if len(set(words)) == len(words) or not any(words.count(key) > 1 for key in _KEYS):
        return None
    # Objects as the list of their names and values, which keeps those that come twice.
    record: list[tuple[str, Any]] = json.loads(text, object_pairs_hook=list)
    objects = [("", record, _RECORD_FIELDS)]
    objects += [(f"{name}.", value, _INNER_FIELDS[name]) for name, value in record if name in _INNER_FIELDS and value]
    for prefix, pairs, fields in objects:
        names = [name for name, _ in pairs]
        if twice := next((name for name in fields if names.count(name) > 1), None):
            return f"{prefix}{twice}"
    return None


def broken_rules(record: Record) -> Iterator[BrokenRule]:
    """Return the rules that a decoded record breaks."""
    gaps, outputs = len(record.itl_ms or ()), record.output_tokens
    if outputs > 1 and record.itl_ms is None and record.itl_summary is None:
        yield BrokenRule("no-gaps", f"output_tokens is {outputs}, but itl_ms and itl_summary are missing")
    for name in ("num_running", "prefill_tokens") if record.itl_ctx else ():
        entries = len(getattr(record.itl_ctx, name))
        if entries != gaps:
            yield BrokenRule("context-length", f"itl_ctx.{name} has {entries} entries for {gaps} gaps in itl_ms")
    if record.itl_tokens is not None:
        yield from _broken_chunks(record.itl_tokens, gaps, outputs)
    ids = record.output_token_ids
    if ids is not None and len(ids) != outputs:
        yield BrokenRule("token-ids", f"output_token_ids has {len(ids)} ids for output_tokens {outputs}")
    names = ("prompt_tokens", "cached_tokens", "output_tokens", "concurrency")
    numbers = [(name, getattr(record, name)) for name in names]
    for name, value in (*numbers, *(("block_hashes", value) for value in record.block_hashes or ())):
        if value >= _U64:
            yield BrokenRule("type", f"{name}: {value} does not fit into 64 bits")


def _broken_chunks(tokens: list[int], gaps: int, output_tokens: int) -> Iterator[BrokenRule]:
    if len(tokens) != gaps:
        yield BrokenRule("chunk-length", f"itl_tokens has {len(tokens)} entries for {gaps} gaps in itl_ms")
    if 0 in tokens:
        yield BrokenRule("chunk-zero", f"itl_tokens has a 0 at position {tokens.index(0)}: every chunk has a token")
    if sum(tokens) >= output_tokens:
        yield BrokenRule(
            "chunk-sum",
            f"itl_tokens sums to {sum(tokens)}, which leaves 0 of {output_tokens} tokens for the first chunk",
        )
