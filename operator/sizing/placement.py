"""Placement of a pair: GPUs, nodes, split and budget of a candidate, and its description for users."""

from collections.abc import Iterable
from dataclasses import dataclass

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.arithmetic import format_gib
from specdecode_operator.sizing.devices import Device, find_device
from specdecode_operator.sizing.errors import PlanError
from specdecode_operator.sizing.memory.budget import Budget, Term, Verdict
from specdecode_operator.sizing.pair import TENSOR_FIELD, TENSOR_ONLY, EngineLimits, Parallelism


@dataclass(frozen=True)
class GpuPool:
    """Nodes of one kind."""

    product: str  # Exact value of their label nvidia.com/gpu.product
    gpus_per_node: int  # GPUs of each
    nodes: int = 1  # How many of them one replica may lie on
    memory_gib: int | None = None  # Memory of each GPU, as the user gives it for products without figures

    @property
    def device(self) -> Device | None:
        """Return the GPU of these nodes; None if its memory is not known."""
        return find_device(self.product, self.memory_gib)


def nodes_needed(pool: GpuPool, tensor: int, spread: Parallelism) -> int | None:
    """Return over how many nodes of a pool a replica lies, as few as can be; None where there is no room for it.

    Each node takes the same share, as vLLM numbers its ranks
    (vllm/engine/arg_utils.py create_engine_config, ``--nnodes``): whole groups
    that share layers, or, where one such group is larger than a node, an even
    part of it. Copies stay whole: those of dense models meet at the first
    node of each, which only the leader's is known to be
    (vllm/config/parallel.py reconfigure_for_independent_dp_rank).
    """
    gpus = tensor * spread.groups
    if gpus <= pool.gpus_per_node:
        return 1
    for nodes in range(2, pool.nodes + 1):
        share, rest = divmod(gpus, nodes)
        if rest == 0 and share <= pool.gpus_per_node and _is_even(share, tensor, spread, pool.gpus_per_node):
            return nodes
    return None


def place_phrase(gpus: int, nodes: int, product: str) -> str:
    """Return where a replica lies: ``4 x NVIDIA-H200``, or ``2 nodes x 8 x NVIDIA-H200``."""
    return f"{gpus} x {product}" if nodes == 1 else f"{nodes} nodes x {gpus // nodes} x {product}"


def _is_even(share: int, tensor: int, spread: Parallelism, gpus_per_node: int) -> bool:
    """Whether a node's share of a replica cuts nothing that has to stay together."""
    if spread.data > 1:
        return share % (tensor * spread.pipeline) == 0
    if tensor <= gpus_per_node:
        return share % tensor == 0
    return tensor % share == 0


def refuse_too_many(pools: Iterable[GpuPool], tensor: int | None, spread: Parallelism) -> None:
    """Raise PlanError when a replica takes more GPUs than any pool has room for.

    Raises
    ------
    PlanError
        With the field to lower.
    """
    pools = tuple(pools)
    if any(nodes_needed(pool, tensor or 1, spread) for pool in pools):
        return
    widest = max(pool.gpus_per_node for pool in pools)
    several = any(pool.nodes > 1 for pool in pools)
    if tensor is not None and spread == TENSOR_ONLY:
        room = "nodes that may be used do not share so many" if several else "no node has so many"
        # Layers are split over powers of two.
        message = f"{room} GPUs, the largest has {widest}; write {1 << (widest.bit_length() - 1)} or less"
        raise PlanError(TENSOR_FIELD, tensor, message)
    gpus = (tensor or 1) * spread.groups
    message = f"GPUs a replica (tensor x pipeline x data), the largest node has {widest}; lower one of them"
    raise PlanError("parallelism", gpus, message)


@dataclass(frozen=True)
class Row:
    """One candidate."""

    product: str  # GPU product, or CPU
    tensor: int  # GPUs that share each layer
    budget: Budget  # Memory of each GPU
    # What target and draft are served at; None where no model drafts
    target_precision: Precision
    draft_precision: Precision | None
    spread: Parallelism = TENSOR_ONLY  # How it is spread beyond that
    nodes: int = 1  # Over how many nodes its GPUs lie

    @property
    def verdict(self) -> Verdict:
        """Whether it fits."""
        return self.budget.verdict

    @property
    def served(self) -> tuple[Precision, Precision | None, int | None]:
        """Precisions of target and draft, and to how many requests at once the default is lowered; None: not at all."""
        return self.target_precision, self.draft_precision, self.budget.fewer_seqs

    @property
    def split(self) -> Parallelism:
        """Over which GPUs a replica is spread."""
        return self.spread.at(self.tensor)

    @property
    def gpus(self) -> int:
        """GPUs that a replica takes."""
        return self.tensor * self.spread.groups

    @property
    def gpus_per_node(self) -> int:
        """GPUs that it takes of each node."""
        return self.gpus // self.nodes

    @property
    def place(self) -> str:
        """Where it lies, in words."""
        return place_phrase(self.gpus, self.nodes, self.product)


def capacity_phrase(budget: Budget, max_model_len: int, split: Parallelism = TENSOR_ONLY) -> str:
    """Return what the KV cache holds: ``127,024 tokens (15.5 requests of 8192)``; with copies, that of each."""
    return (
        f"{budget.kv_cache_tokens:,} tokens{split.each_copy} ({budget.max_concurrency:.1f} requests of {max_model_len})"
    )


