"""The memory budget of one GPU, or of a CPU engine, term by term, and whether the pair fits.

`engine_footprint` holds the terms that do not depend on the GPU product. It is cached, because searches and
matrices call it repeatedly. Overhead is engine memory outside torch's tensors: libraries, CUDA graphs and memory
that the engine needs outside the budget. On CPU, the KV cache size is given; on a GPU, it is the remainder.
"""

import math
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import lru_cache
from operator import attrgetter
from typing import Final, NamedTuple

from specdecode_operator.enums import METHODS_WITH_HIDDEN_STATES, SIXTEEN_BIT_BYTES, Knowledge, Precision
from specdecode_operator.sizing.arithmetic import GIB, ceil_div, described, named
from specdecode_operator.sizing.calibration import Correction, EngineKind
from specdecode_operator.sizing.devices import Device, memory_coefficients
from specdecode_operator.sizing.errors import PlanError
from specdecode_operator.sizing.geometry import LatentAttention, ModelGeometry
from specdecode_operator.sizing.memory.activation import (
    activation_bytes,
    on_product,
    unprofiled_latent_bytes,
    verification_bytes,
)
from specdecode_operator.sizing.memory.buffers import (
    METHODS_WITH_TOKEN_TABLE,
    adaptive_graphs,
    capture_sizes,
    charged_state_bytes,
    confidence_tables_bytes,
    further_graphs,
    state_bytes,
)
from specdecode_operator.sizing.memory.kv_cache import (
    CachedLayers,
    KvGrouping,
    blocks_for,
    cache_layout,
    kv_bytes_per_token,
    layers_of_pair,
    parameter_weights,
    pool_blocks,
    pool_capacity,
    stage_weights,
)
from specdecode_operator.sizing.pair import (
    TENSOR_FIELD,
    TENSOR_ONLY,
    EngineLimits,
    Pair,
    Parallelism,
    effective_batch,
    keeps_states_in_graphs,
    loaded_draft,
    spread_problems,
)
from specdecode_operator.sizing.rank_layers import stages
from specdecode_operator.sizing.result_cache import MEMO_SIZE, Memo
from specdecode_operator.sizing.tensor_parallel import split_remedy, tensor_problems
from specdecode_operator.sizing.version_rules import (
    NEWEST_VERSION,
    Runner,
    Sampler,
    VersionRules,
    find_version_rules,
    sizing_facts,
)

_QUANTIZATION_STEPS: Final = {Precision.FP8: 1, Precision.INT8: 2}
"""Kernels that quantize activations before each projection."""

_STACK_BYTES: Final = {0: 768, 4: 880, 2: 1504, 3: 1888, 1: 1696}
"""Stack a thread of the Triton top-k kernel, compiled for sm90, by how far the vocabulary can be read in vectors.

Keys: 0 for a multiple of 16, 4 of 4, 2 of 2, else the remainder by 4 (Triton 3.6, ptxas -v).
"""


def non_torch_bytes(pair: Pair, split: Parallelism) -> int:
    """Return NCCL, workspaces and modules inside the budget."""
    era = pair.era
    sizes = memory_coefficients().non_torch
    # Over PCIe NCCL's buffers are the host's (its transport SHM) or small, and vLLM has neither symmetric memory nor a
    # fused all-reduce there: public logs of such cards have no more than those of one GPU.
    alone = shares_no_layer(pair, split) or not pair.limits.has_nvlink
    if era.runner is Runner.V2:
        return sizes.v2_one_gpu if alone else sizes.v2_several_gpus
    layers = named(ceil_div(pair.target.num_layers, split.pipeline), "layers", like=split.tensor)
    if split.tensor == 1 or alone:
        base = sizes.pipeline_only if split.pipeline > 1 and split.tensor == 1 else sizes.one_gpu
    elif split.tensor == 2:  # noqa: PLR2004 (measured for two apart)
        base = sizes.two_gpus + sizes.two_gpus_per_layer * layers
    elif split.tensor < 8:  # noqa: PLR2004 (estimated apart)
        base = sizes.more_gpus + sizes.more_gpus_per_layer * layers
    else:
        base = sizes.eight_gpus + sizes.eight_gpus_per_layer * layers
    if era.sampler is not Sampler.TRITON:
        return base
    return base + named(_local_memory_bytes(pair.target.vocab_size), "of stacks of the top-k kernel", like=split.tensor)


