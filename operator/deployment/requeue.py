"""Decide when to reconcile an object without an event; engine state does not trigger watches."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from specdecode_operator.api.deployment import ScheduleStatus
from specdecode_operator.cluster.resources import JOB, LEADER_WORKER_SET
from specdecode_operator.deployment.desired_state import DesiredState
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment
from specdecode_operator.deployment.rollout.blocked_pods import rejections
from specdecode_operator.problems import InvalidSpecError


@dataclass(frozen=True)
class Requeue:
    """What an object asks for. One whose look failed asks for all that is usual."""

    is_close: bool = True
    has_policy: bool = False
    # When to look at it in any case, in Unix time: its next schedule is due, or a capture of it is overdue.
    due_at_s: float | None = None


def requeue_for(
    parent: ParsedDeployment, desired: DesiredState, observation: Observation, schedules: Sequence[ScheduleStatus]
) -> Requeue:
    """Return what an object asks for after a look at it."""
    spec = parent.written_spec or parent.spec
    has_policy = not isinstance(spec, InvalidSpecError) and spec.policy is not None and bool(observation.readings)
    times = [datetime.fromisoformat(each.next_schedule_time) for each in schedules if each.next_schedule_time]
    if observation.lending is not None and observation.lending.overdue_from is not None:
        times.append(observation.lending.overdue_from)
    due_at_s = min((time.timestamp() for time in times), default=None)
    return Requeue(_changes_by_itself(parent, desired, observation), has_policy, due_at_s)


def _changes_by_itself(parent: ParsedDeployment, desired: DesiredState, observation: Observation) -> bool:
    """Whether there is something to ask or to wait for.

    Pods that do not run yet, nodes and captures are told of by watches.
    """
    if observation.readings or observation.blocked or observation.contested:
        return True
    if any(child["kind"] in {JOB.kind, LEADER_WORKER_SET.kind} for child in desired.children):
        return True  # a model is fetched, or groups are given up after a time
    return _acts_by_itself(parent) or bool(rejections(observation.pods))


def _acts_by_itself(parent: ParsedDeployment) -> bool:
    spec = parent.written_spec or parent.spec
    if isinstance(spec, InvalidSpecError):
        return False
    return bool(spec.captures or spec.policy or spec.rollout.gate)
