"""Record what is served as a capture, in the files that captures of real engines have."""

import asyncio
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Final

from specdecode_operator.capture.files.formats import (
    ABORTED,
    PART_SUFFIX,
    STEP_STATS,
    TRACE,
    StepStats,
    TraceMeta,
    encode,
    encode_meta,
)
from specdecode_operator.capture.files.merge import Clock, aborted_record, trace_record
from specdecode_operator.capture.files.publish import seal
from specdecode_operator.capture.recorder.segment_format import Request
from specdecode_operator.replay.engine import Burst, ReplayEngine, scheduler_stats
from specdecode_operator.replay.server.vllm_metrics import Answer

SOURCE: Final = "replay"
"""Source in the header of a trace that replay recorded."""

_MS_PER_S: Final = 1000


@dataclass(slots=True)
class _Live:
    """One answer in generation."""

    cached_tokens: int = 0
    stamps_ms: "array[float]" = field(default_factory=lambda: array("d"))
    tokens: "array[int]" = field(default_factory=lambda: array("I"))
    num_running: "array[int]" = field(default_factory=lambda: array("I"))
    prefill_tokens: "array[int]" = field(default_factory=lambda: array("I"))
    ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Step:
    """Bursts and ended answers of one moment."""

    end_ms: float
    members: list[_Live] = field(default_factory=list)
    begun: int = 0
    prefill_tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    lines: list[tuple[Answer, _Live, str, str | None, str | None]] = field(default_factory=list)


class CaptureRecorder:
    """Writes trace and step statistics of one server."""

    def __init__(self, folder: Path, meta: TraceMeta, engine: ReplayEngine, k: int) -> None:
        """Write into a folder, which must be empty or absent.

        Raises
        ------
        OSError
            The folder has files, or cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FileExistsError(17, "holds files already", str(folder))
        self._folder = folder
        self._engine = engine
        self._k = k
        self._clock = Clock(0.0)  # stamps are since the run's zero already
        self._live: dict[Answer, _Live] = {}
        self._step: _Step | None = None
        self._queries = self._hits = 0
        self._trace = self._open(TRACE)
        # Without a schema of ours, no field explains the tokens of a step.
        self._steps = self._open(STEP_STATS) if meta.schema is not None else None
        self._aborted: BinaryIO | None = None
        self.failure: OSError | None = None  # ends the recording only: a full disk must not disturb clients
        self._trace.write(encode_meta(meta) + b"\n")

    def burst(self, answer: Answer, burst: Burst, now_ms: float) -> None:
        """Record a burst of an answer."""
        if self.failure is not None:
            return
        step = self._step
        # A late event loop may run two steps in one turn; they differ in their moment.
        if step is None or step.end_ms != now_ms:
            self._end_step()
            step = self._step = _Step(now_ms)
            asyncio.get_running_loop().call_soon(self._end_step)
        live = self._live.get(answer)
        if live is None:
            live = self._live[answer] = _Live(cached_tokens=burst.cached_tokens)
        if not burst.tokens:
            return
        if not live.stamps_ms:
            step.begun += 1
            step.prefill_tokens += answer.request.prompt_tokens
        live.stamps_ms.append(step.end_ms)
        live.tokens.append(burst.tokens)
        live.ids += burst.token_ids
        step.members.append(live)
        if burst.drafted:
            step.drafted.append(burst.drafted)
            step.accepted.append(burst.accepted)

    def ended(self, answer: Answer, by: str, finish_reason: str | None, stop_reason: str | None) -> None:
        """Record the end of an answer: who ended it, and why."""
        live = self._live.pop(answer, None) or _Live()
        if self._step is not None:
            self._step.lines.append((answer, live, by, finish_reason, stop_reason))
        else:
            self._try(lambda: self._write(answer, live, by, finish_reason, stop_reason))

    def close(self) -> None:
        """Write the open answers, and give the files their final names unless writing has failed."""
        self._end_step()
        self._try(self._finish)
        for stream in self._streams():
            with suppress(OSError):
                stream.close()

    def _streams(self) -> list[BinaryIO]:
        return [stream for stream in (self._trace, self._steps, self._aborted) if stream is not None]

    def _finish(self) -> None:
        for answer, live in self._live.items():
            self._write(answer, live, "unfinished", None, None)
        self._live.clear()
        for stream in self._streams():
            stream.close()
        seal(self._folder)

    def _try(self, write: Callable[[], None]) -> None:
        """Write, unless an earlier write failed: nothing may follow a torn line."""
        if self.failure is not None:
            return
        try:
            write()
        except OSError as error:
            self.failure = error
            self._live.clear()

    def _end_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            self._try(lambda: self._write_all(step))

    def _write_all(self, step: _Step) -> None:
        load = self._engine.load()
        for live in step.members:
            live.num_running.append(max(1, load.running))
            live.prefill_tokens.append(step.prefill_tokens)
        if step.members and self._steps is not None:
            of_step = replace(
                load,
                prefix_cache_queries=load.prefix_cache_queries - self._queries,
                prefix_cache_hits=load.prefix_cache_hits - self._hits,
            )
            self._queries, self._hits = load.prefix_cache_queries, load.prefix_cache_hits
            stats = scheduler_stats(of_step, step.begun, step.drafted, step.accepted, self._k)
            self._steps.write(encode(StepStats(ts_ms=round(step.end_ms, 4), scheduler=stats)) + b"\n")
        for line in step.lines:
            self._write(*line)

    def _write(self, answer: Answer, live: _Live, by: str, finish_reason: str | None, stop_reason: str | None) -> None:
        request = Request(
            id=answer.request.request_id,
            external_id=None,
            engine=0,
            arrival_monotonic_s=answer.arrival_ms / _MS_PER_S,
            arrival_wall_s=0.0,
            prompt_tokens=answer.request.prompt_tokens,
            concurrency=answer.concurrency,
            temperature=answer.request.temperature,
            queued_s=None,
            scheduled_s=None if answer.scheduled_ms is None else answer.scheduled_ms / _MS_PER_S,
            preemptions=0,
            cached_tokens=live.cached_tokens,
            chunk_s=[stamp_ms / _MS_PER_S for stamp_ms in live.stamps_ms],
            chunk_tokens=list(live.tokens),
            num_running=list(live.num_running),
            prefill_tokens=list(live.prefill_tokens),
            block_hashes=list(answer.request.block_hashes),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            ended_by=by,
            token_ids=live.ids if len(live.ids) == sum(live.tokens) > 0 else None,
        )
        if live.tokens:
            self._trace.write(encode(trace_record(request, None, self._clock)) + b"\n")
        else:
            self._aborted = self._aborted or self._open(ABORTED)
            self._aborted.write(encode(aborted_record(request, None, self._clock)) + b"\n")
        # A killed server leaves whole lines of all requests that had ended.
        for stream in self._streams():
            stream.flush()

    def _open(self, name: str) -> BinaryIO:
        return (self._folder / f"{name}{PART_SUFFIX}").open("xb")