def shares_no_layer(pair: Pair, split: Parallelism) -> bool:
    """Whether no other GPU has a part in a GPU's layers: not by tensor parallelism, nor by experts of its copies."""
    return split.tensor == 1 and (split.data == 1 or not pair.target.has_experts)


def _local_memory_bytes(vocabulary: int) -> int:
    """Return what the driver reserves for the stacks of the top-k kernel beyond the default.

    Only vocabularies that are no multiple of four need more: Granite's 49,155.
    """
    coefficients = memory_coefficients()
    remainder = vocabulary % 4
    key = 0 if vocabulary % 16 == 0 else remainder or 4
    return coefficients.resident_threads * max(0, _STACK_BYTES[key] - coefficients.default_stack_bytes)


def graph_bytes(pair: Pair, split: Parallelism) -> int:
    """Return what the engine charges to the budget for CUDA graphs, target and drafter together.

    Measured in vLLM's usual mode, FULL_AND_PIECEWISE, which captures most: for the others it is an upper bound.
    """
    era = pair.era
    if not pair.limits.captures_graphs or not era.charges_graphs:
        return 0
    sizes = memory_coefficients().graphs
    if era.runner is Runner.V2:
        of_sizes = (capture_sizes(pair) - 1 + further_graphs(pair) + adaptive_graphs(pair)) * sizes.v2_size
        of_sizes += _timed_steps_bytes(pair, split)
        if pair.method not in METHODS_WITH_HIDDEN_STATES:
            return sizes.v2 + of_sizes
        # A head's decoding is captured for each number above 1 (spec_decode/target_dependent_ar/cudagraph_utils.py).
        lengths = 1 + len(pair.other_draft_lengths - {0, 1})
        return sizes.v2 + of_sizes + named(sizes.v2_draft_head * lengths, "of the drafter", like=of_sizes)
    per_layer = sizes.v1_layer + (sizes.v1_expert_layer if pair.target.has_experts else 0)
    full = sum(graph_layers(pair, split)) * per_layer + quantization_steps(pair) * sizes.v1_quantization_step
    of_sizes = full * (capture_sizes(pair) - 1) // (sizes.v1_sizes - 1)
    if not pair.drafts_in_parallel:
        return of_sizes
    # The second size that is captured opens a segment of torch's allocator, and the estimate takes that for what each
    # further size needs (v1/worker/gpu_model_runner.py, profile_cudagraph_memory), as it does under V2.
    return of_sizes + named((capture_sizes(pair) - 1) * sizes.v2_size, "of the parallel drafter", like=of_sizes)


def _timed_steps_bytes(pair: Pair, split: Parallelism) -> int:
    """Return what the estimate for graphs has of the steps by which adaptive verification learns their costs.

    Up to 0.32 they run in the estimate, too, up to a full step, and what they leave in torch's cache is taken for
    graphs (v1/worker/gpu/model_runner.py, capture_model).
    """
    if not pair.adaptive_verification or not sizing_facts(pair.limits.engine_version)["charges_timed_steps"]:
        return 0
    return described(activation_bytes(pair, split), "of steps that are timed")


def graph_pool_bytes(pair: Pair, split: Parallelism) -> int:
    """Return what CUDA graphs really take after the start, charged to the budget or not."""
    if not pair.limits.captures_graphs:
        return 0
    sizes = memory_coefficients().graphs
    if pair.era.runner is Runner.V2:
        return sizes.v2_pool
    per_layer = sizes.v1_pool_layer + (sizes.v1_pool_expert_layer if pair.target.has_experts else 0)
    full = sum(graph_layers(pair, split)) * per_layer + quantization_steps(pair) * sizes.v1_pool_quantization_step
    return sizes.v1_pool + full * (capture_sizes(pair) - 1) // (sizes.v1_sizes - 1)


def graph_layers(pair: Pair, split: Parallelism) -> tuple[int, int]:
    """Return the layers of target and draft captured by V1: each twice, whole and in pieces; a draft's in pieces only.

    So a draft's count half.
    """
    draft = loaded_draft(pair)
    layers, drafting = (
        ceil_div(pair.target.num_layers, split.pipeline),
        ceil_div(draft[0].num_layers, 2) if draft else 0,
    )
    return (
        named(layers, "layers of the target", like=split.tensor),
        named(drafting, "of the drafter", like=split.tensor),
    )


