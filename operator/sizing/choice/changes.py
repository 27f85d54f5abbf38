"""What could be changed in a pair or its place: one setting after another, each from its smallest step on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

from specdecode_operator.sizing.base.errors import SizingError
from specdecode_operator.sizing.base.units import ceil_div
from specdecode_operator.sizing.choice.candidates import PlanOptions, candidate_rows
from specdecode_operator.sizing.choice.node_placement import GpuPool
from specdecode_operator.sizing.choice.other_models import Alternatives, smaller_drafts
from specdecode_operator.sizing.choice.plan_row import PRODUCT_FIELD, Row
from specdecode_operator.sizing.choice.precision_rules import ONLINE_PRECISIONS, served_precision
from specdecode_operator.sizing.choice.ranking import severity
from specdecode_operator.sizing.memory.budget import Verdict
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.pair.pair import (
    PIPELINE_FIELD,
    TENSOR_FIELD,
    TENSOR_ONLY,
    EngineLimits,
    Pair,
    Parallelism,
    effective_batch,
    without_speculation,
)
from specdecode_operator.sizing.weights.divisibility import supported_tensors
from specdecode_operator.vocabulary import FP8_ELEMENT_BYTES, SIXTEEN_BIT_BYTES, Dtype, Method, Precision

DEFAULT_UTILIZATION_PERCENT: Final = 92
"""vLLM 0.32's own default (config/cache.py), known to leave enough for what is outside the budget."""

HIGHEST_UTILIZATION_PERCENT: Final = 95
"""The most that is ever proposed. What the engine takes outside the budget is counted (slack in
docs/explanation/sizing.md), other processes are not: 5 % of an 80 GB GPU, 4 GiB, are left to both."""

LEAST_BATCHED_TOKENS: Final = 1024
"""The fewest tokens a step that are proposed, our own choice: prompts are read in parts of that size, one a step."""

LENGTH_FIELD: Final = "serving.maxModelLen"
"""Where users say how long requests may get."""

_GO_WITH_STAGES: Final = frozenset({Method.NONE, Method.NGRAM})
"""Methods that every version combines with pipeline stages."""

_PROPOSED_PRODUCTS: Final = ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H200")
"""What people can be told to get: not every product that can be sized."""

Value = int | str | list[str] | dict[str, str] | None


@dataclass(frozen=True)
class Change:
    """One field and what to write there."""

    field: str  # Such as ``serving.maxNumSeqs``
    value: Value  # None: the field is to be removed

    def __str__(self) -> str:
        """Return it as YAML has it."""
        match self.value:
            case None:
                return f"no {self.field}"
            case list():
                return f"{self.field}: [{', '.join(self.value)}]"
            case dict():
                return f"{self.field}: {{{', '.join(f'{key}: {value}' for key, value in self.value.items())}}}"
            case _:
                return f"{self.field}: {self.value}"


Changes = tuple[Change, ...]


@dataclass(frozen=True)
class Question:
    """What is planned; a change is another question with its own description."""

    pair: Pair
    pools: tuple[GpuPool, ...]
    tensor: int | None
    options: PlanOptions
    changes: Changes = ()

    @property
    def spread(self) -> Parallelism:
        """How a replica is spread beyond tensor parallelism."""
        return self.options.spread

    def best_row(self) -> Row | None:
        """Return the row that the plan would choose; None where there is none."""
        try:
            return candidate_rows(self.pair, self.pools, self.tensor, self.options)[0]
        except SizingError:
            return None

    def with_limits(self, change: Change, limits: EngineLimits) -> "Question":
        """Return the question under other limits."""
        return self.with_pair(replace(self.pair, limits=limits), change)

    def with_pair(self, pair: Pair, *changes: Change) -> "Question":
        """Return the question of another pair."""
        return replace(self, pair=pair, changes=(*self.changes, *changes))

    def with_draft(self, pair: Pair, *changes: Change) -> "Question":
        """Return the question of a pair with another draft, of which no checkpoints were named."""
        available = replace(self.options.available, draft=())
        options = replace(self.options, draft=frozenset(), available=available)
        return replace(self.with_pair(pair, *changes), options=options)


Kind = Callable[[Question], Iterator[Question]]
"""Steps of one kind, the smallest change first."""


