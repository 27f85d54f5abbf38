"""When engines on one node each and engines on several take the place of each other.

Within one kind its own controller replaces pods by the rollout strategy. From
one kind to the other the operator does, by the same strategy.
"""

from collections.abc import Iterable

from specdecode_operator.api.base import Body
from specdecode_operator.api.values import RolloutStrategy
from specdecode_operator.deployment.desired_state import DesiredState, Launch, NotLaunched
from specdecode_operator.deployment.objects.children import wanted_replicas
from specdecode_operator.deployment.objects.workload import WORKLOAD_KINDS
from specdecode_operator.deployment.observation import Observation, rollout_of
from specdecode_operator.deployment.pods.rollout import current_pods


def staying(desired: DesiredState, live: Iterable[Body]) -> Body | None:
    """Return what goes on to start engines because a pause holds the other kind back; None where none does."""
    outcome, workload = desired.outcome, desired.workload
    if not isinstance(outcome, Launch) or workload is None or not outcome.facts.spec.rollout.paused:
        return None
    running = {child["kind"]: child for child in live if child["kind"] in WORKLOAD_KINDS}
    return None if workload["kind"] in running else next(iter(running.values()), None)


def wanted_now(desired: DesiredState, live: Iterable[Body]) -> list[Body]:
    """Return the children to apply: while a rollout is paused nothing new starts beside what runs."""
    if staying(desired, live) is None:
        return desired.children
    workload = desired.workload
    return [child for child in desired.children if child is not workload]


def may_end(desired: DesiredState, successor: Body | None, pods: list[Body]) -> bool:
    """Whether engines of the other kind may end: when their successors serve, or at once where GPUs are scarce.

    Where no engine is wanted there is nothing to wait for.
    ``successor`` is what starts those now, ``pods`` are the object's.
    """
    outcome = desired.outcome
    if isinstance(outcome, NotLaunched):
        return False
    rollout = outcome.facts.spec.rollout
    if rollout.paused:
        return False
    if rollout.strategy is not RolloutStrategy.SURGE or wanted_replicas(outcome.facts) == 0:
        return True
    return rollout_of(outcome, Observation(successor, current_pods(pods, successor))).complete