def quantization_steps(pair: Pair) -> int:
    """Return the kernels before each projection that quantize what it reads."""
    return _QUANTIZATION_STEPS.get(pair.target_precision, 0)


def runtime_overrun_bytes(pair: Pair, tensor: int) -> int:
    """Return what verification takes at run time that no profiling run has seen."""
    return verification_bytes(pair, tensor)


def slack_bytes(pair: Pair, total_bytes: int, requested_bytes: int, split: Parallelism) -> int:
    """Return what stays outside the budget once the CUDA context, what is not charged, and a reserve are there."""
    return free_outside_bytes(total_bytes, requested_bytes, uncharged_bytes(pair, split))


def uncharged_bytes(pair: Pair, split: Parallelism) -> int:
    """Return what the engine takes outside the budget."""
    era = pair.era
    uncharged = confidence_tables_bytes(pair) + (0 if era.charges_state else state_bytes(pair, split))
    uncharged += memory_coefficients().cublas_workspace_bytes if era.cublas_before_snapshot else 0
    uncharged += unprofiled_latent_bytes(pair, split)
    if not era.charges_graphs:
        uncharged += graph_pool_bytes(pair, split)
    return uncharged


def free_outside_bytes(total_bytes: int, requested_bytes: int, uncharged_bytes: int) -> int:
    """Return what is left of a GPU beside the budget and what is not charged to it."""
    coefficients = memory_coefficients()
    free = total_bytes - requested_bytes - coefficients.context_bytes - coefficients.slack_reserve_bytes
    return free - named(uncharged_bytes, "that is not charged") if uncharged_bytes else free


class Rank(NamedTuple):
    """What one GPU holds beside the KV cache: the sum of these."""

    target_bytes: int
    draft_bytes: int
    state_bytes: int
    activation_bytes: int
    graphs_bytes: int
    non_torch_bytes: int
    correction_bytes: int = 0  # What measurements change in the three before


class Footprint(NamedTuple):
    """What of an engine's memory its models, its settings and its split decide."""

    era: VersionRules
    ranks: tuple[Rank, ...]  # A GPU of each pipeline stage
    cached: CachedLayers  # What its KV cache is for
    effective_batch: int
    overrun_bytes: int
    uncharged_bytes: int


def engine_footprint(pair: Pair, split: Parallelism) -> Footprint:
    """Return what a pair holds that is split so, remembered for pairs that differ in nothing that it depends on.

    Raises
    ------
    PlanError
        When the models cannot be split so.
    """
    limits = pair.limits
    reads_length = _reads_length(pair.target, pair.draft, pair.method, limits.engine_version)
    key = (split, limits.max_model_len if reads_length else None, _of_pair(pair), _of_limits(limits))
    return _FOOTPRINTS.get(key, lambda: _footprint(pair, split))


_FOOTPRINTS: Final = Memo[Footprint]()

_CHANGE_NOTHING: Final = (
    *("calibration", "limits", "max_model_len", "memory_utilization_percent", "min_concurrency"),
    "kv_cache_element_bytes",
)
"""Fields of pairs and limits that no footprint depends on as they are."""

_of_pair: Final = attrgetter(*(each.name for each in fields(Pair) if each.name not in _CHANGE_NOTHING))
_of_limits: Final = attrgetter(*(each.name for each in fields(EngineLimits) if each.name not in _CHANGE_NOTHING))


@lru_cache(maxsize=MEMO_SIZE)
def _reads_length(target: ModelGeometry, draft: ModelGeometry | None, method: str, version: str) -> bool:
    """Whether anything beside the KV cache depends on the longest request.

    Images that fit into it, contexts of latent attention, tables of tokens, and rotary tables of heads.
    """
    attentions = [*target.attentions, *(() if draft is None else draft.attentions)]
    latent = any(isinstance(mixer, LatentAttention) for mixer in attentions)
    stretched = method in sizing_facts(version)["positions_like_target"]
    return latent or stretched or bool(target.tower.item_tokens) or method in METHODS_WITH_TOKEN_TABLE


