"""Decide which scheduled captures are due, which have expired, and whose data may be deleted."""

import hashlib
import zoneinfo
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Final

from cronsim import CronSim

from specdecode_operator.api import base
from specdecode_operator.api import capture as capture_api
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture_status import CapturePhase
from specdecode_operator.api.deployment import CaptureSchedule, Concurrency, Key, Queue, ScheduleStatus
from specdecode_operator.api.deployment_rules import NAME_MAX_LENGTH
from specdecode_operator.capture.volumes import is_published
from specdecode_operator.cluster.clock import AHEAD, TIME_IN_FUTURE, told_ahead
from specdecode_operator.cluster.manifests import owner_reference
from specdecode_operator.cluster.resources import (
    CAPTURE_LABEL,
    COUNTED_FROM_ANNOTATION,
    MANAGED_BY_LABEL,
    MANAGER,
    OVER_AGE_ANNOTATION,
    PERSISTENT_VOLUME_CLAIM,
    QUEUE_LABEL,
    QUEUE_PRIORITY_LABEL,
    SCHEDULE_LABEL,
    SCHEDULED_AT_ANNOTATION,
)

_FORMAT: Final = "%Y-%m-%dT%H:%M:%SZ"
_DIGEST_LENGTH: Final = 8
_OVER: Final = frozenset({CapturePhase.SUCCEEDED, CapturePhase.FAILED, CapturePhase.CANCELLED})

OVER_AGE_FOR: Final = timedelta(hours=1)
"""How long a claim must have been over age before it is deleted: files do not come back, and a clock may jump."""


@dataclass(frozen=True)
class ScheduleEvent:
    """An Event of the deployment."""

    reason: str
    message: str
    warns: bool = False


@dataclass(frozen=True)
class DueCapture:
    """A capture whose time has come."""

    body: Body
    replaces: Sequence[Body]
    """Captures to suspend, because this one takes their place."""

    @property
    def name(self) -> str:
        """Its name, which is of its time and schedule alone."""
        return str(self.body["metadata"]["name"])

    def told_as_started(self) -> ScheduleEvent:
        """Return the Event that it is there."""
        return ScheduleEvent("CaptureStarted", f"{self.schedule}: capture {self.name} is due")

    def told_as_taken(self) -> ScheduleEvent:
        """Return the Event that its name is somebody else's."""
        why = f"SpecDecodeCapture {self.name} exists and does not belong to this object; it is left untouched"
        return _missed(self.schedule, self.body["metadata"]["annotations"][SCHEDULED_AT_ANNOTATION], why)

    @property
    def schedule(self) -> str:
        """Name of its schedule."""
        return str(self.body["metadata"]["labels"][SCHEDULE_LABEL])


def _missed(schedule: str, at: str, why: str) -> ScheduleEvent:
    return ScheduleEvent("MissedSchedule", f"{schedule}: the capture of {at} was missed: {why}", warns=True)


@dataclass(frozen=True)
class Note:
    """An annotation to write on a capture or a claim."""

    body: Body
    """With its kind, which lists leave out."""

    annotation: str
    text: str | None
    """None takes the annotation away."""

    event: ScheduleEvent | None = None
    """Told once it is written."""


@dataclass
class SchedulingDecision:
    """What is to be done now for the schedules of one deployment."""

    create: list[DueCapture] = field(default_factory=list)
    delete_captures: list[Body] = field(default_factory=list)  # captures that are over, beyond the history
    delete_claims: list[Body] = field(default_factory=list)  # claims beyond what retention keeps
    notes: list[Note] = field(default_factory=list)
    statuses: list[ScheduleStatus] = field(default_factory=list)  # what the deployment's status says of its schedules
    events: list[ScheduleEvent] = field(default_factory=list)


@dataclass(frozen=True)
class ObservedSchedules:
    """What the cache holds of one deployment's schedules."""

    captures: Sequence[Body]
    claims: Sequence[Body]
    statuses: Sequence[ScheduleStatus]

    time_is_sure: bool = True
    """Whether the time is known well enough to judge ages by it: the API server tells it, and has not contradicted
    itself within `OVER_AGE_FOR`."""


