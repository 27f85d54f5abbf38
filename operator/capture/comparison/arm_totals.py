"""Compute the figures of one arm from its requests, trace and step statistics.

One walk over trace.jsonl and one over step-stats.jsonl of each repetition.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from specdecode_operator.api.capture import Phase
from specdecode_operator.capture.comparison.arm_folders import ArmManifest, Repetition, not_comparable
from specdecode_operator.capture.comparison.client_requests import (
    Numbers,
    Pair,
    PhaseSums,
    Sent,
    Spans,
    Timestamp,
    decoded_lines,
    differs_at,
    paired_blocks,
    read_client_side,
)
from specdecode_operator.capture.comparison.comparison_file import (
    AcceptanceOf,
    Drafting,
    Engine,
    KvCache,
    Load,
    PerRequest,
    PrefixCache,
    Slo,
)
from specdecode_operator.capture.files.formats import STEP_STATS, TRACE
from specdecode_operator.capture.files.totals import quantiles
from specdecode_operator.capture.files.validate import find, wants_steps
from specdecode_operator.enums import METHODS_OF_BLOCKS
from specdecode_operator.stats.payoff import LARGEST_K, PayoffError, memory_bound_speed_up

_CONTEXTS: Final = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_MOST_TEMPERATURES: Final = 32
_TENTHS: Final = 10
_LONGEST_STEP_MS: Final = 10_000.0
"""A longer gap between two steps was a pause of the engine."""

_Count = Annotated[int, Meta(ge=0, le=2**53)]


class _Record(Struct):
    """The needed fields of a line of trace.jsonl."""

    prompt_tokens: _Count
    output_tokens: _Count
    cached_tokens: _Count = 0
    itl_ms: list[float] | None = None
    itl_tokens: list[_Count] | None = None
    preemptions: _Count | None = None
    temperature: float | None = None


class _Drafts(Struct):
    num_drafts: _Count
    num_draft_tokens: _Count
    num_accepted_tokens: _Count
    num_accepted_tokens_per_pos: Annotated[list[_Count], Meta(max_length=1024)]


class _Details(Struct):
    num_ctx_tokens: _Count = 0
    num_generation_requests: _Count = 0


class _Scheduler(Struct):
    num_running_reqs: _Count = 0
    kv_cache_usage: float = 0.0
    spec_decoding_stats: _Drafts | None = None
    iteration_details: _Details | None = None


class _Step(Struct):
    ts_ms: Timestamp
    scheduler: _Scheduler
    engine: Annotated[int, Meta(ge=0, lt=4096)] = 0  # the last step of each engine is in memory


_RECORD: Final = msgspec.json.Decoder(_Record)
_STEP: Final = msgspec.json.Decoder(_Step)


@dataclass
class Chunks:
    """Chunks of some requests, without each request's first and last one."""

    requests: int = 0
    chunks: int = 0
    tokens: int = 0

    def add(self, chunks: int, tokens: int) -> None:
        """Add a request."""
        self.requests += 1
        self.chunks += chunks
        self.tokens += tokens

    def acceptance(self, k: int) -> AcceptanceOf:
        """Return acceptance if each step drafted K tokens."""
        per_step = self.tokens / self.chunks
        share = round((per_step - 1) / k, 4)
        return AcceptanceOf(requests=self.requests, tokens_per_step=round(per_step, 3), acceptance=share)


@dataclass
class StepSums:
    """Steps of one phase, or of all."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    # Time in which at least one request ran, and its product with the number of running requests
    busy_ms: float = 0.0
    running_ms: float = 0.0
    # Steps without prefill
    decode_steps: int = 0
    decode_ms: float = 0.0
    decoded_requests: int = 0
    decode_accepted: int = 0

    def add(self, scheduler: _Scheduler, last: _Step | None, gap_ms: float | None) -> None:
        """Add a step that ended `gap_ms` after the last one; None if its duration is not known."""
        drafts, details = scheduler.spec_decoding_stats, scheduler.iteration_details
        if drafts is not None:
            self.drafts += drafts.num_drafts
            self.draft_tokens += drafts.num_draft_tokens
            self.accepted += drafts.num_accepted_tokens
        if gap_ms is None or last is None:
            return
        # The requests of the last step wait for the end of this one.
        self.busy_ms += gap_ms
        self.running_ms += gap_ms * last.scheduler.num_running_reqs
        if details is not None and not details.num_ctx_tokens and details.num_generation_requests:
            self.decode_steps += 1
            self.decode_ms += gap_ms
            self.decoded_requests += details.num_generation_requests
            self.decode_accepted += drafts.num_accepted_tokens if drafts is not None else 0

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a request gets from a step without prefill."""
        return 1 + self.decode_accepted / self.decoded_requests if self.decoded_requests else None


