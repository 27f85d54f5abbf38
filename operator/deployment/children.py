"""Render the objects that a SpecDecodeDeployment owns: workload, Service, disruption budget, plan.

The ConfigMap holds the plan, with the quantization matrix as CSV of at most 256 KiB.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.manifests import owned, render_template
from specdecode_operator.cluster.resources import DEPLOYMENT, LEADER_WORKER_SET, QUEUE_PREFIX, selector_labels
from specdecode_operator.deployment.engine_pod import engine_pod, engine_timeouts, group_pods, replay_pod, scheme
from specdecode_operator.deployment.rollout.engine_workload import workload_name
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.enums import RolloutStrategy
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.memory.budget import Budget, Verdict
from specdecode_operator.sizing.plan import Plan
from specdecode_operator.sizing.quantization_matrix import MatrixRow

LARGEST_BYTES: Final = 256 * 1024  # A ConfigMap may hold 1 MiB, and operators keep those that they own in memory
_COLUMNS: Final = (
    *("target", "draft", "kvCacheDtype", "product", "gpus", "tensor", "verdict", "launchable", "chosen"),
    *("kvCacheTokens", "maxConcurrency", "availableKvGiB", "bindingTerm", "reason"),
)


@dataclass(frozen=True)
class MatrixTable:
    """The matrix as text: one line a row under a line of names; empty where there are no rows."""

    csv: str
    # Rows that the limit left no room for: first those that cannot be launched, then those that do not fit.
    rows_left_out: int


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


def render_service(key: Key, uid: str, facts: Facts) -> Body:
    """Return the Service; of a group of pods it selects the leader alone, for workers have other labels."""
    values = {
        "name": key.name,
        "selector": selector_labels(key.name),
        "port": facts.spec.serving.port,
        "scheme": scheme(facts.spec),
    }
    return owned(render_template("service", values), key, uid)


_GROUPS_LABEL: Final = "leaderworkerset.sigs.k8s.io/name"  # On every pod of a LeaderWorkerSet: its name


def render_children(key: Key, uid: str, facts: Facts, plan: Plan, plan_texts: Mapping[str, str]) -> list[Body]:
    """Return the objects that must exist while this plan is in force, in the order of their creation.

    ``plan_texts`` are what its ConfigMap holds (`plan_data`).
    """
    children = [plan_config_map(key, uid, plan_texts), render_service(key, uid, facts)]
    if wanted_replicas(facts) > 1:
        budget = render_template(
            "poddisruptionbudget", {"name": key.name, "selector": _disruption_selector(key, facts, plan)}
        )
        children.append(owned(budget, key, uid))
    workload = _groups(key, facts, plan) if facts.takes_pods_of(plan) > 1 else _deployment(key, facts, plan)
    return [*children, owned(workload, key, uid)]


def wanted_replicas(facts: Facts) -> int:
    """Return how many engines a spec asks for now."""
    return 0 if facts.spec.suspend else facts.spec.replicas


def _disruption_selector(key: Key, facts: Facts, plan: Plan) -> dict[str, str]:
    """Return the labels of the pods that must not all go at once: of a group every one, for none can be missed."""
    if facts.takes_pods_of(plan) > 1:
        return {_GROUPS_LABEL: workload_name(key, LEADER_WORKER_SET.kind)}
    return selector_labels(key.name)


def _groups(key: Key, facts: Facts, plan: Plan) -> Body:
    values = {
        **_rollout(facts),
        "name": workload_name(key, LEADER_WORKER_SET.kind),
        "size": plan.chosen.nodes,
        "labels": _queue_labels(facts),
    }
    body = render_template("leaderworkerset", values)
    # They are rendered and parsed already.
    leader, worker = group_pods(key, facts, plan)
    body["spec"]["leaderWorkerTemplate"] |= {"leaderTemplate": leader, "workerTemplate": worker}
    return body


def _queue_labels(facts: Facts) -> dict[str, str]:
    """Return the labels by which Kueue admits a group as a whole: it looks for them on the LeaderWorkerSet itself."""
    template = facts.spec.pod_template
    labels: dict[str, str] = ((template.metadata or {}).get("labels") or {}) if template else {}
    return {name: value for name, value in labels.items() if name.startswith(QUEUE_PREFIX)}


def _rollout(facts: Facts) -> dict[str, int | bool]:
    rollout = facts.spec.rollout
    return {
        "replicas": wanted_replicas(facts),
        "surge": rollout.strategy is RolloutStrategy.SURGE,
        "paused": rollout.paused,
    }


def _deployment(key: Key, facts: Facts, plan: Plan) -> Body:
    values = {
        **_rollout(facts),
        "name": workload_name(key, DEPLOYMENT.kind),
        "selector": selector_labels(key.name),
        "progress_deadline_s": engine_timeouts(facts, plan).progress_deadline_s,
    }
    body = render_template("deployment", values)
    # It is rendered and parsed already.
    body["spec"]["template"] = (engine_pod if facts.replay is None else replay_pod)(key, facts, plan)
    return body
