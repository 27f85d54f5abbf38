"""Plan where the engines run, and report the plan in `status.plan` and the condition Planned.

Unusable nodes are listed with the reason. A plan in force is kept while the spec allows it and it fits.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.crd_validation import object_problems
from specdecode_operator.api.deployment import Override, SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_status import GpuMemory, PlanStatus, SecondsRange, StartupEstimate
from specdecode_operator.cluster.device_slices import DeviceInventory
from specdecode_operator.cluster.nodes import NodeFacts, NodesFrom
from specdecode_operator.deployment.conditions import FALSE, TRUE, Blocked, ConditionUpdate
from specdecode_operator.deployment.engine_pod import engine_timeouts
from specdecode_operator.deployment.resource_claim import claimable_gpus, claims_devices
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.deployment.startup_estimate import planned_startup
from specdecode_operator.deployment.validation import UNKNOWN_MEMORY, facts_problems
from specdecode_operator.enums import (
    FP8_ELEMENT_BYTES,
    METHODS_OF_BLOCKS,
    METHODS_WITH_DRAFT,
    METHODS_WITH_LAYERS,
    METHODS_WITH_SAMPLING,
    KvCacheDtype,
    Method,
    Precision,
    Slo,
    WorkloadKind,
)
from specdecode_operator.problems import InvalidSpecError, Problem, shown_or_missing
from specdecode_operator.sizing.arithmetic import GIB, format_gib
from specdecode_operator.sizing.devices import (
    MEMORY_FIELD,
    Device,
    find_device,
    known_products,
    mig_profile,
    uncalibrated_note,
)
from specdecode_operator.sizing.errors import PlanError, SizingError
from specdecode_operator.sizing.kernel_support import adaptive_doubt, served_precision
from specdecode_operator.sizing.memory.activation import verification_bytes
from specdecode_operator.sizing.memory.budget import Budget, Verdict, estimate
from specdecode_operator.sizing.memory.kv_cache import cache_layout, pool_capacity
from specdecode_operator.sizing.memory.prefix_cache import Loss, prefix_tax_of, unread_layers
from specdecode_operator.sizing.pair import Pair, Parallelism, without_speculation
from specdecode_operator.sizing.placement import GpuPool, Row, nodes_needed, place_phrase
from specdecode_operator.sizing.plan import (
    Admit,
    Change,
    Changes,
    Plan,
    keep,
    pair_at,
    plan_on_cpu,
    plan_on_gpus,
    selection,
)
from specdecode_operator.sizing.quantization_matrix import MatrixRow, quantization_matrix
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


_DRAFT: Final = "speculation.draft"
_DRAFT_LENGTH: Final = "speculation.draft.maxModelLen"
_DRAFT_TENSOR: Final = "parallelism.draftTensor"


def admitted(facts: Facts, pair: Pair, changes: Changes) -> Changes | None:
    """Return changes with the changes that they require; None if the API server or the engine would reject the spec."""
    body = facts.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    whole = tuple(each for change in changes for each in _with_required_changes(change, body))
    changed = facts.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    for change in whole:
        *parents, name = change.field.split(".")
        place: Body = changed
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = change.value
    try:
        spec = SpecDecodeDeploymentSpec.parse(changed)
    except ValidationError:
        return None
    refused = object_problems(spec) or facts_problems(replace(facts, spec=spec, pair=pair))
    return None if refused else whole


def _with_required_changes(change: Change, spec: Body) -> Iterator[Change]:
    match change:
        case Change("speculation.method", Method.NONE.value):
            yield Change("speculation", {"method": Method.NONE.value})
            if _at(spec, _DRAFT_TENSOR) is not None:
                yield Change(_DRAFT_TENSOR, None)
        case Change("speculation.method", str(method)):
            yield change
            if method not in METHODS_WITH_DRAFT and _at(spec, _DRAFT) is not None:
                yield Change(_DRAFT, None)
        case Change("speculation.draft.model", str(model)) if set(_at(spec, _DRAFT)) - {"model"}:
            # The other fields describe the old draft.
            yield Change(_DRAFT, {"model": model})
        case Change("parallelism.tensor", int(tensor)):
            yield change
            if (_at(spec, _DRAFT_TENSOR) or 1) > 1:
                yield Change(_DRAFT_TENSOR, tensor)
        case Change("serving.maxModelLen", int(length)):
            yield change
            if (_at(spec, _DRAFT_LENGTH) or 0) > length:
                yield Change(_DRAFT_LENGTH, length)
        case _:
            yield change


def _at(spec: Body, field: str) -> Any:
    found: Any = spec
    for name in field.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


_NODES_NAMED: Final = 3  # Nodes named per reason; the rest is counted, because clusters may have thousands
_MOST_NODES: Final = 64  # Most nodes of one replica, which is the most GPUs that it may have in one group
NO_NODES: Final = "NoMatchingNodes"
LWS_MISSING: Final = "LeaderWorkerSetMissing"
_REASONS_NAMED: Final = 4
ASSUMED_PRODUCTS: Final = ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H200")
ASSUMED_GPUS_PER_NODE: Final = 8
_ASSUMED_NODES: Final = 8


def assumed_nodes(facts: Facts, products: Sequence[str] = ()) -> tuple[NodeFacts, ...]:
    """Return made-up nodes with the given products, the products of the spec, or else H100 and H200."""
    accelerator = facts.spec.accelerator
    gpus = accelerator.per_node or ASSUMED_GPUS_PER_NODE
    products = products or accelerator.products or ASSUMED_PRODUCTS
    return tuple(
        NodeFacts(f"{product}-{number}", product, gpus) for product in products for number in range(_ASSUMED_NODES)
    )


def make_plan(
    facts: Facts,
    nodes: tuple[NodeFacts, ...],
    previous: PlanStatus | None,
    *,
    groups: bool = False,
    nodes_from: NodesFrom = NodesFrom.CLUSTER,
) -> Plan | Blocked:
    """Return the plan of a spec, or why no node of the cluster is usable yet.

    A plan in force is kept as long as the spec allows it, the spec leaves the same choice, and the plan fits. A better
    or a cordoned node therefore does not restart engines. Raises InvalidSpecError if no node could ever run the spec.

    Parameters
    ----------
    groups
        Whether the cluster has LeaderWorkerSets, which replicas on several nodes need.
    nodes_from
        Source of the nodes, used in the message if no node is usable.
    """
    accelerator = facts.spec.accelerator
    if facts.on_cpu:
        own = pair_at(facts.pair, facts.options.available, facts.pair.target_precision, facts.pair.draft_precision)
        memory_bytes, kv_cache_bytes = (accelerator.memory_gib or 0) * GIB, (accelerator.kv_cache_gib or 0) * GIB
        return plan_on_cpu(own, memory_bytes, kv_cache_bytes, facts.spec.parallelism.tensor or 1)
    if facts.replay is not None:
        nodes, groups = assumed_nodes(facts), True
    pools = _pools(facts, [node for node in nodes if node.schedulable])
    if kept := _kept_plan(facts, nodes, previous, groups=groups):
        return kept
    if not pools:
        return Blocked(NO_NODES, _no_node_message(facts, nodes, nodes_from))
    if not _has_room(facts, pools):
        return _too_small(facts, pools)
    alone = [replace(pool, nodes=1) for pool in pools]
    plan = _plan(facts, alone, admit=None) if _has_room(facts, alone) else None
    if plan is None or plan.verdict is Verdict.DOES_NOT_FIT:
        plan = _plan(facts, pools, partial(admitted, facts))
    launched = plan.verdict is not Verdict.DOES_NOT_FIT or _ignored_by(facts) is not None
    if plan.chosen.nodes > 1 and launched and not groups:
        asked = f"spec.parallelism: {plan.chosen.gpus} GPUs per replica ({plan.chosen.split.label})"
        message = (
            f"{asked}: no usable node has that many, so a replica needs {plan.chosen.place} and a LeaderWorkerSet, but"
            " LeaderWorkerSet is not installed or the operator may not list it: install it"
            " (https://lws.sigs.k8s.io/docs/installation/), update the operator's role, or use fewer GPUs"
        )
        return Blocked(LWS_MISSING, message)
    return plan


def without_devices(spec: SpecDecodeDeploymentSpec, blocked: Blocked, inventory: DeviceInventory | None) -> Blocked:
    """Return why no device matches the claim of a spec, if this is why no node is usable; otherwise ``blocked``."""
    if blocked.reason != NO_NODES or inventory is None or not claims_devices(spec):
        return blocked
    return claimable_gpus(spec, inventory).blocked


def _has_room(facts: Facts, pools: Iterable[GpuPool]) -> bool:
    tensor = facts.spec.parallelism.tensor or 1
    return any(nodes_needed(pool, tensor, facts.options.spread) for pool in pools)


def _too_small(facts: Facts, pools: Sequence[GpuPool]) -> Blocked:
    tensor, spread = facts.spec.parallelism.tensor or 1, facts.options.spread
    asked = f"spec.parallelism: {tensor * spread.groups} GPUs per replica ({spread.at(tensor).label})"
    largest = max(pools, key=lambda pool: (pool.gpus_per_node, pool.nodes))
    most = largest.gpus_per_node
    if mig_profile(largest.product):
        fix = "use parallelism.tensor 1 with larger MIG devices, or whole GPUs"
        return Blocked("NodesTooSmall", f"{asked}: an engine uses one MIG device, as NCCL cannot combine them: {fix}")
    needed = nodes_needed(replace(largest, nodes=_MOST_NODES), tensor, spread)
    if needed is not None:
        place = place_phrase(tensor * spread.groups, needed, largest.product)
        present = "node is" if largest.nodes == 1 else "nodes are"
        message = (
            f"{asked}: needs {place}, but only {largest.nodes} {present} large enough: add nodes, or use fewer GPUs"
        )
        return Blocked("NodesTooFew", message)
    claim = facts.spec.accelerator.resource_claim
    message = f"{asked}: no usable node has more than {most} GPUs"
    if claim is not None and claim.count == most:
        message = f"{asked}: each pod claims only {most} GPUs (spec.accelerator.resourceClaim.count)"
    why = f"nodes cannot share that many evenly: use at most tensor {most}, with whole stages on more nodes, such as"
    why = f"{why} tensor {most}, pipeline 2 for two"
    if spread.data > 1 and tensor * spread.pipeline > most:
        why = (
            f"each of the {spread.data} data-parallel replicas must fit on one node: use spec.replicas instead of"
            " spec.parallelism.data"
        )
    return Blocked("NodesTooSmall", f"{message}, and {why}, or add larger nodes")


def _kept_plan(facts: Facts, nodes: tuple[NodeFacts, ...], previous: PlanStatus | None, *, groups: bool) -> Plan | None:
    if previous is None or previous.chosen_by not in (None, chosen_by(facts)):
        return None
    pools = {pool.product: pool for pool in _pools(facts, [node for node in nodes if node.schedulable])}
    pools |= {pool.product: pool for pool in _pools(facts, nodes) if pool.product == previous.product}
    try:
        plan = plan_on_gpus(
            facts.pair, pools.values(), facts.spec.parallelism.tensor, facts.options, partial(admitted, facts)
        )
    except SizingError:
        return None
    place = (previous.product, previous.tensor, previous.gpus_per_replica, previous.nodes_per_replica)
    precisions = (previous.target_quantization, previous.draft_quantization)
    for row in plan.rows:
        its = (row.product, row.tensor, row.gpus, row.nodes)
        if (row.target_precision, row.draft_precision) == precisions and its == place:
            fits = row.budget.verdict is not Verdict.DOES_NOT_FIT or _ignored_by(facts) is not None
            return keep(plan, facts.pair, row) if fits and (row.nodes == 1 or groups) else None
    return None


def chosen_by(facts: Facts) -> str:
    """Return the objective and the allowed precisions: ``Quality among target BF16, FP8 and draft BF16``."""
    allowed = selection(facts.pair, facts.options)
    models = [("target", allowed.target), ("draft", allowed.draft)]
    named = [f"{role} {', '.join(sorted(precisions))}" for role, precisions in models if precisions]
    return f"{facts.options.objective} among {' and '.join(named)}"


def full_matrix(facts: Facts, nodes: tuple[NodeFacts, ...], plan: Plan) -> tuple[MatrixRow, ...]:
    """Return the matrix of all precisions and placements that the spec allows; empty on CPU.

    Without usable nodes, the placements assume the plan's product.
    """
    if facts.on_cpu:
        return ()
    chosen = plan.chosen
    present = nodes if facts.replay is None else assumed_nodes(facts)
    pools = _pools(facts, present) or [
        GpuPool(chosen.product, chosen.gpus_per_node, chosen.nodes, facts.spec.accelerator.memory_gib_per_gpu)
    ]
    return quantization_matrix(
        facts.pair, pools, facts.spec.parallelism.tensor, facts.options.available, spread=facts.options.spread
    )


def _plan(facts: Facts, pools: Sequence[GpuPool], admit: Admit | None) -> Plan:
    try:
        return plan_on_gpus(facts.pair, pools, facts.spec.parallelism.tensor, facts.options, admit)
    except SizingError as error:
        problem = Problem(f"spec.{error.field}", shown_or_missing(error.value), error.message)
        if error.field == "draft" and facts.pair.draft is not None:
            # Only planning finds out if the states of target and draft fit into one layout.
            problem = Problem("spec.speculation.draft.model", facts.pair.draft.name, error.message)
        raise InvalidSpecError([problem]) from error


def _pools(facts: Facts, nodes: Iterable[NodeFacts]) -> list[GpuPool]:
    wanted = facts.spec.accelerator.products
    sizes: dict[str, list[int]] = {}
    for node in nodes:
        if _problem(facts, node) is None and (not wanted or node.product in wanted):
            sizes.setdefault(node.product, []).append(node.gpus)
    largest = {product: (max(gpus), gpus.count(max(gpus))) for product, gpus in sizes.items()}
    if not largest and facts.spec.accelerator.per_node:
        # Node pools scaled to zero have no nodes, so use the numbers of the spec.
        largest = dict.fromkeys(wanted, (facts.spec.accelerator.per_node, _MOST_NODES))
    memory_gib, claim = facts.spec.accelerator.memory_gib_per_gpu, facts.spec.accelerator.resource_claim
    most = (claim and claim.count) or max((gpus for gpus, _ in largest.values()), default=0)
    return [
        GpuPool(product, min(gpus, most), 1 if mig_profile(product) else min(count, _MOST_NODES), memory_gib)
        for product, (gpus, count) in sorted(largest.items())
    ]


def passed_over(facts: Facts, nodes: tuple[NodeFacts, ...]) -> str:
    """Return the unusable nodes with reasons, without nodes of products that the spec does not name."""
    if facts.on_cpu or facts.replay is not None:
        return ""
    wanted = facts.spec.accelerator.products
    named: dict[str, list[str]] = {}
    for node in nodes:
        problem = _problem(facts, node)
        if problem and (not wanted or not node.product or any(node.product.startswith(product) for product in wanted)):
            named.setdefault(f"{node.product or 'unlabelled'}: {problem}", []).append(node.name)
    reasons = []
    for reason, names in sorted(named.items()):
        more, listed = len(names) - _NODES_NAMED, ", ".join(sorted(names)[:_NODES_NAMED])
        nodes_word = "node" if len(names) == 1 else "nodes"
        reasons.append(f"{nodes_word} {listed}{f' and {more} more' if more > 0 else ''}: {reason}")
    more = len(reasons) - _REASONS_NAMED
    return "; ".join([*reasons[:_REASONS_NAMED], *([f"and {more} more kinds of nodes"] if more > 0 else [])])


def _problem(facts: Facts, node: NodeFacts) -> str | None:
    if node.refusal:
        return node.refusal
    given = facts.spec.accelerator
    if find_device(node.product, given.memory_gib_per_gpu if node.product in given.products else None) is not None:
        return None
    base = next((product for product in known_products() if node.product.startswith(f"{product}-")), None)
    if base is not None:
        suffix = node.product.removeprefix(base)
        return f"suffix {suffix} marks a variant of {base}, and {UNKNOWN_MEMORY}"
    return f"{UNKNOWN_MEMORY}: name it in spec.accelerator.products and set spec.{MEMORY_FIELD}"


def _no_node_message(facts: Facts, nodes: tuple[NodeFacts, ...], nodes_from: NodesFrom) -> str:
    wanted = f"one of: {', '.join(products)}" if (products := facts.spec.accelerator.products) else "a known GPU"
    missing = "spec.accelerator.perNode" if facts.spec.accelerator.products else "spec.accelerator.products and perNode"
    if nodes_from is NodesFrom.NOWHERE:
        administrator = "ask its administrator to configure the nodes (fleet.nodes of the chart, --nodes)"
        return f"this operator serves selected namespaces and may not list nodes: set {missing}, or {administrator}"
    present = ", ".join(sorted({node.product for node in nodes if node.product})) or "none"
    refused = f"; {passed_over(facts, nodes)}".removesuffix("; ")
    if nodes_from is NodesFrom.FILE:
        return (
            f"no configured node (fleet.nodes of the chart, --nodes) has {wanted}"
            f" (GPUs configured: {present}); for other nodes, set {missing}{refused}"
        )
    return (
        f"no schedulable node has the label nvidia.com/gpu.product with {wanted} (GPUs found: {present});"
        f" waiting for one. For node pools that scale from zero, set {missing}{refused}"
    )


_REHEARSAL: Final = "spec.engine.replay replays a recording, so the planned nodes need not exist"
MOST_SENTENCES: Final = 16  # Most fixes, and most pieces of advice, in a status


def plan_status(facts: Facts, plan: Plan) -> PlanStatus:
    """Return `status.plan`: the chosen row with its memory terms, fixes and advice."""
    chosen, budget, doubts = plan.chosen, plan.chosen.budget, list[str | None]()
    device = find_device(chosen.product, facts.spec.accelerator.memory_gib_per_gpu)
    if device is not None and budget.calibration is None:
        # No public log or measurement confirms the figures on this GPU.
        doubts = [uncalibrated_note(device), adaptive_doubt(device.product, facts.pair)]
    return PlanStatus(
        verdict=plan.verdict,
        explanation=plan.explanation,
        product=chosen.product,
        tensor=chosen.tensor,
        pipeline=chosen.spread.pipeline,
        data=chosen.spread.data,
        expert=chosen.spread.expert,
        draft_tensor=chosen.tensor if facts.method in METHODS_WITH_LAYERS else None,
        gpus_per_replica=0 if facts.on_cpu else chosen.gpus,
        nodes_per_replica=chosen.nodes,
        target_quantization=facts.pair.target_precision,
        draft_quantization=facts.pair.draft_precision if facts.pair.draft else None,
        target_knowledge=facts.pair.target.knowledge,
        draft_knowledge=facts.pair.draft.knowledge if facts.pair.draft else None,
        kv_cache_dtype=kv_cache_dtype(facts),
        max_model_len=facts.pair.limits.max_model_len,
        per_gpu=GpuMemory(
            **{term: getattr(budget, term) for term in GpuMemory.model_fields if term != "adapters_bytes"},
            adapters_bytes=budget.adapters_bytes or None,
        ),
        kv_bytes_per_token=budget.kv_bytes_per_token,
        kv_cache_tokens=budget.kv_cache_tokens,
        max_concurrency=f"{budget.max_concurrency:.2f}",
        uncalibrated="; ".join(filter(None, doubts)) or None,
        startup=_startup_estimate(facts, plan),
        chosen_by=chosen_by(facts) if not facts.on_cpu else None,
        fixes=[fix.sentence for fix in plan.fixes][:MOST_SENTENCES] or None,
        advice=[f"{each.sentence} [{each.code}]" for each in plan_advice(facts, plan)][:MOST_SENTENCES] or None,
    )


def _startup_estimate(facts: Facts, plan: Plan) -> StartupEstimate | None:
    found = planned_startup(facts, plan.chosen)
    if found is None:
        return None
    before, engine = (
        SecondsRange(fastest_seconds=each.fastest, slowest_seconds=each.slowest)
        for each in (found.before_s, found.engine_s)
    )
    deadline_s = engine_timeouts(facts, plan).startup_s
    return StartupEstimate(preparation=before, engine=engine, deadline_seconds=deadline_s)


def kv_cache_dtype(facts: Facts) -> str:
    """Return the type of the KV cache: serving.kvCacheDtype, or ``fp8`` if the checkpoint sets it, or else ``auto``."""
    asked = facts.spec.serving.kv_cache_dtype
    if asked is not KvCacheDtype.AUTO:
        return asked.value
    held = facts.pair.target.cache_element_bytes
    return "fp8" if held == FP8_ELEMENT_BYTES else "auto"


def plan_advice(facts: Facts, plan: Plan) -> tuple[Advice, ...]:
    """Return the advice on the chosen row; empty on CPU or if it does not fit, because fixes are listed then."""
    device = find_device(plan.chosen.product, facts.spec.accelerator.memory_gib_per_gpu)
    if device is None or plan.verdict is Verdict.DOES_NOT_FIT:
        return ()
    given, workload = facts.spec.workload, Workload()
    if given is not None:
        temperature = float(given.temperature) if given.temperature else None
        tokens = (given.prompt_tokens, given.output_tokens)
        workload = Workload(given.kind, temperature, given.primary_slo, *tokens)
    return (*advise(facts.pair, device, plan.chosen.split, workload), *advise_on_nodes(plan.chosen))


def planned_break_even(facts: Facts, plan: Plan) -> float | None:
    """Return the acceptance at which the draft breaks even at low load on the chosen row; None if it is unknown."""
    device = find_device(plan.chosen.product, facts.spec.accelerator.memory_gib_per_gpu)
    return None if device is None else low_load_break_even(facts.pair, device, plan.chosen.split)


def _ignored_by(facts: Facts) -> Override | None:
    """Return the override if it ignores the plan; otherwise None."""
    override = facts.spec.override
    return override if override is not None and override.ignore_plan else None


def planned_condition(facts: Facts, plan: Plan, passed_over: str = "") -> ConditionUpdate:
    """Return the condition Planned; ``passed_over`` lists the unusable nodes."""
    rehearsal = "" if facts.replay is None else _REHEARSAL
    explanation = "; ".join(filter(None, [plan.explanation, rehearsal, passed_over]))
    if plan.verdict != "DoesNotFit":
        return ConditionUpdate("Planned", TRUE, plan.verdict, explanation)
    override = _ignored_by(facts)
    if override is not None:
        message = f"does not fit, but spec.override.ignorePlan is set ({override.reason!r}): {explanation}"
        return ConditionUpdate("Planned", TRUE, "Overridden", message)
    return ConditionUpdate("Planned", FALSE, "DoesNotFit", explanation)


def plan_change(old: PlanStatus | None, new: PlanStatus | None) -> str | None:
    """Return the change from one placement to another as text; None if it is the same or one is missing."""
    if old is None or new is None or _place(old) == _place(new):
        return None
    return f"{_place(old)} -> {_place(new)}: {new.explanation}"


def _place(plan: PlanStatus) -> str:
    precisions = " + ".join(filter(None, [plan.target_quantization, plan.draft_quantization]))
    return f"{precisions} on {place_phrase(plan.gpus_per_replica, plan.nodes_per_replica, plan.product)}"