@dataclass
class EngineSide:
    """An arm's engine over all repetitions."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    by_temperature: defaultdict[str, Chunks] = field(default_factory=lambda: defaultdict(Chunks))
    by_context: defaultdict[int, Chunks] = field(default_factory=lambda: defaultdict(Chunks))
    per_request: Numbers = field(default_factory=Numbers)  # acceptance of each
    tenths: list[int] = field(default_factory=lambda: [0] * _TENTHS)
    all_steps: StepSums = field(default_factory=StepSums)
    phases: defaultdict[str, StepSums] = field(default_factory=lambda: defaultdict(StepSums))
    per_position: list[int] = field(default_factory=list)
    largest_kv_usage: float | None = None
    kv_usage_ms: float = 0.0

    def read(self, name: str, repetition: Repetition, span_ms: Spans) -> None:
        """Add a repetition, with the time span of each phase."""
        speculative = repetition.manifest.config.speculative
        k = min(LARGEST_K, speculative.num_speculative_tokens or 0) if speculative is not None else 0
        for record in decoded_lines(name, repetition, TRACE, _RECORD):
            self._add(record, k)
        if find(repetition.folder, STEP_STATS) is None and not wants_steps(repetition.manifest.record):
            return
        spans = sorted((first, last, phase) for phase, (first, last) in span_ms.items())
        begins = [first for first, _, _ in spans]
        before: dict[int, _Step] = {}
        for step in decoded_lines(name, repetition, STEP_STATS, _STEP):
            at = bisect_right(begins, step.ts_ms) - 1
            sums = [self.all_steps]
            if at >= 0 and step.ts_ms <= spans[at][1]:
                sums.append(self.phases[spans[at][2]])
            last = before.get(step.engine)
            gap_ms = step.ts_ms - last.ts_ms if last is not None and last.scheduler.num_running_reqs else None
            if gap_ms is not None and not 0 <= gap_ms <= _LONGEST_STEP_MS:
                gap_ms = None
            for each in sums:
                each.add(step.scheduler, last, gap_ms)
            usage = min(1.0, max(0.0, step.scheduler.kv_cache_usage))
            self.largest_kv_usage = max(usage, self.largest_kv_usage or 0.0)
            self.kv_usage_ms += usage * (gap_ms or 0.0)
            if (drafts := step.scheduler.spec_decoding_stats) is not None:
                sums_before, counts = self.per_position, drafts.num_accepted_tokens_per_pos[:LARGEST_K]
                self.per_position = [sum(each) for each in zip_longest(sums_before, counts, fillvalue=0)]
            if last is None or step.ts_ms >= last.ts_ms:
                before[step.engine] = step

    def _add(self, record: _Record, k: int) -> None:
        self.prompt_tokens += record.prompt_tokens
        self.cached_tokens += min(record.cached_tokens, record.prompt_tokens)
        self.preemptions += record.preemptions or 0
        # The last chunk may be cut by the end of the answer.
        sizes = record.itl_tokens or [1] * len(record.itl_ms or ())
        chunks, tokens = len(sizes[:-1]), sum(sizes[:-1])
        if not k or not chunks:
            return
        temperature = "not given" if record.temperature is None else f"{record.temperature:g}"
        if temperature in self.by_temperature or len(self.by_temperature) < _MOST_TEMPERATURES:
            self.by_temperature[temperature].add(chunks, tokens)
        self.by_context[bisect_right(_CONTEXTS, record.prompt_tokens)].add(chunks, tokens)
        share = min(1.0, (tokens / chunks - 1) / k)
        self.per_request.add(share)
        self.tenths[min(_TENTHS - 1, int(share * _TENTHS))] += 1

    def request_by_request(self) -> PerRequest | None:
        """Return the distribution of acceptance over requests."""
        kept = sorted(self.per_request.kept)
        if not kept:
            return None
        p10, p50, p90 = (round(kept[round(share * (len(kept) - 1))], 4) for share in (0.1, 0.5, 0.9))
        return PerRequest(requests=sum(self.tenths), p10=p10, p50=p50, p90=p90, histogram=list(self.tenths))


def _context(place: int) -> str:
    if place == 0:
        return f"below {_CONTEXTS[0]}"
    if place == len(_CONTEXTS):
        return f"{_CONTEXTS[-1]} and more"
    return f"{_CONTEXTS[place - 1]} to {_CONTEXTS[place] - 1}"


@dataclass
class ArmSums:
    """Sums over the files of an arm."""

    name: str
    repetitions: Sequence[Repetition]
    phases: dict[str, PhaseSums] = field(default_factory=dict)
    engine: EngineSide = field(default_factory=EngineSide)
    goodputs: defaultdict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    """Tokens per second within the SLO, by phase and repetition."""
    pairs: defaultdict[str, dict[int, list[Pair]]] = field(default_factory=lambda: defaultdict(dict))
    """By phase and repetition, with the baseline."""

    @property
    def manifest(self) -> ArmManifest:
        """Manifest of the first repetition."""
        return self.repetitions[0].manifest

    def read(self, repetition: Repetition, slo: Slo) -> dict[str, Sent]:
        """Add a repetition, and return its requests by phase."""
        by_phase, span_ms = read_client_side(self.name, repetition, slo, self.phases)
        self.engine.read(self.name, repetition, span_ms)
        for phase, (first, last) in span_ms.items():
            if last > first:
                self.goodputs[phase][repetition.number] = 1000 * sum(by_phase[phase].good_tokens) / (last - first)
        return by_phase

    def pair(self, number: int, phases: Sequence[Phase], baseline: Mapping[str, Sent], own: Mapping[str, Sent]) -> None:
        """Add the blocks of a repetition, paired with the baseline's."""
        for phase in phases:
            one, other = baseline.get(phase.name), own.get(phase.name)
            if one is None or other is None:
                continue
            if (index := differs_at(one, other)) is not None:
                raise not_comparable(
                    f"workloads differ: request {index} of phase {phase.name} in arm {self.name}, repetition {number}, "
                    "differs from the request sent to the baseline: compare arms of one capture"
                )
            self.pairs[phase.name][number] = paired_blocks(phase, one, other)

    def answered(self, phase: str) -> bool:
        """Whether a request of a phase was answered."""
        return phase in self.phases and self.phases[phase].outcomes["completed"] > 0

    def running(self, phase: str) -> float | None:
        """Return the mean running requests: from the engine's steps, or from the duration of requests without steps."""
        steps, sums = self.steps(phase), self.phases.get(phase)
        if steps.busy_ms:
            return steps.running_ms / steps.busy_ms
        return sums.latency_sum_ms / 1000 / sums.seconds if sums is not None and sums.seconds else None

    def steps(self, phase: str) -> StepSums:
        """Return the steps of a phase."""
        return self.engine.phases.get(phase, StepSums())


