"""The steps of an engine, found again in what its requests got.

All that came out of one step has one stamp. Step statistics say what was in it and show the steps that gave nobody a
token; without them a step is known by its chunks alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specdecode_operator.capture.validation.rules import StepLine
from specdecode_operator.replay.recording.recording import RecordedRequest

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SAME_STEP_MS: Final = 0.05
"""Stamps of one step differ by what rounding adds up to; no step is so short."""


_MOST_TOKENS: Final = 2**31


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Steps of one engine in order; arrays named by what they hold, one entry a step or one a chunk."""

    k: int
    # Of steps
    end_ms: Floats
    duration_ms: Floats  # nan where it is not known when it began
    follows: Bools  # it began when the one before ended
    requests: Ints
    decoding: Ints  # of them, those that have their next tokens
    prefill_tokens: Ints
    context_tokens: Ints
    kv_cache_usage: Floats  # nan without step statistics
    # Of chunks, those of a request one after another
    chunk_request: Ints
    chunk_step: Ints
    chunk_tokens: Ints
    chunk_before: Ints  # tokens that the request had been given before
    chunk_is_first: Bools
    chunk_is_cut: Bools  # the last of a request that ended at max_tokens
    # Of requests
    prompt_tokens: Ints
    lead_ms: Floats  # from arrival to the first scheduling, of those who found the engine idle


@dataclass(frozen=True)
class _Chunks:
    request: Ints
    stamp_ms: Floats
    tokens: Ints
    before: Ints
    is_first: Bools
    is_last: Bools


def timeline(requests: Sequence[RecordedRequest], lines: Iterable[StepLine], k: int) -> Timeline:
    """Return the steps of one engine, of requests that have an arrival."""
    chunks = _chunks(requests)
    stats = list(lines)
    stats_ms = np.array([line.ts_ms for line in stats], dtype=np.float64)
    step_of, end_ms = _clustered(np.concatenate([chunks.stamp_ms, stats_ms]))
    chunk_step, stats_step = step_of[: len(chunks.stamp_ms)], step_of[len(chunks.stamp_ms) :]
    known = [each.scheduled_ms if each.scheduled_ms is not None else each.arrival_ms for each in requests]
    begin_ms = np.array(known, dtype=np.float64)
    last_ms = chunks.stamp_ms[chunks.is_last]
    starts = _starts(end_ms, begin_ms, last_ms)
    decoding, context = _decoding(requests, chunks, chunk_step, len(end_ms))
    prefill, prefilling = _prefill(requests, chunk_step[chunks.is_first], end_ms, begin_ms)
    batch = decoding + prefilling
    usage = np.full(len(end_ms), np.nan)
    for line, step in zip(stats, stats_step, strict=True):
        usage[step] = line.scheduler.kv_cache_usage
        _take_details(line.scheduler.iteration_details, int(step), (batch, decoding, prefill))
    ended = np.array([each.finish_reason == "length" for each in requests])
    return Timeline(
        k=k,
        end_ms=end_ms,
        duration_ms=end_ms - starts.ms,
        follows=starts.follows,
        requests=batch,
        decoding=decoding,
        prefill_tokens=prefill,
        context_tokens=context,
        kv_cache_usage=usage,
        chunk_request=chunks.request,
        chunk_step=chunk_step,
        chunk_tokens=chunks.tokens,
        chunk_before=chunks.before,
        chunk_is_first=chunks.is_first,
        chunk_is_cut=chunks.is_last & ended[chunks.request],
        prompt_tokens=np.array([each.prompt_tokens for each in requests], dtype=np.int64),
        lead_ms=_leads_ms(requests, begin_ms, last_ms),
    )


def _leads_ms(requests: Sequence[RecordedRequest], begin_ms: Floats, last_ms: Floats) -> Floats:
    """Return the time to the scheduler, of those who found nobody there when they came and when they began."""
    arrival_ms = np.array([each.arrival_ms for each in requests], dtype=np.float64)
    alone = _active(arrival_ms, begin_ms, last_ms) + _active(begin_ms, begin_ms, last_ms) == 0
    known = np.array([each.scheduled_ms is not None for each in requests])
    return np.asarray(np.maximum(0.0, begin_ms - arrival_ms)[alone & known], dtype=np.float64)


