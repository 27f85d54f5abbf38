"""The memory budget of one GPU, or of a CPU engine, term by term, and whether the pair fits.

`Footprint` holds the terms that do not depend on the GPU product. It is cached, because searches and
matrices call it repeatedly. Overhead is engine memory outside torch's tensors: libraries, CUDA graphs and memory
that the engine needs outside the budget. On CPU, the KV cache size is given; on a GPU, it is the remainder.
"""

import math
from dataclasses import fields, replace
from enum import StrEnum
from functools import lru_cache
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec

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
from specdecode_operator.sizing.memory.adapters import adapter_bytes, adapter_margin_bytes, host_bytes
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
    NULL_BLOCKS,
    CachedLayers,
    KvGrouping,
    blocks_for,
    cache_layout,
    capacity_of,
    kv_bytes_per_token,
    layers_of_pair,
    parameter_weights,
    pool_blocks,
    pool_capacity,
    request_blocks,
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
from specdecode_operator.sizing.rank_layers import Stage, stages
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
"""Stack per thread of the Triton top-k kernel, compiled for sm90, by how far the vocabulary can be read in vectors.

Keys: 0 for a multiple of 16, 4 of 4, 2 of 2, otherwise the remainder by 4 (Triton 3.6, ptxas -v).
"""


def non_torch_bytes(pair: Pair, split: Parallelism) -> int:
    """Return the bytes of NCCL, workspaces and modules inside the budget."""
    era, coefficients = pair.era, memory_coefficients()
    sizes = coefficients.non_torch
    # A GPU without peers in its layers, or over PCIe: NCCL's buffers are in host memory (its transport SHM) or small,
    # and vLLM has neither symmetric memory nor a fused all-reduce. Public logs show the memory of one GPU.
    shares_no_layer = split.tensor == 1 and (split.data == 1 or not pair.target.has_experts)
    alone = shares_no_layer or not pair.limits.has_nvlink
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
    # The driver reserves stacks beyond the default; only vocabularies that are no multiple of four need them (Granite).
    vocabulary = pair.target.vocab_size
    stack_bytes = _STACK_BYTES[0 if vocabulary % 16 == 0 else vocabulary % 4 or 4]
    reserved = coefficients.resident_threads * max(0, stack_bytes - coefficients.default_stack_bytes)
    return base + named(reserved, "of stacks of the top-k kernel", like=split.tensor)


def graph_bytes(pair: Pair, split: Parallelism) -> int:
    """Return the bytes that the engine charges to the budget for CUDA graphs, target and drafter together.

    Measured in vLLM's usual mode, FULL_AND_PIECEWISE, which captures most: for the others it is an upper bound.
    """
    era = pair.era
    if not pair.limits.captures_graphs or not era.charges_graphs:
        return 0
    sizes = memory_coefficients().graphs
    if era.runner is Runner.V2:
        of_sizes = (capture_sizes(pair) - 1 + further_graphs(pair) + adaptive_graphs(pair)) * sizes.v2_size
        of_sizes *= _captures_of_a_size(pair)
        if pair.adaptive_verification and sizing_facts(pair.limits.engine_version)["charges_timed_steps"]:
            # Up to 0.32 the steps that time adaptive verification run in the estimate, up to a full step, and what
            # they leave in torch's cache is taken for graphs (v1/worker/gpu/model_runner.py, capture_model).
            of_sizes += described(activation_bytes(pair, split), "of steps that are timed")
        if pair.method not in METHODS_WITH_HIDDEN_STATES:
            return sizes.v2 + of_sizes
        # A head's decoding is captured for each number above 1 (spec_decode/target_dependent_ar/cudagraph_utils.py).
        lengths = 1 + len(pair.other_draft_lengths - {0, 1})
        return sizes.v2 + of_sizes + named(sizes.v2_draft_head * lengths, "of the drafter", like=of_sizes)
    per_layer = sizes.v1_layer + (sizes.v1_expert_layer if pair.target.has_experts else 0)
    of_sizes = _v1_graph_bytes(pair, split, per_layer, sizes.v1_quantization_step)
    if not pair.drafts_in_parallel:
        return of_sizes
    # The second size that is captured opens a segment of torch's allocator, and the estimate takes that for what each
    # further size needs (v1/worker/gpu_model_runner.py, profile_cudagraph_memory), as it does under V2.
    return of_sizes + named((capture_sizes(pair) - 1) * sizes.v2_size, "of the parallel drafter", like=of_sizes)