def decide_schedules(
    key: Key, uid: str, schedules: Sequence[CaptureSchedule], observed: ObservedSchedules, now: datetime
) -> SchedulingDecision:
    """Return what is due at a time, for schedules without problems and statuses without times in the future.

    It is safe to carry out twice: a capture has the name of its time, so that the second creation meets the first.
    Whether the name is somebody else's shows only then.
    """
    decision = SchedulingDecision()
    known = {status.name: status for status in observed.statuses}
    for schedule in schedules:
        captures = _of_schedule(observed.captures, schedule)
        status = known.get(schedule.name)
        if status is None or status.schedule != _clock(schedule):
            status = ScheduleStatus(name=schedule.name, schedule=_clock(schedule), since=_text(now))
        status, due, event = _check_due(schedule, captures, status, now)
        decision.statuses.append(_with_next(schedule, status, now))
        decision.events += [event] if event else []
        if due is not None:
            replaces = _replaceable(captures) if schedule.concurrency_policy is Concurrency.REPLACE else []
            decision.create.append(DueCapture(_capture(key, uid, schedule, due), replaces))
        claims = _of_schedule(observed.claims, schedule)
        decision.delete_captures += _too_old_captures(schedule, captures, claims, now)
        kept, beyond = _by_count(schedule, captures, claims, now)
        decision.delete_claims += beyond
        if observed.time_is_sure:
            expired, notes = _by_age(schedule, kept, now)
            decision.delete_claims += expired
            of_kinds = [(capture_api.KIND, captures), (PERSISTENT_VOLUME_CLAIM.kind, claims)]
            decision.notes += chain(notes, *(_notes_of_future(kind, bodies, now) for kind, bodies in of_kinds))
    return decision


def _clock(schedule: CaptureSchedule) -> str:
    return f"{schedule.schedule} {schedule.time_zone}"


def _check_due(
    schedule: CaptureSchedule, captures: Sequence[Body], status: ScheduleStatus, now: datetime
) -> tuple[ScheduleStatus, datetime | None, ScheduleEvent | None]:
    """Return the status after now, the time whose capture is to start, and the Event that says what was missed."""
    status = _caught_up(status, captures, now)
    due = _latest_due(schedule, status, now)
    if due is None:
        return status, None, None
    done = status.model_copy(update={"last_schedule_time": _text(due)})
    if schedule.suspend:
        return done, None, None  # what falls into a time of rest is not made up for
    if now - due > timedelta(seconds=schedule.starting_deadline_seconds):
        late = f"more than {schedule.starting_deadline_seconds} s late (startingDeadlineSeconds)"
        return done, None, _missed(schedule.name, _text(due), late)
    if _running(captures) and schedule.concurrency_policy is Concurrency.FORBID:
        return status, None, None
    return done, due, None


def _caught_up(status: ScheduleStatus, captures: Sequence[Body], now: datetime) -> ScheduleStatus:
    """Return a status that knows the captures that are there: the operator may be killed before it is written.

    Else the last one would be made again once the history lets it go.
    """
    made = [at for each in captures if (at := _scheduled_at(each)) is not None and at <= now]
    latest = max(made, default=None)
    if latest is None or latest <= _time(status.last_schedule_time or status.since):
        return status
    return status.model_copy(update={"last_schedule_time": _text(latest)})


def _latest_due(schedule: CaptureSchedule, status: ScheduleStatus, now: datetime) -> datetime | None:
    """The last time of the schedule that nothing was done for; earlier ones are not made up for."""
    handled = [_time(status.since)]
    if status.last_schedule_time:
        handled.append(_time(status.last_schedule_time))
    # Backwards from just after now, so that this very second counts. Added in UTC: in the hour that autumn repeats,
    # arithmetic on local times forgets which of the two it is.
    local = (now + timedelta(seconds=1)).astimezone(zoneinfo.ZoneInfo(schedule.time_zone))
    due = next(CronSim(schedule.schedule, local, reverse=True)).astimezone(UTC)
    return due if due > max(handled) else None


