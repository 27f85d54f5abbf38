"""Count served answers at /metrics by vLLM's names and labels, and record them as a capture."""

import asyncio
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

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
from specdecode_operator.capture.files.merge import Clock as SegmentClock
from specdecode_operator.capture.files.merge import aborted_record, trace_record
from specdecode_operator.capture.files.publish import seal
from specdecode_operator.capture.recorder.segment_format import Request
from specdecode_operator.replay.engine import (
    Burst,
    Clock,
    Incoming,
    ReplayEngine,
    Sink,
    Submission,
    scheduler_stats,
)


class FastHistogram:
    """Histogram with inclusive upper bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts by bound, as Prometheus has them."""
        bounds = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))


# The bounds are those of vLLM 0.32 (vllm/v1/metrics/buckets.py).
_LATENCY_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TTFT_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_ITL_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_TOKENS: Final = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
_HISTOGRAMS: Final = {
    "time_to_first_token_seconds": _TTFT_S,
    "inter_token_latency_seconds": _ITL_S,
    "request_time_per_output_token_seconds": _ITL_S,
    "e2e_request_latency_seconds": _LATENCY_S,
    "request_queue_time_seconds": _LATENCY_S,
    "request_prefill_time_seconds": _LATENCY_S,
    "request_decode_time_seconds": _LATENCY_S,
    "request_inference_time_seconds": _LATENCY_S,
    "request_prompt_tokens": _TOKENS,
    "request_generation_tokens": _TOKENS,
    "request_params_max_tokens": _TOKENS,
    "request_params_n": (1, 2, 5, 10, 20),
}
_MS_PER_S: Final = 1000


class Meter:
    """Sums over all answers since the server started."""

    def __init__(
        self,
        clock: Clock,
        num_speculative_tokens: int,
        recorder: "CaptureRecorder | None" = None,
        time_scale: float = 1.0,
    ) -> None:
        """Start at zero; a second of the engine takes ``time_scale`` seconds on this clock."""
        self.now_ms = clock.now_ms
        self.time_scale = time_scale
        self.recorder = recorder
        self.in_flight = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.responses: Counter[tuple[str, int]] = Counter()  # by path and status
        self.draft_tokens = 0
        # Drafts by their accepted tokens; with a single entry, the engine does not speculate.
        self.drafts_by_accepted = [0] * (num_speculative_tokens + 1)
        self.histograms = {name: FastHistogram(bounds) for name, bounds in _HISTOGRAMS.items()}

    def observe(self, histogram: str, value: float) -> None:
        """Count a value in a histogram, named as in vLLM."""
        self.histograms[histogram].observe(value)


@dataclass(slots=True, eq=False)
class Answer:
    """One answer in generation: passes bursts on and counts them."""

    _meter: Meter
    _engine: InitVar[ReplayEngine]
    request: Incoming
    _sink: Sink
    arrival_ms: float = field(init=False)
    concurrency: int = field(init=False)
    first_ms: float | None = None
    tokens: int = 0
    _last_ms: float = 0.0
    _over: bool = False
    _ticket: Submission | None = None

    def __post_init__(self, _engine: ReplayEngine) -> None:
        """Submit the request to the engine."""
        meter = self._meter
        self.arrival_ms = meter.now_ms()
        # The engine may reject the request, or end it, before it returns.
        meter.in_flight += 1
        self.concurrency = meter.in_flight
        try:
            self._ticket = _engine.submit(self.request, self._take)
        except BaseException:
            meter.in_flight -= 1
            raise
        meter.observe("request_params_max_tokens", self.request.max_tokens)

    @property
    def scheduled_ms(self) -> float | None:
        """When the engine first scheduled the request; None if it has not."""
        waited_ms = self._ticket.waited_ms() if self._ticket is not None else None
        if waited_ms is None:
            return None
        # Never after its first token, which may be a little early.
        scheduled_ms = self.arrival_ms + waited_ms * self._meter.time_scale
        return scheduled_ms if self.first_ms is None else min(scheduled_ms, self.first_ms)

    def abort(self) -> None:
        """Cancel the request, as its client did; no effect if it is over."""
        self._end("abort", "abort", None)

    def stop(self, text: str) -> None:
        """End the answer at a stop string."""
        self._end("stop_string", "stop", text)

    def _take(self, burst: Burst) -> None:
        meter = self._meter
        now_ms = meter.now_ms()
        tokens, drafted = burst.tokens, burst.drafted
        if self.first_ms is not None:
            meter.observe("inter_token_latency_seconds", (now_ms - self._last_ms) / _MS_PER_S)
        elif tokens:
            self.first_ms = now_ms
            meter.observe("time_to_first_token_seconds", (now_ms - self.arrival_ms) / _MS_PER_S)
            meter.prompt_tokens += self.request.prompt_tokens
            meter.cached_tokens += burst.cached_tokens
        self._last_ms = now_ms
        self.tokens += tokens
        meter.generation_tokens += tokens
        if drafted:
            meter.draft_tokens += drafted
            by_accepted, accepted = meter.drafts_by_accepted, burst.accepted
            # A model fitted to chunks that were merged may give more than K.
            by_accepted[accepted if accepted < len(by_accepted) else -1] += 1
        if meter.recorder is not None:
            meter.recorder.burst(self, burst, now_ms)
        self._sink(burst)
        if burst.finish_reason is not None:
            self._end("engine", burst.finish_reason, None)

    def _end(self, by: str, finish_reason: str, stop_reason: str | None) -> None:
        if self._over:
            return
        self._over = True
        if self._ticket is not None:
            self._ticket.cancel()
        meter = self._meter
        meter.in_flight -= 1
        meter.finished[finish_reason] += 1
        if (first_ms := self.first_ms) is not None:
            last_ms, scheduled_ms = self._last_ms, self.scheduled_ms or self.arrival_ms
            decode_s = (last_ms - first_ms) / _MS_PER_S
            meter.observe("e2e_request_latency_seconds", (last_ms - self.arrival_ms) / _MS_PER_S)
            meter.observe("request_queue_time_seconds", (scheduled_ms - self.arrival_ms) / _MS_PER_S)
            meter.observe("request_prefill_time_seconds", (first_ms - scheduled_ms) / _MS_PER_S)
            meter.observe("request_inference_time_seconds", (last_ms - scheduled_ms) / _MS_PER_S)
            meter.observe("request_decode_time_seconds", decode_s)
            meter.observe("request_prompt_tokens", self.request.prompt_tokens)
            meter.observe("request_generation_tokens", self.tokens)
            if self.tokens > 1:
                meter.observe("request_time_per_output_token_seconds", decode_s / (self.tokens - 1))
        if meter.recorder is not None:
            meter.recorder.ended(self, by, finish_reason, stop_reason)


