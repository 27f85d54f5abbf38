"""Renders the objects that a SpecDecodeDeployment owns."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from specdecode_operator.api.base import Body
from specdecode_operator.api.key import Key
from specdecode_operator.api.values import RolloutStrategy
from specdecode_operator.labels import selector_labels
from specdecode_operator.services.engine_pod import engine_pod, engine_timings
from specdecode_operator.services.facts import Facts
from specdecode_operator.services.manifests import owned, render_template
from specdecode_operator.services.matrix_table import matrix_table
from specdecode_operator.sizing.matrix import MatrixRow
from specdecode_operator.sizing.plan import Plan


def render_children(key: Key, uid: str, facts: Facts, plan: Plan, matrix: Sequence[MatrixRow] = ()) -> list[Body]:
    """Objects that must exist while this plan is in force, in the order of their creation."""
    children = [render_plan(key, uid, plan, matrix), owned(_service(key, facts), key, uid)]
    if wanted_replicas(facts) > 1:
        budget = render_template("poddisruptionbudget", {"name": key.name, "selector": selector_labels(key.name)})
        children.append(owned(budget, key, uid))
    return [*children, owned(_deployment(key, facts, plan), key, uid)]


def wanted_replicas(facts: Facts) -> int:
    """Return how many engines a spec asks for now."""
    return 0 if facts.spec.suspend else facts.spec.replicas


def _service(key: Key, facts: Facts) -> Body:
    values = {"name": key.name, "selector": selector_labels(key.name), "port": facts.spec.serving.port}
    return render_template("service", values)


def _deployment(key: Key, facts: Facts, plan: Plan) -> Body:
    """Return what starts engines that each fit on one node."""
    rollout = facts.spec.rollout
    values = {
        "name": key.name,
        "replicas": wanted_replicas(facts),
        "selector": selector_labels(key.name),
        "surge": rollout.strategy is RolloutStrategy.SURGE,
        "paused": rollout.paused,
        "progress_deadline_s": engine_timings(facts, plan).progress_deadline_s,
        "pod": engine_pod(key, facts, plan),
    }
    return render_template("deployment", values)


def render_plan(key: Key, uid: str, plan: Plan, matrix: Sequence[MatrixRow] = ()) -> Body:
    """Return the ConfigMap that holds the plan, wanted also where nothing fits."""
    table = matrix_table(matrix, plan.chosen.budget)
    content = {**asdict(plan), "matrixRowsLeftOut": table.rows_left_out}
    values = {
        "name": key.name,
        "plan_json": json.dumps(content, indent=2, sort_keys=True),
        "matrix_csv": table.csv,
    }
    return owned(render_template("configmap", values), key, uid)