def graph_pool_bytes(pair: Pair, split: Parallelism) -> int:
    """Return the bytes of CUDA graphs after the start, charged to the budget or not."""
    if not pair.limits.captures_graphs:
        return 0
    sizes = memory_coefficients().graphs
    if pair.era.runner is Runner.V2:
        return sizes.v2_pool
    per_layer = sizes.v1_pool_layer + (sizes.v1_pool_expert_layer if pair.target.has_experts else 0)
    return sizes.v1_pool + _v1_graph_bytes(pair, split, per_layer, sizes.v1_pool_quantization_step)


def _v1_graph_bytes(pair: Pair, split: Parallelism, per_layer: int, per_step: int) -> int:
    """Return the bytes of V1's graphs: each layer twice, whole and in pieces; a draft's, in pieces only, count half."""
    draft = loaded_draft(pair)
    layers = named(ceil_div(pair.target.num_layers, split.pipeline), "layers of the target", like=split.tensor)
    drafting = named(ceil_div(draft[0].num_layers, 2) if draft else 0, "of the drafter", like=split.tensor)
    full = (layers + drafting) * per_layer + _QUANTIZATION_STEPS.get(pair.target_precision, 0) * per_step
    graphs = _captures_of_a_size(pair) * (capture_sizes(pair) - 1)
    return full * graphs // (memory_coefficients().graphs.v1_sizes - 1)


def _captures_of_a_size(pair: Pair) -> int:
    """Return how often a size is captured: with adapters also without one (v1/worker/gpu/lora_utils.py).

    cudagraph_specialize_lora is on by default (config/compilation.py).
    """
    return 1 if pair.adapters is None else 2


def slack_bytes(pair: Pair, total_bytes: int, requested_bytes: int, split: Parallelism) -> int:
    """Return the bytes outside the budget that stay free after CUDA's context, uncharged allocations and a reserve."""
    return _free_outside_bytes(total_bytes, requested_bytes, _uncharged_bytes(pair, split))


def _uncharged_bytes(pair: Pair, split: Parallelism) -> int:
    """Return the bytes that the engine takes outside the budget."""
    era = pair.era
    uncharged = confidence_tables_bytes(pair) + (0 if era.charges_state else state_bytes(pair, split))
    uncharged += memory_coefficients().cublas_workspace_bytes if era.cublas_before_snapshot else 0
    uncharged += unprofiled_latent_bytes(pair, split)
    if not era.charges_graphs:
        uncharged += graph_pool_bytes(pair, split)
    return uncharged


def _free_outside_bytes(total_bytes: int, requested_bytes: int, uncharged_bytes: int) -> int:
    coefficients = memory_coefficients()
    free = total_bytes - requested_bytes - coefficients.context_bytes - coefficients.slack_reserve_bytes
    return free - named(uncharged_bytes, "that is not charged") if uncharged_bytes else free


class Rank(NamedTuple):
    """Bytes of one GPU other than the KV cache, by term."""

    target_bytes: int
    draft_bytes: int
    state_bytes: int
    activation_bytes: int
    graphs_bytes: int
    non_torch_bytes: int
    adapters_bytes: int = 0  # Slots for LoRA adapters
    correction_bytes: int = 0  # What measurements change in the estimated terms

    @property
    def estimated_bytes(self) -> int:
        """The terms that no source gives exactly."""
        return self.activation_bytes + self.graphs_bytes + self.non_torch_bytes


class Footprint(NamedTuple):
    """The part of an engine's memory that its models, its settings and its split decide."""

    era: VersionRules
    ranks: tuple[Rank, ...]  # A GPU of each pipeline stage
    cached: CachedLayers
    effective_batch: int
    overrun_bytes: int
    uncharged_bytes: int


def _engine_footprint(pair: Pair, split: Parallelism) -> Footprint:
    """Return the footprint of a split pair, from the cache for pairs that differ in fields that it ignores."""
    limits = pair.limits
    key = (split, limits.max_model_len if reads_length(pair) else None, _of_pair(pair), _of_limits(limits))
    return _FOOTPRINTS.get(key, lambda: _footprint(pair, split))


_FOOTPRINTS: Final = Memo[Footprint]()

