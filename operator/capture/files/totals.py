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
from specdecode_operator.capture.files.trace_rules import SpeculationStats, StepLine


class Quantiles(Struct, kw_only=True, frozen=True):
    """Quantiles in percent, interpolated linearly between neighbours as numpy does."""

    count: int
    p50: float
    p90: float
    p95: float
    p99: float


def quantiles(values: Iterable[float]) -> Quantiles | None:
    """Return the quantiles of numbers; None without numbers."""
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


def numbers() -> "array[float]":
    """Return an empty array of milliseconds."""
    return array("d")


@dataclass
class Latencies:
    """Milliseconds of many requests: to the first token, per further token, and to the last one."""

    ttft_ms: "array[float]" = field(default_factory=numbers)
    tpot_ms: "array[float]" = field(default_factory=numbers)
    latency_ms: "array[float]" = field(default_factory=numbers)

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
class DraftTotals:
    """Sums over the counters of drafting of many steps."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)

    def add_drafts(self, stats: SpeculationStats, most_positions: int | None = None) -> None:
        """Add one step."""
        self.drafts += stats.num_drafts
        self.draft_tokens += stats.num_draft_tokens
        self.accepted += stats.num_accepted_tokens
        counts = stats.num_accepted_tokens_per_pos[:most_positions]
        self.accepted_per_pos += [0] * (len(counts) - len(self.accepted_per_pos))
        for position, count in enumerate(counts):
            self.accepted_per_pos[position] += count

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the drafted tokens; None without drafts."""
        return self.accepted / self.draft_tokens if self.draft_tokens else None

    @property
    def per_position(self) -> list[float]:
        """The share of drafts of which the token at each position was accepted."""
        return [count / self.drafts for count in self.accepted_per_pos] if self.drafts else []


def is_consistent(stats: SpeculationStats) -> bool:
    """Return whether the acceptance per position adds up and does not rise with the position."""
    per_pos = stats.num_accepted_tokens_per_pos
    adds_up = sum(per_pos) == stats.num_accepted_tokens <= stats.num_draft_tokens
    return adds_up and sorted(per_pos, reverse=True) == per_pos


@dataclass
class StepTotals(DraftTotals):
    """Sums over step statistics."""

    steps: int = 0
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
        self.add_drafts(stats)
        self.num_spec_tokens = max(self.num_spec_tokens, stats.num_spec_tokens)
        self.inconsistent += not is_consistent(stats)


@dataclass
class PhaseTotals:
    """Sums over the requests of a phase, or of all."""

    requests: int = 0
    tokens: int = 0  # of whole answers
    late_ms: "array[float]" = field(default_factory=numbers)
    latencies: Latencies = field(default_factory=Latencies)
    span_ms: tuple[float, float] | None = None  # first sending and last end of whole answers

    def add(self, client: ClientRecord) -> None:
        """Add one request."""
        self.requests += client.outcome != "not_sent"
        if client.late_ms is not None:
            self.late_ms.append(client.late_ms)
        if client.outcome != "completed" or client.ttft_ms is None or client.latency_ms is None:
            return
        self.latencies.add(client.ttft_ms, client.latency_ms, client.completion_tokens)
        self.tokens += client.completion_tokens or 0
        if client.sent_ms is not None and client.finished_ms is not None:
            first, last = self.span_ms or (client.sent_ms, client.finished_ms)
            self.span_ms = (min(first, client.sent_ms), max(last, client.finished_ms))


@dataclass
class ClientTotals:
    """Sums over the load generator's log, without warm-up."""

    outcomes: Counter[str] = field(default_factory=Counter)
    first_failure: ClientRecord | None = None
    all: PhaseTotals = field(default_factory=PhaseTotals)
    phases: defaultdict[str, PhaseTotals] = field(default_factory=lambda: defaultdict(PhaseTotals))

    def add(self, client: ClientRecord) -> None:
        """Add one request."""
        if client.warmup:
            return
        self.outcomes[client.outcome] += 1
        if self.first_failure is None and client.outcome != "completed":
            self.first_failure = client
        self.all.add(client)
        self.phases[client.phase].add(client)
