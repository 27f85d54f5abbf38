"""The objects that a SpecDecodeDeployment owns while its plan is in force."""

from collections.abc import Mapping
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.key import Key
from specdecode_operator.api.values import RolloutStrategy
from specdecode_operator.deployment.objects.engine_pod import engine_pod, engine_timeouts, group_pods
from specdecode_operator.deployment.objects.plan_config_map import plan_config_map
from specdecode_operator.deployment.objects.replay_pod import replay_pod
from specdecode_operator.deployment.objects.service import render_service
from specdecode_operator.deployment.objects.workload import workload_name
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.kube.labels import QUEUE_PREFIX, selector_labels
from specdecode_operator.kube.manifests import owned, render_template
from specdecode_operator.kube.resources import DEPLOYMENT, LEADER_WORKER_SET
from specdecode_operator.sizing.choice.plan import Plan

_GROUPS_LABEL: Final = "leaderworkerset.sigs.k8s.io/name"
"""On every pod of a LeaderWorkerSet: its name."""


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
    """Return what starts engines that each take several nodes."""
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
    """Return what starts engines that each fit on one node."""
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
