"""Rules of thumb about a pair, each with its numbers and where the rule comes from.

Advice never changes a plan. A rule speaks only when its numbers are known and
outside what it recommends, or when what it says costs the user something.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from specdecode_operator.sizing.base import sources
from specdecode_operator.sizing.base.devices import Device
from specdecode_operator.sizing.base.errors import PlanError
from specdecode_operator.sizing.base.sources import Source
from specdecode_operator.sizing.base.units import GIB, format_gib
from specdecode_operator.sizing.choice.break_even import break_even, pays_from
from specdecode_operator.sizing.choice.plan_row import Row
from specdecode_operator.sizing.choice.precision_rules import served_precision
from specdecode_operator.sizing.kv.capacity import pool_capacity
from specdecode_operator.sizing.kv.layout import cache_layout
from specdecode_operator.sizing.kv.prefix_cache import Loss, prefix_tax_of, unread_layers
from specdecode_operator.sizing.memory.budget import Budget, estimate
from specdecode_operator.sizing.memory.overhead import runtime_overrun_bytes
from specdecode_operator.sizing.pair.pair import Pair, Parallelism, without_speculation
from specdecode_operator.sizing.weights.weights import parameter_count
from specdecode_operator.vocabulary import Method, Precision, Slo, WorkloadKind

SMALLEST_RATIO: Final = 8
LARGEST_RATIO: Final = 12
"""Parameters of the target for one of the draft, by the first rule."""

SMALLEST_SHARE_PERCENT: Final = 1
LARGEST_SHARE_PERCENT: Final = 5
"""Parameters of the draft in percent of the target's, by the second rule."""

LARGEST_DRAFT_PERCENT: Final = 15
"""Share of the GPU's memory that draft weights should not pass."""

LARGEST_TARGET_PERCENT: Final = 70
"""Share of the GPU's memory that target weights should not pass."""

NOTABLE_KV_PERCENT: Final = 20
"""Loss of token capacity to the draft from which it is worth a word: our own choice."""

LOW_TEMPERATURE: Final = 0.5
HIGH_TEMPERATURE: Final = 0.7
"""Up to the first drafts are mostly accepted, above the second mostly not."""

_FOUR_BIT: Final = frozenset({"INT4", "MXFP4", "NVFP4"})


@dataclass(frozen=True)
class Workload:
    """What is known of the requests; None is unknown, and gives no advice."""

    kind: WorkloadKind | None = None  # What most requests are
    temperature: float | None = None  # Sampling temperature that most of them ask for
    primary_slo: Slo | None = None  # What the service promises first of all
    # Tokens of a usual prompt and of its answer
    prompt_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True)
class Advice:
    """One rule of thumb, applied."""

    code: str  # Stable name of the rule, an anchor in docs/explanation/advice.md
    sentence: str  # What to consider and why, without a full stop
    numbers: tuple[tuple[str, float], ...]  # What the sentence rests on, by name with the unit
    source: Source  # Where the rule comes from


@dataclass(frozen=True)
class _Case:
    """What all rules look at."""

    pair: Pair
    device: Device
    split: Parallelism
    budget: Budget
    workload: Workload


def advise(
    pair: Pair,
    device: Device,
    split: Parallelism | int,
    workload: Workload = Workload(),
) -> tuple[Advice, ...]:
    """Return the advice on a pair at a place, in a fixed order; empty without speculation.

    A whole number is a tensor parallelism.

    Raises
    ------
    PlanError
        When the pair cannot be split so.
    """
    if pair.method == Method.NONE:
        return ()
    split = Parallelism(split) if isinstance(split, int) else split
    case = _Case(pair, device, split, estimate(pair, device, split), workload)
    rules = (
        _parameter_ratio,
        _family,
        _draft_memory,
        _target_memory,
        _draft_kv,
        _prefix_cache,
        _target_precision,
        _draft_precision,
        _effective_batch,
        _sampler_logits,
        _temperature,
        _first_token,
        _throughput,
        _mixed,
        _prompt_lookup,
        _usual_concurrency,
    )
    return tuple(advice for rule in rules for advice in rule(case))


