"""Sees an desired in the light of what served before, and keeps what is to be known of it later."""

from dataclasses import replace

from specdecode_operator.deployment.desired_state import DesiredState, Launch, NotLaunched, RolledBack
from specdecode_operator.deployment.objects.children import wanted_replicas
from specdecode_operator.deployment.objects.workload import serving_template
from specdecode_operator.deployment.observation import Observation, rollout_of
from specdecode_operator.deployment.pods.group_history import UNSEEN, GroupHistory, look
from specdecode_operator.deployment.pods.rollback import (
    Memory,
    attempt_of,
    put_back,
    remembered,
    render_last_good,
    with_crashes,
)
from specdecode_operator.deployment.pods.rollout import template_hash
from specdecode_operator.deployment.spec.parent import Parent
from specdecode_operator.kube.resources import LEADER_WORKER_SET


def recall(parent: Parent, desired: DesiredState, memory: Memory | None) -> DesiredState:
    """Return the desired in the light of what happened before: an attempt that failed is not made again."""
    outcome, workload = desired.outcome, desired.workload
    if memory is None or not isinstance(outcome, Launch) or workload is None:
        return desired
    kept = render_last_good(parent.key, parent.uid, memory)
    failure = memory.failure
    if failure is None or failure.attempt != _attempt(outcome):
        return replace(desired, children=[kept, *desired.children])
    back = put_back(parent.key, parent.uid, workload, memory.workload)
    others = [child for child in desired.children if child is not workload]
    return DesiredState(RolledBack(outcome.facts, outcome.told, failure), desired.conditions, [kept, *others, back])


def update_last_good(desired: DesiredState, observation: Observation, memory: Memory | None) -> Memory | None:
    """Return what is to be remembered of engines that serve, or that will not."""
    outcome, workload = desired.outcome, desired.workload
    if not isinstance(outcome, Launch) or workload is None or observation.workload is None:
        return memory
    if template_hash(serving_template(observation.workload)) != template_hash(serving_template(workload)):
        return memory
    if outcome.facts.spec.rollout.paused:
        return memory
    known = remembered(memory, workload, _attempt(outcome), rollout_of(outcome, observation))
    return with_crashes(known, observation.groups)


def update_group_history(
    before: GroupHistory | None, desired: DesiredState, observation: Observation, memory: Memory | None, now_s: float
) -> GroupHistory:
    """Return the history of engines on several nodes with what is seen of them now; by a new operator from memory."""
    outcome, workload = desired.outcome, observation.workload
    if before is None:
        before = _known_groups(memory)
    if workload is None or isinstance(outcome, NotLaunched):
        return before
    if workload.get("kind") != LEADER_WORKER_SET.kind:
        return UNSEEN  # a Deployment's pods count their own crashes, and it has a deadline of its own
    serve = rollout_of(outcome, observation).complete
    awaited = wanted_replicas(outcome.facts) > 0 and not outcome.facts.spec.rollout.paused
    template = template_hash(serving_template(workload))
    return look(before, template, observation.pods, now_s, serve=serve, awaited=awaited)


def _known_groups(memory: Memory | None) -> GroupHistory:
    """What was seen of groups before this operator started: crashes, or that they served."""
    if memory is None:
        return UNSEEN
    return memory.groups or GroupHistory(template_hash(serving_template(memory.workload)), served=True)


def _attempt(launch: Launch) -> str:
    spec = launch.facts.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    chosen = launch.plan.chosen
    return attempt_of(spec, chosen.product, chosen.tensor, chosen.gpus, chosen.nodes)