def _footprint(pair: Pair, split: Parallelism) -> Footprint:
    refuse_bad_split(pair, split)
    return Footprint(
        era=pair.era,
        ranks=_ranks(pair, split),
        cached=layers_of_pair(pair, split),
        effective_batch=effective_batch(pair),
        overrun_bytes=runtime_overrun_bytes(pair, split.tensor),
        uncharged_bytes=uncharged_bytes(pair, split),
    )


def _ranks(pair: Pair, split: Parallelism) -> tuple[Rank, ...]:
    graphs, non_torch = graph_bytes(pair, split), non_torch_bytes(pair, split)
    loaded = zip(stages(pair.target, split.pipeline), stage_weights(pair, split), strict=True)
    return tuple(
        Rank(
            weights.target_bytes,
            weights.draft_bytes,
            charged_state_bytes(pair, split, stage),
            activation_bytes(pair, split, stage),
            graphs,
            non_torch,
        )
        for stage, weights in loaded
    )


def refuse_bad_split(pair: Pair, split: Parallelism | int) -> None:
    """Raise PlanError with the first problem of splitting the pair so."""
    if isinstance(split, int):
        split = TENSOR_ONLY.at(split)
    version = pair.limits.engine_version
    bad = _bad_split(pair.target, pair.target_precision, pair.draft, pair.draft_precision, version, split)
    if bad is not None:
        raise PlanError(bad.field, bad.value, bad.message)


@lru_cache(maxsize=MEMO_SIZE)
def _bad_split(  # noqa: PLR0913, PLR0917 (the key of the cache: all that it depends on)
    target: ModelGeometry,
    target_precision: Precision,
    draft: ModelGeometry | None,
    draft_precision: Precision | None,
    version: str,
    split: Parallelism,
) -> PlanError | None:
    tensor, data, expert = split.tensor, split.data, split.expert
    if tensor < 1:
        return PlanError(TENSOR_FIELD, tensor, "must be 1 or more")
    for problem in spread_problems(target, split, version):
        return problem
    models = [(target, target_precision), *([] if draft is None else [(draft, draft_precision)])]
    for model, precision in models:
        problems = tensor_problems(model, tensor, precision, version, data=data, expert=expert)
        if problems:
            remedy = split_remedy(models, version, data=data, expert=expert)
            return PlanError(TENSOR_FIELD, tensor, f"{problems[0].message}; {remedy}")
    return None


_WEIGHTS_MARGIN_PERCENT: Final = 15
_STORED_WEIGHTS_MARGIN_PERCENT: Final = 3
_ACTIVATION_MARGIN_PERCENT: Final = 25
_UNKNOWN_ENCODER_BYTES: Final = 3 * GIB // 2
"""What estimated models keep back; tools/bench/sizing/estimated.py compares with models that sizing knows exactly."""

_FEW_SEQUENCES: Final = 32
"""Requests at once below which a doubt about blocks is no reason to run fewer: our own choice."""


class Verdict(StrEnum):
    """Whether min_concurrency requests of max_model_len can be served."""

    FITS = "Fits"
    """Also after the safety margin."""

    TIGHT = "Tight"
    """Only before the margin."""

    DOES_NOT_FIT = "DoesNotFit"
    """Not at all."""


class Term(StrEnum):
    """The term of a budget that does not fit."""

    WEIGHTS = "weights"
    """The weights alone take all that the engine may use."""

    OVERHEAD = "overhead"
    """Weights fit, but what the engine needs to run leaves nothing for the KV cache."""

    KV_CACHE = "kv_cache"
    """What is left for the KV cache holds too few requests."""

    SEQUENCES = "max_num_seqs"
    """The KV cache has fewer blocks than the requests that may run at once, of which each keeps its states in one."""

    UTILIZATION = "memory_utilization_percent"
    """The engine asks for more than is free when it starts."""

    MEMORY = "memory"
    """On CPU: the memory given is less than all terms together."""

    SLACK = "slack"
    """It fits, but verification at full batch may need more than is free outside the budget."""

    MARGIN = "margin"
    """It fits, but not after the safety margin."""


