"""The ConfigMap that shows the plan of an object, with the quantization matrix as a table."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from specdecode_operator.api.base import Body
from specdecode_operator.api.key import Key
from specdecode_operator.kube.manifests import owned, render_template
from specdecode_operator.sizing.base.units import GIB
from specdecode_operator.sizing.choice.plan import Plan
from specdecode_operator.sizing.choice.quantization_matrix import MatrixRow
from specdecode_operator.sizing.memory.budget import Budget, Verdict

LARGEST_BYTES: Final = 256 * 1024
"""A ConfigMap may hold 1 MiB, and operators keep those that they own in memory."""

_COLUMNS: Final = (
    *("target", "draft", "kvCacheDtype", "product", "gpus", "tensor", "verdict", "launchable", "chosen"),
    *("kvCacheTokens", "maxConcurrency", "availableKvGiB", "bindingTerm", "reason"),
)


@dataclass(frozen=True)
class MatrixTable:
    """The matrix as text: one line a row under a line of names; empty where there are no rows."""

    csv: str

    rows_left_out: int
    """Rows that the limit left no room for: first those that cannot be launched, then those that do not fit."""


def plan_config_map(key: Key, uid: str, data: Mapping[str, str]) -> Body:
    """Return the ConfigMap that holds the plan, wanted also where nothing fits."""
    body = render_template("configmap", {"name": key.name})
    # Long texts take ten times as long to write as YAML and to read again as all the rest.
    body["data"] = dict(data)
    return owned(body, key, uid)


def plan_data(plan: Plan, matrix: Sequence[MatrixRow] = ()) -> dict[str, str]:
    """Return what the ConfigMap of a plan holds."""
    table = matrix_table(matrix, plan.chosen.budget)
    content = msgspec.to_builtins(plan) | {"matrixRowsLeftOut": table.rows_left_out}
    for row in (content["chosen"], *content["rows"]):
        del row["spread"]["tensor"]  # of the plan's choosing: the row itself has it
    data = {"plan.json": msgspec.json.format(msgspec.json.encode(content, order="sorted"), indent=2).decode()}
    return data | ({"matrix.csv": table.csv} if table.csv else {})


def matrix_table(
    rows: Sequence[MatrixRow], chosen: Budget | None = None, largest_bytes: int = LARGEST_BYTES
) -> MatrixTable:
    """Return the rows in their order, as many as there is room for; the row with the chosen budget is marked."""
    usable = [row for row in rows if row.launchable and row.verdict is not Verdict.DOES_NOT_FIT]
    launchable = [row for row in rows if row.launchable]
    for shown in (list(rows), launchable, usable):
        text = _csv(shown, chosen)
        if len(text) <= largest_bytes:
            return MatrixTable(text, len(rows) - len(shown))
    lines = _csv(usable, chosen)[:largest_bytes].splitlines(keepends=True)[:-1]
    return MatrixTable("".join(lines), len(rows) - len(lines) + 1)


def _csv(rows: Iterable[MatrixRow], chosen: Budget | None) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    lines = [_line(row, chosen) for row in rows]
    writer.writerows([_COLUMNS, *lines] if lines else [])
    return out.getvalue()


def _is(budget: Budget | None, chosen: Budget | None) -> bool:
    """Whether two budgets are equal; most differ in what is left, which is compared first: all of it takes long."""
    if budget is None or chosen is None:
        return False
    return budget.available_kv_bytes == chosen.available_kv_bytes and budget == chosen


def _line(row: MatrixRow, chosen: Budget | None) -> tuple[str, ...]:
    budget = row.budget
    return (
        row.target_precision,
        row.draft_precision or "",
        row.kv_cache_dtype,
        row.product,
        str(row.gpus),
        str(row.tensor),
        row.verdict,
        "yes" if row.launchable else "no",
        "yes" if row.launchable and _is(budget, chosen) else "",
        str(row.tokens),
        f"{row.concurrency:.2f}",
        "" if budget is None else f"{budget.available_kv_bytes / GIB:.2f}",
        row.binding_term or "",
        (row.reason or "").partition(":")[0],
    )
