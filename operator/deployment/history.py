"""Sees an intent in the light of what served before, and keeps what is to be known of it later."""

from dataclasses import replace

from specdecode_operator.deployment.desired_state import Intent, Launch, Obstacle, RolledBack
from specdecode_operator.deployment.objects.children import wanted_replicas
from specdecode_operator.deployment.objects.workload import serving_template
from specdecode_operator.deployment.observation import Observation, rollout_of
from specdecode_operator.deployment.pods.group_history import UNSEEN, GroupHistory, look
from specdecode_operator.deployment.pods.rollback import (
    Memory,
    attempt_of,
    put_back,
    remembered,
    render_memory,
    with_crashes,
)
from specdecode_operator.deployment.pods.rollout import template_hash
from specdecode_operator.deployment.spec.parent import Parent
from specdecode_operator.kube.resources import LEADER_WORKER_SET


def recall(parent: Parent, intent: Intent, memory: Memory | None) -> Intent:
    """Return the intent in the light of what happened before: an attempt that failed is not made again."""
    course, starter = intent.course, intent.starter
    if memory is None or not isinstance(course, Launch) or starter is None:
        return intent
    kept = render_memory(parent.key, parent.uid, memory)
    failure = memory.failure
    if failure is None or failure.attempt != _attempt(course):
        return replace(intent, children=[kept, *intent.children])
    back = put_back(parent.key, parent.uid, starter, memory.starter)
    others = [child for child in intent.children if child is not starter]
    return Intent(RolledBack(course.facts, course.told, failure), intent.findings, [kept, *others, back])


def learn_from(intent: Intent, observation: Observation, memory: Memory | None) -> Memory | None:
    """Return what is to be remembered of engines that serve, or that will not."""
    course, starter = intent.course, intent.starter
    if not isinstance(course, Launch) or starter is None or observation.starter is None:
        return memory
    if template_hash(serving_template(observation.starter)) != template_hash(serving_template(starter)):
        return memory
    if course.facts.spec.rollout.paused:
        return memory
    known = remembered(memory, starter, _attempt(course), rollout_of(course, observation))
    return with_crashes(known, observation.groups)


def look_at_groups(
    before: GroupHistory | None, intent: Intent, observation: Observation, memory: Memory | None, now_s: float
) -> GroupHistory:
    """Return the history of engines on several nodes with what is seen of them now; by a new operator from memory."""
    course, starter = intent.course, observation.starter
    if before is None:
        before = _known_groups(memory)
    if starter is None or isinstance(course, Obstacle):
        return before
    if starter.get("kind") != LEADER_WORKER_SET.kind:
        return UNSEEN  # a Deployment's pods count their own crashes, and it has a deadline of its own
    serve = rollout_of(course, observation).complete
    awaited = wanted_replicas(course.facts) > 0 and not course.facts.spec.rollout.paused
    template = template_hash(serving_template(starter))
    return look(before, template, observation.pods, now_s, serve=serve, awaited=awaited)


def _known_groups(memory: Memory | None) -> GroupHistory:
    """What was seen of groups before this operator started: crashes, or that they served."""
    if memory is None:
        return UNSEEN
    return memory.groups or GroupHistory(template_hash(serving_template(memory.starter)), served=True)


def _attempt(launch: Launch) -> str:
    spec = launch.facts.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    chosen = launch.plan.chosen
    return attempt_of(spec, chosen.product, chosen.tensor, chosen.gpus, chosen.nodes)