def both(first: Kind, second: Kind) -> Kind:
    """Return the steps of two kinds together: for each of the second those of the first."""

    def steps(question: Question) -> Iterator[Question]:
        for changed in second(question):
            for changed_twice in first(changed):
                added = changed_twice.changes[len(changed.changes) :]
                yield replace(changed_twice, changes=(*added, *changed.changes))

    return steps


def more_utilization(question: Question) -> Iterator[Question]:
    """Up to the highest that is safe; from above it, down to the default first."""
    limits = question.pair.limits
    for percent in range(DEFAULT_UTILIZATION_PERCENT, HIGHEST_UTILIZATION_PERCENT + 1):
        present = limits.memory_utilization_percent
        if percent > present or present > HIGHEST_UTILIZATION_PERCENT:
            change = Change("serving.memoryUtilizationPercent", percent)
            yield question.with_limits(change, replace(limits, memory_utilization_percent=percent))


def fewer_batched_tokens(question: Question) -> Iterator[Question]:
    """So many that as many requests as before decode in one step: only prompts are then read in smaller parts."""
    limits = question.pair.limits
    tokens, batch = limits.max_num_batched_tokens // 2, effective_batch(question.pair)
    while tokens >= LEAST_BATCHED_TOKENS:
        change = Change("serving.maxNumBatchedTokens", tokens)
        changed = question.with_limits(change, replace(limits, max_num_batched_tokens=tokens))
        if effective_batch(changed.pair) < batch:
            return
        yield changed
        tokens //= 2


def highest_utilization(question: Question) -> Iterator[Question]:
    """The highest that is safe, at once."""
    yield from list(more_utilization(question))[-1:]


def most_room(question: Question) -> Iterator[Question]:
    """The highest utilization and the fewest batched tokens together."""
    highest = list(both(more_utilization, fewer_batched_tokens)(question))
    yield from highest[-1:]


def fewer_sequences(question: Question) -> Iterator[Question]:
    """Half as many, and so on."""
    limits = question.pair.limits
    sequences = limits.max_num_seqs // 2
    while sequences >= limits.min_concurrency:
        change = Change("serving.maxNumSeqs", sequences)
        yield question.with_limits(change, replace(limits, max_num_seqs=sequences))
        sequences //= 2


def quantized_draft(question: Question, alternatives: Alternatives) -> Iterator[Question]:
    """The draft harder quantized: it cannot change the output."""
    pair = question.pair
    # Where the plan may choose, it has tried all that can be had; the same holds for the target.
    if pair.draft is None or pair.method != Method.DRAFT_MODEL or question.options.draft:
        return
    for geometry, precision in _harder(pair.draft, pair.draft_precision, alternatives.available.draft):
        changed = replace(pair, draft=geometry, draft_precision=precision)
        yield question.with_pair(changed, Change("speculation.draft.quantization", precision.value))


def kv_fp8(question: Question) -> Iterator[Question]:
    """The KV cache in FP8, where neither the spec nor the checkpoint says so already."""
    limits = question.pair.limits
    present = limits.kv_cache_element_bytes or question.pair.target.cache_element_bytes
    if present != FP8_ELEMENT_BYTES:
        change = Change("serving.kvCacheDtype", "fp8")
        yield question.with_limits(change, replace(limits, kv_cache_element_bytes=FP8_ELEMENT_BYTES))


def sixteen_bits(question: Question) -> Iterator[Question]:
    """What is not quantized in 16 bits, where the spec asks for float32."""
    limits = question.pair.limits
    if limits.dtype_bytes != SIXTEEN_BIT_BYTES:
        change = Change("serving.dtype", Dtype.AUTO.value)
        yield question.with_limits(change, replace(limits, dtype_bytes=SIXTEEN_BIT_BYTES))


def quantized_target(question: Question, alternatives: Alternatives) -> Iterator[Question]:
    """The target harder quantized."""
    pair = question.pair
    if question.options.target:
        return
    for geometry, precision in _harder(pair.target, pair.target_precision, alternatives.available.target):
        changed = replace(pair, target=geometry, target_precision=precision)
        yield question.with_pair(changed, Change("target.quantization", precision.value))


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


def more_gpus(question: Question) -> Iterator[Question]:
    """More GPUs of one node."""
    # Without a tensor of the user's every split was tried already.
    if question.tensor is None:
        return
    widest = max(pool.gpus_per_node for pool in question.pools)
    for size in _supported(question):
        if question.tensor < size <= widest:
            yield replace(question, tensor=size, changes=(Change(TENSOR_FIELD, size),))


