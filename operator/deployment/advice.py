"""Rules of thumb about a pair, with numbers and sources; and the break-even of a draft's memory.

Advice never changes a plan. A rule reports only if its numbers are known and outside the recommended range, or if
it costs the user something. docs/explanation/advice.md states which parts of each source were checked. `break_even`
compares the bytes that a step reads with the share of the KV cache that a draft takes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from specdecode_operator.enums import METHODS_OF_BLOCKS, Method, Precision, Slo, WorkloadKind
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
class Source:
    """A place to read on."""

    title: str  # Paper, page or source file; a rule that only practice supports says so
    url: str = ""  # Where it is; empty for a rule of thumb without one


_GUIDE_URL: Final = "https://www.digitalocean.com/community/tutorials/speculative-decoding-vllm-configuration-guide"

DRAFT_SIZE: Final = Source(
    "rule of thumb: 1:8 to 1:12 from DigitalOcean, Speculative Decoding on vLLM; 1 to 5 % from practice, in line with "
    "Leviathan et al. 2023, whose best drafts were far smaller still",
    _GUIDE_URL,
)

FAMILY: Final = Source("rule of thumb: DigitalOcean, Speculative Decoding on vLLM", _GUIDE_URL)

MEMORY_SHARES: Final = Source("rule of thumb; the share itself is computed")

SHARED_BLOCKS: Final = Source(
    "vLLM 0.32, v1/core/kv_cache_utils.py: target and draft share one pool of blocks",
    "https://github.com/vllm-project/vllm/blob/main/vllm/v1/core/kv_cache_utils.py",
)

DROPPED_BLOCK: Final = Source(
    "vLLM until 0.32, v1/core/single_type_kv_cache_manager.py find_longest_cache_hit; its own manager was asked",
    "https://github.com/vllm-project/vllm/blob/main/vllm/v1/core/single_type_kv_cache_manager.py",
)

EIGHT_BIT_FIRST: Final = Source(
    "rule of thumb, with Kurtic et al., Give Me BF16 or Give Me Death: FP8 loses nothing measurable, INT8 1-3 %, INT4 "
    "is close to 8 bits when well made",
    "https://arxiv.org/abs/2411.02355",
)

LOSSLESS: Final = Source(
    "Leviathan et al., Fast Inference from Transformers via Speculative Decoding: the output follows the target alone",
    "https://arxiv.org/abs/2211.17192",
)

SCHEDULER_SLOTS: Final = Source(
    "vLLM 0.32, config/speculative.py max_num_new_slots_for_drafting and v1/core/sched/scheduler.py schedule",
    "https://github.com/vllm-project/vllm/blob/main/vllm/v1/core/sched/scheduler.py",
)

SAMPLER_PEAK: Final = Source(
    "vLLM issues on the rejection sampler's memory; chunked since pull request 48630",
    "https://github.com/vllm-project/vllm/pull/38220",
)

TEMPERATURE: Final = Source(
    "rule of thumb for 0.5 and 0.7; that acceptance falls with temperature: Leviathan et al.",
    "https://arxiv.org/abs/2211.17192",
)

INTER_TOKEN: Final = Source(
    "vLLM documentation, Speculative Decoding: made to reduce inter-token latency",
    "https://docs.vllm.ai/en/latest/features/speculative_decoding/",
)

MIXED: Final = Source("rule of thumb; DigitalOcean, Speculative Decoding on vLLM, warns of a rising P99", _GUIDE_URL)

BUSY_SERVER: Final = Source(
    "vLLM blog, How Speculative Decoding Boosts vLLM Performance by up to 2.8x: slower by 1.4 (draft model) and 1.8 "
    "(n-grams) at high request rates",
    "https://blog.vllm.ai/2024/10/17/spec-decode.html",
)

PROMPT_LOOKUP: Final = Source(
    "vLLM blog, How Speculative Decoding Boosts vLLM Performance by up to 2.8x: prompt lookup on summaries",
    "https://blog.vllm.ai/2024/10/17/spec-decode.html",
)

LAYERS_WITHIN_NODES: Final = Source(
    "vLLM documentation, Parallelism and Scaling: tensor parallelism within a node, pipeline parallelism across nodes",
    "https://docs.vllm.ai/en/latest/serving/parallelism_scaling/",
)


_ONE_REQUEST: Final = Load.same(1)


@dataclass(frozen=True)
class BreakEven:
    """Acceptance, accepted over drafted tokens; None where even all of them are too few."""

    # While the KV cache has room, and is read in no time. None for a mixture of experts, too: how many of them a step
    # of few tokens reads depends on the text, and one that verifies reads more
    few_requests: float | None
    full_cache: float | None  # Once requests wait for room in it
    reads_all: bool = True  # Whether each step reads all weights; experts are where requests are many


def break_even(pair: Pair, budget: Budget, alone: Budget) -> BreakEven | None:
    """Return the break-even of a pair whose steps take as long as reading memory; None where it cannot be said.

    A step reads the weights and all of a full KV cache once, of the draft as often as it has passes. Reckoned in GiB in
    place of milliseconds, since only their ratio counts; how long requests are does not matter, where all of the cache
    is read.
    """
    k, tokens = pair.num_speculative_tokens, budget.kv_cache_tokens
    if k < 1 or not 0 < tokens <= alone.kv_cache_tokens or alone.target_weights_bytes <= 0:
        return None
    of_draft = max(0, budget.kv_bytes_per_token - alone.kv_bytes_per_token)
    costs = StepCosts(
        target=_reading(alone.target_weights_bytes),
        draft=_reading(budget.draft_weights_bytes),
        one_pass=pair.drafts_in_parallel or pair.method in METHODS_OF_BLOCKS,
        target_ms_per_1000_context=1000 * alone.kv_bytes_per_token / GIB,
        draft_ms_per_1000_context=1000 * of_draft / GIB,
    )
    full = full_cache(tokens, alone.kv_cache_tokens, context_tokens=1)
    reads_all = not pair.target.has_experts
    return BreakEven(
        few_requests=break_even_rate(break_even_tokens(costs, k, _ONE_REQUEST), k) if reads_all else None,
        full_cache=break_even_rate(break_even_tokens(costs, k, full), k),
        reads_all=reads_all,
    )


def pays_from(needed: BreakEven | None) -> tuple[str, tuple[tuple[str, float], ...]]:
    """Return what acceptance pays for a share of the KV cache, as a part of a sentence and as numbers."""
    if needed is None:
        return "", ()
    shares = (("break_even_full_percent", needed.full_cache), ("break_even_few_percent", needed.few_requests))
    numbers = tuple((name, 100 * share) for name, share in shares if share is not None)
    read = "weights" if needed.reads_all else "weights, those of all experts,"
    given = f"where a step takes as long as reading {read} and KV cache"
    few = "" if needed.few_requests is None else f" ({100 * needed.few_requests:.0f} % with few requests)"
    if needed.full_cache is None:
        return f"; not even 100 % acceptance pays for that while the cache is full{few}, {given}", numbers
    least = f"at least {100 * needed.full_cache:.0f} % acceptance to pay for that while the cache is full"
    return f"; it takes {least}{few}, {given}", numbers


def _reading(weights_bytes: int) -> Curve:
    return Curve(((1, weights_bytes / GIB),))


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
    return (Advice("layers-over-nodes", sentence, numbers, LAYERS_WITHIN_NODES),)


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
        DRAFT_SIZE,
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
        FAMILY,
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
            MEMORY_SHARES,
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
            MEMORY_SHARES,
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
            SHARED_BLOCKS,
        )


def _prefix_cache(case: _Case) -> Iterator[Advice]:
    tax = prefix_tax_of(case.pair, case.split)
    if tax is not None and tax.loss is Loss.DROPS_BLOCK:
        yield Advice(
            "prefix-cache",
            f"of each prompt that begins like an earlier one, the last block of {tax.block_tokens} tokens that agrees "
            f"is computed again: {case.pair.method} needs hidden states there",
            (("lost_tokens", tax.block_tokens),),
            DROPPED_BLOCK,
        )
    if kinds := unread_layers(case.pair, case.split):
        yield Advice(
            "prefix-cache-unknown",
            f"{case.pair.method} may have tokens computed again of each prompt that begins like an earlier one; how "
            f"many is not known for a model with {kinds}: a capture with two arms measures it",
            (),
            DROPPED_BLOCK,
        )


def _target_precision(case: _Case) -> Iterator[Advice]:
    precision = served_precision(case.pair.target, case.pair.target_precision)
    if precision.value in _FOUR_BIT and case.pair.target.checkpoint_precision != precision:
        yield Advice(
            "target-int8-first",
            f"the target is quantized to {precision}: try FP8 or INT8 first, 8 bits lose less and the target alone "
            "decides the output",
            (),
            EIGHT_BIT_FIRST,
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
            LOSSLESS,
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
            SCHEDULER_SLOTS,
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
        SAMPLER_PEAK,
    )


def _fitting_sequences(case: _Case) -> int:
    """Return the largest maxNumSeqs whose logits fit into the slack, by bisection; 0 when none does."""
    good, bad = 0, case.pair.limits.max_num_seqs
    while bad - good > 1:
        middle = (good + bad) // 2
        limits = replace(case.pair.limits, max_num_seqs=middle)
        fits = verification_bytes(replace(case.pair, limits=limits), case.split.tensor) <= case.budget.slack_bytes
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
    yield Advice("temperature", sentence, (("temperature", temperature),), TEMPERATURE)


def _first_token(case: _Case) -> Iterator[Advice]:
    if case.workload.primary_slo is Slo.TTFT:
        yield Advice(
            "first-token",
            "the first token comes from the prefill, which speculation does not shorten: a promise on TTFT gains "
            "little, and a draft model adds its own prefill",
            (),
            INTER_TOKEN,
        )


def _throughput(case: _Case) -> Iterator[Advice]:
    if case.workload.primary_slo is Slo.THROUGHPUT:
        yield Advice(
            "throughput",
            "speculation buys latency with work: at high request rates vLLM measured 1.4 to 1.8 times less throughput "
            "with it; give busy batches a smaller K, or 0",
            (("largest_measured_slowdown", 1.8),),
            BUSY_SERVER,
        )


def _mixed(case: _Case) -> Iterator[Advice]:
    if case.workload.kind is WorkloadKind.MIXED:
        yield Advice(
            "mixed-workload",
            "mixed requests are accepted unequally, so the slowest (P99) move away from the median: watch P99, or "
            "serve each kind apart",
            (),
            MIXED,
        )


def _prompt_lookup(case: _Case) -> Iterator[Advice]:
    kind = case.workload.kind
    if kind in (WorkloadKind.SUMMARIZATION, WorkloadKind.RAG) and case.pair.method != Method.NGRAM:
        yield Advice(
            "prompt-lookup",
            f"{kind} repeats its prompt: method {Method.NGRAM} proposes from it without a draft, its weights or its KV "
            "cache",
            (("draft_weights_gib", case.budget.draft_weights_bytes / GIB),),
            PROMPT_LOOKUP,
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
            SHARED_BLOCKS,
        )
