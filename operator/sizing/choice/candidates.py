"""Candidates: every place and precision that a plan, or a change to it, may choose from, best first."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from specdecode_operator.sizing.base.errors import PlanError
from specdecode_operator.sizing.choice.node_placement import GpuPool
from specdecode_operator.sizing.choice.plan_row import Row
from specdecode_operator.sizing.choice.precision_rules import NOTHING_NAMED, Available, served_precision
from specdecode_operator.sizing.choice.quantization_matrix import Selection, pair_kernel_problem, quantization_matrix
from specdecode_operator.sizing.choice.ranking import ranked
from specdecode_operator.sizing.pair.pair import TENSOR_FIELD, TENSOR_ONLY, Pair, Parallelism
from specdecode_operator.sizing.weights.divisibility import split_remedy, supported_tensors
from specdecode_operator.vocabulary import FP8_ELEMENT_BYTES, KvCacheDtype, Objective, Precision


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