@dataclass(frozen=True)
class Budget:
    """Memory of one GPU (on CPU: of one replica) in bytes, by term.

    ``requested`` less the six terms is ``available_kv``.
    """

    total_bytes: int  # Memory of the device
    requested_bytes: int  # What the engine claims of it. On CPU: what it will take in all.
    target_weights_bytes: int  # Weights of the target, and the rotary table it loads
    draft_weights_bytes: int  # Weights of the draft, and its rotary table where it cannot share the target's
    # What the engine needs to run. Non-torch memory includes the correction.
    state_bytes: int
    activation_bytes: int
    cuda_graphs_bytes: int
    non_torch_bytes: int
    available_kv_bytes: int  # What is left for the KV cache; negative when the rest is too much
    needed_kv_bytes: int  # KV cache without which the verdict is DoesNotFit
    margin_bytes: int  # What the verdict keeps back because estimates err
    kv_bytes_per_token: int  # KV cache of one token in target and draft
    # What the available KV cache holds, before the margin, as vLLM reports it
    num_blocks: int
    kv_cache_tokens: int
    max_concurrency: float
    effective_batch: int  # Requests that can decode in one step under K
    # What verification may take outside the budget, and what is free there
    overrun_bytes: int
    slack_bytes: int
    calibrated: bool  # Whether logs of this version and of this GPU confirm the estimates
    verdict: Verdict  # Whether it fits
    binding_term: Term | None  # What breaks it; None when it fits
    # By how much measurements of the calibration file change the estimates: positive where engines took more
    correction_bytes: int = 0
    estimated_margin_bytes: int = 0  # Part of the margin that is there because sizing estimates a model
    calibration: str | None = None  # Which measurements those are, in words; None where none is of an engine like this
    uncalibrated_gpu: bool = False  # Whether no log of this GPU confirms the estimates; the margin is wider then
    # Requests that may run at once, where the KV cache has too few blocks for as many as usual; None: as asked for
    fewer_seqs: int | None = None

    @property
    def weights_bytes(self) -> int:
        """Weights of target and draft together."""
        return self.target_weights_bytes + self.draft_weights_bytes

    @property
    def estimated_bytes(self) -> int:
        """The terms that no source gives exactly, without the correction: no measurement can give back more."""
        return self.activation_bytes + self.cuda_graphs_bytes + self.non_torch_bytes - self.correction_bytes


def estimate(pair: Pair, device: Device, split: Parallelism | int) -> Budget:
    """Return the budget of each GPU when the pair is spread so; a whole number is a tensor parallelism.

    The rules are those of vLLM's gpu_worker.py: a share of the device, less
    weights, buffers, the profiled peak, non-torch memory and graphs, is the
    KV cache. With pipeline stages it is the budget of the GPU that has the
    least blocks: all stages get as many.

    Of a model with states the requests that may run at once are halved until each has a block, if the limits leave
    their number open: to that number it starts for sure, and beyond 32 also if the estimate errs by its margin.

    Raises
    ------
    PlanError
        When the models cannot be split so.
    """
    if isinstance(split, int):
        split = TENSOR_ONLY.at(split)
    budget, limits = _estimate(pair, device, split), pair.limits
    while limits.may_run_fewer and _is_short_of_blocks(pair, split, budget, limits.max_num_seqs):
        fewer = limits.max_num_seqs // 2
        if fewer < max(1, limits.min_concurrency):
            break
        limits = replace(limits, max_num_seqs=fewer)
        budget = replace(_estimate(replace(pair, limits=limits), device, split), fewer_seqs=fewer)
    return budget


def _is_short_of_blocks(pair: Pair, split: Parallelism, budget: Budget, sequences: int) -> bool:
    if budget.binding_term is Term.SEQUENCES:
        return True
    # Fewer would cost more throughput than the doubt is worth.
    if budget.binding_term is not Term.MARGIN or sequences <= _FEW_SEQUENCES or not keeps_states_in_graphs(pair):
        return False
    return budget.needed_kv_bytes == sequences * tightest_grouping(pair, split, budget).bytes_per_block


