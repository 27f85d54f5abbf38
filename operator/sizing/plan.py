"""Plan a pair: choose where it runs, explain why, and suggest changes if it does not fit.

Changes are other settings, products, checkpoints and drafts. The planner tries the least disruptive changes first.
It changes each setting in its smallest steps first, and tries single changes before pairs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, combinations
from typing import Final

from specdecode_operator.enums import FP8_ELEMENT_BYTES, SIXTEEN_BIT_BYTES, Dtype, Knowledge, Method, Precision
from specdecode_operator.sizing.arithmetic import GIB, ceil_div
from specdecode_operator.sizing.catalogue import find_entry, find_geometry, known_models, published_heads
from specdecode_operator.sizing.devices import PRODUCT_FIELD
from specdecode_operator.sizing.errors import GeometryError, SizingError
from specdecode_operator.sizing.families.architectures import head_from_config
from specdecode_operator.sizing.families.draft_heads import method_of_head
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.kernel_support import (
    NOTHING_NAMED,
    ONLINE_PRECISIONS,
    Available,
    checkpoint_at,
    served_precision,
)
from specdecode_operator.sizing.memory.budget import Budget, Term, Verdict, estimate_on_cpu
from specdecode_operator.sizing.pair import (
    PIPELINE_FIELD,
    TENSOR_FIELD,
    TENSOR_ONLY,
    EngineLimits,
    Pair,
    Parallelism,
    effective_batch,
    without_speculation,
)
from specdecode_operator.sizing.placement import GpuPool, Row, capacity_phrase, cpu_sentence, gpu_sentence
from specdecode_operator.sizing.quantization_matrix import (
    PLACE_ONLY,
    PlanOptions,
    candidate_rows,
    choice_phrase,
    missing_checkpoint,
    quantization_matrix,
    selection,
    severity,
)
from specdecode_operator.sizing.result_cache import MEMO_SIZE
from specdecode_operator.sizing.tensor_parallel import supported_tensors
from specdecode_operator.sizing.weights import parameter_count


@dataclass(frozen=True)
class DraftHead:
    """A head that was trained for one target."""

    method: str  # eagle or eagle3
    geometry: ModelGeometry  # Its shape


@dataclass(frozen=True)
class Alternatives:
    """What is known to exist beside the models of a pair."""

    available: Available = NOTHING_NAMED  # Other checkpoints that the user named
    # Models that could draft in place of the pair's, largest first; empty for those of the catalogue
    smaller_drafts: tuple[ModelGeometry, ...] = ()
    heads: tuple[DraftHead, ...] = ()  # Heads made for the pair's target


NO_ALTERNATIVES: Final = Alternatives()
"""Nothing but what the catalogue holds."""


def alternatives_to(pair: Pair, available: Available) -> Alternatives:
    """Return what is known to exist beside the models of a pair: what the user named, and heads of the catalogue."""
    return Alternatives(available, heads=known_heads(pair.target.name))


@lru_cache(maxsize=MEMO_SIZE)
def known_heads(target_id: str) -> tuple[DraftHead, ...]:
    """Return the published heads that were made for the target with exactly this hub id, the first of each size.

    Their shapes are those that their makers' training configurations say.
    """
    by_size: dict[int, DraftHead] = {}
    for published in published_heads():
        entry = find_entry(published.head) if target_id in published.targets else None
        if entry is not None:
            geometry = head_from_config(published.head, entry.config, published.method)
            # To the budget a second head of the same size is the same answer.
            by_size.setdefault(parameter_count(geometry), DraftHead(published.method, geometry))
    return tuple(by_size.values())


def smaller_drafts(target: ModelGeometry, draft: ModelGeometry) -> tuple[ModelGeometry, ...]:
    """Return the catalogue's models that could draft in place of this one, largest first.

    They have fewer parameters than the draft, the target's architecture and
    vocabulary, come from the same organisation, and are instruction-tuned
    if the draft is. A quantized checkpoint is never proposed.
    """
    limit = parameter_count(draft)
    found = [
        geometry
        for model_id in known_models()
        if _is_alike(model_id, draft.name)
        if (geometry := _geometry_or_none(model_id)) is not None
        if geometry.architecture == target.architecture
        and geometry.vocab_size == target.vocab_size
        and geometry.checkpoint is None
        and geometry.head is None
        and parameter_count(geometry) < limit
    ]
    return tuple(sorted(found, key=lambda geometry: (-parameter_count(geometry), geometry.name)))


def matching_drafts(target: ModelGeometry, draft: ModelGeometry) -> tuple[ModelGeometry, ...]:
    """Return the catalogue's models with the target's vocabulary that could draft in place of a draft, smallest first.

    They come from the maker of one of the two, and have at most half of the target's parameters.
    """
    limit = parameter_count(target) // 2
    found = [
        geometry
        for model_id in known_models()
        if _is_alike(model_id, target.name) or _is_alike(model_id, draft.name)
        if (geometry := _geometry_or_none(model_id)) is not None
        if geometry.vocab_size == target.vocab_size
        and geometry.checkpoint is None
        and method_of_head(geometry) is None
        and parameter_count(geometry) <= limit
    ]
    return tuple(sorted(found, key=lambda geometry: (parameter_count(geometry), geometry.name)))


def _is_alike(model_id: str, draft_id: str) -> bool:
    organisation = draft_id.partition("/")[0]
    return model_id.partition("/")[0] == organisation and _is_tuned(model_id) == _is_tuned(draft_id)


def _is_tuned(model_id: str) -> bool:
    return model_id.lower().endswith(("-instruct", "-it", "-chat"))


def _geometry_or_none(model_id: str) -> ModelGeometry | None:
    """Return the geometry, or None if sizing does not know it exactly."""
    try:
        geometry = find_geometry(model_id)
    except GeometryError:
        return None
    return geometry if geometry is None or geometry.knowledge is Knowledge.EXACT else None


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


_NOTABLY_LONGER: Final = 1.25
"""By how much longer requests may get before a second setting beside their length is worth a line: our own choice."""

_SETTINGS: Final = (more_utilization, fewer_batched_tokens, fewer_sequences)
"""Settings of the engine that cost no quality."""

_FROM_WORST: Final = (Verdict.DOES_NOT_FIT, Verdict.TIGHT, Verdict.FITS)
_BEST: Final = _FROM_WORST.index(Verdict.FITS)

Admit = Callable[[Pair, Changes], Changes | None]
"""Whether a pair may be served after changes: those, with what has to go along; None where it would be refused."""


def all_admitted(_: Pair, asked: Changes) -> Changes:
    """Admit every change as it is."""
    return asked


@dataclass(frozen=True)
class Fix:
    """One change, or two that go together, that makes it fit."""

    changes: Changes  # Fields and their new values
    verdict: Verdict  # What the plan would say then
    # KV cache tokens and full-length requests it would have then
    tokens: int
    concurrency: float
    effect: str  # What the KV cache would hold, and where
    # By how much the change widens, on each GPU, what is left for the KV cache over what is needed of it
    gained_bytes: int = 0

    @property
    def change(self) -> str:
        """Fields and new values in words, such as ``target.quantization: FP8``."""
        return ", ".join(map(str, self.changes))

    @property
    def sentence(self) -> str:
        """The change and its effect."""
        return f"{self.change} gives {self.effect}"


def find_fixes(  # noqa: PLR0913, PLR0917 (one fact each)
    pair: Pair,
    pools: Sequence[GpuPool],
    tensor: int | None,
    chosen: Row,
    alternatives: Alternatives = NO_ALTERNATIVES,
    admit: Admit = all_admitted,
    options: PlanOptions = PLACE_ONLY,
) -> tuple[Fix, ...]:
    """Return what makes the pair fit, least harm first; what ends tight says so.

    First settings that cost no quality, alone and two together, then
    precision (the draft's before the KV cache's before the target's: the
    draft cannot change the output), then what the service promises, then
    hardware, then another draft or none. Two settings are only named where
    they end better than each alone, a precision that needs a checkpoint only
    where the user has one, and nothing that ``admit`` refuses. What ``options``
    leave open stays open after a change.
    """
    question = Question(pair, tuple(pools), tensor, replace(options, spread=chosen.spread))
    search = _Search(question, chosen, admit)
    found = [
        *map(search.smallest, _SETTINGS),
        search.together(combinations(_SETTINGS, 2)),
        search.most_room(),
        search.smallest(partial(quantized_draft, alternatives=alternatives)),
        search.smallest(kv_fp8),
        search.smallest(sixteen_bits),
        search.together((kv_fp8, setting) for setting in _SETTINGS),
        search.smallest(partial(quantized_target, alternatives=alternatives)),
        search.smallest(lower_min_concurrency),
        *search.lengths((highest_utilization, kv_fp8)),
        search.smallest(more_of_these),
        search.smallest(other_products),
        search.smallest(partial(smaller_draft, alternatives=alternatives)),
        search.smallest(own_layers),
        search.smallest(partial(head, alternatives=alternatives)),
        search.smallest(no_draft),
    ]
    return tuple({fix.change: fix for fix in found if fix is not None}.values())


class _Search:
    """Tries changes of a question; each kind is looked for once."""

    def __init__(self, question: Question, chosen: Row, admit: Admit) -> None:
        self._question = question
        self._chosen = chosen
        self._admit = admit
        self._alone: dict[Kind, Fix | None] = {}

    def smallest(self, kind: Kind) -> Fix | None:
        """Return the first change of a kind that fits, or else the first that is tight."""
        if kind not in self._alone:
            self._alone[kind] = self._first(kind)
        return self._alone[kind]

    def together(self, pairs: Iterable[tuple[Kind, Kind]]) -> Fix | None:
        """Return the first two kinds of change that end better together than each alone."""
        for first, second in pairs:
            alone = max(_rank(self.smallest(first)), _rank(self.smallest(second)))
            if alone < _BEST and (fix := self._first(both(first, second))) and _rank(fix) > alone:
                return fix
        return None

    def most_room(self) -> Fix | None:
        """Return all that settings can give without cost to quality, where no single one of them suffices."""
        alone = map(self.smallest, (more_utilization, fewer_batched_tokens))
        fix = None if _BEST in map(_rank, alone) else self._first(most_room)
        return fix if _rank(fix) == _BEST else None

    def lengths(self, partners: Sequence[Kind]) -> Iterator[Fix]:
        """Yield the longest requests that fit, alone and beside settings that do not suffice but allow longer ones."""
        longest = 0.0
        insufficient = [each for each in partners if _rank(self.smallest(each)) < _BEST]
        for kind in (shorter_length, *(both(shorter_length, each) for each in insufficient)):
            fix = self._first(kind)
            if fix is not None and _length(fix) >= longest * _NOTABLY_LONGER:
                longest = _length(fix)
                yield fix

    def _first(self, kind: Kind) -> Fix | None:
        tight = None
        for question in kind(self._question):
            fix = self._tried(question)
            if fix is not None and fix.verdict is Verdict.FITS:
                return fix
            tight = tight or fix
        return tight

    def _tried(self, question: Question) -> Fix | None:
        """Return the fix that a change is; None where it does not fit, or would be refused."""
        row = question.best_row()
        if row is None or row.budget.verdict is Verdict.DOES_NOT_FIT:
            return None
        admitted = self._admit(question.pair, question.changes)
        return None if admitted is None else _fix(admitted, question.pair, row, self._chosen)


def _fix(admitted: Changes, pair: Pair, row: Row, chosen: Row) -> Fix:
    capacity = capacity_phrase(row.budget, pair.limits.max_model_len, row.split)
    same_place = (row.product, row.split) == (chosen.product, chosen.split)
    place = "" if same_place else f" on {row.place}"
    tight = " (tight)" if row.budget.verdict is Verdict.TIGHT else ""
    return Fix(
        changes=admitted,
        verdict=row.budget.verdict,
        tokens=row.budget.kv_cache_tokens,
        concurrency=row.budget.max_concurrency,
        effect=f"{capacity}{place}{tight}",
        gained_bytes=_spare_bytes(row) - _spare_bytes(chosen),
    )


def _spare_bytes(row: Row) -> int:
    """Return what is left for the KV cache over what is needed of it; negative where it lacks."""
    return row.budget.available_kv_bytes - row.budget.needed_kv_bytes


def _rank(fix: Fix | None) -> int:
    return 0 if fix is None else _FROM_WORST.index(fix.verdict)


def _length(fix: Fix) -> int:
    return next(each.value for each in fix.changes if each.field == LENGTH_FIELD and isinstance(each.value, int))


NO_CHANGE_HELPS: Final = "no single change and no two settings make it fit"

CPU_PRODUCT: Final = "CPU"
"""What a row calls its product where there is no GPU."""


@dataclass(frozen=True)
class Plan:
    """The answer to where a pair runs."""

    verdict: Verdict  # Verdict of the chosen row
    chosen: Row  # The row to run on, or the nearest one when none fits
    rows: tuple[Row, ...]  # All candidates, best first; the first is the chosen one
    fixes: tuple[Fix, ...]  # Single changes that make it fit, least harm first; empty when it fits
    explanation: str  # The choice in one sentence, without a full stop
    choice: str = ""  # Why these precisions; empty where there was nothing to choose


def plan_on_gpus(
    pair: Pair,
    pools: Iterable[GpuPool],
    tensor: int | None,
    options: PlanOptions = PLACE_ONLY,
    admit: Admit | None = all_admitted,
) -> Plan:
    """Return the plan for a pair on the nodes that there are.

    With a tensor of None every supported power of two up to the GPUs of a
    node is tried: layers are cut over a network only where users say so. Pools of unknown products are passed over.
    Only changes that ``admit`` lets through are proposed, with None nothing is looked for.

    Raises
    ------
    PlanError
        When no pool can be sized, or the models cannot be split as asked.
    """
    pools = tuple(pools)
    rows = candidate_rows(pair, pools, tensor, options)
    chosen = rows[0]
    fixes: tuple[Fix, ...] = ()
    if admit is not None and chosen.budget.verdict is Verdict.DOES_NOT_FIT:
        alternatives = alternatives_to(pair, options.available)
        fixes = find_fixes(pair, pools, tensor, chosen, alternatives, admit, options)
    choice = choice_phrase(chosen, options.objective) if options.target or options.draft else ""
    if choice and chosen.budget.verdict is Verdict.DOES_NOT_FIT:
        all_precisions = quantization_matrix(pair, pools, tensor, options.available, spread=options.spread)
        choice = "; ".join(filter(None, [choice, missing_checkpoint(all_precisions, options.objective)]))
    sentence = f"{gpu_sentence(chosen, pair.limits)}{f'; {choice}' if choice else ''}"
    return replace(_plan(rows, fixes, sentence), choice=choice)


def keep(plan: Plan, pair: Pair, kept: Row) -> Plan:
    """Return the plan with another of its rows in force, and what it would choose by itself."""
    if kept == plan.chosen:
        return plan
    rows = (kept, *(row for row in plan.rows if row != kept))
    sentence = f"{gpu_sentence(kept, pair.limits)}; it is in force and kept, a new plan would be: {plan.explanation}"
    return replace(plan, verdict=kept.budget.verdict, chosen=kept, rows=rows, fixes=(), explanation=sentence)


def pair_at(pair: Pair, available: Available, target: Precision, draft: Precision | None) -> Pair:
    """Return the pair with the checkpoints that are loaded to serve it at these precisions."""
    drafting = pair.draft
    if drafting is not None and draft is not None:
        drafting = checkpoint_at(drafting, available.draft, draft)
    return replace(
        pair,
        target=checkpoint_at(pair.target, available.target, target),
        target_precision=target,
        draft=drafting,
        draft_precision=draft,
    )


def plan_on_cpu(pair: Pair, memory_bytes: int, kv_cache_bytes: int, tensor: int = 1) -> Plan:
    """Return the plan for one replica on CPU with so much memory and KV space, over so many ranks."""
    budget = estimate_on_cpu(pair, memory_bytes, kv_cache_bytes, tensor)
    rows = (Row(CPU_PRODUCT, tensor, budget, pair.target_precision, pair.draft_precision),)
    fixes = (_cpu_fix(pair, budget, tensor),) if budget.verdict is Verdict.DOES_NOT_FIT else ()
    return _plan(rows, fixes, cpu_sentence(budget, pair.limits, tensor))


def least_change(fixes: Sequence[Fix]) -> Fix | None:
    """Return the smallest change that fits, or else the smallest that is tight."""
    return next((fix for fix in fixes if fix.verdict is Verdict.FITS), fixes[0] if fixes else None)


def _plan(rows: tuple[Row, ...], fixes: tuple[Fix, ...], sentence: str) -> Plan:
    verdict = rows[0].budget.verdict
    least = least_change(fixes)
    if least is not None:
        sentence += f"; smallest change: {least.sentence}"
    elif verdict is Verdict.DOES_NOT_FIT:
        sentence += f"; {NO_CHANGE_HELPS}"
    return Plan(verdict, rows[0], rows, fixes, sentence)


def _cpu_fix(pair: Pair, budget: Budget, tensor: int) -> Fix:
    """Return the smallest whole GiB of KV space, a whole number a rank, and memory that fit."""
    changes = []
    kv_cache_bytes = budget.available_kv_bytes * tensor
    if budget.binding_term is Term.KV_CACHE:
        kv_cache_bytes = ceil_div(budget.needed_kv_bytes, GIB) * GIB * tensor
        changes.append(Change("accelerator.kvCacheGiB", kv_cache_bytes // GIB))
    memory_bytes = budget.total_bytes * tensor
    beside_kv_bytes = budget.requested_bytes - budget.available_kv_bytes + budget.margin_bytes
    wanted_bytes = beside_kv_bytes * tensor + kv_cache_bytes
    if memory_bytes < wanted_bytes:
        memory_bytes = ceil_div(wanted_bytes, GIB) * GIB
        changes.append(Change("accelerator.memoryGiB", memory_bytes // GIB))
    fixed = estimate_on_cpu(pair, memory_bytes, kv_cache_bytes, tensor)
    return Fix(
        changes=tuple(changes),
        verdict=fixed.verdict,
        tokens=fixed.kv_cache_tokens,
        concurrency=fixed.max_concurrency,
        effect=capacity_phrase(fixed, pair.limits.max_model_len),
    )


__all__ = [
    "CPU_PRODUCT",
    "PLACE_ONLY",
    "Fix",
    "GpuPool",
    "Plan",
    "PlanOptions",
    "Row",
    "keep",
    "pair_at",
    "plan_on_cpu",
    "plan_on_gpus",
    "selection",
]
