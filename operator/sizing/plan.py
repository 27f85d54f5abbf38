"""Plan a pair: choose where it runs, explain why, and suggest changes if it does not fit.

Changes are other settings, products, checkpoints and drafts. The planner tries the least disruptive changes first.
It changes each setting in its smallest steps first, and tries single changes before pairs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any, Final

from specdecode_operator.enums import FP8_ELEMENT_BYTES, SIXTEEN_BIT_BYTES, Dtype, Method, Precision
from specdecode_operator.sizing.arithmetic import GIB, ceil_div
from specdecode_operator.sizing.devices import PRODUCT_FIELD, mig_profile
from specdecode_operator.sizing.errors import SizingError
from specdecode_operator.sizing.kernel_support import (
    ONLINE_PRECISIONS,
    Available,
    checkpoint_at,
    served_precision,
)
from specdecode_operator.sizing.memory.budget import Budget, Term, Verdict, estimate_on_cpu
from specdecode_operator.sizing.other_drafts import DraftHead, known_heads, smaller_drafts
from specdecode_operator.sizing.pair import (
    PIPELINE_FIELD,
    TENSOR_FIELD,
    TENSOR_ONLY,
    Pair,
    Parallelism,
    effective_batch,
    without_speculation,
)
from specdecode_operator.sizing.placement import CPU_PRODUCT, GpuPool, Row, capacity_phrase, cpu_sentence, gpu_sentence
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
from specdecode_operator.sizing.tensor_parallel import supported_tensors

DEFAULT_UTILIZATION_PERCENT: Final = 92
"""vLLM 0.32's own default (config/cache.py), which leaves enough memory outside the budget."""

HIGHEST_UTILIZATION_PERCENT: Final = 95
"""Highest percentage that is proposed. Sizing counts what the engine takes outside the budget (slack in
docs/design/sizing-activation.md), but not other processes. 5 % of an 80 GB GPU, 4 GiB, are left to both."""

_LEAST_BATCHED_TOKENS: Final = 1024
"""Fewest tokens per step that are proposed, our own choice. Prompts are read in parts of this size, one per step."""

_NOTABLY_LONGER: Final = 1.25
"""Minimum ratio of lengths at which a second setting is listed for a longer length, our own choice."""

_LENGTH_FIELD: Final = "serving.maxModelLen"

_PROPOSED_PRODUCTS: Final = ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H200")
"""Products that are proposed to users, a subset of those that can be sized."""

NO_CHANGE_HELPS: Final = "no single change and no two settings make it fit"


Value = int | str | list[str] | dict[str, str] | None


@dataclass(frozen=True)
class Change:
    """One field and its new value."""

    field: str  # Such as ``serving.maxNumSeqs``
    value: Value  # None: remove the field

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
    """Input of a plan; a change is another question with its own description."""

    pair: Pair
    pools: tuple[GpuPool, ...]
    tensor: int | None
    options: PlanOptions
    changes: Changes = ()

    def best_row(self) -> Row | None:
        """Return the row that the plan would choose."""
        try:
            return candidate_rows(self.pair, self.pools, self.tensor, self.options)[0]
        except SizingError:
            return None

    def with_limits(self, field: str, value: Value, **limits: Any) -> "Question":
        """Return the question under other limits."""
        return self.with_pair(replace(self.pair, limits=replace(self.pair.limits, **limits)), Change(field, value))

    def with_pair(self, pair: Pair, *changes: Change) -> "Question":
        """Return the question of another pair."""
        return replace(self, pair=pair, changes=(*self.changes, *changes))

    def with_draft(self, pair: Pair, **changes: str) -> "Question":
        """Return the question of a pair with another draft, by fields of spec.speculation, without its checkpoints."""
        available = replace(self.options.available, draft=())
        options = replace(self.options, draft=frozenset(), available=available)
        named = (Change(f"speculation.{field.replace('_', '.')}", value) for field, value in changes.items())
        return replace(self.with_pair(pair, *named), options=options)

    def with_tensor(self, size: int) -> "Question":
        """Return the question with another tensor parallelism, and no other change."""
        return replace(self, tensor=size, changes=(Change(TENSOR_FIELD, size),))


Kind = Callable[[Question], Iterator[Question]]
"""Steps of one kind, the smallest change first."""