def load_of(arm: ArmSums, baseline: ArmSums, phase: Phase, price_per_gpu_hour: float | None) -> Load:
    """Return the figures of a phase, without its comparison."""
    sums = arm.phases.get(phase.name, PhaseSums())
    steps = arm.steps(phase.name)
    overhead = _overhead([(steps, baseline.steps(phase.name))]) if steps.draft_tokens else None
    seconds = sums.seconds
    gpu_seconds = 1000 * arm.manifest.gpus * seconds / sums.good_tokens if sums.good_tokens else None
    cost = None if price_per_gpu_hour is None or gpu_seconds is None else price_per_gpu_hour * gpu_seconds / 3600
    return Load(
        phase=phase.name,
        pattern=phase.pattern.value,
        asks=phase.asks,
        requests={"sent": sums.outcomes.total() - sums.outcomes["not_sent"]}
        | {name: count for name, count in sorted(sums.outcomes.items()) if count},
        within_slo=sums.within_slo,
        seconds=round(seconds, 3),
        running=_rounded(arm.running(phase.name), 2),
        output_tokens=sums.output_tokens,
        throughput=_ratio(sums.output_tokens, seconds, 2),
        goodput=_ratio(sums.good_tokens, seconds, 2),
        ttft_ms=quantiles(sums.ttft_ms.kept),
        tpot_ms=quantiles(sums.tpot_ms.kept),
        latency_ms=quantiles(sums.latency_ms.kept),
        decode_step_ms=_ratio(steps.decode_ms, steps.decode_steps, 4),
        tokens_per_step=_rounded(steps.tokens_per_step, 4),
        acceptance=_ratio(steps.accepted, steps.draft_tokens, 4),
        speculation_overhead=_rounded(overhead, 4),
        gpu_seconds_per_1000_tokens=_rounded(gpu_seconds, 4),
        cost_per_1000_tokens=cost,
    )


def predicted_ratio(arm: ArmSums, baseline: ArmSums, phase: str) -> float | None:
    """Return the speed-up of docs/design/payoff.md, from tokens per step and the time of a step."""
    steps, plain = arm.steps(phase), baseline.steps(phase)
    if not (steps.drafts and steps.decode_ms and plain.decode_ms and steps.decoded_requests and plain.decoded_requests):
        return None
    batch, plain_batch = (each.decoded_requests / each.decode_steps for each in (steps, plain))
    tokens, plain_tokens = steps.tokens_per_step or 1.0, plain.tokens_per_step or 1.0
    longer = (steps.decode_ms / steps.decode_steps) / (plain.decode_ms / plain.decode_steps)
    return round(batch * tokens / (plain_batch * plain_tokens) / longer, 4)