def more_nodes(question: Question) -> Iterator[Question]:
    """Stages on nodes of their own; layers over several where not all versions combine the method with stages."""
    pair, largest = question.pair, max(question.pools, key=lambda pool: (pool.gpus_per_node, pool.nodes))
    if question.spread != TENSOR_ONLY:
        return
    if pair.method in _GO_WITH_STAGES:
        tensor = largest.gpus_per_node
        for stages in range(2, largest.nodes + 1):
            changes = (Change(TENSOR_FIELD, tensor), Change(PIPELINE_FIELD, stages))
            options = replace(question.options, spread=Parallelism(pipeline=stages))
            yield replace(question, tensor=tensor, options=options, changes=changes)
    else:
        for size in _supported(question):
            if size > max(largest.gpus_per_node, question.tensor or 0):
                yield replace(question, tensor=size, changes=(Change(TENSOR_FIELD, size),))


def more_of_these(question: Question) -> Iterator[Question]:
    """More GPUs of a node, then more nodes."""
    return chain(more_gpus(question), more_nodes(question))


def _supported(question: Question) -> tuple[int, ...]:
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


def product_change(product: str) -> Change:
    """Return the change to another product."""
    return Change(PRODUCT_FIELD, [product])


def other_products(question: Question) -> Iterator[Question]:
    """Products that are not there."""
    present = {pool.product for pool in question.pools}
    gpus_per_node, nodes = max((pool.gpus_per_node, pool.nodes) for pool in question.pools)
    for product in _PROPOSED_PRODUCTS:
        if product not in present:
            pools = (GpuPool(product, gpus_per_node, nodes),)
            yield replace(question, pools=pools, changes=(product_change(product),))


def smaller_draft(question: Question, alternatives: Alternatives) -> Iterator[Question]:
    """Other models that can draft, the largest first."""
    pair = question.pair
    if pair.draft is None or pair.method != Method.DRAFT_MODEL:
        return
    for geometry in alternatives.smaller_drafts or smaller_drafts(pair.target, pair.draft):
        changed = replace(pair, draft=geometry, draft_precision=Precision.BF16)
        yield question.with_draft(changed, Change("speculation.draft.model", geometry.name))


def own_layers(question: Question) -> Iterator[Question]:
    """The target's own layers for multi-token prediction, where its checkpoint holds some."""
    pair = question.pair
    if pair.method == Method.DRAFT_MODEL and pair.target.mtp_block:
        changed = replace(pair, method=Method.MTP, draft=None, draft_precision=None)
        yield question.with_draft(changed, Change("speculation.method", Method.MTP.value))


def head(question: Question, alternatives: Alternatives) -> Iterator[Question]:
    """Heads that were made for the target."""
    pair = question.pair
    if pair.method != Method.DRAFT_MODEL:
        return
    for each in alternatives.heads:
        changed = replace(pair, method=each.method, draft=each.geometry, draft_precision=None)
        method = Change("speculation.method", Method(each.method).value)
        yield question.with_draft(changed, method, Change("speculation.draft.model", each.geometry.name))


def no_draft(question: Question) -> Iterator[Question]:
    """No speculation at all."""
    pair = question.pair
    if pair.draft is not None or pair.method == Method.MTP:
        yield question.with_draft(without_speculation(pair), Change("speculation.method", Method.NONE.value))


def lower_min_concurrency(question: Question) -> Iterator[Question]:
    """The most requests of full length that fit at once."""
    limits = question.pair.limits

    def at(requests: int) -> Question:
        return question.with_limits(
            Change("serving.minConcurrency", requests), replace(limits, min_concurrency=requests)
        )

    yield from _largest_accepted(at, below=limits.min_concurrency)


def shorter_length(question: Question) -> Iterator[Question]:
    """The longest requests that fit."""
    limits = question.pair.limits

    def at(blocks: int) -> Question:
        length = blocks * limits.block_size
        return question.with_limits(Change(LENGTH_FIELD, length), replace(limits, max_model_len=length))

    yield from _largest_accepted(at, below=ceil_div(limits.max_model_len, limits.block_size))


def _largest_accepted(at: Callable[[int], Question], below: int) -> Iterator[Question]:
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