def both(first: Kind, second: Kind) -> Kind:
    """Return the combined steps of two kinds: for each of the second those of the first."""

    def steps(question: Question) -> Iterator[Question]:
        for changed in second(question):
            for changed_twice in first(changed):
                added = changed_twice.changes[len(changed.changes) :]
                yield replace(changed_twice, changes=(*added, *changed.changes))

    return steps


def _last(kind: Kind) -> Kind:
    """Return only the largest step of a kind."""
    return lambda question: iter(list(kind(question))[-1:])


def _more_utilization(question: Question) -> Iterator[Question]:
    """Yield percentages up to the highest that is safe; from above it, down to the default first."""
    present = question.pair.limits.memory_utilization_percent
    for percent in range(DEFAULT_UTILIZATION_PERCENT, HIGHEST_UTILIZATION_PERCENT + 1):
        if percent > present or present > HIGHEST_UTILIZATION_PERCENT:
            yield question.with_limits(
                "serving.gpuMemoryUtilizationPercent", percent, memory_utilization_percent=percent
            )


def fewer_batched_tokens(question: Question) -> Iterator[Question]:
    """Halve the tokens while as many requests decode in one step, so that only prompts are read in smaller parts."""
    tokens, batch = question.pair.limits.max_num_batched_tokens // 2, effective_batch(question.pair)
    while tokens >= _LEAST_BATCHED_TOKENS:
        changed = question.with_limits("serving.maxNumBatchedTokens", tokens, max_num_batched_tokens=tokens)
        if effective_batch(changed.pair) < batch:
            return
        yield changed
        tokens //= 2