def _estimate(pair: Pair, device: Device, split: Parallelism) -> Budget:
    pair = on_product(pair, device.product)
    footprint = engine_footprint(pair, split)
    # As vLLM rounds it (v1/worker/utils.py, request_memory).
    requested = math.ceil(device.total_bytes * pair.limits.memory_utilization_percent / 100)
    correction = find_correction(pair, device, split)
    ranks = _corrected(footprint.ranks, correction)
    layout = footprint.cached.layout(pair.limits.kv_cache_element_bytes)
    available = [requested - sum(rank) for rank in ranks]
    tightest = _tightest(layout, available)
    engine = _Engine(pair, device, footprint, requested, available[tightest], correction)
    return _budget(engine, ranks[tightest], layout[tightest], pool_blocks(layout, available))


class _Engine(NamedTuple):
    """What is estimated: the pair on its GPUs, what it claims of each and keeps for its cache, what was measured."""

    pair: Pair
    device: Device
    footprint: Footprint
    requested_bytes: int
    available_bytes: int
    correction: Correction | None


def _corrected(ranks: tuple[Rank, ...], correction: Correction | None) -> tuple[Rank, ...]:
    """Return the ranks with what measurements add to the estimated terms; one cannot give more than they take."""
    if correction is None:
        return ranks
    estimated = [rank.activation_bytes + rank.graphs_bytes + rank.non_torch_bytes for rank in ranks]
    return tuple(
        rank._replace(correction_bytes=max(correction.residual_bytes, -size_bytes))
        for rank, size_bytes in zip(ranks, estimated, strict=True)
    )


def _budget(engine: _Engine, rank: Rank, grouping: KvGrouping, blocks: int) -> Budget:
    """Return the budget of the GPU with the least blocks."""
    pair, device, footprint, requested, available, correction = engine
    limits = pair.limits
    capacity = pool_capacity(grouping, blocks, limits.max_model_len)
    full_length = blocks_for(grouping, limits.max_model_len, limits.min_concurrency) * grouping.bytes_per_block
    sequences = limits.max_num_seqs * grouping.bytes_per_block if keeps_states_in_graphs(pair) else 0
    # What lacks first is told.
    needed = full_length if available < full_length else max(full_length, sequences)
    estimated = estimated_margin_bytes(pair, rank.target_bytes, rank.draft_bytes, rank.activation_bytes)
    margin = _margin_bytes(footprint.era, device, rank, correction) + estimated
    slack = free_outside_bytes(device.total_bytes, requested, footprint.uncharged_bytes)
    term = _broken_term(engine, rank, available - needed, margin, slack - footprint.overrun_bytes)
    if term is Term.KV_CACHE and needed > full_length:
        term = Term.SEQUENCES
    return Budget(
        total_bytes=device.total_bytes,
        requested_bytes=requested,
        target_weights_bytes=rank.target_bytes,
        draft_weights_bytes=rank.draft_bytes,
        state_bytes=rank.state_bytes,
        activation_bytes=rank.activation_bytes,
        cuda_graphs_bytes=rank.graphs_bytes,
        non_torch_bytes=rank.non_torch_bytes + rank.correction_bytes,
        available_kv_bytes=available,
        needed_kv_bytes=needed,
        margin_bytes=margin,
        estimated_margin_bytes=estimated,
        kv_bytes_per_token=footprint.cached.bytes_per_token(limits.kv_cache_element_bytes),
        num_blocks=blocks,
        kv_cache_tokens=capacity.tokens,
        max_concurrency=capacity.max_concurrency,
        effective_batch=footprint.effective_batch,
        overrun_bytes=footprint.overrun_bytes,
        slack_bytes=slack,
        calibrated=footprint.era.calibrated and device.calibrated,
        verdict=verdict_of(term),
        binding_term=term,
        correction_bytes=rank.correction_bytes,
        calibration=None if correction is None else correction.sentence,
        uncalibrated_gpu=not device.calibrated,
    )


def _broken_term(
    engine: _Engine, rank: Rank, spare_bytes: int, margin_bytes: int, spare_outside_bytes: int
) -> Term | None:
    """Return the first thing that keeps the budget from fitting; None when it fits."""
    if rank.target_bytes + rank.draft_bytes >= engine.requested_bytes:
        return Term.WEIGHTS
    if engine.available_bytes <= 0:
        return Term.OVERHEAD
    if spare_bytes < 0:
        return Term.KV_CACHE
    if engine.requested_bytes > engine.device.total_bytes - memory_coefficients().context_bytes:
        return Term.UTILIZATION
    if spare_bytes < margin_bytes:
        return Term.MARGIN
    return Term.SLACK if spare_outside_bytes < 0 else None


