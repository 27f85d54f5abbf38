"""Rules of thumb about a pair, with numbers and sources; and the break-even of a draft's memory.

Advice never changes a plan. A rule reports only if its numbers are known and outside the recommended range, or if it
costs the user something. docs/design/advice.md has the source of each rule.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from specdecode_operator.enums import METHODS_OF_BLOCKS, METHODS_WITH_SAMPLING, Method, Precision, Slo, WorkloadKind
from specdecode_operator.sizing.arithmetic import GIB, format_gib
from specdecode_operator.sizing.devices import Device
from specdecode_operator.sizing.errors import PlanError
from specdecode_operator.sizing.kernel_support import served_precision
from specdecode_operator.sizing.memory.activation import verification_bytes
from specdecode_operator.sizing.memory.budget import Budget, estimate
from specdecode_operator.sizing.memory.kv_cache import cache_layout, pool_capacity
from specdecode_operator.sizing.memory.prefix_cache import Loss, prefix_tax_of, unread_layers
from specdecode_operator.sizing.pair import Pair, Parallelism, without_speculation
from specdecode_operator.sizing.placement import Row
from specdecode_operator.sizing.weights import parameter_count
from specdecode_operator.stats.payoff import Curve, Load, StepCosts, break_even_rate, break_even_tokens, full_cache


@dataclass(frozen=True)
class BreakEven:
    """Break-even acceptance, as accepted over drafted tokens; None if even full acceptance does not pay."""

    # With few requests, whose KV cache takes no time to read. Also None for a mixture of experts: the number of experts
    # that a step reads depends on the text, and a verifying step reads more.
    few_requests: float | None
    full_cache: float | None  # With a full KV cache
    reads_all: bool = True  # Whether each step reads all weights; False for experts, which need many requests for that


def break_even(pair: Pair, budget: Budget, alone: Budget) -> BreakEven | None:
    """Return the break-even of a pair with memory-bound steps; None if it cannot be computed.

    A step reads the weights and, if full, the whole KV cache once; those of the draft once per pass. Costs are in GiB
    instead of milliseconds, because only their ratio matters. The length of requests does not matter.
    """
    k, tokens = pair.num_speculative_tokens, budget.kv_cache_tokens
    if k < 1 or not 0 < tokens <= alone.kv_cache_tokens or alone.target_weights_bytes <= 0:
        return None
    of_draft = max(0, budget.kv_bytes_per_token - alone.kv_bytes_per_token)
    costs = StepCosts(
        target=Curve(((1, alone.target_weights_bytes / GIB),)),
        draft=Curve(((1, budget.draft_weights_bytes / GIB),)),
        one_pass=pair.drafts_in_parallel or pair.method in METHODS_OF_BLOCKS,
        target_ms_per_1000_context=1000 * alone.kv_bytes_per_token / GIB,
        draft_ms_per_1000_context=1000 * of_draft / GIB,
    )
    full = full_cache(tokens, alone.kv_cache_tokens, context_tokens=1)
    reads_all = not pair.target.has_experts
    return BreakEven(
        few_requests=break_even_rate(break_even_tokens(costs, k, Load.same(1)), k) if reads_all else None,
        full_cache=break_even_rate(break_even_tokens(costs, k, full), k),
        reads_all=reads_all,
    )


def low_load_break_even(pair: Pair, device: Device, split: Parallelism) -> float | None:
    """Return the break-even of a pair with few requests; 1 if even full acceptance does not pay, None if unknown."""
    try:
        budget, alone = estimate(pair, device, split), estimate(without_speculation(pair), device, split)
    except PlanError:
        return None
    found = break_even(pair, budget, alone)
    if found is None or not found.reads_all:
        return None
    return 1.0 if found.few_requests is None else found.few_requests


def pays_from(needed: BreakEven | None) -> str:
    """Return the break-even acceptance for a share of the KV cache as a sentence to append, without a full stop."""
    if needed is None:
        return ""
    given = "memory-bound estimate" if needed.reads_all else "memory-bound estimate with the weights of all experts"
    few = "" if needed.few_requests is None else f", {100 * needed.few_requests:.0f} % at low load"
    full = "above 100 %" if needed.full_cache is None else f"{100 * needed.full_cache:.0f} %"
    return f". Break-even acceptance: {full} when the cache is full{few} ({given})"


SMALLEST_RATIO: Final = 8
LARGEST_RATIO: Final = 12  # Target parameters per draft parameter, by the first rule
SMALLEST_SHARE_PERCENT: Final = 1
LARGEST_SHARE_PERCENT: Final = 5  # Parameters of the draft in percent of the target's, by the second rule
LARGEST_DRAFT_PERCENT: Final = 15  # Largest recommended share of GPU memory for draft weights
LARGEST_TARGET_PERCENT: Final = 70  # Largest recommended share of GPU memory for target weights
NOTABLE_KV_PERCENT: Final = 20  # Loss of token capacity to the draft that is reported; chosen by this project
LOW_TEMPERATURE: Final = 0.5
HIGH_TEMPERATURE: Final = 0.7


@dataclass(frozen=True)
class Workload:
    """Properties of the requests; None means unknown and gives no advice."""

    kind: WorkloadKind | None = None  # Kind of most requests
    temperature: float | None = None  # Sampling temperature of most requests
    primary_slo: Slo | None = None  # The most important service level objective
    prompt_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True)
class Advice:
    """One rule of thumb, applied."""

    code: str  # Stable name of the rule, an anchor in docs/design/advice.md
    sentence: str  # What to consider and why, without a full stop


@dataclass(frozen=True)
class _Case:
    pair: Pair
    device: Device
    split: Parallelism
    budget: Budget
    workload: Workload


def advise(pair: Pair, device: Device, split: Parallelism | int, workload: Workload = Workload()) -> tuple[Advice, ...]:
    """Return the advice on a pair at a placement, in a fixed order; empty without speculation.

    An integer ``split`` is the tensor parallelism. Raises PlanError if the pair cannot be split like this.
    """
    if pair.method == Method.NONE:
        return ()
    split = Parallelism(split) if isinstance(split, int) else split
    case = _Case(pair, device, split, estimate(pair, device, split), workload)
    rules = (
        *(_draft_model, _weights, _draft_kv, _prefix_cache, _precisions, _effective_batch, _sampler_logits),
        *(_sampling, _workload, _usual_concurrency),
    )
    return tuple(advice for rule in rules for advice in rule(case))


def advise_on_nodes(row: Row) -> tuple[Advice, ...]:
    """Return the advice on tensor parallelism over several nodes; empty if none is used."""
    if row.tensor <= row.gpus_per_node:
        return ()
    sentence = (
        f"GPUs of {row.nodes} nodes share each layer and synchronize over the network in every layer, which is slow"
        f" without InfiniBand or RoCE with GPUDirect; tensor {row.gpus_per_node}, pipeline {row.nodes} synchronizes"
        " only once per stage, if the method supports pipeline parallelism"
    )

    return (Advice("layers-over-nodes", sentence),)


def _draft_model(case: _Case) -> Iterator[Advice]:
    target, draft = case.pair.target, case.pair.draft
    if draft is None or case.pair.method != Method.DRAFT_MODEL:
        return
    ratio = parameter_count(target) / parameter_count(draft)
    percent = 100 / ratio
    in_second = SMALLEST_SHARE_PERCENT <= percent <= LARGEST_SHARE_PERCENT
    if not in_second and not SMALLEST_RATIO <= ratio <= LARGEST_RATIO:
        size = "large, so proposals are slow" if ratio < SMALLEST_RATIO else "small, so few proposals may be accepted"
        if LARGEST_RATIO < ratio < 100 / LARGEST_SHARE_PERCENT:
            size = "between both; measure it"
        if ratio <= 1:
            size = (
                "too large: a proposal costs as much as the token that it saves; use a smaller draft, or swap the two"
            )
        yield Advice(
            "draft-size",
            f"the draft has {percent:.1f} % of the target's parameters, outside both rules of thumb "
            f"(1/{SMALLEST_RATIO} to 1/{LARGEST_RATIO}, and {SMALLEST_SHARE_PERCENT} to {LARGEST_SHARE_PERCENT} %): it "
            f"is {size}",
        )
    if draft.architecture != target.architecture:
        yield Advice(
            "draft-family",
            f"draft {draft.name} ({draft.architecture}) is of another family than target {target.name} "
            f"({target.architecture}); models of the same family agree more often",
        )


def _weights(case: _Case) -> Iterator[Advice]:
    pair, budget = case.pair, case.budget
    percent = 100 * budget.draft_weights_bytes / budget.total_bytes
    if percent > LARGEST_DRAFT_PERCENT:
        is_whole = pair.draft is not None and served_precision(pair.draft, pair.draft_precision) is Precision.BF16
        smaller = (
            "a smaller or quantized draft" if is_whole and pair.method == Method.DRAFT_MODEL else "a smaller draft"
        )
        yield Advice(
            "draft-memory",
            f"draft weights use {percent:.0f} % of GPU memory ({format_gib(budget.draft_weights_bytes)} "
            f"GiB), more than {LARGEST_DRAFT_PERCENT} %; {smaller} leaves more for the KV cache",
        )
    percent = 100 * budget.target_weights_bytes / budget.total_bytes
    if percent > LARGEST_TARGET_PERCENT:
        is_whole = served_precision(pair.target, pair.target_precision) is Precision.BF16
        remedy = "quantize the target or split it over more GPUs" if is_whole else "split it over more GPUs"
        yield Advice(
            "target-memory",
            f"target weights use {percent:.0f} % of GPU memory ({format_gib(budget.target_weights_bytes)} GiB), more "
            f"than {LARGEST_TARGET_PERCENT} %, which leaves little for a draft and the KV cache of both; {remedy}",
        )


def _draft_kv(case: _Case) -> Iterator[Advice]:
    """Compare the token capacity with and without the draft, which uses memory for weights and in each block."""
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
        # Target and draft share one pool of blocks (vllm/v1/core/kv_cache_utils.py).
        pays = pays_from(break_even(case.pair, case.budget, alone))
        yield Advice(
            "draft-kv",
            f"the draft costs {percent:.0f} % of the KV cache capacity: {tokens:,} of {tokens_alone:,} tokens"
            f"{case.split.each_copy} remain{pays}",
        )


def _prefix_cache(case: _Case) -> Iterator[Advice]:
    tax = prefix_tax_of(case.pair, case.split)
    if tax is not None and tax.loss is Loss.DROPS_BLOCK:
        # Until vLLM 0.32: v1/core/single_type_kv_cache_manager.py, find_longest_cache_hit.
        yield Advice(
            "prefix-cache",
            f"{case.pair.method} recomputes the last cached block ({tax.block_tokens} tokens) of each prompt with a "
            "cached prefix, because it needs hidden states there",
        )
    if kinds := unread_layers(case.pair, case.split):
        yield Advice(
            "prefix-cache-unknown",
            f"{case.pair.method} may recompute tokens of each prompt with a cached prefix; how many is unknown for a "
            f"model with {kinds}. Measure it with a capture with two arms",
        )


def _precisions(case: _Case) -> Iterator[Advice]:
    pair = case.pair
    target = served_precision(pair.target, pair.target_precision)
    if target.value in frozenset({"INT4", "MXFP4", "NVFP4"}) and pair.target.checkpoint_precision != target:
        yield Advice(
            "target-int8-first",
            f"the target is quantized to {target}; try FP8 or INT8 first: 8 bits lose less quality, and the target "
            "alone decides the output",
        )
    if pair.draft is None or pair.method != Method.DRAFT_MODEL:
        return
    draft = served_precision(pair.draft, pair.draft_precision)
    if draft is Precision.BF16 and target is not Precision.BF16:
        yield Advice(
            "quantize-draft",
            f"the target is {target}, but the draft is still {draft}; quantizing the draft is safer, because the "
            "target checks every token and only acceptance can suffer",
        )


def _effective_batch(case: _Case) -> Iterator[Advice]:
    limits = case.pair.limits
    batch = case.budget.effective_batch
    if batch < limits.max_num_seqs:
        # vllm/config/speculative.py, max_num_new_slots_for_drafting; v1/core/sched/scheduler.py, schedule.
        yield Advice(
            "effective-batch",
            f"only {batch} of maxNumSeqs {limits.max_num_seqs} requests can decode in one step, because each uses K + "
            f"1 and the draft's own slots of maxNumBatchedTokens {limits.max_num_batched_tokens}; raise "
            "maxNumBatchedTokens, or lower K or maxNumSeqs",
        )


def _sampler_logits(case: _Case) -> Iterator[Advice]:
    budget = case.budget
    if budget.overrun_bytes <= budget.slack_bytes:
        return
    # Bisect the largest maxNumSeqs whose logits fit into the slack; chunked since vLLM pull request 48630.
    fitting, bad = 0, case.pair.limits.max_num_seqs
    while bad - fitting > 1:
        middle = (fitting + bad) // 2
        pair = replace(case.pair, limits=replace(case.pair.limits, max_num_seqs=middle))
        fits = verification_bytes(pair, case.split.tensor) <= budget.slack_bytes
        fitting, bad = (middle, bad) if fits else (fitting, middle)
    remedy = f"lower maxNumSeqs to {fitting}, or K" if fitting else "lower gpuMemoryUtilizationPercent"
    yield Advice(
        "sampler-logits",
        f"verifying maxNumSeqs x (K + 1) proposals can take {format_gib(budget.overrun_bytes)} GiB that vLLM does not "
        f"reserve, but only {format_gib(max(0, budget.slack_bytes))} GiB are free outside its budget; {remedy}",
    )


def _sampling(case: _Case) -> Iterator[Advice]:
    """Advise to sample drafts for requests with a temperature: vLLM's default proposes the most likely tokens."""
    temperature, method = case.workload.temperature, case.pair.method
    if temperature and method in METHODS_WITH_SAMPLING and not (case.pair.samples_drafts or case.pair.maps_vocabulary):
        yield Advice(
            "draft-sampling",
            f"requests have temperature {temperature:g}, but the draft proposes the most likely tokens; set "
            "draftSampling: probabilistic, which raises acceptance and needs memory for the draft's logits",
        )


