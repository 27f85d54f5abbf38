"""Compare the arms of a capture: published folders in, a comparison out.

In addition to the figures, this compares the answers of the arms (greedy tokens and output formats), and notes other
explanations of a difference than the setting, such as another precision than the baseline's. In the capture's pod all
files were published just before; elsewhere they are untrusted. The figures of an arm take one walk over trace.jsonl and
one over step-stats.jsonl of each repetition.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct
from pydantic import ValidationError

from specdecode_operator.api.capture import CaptureWorkload, Phase
from specdecode_operator.api.capture_status import ArmVerdict, Outputs, StepCost
from specdecode_operator.capture.comparison.arm_folders import (
    ArmFolders,
    ArmManifest,
    Repetition,
    find_arms,
    not_comparable,
    read_checks,
)
from specdecode_operator.capture.comparison.arm_verdict import arm_verdict, crossover, judge, sentence
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
    sends_at_a_rate,
)
from specdecode_operator.capture.comparison.comparison_file import (
    COMPARISON,
    AcceptanceOf,
    Arm,
    Comparison,
    Difference,
    Drafting,
    Engine,
    KvCache,
    Load,
    OutputsFound,
    PerRequest,
    PrefixCache,
    Slo,
    TokensPerStep,
)
from specdecode_operator.capture.files.formats import CHECKS, STEP_STATS, TRACE, Checks, GreedyAnswer, ParsingCheck
from specdecode_operator.capture.files.publish import write_whole
from specdecode_operator.capture.files.totals import quantiles
from specdecode_operator.capture.files.validate import RANDOM_PROMPTS, are_random, find, wants_steps
from specdecode_operator.deployment.canaries import CLOSE_NATS
from specdecode_operator.enums import METHODS_OF_BLOCKS
from specdecode_operator.problems import printable, shown
from specdecode_operator.stats.payoff import LARGEST_K, PayoffError, memory_bound_speed_up
from specdecode_operator.stats.verdict import DEFAULT_LEVEL, FEWEST_STARTS, estimate, of_sums
from specdecode_operator.version import __version__

_CONTEXTS: Final = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_MOST_TEMPERATURES: Final = 32
_TENTHS: Final = 10
_GROUPS: Final = 64
"""Groups of prompts for the interval of tokens per step; a prompt is in the same group in each arm and repetition."""
_LONGEST_STEP_MS: Final = 10_000.0
"""A longer gap between two steps was a pause of the engine."""

_Count = Annotated[int, Meta(ge=0, le=2**53)]


class _Record(Struct):
    """The needed fields of a line of trace.jsonl."""

    prompt_tokens: _Count
    output_tokens: _Count
    request_id: Annotated[str, Meta(max_length=1024)] | None = None
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
    by_prompt: list[Chunks] = field(default_factory=lambda: [Chunks() for _ in range(_GROUPS)])
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
        # Ids end with the request's index in its phase, which has the same prompt in all arms.
        index = (record.request_id or "").rpartition("-")[2]
        if index.isascii() and index.isdecimal():
            self.by_prompt[int(index[-9:]) % _GROUPS].add(chunks, tokens)
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
    speculative, memory = manifest.config.speculative, _planned_memory(manifest)
    if speculative is None or not speculative.num_speculative_tokens:
        return None
    target, draft = memory.get("targetWeightsBytes"), memory.get("draftWeightsBytes", 0)
    if not isinstance(target, int | float) or not isinstance(draft, int | float) or target <= 0 or draft < 0:
        return None
    if speculative.num_speculative_tokens > LARGEST_K:
        return None
    passes = 1 if speculative.method in METHODS_OF_BLOCKS else speculative.num_speculative_tokens
    try:
        return round(memory_bound_speed_up(tau, passes, draft / target), 3)
    except PayoffError:
        return None


def tokens_per_step_of(arm: ArmSums, baseline: ArmSums, *, same_precision: bool) -> TokensPerStep | None:
    """Return the tokens per step against the baseline's on the same prompts; None if one of the arms does not draft."""
    both = zip(arm.engine.by_prompt, baseline.engine.by_prompt, strict=True)
    # A group in which an arm lacks a request would compare different prompts.
    groups = [(own, plain) for own, plain in both if own.requests and own.requests == plain.requests]
    own, plain = (
        of_sums([each.tokens for each in side], [each.chunks for each in side])
        for side in ([own for own, _ in groups], [plain for _, plain in groups])
    )
    per_step, of_baseline = own(None), plain(None)
    if per_step is None or of_baseline is None:
        return None
    found = estimate(plain, own, len(groups))
    low, high = found.interval(1 - DEFAULT_LEVEL) if found is not None else (None, None)
    return TokensPerStep(
        arm=round(per_step, 4),
        baseline=round(of_baseline, 4),
        ratio=round(per_step / of_baseline, 4),
        low=_rounded(low, 4),
        high=_rounded(high, 4),
        requests=sum(each.requests for each, _ in groups),
        step_cost=(_step_cost(arm.manifest, baseline.manifest) if same_precision else StepCost.UNKNOWN).value,
    )


