"""What to change when nothing fits: single changes, each tried, least harm first."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

from specdecode_operator.sizing.base.errors import PlanError
from specdecode_operator.sizing.base.units import ceil_div
from specdecode_operator.sizing.choice.candidates import PlanOptions, candidate_rows
from specdecode_operator.sizing.choice.explanations import capacity_phrase
from specdecode_operator.sizing.choice.node_placement import GpuPool
from specdecode_operator.sizing.choice.other_models import NO_ALTERNATIVES, Alternatives, smaller_drafts
from specdecode_operator.sizing.choice.plan_row import PRODUCT_FIELD, Row
from specdecode_operator.sizing.choice.precision_rules import ONLINE_PRECISIONS, served_precision
from specdecode_operator.sizing.choice.ranking import severity
from specdecode_operator.sizing.memory.budget import Verdict
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.pair.pair import TENSOR_ONLY, EngineLimits, Pair, Parallelism
from specdecode_operator.sizing.weights.divisibility import supported_tensors
from specdecode_operator.vocabulary import FP8_ELEMENT_BYTES, Method, Precision

DEFAULT_UTILIZATION_PERCENT: Final = 92
"""vLLM 0.32's own default (config/cache.py), known to leave enough for what is outside the budget."""

_GO_WITH_STAGES: Final = frozenset({Method.NONE, Method.NGRAM})
"""Methods that every version combines with pipeline stages."""

_PROPOSED_PRODUCTS: Final = ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H200")
"""What people can be told to get: not every product that can be sized."""


@dataclass(frozen=True)
class Fix:
    """One change that makes it fit."""

    change: str  # Field and new value, such as ``target.quantization: FP8``
    verdict: Verdict  # What the plan would say then
    # KV cache tokens and full-length requests it would have then
    tokens: int
    concurrency: float
    sentence: str  # The change and its effect
    # By how much the change widens, on each GPU, what is left for the KV cache over what is needed of it
    gained_bytes: int = 0


@dataclass(frozen=True)
class _Question:
    """What is planned; a change is another question with its own description."""

    pair: Pair
    pools: tuple[GpuPool, ...]
    tensor: int | None
    spread: Parallelism
    change: str = ""

    def best_row(self) -> Row | None:
        """Return the row that the plan would choose; None where there is none."""
        try:
            return candidate_rows(self.pair, self.pools, self.tensor, PlanOptions(spread=self.spread))[0]
        except PlanError:
            return None

    def with_limits(self, change: str, limits: EngineLimits) -> "_Question":
        """Return the question under other limits."""
        return replace(self, change=change, pair=replace(self.pair, limits=limits))


def find_fixes(
    pair: Pair,
    pools: Sequence[GpuPool],
    tensor: int | None,
    chosen: Row,
    alternatives: Alternatives = NO_ALTERNATIVES,
) -> tuple[Fix, ...]:
    """Return single changes that make the pair fit, least harm first.

    First settings that cost no quality, then precision (the draft's before
    the KV cache's before the target's: the draft cannot change the output),
    then hardware, then another draft, then what users would notice. Changes
    that end tight are only named when none ends with a fit. A precision that
    needs a checkpoint is only named where the user has one.
    """
    question = _Question(pair, tuple(pools), tensor, chosen.spread)
    kinds = (
        _default_utilization(question),
        _fewer_sequences(question),
        _quantized_draft(question, alternatives),
        _kv_fp8(question),
        _quantized_target(question, alternatives),
        chain(_more_gpus(question), _more_nodes(question)),
        _other_products(question),
        _smaller_draft(question, alternatives),
        _own_layers(question),
        _head(question, alternatives),
        _lower_min_concurrency(question),
        _shorter_length(question),
        _no_draft(question),
    )
    found = [fix for kind in kinds if (fix := _smallest_fix(kind, chosen)) is not None]
    fitting = [fix for fix in found if fix.verdict is Verdict.FITS]
    return tuple(fitting or found)


def _smallest_fix(changes: Iterator[_Question], chosen: Row) -> Fix | None:
    """Return the first change of a kind that fits, or else the first that is tight."""
    tight = None
    for change in changes:
        row = change.best_row()
        if row is None or row.budget.verdict is Verdict.DOES_NOT_FIT:
            continue
        fix = _fix(change, row, chosen)
        if fix.verdict is Verdict.FITS:
            return fix
        tight = tight or fix
    return tight


