"""Render the objects that a SpecDecodeDeployment owns: workload, Service, route, autoscaler, plan and others.

A ConfigMap holds the plan, with the quantization matrix as CSV of at most 256 KiB.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.manifests import indented_json, owned, render_template
from specdecode_operator.cluster.resources import (
    CANARY_POOL,
    DEPLOYMENT,
    LEADER_WORKER_SET,
    POOL_LABEL,
    QUEUE_PREFIX,
    plan_name,
    selector_labels,
)
from specdecode_operator.deployment.autoscaler import render_autoscaler
from specdecode_operator.deployment.engine_pod import engine_pod, engine_timeouts, group_pods, replay_pod, scheme
from specdecode_operator.deployment.expose import render_exposed
from specdecode_operator.deployment.rollout.engine_workload import workload_name
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.enums import RolloutStrategy
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.memory.budget import Budget, Verdict
from specdecode_operator.sizing.plan import Plan
from specdecode_operator.sizing.quantization_matrix import MatrixRow
from specdecode_operator.sizing.startup_time import StartupTime

PLAN_ENTRY: Final = "plan.json"
LARGEST_BYTES: Final = 256 * 1024  # A ConfigMap may hold 1 MiB, but operators cache the ConfigMaps that they own
_COLUMNS: Final = (
    *("target", "draft", "kvCacheDtype", "product", "gpus", "tensor", "verdict", "launchable", "chosen"),
    *("kvCacheTokens", "maxConcurrency", "availableKvGiB", "bindingTerm", "reason"),
)


@dataclass(frozen=True)
class MatrixTable:
    """Quantization matrix as CSV with a header line; empty if there are no rows."""

    csv: str
    # Number of rows dropped to meet the limit. Rows that cannot be launched go first, then those that do not fit.
    rows_left_out: int


def plan_config_map(key: Key, uid: str, data: Mapping[str, str]) -> Body:
    """Return the ConfigMap that holds the plan, even a plan that does not fit."""
    body = render_template("configmap", {"name": plan_name(key.name)})
    # Passing these texts through the YAML template would take ten times as long as everything else.
    body["data"] = dict(data)
    return owned(body, key, uid)


def plan_data(plan: Plan, matrix: Sequence[MatrixRow] = (), startup: StartupTime | None = None) -> dict[str, str]:
    """Return the data of the plan's ConfigMap: `plan.json` and, if there is a matrix, `matrix.csv`."""
    table = matrix_table(matrix, plan.chosen.budget)
    content = msgspec.to_builtins(plan) | {"matrixRowsLeftOut": table.rows_left_out}
    if startup is not None:
        phases = {**startup.before, **startup.engine}
        content["startupSeconds"] = {phase: list(seconds) for phase, seconds in phases.items()}
    for row in (content["chosen"], *content["rows"]):
        del row["spread"]["tensor"]  # the row's own `tensor` is the one the plan chose
    data = {PLAN_ENTRY: indented_json(content)}
    return data | ({"matrix.csv": table.csv} if table.csv else {})


def matrix_table(
    rows: Sequence[MatrixRow], chosen: Budget | None = None, largest_bytes: int = LARGEST_BYTES
) -> MatrixTable:
    """Return as many rows as fit into ``largest_bytes``, in order; the row with the chosen budget is marked."""
    launchable = [row for row in rows if row.launchable]
    usable = [row for row in launchable if row.verdict is not Verdict.DOES_NOT_FIT]
    for shown in (list(rows), launchable, usable):
        text = _csv(shown, chosen)
        if len(text) <= largest_bytes:
            return MatrixTable(text, len(rows) - len(shown))
    lines = _csv(usable, chosen)[:largest_bytes].splitlines(keepends=True)[:-1]
    return MatrixTable("".join(lines), len(rows) - len(lines) + 1)


def _csv(rows: Iterable[MatrixRow], chosen: Budget | None) -> str:
    lines: list[tuple[str, ...]] = []
    for row in rows:
        budget, is_chosen = row.budget, False
        if row.launchable and budget is not None and chosen is not None:
            # Compare one number first: comparing whole budgets is slow, and most differ here.
            is_chosen = budget.available_kv_bytes == chosen.available_kv_bytes and budget == chosen
        precisions = (row.target_precision, row.draft_precision or "", row.kv_cache_dtype)
        place = (row.product, str(row.gpus), str(row.tensor))
        verdict = (row.verdict, "yes" if row.launchable else "no", "yes" if is_chosen else "")
        available = "" if budget is None else f"{budget.available_kv_bytes / GIB:.2f}"
        tokens = (str(row.tokens), f"{row.concurrency:.2f}", available)
        lines.append(
            (*precisions, *place, *verdict, *tokens, row.binding_term or "", (row.reason or "").partition(":")[0])
        )
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([_COLUMNS, *lines] if lines else [])
    return out.getvalue()


def render_children(key: Key, uid: str, facts: Facts, plan: Plan, plan_texts: Mapping[str, str]) -> list[Body]:
    """Return the children of an object with this plan, in the order in which to create them."""
    spec, in_groups = facts.spec, facts.takes_pods_of(plan) > 1
    selector, name = (
        selector_labels(key.name),
        workload_name(key, (LEADER_WORKER_SET if in_groups else DEPLOYMENT).kind),
    )
    service = {"name": key.name, "selector": selector, "port": spec.serving.port, "scheme": scheme(spec)}
    children = [plan_config_map(key, uid, plan_texts)]
    children.append(owned(render_template("service", service), key, uid))
    children += render_exposed(key, uid, spec.expose, spec.serving.port)
    if spec.autoscaling is not None:
        children.append(render_autoscaler(key, uid, spec, spec.autoscaling))
    if wanted_replicas(facts) > 1:
        # In groups, select the workers too: a group fails with any of its pods.
        budget = {
            "name": key.name,
            "selector": {"leaderworkerset.sigs.k8s.io/name": name} if in_groups else selector,
            "pool_label": POOL_LABEL,
            "without_pool": CANARY_POOL if spec.rollout.strategy is RolloutStrategy.CANARY and not in_groups else None,
        }
        children.append(owned(render_template("poddisruptionbudget", budget), key, uid))
    values: dict[str, Any] = {
        "replicas": wanted_replicas(facts),
        "surge": spec.rollout.strategy is not RolloutStrategy.REPLACE,
        "paused": spec.rollout.paused,
        "name": name,
    }
    if in_groups:
        # Kueue reads its labels from the LeaderWorkerSet and admits groups as a whole.
        labels = ((spec.pod_template.metadata or {}).get("labels") or {}) if spec.pod_template else {}
        queue = {label: value for label, value in labels.items() if label.startswith(QUEUE_PREFIX)}
        workload = render_template("leaderworkerset", {**values, "size": plan.chosen.nodes, "labels": queue})
        leader, worker = group_pods(key, facts, plan)
        workload["spec"]["leaderWorkerTemplate"] |= {"leaderTemplate": leader, "workerTemplate": worker}
    else:
        values |= {"selector": selector, "progress_deadline_s": engine_timeouts(facts, plan).progress_deadline_s}
        workload = render_template("deployment", values)
        workload["spec"]["template"] = (engine_pod if facts.replay is None else replay_pod)(key, facts, plan)
    return [*children, owned(workload, key, uid)]


def wanted_replicas(facts: Facts) -> int:
    """Return the number of engines that should run: the replicas of the spec, or 0 if suspended."""
    return 0 if facts.spec.suspend else facts.spec.replicas
