"""Placement of a pair: GPUs, nodes, split and budget of a candidate, and its description for users."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.arithmetic import format_gib
from specdecode_operator.sizing.devices import Device, find_device
from specdecode_operator.sizing.errors import PlanError
from specdecode_operator.sizing.memory.budget import Budget, Term, Verdict
from specdecode_operator.sizing.pair import TENSOR_FIELD, TENSOR_ONLY, EngineLimits, Parallelism

CPU_PRODUCT: Final = "CPU"
"""Product of a row without a GPU."""


@dataclass(frozen=True)
class GpuPool:
    """Nodes of one kind."""

    product: str  # Exact value of their label nvidia.com/gpu.product
    gpus_per_node: int
    nodes: int = 1  # Maximum nodes of one replica
    memory_gib: int | None = None  # Memory of each GPU, given by the user for products without figures

    @property
    def device(self) -> Device | None:
        """Return the GPU of these nodes; None if its memory is not known."""
        return find_device(self.product, self.memory_gib)


def nodes_needed(pool: GpuPool, tensor: int, spread: Parallelism) -> int | None:
    """Return the least number of nodes of a pool that a replica needs; None if it does not fit.

    Each node takes the same share, as vLLM numbers its ranks (vllm/engine/arg_utils.py create_engine_config,
    ``--nnodes``): whole groups that share layers, or an even part of a group that is larger than a node. A
    data-parallel rank is never split over nodes: ranks of dense models meet at the first node of each, and only the
    leader's node is known to be that (vllm/config/parallel.py reconfigure_for_independent_dp_rank).
    """
    gpus = tensor * spread.groups
    if gpus <= pool.gpus_per_node:
        return 1
    for nodes in range(2, pool.nodes + 1):
        share, rest = divmod(gpus, nodes)
        if spread.data > 1:
            is_even = share % (tensor * spread.pipeline) == 0
        else:
            is_even = (share % tensor if tensor <= pool.gpus_per_node else tensor % share) == 0
        if rest == 0 and share <= pool.gpus_per_node and is_even:
            return nodes
    return None


def place_phrase(gpus: int, nodes: int, product: str) -> str:
    """Return the place of a replica: ``4 x NVIDIA-H200``, or ``2 nodes x 8 x NVIDIA-H200``."""
    return f"{gpus} x {product}" if nodes == 1 else f"{nodes} nodes x {gpus // nodes} x {product}"


def refuse_too_many(pools: Iterable[GpuPool], tensor: int | None, spread: Parallelism) -> None:
    """Raise PlanError if a replica takes more GPUs than any pool has room for."""
    pools = tuple(pools)
    if any(nodes_needed(pool, tensor or 1, spread) for pool in pools):
        return
    widest = max(pool.gpus_per_node for pool in pools)
    several = any(pool.nodes > 1 for pool in pools)
    if tensor is not None and spread == TENSOR_ONLY:
        room = "no group of matching nodes has this many" if several else "no node has this many"
        # Layers are split over powers of two.
        message = f"{room} GPUs, and the largest has {widest}; write {1 << (widest.bit_length() - 1)} or less"
        raise PlanError(TENSOR_FIELD, tensor, message)
    gpus = (tensor or 1) * spread.groups
    message = f"GPUs per replica (tensor x pipeline x data), but the largest node has {widest}; lower one"
    raise PlanError("parallelism", gpus, message)


@dataclass(frozen=True)
class Row:
    """One candidate."""

    product: str  # GPU product, or CPU
    tensor: int
    budget: Budget  # Memory of each GPU
    target_precision: Precision
    draft_precision: Precision | None  # None if no model drafts
    spread: Parallelism = TENSOR_ONLY  # Beyond the tensor parallelism
    nodes: int = 1

    @property
    def verdict(self) -> Verdict:
        """Verdict of the budget."""
        return self.budget.verdict

    @property
    def served(self) -> tuple[Precision, Precision | None, int | None]:
        """Precisions of target and draft, and the default of concurrent requests, if it is lowered."""
        return self.target_precision, self.draft_precision, self.budget.fewer_seqs

    @property
    def split(self) -> Parallelism:
        """Parallelism of a replica."""
        return self.spread.at(self.tensor)

    @property
    def gpus(self) -> int:
        """GPUs of a replica."""
        return self.tensor * self.spread.groups

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a replica on each node."""
        return self.gpus // self.nodes

    @property
    def place(self) -> str:
        """Place of a replica in words."""
        return place_phrase(self.gpus, self.nodes, self.product)


def capacity_phrase(budget: Budget, max_model_len: int, split: Parallelism = TENSOR_ONLY) -> str:
    """Return the capacity of the KV cache: ``127,024 tokens (15.5 requests of 8192)``, per data-parallel replica."""
    return (
        f"{budget.kv_cache_tokens:,} tokens{split.each_copy} ({budget.max_concurrency:.1f} requests of {max_model_len})"
    )


