"""The plan: where a pair runs, why, and what to change when it does not fit."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from specdecode_operator.sizing.base.units import GIB, ceil_div
from specdecode_operator.sizing.choice.candidates import PLACE_ONLY, PlanOptions, candidate_rows, selection
from specdecode_operator.sizing.choice.changes import Change
from specdecode_operator.sizing.choice.explanations import capacity_phrase, cpu_sentence, gpu_sentence
from specdecode_operator.sizing.choice.fixes import Admit, Fix, all_admitted, find_fixes
from specdecode_operator.sizing.choice.node_placement import GpuPool
from specdecode_operator.sizing.choice.other_models import alternatives_to
from specdecode_operator.sizing.choice.plan_row import Row
from specdecode_operator.sizing.choice.precision_rules import Available, checkpoint_at
from specdecode_operator.sizing.choice.quantization_matrix import quantization_matrix
from specdecode_operator.sizing.choice.ranking import choice_phrase, missing_checkpoint
from specdecode_operator.sizing.memory.budget import Budget, Term, Verdict
from specdecode_operator.sizing.memory.cpu import estimate_on_cpu
from specdecode_operator.sizing.pair.pair import Pair
from specdecode_operator.vocabulary import Precision

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