def advise_on_nodes(row: Row) -> tuple[Advice, ...]:
    """Return what it costs that GPUs of different nodes share layers; empty where none do."""
    if row.tensor <= row.gpus_per_node:
        return ()
    sentence = (
        f"GPUs of {row.nodes} nodes share each layer and meet over the network at every one: without InfiniBand or RoCE"
        f" with GPUDirect this is slow; tensor {row.gpus_per_node}, pipeline {row.nodes} meets once a stage, where the"
        " method goes with stages"
    )
    numbers = (("nodes", row.nodes), ("tensor", row.tensor))
    return (Advice("layers-over-nodes", sentence, numbers, sources.LAYERS_WITHIN_NODES),)


def _parameter_ratio(case: _Case) -> Iterator[Advice]:
    draft = case.pair.draft
    if draft is None or case.pair.method != Method.DRAFT_MODEL:
        return
    ratio = parameter_count(case.pair.target) / parameter_count(draft)
    percent = 100 / ratio
    in_first = SMALLEST_RATIO <= ratio <= LARGEST_RATIO
    in_second = SMALLEST_SHARE_PERCENT <= percent <= LARGEST_SHARE_PERCENT
    if in_first or in_second:
        return
    size = "large, each proposal costs much" if ratio < SMALLEST_RATIO else "small, few proposals may be accepted"
    if LARGEST_RATIO < ratio < 100 / LARGEST_SHARE_PERCENT:
        size = "between both rules, measure it"
    if ratio <= 1:
        size = "too large, a proposal costs as much as the token that it saves: take a smaller one, or swap the two"
    yield Advice(
        "draft-size",
        f"the draft has {percent:.1f} % of the target's parameters; one rule wants 1/{SMALLEST_RATIO} to "
        f"1/{LARGEST_RATIO}, another {SMALLEST_SHARE_PERCENT} to {LARGEST_SHARE_PERCENT} %: it is {size}",
        (("target_parameters_per_draft_parameter", ratio), ("draft_share_percent", percent)),
        sources.DRAFT_SIZE,
    )


def _family(case: _Case) -> Iterator[Advice]:
    target, draft = case.pair.target, case.pair.draft
    if draft is None or case.pair.method != Method.DRAFT_MODEL or draft.architecture == target.architecture:
        return
    yield Advice(
        "draft-family",
        f"draft {draft.name} ({draft.architecture}) is of another family than target {target.name} "
        f"({target.architecture}): models that were trained alike agree more often",
        (),
        sources.FAMILY,
    )


def _draft_memory(case: _Case) -> Iterator[Advice]:
    percent = 100 * case.budget.draft_weights_bytes / case.budget.total_bytes
    if percent > LARGEST_DRAFT_PERCENT:
        draft, method = case.pair.draft, case.pair.method
        is_whole = draft is not None and served_precision(draft, case.pair.draft_precision) is Precision.BF16
        smaller = "a smaller or quantized draft" if is_whole and method == Method.DRAFT_MODEL else "a smaller draft"
        yield Advice(
            "draft-memory",
            f"draft weights take {percent:.0f} % of the GPU's memory ({format_gib(case.budget.draft_weights_bytes)} "
            f"GiB), more than {LARGEST_DRAFT_PERCENT} %: {smaller} leaves more for the KV cache",
            (("draft_share_percent", percent),),
            sources.MEMORY_SHARES,
        )


def _target_memory(case: _Case) -> Iterator[Advice]:
    percent = 100 * case.budget.target_weights_bytes / case.budget.total_bytes
    if percent > LARGEST_TARGET_PERCENT:
        is_whole = served_precision(case.pair.target, case.pair.target_precision) is Precision.BF16
        remedy = "quantize the target or split it over more GPUs" if is_whole else "split it over more GPUs"
        yield Advice(
            "target-memory",
            f"target weights take {percent:.0f} % of the GPU's memory "
            f"({format_gib(case.budget.target_weights_bytes)} GiB), more than {LARGEST_TARGET_PERCENT} %: little is "
            f"left for a draft and the KV cache of both; {remedy}",
            (("target_share_percent", percent),),
            sources.MEMORY_SHARES,
        )


