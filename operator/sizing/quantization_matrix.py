"""The quantization matrix: every precision of target, draft and KV cache in every place, ranked.

`ranked` orders the rows by the user's objective; `candidate_rows` returns those a plan may choose from.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, TypeVar

from specdecode_operator.enums import FP8_ELEMENT_BYTES, KvCacheDtype, Method, Objective, Precision
from specdecode_operator.sizing.devices import KNOWN_GPUS, MEMORY_FIELD, PRODUCT_FIELD, Device, find_device
from specdecode_operator.sizing.errors import PlanError
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.kernel_support import (
    NOTHING_NAMED,
    Available,
    checkpoint_at,
    checkpoint_problem,
    kernel_note,
    pair_kernel_problem,
    served_precision,
)
from specdecode_operator.sizing.memory.budget import Budget, Term, Verdict, estimate
from specdecode_operator.sizing.pair import TENSOR_FIELD, TENSOR_ONLY, EngineLimits, Pair, Parallelism, spread_problems
from specdecode_operator.sizing.placement import GpuPool, Row, nodes_needed, refuse_too_many
from specdecode_operator.sizing.tensor_parallel import MAX_TENSOR, split_remedy, supported_tensors, tensor_problems

_Whole = TypeVar("_Whole", Pair, EngineLimits)


@dataclass(frozen=True)
class Selection:
    """Requested rows; None is all."""

    # Precisions; a draft head is always included
    target: frozenset[Precision] | None = None
    draft: frozenset[Precision] | None = None
    kv_cache_dtype: KvCacheDtype | None = None  # auto or fp8


EVERYTHING: Final = Selection()


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One combination of precisions on one place."""

    target_precision: Precision
    draft_precision: Precision | None  # None if no model drafts
    kv_cache_dtype: KvCacheDtype  # auto or fp8
    product: str
    tensor: int
    budget: Budget | None  # Memory of each GPU; None if the pair cannot be split so
    problems: tuple[str, ...]  # Why vLLM could not start, regardless of memory
    notes: tuple[str, ...]  # Remarks about a row that can be launched
    spread: Parallelism = TENSOR_ONLY  # Beyond the tensor parallelism
    nodes: int = 1

    @property
    def launchable(self) -> bool:
        """True if vLLM could start so, regardless of memory."""
        return not self.problems

    @property
    def reason(self) -> str | None:
        """The problems in one sentence; None without any."""
        return "; ".join(self.problems) or None

    @property
    def verdict(self) -> Verdict:
        """Verdict of the budget; a row that cannot be split does not fit."""
        return Verdict.DOES_NOT_FIT if self.budget is None else self.budget.verdict

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache of a replica holds."""
        return 0 if self.budget is None else self.budget.kv_cache_tokens

    @property
    def concurrency(self) -> float:
        """Requests of max_model_len that fit together."""
        return 0.0 if self.budget is None else self.budget.max_concurrency

    @property
    def binding_term(self) -> Term | None:
        """The term that does not fit; None when it fits or cannot be split."""
        return None if self.budget is None else self.budget.binding_term

    @property
    def gpus(self) -> int:
        """GPUs that a replica takes."""
        return self.tensor * self.spread.groups

    @property
    def split(self) -> Parallelism:
        """Parallelism of a replica."""
        return self.spread.at(self.tensor)


_Level = tuple[ModelGeometry, Precision, str | None]
"""One model at one precision, and the problem of a checkpoint that it lacks."""


def quantization_matrix(  # noqa: PLR0913, PLR0917 (one fact each)
    pair: Pair,
    pools: Iterable[GpuPool],
    tensor: int | None = None,
    available: Available = NOTHING_NAMED,
    selection: Selection = EVERYTHING,
    spread: Parallelism = TENSOR_ONLY,
) -> tuple[MatrixRow, ...]:
    """Return every row, sorted by device, tensor, target, draft and KV cache, independent of the order of the pools.

    A precision without a named checkpoint is sized from the model's shape, and marked as needing one. The pair's own
    precision is one of the rows. A draft head keeps its precision. Raise PlanError if no pool can be sized, or no node
    has the requested number of GPUs.
    """
    targets = _levels("target", pair.target, available.target, selection.target)
    drafts: list[_Level] = []
    if pair.draft is not None and pair.method == Method.DRAFT_MODEL:
        drafts = _levels("draft", pair.draft, available.draft, selection.draft)
    elif pair.draft is not None:
        drafts = [(pair.draft, served_precision(pair.draft, pair.draft_precision), None)]
    sizes = _sizes(pools, tensor, spread)
    for bad in spread_problems(pair.target, spread, pair.limits.engine_version):
        raise bad
    # auto is the requested type, unless that is fp8.
    own = pair.limits.kv_cache_element_bytes
    widths = {KvCacheDtype.AUTO: None if own == FP8_ELEMENT_BYTES else own, KvCacheDtype.FP8: FP8_ELEMENT_BYTES}
    by_kv = {
        kv: _changed(pair, limits=_changed(pair.limits, kv_cache_element_bytes=width))
        for kv, width in widths.items()
        if selection.kv_cache_dtype in (None, kv)
    }
    variants = []
    drafting: list[_Level | None] = list(drafts) or [None]
    for target, draft in product(targets, drafting):
        for kv, based in by_kv.items():
            changed = _changed(
                based,
                target=target[0],
                target_precision=target[1],
                draft=pair.draft if draft is None else draft[0],
                draft_precision=pair.draft_precision if draft is None else draft[1],
            )
            variants.append((changed, kv, [target] if draft is None else [target, draft]))
    return tuple(
        _row(*variant, device, spread.at(size), nodes) for device, size, nodes in sizes for variant in variants
    )


def _changed(what: _Whole, **fields: Any) -> _Whole:
    """Return it with other values; itself if it has them: to make a pair takes a tenth of sizing it."""
    return what if all(getattr(what, name) is value for name, value in fields.items()) else replace(what, **fields)


def _levels(
    role: str, geometry: ModelGeometry, named: tuple[ModelGeometry, ...], wanted: frozenset[Precision] | None
) -> list[_Level]:
    held = frozenset(served_precision(checkpoint, None) for checkpoint in named)
    return [
        (checkpoint_at(geometry, named, each), each, checkpoint_problem(role, geometry, each, held))
        for each in Precision
        if wanted is None or each in wanted
    ]


def _row(  # noqa: PLR0913, PLR0917 (one fact each)
    pair: Pair, kv: KvCacheDtype, levels: Sequence[_Level], device: Device, split: Parallelism, nodes: int
) -> MatrixRow:
    broken = [
        problem.message
        for geometry, precision, _ in levels
        for problem in tensor_problems(
            geometry, split.tensor, precision, pair.limits.engine_version, data=split.data, expert=split.expert
        )
    ]
    if (unread := pair_kernel_problem(device.product, pair, split)) is not None:
        broken.append(unread.message)
    notes = (kernel_note(device.product, precision) for _, precision, _ in levels)
    return MatrixRow(
        target_precision=pair.target_precision,
        draft_precision=pair.draft_precision,
        kv_cache_dtype=kv,
        product=device.product,
        tensor=split.tensor,
        budget=None if broken else estimate(pair, device, split),
        problems=(*broken, *filter(None, (missing for *_, missing in levels))),
        notes=tuple(dict.fromkeys(filter(None, notes))),
        spread=split.at(1),
        nodes=nodes,
    )


def _sizes(pools: Iterable[GpuPool], tensor: int | None, spread: Parallelism) -> list[tuple[Device, int, int]]:
    """Return each device with each split that its largest nodes have room for, and the number of nodes."""
    largest: dict[str, GpuPool] = {}
    for pool in pools:
        known = largest.get(pool.product, pool)
        largest[pool.product] = max(known, pool, key=lambda each: (each.gpus_per_node, each.nodes))
    usable = [
        (device, pool) for _, pool in sorted(largest.items()) if (device := pool.device) and pool.gpus_per_node > 0
    ]
    if not usable:
        products = ", ".join(sorted(largest)) or "none"
        raise PlanError(
            PRODUCT_FIELD,
            products,
            f"no GPU product here can be sized: use another one ({KNOWN_GPUS}), or set {MEMORY_FIELD}",
        )
    refuse_too_many([pool for _, pool in usable], tensor, spread)
    powers = [2**exponent for exponent in range(MAX_TENSOR.bit_length())]
    return [
        (device, size, nodes)
        for device, pool in usable
        for size in ([size for size in powers if size <= pool.gpus_per_node] if tensor is None else [tensor])
        if (nodes := nodes_needed(pool, size, spread))
    ]


_GENTLEST_FIRST: Final = ("BF16", "FP8", "INT8", "NVFP4", "MXFP4", "INT4")
"""Precisions by their loss of quality: fewer bits later.