def _step_cost(arm: ArmManifest, baseline: ArmManifest) -> StepCost:
    """Return how long a step takes in comparison with the baseline's, by the planned bytes of the draft's weights."""
    found = []
    for manifest in (arm, baseline):
        speculative, size = manifest.config.speculative, _planned_memory(manifest).get("draftWeightsBytes")
        if speculative is None or speculative.num_speculative_tokens is None or type(size) is not int:
            return StepCost.UNKNOWN
        found.append(((speculative.method, speculative.num_speculative_tokens), size))
    (setting, size), (of_baseline, size_of_baseline) = found
    if setting != of_baseline:
        return StepCost.UNKNOWN
    if size == size_of_baseline:
        return StepCost.EQUAL
    return StepCost.LOWER if size < size_of_baseline else StepCost.HIGHER


def _planned_memory(manifest: ArmManifest) -> Mapping[str, Any]:
    """Return the bytes of one GPU by their use, as the capture's deployment planned them."""
    plan = manifest.context.get("plan")
    memory = plan.get("perGpu") if isinstance(plan, dict) else None
    return memory if isinstance(memory, dict) else {}


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


_BY_CHANCE: Final = 0.05


_MOST_ASKED: Final = 64


def compare_outputs(baseline: Checks | None, arm: Checks | None, lossy: str | None) -> OutputsFound:
    """Compare the answers of an arm with the baseline's."""
    differences: list[Difference] = []
    prompts, structured, tool_calls = 0, None, None
    if baseline is not None and arm is not None:
        of_arm = {each.prompt_sha256: each for each in arm.greedy.answers}
        for each in baseline.greedy.answers:
            other = of_arm.get(each.prompt_sha256)
            # Two empty answers prove no equality: an engine that answers nothing would do so for any prompt.
            if other is not None and (each.tokens or other.tokens):
                prompts += 1
                if each.tokens != other.tokens:
                    differences.append(_difference(each, other))
        structured = _parsing(baseline.structured, arm.structured)
        tool_calls = _parsing(baseline.tool_calls, arm.tool_calls)
    explained = sum(each.explained for each in differences)
    if lossy is not None:
        # A lossy setting is never called equal: the prompts prove nothing about other prompts.
        outputs = Outputs.LOSSY
    elif not prompts:
        outputs = Outputs.NOT_CHECKED
    elif len(differences) > explained:
        outputs = Outputs.DIFFERENT
    else:
        outputs = Outputs.EXPLAINED if differences else Outputs.EQUAL
    return OutputsFound(
        outputs=outputs.value,
        prompts=prompts,
        equal=prompts - len(differences),
        explained=explained,
        different=len(differences) - explained,
        first_difference=min(differences, key=lambda each: each.explained, default=None),
        structured=structured[0] if structured else None,
        tool_calls=tool_calls[0] if tool_calls else None,
        parses_less=any(each is not None and each[1] for each in (structured, tool_calls)),
        not_measured=list(_not_measured(baseline, arm, prompts)),
    )


def _difference(baseline: GreedyAnswer, other: GreedyAnswer) -> Difference:
    """Return the first position at which two answers differ, or at which one has ended."""
    shorter = min(len(baseline.tokens), len(other.tokens))
    position = next((at for at in range(shorter) if baseline.tokens[at] != other.tokens[at]), shorter)
    margins = [each.top2_margin[: len(each.tokens)][position : position + 1] for each in (baseline, other)]
    margin = next((each for each in chain(*margins) if each is not None), None)
    return Difference(
        prompt_sha256=baseline.prompt_sha256,
        position=position,
        baseline_margin=margin,
        explained=margin is not None and abs(margin) <= CLOSE_NATS,
    )