def _draft_kv(case: _Case) -> Iterator[Advice]:
    """Say how many tokens the target alone would hold. The draft's weights and its part of each block both count."""
    try:
        alone = estimate(without_speculation(case.pair), case.device, case.split)
    except PlanError:
        return
    tokens_alone = alone.kv_cache_tokens
    if tokens_alone == 0:
        return
    tokens = case.budget.kv_cache_tokens
    percent = 100 * (1 - tokens / tokens_alone)
    if percent >= NOTABLE_KV_PERCENT:
        pays, numbers = pays_from(break_even(case.pair, case.budget, alone))
        yield Advice(
            "draft-kv",
            f"the draft takes {percent:.0f} % of the token capacity: {tokens:,} tokens{case.split.each_copy} are left "
            f"of the {tokens_alone:,} that the target would have alone{pays}",
            (("lost_percent", percent), ("tokens", tokens), ("tokens_alone", tokens_alone), *numbers),
            sources.SHARED_BLOCKS,
        )


def _prefix_cache(case: _Case) -> Iterator[Advice]:
    tax = prefix_tax_of(case.pair, case.split)
    if tax is not None and tax.loss is Loss.DROPS_BLOCK:
        yield Advice(
            "prefix-cache",
            f"of each prompt that begins like an earlier one, the last block of {tax.block_tokens} tokens that agrees "
            f"is computed again: {case.pair.method} needs hidden states there",
            (("lost_tokens", tax.block_tokens),),
            sources.DROPPED_BLOCK,
        )
    if kinds := unread_layers(case.pair, case.split):
        yield Advice(
            "prefix-cache-unknown",
            f"{case.pair.method} may have tokens computed again of each prompt that begins like an earlier one; how "
            f"many is not known for a model with {kinds}: a capture with two arms measures it",
            (),
            sources.DROPPED_BLOCK,
        )


def _target_precision(case: _Case) -> Iterator[Advice]:
    precision = served_precision(case.pair.target, case.pair.target_precision)
    if precision.value in _FOUR_BIT and case.pair.target.checkpoint_precision != precision:
        yield Advice(
            "target-int8-first",
            f"the target is quantized to {precision}: try FP8 or INT8 first, 8 bits lose less and the target alone "
            "decides the output",
            (),
            sources.EIGHT_BIT_FIRST,
        )


def _draft_precision(case: _Case) -> Iterator[Advice]:
    draft = case.pair.draft
    if draft is None or case.pair.method != Method.DRAFT_MODEL:
        return
    target_precision = served_precision(case.pair.target, case.pair.target_precision)
    draft_precision = served_precision(draft, case.pair.draft_precision)
    if draft_precision is Precision.BF16 and target_precision is not Precision.BF16:
        yield Advice(
            "quantize-draft",
            f"the target is {target_precision} and the draft still {draft_precision}: the draft is the safer one to "
            "quantize, the target checks every token, so only the acceptance can suffer",
            (("draft_weights_gib", case.budget.draft_weights_bytes / GIB),),
            sources.LOSSLESS,
        )


def _effective_batch(case: _Case) -> Iterator[Advice]:
    limits = case.pair.limits
    batch = case.budget.effective_batch
    if batch < limits.max_num_seqs:
        yield Advice(
            "effective-batch",
            f"only {batch} of maxNumSeqs {limits.max_num_seqs} requests can decode in one step: each takes K + 1 and "
            f"the draft's own slots of maxNumBatchedTokens {limits.max_num_batched_tokens}; raise that, or lower K or "
            "maxNumSeqs",
            (("effective_batch_requests", batch), ("max_num_seqs", limits.max_num_seqs)),
            sources.SCHEDULER_SLOTS,
        )


def _sampler_logits(case: _Case) -> Iterator[Advice]:
    budget = case.budget
    if budget.overrun_bytes <= budget.slack_bytes:
        return
    sequences = _fitting_sequences(case)
    remedy = f"lower maxNumSeqs to {sequences}, or K" if sequences else "lower memoryUtilizationPercent"
    yield Advice(
        "sampler-logits",
        f"verifying maxNumSeqs x (K + 1) proposals can take {format_gib(budget.overrun_bytes)} GiB that vLLM does not "
        f"reserve, and {format_gib(max(0, budget.slack_bytes))} GiB are free outside its budget: {remedy}",
        (
            ("overrun_gib", budget.overrun_bytes / GIB),
            ("slack_gib", budget.slack_bytes / GIB),
            ("fitting_max_num_seqs", sequences),
        ),
        sources.SAMPLER_PEAK,
    )


