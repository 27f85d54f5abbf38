"""Decide when to reconcile an object without an event; engine state does not trigger watches."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import ScheduleStatus
from specdecode_operator.cluster.resources import JOB, LEADER_WORKER_SET
from specdecode_operator.deployment.desired_state import DesiredState, InCanary
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment
from specdecode_operator.deployment.rollout.blocked_pods import rejections
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.untrusted import mapping


@dataclass(frozen=True)
class Requeue:
    """When to reconcile an object again; the defaults apply after a failed reconcile."""

    is_close: bool = True  # Its state may change without an event: with time, or inside its engines
    has_policy: bool = False  # Its engines are sampled for a policy
    follows_engines: bool = False  # Without an event, only its engines can change it
    # Unix time at which to reconcile in any case: a schedule is due, or a capture is overdue.
    due_at_s: float | None = None
    is_due: bool = False  # The object changed during the reconcile, or its new status has inputs of the next one


_INPUTS: Final = ("policy", "trainedDraft", "captures")
"""Fields of the status that the next reconcile acts on."""


def needs_another(before: Body, after: Body) -> bool:
    """Return whether an object must be reconciled again after a reconcile, which may have written its status.

    The event of that write is ignored. A change by a user may have arrived only in its response.
    """
    metadata = [{**body["metadata"], "resourceVersion": None} for body in (before, after)]
    inputs = [[mapping(body, "status").get(field) for field in _INPUTS] for body in (before, after)]
    return metadata[0] != metadata[1] or before.get("spec") != after.get("spec") or inputs[0] != inputs[1]


def same_status_apart_from_figures(before: Body, after: Body) -> bool:
    """Return whether two versions of an object have the same status, apart from `figures`."""
    statuses = [{**mapping(body, "status"), "figures": None} for body in (before, after)]
    return before is after or statuses[0] == statuses[1]


def requeue_for(
    parent: ParsedDeployment, desired: DesiredState, observation: Observation, schedules: Sequence[ScheduleStatus]
) -> Requeue:
    """Return when to reconcile an object again; watches report pods that do not run yet, nodes and captures."""
    spec = parent.written_spec or parent.spec
    has_policy = acts = False
    if not isinstance(spec, InvalidSpecError):
        has_policy = spec.policy is not None and bool(observation.readings)
        acts = bool(spec.captures or spec.policy or spec.rollout.gate)
    # Models are downloaded by Jobs, and groups have a deadline that only the operator checks.
    waits = not desired.kinds.isdisjoint({JOB.kind, LEADER_WORKER_SET.kind})
    changes_with_time = bool(
        observation.blocked
        or observation.blocked_beside
        or observation.contested
        or observation.crash_loop
        or waits
        or acts
        or isinstance(desired.outcome, InCanary)
        or rejections(observation.pods)
    )
    times = [datetime.fromisoformat(each.next_schedule_time) for each in schedules if each.next_schedule_time]
    if observation.lending is not None and observation.lending.overdue_from is not None:
        times.append(observation.lending.overdue_from)
    return Requeue(
        is_close=changes_with_time or bool(observation.readings),
        has_policy=has_policy,
        follows_engines=bool(observation.readings) and not changes_with_time and not times,
        due_at_s=min((time.timestamp() for time in times), default=None),
    )