def _parsing(of_baseline: ParsingCheck, of_arm: ParsingCheck) -> tuple[tuple[float, float], bool] | None:
    """Return the parsed shares of arm and baseline, and whether the arm's is lower than chance explains.

    The test is Fisher's exact one, one-sided.
    """
    if not of_baseline.asked or not of_arm.asked:
        return None
    own, before = (round(min(each.parsed, each.asked) / each.asked, 4) for each in (of_arm, of_baseline))
    (asked, parsed), (asked_before, parsed_before) = (
        (min(each.asked, _MOST_ASKED), min(each.parsed, each.asked, _MOST_ASKED)) for each in (of_arm, of_baseline)
    )
    together, right = asked + asked_before, parsed + parsed_before
    as_few = sum(
        math.comb(asked, count) * math.comb(asked_before, right - count)
        for count in range(max(0, right - asked_before), parsed + 1)
    )
    return (own, before), as_few / math.comb(together, right) <= _BY_CHANCE


def _not_measured(baseline: Checks | None, arm: Checks | None, prompts: int) -> Iterator[str]:
    if baseline is None or arm is None:
        yield f"outputs were not checked: {'the baseline' if baseline is None else 'it'} has no {CHECKS}"
        return
    for what, of_baseline, of_arm in (
        ("greedy outputs", baseline.greedy, arm.greedy),
        ("structured outputs", baseline.structured, arm.structured),
        ("tool calls", baseline.tool_calls, arm.tool_calls),
    ):
        why = of_baseline.not_measured or of_arm.not_measured
        if why is None and of_baseline is baseline.greedy and not prompts:
            why = "no prompt has an answer with a token of both engines"
        if why is not None:
            yield f"{what} were not checked: {why}"


MOST_POINTS_LOST: Final = 5.0
"""Loss of acceptance in points above which a draft no longer fits a quantized target.

A rule of thumb that shows where to look. Goodput decides.
"""

_PRECISIONS: Final = {"targetQuantization": "its target is in", "kvCacheDtype": "its KV cache is in"}


def lossy_of(folders: ArmFolders, name: str) -> str | None:
    """Return why an arm may answer otherwise than the baseline by its settings, precision among them."""
    experiment = folders.experiment
    return experiment.lossy.get(name) or (_other_precision(folders, name) if name != experiment.baseline else None)


def precision_notes(folders: ArmFolders, arms: list[Arm]) -> Iterator[str]:
    """Yield the effect of another precision on acceptance, for arms that speculate like the baseline."""
    baseline, *others = arms
    for arm in others:
        precision = _other_precision(folders, arm.name)
        if precision is None or arm.drafting is None or baseline.drafting is None or arm.engine is None:
            continue
        speculation = arm.engine.method, arm.drafting.k
        if baseline.engine is None or speculation != (baseline.engine.method, baseline.drafting.k):
            continue
        own, of_baseline = 100 * arm.drafting.acceptance, 100 * baseline.drafting.acceptance
        lost = of_baseline - own
        said = f"arm {arm.name}: acceptance is {own:.1f} %, the baseline's {of_baseline:.1f} %, and {precision}"
        if lost > MOST_POINTS_LOST:
            yield (
                f"{said}: a loss of {lost:.1f} points, more than {MOST_POINTS_LOST:g}, shows that the draft no longer"
                " fits: use a higher precision, a draft trained for this precision, or a smaller K"
            )
        else:
            yield f"{said}: the loss is at most {MOST_POINTS_LOST:g} points, so the draft still fits"


def _other_precision(folders: ArmFolders, name: str) -> str | None:
    repetitions = folders.repetitions.get(name)
    if not repetitions:
        return None
    plans = [each.context.get("plan") for each in (repetitions[0].manifest, folders.first)]
    own, of_baseline = (each if isinstance(each, Mapping) else {} for each in plans)
    said = [
        f"{words} {shown(own[field], 40)}, the baseline's in {shown(of_baseline[field], 40)}"
        for field, words in _PRECISIONS.items()
        if field in own and field in of_baseline and own[field] != of_baseline[field]
    ]
    return " and ".join(said) or None