_CHANGE_NOTHING: Final = (
    *("calibration", "limits", "max_model_len", "memory_utilization_percent", "min_concurrency"),
    "kv_cache_element_bytes",
)
"""Fields of pairs and limits that no footprint depends on directly."""

_of_pair: Final = attrgetter(*(each.name for each in fields(Pair) if each.name not in _CHANGE_NOTHING))
_of_limits: Final = attrgetter(*(each.name for each in fields(EngineLimits) if each.name not in _CHANGE_NOTHING))


def reads_length(pair: Pair) -> bool:
    """Return whether a term other than the KV cache depends on the longest request.

    These are images that fit into it, contexts of latent attention, tables of tokens, and rotary tables of heads.
    """
    return _reads_length(pair.target, pair.draft, pair.method, pair.limits.engine_version)


@lru_cache(maxsize=MEMO_SIZE)
def _reads_length(target: ModelGeometry, draft: ModelGeometry | None, method: str, version: str) -> bool:
    attentions = [*target.attentions, *(() if draft is None else draft.attentions)]
    latent = any(isinstance(mixer, LatentAttention) for mixer in attentions)
    stretched = method in sizing_facts(version)["positions_like_target"]
    return latent or stretched or bool(target.tower.item_tokens) or method in METHODS_WITH_TOKEN_TABLE


def _footprint(pair: Pair, split: Parallelism) -> Footprint:
    refuse_bad_split(pair, split)
    graphs, non_torch = graph_bytes(pair, split), non_torch_bytes(pair, split)
    ranks = []
    for stage, weights in zip(stages(pair.target, split.pipeline), stage_weights(pair, split), strict=True):
        state, activation = charged_state_bytes(pair, split, stage), activation_bytes(pair, split, stage)
        adapters = adapter_slots_bytes(pair, split, stage)
        ranks.append(Rank(weights.target_bytes, weights.draft_bytes, state, activation, graphs, non_torch, adapters))
    return Footprint(
        era=pair.era,
        ranks=tuple(ranks),
        cached=layers_of_pair(pair, split),
        effective_batch=effective_batch(pair),
        overrun_bytes=verification_bytes(pair, split.tensor),
        uncharged_bytes=_uncharged_bytes(pair, split),
    )