def _fitting_sequences(case: _Case) -> int:
    """Return the largest maxNumSeqs whose logits fit into the slack, by bisection; 0 when none does."""
    good, bad = 0, case.pair.limits.max_num_seqs
    while bad - good > 1:
        middle = (good + bad) // 2
        limits = replace(case.pair.limits, max_num_seqs=middle)
        fits = runtime_overrun_bytes(replace(case.pair, limits=limits), case.split.tensor) <= case.budget.slack_bytes
        good, bad = (middle, bad) if fits else (good, middle)
    return good


def _temperature(case: _Case) -> Iterator[Advice]:
    temperature = case.workload.temperature
    if temperature is None or LOW_TEMPERATURE < temperature <= HIGH_TEMPERATURE:
        return
    if temperature > HIGH_TEMPERATURE:
        sentence = (
            f"temperature {temperature:g} is above {HIGH_TEMPERATURE}: the draft is guessed right less often, expect "
            "poor acceptance and a small K"
        )
    else:
        sentence = f"temperature {temperature:g} is at most {LOW_TEMPERATURE}: good for acceptance"
    yield Advice("temperature", sentence, (("temperature", temperature),), sources.TEMPERATURE)


def _first_token(case: _Case) -> Iterator[Advice]:
    if case.workload.primary_slo is Slo.TTFT:
        yield Advice(
            "first-token",
            "the first token comes from the prefill, which speculation does not shorten: a promise on TTFT gains "
            "little, and a draft model adds its own prefill",
            (),
            sources.INTER_TOKEN,
        )


def _throughput(case: _Case) -> Iterator[Advice]:
    if case.workload.primary_slo is Slo.THROUGHPUT:
        yield Advice(
            "throughput",
            "speculation buys latency with work: at high request rates vLLM measured 1.4 to 1.8 times less throughput "
            "with it; give busy batches a smaller K, or 0",
            (("largest_measured_slowdown", 1.8),),
            sources.BUSY_SERVER,
        )


def _mixed(case: _Case) -> Iterator[Advice]:
    if case.workload.kind is WorkloadKind.MIXED:
        yield Advice(
            "mixed-workload",
            "mixed requests are accepted unequally, so the slowest (P99) move away from the median: watch P99, or "
            "serve each kind apart",
            (),
            sources.MIXED,
        )


def _prompt_lookup(case: _Case) -> Iterator[Advice]:
    kind = case.workload.kind
    if kind in (WorkloadKind.SUMMARIZATION, WorkloadKind.RAG) and case.pair.method != Method.NGRAM:
        yield Advice(
            "prompt-lookup",
            f"{kind} repeats its prompt: method {Method.NGRAM} proposes from it without a draft, its weights or its KV "
            "cache",
            (("draft_weights_gib", case.budget.draft_weights_bytes / GIB),),
            sources.PROMPT_LOOKUP,
        )


def _usual_concurrency(case: _Case) -> Iterator[Advice]:
    prompt, output = case.workload.prompt_tokens, case.workload.output_tokens
    if prompt is None or output is None or case.budget.num_blocks <= 0:
        return
    length, limits = prompt + output, case.pair.limits
    grouping = cache_layout(case.pair, case.split)[0]
    requests = int(pool_capacity(grouping, case.budget.num_blocks, length).max_concurrency)
    if requests < limits.max_num_seqs:
        yield Advice(
            "usual-concurrency",
            f"the KV cache{case.split.each_copy} holds {requests:,} requests of {length:,} tokens (prompt {prompt:,}, "
            f"answer {output:,}), "
            f"fewer than maxNumSeqs {limits.max_num_seqs}: more than that wait, or are preempted",
            (("usual_requests", requests), ("usual_tokens", length), ("max_num_seqs", limits.max_num_seqs)),
            sources.SHARED_BLOCKS,
        )
