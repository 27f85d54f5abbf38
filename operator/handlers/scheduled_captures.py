"""Create a deployment's automatic captures: scheduled ones, and those of its rollout gate.

A write that the API server rejects is retried at the next reconcile, and blocks nothing else.
"""

import logging
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from specdecode_operator.api import base, capture
from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import CaptureSchedule, Gate, Key, ScheduleStatus
from specdecode_operator.capture.golden_gate import GateObjects, gate_state, gate_writes
from specdecode_operator.capture.schedules import (
    OVER_AGE_FOR,
    DueCapture,
    Note,
    ObservedSchedules,
    ScheduleEvent,
    decide_schedules,
)
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import ClusterError
from specdecode_operator.cluster.drift import is_owned
from specdecode_operator.cluster.resources import PERSISTENT_VOLUME_CLAIM
from specdecode_operator.deployment.desired_state import DesiredState
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment
from specdecode_operator.deployment.rollout.rollout_gate import GateState, may_be_of_gate
from specdecode_operator.handlers.status_writer import Reporter
from specdecode_operator.problems import InvalidSpecError

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")


async def keep_schedules(
    reporter: Reporter, parent: ParsedDeployment, schedules: Sequence[CaptureSchedule] | None
) -> list[ScheduleStatus] | None:
    """Write what is due; return the status of the schedules, or None if they cannot be read.

    The status of a schedule stays as it was while its capture cannot be created.
    """
    if not schedules:  # most objects: nothing is looked up at every round
        return None if schedules is None else []
    cluster, cache = reporter.cluster, reporter.cache
    observed = ObservedSchedules(
        [each for each in cache.captures_of(parent.key) if is_owned(each, parent.uid)],
        cache.claims_captured_from(parent.key),
        parent.status.captures,
        time_is_sure=cluster.clock.is_known and not cluster.clock.disputed_within(OVER_AGE_FOR.total_seconds()),
    )
    decision = decide_schedules(parent.key, parent.uid, schedules, observed, cluster.clock.now())
    events, statuses = [*decision.events], {each.name: each for each in decision.statuses}
    for due in decision.create:
        event = await _tried(parent, _start(reporter, due))
        if event is not None:
            events.append(event)
        else:
            statuses |= {each.name: each for each in parent.status.captures if each.name == due.schedule}
    claims = [{**body, "kind": PERSISTENT_VOLUME_CLAIM.kind} for body in decision.delete_claims]
    for body in [*map(_typed, decision.delete_captures), *claims]:
        await _tried(parent, cluster.delete(body))
    written = [note for note in decision.notes if await _tried(parent, _write_note(reporter, note))]
    events += [note.event for note in written if note.event]
    for event in events:
        await reporter.post_event(event.reason, event.message, warns=event.warns)
    return [*statuses.values()]


async def _tried(parent: ParsedDeployment, writing: Awaitable[_T]) -> _T | None:
    try:
        return await writing
    except ClusterError as error:
        _logger.warning("%s: spec.captures: %s; tried again soon", parent.key, error)
        return None


async def _write_note(reporter: Reporter, note: Note) -> bool:
    changed = await reporter.cluster.merge(note.body, {"metadata": {"annotations": {note.annotation: note.text}}})
    kind = note.body["kind"]
    if kind == capture.KIND:
        reporter.cache.put_parent(kind, changed)
    else:
        reporter.cache.put(kind, changed)
    return True


async def _start(reporter: Reporter, due: DueCapture) -> ScheduleEvent:
    """Create a capture unless it exists; return the event to post.

    It is never applied: that would take over another owner's object of its name. One that no watch has reported yet
    is a conflict, and is known at the next reconcile.
    """
    live = reporter.cache.parent(Key(reporter.key.namespace, due.name, capture.KIND))
    if live is not None and not is_owned(live, reporter.uid):
        return due.told_as_taken()
    for body in due.replaces:
        await reporter.cluster.merge(_typed(body), {"spec": {"suspend": True}})
    if live is None:
        reporter.cache.put_parent(capture.KIND, await reporter.cluster.create(due.body))
    return due.told_as_started()


def _typed(body: Body) -> Body:
    """Add the kind, which lists leave out."""
    return {**body, "apiVersion": base.API_VERSION, "kind": capture.KIND}


def seen_gate(cache: Cache, parent: ParsedDeployment) -> GateState:
    """Return what the cluster has for the gate of a deployment."""
    gate = _gate_of(parent)
    return gate_state(parent.key, parent.uid, gate, _gate_objects(cache, parent.key, gate))


async def keep_gate(reporter: Reporter, parent: ParsedDeployment, desired: DesiredState) -> None:
    """Create and delete the captures of a deployment's gate."""
    gate = _gate_of(parent)
    seen = _gate_objects(reporter.cache, parent.key, gate)
    writes = gate_writes(parent.key, parent.uid, gate, desired, seen)
    try:
        for body in writes.delete:
            await reporter.cluster.delete(_typed(body))
        if writes.create is not None:
            reporter.cache.put_parent(capture.KIND, await reporter.cluster.create(writes.create))
            message = f"capture {writes.create['metadata']['name']} judges the engines of this spec"
            await reporter.post_event("GateCaptureStarted", message)
    except ClusterError as error:
        _logger.warning("%s: spec.rollout.gate: %s; tried again soon", parent.key, error)


def _gate_objects(cache: Cache, key: Key, gate: Gate | None) -> GateObjects:
    captures = cache.captures_of(key)
    if gate is None:
        return GateObjects(captures)
    # Captures of other deployments may have the name of one that judges for this one.
    names = {body["metadata"]["name"] for body in captures}
    in_its_place = [
        body
        for other in cache.parents(capture.KIND)
        if other.namespace == key.namespace and other.name not in names and may_be_of_gate(key, other.name)
        if (body := cache.parent(other)) is not None
    ]
    golden = cache.parent(Key(key.namespace, gate.capture, capture.KIND))
    return GateObjects([*captures, *in_its_place], golden)


def _gate_of(parent: ParsedDeployment) -> Gate | None:
    return None if isinstance(parent.spec, InvalidSpecError) else parent.spec.rollout.gate
