"""One arm of a comparison: its files become figures, and pairs of blocks with the baseline's."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specdecode_operator.api.capture_workload import Phase
from specdecode_operator.capture.comparison.judged import Pair
from specdecode_operator.capture.comparison.reading.blocks import differs_at, paired_blocks
from specdecode_operator.capture.comparison.reading.client_side import PhaseSums, Sent, read_client_side
from specdecode_operator.capture.comparison.reading.engine_side import EngineSide, StepSums
from specdecode_operator.capture.comparison.reading.folders import ArmManifest, Repetition, not_comparable
from specdecode_operator.capture.comparison.result import Drafting, Engine, KvCache, Load, PrefixCache, Slo
from specdecode_operator.capture.validation.quantiles import quantiles
from specdecode_operator.payoff.acceptance import LARGEST_K, PayoffError
from specdecode_operator.payoff.speed_up import memory_bound_speed_up
from specdecode_operator.vocabulary import METHODS_OF_BLOCKS


@dataclass
class ArmSums:
    """What the files of an arm come to."""

    name: str
    repetitions: Sequence[Repetition]
    phases: dict[str, PhaseSums] = field(default_factory=dict)
    engine: EngineSide = field(default_factory=EngineSide)
    goodputs: defaultdict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    """By phase and repetition: tokens a second within the SLO."""
    pairs: defaultdict[str, dict[int, list[Pair]]] = field(default_factory=lambda: defaultdict(dict))
    """By phase and repetition, with the baseline."""

    @property
    def manifest(self) -> ArmManifest:
        """That of its first repetition."""
        return self.repetitions[0].manifest

    def read(self, repetition: Repetition, slo: Slo) -> dict[str, Sent]:
        """Add a repetition, and return its requests by phase."""
        client = read_client_side(self.name, repetition, slo, self.phases)
        self.engine.read(self.name, repetition, client.span_ms)
        for phase, sent in client.sent.items():
            first, last = client.span_ms.get(phase, (0.0, 0.0))
            if last > first:
                self.goodputs[phase][repetition.number] = 1000 * sum(sent.good_tokens) / (last - first)
        return client.sent

    def pair(self, number: int, phases: Sequence[Phase], baseline: Mapping[str, Sent], own: Mapping[str, Sent]) -> None:
        """Add the blocks of a repetition, beside the baseline's of the same.

        Raises
        ------
        CaptureError
            The two were not asked the same.
        """
        for phase in phases:
            one, other = baseline.get(phase.name), own.get(phase.name)
            if one is None or other is None:
                continue
            if (index := differs_at(one, other)) is not None:
                raise not_comparable(
                    f"workloads differ: request {index} of phase {phase.name} in arm {self.name}, repetition {number}, "
                    "is not the one that the baseline was sent: compare arms of one capture"
                )
            self.pairs[phase.name][number] = paired_blocks(phase, one, other)

    def running(self, phase: str) -> float | None:
        """Return how many requests ran at once: by the engine's steps, else by the time that requests took."""
        by_steps = self.engine.phases[phase].running if phase in self.engine.phases else None
        sums = self.phases.get(phase)
        if by_steps is not None or sums is None or not sums.seconds:
            return by_steps
        return sums.latency_sum_ms / 1000 / sums.seconds


def load_of(arm: ArmSums, baseline: ArmSums, phase: Phase, price_per_gpu_hour: float | None) -> Load:
    """Return the figures of a phase; how it compares is put in afterwards."""
    sums = arm.phases.get(phase.name, PhaseSums())
    steps = arm.engine.phases.get(phase.name, StepSums())
    plain = baseline.engine.phases.get(phase.name, StepSums())
    outcomes = {name: count for name, count in sorted(sums.outcomes.items()) if count}
    seconds = sums.seconds
    gpu_seconds = 1000 * arm.manifest.gpus * seconds / sums.good_tokens if sums.good_tokens else None
    return Load(
        phase=phase.name,
        pattern=phase.pattern.value,
        asks=phase.asks,
        requests={"sent": sums.outcomes.total() - sums.outcomes["not_sent"]} | outcomes,
        within_slo=sums.within_slo,
        seconds=round(seconds, 3),
        running=_rounded(arm.running(phase.name), 2),
        output_tokens=sums.output_tokens,
        throughput=_rounded(sums.output_tokens / seconds, 2) if seconds else None,
        goodput=_rounded(sums.good_tokens / seconds, 2) if seconds else None,
        ttft_ms=quantiles(sums.ttft_ms.kept),
        tpot_ms=quantiles(sums.tpot_ms.kept),
        latency_ms=quantiles(sums.latency_ms.kept),
        decode_step_ms=_rounded(steps.decode_step_ms, 4),
        tokens_per_step=_rounded(steps.tokens_per_step, 4),
        acceptance=_rounded(steps.accepted / steps.draft_tokens, 4) if steps.draft_tokens else None,
        speculation_overhead=_rounded(_overhead([(steps, plain)]), 4) if steps.draft_tokens else None,
        gpu_seconds_per_1000_tokens=_rounded(gpu_seconds, 4),
        cost_per_1000_tokens=None
        if price_per_gpu_hour is None or gpu_seconds is None
        else price_per_gpu_hour * gpu_seconds / 3600,
    )


