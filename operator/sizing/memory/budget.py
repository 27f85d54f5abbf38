"""The memory of one GPU, term by term, and whether the pair fits."""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple

from specdecode_operator.sizing.base.devices import Device, memory_coefficients
from specdecode_operator.sizing.base.eras import NEWEST_VERSION, Era, find_era
from specdecode_operator.sizing.base.units import GIB, ceil_div
from specdecode_operator.sizing.kv.capacity import blocks_for, pool_blocks, pool_capacity
from specdecode_operator.sizing.kv.groups import KvGrouping
from specdecode_operator.sizing.kv.layout import cache_layout, kv_bytes_per_token
from specdecode_operator.sizing.memory.footprint import Footprint, Rank, engine_footprint
from specdecode_operator.sizing.memory.latent import on_product
from specdecode_operator.sizing.memory.overhead import free_outside_bytes
from specdecode_operator.sizing.pair.calibration import Correction, EngineKind
from specdecode_operator.sizing.pair.pair import (
    TENSOR_ONLY,
    EngineLimits,
    Pair,
    Parallelism,
    keeps_states_in_graphs,
    loaded_draft,
)
from specdecode_operator.vocabulary import SIXTEEN_BIT_BYTES, Knowledge

_WEIGHTS_MARGIN_PERCENT: Final = 15
_STORED_WEIGHTS_MARGIN_PERCENT: Final = 3
_ACTIVATION_MARGIN_PERCENT: Final = 25
_UNKNOWN_ENCODER_BYTES: Final = 3 * GIB // 2
"""What estimated models keep back; bench/sizing/estimated.py compares with models that sizing knows exactly."""

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


def _margin_bytes(era: Era, device: Device, rank: Rank, correction: Correction | None) -> int:
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
    return max(era.margin_bytes, find_era(NEWEST_VERSION).margin_bytes) + share_bytes


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