FP8 before INT8, because FP8 had no measurable loss where INT8 lost 1-3 % (Kurtic et al., "Give Me BF16 or Give Me
Death?", arXiv 2411.02355). INT8 before all of 4 bits.
"""

_BEST_FIRST: Final = (Verdict.FITS, Verdict.TIGHT, Verdict.DOES_NOT_FIT)

_REASONS: Final = {
    Objective.QUALITY: "the least quantized target that fits, then the fewest GPUs",
    Objective.CAPACITY: "the most tokens for each GPU",
    Objective.COST: "the fewest GPUs, then the smallest device, then the least quantized target",
}


def ranked(rows: Iterable[MatrixRow], objective: Objective) -> list[MatrixRow]:
    """Return the rows that can be launched, best first, independent of their order.

    Fits comes before Tight under every objective: both already hold min_concurrency requests of max_model_len, but
    only Fits also after the margin. Rows that do not fit follow, by how little they lack.
    """
    return _in_order((row for row in rows if row.launchable), objective)


def best_places(rows: Iterable[MatrixRow], objective: Objective) -> list[MatrixRow]:
    """Return for all precisions on each product the split that serves an objective best, launchable or not."""
    rows = tuple(rows)
    best: dict[tuple[str | None, ...], MatrixRow] = {}
    for row in _in_order((row for row in rows if row.budget is not None), objective):
        best.setdefault((row.target_precision, row.draft_precision, row.kv_cache_dtype, row.product), row)
    return [row for row in rows if row in best.values()]


def _in_order(rows: Iterable[MatrixRow], objective: Objective) -> list[MatrixRow]:
    return sorted(
        rows, key=lambda row: (_BEST_FIRST.index(row.verdict), lacking_bytes(row), *_preference(row, objective))
    )


def lacking_bytes(row: MatrixRow) -> int:
    """Return the bytes that the KV cache of each GPU is short of; 0 if it suffices."""
    return 0 if row.budget is None else max(0, row.budget.needed_kv_bytes - row.budget.available_kv_bytes)


def choice_phrase(row: MatrixRow | Row, objective: Objective) -> str:
    """Return the choice of an objective and its reason: ``Quality takes FP8 target, BF16 draft: the least …``."""
    if row.verdict is Verdict.DOES_NOT_FIT:
        return f"no precision fits, {_precisions(row)} lacks least"
    return f"{objective} takes {_precisions(row)}: {_REASONS[objective]}"


def missing_checkpoint(rows: Iterable[MatrixRow], objective: Objective) -> str:
    """Return the unnamed checkpoint that would make the pair fit, or an empty text."""
    lacking = [row for row in rows if row.budget is not None and row.verdict is Verdict.FITS and not row.launchable]
    if not lacking:
        return ""
    nearest = min(lacking, key=lambda row: (len(row.problems), *_preference(row, objective)))
    return f"{_precisions(nearest)} would fit, but {nearest.reason}"


def severity(precision: Precision | None) -> int:
    """Return how hard a precision quantizes; 0 for BF16 and for None (no draft)."""
    return 0 if precision is None else _GENTLEST_FIRST.index(precision.value)


def _precisions(row: MatrixRow | Row) -> str:
    draft = "no draft model" if row.draft_precision is None else f"{row.draft_precision} draft"
    return f"{row.target_precision} target, {draft}"


def _preference(row: MatrixRow, objective: Objective) -> tuple[float | str, ...]:
    """Return the sort key of rows under an objective; no two rows share it."""
    target, draft = severity(row.target_precision), severity(row.draft_precision)
    # Among equals prefer a draft that is quantized as hard as the target: it cannot change the output.
    loss = (target, row.kv_cache_dtype != KvCacheDtype.AUTO, row.draft_precision is not None and draft < target)
    device = find_device(row.product)
    # Beyond NVLink the ranks of one layer would talk over PCIe, twice a layer and step.
    gpus = (row.gpus, row.tensor)
    leaves_nvlink = row.tensor > (1 if device is None else device.nvlink_gpus)
    total_bytes = 0 if row.budget is None else row.budget.total_bytes
    match objective:
        case Objective.QUALITY:
            order: tuple[float, ...] = (*loss, *gpus, leaves_nvlink, total_bytes)
        case Objective.CAPACITY:
            order = (-row.tokens / row.gpus, *gpus, *loss, leaves_nvlink)
        case Objective.COST:
            order = (*gpus, leaves_nvlink, total_bytes, *loss)
    return (*order, draft, total_bytes, row.product, row.target_precision, row.kv_cache_dtype)


@dataclass(frozen=True)
class PlanOptions:
    """Choices of a plan other than the place, and its objective."""

    objective: Objective = Objective.QUALITY
    # Precisions to choose from; empty is the pair's own alone
    target: frozenset[Precision] = frozenset()
    draft: frozenset[Precision] = frozenset()
    available: Available = NOTHING_NAMED  # Their checkpoints, beside the models' own
    spread: Parallelism = TENSOR_ONLY  # Beyond tensor parallelism; the plan does not choose it


PLACE_ONLY: Final = PlanOptions()


def candidate_rows(
    pair: Pair, pools: Iterable[GpuPool], tensor: int | None, options: PlanOptions = PLACE_ONLY
) -> tuple[Row, ...]:
    """Return all candidates, best first, independent of the order of the pools.

    They are the rows of the quantization matrix that the options allow, that can be launched and that the models can be
    split into. Raise PlanError if no pool can be sized, or the models cannot be split as asked.
    """
    matrix = quantization_matrix(pair, pools, tensor, options.available, selection(pair, options), options.spread)
    rows = tuple(
        Row(row.product, row.tensor, row.budget, row.target_precision, row.draft_precision, row.spread, row.nodes)
        for row in ranked(matrix, options.objective)
        if row.budget is not None
    )
    if rows:
        return rows
    unread = [pair_kernel_problem(row.product, pair, row.split) for row in matrix]
    if unread[0] is not None and None not in unread:
        raise unread[0]
    version, data, expert = pair.limits.engine_version, options.spread.data, options.spread.expert
    remedy = split_remedy(pair.served, version, data=data, expert=expert)
    message = f"{matrix[0].reason or 'no supported split'}; {remedy}"
    if tensor is not None:
        raise PlanError(TENSOR_FIELD, tensor, message)
    if pair.draft is None or not supported_tensors(pair.served[:1], version, data=data, expert=expert):
        raise PlanError("target.model", pair.target.name, message)
    raise PlanError("speculation.draft.model", pair.draft.name, message)


def selection(pair: Pair, options: PlanOptions) -> Selection:
    """Return the rows of the quantization matrix that the plan chooses from."""
    own_draft = None if pair.draft is None else frozenset({served_precision(pair.draft, pair.draft_precision)})
    fp8_cache = pair.limits.kv_cache_element_bytes == FP8_ELEMENT_BYTES
    return Selection(
        target=options.target or frozenset({served_precision(pair.target, pair.target_precision)}),
        draft=options.draft or own_draft,
        kv_cache_dtype=KvCacheDtype.FP8 if fp8_cache else KvCacheDtype.AUTO,
    )
