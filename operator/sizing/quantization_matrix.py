"""The quantization matrix: every precision of target, draft and KV cache in every place, ranked.

`ranked` orders the rows by the user's objective; `candidate_rows` returns those a plan may choose from.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from specdecode_operator.enums import FP8_ELEMENT_BYTES, KvCacheDtype, Method, Objective, Precision
from specdecode_operator.sizing.devices import MEMORY_FIELD, PRODUCT_FIELD, Device, find_device, known_products
from specdecode_operator.sizing.errors import PlanError
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.kernel_support import (
    BACKEND_FIELD,
    NOTHING_NAMED,
    Available,
    adaptive_problem,
    checkpoint_at,
    checkpoint_problem,
    cut_experts_problem,
    kernel_note,
    kernel_problem,
    served_precision,
)
from specdecode_operator.sizing.memory.budget import Budget, Term, Verdict, estimate
from specdecode_operator.sizing.pair import TENSOR_FIELD, TENSOR_ONLY, EngineLimits, Pair, Parallelism, spread_problems
from specdecode_operator.sizing.placement import GpuPool, Row, nodes_needed, refuse_too_many
from specdecode_operator.sizing.tensor_parallel import MAX_TENSOR, split_remedy, supported_tensors, tensor_problems

_ALL_PRECISIONS: Final = tuple(Precision)
_Whole = TypeVar("_Whole", Pair, EngineLimits)


@dataclass(frozen=True)
class Selection:
    """Which rows are asked for; None is all."""

    # Precisions; a draft that is no model of its own is always there
    target: frozenset[Precision] | None = None
    draft: frozenset[Precision] | None = None
    kv_cache_dtype: KvCacheDtype | None = None  # auto or fp8


EVERYTHING: Final = Selection()
"""All rows."""


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One combination of precisions on one place."""

    target_precision: Precision  # Precision of the target's linear layers
    draft_precision: Precision | None  # That of the draft; None where no model drafts
    kv_cache_dtype: KvCacheDtype  # auto or fp8
    # GPU product, and the GPUs that share each layer
    product: str
    tensor: int
    budget: Budget | None  # Memory of each GPU; None where the pair cannot be split so
    problems: tuple[str, ...]  # Why vLLM could not be started so, whatever the memory; empty when it could
    notes: tuple[str, ...]  # What users should know of a row that can be launched
    spread: Parallelism = TENSOR_ONLY  # How a replica is spread beyond the tensor parallelism
    nodes: int = 1  # Over how many nodes its GPUs lie

    @property
    def launchable(self) -> bool:
        """Whether vLLM could be started so, whatever the memory."""
        return not self.problems

    @property
    def reason(self) -> str | None:
        """The problems in one sentence; None without any."""
        return "; ".join(self.problems) or None

    @property
    def verdict(self) -> Verdict:
        """Whether it fits. What cannot be split does not."""
        return Verdict.DOES_NOT_FIT if self.budget is None else self.budget.verdict

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache of a replica holds."""
        return 0 if self.budget is None else self.budget.kv_cache_tokens

    @property
    def concurrency(self) -> float:
        """Requests of max_model_len that fit at once."""
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
        """Over which GPUs a replica is spread."""
        return self.spread.at(self.tensor)


@dataclass(frozen=True)
class _Level:
    """One model at one precision."""

    role: str
    geometry: ModelGeometry
    precision: Precision
    checkpoint_problem: str | None

    def split_problems(self, tensor: int, spread: Parallelism, engine_version: str) -> tuple[str, ...]:
        """Return the problems of splitting this model, in words."""
        problems = tensor_problems(
            self.geometry, tensor, self.precision, engine_version, data=spread.data, expert=spread.expert
        )
        return tuple(problem.message for problem in problems)


@dataclass(frozen=True)
class _Variant:
    """The pair at one combination of precisions, the levels of its models, and the checkpoints that it lacks."""

    pair: Pair
    kv_cache_dtype: KvCacheDtype
    levels: tuple[_Level, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class _Place:
    """A device, a split, over how many nodes, and the problems of splitting each level so."""

    device: Device
    tensor: int
    spread: Parallelism
    nodes: int
    problems: dict[tuple[str, Precision], tuple[str, ...]]


def quantization_matrix(  # noqa: PLR0913, PLR0917 (one fact each)
    pair: Pair,
    pools: Iterable[GpuPool],
    tensor: int | None = None,
    available: Available = NOTHING_NAMED,
    selection: Selection = EVERYTHING,
    spread: Parallelism = TENSOR_ONLY,
) -> tuple[MatrixRow, ...]:
    """Return every row, sorted by device, tensor, target, draft and KV cache, whatever the order of the pools.

    A precision for which nobody named a checkpoint is sized all the same,
    from the model's own shape, and says that it needs one. The precision of the pair itself is one among
    the others. A draft that is no model of its own keeps its precision.

    Raises
    ------
    PlanError
        When no pool can be sized, or no node has as many GPUs as asked for.
    """
    targets = _levels("target", pair.target, available.target, selection.target)
    drafts = _draft_levels(pair, available, selection)
    sizes = _sizes(pools, tensor, spread)
    for bad in spread_problems(pair.target, spread, pair.limits.engine_version):
        raise bad
    variants = tuple(_variants(pair, targets, drafts, selection.kv_cache_dtype))
    version = pair.limits.engine_version
    problems = {
        size: {
            (level.role, level.precision): level.split_problems(size, spread, version) for level in (*targets, *drafts)
        }
        for size in {size for _, size, _ in sizes}
    }
    places = [_Place(device, size, spread, nodes, problems[size]) for device, size, nodes in sizes]
    return tuple(_row(variant, place) for place in places for variant in variants)


def _variants(
    pair: Pair, targets: Sequence[_Level], drafts: Sequence[_Level], kv_cache_dtype: KvCacheDtype | None
) -> Iterator[_Variant]:
    """Yield the pair at every combination of precisions."""
    by_kv = {
        kv: _changed(pair, limits=_changed(pair.limits, kv_cache_element_bytes=width))
        for kv, width in _kv_element_bytes(pair).items()
        if kv_cache_dtype in (None, kv)
    }
    drafting: list[tuple[_Level, ...]] = [(draft,) for draft in drafts] or [()]
    for levels in [(target, *draft) for target in targets for draft in drafting]:
        draft = levels[1] if len(levels) > 1 else None
        for kv, based in by_kv.items():
            changed = _changed(
                based,
                target=levels[0].geometry,
                target_precision=levels[0].precision,
                draft=pair.draft if draft is None else draft.geometry,
                draft_precision=pair.draft_precision if draft is None else draft.precision,
            )
            missing = tuple(level.checkpoint_problem for level in levels if level.checkpoint_problem)
            yield _Variant(changed, kv, levels, missing)


def _changed(what: _Whole, **fields: Any) -> _Whole:
    """Return it with other values; itself where it has them: to make a pair takes a tenth of sizing it."""
    return what if all(getattr(what, name) is value for name, value in fields.items()) else replace(what, **fields)


def _kv_element_bytes(pair: Pair) -> dict[KvCacheDtype, int | None]:
    """Return what each KV cache type sets in the limits: auto is what was asked for, where that is not fp8."""
    own = pair.limits.kv_cache_element_bytes
    return {KvCacheDtype.AUTO: None if own == FP8_ELEMENT_BYTES else own, KvCacheDtype.FP8: FP8_ELEMENT_BYTES}


def _levels(
    role: str, geometry: ModelGeometry, named: tuple[ModelGeometry, ...], wanted: frozenset[Precision] | None
) -> tuple[_Level, ...]:
    precisions = frozenset(served_precision(checkpoint, None) for checkpoint in named)
    return tuple(
        _Level(
            role,
            checkpoint_at(geometry, named, precision),
            precision,
            checkpoint_problem(role, geometry, precision, precisions),
        )
        for precision in _ALL_PRECISIONS
        if wanted is None or precision in wanted
    )


def _draft_levels(pair: Pair, available: Available, selection: Selection) -> tuple[_Level, ...]:
    if pair.draft is None:
        return ()
    if pair.method != Method.DRAFT_MODEL:
        return (_Level("draft", pair.draft, served_precision(pair.draft, pair.draft_precision), None),)
    return _levels("draft", pair.draft, available.draft, selection.draft)


def _row(variant: _Variant, place: _Place) -> MatrixRow:
    broken = [text for level in variant.levels for text in place.problems[level.role, level.precision]]
    if (unread := pair_kernel_problem(place.device.product, variant.pair, place.spread.at(place.tensor))) is not None:
        broken.append(unread.message)
    noted = [note for level in variant.levels if (note := kernel_note(place.device.product, level.precision))]
    return MatrixRow(
        target_precision=variant.levels[0].precision,
        draft_precision=variant.pair.draft_precision,
        kv_cache_dtype=variant.kv_cache_dtype,
        product=place.device.product,
        tensor=place.tensor,
        budget=None if broken else estimate(variant.pair, place.device, place.spread.at(place.tensor)),
        problems=(*broken, *variant.missing),
        notes=tuple(dict.fromkeys(noted)),
        spread=place.spread,
        nodes=place.nodes,
    )


def pair_kernel_problem(product: str, pair: Pair, split: Parallelism) -> PlanError | None:
    """Return why vLLM has no kernel for a pair on a GPU product; None where it has."""
    asked = pair.limits.kv_cache_element_bytes
    cache_bytes = asked or pair.target.cache_element_bytes
    for model in [pair.target, *([] if pair.draft is None else [pair.draft])]:
        # Of the draft's attention vLLM chooses the backend anew (v1/spec_decode/llm_base_proposer.py).
        backend = pair.limits.attention_backend if model is pair.target else None
        if (problem := kernel_problem(product, model, cache_bytes, backend)) is not None:
            if asked is not None or problem.field in {PRODUCT_FIELD, BACKEND_FIELD}:
                return problem
            why = f"the checkpoint asks for an FP8 cache: {problem.message}"
            return PlanError(problem.field, KvCacheDtype.AUTO.value, why)
        if not split.expert and (message := cut_experts_problem(product, model, split.tensor * split.data)):
            return PlanError(TENSOR_FIELD, split.tensor, message)
    return adaptive_problem(product, pair)


def _sizes(pools: Iterable[GpuPool], tensor: int | None, spread: Parallelism) -> list[tuple[Device, int, int]]:
    """Return each device with each split that its largest nodes have room for, and over how many of them."""
    largest: dict[str, GpuPool] = {}
    for pool in pools:
        known = largest.get(pool.product, pool)
        largest[pool.product] = max(known, pool, key=lambda each: (each.gpus_per_node, each.nodes))
    usable = [
        (device, pool) for _, pool in sorted(largest.items()) if (device := pool.device) and pool.gpus_per_node > 0
    ]
    if not usable:
        products = ", ".join(sorted(largest)) or "none"
        known_ones = ", ".join(known_products())
        raise PlanError(
            PRODUCT_FIELD,
            products,
            f"no GPU product here can be sized; known are {known_ones}; for others set {MEMORY_FIELD}",
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
"""Precisions by how much they take from a model: fewer bits later.