def predicted_ratio(arm: ArmSums, baseline: ArmSums, phase: str) -> float | None:
    """Return the speed-up of docs/explanation/payoff.md: by tokens a step and what a step takes."""
    steps, plain = arm.engine.phases.get(phase, StepSums()), baseline.engine.phases.get(phase, StepSums())
    if not steps.drafts or not (steps.decode_ms and plain.decode_ms and steps.batch and plain.batch):
        return None
    tokens, plain_tokens = steps.tokens_per_step or 1.0, plain.tokens_per_step or 1.0
    longer = (steps.decode_ms / steps.decode_steps) / (plain.decode_ms / plain.decode_steps)
    return round(steps.batch * tokens / (plain.batch * plain_tokens) / longer, 4)


def drafting_of(arm: ArmSums, baseline: ArmSums) -> Drafting | None:
    """Return what speculation did; None where nothing was drafted."""
    steps = arm.engine.all_steps
    speculative = arm.manifest.config.speculative
    if not steps.drafts or not steps.draft_tokens or speculative is None:
        return None
    k = speculative.num_speculative_tokens
    tau = 1 + steps.accepted / steps.drafts
    overhead = _overhead(
        [(each, baseline.engine.phases.get(name, StepSums())) for name, each in arm.engine.phases.items()]
    )
    gained = steps.tokens_per_step
    return Drafting(
        k=k,
        drafts=steps.drafts,
        draft_tokens=steps.draft_tokens,
        accepted_tokens=steps.accepted,
        acceptance=round(steps.accepted / steps.draft_tokens, 4),
        per_position=[round(each / steps.drafts, 4) for each in arm.engine.per_position],
        block_efficiency=round(tau, 4),
        largest_block_efficiency=None if k is None else k + 1,
        draft_efficiency=None if gained is None or not overhead or overhead < 0 else round((gained - 1) / overhead, 3),
        memory_bound_speed_up=_memory_bound(arm.manifest, tau),
        by_temperature=arm.engine.temperatures(k) if k else {},
        by_context=arm.engine.contexts(k) if k else {},
        per_request=arm.engine.request_by_request(),
    )


def _overhead(pairs: Sequence[tuple[StepSums, StepSums]]) -> float | None:
    """Return how much longer steps without prefill take than the baseline's of the same phases would."""
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
    """Return what the prefix cache found, and what the baseline's found more on the same prompts."""
    own, plain = arm.engine, baseline.engine
    tax = None
    if arm is not baseline and own.prompt_tokens and plain.prompt_tokens:
        tax = plain.cached_tokens / plain.prompt_tokens - own.cached_tokens / own.prompt_tokens
    return PrefixCache(
        prompt_tokens=own.prompt_tokens,
        cached_tokens=own.cached_tokens,
        hit_rate=_rounded(own.cached_tokens / own.prompt_tokens, 4) if own.prompt_tokens else None,
        tax_tokens=None if tax is None else round(tax * own.prompt_tokens),
        tax_percent=None if tax is None else round(100 * tax, 3),
    )


def kv_cache_of(arm: ArmSums) -> KvCache:
    """Return how the KV cache was used."""
    counters = [each.manifest.engine_counters for each in arm.repetitions]
    sizes = [each.kv_cache_tokens for each in counters if each is not None and each.kv_cache_tokens is not None]
    engine, busy_ms = arm.engine, arm.engine.all_steps.busy_ms
    return KvCache(
        tokens=min(sizes, default=None),
        mean_usage=_rounded(engine.kv_usage_ms / busy_ms, 4) if busy_ms else None,
        largest_usage=_rounded(engine.largest_kv_usage, 4),
        preemptions=engine.preemptions,
    )


def engine_of(manifest: ArmManifest) -> Engine:
    """Return what the engine says of itself."""
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
