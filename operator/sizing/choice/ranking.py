"""Which row of the quantization matrix to run, by what users want most."""

from collections.abc import Callable, Iterable
from typing import Final

from specdecode_operator.sizing.base.devices import find_device
from specdecode_operator.sizing.choice.plan_row import Row
from specdecode_operator.sizing.choice.quantization_matrix import MatrixRow
from specdecode_operator.sizing.memory.budget import Verdict
from specdecode_operator.vocabulary import KvCacheDtype, Objective, Precision

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