def _with_next(schedule: CaptureSchedule, status: ScheduleStatus, now: datetime) -> ScheduleStatus:
    if schedule.suspend:
        return status.model_copy(update={"next_schedule_time": None})
    local = now.astimezone(zoneinfo.ZoneInfo(schedule.time_zone))
    # In the hour that autumn repeats, what follows on the clock may have been already.
    following = (each.astimezone(UTC) for each in CronSim(schedule.schedule, local))
    return status.model_copy(update={"next_schedule_time": _text(next(each for each in following if each > now))})


def _capture(key: Key, uid: str, schedule: CaptureSchedule, due: datetime) -> Body:
    """Return the capture of one time. It is owned: it goes with its deployment, and the data stays."""
    # As it was written: rules tell an empty list from none.
    template = schedule.template.model_dump(by_alias=True, mode="json", exclude_unset=True)
    return {
        "apiVersion": base.API_VERSION,
        "kind": capture_api.KIND,
        "metadata": {
            "namespace": key.namespace,
            "name": _name(key.name, uid, schedule.name, due),
            "labels": {MANAGED_BY_LABEL: MANAGER, SCHEDULE_LABEL: schedule.name} | _queue_labels(schedule.queue),
            "annotations": {SCHEDULED_AT_ANNOTATION: _text(due)},
            "ownerReferences": [owner_reference(key, uid)],
        },
        "spec": {"deployment": key.name, **template},
    }


def _queue_labels(queue: Queue | None) -> dict[str, str]:
    if queue is None:
        return {}
    priority = {QUEUE_PRIORITY_LABEL: queue.priority_class} if queue.priority_class else {}
    return {QUEUE_LABEL: queue.name} | priority


def _name(deployment: str, uid: str, schedule: str, due: datetime) -> str:
    """Return a name that is short enough, and that no other schedule's capture has.

    `llama` and `prod-nightly` read as `llama-prod` and `nightly` do: the digest tells them apart.
    """
    digest = hashlib.sha256(f"{uid}/{schedule}".encode()).hexdigest()[:_DIGEST_LENGTH]
    suffix = f"-{schedule}-{digest}-{int(due.timestamp()) // 60}"
    return f"{deployment[: NAME_MAX_LENGTH - len(suffix)].rstrip('-')}{suffix}"


def _too_old_captures(
    schedule: CaptureSchedule, captures: Sequence[Body], claims: Sequence[Body], now: datetime
) -> list[Body]:
    """Captures that are over, beyond the history that is kept."""
    succeeded = [each for each in captures if _phase(each) == CapturePhase.SUCCEEDED]
    failed = [each for each in captures if _phase(each) in _OVER - {CapturePhase.SUCCEEDED}]
    limits = ((succeeded, schedule.successful_history_limit), (failed, schedule.failed_history_limit))
    beyond = [each for found, limit in limits for each in _newest_first(found, now)[limit:]]
    # Once it is gone, only its claim's label tells that there is good data on it.
    unlabelled = {_capture_of(each) for each in claims if not is_published(each)}
    return [each for each in beyond if each not in succeeded or each["metadata"]["name"] not in unlabelled]


def _by_count(
    schedule: CaptureSchedule, captures: Sequence[Body], claims: Sequence[Body], now: datetime
) -> tuple[list[Body], list[Body]]:
    """Return the claims that retention keeps by their number, and those that it does not.

    Claims of captures that are not over are in neither list. Claims with published files are counted apart from all
    others: no number of failures pushes out good data.
    """
    retention = schedule.retention
    # By the label: a claim is there before its capture's status says so.
    in_use = {each["metadata"]["name"] for each in _running(captures)}
    ended = [
        each
        for each in _newest_first(claims, now)
        if _capture_of(each) not in in_use and "deletionTimestamp" not in each["metadata"]
    ]
    succeeded = {each["metadata"]["name"] for each in captures if _phase(each) == CapturePhase.SUCCEEDED}
    good = [each for each in ended if is_published(each) or _capture_of(each) in succeeded]
    partial = [each for each in ended if each not in good]
    failed_count = retention.count if retention.failed_count is None else retention.failed_count
    limits = ((good, retention.count), (partial, failed_count))
    beyond = [each for found, limit in limits if limit is not None for each in found[limit:]]
    return [each for each in ended if each not in beyond], beyond


