"""Create a deployment's automatic captures: scheduled ones, and those of its rollout gate."""

import logging
from collections.abc import Awaitable, Iterator, Sequence
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
from specdecode_operator.cluster.client import Cluster, ClusterError
from specdecode_operator.cluster.clock import ServerTime
from specdecode_operator.cluster.drift import is_owned
from specdecode_operator.cluster.resources import PERSISTENT_VOLUME_CLAIM
from specdecode_operator.deployment.desired_state import DesiredState
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment
from specdecode_operator.deployment.rollout.rollout_gate import GateState, may_be_of_gate
from specdecode_operator.handlers.status_writer import Reporter
from specdecode_operator.problems import InvalidSpecError

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class ScheduleKeeper:
    """Carries out what the schedules of one deployment ask for."""

    def __init__(self, cluster: Cluster, cache: Cache, reporter: Reporter, clock: ServerTime) -> None:
        self._cluster = cluster
        self._cache = cache
        self._reporter = reporter
        self._clock = clock
        self.gates = GateKeeper(cluster, cache, reporter)

    async def keep(
        self, parent: ParsedDeployment, schedules: Sequence[CaptureSchedule] | None
    ) -> list[ScheduleStatus] | None:
        """Do what is due, and return what the status says of the schedules; None where they cannot be read.

        What the API server refuses is tried again at the next look, and holds up nothing else: until then the status of
        that schedule stays as it was.
        """
        if schedules is None:
            return None
        if not schedules:
            return []  # most objects: nothing of theirs is looked for at every round
        captures = [each for each in self._cache.captures_of(parent.key) if is_owned(each, parent.uid)]
        observed = ObservedSchedules(
            captures,
            self._cache.claims_captured_from(parent.key),
            parent.status.captures,
            time_is_sure=self._clock.is_known and not self._clock.disputed_within(OVER_AGE_FOR.total_seconds()),
        )
        decision = decide_schedules(parent.key, parent.uid, schedules, observed, self._clock.now())
        events, statuses = [*decision.events], {each.name: each for each in decision.statuses}
        for due in decision.create:
            event = await self._tried(parent, self._start(parent, due))
            if event is not None:
                events.append(event)
            else:
                statuses |= {each.name: each for each in parent.status.captures if each.name == due.schedule}
        claims = [{**body, "kind": PERSISTENT_VOLUME_CLAIM.kind} for body in decision.delete_claims]
        for body in [*map(_typed, decision.delete_captures), *claims]:
            await self._tried(parent, self._cluster.delete(body))
        written = [note for note in decision.notes if await self._tried(parent, self._write_note(note))]
        events += [note.event for note in written if note.event]
        for event in events:
            await self._reporter.post_event(parent.key, parent.uid, event.reason, event.message, warns=event.warns)
        return [*statuses.values()]

    async def _tried(self, parent: ParsedDeployment, writing: Awaitable[_T]) -> _T | None:
        """Write something; return None where the API server refuses it."""
        try:
            return await writing
        except ClusterError as error:
            _logger.warning("%s: spec.captures: %s; tried again soon", parent.key, error)
            return None

    async def _write_note(self, note: Note) -> bool:
        """Write a note and remember the object with it; return True."""
        changed = await self._cluster.merge(note.body, {"metadata": {"annotations": {note.annotation: note.text}}})
        kind = note.body["kind"]
        if kind == capture.KIND:
            self._cache.put_parent(kind, changed)
        else:
            self._cache.put(kind, changed)
        return True

    async def _start(self, parent: ParsedDeployment, due: DueCapture) -> ScheduleEvent:
        """Create a capture, unless it is there; return what is to be told of it.

        It is never applied: that would take over what somebody else made under its name. One that no watch has told of
        yet is a conflict, and known at the next look.
        """
        there = self._cache.parent(Key(parent.key.namespace, due.name, capture.KIND))
        if there is not None and not is_owned(there, parent.uid):
            return due.told_as_taken()
        for body in due.replaces:
            await self._cluster.merge(_typed(body), {"spec": {"suspend": True}})
        if there is None:
            self._cache.put_parent(capture.KIND, await self._cluster.create(due.body))
        return due.told_as_started()


def _typed(body: Body) -> Body:
    """Return a capture with its kind, which lists leave out."""
    return {**body, "apiVersion": base.API_VERSION, "kind": capture.KIND}


class GateKeeper:
    """Carries out what the gate of one deployment asks for."""

    def __init__(self, cluster: Cluster, cache: Cache, reporter: Reporter) -> None:
        self._cluster = cluster
        self._cache = cache
        self._reporter = reporter

    def state(self, parent: ParsedDeployment) -> GateState:
        """Return what the cluster has for the gate of an object."""
        gate = _gate_of(parent)
        return gate_state(parent.key, parent.uid, gate, self._seen(parent, gate))

    async def keep(self, parent: ParsedDeployment, desired: DesiredState) -> None:
        """Do what is to be done; what the API server refuses is tried again at the next look."""
        gate = _gate_of(parent)
        writes = gate_writes(parent.key, parent.uid, gate, desired, self._seen(parent, gate))
        try:
            for body in writes.delete:
                await self._cluster.delete(_typed(body))
            if writes.create is not None:
                self._cache.put_parent(capture.KIND, await self._cluster.create(writes.create))
                message = f"capture {writes.create['metadata']['name']} judges the engines of this spec"
                await self._reporter.post_event(parent.key, parent.uid, "GateCaptureStarted", message)
        except ClusterError as error:
            _logger.warning("%s: spec.rollout.gate: %s; tried again soon", parent.key, error)

    def _seen(self, parent: ParsedDeployment, gate: Gate | None) -> GateObjects:
        captures = self._cache.captures_of(parent.key)
        if gate is None:
            return GateObjects(captures)
        golden = self._cache.parent(Key(parent.key.namespace, gate.capture, capture.KIND))
        return GateObjects([*captures, *self._in_its_place(parent.key, captures)], golden)

    def _in_its_place(self, key: Key, own: Sequence[Body]) -> Iterator[Body]:
        """Yield captures of other objects that have the name of one which judges for this one."""
        names = {body["metadata"]["name"] for body in own}
        for other in self._cache.parents(capture.KIND):
            if other.namespace == key.namespace and other.name not in names and may_be_of_gate(key, other.name):
                body = self._cache.parent(other)
                if body is not None:
                    yield body


def _gate_of(parent: ParsedDeployment) -> Gate | None:
    return None if isinstance(parent.spec, InvalidSpecError) else parent.spec.rollout.gate
