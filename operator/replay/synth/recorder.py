"""Writes what an engine does in virtual time as a capture's trace and step statistics."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

from specdecode_operator.capture.files.formats import (
    STEP_STATS,
    TRACE,
    FinishReason,
    ItlContext,
    StepStats,
    TraceMeta,
    TraceRecord,
    encode,
    encode_meta,
)
from specdecode_operator.replay.engines.behaviour import StepReport
from specdecode_operator.replay.engines.engine import Burst, Incoming, Load
from specdecode_operator.replay.engines.step_stats import scheduler_stats
from specdecode_operator.replay.engines.virtual_clock import VirtualClock

_DIGITS = 4
"""Of a millisecond, as in captures."""


@dataclass(slots=True)
class _Watched:
    """One request while it goes on."""

    request: Incoming
    phase: str | None
    arrival_ms: float
    concurrency: int
    done: Callable[[], None]
    scheduled_ms: float | None = None
    preemptions: int = 0
    cached_tokens: int = 0
    stamps_ms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_running: list[int] = field(default_factory=list)
    prefill_tokens: list[int] = field(default_factory=list)


class VirtualRecorder:
    """Takes the steps and bursts of one engine; lines are written as requests finish and steps end."""

    def __init__(self, folder: Path, clock: VirtualClock, meta: TraceMeta, k: int) -> None:
        """Write into a folder, which is there."""
        self._clock = clock
        self._trace: BinaryIO = (folder / TRACE).open("wb")
        self._steps: BinaryIO = (folder / STEP_STATS).open("wb")
        self._trace.write(encode_meta(meta) + b"\n")
        self._k = k
        self._open: dict[str, _Watched] = {}
        self._last: StepReport | None = None
        self.finished = 0
        self.failed = 0

    def close(self) -> None:
        """Write what is left."""
        self._trace.close()
        self._steps.close()

    def watch(self, request: Incoming, phase: str | None, done: Callable[[], None]) -> Callable[[Burst], None]:
        """Take a request that arrives now."""
        watched = _Watched(request, phase, self._clock.now_ms(), len(self._open) + 1, done)
        self._open[request.request_id] = watched

        def take(burst: Burst) -> None:
            if burst.tokens:
                self._add(watched, burst)
            if burst.finish_reason is not None:
                del self._open[request.request_id]
                self._write(watched, burst.finish_reason)
                watched.done()

        return take

    def on_step(self, report: StepReport) -> None:
        """Take a step, before its bursts."""
        self._last = report
        start_ms = report.end_ms - report.duration_ms
        for request_id in report.scheduled:
            self._open[request_id].scheduled_ms = start_ms
        for request_id in report.preempted:
            self._open[request_id].preemptions += 1
        line = StepStats(
            ts_ms=round(report.end_ms, _DIGITS),
            scheduler=_scheduler_stats(report, self._k),
            duration_ms=round(report.duration_ms, _DIGITS),
        )
        self._steps.write(encode(line) + b"\n")

    def _add(self, watched: _Watched, burst: Burst) -> None:
        if not watched.stamps_ms:
            watched.cached_tokens = burst.cached_tokens
        watched.stamps_ms.append(self._clock.now_ms())
        watched.tokens.append(burst.tokens)
        watched.num_running.append(max(1, self._last.running if self._last else 1))
        watched.prefill_tokens.append(self._last.first_prompt_tokens if self._last else 0)

    def _write(self, watched: _Watched, finish_reason: str) -> None:
        if not watched.stamps_ms:
            self.failed += 1
            return
        if finish_reason == "error":
            # Its answer outgrew the KV cache.
            self.failed += 1
        else:
            self.finished += 1
        stamps_ms = [round(stamp_ms, _DIGITS) for stamp_ms in watched.stamps_ms]
        arrival_ms = round(watched.arrival_ms, _DIGITS)
        scheduled_ms = watched.scheduled_ms
        record = TraceRecord(
            prompt_tokens=watched.request.prompt_tokens,
            cached_tokens=watched.cached_tokens,
            output_tokens=sum(watched.tokens),
            ttft_ms=round(stamps_ms[0] - arrival_ms, _DIGITS),
            itl_ms=[round(after - before, _DIGITS) for before, after in pairwise(stamps_ms)],
            itl_tokens=watched.tokens[1:] if any(tokens != 1 for tokens in watched.tokens[1:]) else None,
            concurrency=watched.concurrency,
            arrival_ms=arrival_ms,
            itl_ctx=ItlContext(num_running=watched.num_running[1:], prefill_tokens=watched.prefill_tokens[1:]),
            block_hashes=list(watched.request.block_hashes) or None,
            finish_reason=cast("FinishReason", finish_reason),
            request_id=watched.request.request_id,
            engine=0,
            phase=watched.phase,
            temperature=watched.request.temperature,
            scheduled_ms=None if scheduled_ms is None else round(scheduled_ms, _DIGITS),
            preemptions=watched.preemptions,
            ended_by="engine",
        )
        self._trace.write(encode(record) + b"\n")


def _scheduler_stats(report: StepReport, k: int) -> dict[str, Any]:
    """Return a step as vLLM's SchedulerStats have it."""
    load = Load(
        running=report.running,
        waiting=report.waiting,
        kv_cache_usage=report.kv_cache_usage,
        prefix_cache_queries=report.prefix_cache_queries,
        prefix_cache_hits=report.prefix_cache_hits,
    )
    return scheduler_stats(load, len(report.scheduled), report.drafted, report.accepted, k) | {
        "iteration_details": {
            "iteration_index": report.index,
            "num_ctx_requests": report.prefilling,
            "num_ctx_tokens": report.shape.prefill_tokens,
            "num_generation_requests": report.decoding,
            "num_generation_tokens": report.shape.scheduled_tokens - report.shape.prefill_tokens,
            "elapsed_ms": round(report.duration_ms, _DIGITS),
        },
    }