def _fix(change: _Question, row: Row, chosen: Row) -> Fix:
    capacity = capacity_phrase(row.budget, change.pair.limits.max_model_len)
    same_place = (row.product, row.split) == (chosen.product, chosen.split)
    place = "" if same_place else f" on {row.place}"
    tight = " (tight)" if row.budget.verdict is Verdict.TIGHT else ""
    return Fix(
        change=change.change,
        verdict=row.budget.verdict,
        tokens=row.budget.kv_cache_tokens,
        concurrency=row.budget.max_concurrency,
        sentence=f"{change.change} gives {capacity}{place}{tight}",
        gained_bytes=_spare_bytes(row) - _spare_bytes(chosen),
    )


def _spare_bytes(row: Row) -> int:
    """Return what is left for the KV cache over what is needed of it; negative where it lacks."""
    return row.budget.available_kv_bytes - row.budget.needed_kv_bytes


def _default_utilization(question: _Question) -> Iterator[_Question]:
    if question.pair.limits.memory_utilization_percent != DEFAULT_UTILIZATION_PERCENT:
        limits = replace(question.pair.limits, memory_utilization_percent=DEFAULT_UTILIZATION_PERCENT)
        yield question.with_limits(f"serving.memoryUtilizationPercent: {DEFAULT_UTILIZATION_PERCENT}", limits)


def _fewer_sequences(question: _Question) -> Iterator[_Question]:
    limits = question.pair.limits
    sequences = limits.max_num_seqs // 2
    while sequences >= limits.min_concurrency:
        yield question.with_limits(f"serving.maxNumSeqs: {sequences}", replace(limits, max_num_seqs=sequences))
        sequences //= 2


def _quantized_draft(question: _Question, alternatives: Alternatives) -> Iterator[_Question]:
    pair = question.pair
    if pair.draft is None or pair.method != Method.DRAFT_MODEL:
        return
    for geometry, precision in _harder(pair.draft, pair.draft_precision, alternatives.available.draft):
        changed = replace(pair, draft=geometry, draft_precision=precision)
        yield replace(question, pair=changed, change=f"speculation.draft.quantization: {precision}")


def _kv_fp8(question: _Question) -> Iterator[_Question]:
    limits = question.pair.limits
    if limits.kv_cache_element_bytes != FP8_ELEMENT_BYTES:
        yield question.with_limits(
            "serving.kvCacheDtype: fp8", replace(limits, kv_cache_element_bytes=FP8_ELEMENT_BYTES)
        )


def _quantized_target(question: _Question, alternatives: Alternatives) -> Iterator[_Question]:
    pair = question.pair
    for geometry, precision in _harder(pair.target, pair.target_precision, alternatives.available.target):
        changed = replace(pair, target=geometry, target_precision=precision)
        yield replace(question, pair=changed, change=f"target.quantization: {precision}")


def _harder(
    geometry: ModelGeometry, precision: Precision | None, named: tuple[ModelGeometry, ...]
) -> list[tuple[ModelGeometry, Precision]]:
    """Return the precisions beyond the present one that can be had, each with its checkpoint, gentlest first.

    What is served at another precision than its checkpoint's cannot be made
    FP8 while loading: it comes from a checkpoint of its own.
    """
    present = served_precision(geometry, precision)
    found = {served_precision(checkpoint, None): checkpoint for checkpoint in named}
    if geometry.checkpoint is None and present is Precision.BF16:
        for online in ONLINE_PRECISIONS:
            found.setdefault(online, geometry)
    harder = [(found[candidate], candidate) for candidate in found if severity(candidate) > severity(present)]
    return sorted(harder, key=lambda each: severity(each[1]))


def _more_gpus(question: _Question) -> Iterator[_Question]:
    # Without a tensor of the user's every split was tried already.
    if question.tensor is None:
        return
    widest = max(pool.gpus_per_node for pool in question.pools)
    for size in _supported(question):
        if question.tensor < size <= widest:
            yield replace(question, tensor=size, change=f"parallelism.tensor: {size}")