FP8 before INT8, because FP8 lost nothing measurable where INT8 lost 1-3 % (Kurtic et al., "Give Me BF16 or Give Me
Death?", arXiv 2411.02355). INT8 before all of 4 bits.
"""


_PREFERENCE: Final = (Verdict.FITS, Verdict.TIGHT, Verdict.DOES_NOT_FIT)

_REASONS: Final = {
    Objective.QUALITY: "the least quantized target that fits, then the fewest GPUs",
    Objective.CAPACITY: "the most tokens for each GPU",
    Objective.COST: "the fewest GPUs, then the smallest device, then the least quantized target",
}


_Key = tuple[float | str, ...]


def ranked(rows: Iterable[MatrixRow], objective: Objective) -> list[MatrixRow]:
    """Return the rows that can be launched, the one to take first, whatever their order.

    Fits comes before Tight under every objective: both already hold
    min_concurrency requests of max_model_len, but only Fits also after the
    margin. Rows that do not fit follow, by how little they lack.
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
    order = _ORDERS[objective]
    return sorted(rows, key=lambda row: (_PREFERENCE.index(row.verdict), lacking_bytes(row), *order(row), *_last(row)))


def lacking_bytes(row: MatrixRow) -> int:
    """Return what the KV cache of each GPU is short of; 0 where it suffices."""
    return 0 if row.budget is None else max(0, row.budget.needed_kv_bytes - row.budget.available_kv_bytes)


def choice_phrase(row: MatrixRow | Row, objective: Objective) -> str:
    """Return what an objective took and why: ``Quality takes FP8 target, BF16 draft: the least quantized …``."""
    if row.verdict is Verdict.DOES_NOT_FIT:
        return f"no precision fits, {_precisions(row)} lacks least"
    return f"{objective} takes {_precisions(row)}: {_REASONS[objective]}"


def missing_checkpoint(rows: Iterable[MatrixRow], objective: Objective) -> str:
    """Return which checkpoint, that nobody named, would make it fit; empty where none would."""
    order = _ORDERS[objective]
    lacking = [row for row in rows if row.budget is not None and row.verdict is Verdict.FITS and not row.launchable]
    if not lacking:
        return ""
    nearest = min(lacking, key=lambda row: (len(row.problems), *order(row), *_last(row)))
    return f"{_precisions(nearest)} would fit, but {nearest.reason}"


def severity(precision: Precision | None) -> int:
    """Return how hard a precision quantizes, 0 for not at all; None (no draft) is 0."""
    return 0 if precision is None else _GENTLEST_FIRST.index(precision.value)


def _precisions(row: MatrixRow | Row) -> str:
    draft = "no draft model" if row.draft_precision is None else f"{row.draft_precision} draft"
    return f"{row.target_precision} target, {draft}"


def _loss(row: MatrixRow) -> tuple[int, bool, bool]:
    """Return what a row takes from the quality of the output, and whether the draft is spared before the target."""
    spared_draft = row.draft_precision is not None and severity(row.draft_precision) < severity(row.target_precision)
    return severity(row.target_precision), row.kv_cache_dtype != KvCacheDtype.AUTO, spared_draft


def _quality(row: MatrixRow) -> _Key:
    return (*_loss(row), row.gpus, row.tensor, _leaves_nvlink(row), _total_bytes(row))


def _capacity(row: MatrixRow) -> _Key:
    return (-row.tokens / row.gpus, row.gpus, row.tensor, *_loss(row), _leaves_nvlink(row))


def _cost(row: MatrixRow) -> _Key:
    return (row.gpus, row.tensor, _leaves_nvlink(row), _total_bytes(row), *_loss(row))


_ORDERS: Final[dict[Objective, Callable[[MatrixRow], _Key]]] = {
    Objective.QUALITY: _quality,
    Objective.CAPACITY: _capacity,
    Objective.COST: _cost,
}


def _leaves_nvlink(row: MatrixRow) -> bool:
    """Return whether ranks of one layer would talk over PCIe, twice a layer and step."""
    device = find_device(row.product)
    return row.tensor > (1 if device is None else device.nvlink_gpus)


def _last(row: MatrixRow) -> _Key:
    """Return what decides between rows that the objective holds for equal; no two rows share it."""
    return (severity(row.draft_precision), _total_bytes(row), row.product, row.target_precision, row.kv_cache_dtype)


def _total_bytes(row: MatrixRow) -> int:
    return 0 if row.budget is None else row.budget.total_bytes


@dataclass(frozen=True)
class PlanOptions:
    """What a plan may choose from beside the place, and what for."""

    objective: Objective = Objective.QUALITY

    target: frozenset[Precision] = frozenset()
    """Precisions to choose from; empty is the pair's own alone. The same holds for the draft."""

    draft: frozenset[Precision] = frozenset()

    available: Available = NOTHING_NAMED
    """Checkpoints that those come from, beside the models' own."""

    spread: Parallelism = TENSOR_ONLY
    """How a replica is spread beyond tensor parallelism: not the plan's to choose."""


PLACE_ONLY: Final = PlanOptions()
"""Only the place is to be decided."""


def candidate_rows(
    pair: Pair, pools: Iterable[GpuPool], tensor: int | None, options: PlanOptions = PLACE_ONLY
) -> tuple[Row, ...]:
    """Return all candidates, the one to choose first, whatever the order of the pools.

    They are the rows of the quantization matrix that the options allow, that
    can be launched and that the models can be split into.

    Raises
    ------
    PlanError
        When no pool can be sized, or the models cannot be split as asked.
    """
    matrix = quantization_matrix(pair, pools, tensor, options.available, selection(pair, options), options.spread)
    rows = tuple(
        Row(row.product, row.tensor, row.budget, row.target_precision, row.draft_precision, row.spread, row.nodes)
        for row in ranked(matrix, options.objective)
        if row.budget is not None
    )
    if not rows:
        unread = [pair_kernel_problem(row.product, pair, row.split) for row in matrix]
        if unread[0] is not None and None not in unread:
            raise unread[0]
        raise _no_split(pair, tensor, options.spread, matrix[0].reason or "no supported split")
    return rows


def _no_split(pair: Pair, tensor: int | None, spread: Parallelism, reason: str) -> PlanError:
    """Return what is wrong where no candidate is left: the split that is asked for, or a model that has none."""
    version, data, expert = pair.limits.engine_version, spread.data, spread.expert
    own, drafts = pair.target_precision, pair.draft_precision
    remedy = split_remedy(pair.target, pair.draft, own, drafts, version, data=data, expert=expert)
    message = f"{reason}; {remedy}"
    if tensor is not None:
        return PlanError(TENSOR_FIELD, tensor, message)
    if pair.draft is None or not supported_tensors(pair.target, None, own, None, version, data=data, expert=expert):
        return PlanError("target.model", pair.target.name, message)
    return PlanError("speculation.draft.model", pair.draft.name, message)


def selection(pair: Pair, options: PlanOptions) -> Selection:
    """Return the rows of the quantization matrix that the plan chooses from."""
    own_draft = None if pair.draft is None else frozenset({served_precision(pair.draft, pair.draft_precision)})
    fp8_cache = pair.limits.kv_cache_element_bytes == FP8_ELEMENT_BYTES
    return Selection(
        target=options.target or frozenset({served_precision(pair.target, pair.target_precision)}),
        draft=options.draft or own_draft,
        kv_cache_dtype=KvCacheDtype.FP8 if fp8_cache else KvCacheDtype.AUTO,
    )
