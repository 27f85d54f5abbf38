"""The quantization matrix: every precision of target, draft and KV cache on every place a replica could run."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from specdecode_operator.sizing.base.devices import MEMORY_FIELD, Device, known_products
from specdecode_operator.sizing.base.errors import PlanError
from specdecode_operator.sizing.choice.adaptive_rules import adaptive_problem
from specdecode_operator.sizing.choice.node_placement import GpuPool, nodes_needed, refuse_too_many
from specdecode_operator.sizing.choice.plan_row import PRODUCT_FIELD
from specdecode_operator.sizing.choice.precision_rules import (
    BACKEND_FIELD,
    NOTHING_NAMED,
    Available,
    checkpoint_at,
    checkpoint_problem,
    cut_experts_problem,
    kernel_note,
    kernel_problem,
    served_precision,
)
from specdecode_operator.sizing.memory.budget import Budget, Term, Verdict, estimate
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.pair.pair import (
    TENSOR_FIELD,
    TENSOR_ONLY,
    EngineLimits,
    Pair,
    Parallelism,
    spread_problems,
)
from specdecode_operator.sizing.weights.divisibility import MAX_TENSOR, tensor_problems
from specdecode_operator.vocabulary import FP8_ELEMENT_BYTES, KvCacheDtype, Method, Precision

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