def _by_age(schedule: CaptureSchedule, claims: Sequence[Body], now: datetime) -> tuple[list[Body], list[Note]]:
    """Return the claims to delete for their age, and what to note on others.

    A claim is deleted when two looks found it over age, at least `OVER_AGE_FOR` apart. The first look is noted on the
    claim, where it outlives the operator. A note counts only if the claim was over age then: one that was forged,
    restored from a backup, or made while a clock was ahead is replaced.
    """
    days, expired, notes = schedule.retention.days, [], []
    for each in claims:
        claim = {**each, "kind": PERSISTENT_VOLUME_CLAIM.kind}
        noted = _annotated(claim, OVER_AGE_ANNOTATION)
        due = None if days is None else _made(claim, now) + timedelta(days=days)
        if due is None or now <= due:
            if OVER_AGE_ANNOTATION in _annotations(claim):
                notes.append(Note(claim, OVER_AGE_ANNOTATION, None))
        elif noted is None or not due <= noted <= now + AHEAD:
            notes.append(Note(claim, OVER_AGE_ANNOTATION, _text(now)))
        elif now - noted >= OVER_AGE_FOR:
            expired.append(claim)
    return expired, notes


def _notes_of_future(kind: str, bodies: Sequence[Body], now: datetime) -> list[Note]:
    """Return what to note on objects that were made in the future, once for each.

    Without the note such an object would be the newest until then, and push out what is made meanwhile.
    """
    notes = []
    for body in bodies:
        if _time(_created(body)) > now + AHEAD and _counted_from(body, now) is None:
            told = told_ahead(f"{kind} {body['metadata']['name']}: metadata.creationTimestamp", _created(body), now)
            event = ScheduleEvent(TIME_IN_FUTURE, told, warns=True)
            notes.append(Note({**body, "kind": kind}, COUNTED_FROM_ANNOTATION, _text(now), event))
    return notes


def _scheduled_at(capture: Body) -> datetime | None:
    """Return the time that a capture was made for; None where somebody took its annotation away, or broke it.

    A capture that is made twice for that has the name of the first, and so stays what it is.
    """
    return _annotated(capture, SCHEDULED_AT_ANNOTATION)


def _capture_of(claim: Body) -> str | None:
    """Name of the capture that a claim was created for."""
    name: str | None = claim["metadata"]["labels"].get(CAPTURE_LABEL)
    return name


def _of_schedule(bodies: Sequence[Body], schedule: CaptureSchedule) -> list[Body]:
    return [each for each in bodies if (each["metadata"].get("labels") or {}).get(SCHEDULE_LABEL) == schedule.name]


def _running(captures: Sequence[Body]) -> list[Body]:
    return [each for each in captures if _phase(each) not in _OVER]


def _replaceable(captures: Sequence[Body]) -> list[Body]:
    return [each for each in _running(captures) if not each["spec"].get("suspend")]


def _newest_first(bodies: Sequence[Body], now: datetime) -> list[Body]:
    return sorted(bodies, key=lambda body: (_made(body, now), _created(body), body["metadata"]["name"]), reverse=True)


def _made(body: Body, now: datetime) -> datetime:
    """Return when an object was made; for a time in the future, when it was found to be one."""
    created = _time(_created(body))
    return created if created <= now + AHEAD else _counted_from(body, now) or now


def _created(body: Body) -> str:
    return str(body["metadata"]["creationTimestamp"])


def _counted_from(body: Body, now: datetime) -> datetime | None:
    """Return since when an object of the future counts; None if that was not noted, or is in the future itself."""
    noted = _annotated(body, COUNTED_FROM_ANNOTATION)
    return noted if noted is not None and noted <= now + AHEAD else None


def _annotations(body: Body) -> Body:
    return body["metadata"].get("annotations") or {}


def _annotated(body: Body, annotation: str) -> datetime | None:
    """Return the time in an annotation; None if there is none: anybody may write annotations."""
    try:
        return _time(_annotations(body)[annotation])
    except (KeyError, TypeError, ValueError):
        return None


def _phase(capture: Body) -> str | None:
    phase: str | None = capture.get("status", {}).get("phase")
    return phase


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime(_FORMAT)


def _time(text: str) -> datetime:
    return datetime.strptime(text, _FORMAT).replace(tzinfo=UTC)
