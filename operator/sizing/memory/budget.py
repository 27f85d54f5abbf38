"""The memory of one GPU, term by term, and whether the pair fits."""

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

from specdecode_operator.sizing.base.devices import Device, memory_coefficients
from specdecode_operator.sizing.base.eras import NEWEST_VERSION, Era, find_era
from specdecode_operator.sizing.base.errors import PlanError
from specdecode_operator.sizing.base.remembered import MOST_REMEMBERED
from specdecode_operator.sizing.kv.capacity import blocks_for, pool_blocks, pool_capacity
from specdecode_operator.sizing.kv.groups import KvGrouping
from specdecode_operator.sizing.kv.layout import cache_layout, kv_bytes_per_token, stage_weights
from specdecode_operator.sizing.memory.activation import activation_bytes
from specdecode_operator.sizing.memory.buffers import charged_state_bytes
from specdecode_operator.sizing.memory.latent import on_product
from specdecode_operator.sizing.memory.overhead import graph_bytes, non_torch_bytes, runtime_overrun_bytes, slack_bytes
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.pair.calibration import Correction, EngineKind
from specdecode_operator.sizing.pair.pair import (
    TENSOR_ONLY,
    EngineLimits,
    Pair,
    Parallelism,
    effective_batch,
    loaded_draft,
    spread_problems,
)
from specdecode_operator.sizing.weights.divisibility import split_remedy, tensor_problems
from specdecode_operator.sizing.weights.stages import stages
from specdecode_operator.vocabulary import SIXTEEN_BIT_BYTES, Precision

