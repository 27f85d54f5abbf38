"""Decide which objects to apply, scale and delete so that the cluster matches the desired state.

The workload's controller replaces pods. When the kind changes between Deployment and LeaderWorkerSet, the operator
replaces the workload itself, with the same rollout strategy.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.cluster.drift import foreign_managers, identity
from specdecode_operator.cluster.manifests import with_new_hash
from specdecode_operator.cluster.resources import DEPLOYMENT, HTTP_ROUTE, JOB, SERVICE
from specdecode_operator.deployment.children import wanted_replicas
from specdecode_operator.deployment.desired_state import DesiredState, Launch, NotLaunched
from specdecode_operator.deployment.observed.observation import Observation, rollout_of
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment
from specdecode_operator.deployment.rollout.blocked_pods import backs_off, running_pods
from specdecode_operator.deployment.rollout.canary import is_canary
from specdecode_operator.deployment.rollout.engine_workload import WORKLOAD_KINDS
from specdecode_operator.deployment.rollout.rollout_progress import (
    GroupHistory,
    current_pods,
    serving_hash,
)
from specdecode_operator.enums import RolloutStrategy

_SURGE_STRATEGY: Final = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def objects_to_apply(desired: DesiredState, live: Collection[Body], kept_managers: Collection[str] = ()) -> list[Body]:
    """Return the children to apply; during a pause, without a workload that would replace one of another kind."""
    workload = desired.workload
    others = [child for child in desired.children if child is not workload]
    if workload is None or _paused_workload(desired, live) is not None:
        return others
    running = next((child for child in live if identity(child) == identity(workload)), None)
    return [*others, _guarded(workload, running, kept_managers)]


def _guarded(workload: Body, live: Body | None, kept_managers: Collection[str]) -> Body:
    """Return a Deployment with a strategy that stops no serving engine, unless a rollout is in progress.

    Without this, a manual edit of the image would stop an engine immediately, and reverting it would cost another
    start. The rendered strategy applies while a template is rolled out, whether it was changed by the operator, by
    `kubectl rollout restart` or by a manager whose fields are kept.
    """
    if workload["kind"] != DEPLOYMENT.kind:
        return workload
    guarded = with_new_hash({**workload, "spec": {**workload["spec"], "strategy": _SURGE_STRATEGY}})
    if live is None:  # created with this strategy, so that no second write is needed after the first rollout
        return guarded
    if serving_hash(workload) != serving_hash(live):
        return workload
    status, is_guarded = live.get("status", {}), live["spec"].get("strategy") == _SURGE_STRATEGY
    is_settled = status.get("observedGeneration", 0) >= live["metadata"].get("generation", 0)
    if is_settled and not foreign_managers(live, kept_managers):
        is_guarded = status.get("replicas", 0) <= status.get("updatedReplicas", 0)
    return guarded if is_guarded else workload


def resting(
    desired: DesiredState, live: Body | None, pods: list[Body], groups: GroupHistory, now_s: float
) -> DesiredState:
    """Return the desired state, scaled down to the running engines while a back-off after pod rejections lasts.

    ``live`` is the live workload of the wanted kind, ``pods`` are the pods of its template, ``now_s`` is Unix time.
    """
    workload = desired.workload
    if workload is None or live is None or serving_hash(workload) != serving_hash(live):
        return desired
    running = running_pods(pods)
    if workload["kind"] == DEPLOYMENT.kind:
        holds = backs_off(pods, now_s)
    else:
        # Scaling down keeps the groups with the lowest indexes, even if others serve: only do it if none does.
        holds = groups.rests(now_s) and not live.get("status", {}).get("readyReplicas")
        running = 0
    replicas = min(running, workload["spec"]["replicas"])
    if not holds or replicas == workload["spec"]["replicas"]:
        return desired
    held = with_new_hash({**workload, "spec": {**workload["spec"], "replicas": replicas}})
    return replace(desired, children=[held if child is workload else child for child in desired.children])


def workloads_to_scale(
    parent: ParsedDeployment, desired: DesiredState, live: Collection[Body]
) -> list[tuple[Body, int]]:
    """Return live workloads to scale without an apply, each with its number of replicas."""
    if desired.workload is not None and (paused := _paused_workload(desired, live)) is not None:
        return [(paused, desired.workload["spec"]["replicas"])]
    if isinstance(desired.outcome, NotLaunched) and parent.wants_no_engine:
        return [(child, 0) for child in live if child["kind"] in WORKLOAD_KINDS]
    return []


def objects_to_delete(
    desired: DesiredState, live: Iterable[Body], successor: Body | None, pods: list[Body]
) -> list[Body]:
    """Return the live children to delete; ``successor`` is the live workload of the wanted kind.

    Without a launch, the workload of an earlier spec stays with its objects. Only Jobs for models and a canary, which
    cannot be judged then, are deleted.
    """
    outcome = desired.outcome
    # A dependency is missing for now, such as nodes. Keep running downloads rather than restart them later.
    if isinstance(outcome, NotLaunched) and outcome.readiness.reconciling and not desired.children:
        return []
    wanted = {identity(child) for child in desired.children}
    # The object's Service always has the object's name and is garbage-collected with it. Never delete another one.
    # The HTTPRoute is deleted if the spec has none, with or without a launch.
    kept = (SERVICE.kind, HTTP_ROUTE.kind)
    unwanted = [child for child in live if identity(child) not in wanted and child["kind"] not in kept]
    if isinstance(outcome, NotLaunched):
        return [child for child in unwanted if child["kind"] == JOB.kind or is_canary(child)]
    # With strategy Surge, delete a workload of the other kind when its successor serves; otherwise immediately.
    may_replace, strategy = not outcome.facts.spec.rollout.paused, outcome.facts.spec.rollout.strategy
    surges = strategy is not RolloutStrategy.REPLACE and wanted_replicas(outcome.facts) > 0
    if may_replace and surges:
        may_replace = rollout_of(outcome, Observation(successor, current_pods(pods, successor))).complete
    return [child for child in unwanted if child["kind"] not in WORKLOAD_KINDS or is_canary(child) or may_replace]


def _paused_workload(desired: DesiredState, live: Iterable[Body]) -> Body | None:
    outcome, workload = desired.outcome, desired.workload
    if not isinstance(outcome, Launch) or workload is None or not outcome.facts.spec.rollout.paused:
        return None
    running = {child["kind"]: child for child in live if child["kind"] in WORKLOAD_KINDS and not is_canary(child)}
    return None if workload["kind"] in running else next(iter(running.values()), None)