def _more_nodes(question: _Question) -> Iterator[_Question]:
    """Stages on nodes of their own; layers over several where not all versions combine the method with stages."""
    pair, largest = question.pair, max(question.pools, key=lambda pool: (pool.gpus_per_node, pool.nodes))
    if question.spread != TENSOR_ONLY:
        return
    if pair.method in _GO_WITH_STAGES:
        tensor = largest.gpus_per_node
        for stages in range(2, largest.nodes + 1):
            change = f"parallelism.tensor: {tensor}, parallelism.pipeline: {stages}"
            yield replace(question, tensor=tensor, spread=Parallelism(pipeline=stages), change=change)
    else:
        for size in _supported(question):
            if size > max(largest.gpus_per_node, question.tensor or 0):
                yield replace(question, tensor=size, change=f"parallelism.tensor: {size}")


def _supported(question: _Question) -> tuple[int, ...]:
    """Return how many GPUs the models can share their layers over."""
    pair = question.pair
    return tuple(
        supported_tensors(
            pair.target,
            pair.draft,
            pair.target_precision,
            pair.draft_precision,
            pair.limits.engine_version,
            data=question.spread.data,
            expert=question.spread.expert,
        )
    )


def product_change(product: str) -> str:
    """Return how a fix words that another product is to be used."""
    return f"{PRODUCT_FIELD}: [{product}]"


def _other_products(question: _Question) -> Iterator[_Question]:
    present = {pool.product for pool in question.pools}
    gpus_per_node, nodes = max((pool.gpus_per_node, pool.nodes) for pool in question.pools)
    for product in _PROPOSED_PRODUCTS:
        if product not in present:
            pools = (GpuPool(product, gpus_per_node, nodes),)
            yield replace(question, pools=pools, change=product_change(product))


def _smaller_draft(question: _Question, alternatives: Alternatives) -> Iterator[_Question]:
    pair = question.pair
    if pair.draft is None or pair.method != Method.DRAFT_MODEL:
        return
    for geometry in alternatives.smaller_drafts or smaller_drafts(pair.target, pair.draft):
        changed = replace(pair, draft=geometry, draft_precision=Precision.BF16)
        yield replace(question, pair=changed, change=f"speculation.draft.model: {geometry.name}")


def _own_layers(question: _Question) -> Iterator[_Question]:
    """The target's own layers for multi-token prediction, where its checkpoint holds some."""
    pair = question.pair
    if pair.method == Method.DRAFT_MODEL and pair.target.mtp_block:
        changed = replace(pair, method=Method.MTP, draft=None, draft_precision=None)
        yield replace(question, pair=changed, change=f"speculation.method: {Method.MTP}")


def _head(question: _Question, alternatives: Alternatives) -> Iterator[_Question]:
    pair = question.pair
    if pair.method != Method.DRAFT_MODEL:
        return
    for head in alternatives.heads:
        changed = replace(pair, method=head.method, draft=head.geometry, draft_precision=None)
        change = f"speculation.method: {head.method}, speculation.draft.model: {head.geometry.name}"
        yield replace(question, pair=changed, change=change)


def _lower_min_concurrency(question: _Question) -> Iterator[_Question]:
    limits = question.pair.limits

    def at(requests: int) -> _Question:
        change = f"serving.minConcurrency: {requests}"
        return question.with_limits(change, replace(limits, min_concurrency=requests))

    yield from _largest_accepted(at, below=limits.min_concurrency)


def _shorter_length(question: _Question) -> Iterator[_Question]:
    limits = question.pair.limits

    def at(blocks: int) -> _Question:
        length = blocks * limits.block_size
        return question.with_limits(f"serving.maxModelLen: {length}", replace(limits, max_model_len=length))

    yield from _largest_accepted(at, below=ceil_div(limits.max_model_len, limits.block_size))


def _largest_accepted(at: Callable[[int], _Question], below: int) -> Iterator[_Question]:
    """Yield the question at the largest value that fits, then at the largest that is tight.

    Found by bisection: what fits at a value fits at every smaller one.
    """
    for accepted in ((Verdict.FITS,), (Verdict.FITS, Verdict.TIGHT)):
        good, bad = 0, below
        while bad - good > 1:
            middle = (good + bad) // 2
            row = at(middle).best_row()
            if row is not None and row.budget.verdict in accepted:
                good = middle
            else:
                bad = middle
        if good > 0:
            yield at(good)


def _no_draft(question: _Question) -> Iterator[_Question]:
    pair = question.pair
    if pair.draft is not None or pair.method == Method.MTP:
        alone = replace(pair, draft=None, draft_precision=None, method=Method.NONE, num_speculative_tokens=0)
        yield replace(question, pair=alone, change=f"speculation.method: {Method.NONE}")