def confounds(folders: ArmFolders) -> Iterator[str]:
    """Yield differences other than the compared setting that may explain a result."""
    experiment, first = folders.experiment, folders.first
    if are_random(first.workload):
        yield RANDOM_PROMPTS
    baseline = folders.repetitions[experiment.baseline]
    for name in experiment.arms:
        repetitions = folders.repetitions[name]
        missing = experiment.repetitions - len(repetitions)
        if missing:
            yield f"arm {name}: {missing} of {experiment.repetitions} repetitions are missing: no verdict on it"
        if lossy := lossy_of(folders, name):
            yield f"arm {name} may answer otherwise by its settings: {lossy}"
        if repetitions and name != experiment.baseline:
            yield from _differences(name, repetitions[0].manifest, baseline[0].manifest)
    commands = {name: found[0].manifest.context.get("command") for name, found in folders.repetitions.items() if found}
    of_first = commands[experiment.baseline]
    for name in experiment.arms[1:]:
        if of_first is not None and commands.get(name) == of_first:
            yield f"arm {name} starts the same engine as the baseline: an A/A test, which should be Inconclusive"
    for name, repetitions in folders.repetitions.items():
        places = {(each.manifest.node, *each.manifest.gpu_uuids) for each in repetitions}
        if len(places) > 1:
            yield f"arm {name}: its repetitions ran on different GPUs or nodes: the interval includes how these differ"


def _differences(name: str, arm: ArmManifest, baseline: ArmManifest) -> Iterator[str]:
    """Yield the settings and places that differ, although they are not compared."""
    for what, of_arm, of_baseline in (
        ("async scheduling", arm.config.async_scheduling, baseline.config.async_scheduling),
        ("eager execution", arm.config.enforce_eager, baseline.config.enforce_eager),
        ("prefix caching", arm.config.enable_prefix_caching, baseline.config.enable_prefix_caching),
        ("requests in a batch at most", arm.config.max_num_seqs, baseline.config.max_num_seqs),
        ("tokens in a step at most", arm.config.max_num_batched_tokens, baseline.config.max_num_batched_tokens),
        ("longest sequence", arm.config.max_model_len, baseline.config.max_model_len),
        ("vLLM", arm.vllm, baseline.vllm),
        ("image", arm.image_id, baseline.image_id),
        ("GPU", arm.gpu, baseline.gpu),
        ("GPUs", arm.gpu_uuids, baseline.gpu_uuids),
        ("node", arm.node, baseline.node),
        ("model", arm.model, baseline.model),
        ("graph mode", _graphs(arm), _graphs(baseline)),
    ):
        if of_arm != of_baseline:
            yield (
                f"arm {name}: {what} is {_word(of_arm)}, in the baseline {_word(of_baseline)}: part of the difference "
                "may be its"
            )


def _graphs(manifest: ArmManifest) -> Any:
    """Return the command's compilation settings: K by batch size and some drafts change the CUDA graphs."""
    command = manifest.context.get("command")
    words = [str(each) for each in command] if isinstance(command, list) else []
    for word, after in zip_longest(words, words[1:]):
        if word.startswith("--compilation-config"):
            return word.partition("=")[2] or after
    return None


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "not known" if value is None else shown(value)


def compare_capture(folder: Path, price_per_gpu_hour: float | None = None) -> Comparison:
    """Compare the arms of a capture.

    Parameters
    ----------
    folder
        Holds ``<arm>/<repetition>/`` with published files.
    price_per_gpu_hour
        In any currency; without it, cost is in GPU seconds only.

    Raises
    ------
    CaptureError
        If arms are missing, their workloads differ, or a file cannot be read.
    """
    folders = find_arms(folder)
    try:
        phases = CaptureWorkload.parse(folders.first.workload, newer=True).phases
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, ("workload", *first["loc"])))
        raise not_comparable(f"manifest.json: {where}: {first['msg']}: fetch the capture again") from error
    sums = _read(folders, phases)
    experiment = folders.experiment
    own = sums[experiment.baseline]
    loads = [load_of(own, own, phase, price_per_gpu_hour) for phase in phases]
    arms = [_arm(experiment.baseline, own, own, message="baseline of the other arms", loads=loads)]
    arms += [_candidate(sums, name, folders, loads, phases, price_per_gpu_hour) for name in experiment.arms[1:]]
    return Comparison(
        specdecode=__version__,
        namespace=folders.first.namespace,
        capture=folders.first.capture,
        baseline=experiment.baseline,
        level=DEFAULT_LEVEL,
        repetitions=experiment.repetitions,
        slo=experiment.slo,
        price_per_gpu_hour=price_per_gpu_hour,
        arms=arms,
        notes=[
            *map(printable, confounds(folders)),
            *precision_notes(folders, arms),
            *(f"arm {arm.name}: {each}" for arm in arms if arm.outputs for each in arm.outputs.not_measured),
        ],
    )