def _chunks(requests: Sequence[RecordedRequest]) -> _Chunks:
    counts = np.array([len(each.chunk_tokens) for each in requests], dtype=np.int64)
    stamps = []
    for each in requests:
        times = np.empty(len(each.chunk_tokens))
        times[0] = (each.arrival_ms or 0.0) + each.ttft_ms
        times[1:] = each.gaps_ms
        stamps.append(np.cumsum(times))
    tokens = np.concatenate([np.asarray(each.chunk_tokens, dtype=np.int64) for each in requests])
    ends = np.cumsum(counts)
    is_first, is_last = np.zeros(len(tokens), dtype=bool), np.zeros(len(tokens), dtype=bool)
    is_first[ends - counts], is_last[ends - 1] = True, True
    total = np.cumsum(tokens) - tokens
    request = np.repeat(np.arange(len(requests)), counts)
    return _Chunks(request, np.concatenate(stamps), tokens, total - total[ends - counts][request], is_first, is_last)


def _clustered(stamps_ms: Floats) -> tuple[Ints, Floats]:
    """Return the step of each stamp, and when each step ended."""
    order = np.argsort(stamps_ms, kind="stable")
    ordered = stamps_ms[order]
    begins = np.concatenate([[True], np.diff(ordered) > SAME_STEP_MS])
    of_ordered = np.cumsum(begins) - 1
    step_of = np.empty(len(stamps_ms), dtype=np.int64)
    step_of[order] = of_ordered
    return step_of, ordered[begins]


@dataclass(frozen=True)
class _Starts:
    ms: Floats
    follows: Bools


def _active(at_ms: Floats, begin_ms: Floats, last_ms: Floats) -> Ints:
    """Return how many requests had begun and were not over at each moment."""
    begun = np.searchsorted(np.sort(begin_ms), at_ms - SAME_STEP_MS, side="right")
    over = np.searchsorted(np.sort(last_ms), at_ms + SAME_STEP_MS, side="right")
    return np.asarray(begun - over, dtype=np.int64)


def _starts(end_ms: Floats, begin_ms: Floats, last_ms: Floats) -> _Starts:
    """Return when each step began: when the one before ended, or its first request came into an idle engine."""
    before = np.concatenate([[-np.inf], end_ms[:-1]])
    # Who is scheduled right at the end of a step has its stamp a moment later.
    follows = _active(before + 2 * SAME_STEP_MS, begin_ms, last_ms) > 0
    ordered = np.sort(begin_ms)
    first = np.searchsorted(ordered, before, side="left")
    came = ordered[np.minimum(first, len(ordered) - 1)]
    idle = np.where((first < len(ordered)) & (came < end_ms), came, np.nan)
    return _Starts(np.where(follows, before, idle), follows)


def _decoding(requests: Sequence[RecordedRequest], chunks: _Chunks, chunk_step: Ints, steps: int) -> tuple[Ints, Ints]:
    """Return, for each step: requests that decode, tokens that all attend to."""
    prompts = np.array([each.prompt_tokens for each in requests], dtype=np.int64)
    attended = (prompts[chunks.request] + chunks.before).astype(np.float64)
    context = np.bincount(chunk_step, weights=attended, minlength=steps)
    return np.bincount(chunk_step[~chunks.is_first], minlength=steps), context.astype(np.int64)


def _prefill(requests: Sequence[RecordedRequest], last: Ints, end_ms: Floats, begin_ms: Floats) -> tuple[Ints, Ints]:
    """Return the tokens of prompts in each step, and of how many; ``last`` is where each request's prompt ended."""
    computed = np.array([max(1, each.prompt_tokens - each.cached_tokens) for each in requests], dtype=np.int64)
    prefill, prefilling = np.zeros(len(end_ms), dtype=np.int64), np.zeros(len(end_ms), dtype=np.int64)
    first = np.minimum(np.searchsorted(end_ms, begin_ms + SAME_STEP_MS, side="right"), last)
    alone = first == last
    np.add.at(prefill, last[alone], computed[alone])
    np.add.at(prefilling, last[alone], 1)
    for request in np.flatnonzero(~alone):
        # In chunks; of what size each was, nobody wrote down.
        span = slice(first[request], last[request] + 1)
        prefill[span] += -(-computed[request] // (last[request] + 1 - first[request]))
        prefilling[span] += 1
    return prefill, prefilling


def _take_details(details: Any, step: int, into: tuple[Ints, Ints, Ints]) -> None:
    """Take what the engine itself says of a step, in place of what was made out."""
    if not isinstance(details, dict):
        return
    names = ("num_ctx_requests", "num_generation_requests", "num_ctx_tokens")
    values = [value for name in names if isinstance(value := details.get(name), int) and 0 <= value < _MOST_TOKENS]
    if len(values) == len(names):
        batch, decoding, prefill = into
        batch[step], decoding[step], prefill[step] = values[0] + values[1], values[1], values[2]