def gpu_sentence(row: Row, limits: EngineLimits) -> str:
    """Return whether a row fits and why, without a full stop."""
    place = f"{row.place} per replica ({row.split.label})"
    budget = row.budget
    capacity = capacity_phrase(budget, limits.max_model_len, row.split)
    weights = format_gib(budget.weights_bytes)
    match budget.verdict:
        case Verdict.FITS:
            sentence = f"{place} fits: {capacity} beside {weights} GiB of weights per GPU"
        case Verdict.TIGHT:
            sentence = f"{place} is tight: {capacity}, but {_tight_phrase(budget)}"
        case Verdict.DOES_NOT_FIT:
            sentence = f"{place} does not fit: {_gpu_reason(budget, limits, row.split)}"
    return "; ".join(filter(None, [sentence, calibration_phrase(budget), uncalibrated_phrase(budget)]))


def calibration_phrase(budget: Budget) -> str | None:
    """Return by how much measurements correct the estimates, and which; None where none does."""
    if budget.calibration is None:
        return None
    more = "more" if budget.correction_bytes >= 0 else "less"
    size = format_gib(abs(budget.correction_bytes))
    return f"calibrated: {size} GiB {more} for the engine on each GPU, after {budget.calibration}"


def uncalibrated_phrase(budget: Budget) -> str | None:
    """Return that no public log of the GPU confirms the figures, and the margin; None if one does, or a measurement."""
    if not budget.uncalibrated_gpu or budget.calibration is not None:
        return None
    return f"uncalibrated GPU: the plan keeps a margin of {format_gib(budget.margin_bytes)} GiB per GPU"


def cpu_sentence(budget: Budget, limits: EngineLimits, tensor: int) -> str:
    """Return whether a replica on CPU fits and why, without a full stop."""
    each = " per rank" if tensor > 1 else ""
    place = f"CPU with {format_gib(budget.total_bytes)} GiB per replica"
    if tensor > 1:
        place = f"CPU with {format_gib(budget.total_bytes)} GiB per rank (TP {tensor})"
    capacity = capacity_phrase(budget, limits.max_model_len)
    match budget.verdict:
        case Verdict.FITS:
            return f"{place} fits: {capacity} in {format_gib(budget.available_kv_bytes)} GiB of KV cache{each}"
        case Verdict.TIGHT:
            spare = format_gib(budget.total_bytes - budget.requested_bytes)
            margin = format_gib(budget.margin_bytes)
            return (
                f"{place} is tight: {capacity}, but {spare} GiB{each} are to spare where the estimate may err by"
                f" {margin} GiB"
            )
        case Verdict.DOES_NOT_FIT:
            return f"{place} does not fit: {_cpu_reason(budget, limits)}"


def _tight_phrase(budget: Budget) -> str:
    if budget.binding_term is Term.SLACK:
        return _slack_phrase(budget)
    spare = format_gib(budget.available_kv_bytes - budget.needed_kv_bytes)
    return f"{spare} GiB per GPU are to spare where the estimate may err by {format_gib(budget.margin_bytes)} GiB"


def _slack_phrase(budget: Budget) -> str:
    free = format_gib(max(0, budget.slack_bytes))
    if budget.slack_bytes < 0:
        lacking = format_gib(-budget.slack_bytes)
        return f"{lacking} GiB per GPU lack outside the budget; lower serving.memoryUtilizationPercent"
    return (
        f"verifying drafts at full batch takes {format_gib(budget.overrun_bytes)} GiB per GPU outside the budget, where"
        f" {free} GiB are free; lower serving.maxNumSeqs, serving.memoryUtilizationPercent or"
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
            engine = budget.state_bytes + budget.activation_bytes + budget.cuda_graphs_bytes + budget.non_torch_bytes
            return f"weights take {weights} and the engine {format_gib(engine)} of {usable}, {nothing_left}"
        case Term.UTILIZATION:
            return (
                f"the engine asks for {format_gib(budget.requested_bytes)} of {format_gib(budget.total_bytes)} GiB, "
                "more than is free when it starts"
            )
        case Term.SEQUENCES:
            return _blocks_reason(budget, limits, split)
        case _:
            return _kv_reason(budget, limits, "per GPU are left", split)


def _blocks_reason(budget: Budget, limits: EngineLimits, split: Parallelism) -> str:
    return (
        f"serving.maxNumSeqs {budget.fewer_seqs or limits.max_num_seqs} exceeds the {budget.num_blocks} blocks of the"
        f" KV cache{split.each_copy}; each request of a model with states needs one, or vLLM refuses to capture FULL"
        f" CUDA graphs: use {budget.num_blocks} or less, or serving.cudagraphMode PIECEWISE"
    )


def _cpu_reason(budget: Budget, limits: EngineLimits) -> str:
    if budget.binding_term is Term.KV_CACHE:
        return _kv_reason(budget, limits, "are given")
    return (
        f"weights {format_gib(budget.weights_bytes)}, KV cache {format_gib(budget.available_kv_bytes)} and the engine "
        f"{format_gib(budget.non_torch_bytes)} make {format_gib(budget.requested_bytes)} GiB"
    )


def _kv_reason(budget: Budget, limits: EngineLimits, given: str, split: Parallelism = TENSOR_ONLY) -> str:
    # The spare block is one that the engine sets aside; it can be all that is lacking.
    requests = "1 request" if limits.min_concurrency == 1 else f"{limits.min_concurrency} requests"
    return (
        f"{format_gib(budget.available_kv_bytes)} GiB {given} for the KV cache, {requests} of "
        f"{limits.max_model_len} tokens{split.each_copy} and a spare block need {format_gib(budget.needed_kv_bytes)}"
    )