TENSOR_FIELD: Final = "parallelism.tensor"
"""Where users say over how many GPUs to split."""


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
    calibrated: bool  # Whether logs of this version on Hopper confirm the estimates
    verdict: Verdict  # Whether it fits
    binding_term: Term | None  # What breaks it; None when it fits
    # By how much measurements of the calibration file change the estimates: positive where engines took more
    correction_bytes: int = 0
    calibration: str | None = None  # Which measurements those are, in words; None where none is of an engine like this

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

    Raises
    ------
    PlanError
        When the models cannot be split so.
    """
    if isinstance(split, int):
        split = TENSOR_ONLY.at(split)
    refuse_bad_split(pair, split)
    pair = on_product(pair, device.product)
    # As vLLM rounds it (v1/worker/utils.py, request_memory).
    requested = math.ceil(device.total_bytes * pair.limits.memory_utilization_percent / 100)
    engine = _Engine(pair, device, split, requested, find_correction(pair, device, split))
    ranks, layout = _ranks(engine), cache_layout(pair, split)
    available = [requested - rank.taken_bytes for rank in ranks]
    tightest = _tightest(layout, available)
    return _budget(engine, ranks[tightest], layout[tightest], pool_blocks(layout, available))


class _Engine(NamedTuple):
    """What is estimated: the pair on its GPUs, what it claims of each, and what was measured of its like."""

    pair: Pair
    device: Device
    split: Parallelism
    requested_bytes: int
    correction: Correction | None


class _Rank(NamedTuple):
    """What one GPU holds beside the KV cache; non-torch memory includes the correction."""

    target_bytes: int
    draft_bytes: int
    state_bytes: int
    activation_bytes: int
    graphs_bytes: int
    non_torch_bytes: int
    correction_bytes: int
    taken_bytes: int


def _ranks(engine: _Engine) -> list[_Rank]:
    """Return what a GPU of each pipeline stage holds."""
    pair, split = engine.pair, engine.split
    graphs, non_torch = graph_bytes(pair, split), non_torch_bytes(pair, split)
    ranks = []
    for stage, weights in zip(stages(pair.target, split.pipeline), stage_weights(pair, split), strict=True):
        activation = activation_bytes(pair, split, stage)
        corrected = _correction_bytes(engine.correction, activation + graphs + non_torch)
        state = charged_state_bytes(pair, split, stage)
        parts = (weights.target_bytes, weights.draft_bytes, state, activation, graphs, non_torch + corrected)
        ranks.append(_Rank(*parts, corrected, taken_bytes=sum(parts)))
    return ranks


def _correction_bytes(correction: Correction | None, estimated_bytes: int) -> int:
    """Return what is added to the estimated terms; a measurement cannot give more than they take."""
    return 0 if correction is None else max(correction.residual_bytes, -estimated_bytes)


def _budget(engine: _Engine, rank: _Rank, grouping: KvGrouping, blocks: int) -> Budget:
    """Return the budget of the GPU with the least blocks."""
    pair, device, split, requested, correction = engine
    limits = pair.limits
    available = requested - rank.taken_bytes
    capacity = pool_capacity(grouping, blocks, limits.max_model_len)
    needed = blocks_for(grouping, limits.max_model_len, limits.min_concurrency) * grouping.bytes_per_block
    margin = _margin_bytes(pair.era, device, correction)
    overrun, slack = runtime_overrun_bytes(pair, split.tensor), slack_bytes(pair, device.total_bytes, requested, split)
    term = _broken_term(engine, rank, available - needed, margin, slack - overrun)
    return Budget(
        total_bytes=device.total_bytes,
        requested_bytes=requested,
        target_weights_bytes=rank.target_bytes,
        draft_weights_bytes=rank.draft_bytes,
        state_bytes=rank.state_bytes,
        activation_bytes=rank.activation_bytes,
        cuda_graphs_bytes=rank.graphs_bytes,
        non_torch_bytes=rank.non_torch_bytes,
        available_kv_bytes=available,
        needed_kv_bytes=needed,
        margin_bytes=margin,
        kv_bytes_per_token=kv_bytes_per_token(pair, split),
        num_blocks=blocks,
        kv_cache_tokens=capacity.tokens,
        max_concurrency=capacity.max_concurrency,
        effective_batch=effective_batch(pair),
        overrun_bytes=overrun,
        slack_bytes=slack,
        calibrated=pair.era.calibrated and device.known,
        verdict=verdict_of(term),
        binding_term=term,
        correction_bytes=rank.correction_bytes,
        calibration=None if correction is None else correction.sentence,
    )


def _broken_term(
    engine: _Engine, rank: _Rank, spare_bytes: int, margin_bytes: int, spare_outside_bytes: int
) -> Term | None:
    """Return the first thing that keeps the budget from fitting; None when it fits."""
    if rank.target_bytes + rank.draft_bytes >= engine.requested_bytes:
        return Term.WEIGHTS
    if engine.requested_bytes <= rank.taken_bytes:
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


def _margin_bytes(era: Era, device: Device, correction: Correction | None) -> int:
    """Return the margin of the versions, or the smaller one that a measurement of these settings allows."""
    if not device.known:
        # As of versions that no public log confirms.
        return max(era.margin_bytes, find_era(NEWEST_VERSION).margin_bytes)
    if correction is None or correction.margin_bytes is None:
        return era.margin_bytes
    return min(era.margin_bytes, correction.margin_bytes)


def refuse_bad_split(pair: Pair, split: Parallelism | int) -> None:
    """Raise PlanError with the first problem of splitting the pair so."""
    if isinstance(split, int):
        split = TENSOR_ONLY.at(split)
    version = pair.limits.engine_version
    bad = _bad_split(pair.target, pair.target_precision, pair.draft, pair.draft_precision, version, split)
    if bad is not None:
        raise PlanError(bad.field, bad.value, bad.message)


@lru_cache(maxsize=MOST_REMEMBERED)
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
    for model, precision in ((target, target_precision), (draft, draft_precision)):
        problems = tensor_problems(model, tensor, precision, version, data=data, expert=expert) if model else ()
        if problems:
            models = (target, draft, target_precision, draft_precision, version)
            remedy = split_remedy(*models, data=data, expert=expert)
            return PlanError(TENSOR_FIELD, tensor, f"{problems[0].message}; {remedy}")
    return None


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