def drafting_of(arm: ArmSums, baseline: ArmSums) -> Drafting | None:
    """Return the figures of speculation; None if no tokens were drafted."""
    engine, speculative = arm.engine, arm.manifest.config.speculative
    steps = engine.all_steps
    if not steps.drafts or not steps.draft_tokens or speculative is None:
        return None
    k = speculative.num_speculative_tokens
    tau = 1 + steps.accepted / steps.drafts
    overhead = _overhead([(each, baseline.steps(name)) for name, each in engine.phases.items()])
    gained = steps.tokens_per_step
    return Drafting(
        k=k,
        drafts=steps.drafts,
        draft_tokens=steps.draft_tokens,
        accepted_tokens=steps.accepted,
        acceptance=round(steps.accepted / steps.draft_tokens, 4),
        per_position=[round(each / steps.drafts, 4) for each in engine.per_position],
        block_efficiency=round(tau, 4),
        largest_block_efficiency=None if k is None else k + 1,
        draft_efficiency=None if gained is None or not overhead or overhead < 0 else round((gained - 1) / overhead, 3),
        memory_bound_speed_up=_memory_bound(arm.manifest, tau),
        by_temperature={at: each.acceptance(k) for at, each in sorted(engine.by_temperature.items())} if k else {},
        by_context={_context(at): each.acceptance(k) for at, each in sorted(engine.by_context.items())} if k else {},
        per_request=engine.request_by_request(),
    )


def _overhead(pairs: Sequence[tuple[StepSums, StepSums]]) -> float | None:
    """Return the extra time of steps without prefill, as a share of the baseline's in the same phases."""
    known = [(steps, plain) for steps, plain in pairs if steps.decode_ms and plain.decode_ms]
    plain_ms = sum(steps.decode_steps * plain.decode_ms / plain.decode_steps for steps, plain in known)
    return sum(steps.decode_ms for steps, _ in known) / plain_ms - 1 if plain_ms else None


def _memory_bound(manifest: ArmManifest, tau: float) -> float | None:
    speculative, plan = manifest.config.speculative, manifest.context.get("plan")
    memory = plan.get("perGpu") if isinstance(plan, dict) else None
    if speculative is None or not speculative.num_speculative_tokens or not isinstance(memory, dict):
        return None
    target, draft = memory.get("targetWeights"), memory.get("draftWeights", 0)
    if not isinstance(target, int | float) or not isinstance(draft, int | float) or target <= 0 or draft < 0:
        return None
    if speculative.num_speculative_tokens > LARGEST_K:
        return None
    passes = 1 if speculative.method in METHODS_OF_BLOCKS else speculative.num_speculative_tokens
    try:
        return round(memory_bound_speed_up(tau, passes, draft / target), 3)
    except PayoffError:
        return None


def prefix_cache_of(arm: ArmSums, baseline: ArmSums) -> PrefixCache:
    """Return the hits of the prefix cache, and how many more the baseline had on the same prompts."""
    own, plain = arm.engine, baseline.engine
    tax = None
    if arm is not baseline and own.prompt_tokens and plain.prompt_tokens:
        tax = plain.cached_tokens / plain.prompt_tokens - own.cached_tokens / own.prompt_tokens
    return PrefixCache(
        prompt_tokens=own.prompt_tokens,
        cached_tokens=own.cached_tokens,
        hit_rate=_ratio(own.cached_tokens, own.prompt_tokens, 4),
        tax_tokens=None if tax is None else round(tax * own.prompt_tokens),
        tax_percent=None if tax is None else round(100 * tax, 3),
    )


def kv_cache_of(arm: ArmSums) -> KvCache:
    """Return the use of the KV cache."""
    counters = [each.manifest.engine_counters for each in arm.repetitions]
    sizes = [each.kv_cache_tokens for each in counters if each is not None and each.kv_cache_tokens is not None]
    return KvCache(
        tokens=min(sizes, default=None),
        mean_usage=_ratio(arm.engine.kv_usage_ms, arm.engine.all_steps.busy_ms, 4),
        largest_usage=_rounded(arm.engine.largest_kv_usage, 4),
        preemptions=arm.engine.preemptions,
    )


def engine_of(manifest: ArmManifest) -> Engine:
    """Return the engine as it reports itself."""
    config = manifest.config
    return Engine(
        vllm=manifest.vllm,
        model=manifest.model,
        gpu=manifest.gpu,
        gpu_uuids=list(manifest.gpu_uuids),
        gpus=manifest.gpus,
        method=config.speculative.method if config.speculative else None,
        k=config.speculative.num_speculative_tokens if config.speculative else None,
        async_scheduling=config.async_scheduling,
        enforce_eager=config.enforce_eager,
        enable_prefix_caching=config.enable_prefix_caching,
    )


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _ratio(over: float, under: float, digits: int) -> float | None:
    return round(over / under, digits) if under else None