_ENGINE: Final = "0"
_LABELS: Final = ("model_name", "engine")
_Family = TypeVar("_Family", GaugeMetricFamily, CounterMetricFamily)


@dataclass(frozen=True, eq=False)
class Exposition:
    """The metrics page, as a collector of Prometheus' client library."""

    meter: Meter
    engine: ReplayEngine
    model: str
    load_factor: float  # number of requests that each served one represents
    cache_config: Mapping[str, str]  # labels of ``vllm:cache_config_info``

    def text(self) -> bytes:
        """Return the page."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Return every metric."""
        meter, load, factor = self.meter, self.engine.load(), self.load_factor
        gauge, counter = partial(self._one, GaugeMetricFamily), partial(self._one, CounterMetricFamily)
        usage = min(1.0, load.kv_cache_usage * factor)
        yield gauge("num_requests_running", "Number of requests in model execution batches.", load.running * factor)
        yield gauge("num_requests_waiting", "Number of requests waiting to be processed.", load.waiting * factor)
        yield gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", usage)
        yield counter("prefix_cache_queries", "Prefix cache queries, in tokens.", load.prefix_cache_queries)
        yield counter("prefix_cache_hits", "Prefix cache hits, in tokens.", load.prefix_cache_hits)
        yield counter("num_preemptions", "Cumulative number of preemption from the engine.", load.preemptions)
        names = ("engine", *self.cache_config)
        info = GaugeMetricFamily("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=names)
        info.add_metric((_ENGINE, *self.cache_config.values()), 1.0)
        yield info
        yield counter("prompt_tokens", "Number of prefill tokens processed.", meter.prompt_tokens)
        yield counter("prompt_tokens_cached", "Number of cached prompt tokens.", meter.cached_tokens)
        yield counter("generation_tokens", "Number of generation tokens processed.", meter.generation_tokens)
        finished = {reason: meter.finished[reason] for reason in ("stop", "length", "abort", "error", "repetition")}
        yield self._by("request_success", "Count of successfully processed requests.", "finished_reason", finished)
        # As vLLM counts them, with prometheus_fastapi_instrumentator.
        responses = CounterMetricFamily(
            "http_requests",
            "Total number of requests by method, status and handler.",
            labels=("handler", "method", "status"),
        )
        by_class = Counter[tuple[str, str]]()
        for (path, status), count in meter.responses.items():
            by_class[path, f"{status // 100}xx"] += count
        for (path, status_class), count in by_class.items():
            responses.add_metric((path, "POST", status_class), count)
        yield responses
        for name, histogram in meter.histograms.items():
            family = HistogramMetricFamily(f"vllm:{name}", f"Histogram of {name.replace('_', ' ')}.", labels=_LABELS)
            family.add_metric((self.model, _ENGINE), histogram.buckets(), histogram.total)
            yield family
        if len(meter.drafts_by_accepted) > 1:
            # Drafts by the least number of their accepted tokens, from K down.
            *at_least, drafts = accumulate(reversed(meter.drafts_by_accepted))
            positions = {str(position): count for position, count in enumerate(reversed(at_least))}
            yield counter("spec_decode_num_drafts", "Number of spec decoding drafts.", drafts)
            yield counter("spec_decode_num_draft_tokens", "Number of draft tokens.", meter.draft_tokens)
            yield counter("spec_decode_num_accepted_tokens", "Number of accepted tokens.", sum(at_least))
            per_position = "spec_decode_num_accepted_tokens_per_pos"
            yield self._by(per_position, "Accepted tokens per draft position.", "position", positions)

    def _one(self, kind: type[_Family], name: str, documentation: str, value: float) -> Metric:
        family = kind(f"vllm:{name}", documentation, labels=_LABELS)
        family.add_metric((self.model, _ENGINE), value)
        return family

    def _by(self, name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", documentation, labels=(*_LABELS, label))
        for own, value in values.items():
            family.add_metric((self.model, _ENGINE, own), value)
        return family


SOURCE: Final = "replay"
"""Source in the header of a trace that replay recorded."""


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
    """Bursts and ended answers at one time."""

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
        """Write into a folder, which must be empty or absent, or raise OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FileExistsError(17, "already contains files", str(folder))
        self._folder = folder
        self._engine = engine
        self._k = k
        self._clock = SegmentClock(0.0)  # stamps are since the run's zero already
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
        # A late event loop may run two steps in one turn; they differ in their time.
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
        """Record the end of an answer: its cause and reason."""
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
        """Write, unless an earlier write failed: a torn line must be the last one."""
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
