"""When engines on one node each and engines on several take the place of each other.

Within one kind its own controller replaces pods by the rollout strategy. From
one kind to the other the operator does, by the same strategy.
"""

from collections.abc import Iterable

from specdecode_operator.api.base import Body
from specdecode_operator.api.values import RolloutStrategy
from specdecode_operator.services.decision import Intent, Launch, Observation, Obstacle, rollout_of
from specdecode_operator.services.rollout import current_pods
from specdecode_operator.services.starters import STARTERS


def wanted_now(intent: Intent, live: Iterable[Body]) -> list[Body]:
    """Return the children to apply: while a rollout is paused nothing new starts beside what runs."""
    course, starter = intent.course, intent.starter
    if not isinstance(course, Launch) or starter is None or not course.facts.spec.rollout.paused:
        return intent.children
    running = {child["kind"] for child in live} & STARTERS
    held_back = bool(running) and starter["kind"] not in running
    return [child for child in intent.children if child is not starter] if held_back else intent.children


def may_end(intent: Intent, successor: Body | None, pods: list[Body]) -> bool:
    """Whether engines of the other kind may end: at once where GPUs are scarce, else when their successors serve.

    ``successor`` is what starts those now, ``pods`` are the object's.
    """
    course = intent.course
    if isinstance(course, Obstacle):
        return False
    rollout = course.facts.spec.rollout
    if rollout.paused:
        return False
    if rollout.strategy is not RolloutStrategy.SURGE:
        return True
    return rollout_of(course, Observation(successor, current_pods(pods, successor))).complete