def _workload(case: _Case) -> Iterator[Advice]:
    workload, temperature = case.workload, case.workload.temperature
    if temperature is not None and not LOW_TEMPERATURE < temperature <= HIGH_TEMPERATURE:
        sentence = f"temperature {temperature:g} is at most {LOW_TEMPERATURE}, which is good for acceptance"
        if temperature > HIGH_TEMPERATURE:
            sentence = (
                f"temperature {temperature:g} is above {HIGH_TEMPERATURE}, where fewer proposals match; "
                "expect low acceptance, and use a small K"
            )
        yield Advice("temperature", sentence)
    if workload.primary_slo is Slo.TTFT:
        yield Advice(
            "first-token",
            "speculation does not shorten the prefill, so it does little for TTFT, and a draft model adds its own "
            "prefill",
        )
    if workload.primary_slo is Slo.THROUGHPUT:
        yield Advice(
            "throughput",
            "speculation trades throughput for latency: at high request rates vLLM measured 1.4 to 1.8 times less "
            "throughput with it; use a smaller K, or 0, for large batches",
        )
    if workload.kind is WorkloadKind.MIXED:
        yield Advice(
            "mixed-workload",
            "acceptance differs between kinds of requests, so P99 latency moves away from the median; watch P99, or "
            "serve each kind separately",
        )
    if workload.kind in (WorkloadKind.SUMMARIZATION, WorkloadKind.RAG) and case.pair.method != Method.NGRAM:
        yield Advice(
            "prompt-lookup",
            f"{workload.kind} answers repeat parts of the prompt; method {Method.NGRAM} proposes from it without a "
            "draft, its weights or its KV cache",
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
            f"answer {output:,}), fewer than maxNumSeqs {limits.max_num_seqs}; further requests wait or are preempted",
        )