def _fewer_sequences(question: Question) -> Iterator[Question]:
    limits = question.pair.limits
    sequences = limits.max_num_seqs
    while (sequences := sequences // 2) >= limits.min_concurrency:
        yield question.with_limits("serving.maxNumSeqs", sequences, max_num_seqs=sequences)


def _quantized(question: Question, role: str) -> Iterator[Question]:
    """Yield harder quantizations of the target or the draft."""
    pair, options = question.pair, question.options
    model = pair.target if role == "target" else pair.draft
    # If the plan may choose, it has tried all available precisions.
    if model is None or getattr(options, role) or (role == "draft" and pair.method != Method.DRAFT_MODEL):
        return
    field = "target.quantization" if role == "target" else "speculation.draft.quantization"
    present = served_precision(model, getattr(pair, f"{role}_precision"))
    found = {served_precision(checkpoint, None): checkpoint for checkpoint in getattr(options.available, role)}
    # vLLM makes weights FP8 while loading only from 16 bits.
    if model.checkpoint is None and present is Precision.BF16:
        found = {**dict.fromkeys(ONLINE_PRECISIONS, model), **found}
    for precision in sorted(found, key=severity):
        if severity(precision) > severity(present):
            changed = replace(pair, **{role: found[precision], f"{role}_precision": precision})
            yield question.with_pair(changed, Change(field, precision.value))


def _kv_fp8(question: Question) -> Iterator[Question]:
    present = question.pair.limits.kv_cache_element_bytes or question.pair.target.cache_element_bytes
    if present != FP8_ELEMENT_BYTES:
        yield question.with_limits("serving.kvCacheDtype", "fp8", kv_cache_element_bytes=FP8_ELEMENT_BYTES)


def _sixteen_bits(question: Question) -> Iterator[Question]:
    if question.pair.limits.dtype_bytes != SIXTEEN_BIT_BYTES:
        yield question.with_limits("serving.dtype", Dtype.AUTO.value, dtype_bytes=SIXTEEN_BIT_BYTES)


def _more_of_these(question: Question) -> Iterator[Question]:
    """Yield more GPUs of a node, then more nodes.

    On nodes there are stages, or split layers if not all versions combine the method with stages.
    """
    pair, spread = question.pair, question.options.spread
    largest = max(question.pools, key=lambda pool: (pool.gpus_per_node, pool.nodes))
    version = pair.limits.engine_version
    supported = supported_tensors(pair.served, version, data=spread.data, expert=spread.expert)
    # Without a tensor of the user's every split was tried already.
    if question.tensor is not None:
        yield from (question.with_tensor(size) for size in supported if question.tensor < size <= largest.gpus_per_node)
    if spread != TENSOR_ONLY:
        return
    if pair.method not in (Method.NONE, Method.NGRAM):
        least = max(largest.gpus_per_node, question.tensor or 0)
        yield from (question.with_tensor(size) for size in supported if size > least)
        return
    for stages in range(2, largest.nodes + 1):
        changed = question.with_tensor(largest.gpus_per_node)
        options = replace(question.options, spread=Parallelism(pipeline=stages))
        yield replace(changed, options=options, changes=(*changed.changes, Change(PIPELINE_FIELD, stages)))


def product_change(product: str) -> Change:
    """Return the change to another product."""
    return Change(PRODUCT_FIELD, [product])


def _other_products(question: Question) -> Iterator[Question]:
    present = {pool.product for pool in question.pools}
    if any(map(mig_profile, present)):
        return  # The DeviceClass of a claim selects MIG devices, so another product alone would match none.
    gpus_per_node, nodes = max((pool.gpus_per_node, pool.nodes) for pool in question.pools)
    for product in _PROPOSED_PRODUCTS:
        if product not in present:
            pools = (GpuPool(product, gpus_per_node, nodes),)
            yield replace(question, pools=pools, changes=(product_change(product),))


def _other_drafts(question: Question, heads: Sequence[DraftHead], kind: str) -> Iterator[Question]:
    """Yield other ways to draft of one kind: a smaller model, the target's own MTP layers, or heads made for it."""
    pair = question.pair
    if pair.method != Method.DRAFT_MODEL:
        return
    if kind == "smaller" and pair.draft is not None:
        for geometry in smaller_drafts(pair.target, pair.draft):
            changed = replace(pair, draft=geometry, draft_precision=Precision.BF16)
            yield question.with_draft(changed, draft_model=geometry.name)
    if kind == "own" and pair.target.mtp_block:
        changed = replace(pair, method=Method.MTP, draft=None, draft_precision=None)
        yield question.with_draft(changed, method=Method.MTP.value)
    for head in heads if kind == "head" else ():
        changed = replace(pair, method=head.method, draft=head.geometry, draft_precision=None)
        yield question.with_draft(changed, method=Method(head.method).value, draft_model=head.geometry.name)


def _no_draft(question: Question) -> Iterator[Question]:
    pair = question.pair
    if pair.draft is not None or pair.method in (Method.MTP, Method.DSPARK):
        yield question.with_draft(without_speculation(pair), method=Method.NONE.value)


def _lower_min_concurrency(question: Question) -> Iterator[Question]:
    return _largest_accepted(
        lambda requests: question.with_limits("serving.minConcurrency", requests, min_concurrency=requests),
        below=question.pair.limits.min_concurrency,
    )


def _shorter_length(question: Question) -> Iterator[Question]:
    limits = question.pair.limits
    return _largest_accepted(
        lambda blocks: question.with_limits(
            _LENGTH_FIELD, blocks * limits.block_size, max_model_len=blocks * limits.block_size
        ),
        below=ceil_div(limits.max_model_len, limits.block_size),
    )


def _largest_accepted(at: Callable[[int], Question], below: int) -> Iterator[Question]:
    """Yield the question at the largest value that fits, then at the largest that is tight.

    Found by bisection: what fits at a value fits at every smaller one.
    """
    for accepted in ((Verdict.FITS,), (Verdict.FITS, Verdict.TIGHT)):
        good, bad = 0, below
        while bad - good > 1:
            middle = (good + bad) // 2
            row = at(middle).best_row()
            if row is not None and row.verdict in accepted:
                good = middle
            else:
                bad = middle
        if good > 0:
            yield at(good)


_SETTINGS: Final = (_more_utilization, fewer_batched_tokens, _fewer_sequences)
"""Settings of the engine that cost no quality."""

_FROM_WORST: Final = (Verdict.DOES_NOT_FIT, Verdict.TIGHT, Verdict.FITS)
_BEST: Final = _FROM_WORST.index(Verdict.FITS)

Admit = Callable[[Pair, Changes], Changes | None]
"""Return the changes of a pair, with those that have to go along; None if the changed pair would be rejected."""


def all_admitted(_: Pair, asked: Changes) -> Changes:
    """Admit every change as it is."""
    return asked


@dataclass(frozen=True)
class Fix:
    """One change, or two that go together, that makes it fit."""

    changes: Changes
    verdict: Verdict
    # KV cache tokens and full-length requests after the change
    tokens: int
    concurrency: float
    effect: str  # Capacity of the KV cache after the change, and where
    gained_bytes: int = 0  # Per GPU: gain of available minus needed KV cache

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
    heads: Sequence[DraftHead] = (),
    admit: Admit = all_admitted,
    options: PlanOptions = PLACE_ONLY,
) -> tuple[Fix, ...]:
    """Return the changes that make the pair fit, least disruptive first; those that end tight are marked.

    First come settings that cost no quality, single and in pairs. Then precision: the draft's before the KV cache's
    before the target's, because the draft cannot change the output. Then limits of the service, then hardware, then
    another draft or none. A pair of settings is only listed if it ends better than each of them, a precision that needs
    a checkpoint only if the user has one, and no change that ``admit`` rejects. Choices that ``options`` leave open
    stay open after a change.
    """
    search = _Search(Question(pair, tuple(pools), tensor, replace(options, spread=chosen.spread)), chosen, admit)
    found = [
        *map(search.smallest, _SETTINGS),
        search.together(combinations(_SETTINGS, 2)),
        search.most_room(),
        search.smallest(partial(_quantized, role="draft")),
        search.smallest(_kv_fp8),
        search.smallest(_sixteen_bits),
        search.together((_kv_fp8, setting) for setting in _SETTINGS),
        search.smallest(partial(_quantized, role="target")),
        search.smallest(_lower_min_concurrency),
        *search.lengths((_last(_more_utilization), _kv_fp8)),
        search.smallest(_more_of_these),
        search.smallest(_other_products),
        *(search.smallest(partial(_other_drafts, heads=heads, kind=kind)) for kind in ("smaller", "own", "head")),
        search.smallest(_no_draft),
    ]
    return tuple({fix.change: fix for fix in found if fix is not None}.values())


