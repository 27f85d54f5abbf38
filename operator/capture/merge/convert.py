"""One raw line of a segment into one line of a published file."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, cast

from specdecode_operator.capture.files.formats import (
    AbortedRecord,
    ClientRecord,
    FinishReason,
    ItlContext,
    StepStats,
    TraceRecord,
)
from specdecode_operator.capture.merge.request_ids import client_id
from specdecode_operator.capture.merge.whole_engine import WholeEngine
from specdecode_operator.capture.recorder.lines import Request, Step

_DIGITS: Final = 4
"""Of a millisecond: a tenth of a microsecond, less than an engine's stamp is good for."""
_OLDER_READERS: Final[dict[str, Any]] = {
    "encoder_cache_usage": 0.0,
    "waiting_lora_adapters": {},
    "running_lora_adapters": {},
}
"""What vllm-vcr builds for older engines demand and vLLM 0.32 does not have."""


@dataclass(frozen=True)
class Clock:
    """Turns an engine's stamps into milliseconds since the run's zero."""

    zero_s: float  # by CLOCK_MONOTONIC

    def ms(self, stamp_s: float) -> float:
        """Return a moment in milliseconds."""
        return round((stamp_s - self.zero_s) * 1000, _DIGITS)

    def ms_or_none(self, stamp_s: float | None) -> float | None:
        """Return a moment in milliseconds, if it is known."""
        return None if stamp_s is None else self.ms(stamp_s)


@dataclass(frozen=True)
class _Chunks:
    """Chunks that carry tokens, with their batch."""

    stamps_s: list[float]
    tokens: list[int]
    num_running: list[int]
    prefill_tokens: list[int]


def trace_record(
    request: Request, client: ClientRecord | None, clock: Clock, whole: WholeEngine | None = None
) -> TraceRecord:
    """Return the trace's line of a request that has tokens; `whole` is given where API servers share engines."""
    chunks = _chunks(request, whole)
    arrival_s = request.arrival_monotonic_s
    later = chunks.tokens[1:]
    return TraceRecord(
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens or 0,
        output_tokens=sum(chunks.tokens),
        ttft_ms=_gap_ms(arrival_s, chunks.stamps_s[0]),
        itl_ms=[_gap_ms(before_s, after_s) for before_s, after_s in pairwise(chunks.stamps_s)],
        itl_tokens=later if any(tokens != 1 for tokens in later) else None,
        concurrency=max(1, whole.concurrency(arrival_s) if whole else request.concurrency),
        arrival_ms=clock.ms(arrival_s),
        itl_ctx=ItlContext(num_running=chunks.num_running[1:], prefill_tokens=chunks.prefill_tokens[1:]),
        block_hashes=request.block_hashes or None,
        output_token_ids=request.token_ids,
        finish_reason=cast("FinishReason | None", request.finish_reason),
        request_id=client.id if client else client_id(request.external_id or request.id),
        engine=request.engine,
        phase=client.phase if client else None,
        temperature=request.temperature,
        queued_ms=clock.ms_or_none(request.queued_s),
        scheduled_ms=clock.ms_or_none(request.scheduled_s),
        preemptions=request.preemptions,
        ended_by=request.ended_by,
        stop_reason=request.stop_reason,
        kept_tokens=request.kept_tokens,
        client_ttft_ms=client.ttft_ms if client else None,
    )


def aborted_record(request: Request, client: ClientRecord | None, clock: Clock) -> AbortedRecord:
    """Return the line of a request that ended without a token."""
    return AbortedRecord(
        request_id=client.id if client else client_id(request.external_id or request.id),
        engine=request.engine,
        phase=client.phase if client else None,
        arrival_ms=clock.ms(request.arrival_monotonic_s),
        prompt_tokens=request.prompt_tokens,
        queued_ms=clock.ms_or_none(request.queued_s),
        scheduled_ms=clock.ms_or_none(request.scheduled_s),
        ended_by=request.ended_by,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
    )


def step_stats(step: Step, scheduler: dict[str, Any], clock: Clock) -> StepStats:
    """Return the published line of a step that carried statistics."""
    details = scheduler.get("iteration_details")
    return StepStats(
        ts_ms=clock.ms(step.t),
        scheduler=_OLDER_READERS | scheduler,
        engine=step.engine,
        duration_ms=details.get("elapsed_ms") if isinstance(details, dict) else None,
    )


def has_tokens(request: Request) -> bool:
    """Whether the engine produced anything for a request."""
    return any(request.chunk_tokens)


def _chunks(request: Request, whole: WholeEngine | None) -> _Chunks:
    """A message without tokens, such as one that only says that a request ended, is no chunk."""
    kept = [index for index, tokens in enumerate(request.chunk_tokens) if tokens]
    stamps_s = [request.chunk_s[index] for index in kept]
    running = [request.num_running[index] for index in kept]
    prefill = [request.prefill_tokens[index] for index in kept]
    if whole is not None:
        engine = request.engine or 0
        of_all = [whole.num_running(engine, stamp_s) for stamp_s in stamps_s]
        running = [own if found is None else found for found, own in zip(of_all, running, strict=True)]
        prefill = [whole.prefill_tokens(engine, stamp_s) for stamp_s in stamps_s]
    return _Chunks(stamps_s, [request.chunk_tokens[index] for index in kept], [max(1, n) for n in running], prefill)


def _gap_ms(before_s: float, after_s: float) -> float:
    return round((after_s - before_s) * 1000, _DIGITS)
