"""When engines on one node each and engines on several take the place of each other.

Within one kind its own controller replaces pods by the rollout strategy. From
one kind to the other the operator does, by the same strategy.
"""

from collections.abc import Iterable

from specdecode_operator.api.base import Body
from specdecode_operator.api.values import RolloutStrategy
from specdecode_operator.deployment.desired_state import Intent, Launch, Obstacle
from specdecode_operator.deployment.objects.children import wanted_replicas
from specdecode_operator.deployment.objects.workload import STARTERS
from specdecode_operator.deployment.observation import Observation, rollout_of
from specdecode_operator.deployment.pods.rollout import current_pods


def staying(intent: Intent, live: Iterable[Body]) -> Body | None:
    """Return what goes on to start engines because a pause holds the other kind back; None where none does."""
    course, starter = intent.course, intent.starter
    if not isinstance(course, Launch) or starter is None or not course.facts.spec.rollout.paused:
        return None
    running = {child["kind"]: child for child in live if child["kind"] in STARTERS}
    return None if starter["kind"] in running else next(iter(running.values()), None)


def wanted_now(intent: Intent, live: Iterable[Body]) -> list[Body]:
    """Return the children to apply: while a rollout is paused nothing new starts beside what runs."""
    if staying(intent, live) is None:
        return intent.children
    starter = intent.starter
    return [child for child in intent.children if child is not starter]


def may_end(intent: Intent, successor: Body | None, pods: list[Body]) -> bool:
    """Whether engines of the other kind may end: when their successors serve, or at once where GPUs are scarce.

    Where no engine is wanted there is nothing to wait for.
    ``successor`` is what starts those now, ``pods`` are the object's.
    """
    course = intent.course
    if isinstance(course, Obstacle):
        return False
    rollout = course.facts.spec.rollout
    if rollout.paused:
        return False
    if rollout.strategy is not RolloutStrategy.SURGE or wanted_replicas(course.facts) == 0:
        return True
    return rollout_of(course, Observation(successor, current_pods(pods, successor))).complete
