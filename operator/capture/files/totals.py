"""Add up the lines of a capture's files in one walk per file, and compute quantiles of times.

Memory: 8 bytes per measure and request; constant for chunks and steps.
"""

import statistics
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from specdecode_operator.capture.files.formats import ClientRecord, TraceMeta, TraceRecord
from specdecode_operator.capture.files.trace_rules import StepLine


class Quantiles(Struct, kw_only=True, frozen=True):
    """Quantiles in percent, interpolated linearly between neighbours as numpy does."""

    count: int
    p50: float
    p90: float
    p95: float
    p99: float


def quantiles(values: Iterable[float]) -> Quantiles | None:
    """Return the quantiles of numbers; None if there are none."""
    numbers = list(values)
    if not numbers:
        return None
    # Before Python 3.13 statistics takes two numbers at least; twice the same has the same quantiles.
    at_least_two = numbers * 2 if len(numbers) == 1 else numbers
    # "inclusive" is numpy's definition: the smallest and the largest number are the quantiles 0 and 1.
    percentiles = [round(each, 3) for each in statistics.quantiles(at_least_two, n=100, method="inclusive")]
    p50, p90, p95, p99 = (percentiles[share - 1] for share in (50, 90, 95, 99))
    return Quantiles(count=len(numbers), p50=p50, p90=p90, p95=p95, p99=p99)


SHORT_GAP_MS: Final = 0.2
"""Shorter than any step: such gaps come from stamps taken on receipt, or from one chunk split into two."""
BY_ENGINE: Final = "engine"


def _numbers() -> "array[float]":
    return array("d")


@dataclass
class Latencies:
    """Milliseconds of many requests."""

    ttft_ms: "array[float]" = field(default_factory=_numbers)  # time to the first token
    tpot_ms: "array[float]" = field(default_factory=_numbers)  # time per further token
    latency_ms: "array[float]" = field(default_factory=_numbers)  # time to the last token

    def add(self, ttft_ms: float, latency_ms: float, tokens: int | None) -> None:
        """Add one request."""
        self.ttft_ms.append(ttft_ms)
        self.latency_ms.append(latency_ms)
        if tokens is not None and tokens > 1:
            self.tpot_ms.append((latency_ms - ttft_ms) / (tokens - 1))


@dataclass
class TraceTotals:
    """Sums over a trace."""

    meta: TraceMeta = field(default_factory=TraceMeta)
    records: int = 0
    with_arrival: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    gaps: int = 0
    short_gaps: int = 0
    backward: int = 0
    extra_tokens: int = 0
    largest_chunk: int = 0
    ended_by: Counter[str] = field(default_factory=Counter)
    first_ms: float | None = None
    last_ms: float | None = None
    engine: Latencies = field(default_factory=Latencies)

    def add(self, record: TraceRecord) -> None:
        """Add one record."""
        gaps = record.itl_ms or []
        self.records += 1
        self.prompt_tokens += record.prompt_tokens
        self.output_tokens += record.output_tokens
        self.cached_tokens += record.cached_tokens
        self.ended_by[record.ended_by or BY_ENGINE] += 1
        self.gaps += len(gaps)
        self.short_gaps += sum(1 for gap in gaps if 0 <= gap < SHORT_GAP_MS)
        self.backward += sum(1 for gap in gaps if gap < 0) + (record.ttft_ms < 0)
        if record.itl_summary is None:
            sizes = record.chunk_sizes()
            self.extra_tokens += sum(sizes) - len(sizes)
            self.largest_chunk = max(self.largest_chunk, *sizes)
            self.engine.add(record.ttft_ms, record.ttft_ms + sum(gaps), record.output_tokens)
        if record.arrival_ms is not None:
            self.with_arrival += 1
            end_ms = record.arrival_ms + record.ttft_ms + sum(gaps)
            self.first_ms = record.arrival_ms if self.first_ms is None else min(self.first_ms, record.arrival_ms)
            self.last_ms = end_ms if self.last_ms is None else max(self.last_ms, end_ms)


@dataclass
class StepTotals:
    """Sums over step statistics."""

    steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    num_spec_tokens: int = 0
    inconsistent: int = 0
    backward: int = 0
    last_ms: float | None = None

    def add(self, step: StepLine) -> None:
        """Add one step."""
        self.steps += 1
        self.backward += self.last_ms is not None and step.ts_ms < self.last_ms
        self.last_ms = step.ts_ms
        stats = step.scheduler.spec_decoding_stats
        if stats is None:
            return
        per_pos = stats.num_accepted_tokens_per_pos
        self.drafts += stats.num_drafts
        self.draft_tokens += stats.num_draft_tokens
        self.accepted += stats.num_accepted_tokens
        self.num_spec_tokens = max(self.num_spec_tokens, stats.num_spec_tokens)
        self.accepted_per_pos += [0] * (len(per_pos) - len(self.accepted_per_pos))
        for position, accepted in enumerate(per_pos):
            self.accepted_per_pos[position] += accepted
        adds_up = sum(per_pos) == stats.num_accepted_tokens <= stats.num_draft_tokens
        self.inconsistent += not (adds_up and sorted(per_pos, reverse=True) == per_pos)


@dataclass
class ClientTotals:
    """Sums over what the load generator saw, without warm-up."""

    outcomes: Counter[str] = field(default_factory=Counter)
    first_failure: ClientRecord | None = None
    late_ms: "array[float]" = field(default_factory=_numbers)
    all: Latencies = field(default_factory=Latencies)
    phases: defaultdict[str, Latencies] = field(default_factory=lambda: defaultdict(Latencies))
    phase_requests: Counter[str] = field(default_factory=Counter)
    phase_late_ms: "defaultdict[str, array[float]]" = field(default_factory=lambda: defaultdict(_numbers))
    phase_tokens: Counter[str] = field(default_factory=Counter)
    phase_span_ms: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, client: ClientRecord) -> None:
        """Add one request."""
        if client.warmup:
            return
        self.outcomes[client.outcome] += 1
        if self.first_failure is None and client.outcome != "completed":
            self.first_failure = client
        self.phase_requests[client.phase] += client.outcome != "not_sent"
        if client.late_ms is not None:
            self.late_ms.append(client.late_ms)
            self.phase_late_ms[client.phase].append(client.late_ms)
        if client.outcome != "completed" or client.ttft_ms is None or client.latency_ms is None:
            return
        for latencies in (self.all, self.phases[client.phase]):
            latencies.add(client.ttft_ms, client.latency_ms, client.completion_tokens)
        self.phase_tokens[client.phase] += client.completion_tokens or 0
        if client.sent_ms is not None and client.finished_ms is not None:
            first, last = self.phase_span_ms.get(client.phase, (client.sent_ms, client.finished_ms))
            self.phase_span_ms[client.phase] = (min(first, client.sent_ms), max(last, client.finished_ms))
