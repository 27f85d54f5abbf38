"""What is to be known of engines later: the workload that served last, and crashes of groups."""

from functools import partial

from specdecode_operator.deployment.desired_state import DesiredState, Launch, NotLaunched
from specdecode_operator.deployment.objects.children import wanted_replicas
from specdecode_operator.deployment.objects.workload import serving_template
from specdecode_operator.deployment.observation import Observation, rollout_of
from specdecode_operator.deployment.pods.group_history import UNSEEN, GroupHistory, observe_groups
from specdecode_operator.deployment.pods.rollback import (
    LastGood,
    after_rollout,
    attempt_of,
    with_crashes,
)
from specdecode_operator.deployment.pods.rollout import template_hash
from specdecode_operator.kube.resources import LEADER_WORKER_SET


def update_last_good(desired: DesiredState, observation: Observation, last_good: LastGood | None) -> LastGood | None:
    """Return the last good workload: this one once it serves, and the failure of one that will not."""
    outcome, workload = desired.outcome, desired.workload
    if observation.blocked or not isinstance(outcome, Launch) or workload is None or observation.workload is None:
        return last_good
    if template_hash(serving_template(observation.workload)) != template_hash(serving_template(workload)):
        return last_good
    if outcome.facts.spec.rollout.paused:
        return last_good
    known = after_rollout(
        last_good, workload, partial(attempt_of, outcome.facts.spec, outcome.plan), rollout_of(outcome, observation)
    )
    return with_crashes(known, observation.groups)


def update_group_history(
    before: GroupHistory | None,
    desired: DesiredState,
    observation: Observation,
    last_good: LastGood | None,
    now_s: float,
) -> GroupHistory:
    """Return the history with what is seen of engines on several nodes now; a new operator begins at ``last_good``."""
    outcome, workload = desired.outcome, observation.workload
    if before is None:
        before = _known_groups(last_good)
    if observation.blocked or workload is None or isinstance(outcome, NotLaunched):
        return before
    if workload.get("kind") != LEADER_WORKER_SET.kind:
        return UNSEEN  # a Deployment's pods count their own crashes, and it has a deadline of its own
    serve = rollout_of(outcome, observation).complete
    awaited = wanted_replicas(outcome.facts) > 0 and not outcome.facts.spec.rollout.paused
    template = template_hash(serving_template(workload))
    return observe_groups(before, template, observation.pods, now_s, serve=serve, awaited=awaited)


def _known_groups(last_good: LastGood | None) -> GroupHistory:
    """What was seen of groups before this operator started: crashes, or that they served."""
    if last_good is None:
        return UNSEEN
    return last_good.groups or GroupHistory(template_hash(serving_template(last_good.workload)), served=True)