def find_correction(pair: Pair, device: Device, split: Parallelism) -> Correction | None:
    """Return what the calibration knows of engines like this; None when nothing.

    Measured are engines with tensor parallelism alone, the engine's own
    graphs and 16 bits: what pipeline stages, data-parallel copies, spread experts and
    other graphs or types take is not known from them.
    """
    if not pair.calibration.entries:
        return None
    limits = pair.limits
    usual = limits.has_own_graphs and limits.dtype_bytes == SIXTEEN_BIT_BYTES
    if split != Parallelism(split.tensor) or not usual or pair.other_draft_lengths:
        return None
    return pair.calibration.find(engine_kind(pair, device.product, split.tensor))


def engine_kind(pair: Pair, product: str, tensor: int) -> EngineKind:
    """Return what a measurement of the pair on so many GPUs of a product is told apart by."""
    limits = pair.limits
    draft = loaded_draft(pair)
    return EngineKind(
        product=product,
        engine_version=limits.engine_version,
        runner=pair.era.runner.value,
        tensor=tensor,
        enforce_eager=limits.enforce_eager,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        method=pair.method,
        num_speculative_tokens=pair.num_speculative_tokens,
        model=pair.models,
        target_precision=pair.target_precision.value,
        draft_precision=None if draft is None else draft[1].value,
    )


def _margin_bytes(era: VersionRules, device: Device, rank: Rank, correction: Correction | None) -> int:
    """Return the margin of the versions, or the smaller one that a measurement of these settings allows.

    A GPU without logs has at least that of versions without logs, and a share of the terms that are Hopper's.
    """
    measured_bytes = None if correction is None else correction.margin_bytes
    if measured_bytes is not None:
        return min(era.margin_bytes, measured_bytes)
    if device.calibrated:
        return era.margin_bytes
    estimated_bytes = rank.activation_bytes + rank.graphs_bytes + rank.non_torch_bytes
    share_bytes = round(memory_coefficients().uncalibrated_gpu_share * estimated_bytes)
    return max(era.margin_bytes, find_version_rules(NEWEST_VERSION).margin_bytes) + share_bytes


def estimated_margin_bytes(pair: Pair, target_bytes: int, draft_bytes: int, activation_bytes: int) -> int:
    """Return what one GPU keeps back because sizing estimates a model; zero if it knows both exactly.

    A share of the weights, smaller if the headers of the files were read, a share of the activation, and for an encoder
    that sizing does not implement 1.5 GiB and its weights.
    """
    draft = loaded_draft(pair)
    loaded = ((pair.target, target_bytes), *(((draft[0], draft_bytes),) if draft else ()))
    estimated = [(model, size_bytes) for model, size_bytes in loaded if model.knowledge is not Knowledge.EXACT]
    if not estimated:
        return 0
    margin = ceil_div(activation_bytes * _ACTIVATION_MARGIN_PERCENT, 100)
    for model, size_bytes in estimated:
        if model.knowledge is Knowledge.ESTIMATED:
            percent = _WEIGHTS_MARGIN_PERCENT if model.stored is None else _STORED_WEIGHTS_MARGIN_PERCENT
            margin += ceil_div(size_bytes * percent, 100)
        if model.tower.unknown_items:
            margin += (
                _UNKNOWN_ENCODER_BYTES + (model.tower.whole_elements + model.tower.split_elements) * model.dtype_bytes
            )
    return margin


def pair_kv_bytes_per_token(pair: Pair, tensor: int) -> int:
    """Return the KV cache of one token in the layers of target and draft."""
    return kv_bytes_per_token(pair, Parallelism(tensor))


def needed_kv_bytes(pair: Pair, tensor: int) -> int:
    """Return the KV cache that min_concurrency requests of full length take, with the null block."""
    grouping = cache_layout(pair, Parallelism(tensor))[0]
    return blocks_for(grouping, pair.limits.max_model_len, pair.limits.min_concurrency) * grouping.bytes_per_block


def tightest_grouping(pair: Pair, split: Parallelism, budget: Budget) -> KvGrouping:
    """Return the KV cache groups of the pipeline stage whose GPU a budget is of."""
    return cache_layout(pair, split)[tightest_stage(pair, split, budget)]