def write_comparison(folder: Path, comparison: Comparison) -> Path:
    """Write ``comparison.json`` into a capture's folder atomically, and return its path."""
    path = folder / COMPARISON
    write_whole(path, comparison)
    return path


def _read(folders: ArmFolders, phases: Sequence[Phase]) -> dict[str, ArmSums]:
    """Return the sums of all existing arms; at most two repetitions' requests are in memory at the same time."""
    experiment = folders.experiment
    sums = {name: ArmSums(name, found) for name, found in folders.repetitions.items() if found}
    for number in range(1, experiment.repetitions + 1):
        of_baseline = None
        for name in experiment.arms:
            arm = sums.get(name)
            repetition = next((each for each in arm.repetitions if each.number == number), None) if arm else None
            if arm is None or repetition is None:
                continue
            own = arm.read(repetition, experiment.slo)
            if name == experiment.baseline:
                of_baseline = own
            elif of_baseline is not None:
                arm.pair(number, phases, of_baseline, own)
    return sums


def _arm(name: str, own: ArmSums | None, baseline: ArmSums, **judged: Any) -> Arm:
    """Return an arm, without figures if it has no repetition."""
    undecided = {"verdict": None, "lossy": None, "crossover_running": None, "outputs": None}
    return Arm(
        name=name,
        repetitions=[each.number for each in own.repetitions] if own else [],
        engine=engine_of(own.manifest) if own else None,
        drafting=drafting_of(own, baseline) if own else None,
        prefix_cache=prefix_cache_of(own, baseline) if own else None,
        kv_cache=kv_cache_of(own) if own else None,
        **(undecided | judged),
    )


def _candidate(  # noqa: PLR0913, PLR0917  what an arm is compared with
    sums: Mapping[str, ArmSums],
    name: str,
    folders: ArmFolders,
    of_baseline: Sequence[Load],
    phases: Sequence[Phase],
    price: float | None,
) -> Arm:
    experiment = folders.experiment
    own, baseline = sums.get(name), sums[experiment.baseline]
    lossy = lossy_of(folders, name)
    if own is None:
        message, verdict = "no verdict: all of its repetitions are missing", ArmVerdict.INCONCLUSIVE
        return _arm(name, None, baseline, message=message, verdict=verdict.value, lossy=lossy, loads=[])
    there = {each.number for each in own.repetitions} & {each.number for each in baseline.repetitions}
    missing = experiment.repetitions - len(there)
    comparable = [each for each in phases if experiment.slo.given or not sends_at_a_rate(each)]
    loads = []
    for phase in phases:
        load = load_of(own, baseline, phase, price)
        if phase not in comparable:
            why = "all arms receive requests at the same rate, and goodput is not defined: set spec.slo"
            loads.append(msgspec.structs.replace(load, not_compared=why))
        elif silent := [each.name for each in (baseline, own) if not each.answered(phase.name)]:
            why = f"no request of it was answered in arm {silent[0]}"
            loads.append(msgspec.structs.replace(load, not_compared=why))
        else:
            goodputs = [list(each.goodputs[phase.name].values()) for each in sums.values()]
            # By Bonferroni's inequality the level holds for all loads of an arm together, also if they are dependent.
            level = 1 - (1 - DEFAULT_LEVEL) / len(comparable)
            predicted = predicted_ratio(own, baseline, phase.name)
            place = list(sums).index(name)
            found = judge(own.pairs[phase.name], goodputs, place, level, predicted, whole=not missing)
            loads.append(msgspec.structs.replace(load, compared=found))
    outputs = compare_outputs(read_checks(baseline.repetitions), read_checks(own.repetitions), lossy)
    verdict, crossing = arm_verdict(loads, outputs), crossover(of_baseline, loads)
    why_none = None
    if missing:
        why_none = f"no verdict, because {missing} of {experiment.repetitions} repetitions are missing"
    elif experiment.repetitions < FEWEST_STARTS:
        why_none = (
            "no verdict with one repetition, which does not show how engines vary from start to start: use 3 or 4"
        )
    return _arm(
        name,
        own,
        baseline,
        tokens_per_step=tokens_per_step_of(own, baseline, same_precision=_other_precision(folders, name) is None),
        message=sentence(
            verdict, of_baseline, loads, outputs, crossing, DEFAULT_LEVEL, experiment.repetitions, why_none
        ),
        verdict=verdict.value,
        lossy=lossy,
        loads=loads,
        crossover_running=crossing,
        outputs=outputs,
    )