@dataclass
class _Search:
    """Tries changes of a question; each kind is tried once."""

    question: Question
    chosen: Row
    admit: Admit
    alone: dict[Kind, Fix | None] = field(default_factory=dict)

    def smallest(self, kind: Kind) -> Fix | None:
        """Return the first change of a kind that fits, or else the first that is tight."""
        if kind not in self.alone:
            self.alone[kind] = self.first(kind)
        return self.alone[kind]

    def together(self, pairs: Iterable[tuple[Kind, Kind]]) -> Fix | None:
        """Return the first two kinds of change that end better together than each alone."""
        for first, second in pairs:
            alone = max(_rank(self.smallest(first)), _rank(self.smallest(second)))
            if alone < _BEST and (fix := self.first(both(first, second))) and _rank(fix) > alone:
                return fix
        return None

    def most_room(self) -> Fix | None:
        """Return all that settings can give without cost to quality, if no single one of them suffices."""
        if _BEST in map(_rank, map(self.smallest, (_more_utilization, fewer_batched_tokens))):
            return None
        fix = self.first(_last(both(_more_utilization, fewer_batched_tokens)))
        return fix if _rank(fix) == _BEST else None

    def lengths(self, partners: Sequence[Kind]) -> Iterator[Fix]:
        """Yield the longest requests that fit, alone and beside settings that do not suffice but allow longer ones."""
        longest = 0.0
        insufficient = [each for each in partners if _rank(self.smallest(each)) < _BEST]
        for kind in (_shorter_length, *(both(_shorter_length, each) for each in insufficient)):
            fix = self.first(kind)
            if fix is None:
                continue
            length = next(each.value for each in fix.changes if each.field == _LENGTH_FIELD)
            if isinstance(length, int) and length >= longest * _NOTABLY_LONGER:
                longest = length
                yield fix

    def first(self, kind: Kind) -> Fix | None:
        """Return the same without the cache."""
        tight = None
        for question in kind(self.question):
            row = question.best_row()
            if row is None or row.verdict is Verdict.DOES_NOT_FIT:
                continue
            changes = self.admit(question.pair, question.changes)
            if changes is None:
                continue
            same_place = (row.product, row.split) == (self.chosen.product, self.chosen.split)
            place = "" if same_place else f" on {row.place}"
            if row.product != self.chosen.product and PRODUCT_FIELD not in {each.field for each in changes}:
                place += f" instead of {self.chosen.place}"
            fix = Fix(
                changes=changes,
                verdict=row.verdict,
                tokens=row.budget.kv_cache_tokens,
                concurrency=row.budget.max_concurrency,
                effect=capacity_phrase(row.budget, question.pair.limits.max_model_len, row.split)
                + place
                + (" (tight)" if row.verdict is Verdict.TIGHT else ""),
                gained_bytes=_spare_bytes(row) - _spare_bytes(self.chosen),
            )
            if fix.verdict is Verdict.FITS:
                return fix
            tight = tight or fix
        return tight