def tightest_stage(pair: Pair, split: Parallelism, budget: Budget) -> int:
    """Return the number of the pipeline stage whose GPU a budget is of."""
    by_stage = enumerate(cache_layout(pair, split))
    found = [n for n, each in by_stage if budget.available_kv_bytes // each.bytes_per_block == budget.num_blocks]
    return found[-1] if found else split.pipeline - 1


def verdict_of(term: Term | None) -> Verdict:
    """Return the verdict that follows from what breaks the budget."""
    if term is None:
        return Verdict.FITS
    return Verdict.TIGHT if term in (Term.MARGIN, Term.SLACK) else Verdict.DOES_NOT_FIT


def _tightest(layout: tuple[KvGrouping, ...], available: list[int]) -> int:
    """Return the stage with the least blocks, the last one of equals: it samples and holds the draft."""
    if len(available) == 1:
        return 0
    return min(range(len(available)), key=lambda stage: (available[stage] // layout[stage].bytes_per_block, -stage))


__all__ = ["Budget", "EngineLimits", "Pair", "Parallelism", "Term", "Verdict", "estimate", "loaded_draft"]


def estimate_on_cpu(pair: Pair, memory_bytes: int, kv_cache_bytes: int, tensor: int = 1) -> Budget:
    """Return the budget of one rank on CPU; ``memory_bytes`` and ``kv_cache_bytes`` are those of all ranks.

    Blocks and tokens follow exactly from the KV space that each rank is
    given (VLLM_CPU_KVCACHE_SPACE; vllm/v1/worker/cpu_worker.py,
    determine_available_memory, takes it in every rank). Weights, KV space and
    the engine's own processes must fit into the memory.
    """
    memory_bytes, kv_cache_bytes = memory_bytes // tensor, kv_cache_bytes // tensor
    weights = parameter_weights(pair, tensor)
    overhead, margin = _overhead_and_margin_bytes(tensor)
    estimated = estimated_margin_bytes(pair, weights.target_bytes, weights.draft_bytes, 0)
    margin += estimated
    requested = weights.target_bytes + weights.draft_bytes + kv_cache_bytes + overhead
    grouping = cache_layout(pair, Parallelism(tensor))[0]
    capacity = pool_capacity(grouping, pool_blocks([grouping], [kv_cache_bytes]), pair.limits.max_model_len)
    needed = needed_kv_bytes(pair, tensor)
    term = _cpu_broken_term(kv_cache_bytes - needed, memory_bytes - requested, margin)
    return Budget(
        total_bytes=memory_bytes,
        requested_bytes=requested,
        target_weights_bytes=weights.target_bytes,
        draft_weights_bytes=weights.draft_bytes,
        state_bytes=0,
        activation_bytes=0,
        cuda_graphs_bytes=0,
        non_torch_bytes=overhead,
        available_kv_bytes=kv_cache_bytes,
        needed_kv_bytes=needed,
        margin_bytes=margin,
        estimated_margin_bytes=estimated,
        kv_bytes_per_token=pair_kv_bytes_per_token(pair, tensor),
        num_blocks=capacity.num_blocks,
        kv_cache_tokens=capacity.tokens,
        max_concurrency=capacity.max_concurrency,
        effective_batch=effective_batch(pair),
        overrun_bytes=0,
        slack_bytes=0,
        calibrated=True,
        verdict=verdict_of(term),
        binding_term=term,
    )


def _overhead_and_margin_bytes(tensor: int) -> tuple[int, int]:
    """Return what the engine's own processes take of each rank's share, and what is kept free of it."""
    coefficients = memory_coefficients()
    further_ranks = (tensor - 1) * coefficients.cpu_rank_overhead_bytes
    overhead = ceil_div(coefficients.cpu_overhead_bytes + further_ranks, tensor)
    return overhead, ceil_div(coefficients.cpu_margin_bytes, tensor)


def _cpu_broken_term(spare_kv_bytes: int, spare_memory_bytes: int, margin_bytes: int) -> Term | None:
    if spare_kv_bytes < 0:
        return Term.KV_CACHE
    if spare_memory_bytes < 0:
        return Term.MEMORY
    return Term.MARGIN if spare_memory_bytes < margin_bytes else None