def adapter_slots_bytes(pair: Pair, split: Parallelism, stage: Stage, *, on_gpu: bool = True) -> int:
    """Return the bytes that one rank of a stage reserves for LoRA adapters; 0 if the engine serves none."""
    if pair.adapters is None:
        return 0
    tokens, requests = pair.limits.max_num_batched_tokens, pair.limits.max_num_seqs
    return adapter_bytes(
        pair.target,
        pair.adapters,
        split.layer_split,
        precision=pair.target_precision,
        stage=stage,
        tokens=tokens,
        requests=requests,
        on_gpu=on_gpu,
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
"""Margins of estimated models; tools/bench/sizing/estimated.py compares with models that sizing describes exactly."""

_FEW_SEQUENCES: Final = 32
"""Concurrent requests from which a doubt about blocks is a reason to run fewer: our own choice."""


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
    """The weights exceed the engine's share."""

    OVERHEAD = "overhead"
    """Weights fit, but the engine's overhead leaves no memory for the KV cache."""

    KV_CACHE = "kv_cache"
    """The remaining KV cache holds too few requests."""

    SEQUENCES = "max_num_seqs"
    """The KV cache has fewer blocks than concurrent requests, each of which keeps its states in one."""

    UTILIZATION = "memory_utilization_percent"
    """The engine requests more than is free when it starts."""

    MEMORY = "memory"
    """On CPU: the memory given is less than all terms together."""

    SLACK = "slack"
    """It fits, but verification at full batch may need more than is free outside the budget."""

    MARGIN = "margin"
    """It fits, but not after the safety margin."""


class Budget(msgspec.Struct, frozen=True):
    """Memory of one GPU (on CPU: of one replica) in bytes, by term.

    ``requested`` less the seven terms is ``available_kv``.
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
    adapters_bytes: int = 0  # Slots for LoRA adapters

    @property
    def weights_bytes(self) -> int:
        """Weights of target and draft together."""
        return self.target_weights_bytes + self.draft_weights_bytes

    @property
    def engine_bytes(self) -> int:
        """What the engine needs in addition to weights, adapters and KV cache."""
        return self.state_bytes + self.activation_bytes + self.cuda_graphs_bytes + self.non_torch_bytes

    @property
    def estimated_bytes(self) -> int:
        """The terms that no source gives exactly, without the correction: no measurement can give back more."""
        return self.activation_bytes + self.cuda_graphs_bytes + self.non_torch_bytes - self.correction_bytes


def estimate(pair: Pair, device: Device, split: Parallelism | int) -> Budget:
    """Return the budget of each GPU for a split of the pair; a whole number is a tensor parallelism.

    The rules follow vLLM's gpu_worker.py. The KV cache is a share of the device, minus weights, buffers, the
    profiled peak, non-torch memory and graphs. With pipeline stages it is the budget of the GPU with the fewest
    blocks, because all stages get the same number.

    For a model with states, the number of concurrent requests is halved until each has a block, if the limits leave it
    open. Above 32 requests it is halved also if only the margin is missing.

    Raises
    ------
    PlanError
        When the models cannot be split this way.
    """
    if isinstance(split, int):
        split = TENSOR_ONLY.at(split)
    limits = pair.limits
    budget = find_engine(pair, device, split).budget(limits.max_model_len, limits.memory_utilization_percent)
    while limits.may_run_fewer and _is_short_of_blocks(pair, split, budget, limits.max_num_seqs):
        fewer = limits.max_num_seqs // 2
        if fewer < max(1, limits.min_concurrency):
            break
        limits = replace(limits, max_num_seqs=fewer)
        engine = find_engine(replace(pair, limits=limits), device, split)
        budget = engine.budget(limits.max_model_len, limits.memory_utilization_percent)
        budget = msgspec.structs.replace(budget, fewer_seqs=fewer)
    return budget


def _is_short_of_blocks(pair: Pair, split: Parallelism, budget: Budget, sequences: int) -> bool:
    if budget.binding_term is Term.SEQUENCES:
        return True
    # Fewer would cost more throughput than the doubt is worth.
    if budget.binding_term is not Term.MARGIN or sequences <= _FEW_SEQUENCES or not keeps_states_in_graphs(pair):
        return False
    return budget.needed_kv_bytes == sequences * tightest_grouping(pair, split, budget).bytes_per_block


class Engine(NamedTuple):
    """A split pair on a GPU product: the part of its budget that is the same for all lengths and shares of the memory.

    If `reads_length`, other terms than the KV cache depend on the length, and each length has its own engine.
    """

    device: Device
    ranks: tuple[Rank, ...]  # A GPU of each pipeline stage, with the correction
    used_bytes: tuple[int, ...]  # Memory that each rank uses: the sum of its terms
    layout: tuple[KvGrouping, ...]  # KV cache of each stage
    margins: tuple[tuple[int, int], ...]  # Margin of each stage, and the part of it for estimated models
    min_concurrency: int
    state_blocks: int  # Blocks that the states of all concurrent requests need; 0 if the engine starts with fewer
    kv_bytes_per_token: int
    effective_batch: int
    overrun_bytes: int
    uncharged_bytes: int
    calibrated: bool
    calibration: str | None

    def budget(self, max_model_len: int, memory_utilization_percent: float) -> Budget:
        """Return the budget with requests of this length and this share of the GPU's memory."""
        total = self.device.total_bytes
        # As vLLM rounds it (v1/worker/utils.py, request_memory).
        requested = math.ceil(total * memory_utilization_percent / 100)
        by_stage = zip(self.used_bytes, self.layout, strict=True)
        blocks = [(requested - used) // each.bytes_per_block for used, each in by_stage]
        fewest = min(blocks)
        # Of equal stages the last one: it samples and holds the draft.
        tightest = max(stage for stage, number in enumerate(blocks) if number == fewest) if len(blocks) > 1 else 0
        rank, grouping, available = self.ranks[tightest], self.layout[tightest], requested - self.used_bytes[tightest]
        per_request = request_blocks(grouping, max_model_len)
        capacity = capacity_of(max(0, fewest), per_request, max_model_len)
        full_length = (self.min_concurrency * per_request + NULL_BLOCKS) * grouping.bytes_per_block
        # The first shortage is reported.
        states = self.state_blocks * grouping.bytes_per_block
        needed = full_length if available < full_length else max(full_length, states)
        margin, estimated = self.margins[tightest]
        slack = _free_outside_bytes(total, requested, self.uncharged_bytes)
        term: Term | None = None
        if rank.target_bytes + rank.draft_bytes >= requested:
            term = Term.WEIGHTS
        elif available <= 0:
            term = Term.OVERHEAD
        elif available < needed:
            term = Term.SEQUENCES if needed > full_length else Term.KV_CACHE
        elif requested > total - memory_coefficients().context_bytes:
            term = Term.UTILIZATION
        elif available - needed < margin:
            term = Term.MARGIN
        elif slack < self.overrun_bytes:
            term = Term.SLACK
        return Budget(
            total_bytes=total,
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
            kv_bytes_per_token=self.kv_bytes_per_token,
            num_blocks=capacity.num_blocks,
            kv_cache_tokens=capacity.tokens,
            max_concurrency=capacity.max_concurrency,
            effective_batch=self.effective_batch,
            overrun_bytes=self.overrun_bytes,
            slack_bytes=slack,
            calibrated=self.calibrated,
            verdict=_verdict_of(term),
            binding_term=term,
            adapters_bytes=rank.adapters_bytes,
            correction_bytes=rank.correction_bytes,
            calibration=self.calibration,
            uncalibrated_gpu=not self.device.calibrated,
        )


def find_engine(pair: Pair, device: Device, split: Parallelism) -> Engine:
    """Return the engine of a split pair on a GPU, or raise PlanError if the models cannot be split so."""
    pair = on_product(pair, device.product)
    footprint, limits = _engine_footprint(pair, split), pair.limits
    correction, ranks = find_correction(pair, device, split), footprint.ranks
    if correction is not None:
        # A correction cannot give back more than the estimated terms.
        residual = correction.residual_bytes
        ranks = tuple(rank._replace(correction_bytes=max(residual, -rank.estimated_bytes)) for rank in ranks)
    return Engine(
        device=device,
        ranks=ranks,
        used_bytes=tuple(map(sum, ranks)),
        layout=footprint.cached.layout(limits.kv_cache_element_bytes),
        margins=tuple(_margins_bytes(pair, footprint.era, device, rank, correction) for rank in ranks),
        min_concurrency=limits.min_concurrency,
        state_blocks=limits.max_num_seqs if keeps_states_in_graphs(pair) else 0,
        kv_bytes_per_token=footprint.cached.bytes_per_token(limits.kv_cache_element_bytes),
        effective_batch=footprint.effective_batch,
        overrun_bytes=footprint.overrun_bytes,
        uncharged_bytes=footprint.uncharged_bytes,
        calibrated=footprint.era.calibrated and device.calibrated,
        calibration=None if correction is None else correction.sentence,
    )


def find_correction(pair: Pair, device: Device, split: Parallelism) -> Correction | None:
    """Return the calibration's correction for engines like this; None without one.

    It measured engines with tensor parallelism only, the engine's own graphs and 16 bits. Pipeline stages,
    data-parallel copies, spread experts, adapters, and other graphs or types are not corrected.
    """
    if not pair.calibration.entries:
        return None
    limits = pair.limits
    usual = limits.has_own_graphs and limits.dtype_bytes == SIXTEEN_BIT_BYTES
    if split != Parallelism(split.tensor) or not usual or pair.other_draft_lengths or pair.adapters:
        return None
    return pair.calibration.find(engine_kind(pair, device.product, split.tensor))


def engine_kind(pair: Pair, product: str, tensor: int) -> EngineKind:
    """Return the key of a measurement of the pair on N GPUs of a product."""
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


def _margins_bytes(
    pair: Pair, era: VersionRules, device: Device, rank: Rank, correction: Correction | None
) -> tuple[int, int]:
    """Return the margin of a rank, and the part of it that is there because sizing estimates a model."""
    estimated = _estimated_margin_bytes(pair, rank.target_bytes, rank.draft_bytes, rank.activation_bytes)
    adapters = _adapter_margin_bytes(pair, rank.adapters_bytes)
    return _margin_bytes(era, device, rank, correction) + estimated + adapters, estimated


def _margin_bytes(era: VersionRules, device: Device, rank: Rank, correction: Correction | None) -> int:
    """Return the margin of the versions, or the smaller one that a measurement of these settings allows.

    A GPU without logs has at least the margin of versions without logs, and a share of the terms measured on Hopper.
    """
    measured_bytes = None if correction is None else correction.margin_bytes
    if measured_bytes is not None:
        return min(era.margin_bytes, measured_bytes)
    if device.calibrated:
        return era.margin_bytes
    share_bytes = round(memory_coefficients().uncalibrated_gpu_share * rank.estimated_bytes)
    return max(era.margin_bytes, find_version_rules(NEWEST_VERSION).margin_bytes) + share_bytes


def _estimated_margin_bytes(pair: Pair, target_bytes: int, draft_bytes: int, activation_bytes: int) -> int:
    """Return the margin of one GPU for estimated models; zero if sizing describes both exactly.

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


def _adapter_margin_bytes(pair: Pair, adapters_bytes: int) -> int:
    if pair.adapters is None:
        return 0
    return adapter_margin_bytes(pair.target, pair.adapters, adapters_bytes, pair.limits.max_num_batched_tokens)


def tightest_grouping(pair: Pair, split: Parallelism, budget: Budget) -> KvGrouping:
    """Return the KV cache groups of the budget's pipeline stage."""
    return cache_layout(pair, split)[tightest_stage(pair, split, budget)]


def tightest_stage(pair: Pair, split: Parallelism, budget: Budget) -> int:
    """Return the index of the pipeline stage that a budget belongs to."""
    by_stage = enumerate(cache_layout(pair, split))
    found = [n for n, each in by_stage if budget.available_kv_bytes // each.bytes_per_block == budget.num_blocks]
    return found[-1] if found else split.pipeline - 1


def _verdict_of(term: Term | None) -> Verdict:
    if term is None:
        return Verdict.FITS
    return Verdict.TIGHT if term in (Term.MARGIN, Term.SLACK) else Verdict.DOES_NOT_FIT


__all__ = ["Budget", "EngineLimits", "Pair", "Parallelism", "Term", "Verdict", "estimate", "loaded_draft"]


def estimate_on_cpu(pair: Pair, memory_bytes: int, kv_cache_bytes: int, tensor: int = 1) -> Budget:
    """Return the budget of one rank on CPU; ``memory_bytes`` and ``kv_cache_bytes`` are totals of all ranks.

    Blocks and tokens follow exactly from the KV space of each rank (VLLM_CPU_KVCACHE_SPACE;
    vllm/v1/worker/cpu_worker.py, determine_available_memory). Weights, KV space and the engine's own processes must
    fit into the memory.
    """
    memory_bytes, kv_cache_bytes = memory_bytes // tensor, kv_cache_bytes // tensor
    weights, coefficients = parameter_weights(pair, tensor), memory_coefficients()
    # Each rank has its share of the engine's own processes, and of the margin.
    further_ranks = (tensor - 1) * coefficients.cpu_rank_overhead_bytes
    overhead = ceil_div(coefficients.cpu_overhead_bytes + further_ranks, tensor)
    limits, split = pair.limits, Parallelism(tensor)
    adapters = adapter_slots_bytes(pair, split, stages(pair.target, 1)[0], on_gpu=False)
    # The host is the device: the adapters beside the slots take the same memory.
    adapters += 0 if pair.adapters is None else host_bytes(pair.target, pair.adapters)
    estimated = _estimated_margin_bytes(pair, weights.target_bytes, weights.draft_bytes, 0)
    margin = ceil_div(coefficients.cpu_margin_bytes, tensor) + estimated + _adapter_margin_bytes(pair, adapters)
    requested = weights.target_bytes + weights.draft_bytes + kv_cache_bytes + overhead + adapters
    grouping = cache_layout(pair, split)[0]
    capacity = pool_capacity(grouping, pool_blocks([grouping], [kv_cache_bytes]), limits.max_model_len)
    needed = blocks_for(grouping, limits.max_model_len, limits.min_concurrency) * grouping.bytes_per_block
    spare, term = memory_bytes - requested, None
    if kv_cache_bytes < needed:
        term = Term.KV_CACHE
    elif spare < margin:
        term = Term.MEMORY if spare < 0 else Term.MARGIN
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
        kv_bytes_per_token=kv_bytes_per_token(pair, split),
        num_blocks=capacity.num_blocks,
        kv_cache_tokens=capacity.tokens,
        max_concurrency=capacity.max_concurrency,
        effective_batch=effective_batch(pair),
        overrun_bytes=0,
        slack_bytes=0,
        calibrated=True,
        verdict=_verdict_of(term),
        binding_term=term,
        adapters_bytes=adapters,
    )