def _spare_bytes(row: Row) -> int:
    return row.budget.available_kv_bytes - row.budget.needed_kv_bytes


def _rank(fix: Fix | None) -> int:
    return 0 if fix is None else _FROM_WORST.index(fix.verdict)


@dataclass(frozen=True)
class Plan:
    """The chosen place of a pair, all candidates, and the changes that make it fit."""

    verdict: Verdict  # Verdict of the chosen row
    chosen: Row  # The row to run on, or the nearest one if none fits
    rows: tuple[Row, ...]  # All candidates, best first; the first is the chosen one
    fixes: tuple[Fix, ...]  # Single changes that make it fit, least harm first; empty if it fits
    explanation: str  # The choice in one sentence, without a full stop
    choice: str = ""  # Why these precisions; empty if there was no choice


def plan_on_gpus(
    pair: Pair,
    pools: Iterable[GpuPool],
    tensor: int | None,
    options: PlanOptions = PLACE_ONLY,
    admit: Admit | None = all_admitted,
) -> Plan:
    """Return the plan for a pair on the existing nodes.

    With a tensor of None every supported power of two up to the GPUs of a node is tried: layers are cut over a network
    only if users say so. Pools of unknown products are passed over. Only changes that ``admit`` lets through are
    proposed; with None no changes are searched. Raise PlanError if no pool can be sized, or the models cannot be split
    as asked.
    """
    pools = tuple(pools)
    rows = candidate_rows(pair, pools, tensor, options)
    chosen = rows[0]
    fixes: tuple[Fix, ...] = ()
    if admit is not None and chosen.verdict is Verdict.DOES_NOT_FIT:
        fixes = find_fixes(pair, pools, tensor, chosen, known_heads(pair.target.name), admit, options)
    choice = choice_phrase(chosen, options.objective) if options.target or options.draft else ""
    if choice and chosen.verdict is Verdict.DOES_NOT_FIT:
        all_precisions = quantization_matrix(pair, pools, tensor, options.available, spread=options.spread)
        choice = "; ".join(filter(None, [choice, missing_checkpoint(all_precisions, options.objective)]))
    sentence = f"{gpu_sentence(chosen, pair.limits)}{f'; {choice}' if choice else ''}"
    return _plan(rows, fixes, sentence, choice)


def keep(plan: Plan, pair: Pair, kept: Row) -> Plan:
    """Return the plan with another of its rows in force, and with the row that it would choose."""
    if kept == plan.chosen:
        return plan
    rows = (kept, *(row for row in plan.rows if row != kept))
    sentence = f"{gpu_sentence(kept, pair.limits)}; it is in force and kept, a new plan would be: {plan.explanation}"
    return replace(plan, verdict=kept.verdict, chosen=kept, rows=rows, fixes=(), explanation=sentence)


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
    """Return the plan for one replica on CPU with this memory and KV space, over ``tensor`` ranks."""
    budget = estimate_on_cpu(pair, memory_bytes, kv_cache_bytes, tensor)
    rows = (Row(CPU_PRODUCT, tensor, budget, pair.target_precision, pair.draft_precision),)
    fixes = (_cpu_fix(pair, budget, tensor),) if budget.verdict is Verdict.DOES_NOT_FIT else ()
    return _plan(rows, fixes, cpu_sentence(budget, pair.limits, tensor))


def least_change(fixes: Sequence[Fix]) -> Fix | None:
    """Return the smallest change that fits, or else the smallest that is tight."""
    return next((fix for fix in fixes if fix.verdict is Verdict.FITS), fixes[0] if fixes else None)


def least_change_title(least: Fix) -> str:
    """Return how to introduce the smallest change: smaller ones may exist that end tight."""
    return "smallest change that fits" if least.verdict is Verdict.FITS else "smallest change"


def _plan(rows: tuple[Row, ...], fixes: tuple[Fix, ...], sentence: str, choice: str = "") -> Plan:
    if (least := least_change(fixes)) is not None:
        sentence += f"; {least_change_title(least)}: {least.sentence}"
    elif rows[0].verdict is Verdict.DOES_NOT_FIT:
        sentence += f"; {NO_CHANGE_HELPS}"
    return Plan(rows[0].verdict, rows[0], rows, fixes, sentence, choice)


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