def gpu_sentence(row: Row, limits: EngineLimits) -> str:
    """Return whether a row fits and why, without a full stop."""
    place = f"{row.place} per replica ({row.split.label})"
    budget, weights = row.budget, format_gib(row.budget.weights_bytes)
    capacity = capacity_phrase(budget, limits.max_model_len, row.split)
    match budget.verdict:
        case Verdict.FITS:
            sentence = f"{place} fits: {capacity} beside {weights} GiB of weights per GPU"
        case Verdict.TIGHT:
            spare, margin = (
                format_gib(budget.available_kv_bytes - budget.needed_kv_bytes),
                format_gib(budget.margin_bytes),
            )
            but = f"{spare} GiB per GPU are to spare where the estimate may err by {margin} GiB"
            but = _slack_phrase(budget) if budget.binding_term is Term.SLACK else but
            sentence = f"{place} is tight: {capacity}, but {but}"
        case Verdict.DOES_NOT_FIT:
            sentence = f"{place} does not fit: {_gpu_reason(budget, limits, row.split)}"
    return "; ".join(filter(None, [sentence, calibration_phrase(budget), uncalibrated_phrase(budget)]))


def calibration_phrase(budget: Budget) -> str | None:
    """Return the correction of the estimates by measurements, or None."""
    if budget.calibration is None:
        return None
    more = "more" if budget.correction_bytes >= 0 else "less"
    size = format_gib(abs(budget.correction_bytes))
    return f"calibrated: {size} GiB {more} for the engine on each GPU, after {budget.calibration}"


def uncalibrated_phrase(budget: Budget) -> str | None:
    """Return a caveat with the margin unless a public log or a measurement of the GPU confirms the figures."""
    if not budget.uncalibrated_gpu or budget.calibration is not None:
        return None
    return f"uncalibrated GPU: the plan keeps a margin of {format_gib(budget.margin_bytes)} GiB per GPU"


def cpu_sentence(budget: Budget, limits: EngineLimits, tensor: int) -> str:
    """Return whether a replica on CPU fits and why, without a full stop."""
    each = " per rank" if tensor > 1 else ""
    total = format_gib(budget.total_bytes)
    place = f"CPU with {total} GiB per rank (TP {tensor})" if tensor > 1 else f"CPU with {total} GiB per replica"
    capacity = capacity_phrase(budget, limits.max_model_len)
    match budget.verdict:
        case Verdict.FITS:
            return f"{place} fits: {capacity} in {format_gib(budget.available_kv_bytes)} GiB of KV cache{each}"
        case Verdict.TIGHT:
            spare = format_gib(budget.total_bytes - budget.requested_bytes)
            margin = format_gib(budget.margin_bytes)
            but = f"{spare} GiB{each} are to spare where the estimate may err by {margin} GiB"
            return f"{place} is tight: {capacity}, but {but}"
        case Verdict.DOES_NOT_FIT if budget.binding_term is Term.KV_CACHE:
            return f"{place} does not fit: {_kv_reason(budget, limits, 'are given')}"
        case Verdict.DOES_NOT_FIT:
            return (
                f"{place} does not fit: weights {format_gib(budget.weights_bytes)}, KV cache"
                f" {format_gib(budget.available_kv_bytes)} and the engine {format_gib(budget.non_torch_bytes)} make"
                f" {format_gib(budget.requested_bytes)} GiB"
            )


def _slack_phrase(budget: Budget) -> str:
    free = format_gib(max(0, budget.slack_bytes))
    if budget.slack_bytes < 0:
        lacking = format_gib(-budget.slack_bytes)
        return f"{lacking} GiB per GPU lack outside the budget; lower serving.gpuMemoryUtilizationPercent"
    return (
        f"verifying drafts at full batch takes {format_gib(budget.overrun_bytes)} GiB per GPU outside the budget, where"
        f" {free} GiB are free; lower serving.maxNumSeqs, serving.gpuMemoryUtilizationPercent or"
        " speculation.numSpeculativeTokens"
    )


def _gpu_reason(budget: Budget, limits: EngineLimits, split: Parallelism) -> str:
    usable = f"{format_gib(budget.requested_bytes)} GiB usable per GPU"
    weights = format_gib(budget.weights_bytes)
    nothing_left = "nothing is left for the KV cache"
    match budget.binding_term:
        case Term.WEIGHTS:
            return f"weights take {weights} of {usable}, {nothing_left}"
        case Term.OVERHEAD:
            takers = f"weights take {weights}"
            if budget.adapters_bytes:
                takers += f", adapters {format_gib(budget.adapters_bytes)}"
            return f"{takers} and the engine {format_gib(budget.engine_bytes)} of {usable}, {nothing_left}"
        case Term.UTILIZATION:
            return (
                f"the engine asks for {format_gib(budget.requested_bytes)} of {format_gib(budget.total_bytes)} GiB, "
                "more than is free when it starts"
            )
        case Term.SEQUENCES:
            return (
                f"serving.maxNumSeqs {budget.fewer_seqs or limits.max_num_seqs} exceeds the {budget.num_blocks} blocks"
                f" of the KV cache{split.each_copy}; each request of a model with states needs one, or vLLM refuses to"
                f" capture FULL CUDA graphs: use {budget.num_blocks} or less, or serving.cudagraphMode PIECEWISE"
            )
        case _:
            return _kv_reason(budget, limits, "per GPU are left", split)


def _kv_reason(budget: Budget, limits: EngineLimits, given: str, split: Parallelism = TENSOR_ONLY) -> str:
    # The engine sets one block aside; only that one may be lacking.
    requests = "1 request" if limits.min_concurrency == 1 else f"{limits.min_concurrency} requests"
    return (
        f"{format_gib(budget.available_kv_bytes)} GiB {given} for the KV cache, {requests} of "
        f"{limits.max_model_len} tokens{split.each_copy} and a spare block need {format_gib(budget.needed_kv_bytes)}"
    )
