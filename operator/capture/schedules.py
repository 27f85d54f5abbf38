"""Decide which scheduled captures are due, which have expired, and whose data may be deleted."""

import hashlib
import zoneinfo
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from cronsim import CronSim

from specdecode_operator.api import base
from specdecode_operator.api import capture as capture_api
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture_status import CapturePhase
from specdecode_operator.api.deployment import CaptureSchedule, Concurrency, Key, ScheduleStatus
from specdecode_operator.api.deployment_rules import NAME_MAX_LENGTH
from specdecode_operator.capture.volumes import is_published
from specdecode_operator.cluster import resources
from specdecode_operator.cluster.clock import AHEAD, RFC3339, TIME_IN_FUTURE, rfc3339, told_ahead
from specdecode_operator.cluster.manifests import owner_reference

_OVER: Final = frozenset({CapturePhase.SUCCEEDED, CapturePhase.FAILED, CapturePhase.CANCELLED})
# How long a claim must have been over age before it is deleted, because a clock may jump.
OVER_AGE_FOR: Final = timedelta(hours=1)


@dataclass(frozen=True)
class ScheduleEvent:
    """An Event of the deployment."""

    reason: str
    message: str
    warns: bool = False


@dataclass(frozen=True)
class DueCapture:
    """A capture to create now."""

    body: Body
    replaces: Sequence[Body]  # running captures to suspend first

    @property
    def name(self) -> str:
        """Name, derived from schedule and time."""
        return str(self.body["metadata"]["name"])

    @property
    def schedule(self) -> str:
        """Name of its schedule."""
        return str(self.body["metadata"]["labels"][resources.SCHEDULE_LABEL])

    def told_as_started(self) -> ScheduleEvent:
        """Return the Event of a created capture."""
        return ScheduleEvent("CaptureStarted", f"{self.schedule}: capture {self.name} is due")

    def told_as_taken(self) -> ScheduleEvent:
        """Return the Event of a capture whose name belongs to a foreign object."""
        why = f"SpecDecodeCapture {self.name} exists and does not belong to this object; it is left untouched"
        return _missed(self.schedule, self.body["metadata"]["annotations"][resources.SCHEDULED_AT_ANNOTATION], why)


def _missed(schedule: str, at: str, why: str) -> ScheduleEvent:
    return ScheduleEvent("MissedSchedule", f"{schedule}: the capture of {at} was missed: {why}", warns=True)


@dataclass(frozen=True)
class Note:
    """An annotation to write on a capture or a claim."""

    body: Body  # with its kind, which lists leave out
    annotation: str
    text: str | None  # None removes the annotation
    event: ScheduleEvent | None = None  # published after the write


@dataclass
class SchedulingDecision:
    """Changes to make now for the schedules of one deployment."""

    create: list[DueCapture] = field(default_factory=list)
    delete_captures: list[Body] = field(default_factory=list)  # finished captures beyond the history limit
    delete_claims: list[Body] = field(default_factory=list)  # claims beyond the retention
    notes: list[Note] = field(default_factory=list)
    statuses: list[ScheduleStatus] = field(default_factory=list)
    events: list[ScheduleEvent] = field(default_factory=list)


@dataclass(frozen=True)
class ObservedSchedules:
    """Cached objects of one deployment's schedules."""

    captures: Sequence[Body]
    claims: Sequence[Body]
    statuses: Sequence[ScheduleStatus]
    # The time is reliable enough to judge ages: the API server's clock has been consistent for `OVER_AGE_FOR`.
    time_is_sure: bool = True
    in_use: frozenset[str] = frozenset()  # captures that a training reads; they and their claims are kept


def decide_schedules(
    key: Key, uid: str, schedules: Sequence[CaptureSchedule], observed: ObservedSchedules, now: datetime
) -> SchedulingDecision:
    """Decide which captures to create and delete, for valid schedules and statuses without times in the future."""
    # The decision is safe to apply twice: a second creation conflicts with the first, which has the same name.
    decision = SchedulingDecision()
    known = {status.name: status for status in observed.statuses}
    for schedule in schedules:
        captures = _of_schedule(observed.captures, schedule)
        running = [each for each in captures if _phase(each) not in _OVER]
        clock = f"{schedule.schedule} {schedule.time_zone}"
        status = known.get(schedule.name)
        if status is None or status.schedule != clock:
            status = ScheduleStatus(name=schedule.name, schedule=clock, since=_text(now))
        status, due, event = _check_due(schedule, captures, running, status, now)
        decision.statuses.append(_with_next(schedule, status, now))
        decision.events += [event] if event else []
        if due is not None:
            replaces = schedule.concurrency_policy is Concurrency.REPLACE
            replaced = [each for each in running if replaces and not each["spec"].get("suspend")]
            decision.create.append(DueCapture(_capture(key, uid, schedule, due), replaced))
        claims = _of_schedule(observed.claims, schedule)
        too_old = _too_old_captures(schedule, captures, claims, now)
        kept, beyond = _by_count(schedule, captures, claims, now)
        if observed.time_is_sure:
            expired, notes = _by_age(schedule, kept, now)
            beyond += expired
            decision.notes += notes
        decision.delete_captures += (each for each in too_old if each["metadata"]["name"] not in observed.in_use)
        decision.delete_claims += (each for each in beyond if _capture_of(each) not in observed.in_use)
        if observed.time_is_sure:
            decision.notes += _notes_of_future(capture_api.KIND, captures, now)
            decision.notes += _notes_of_future(resources.PERSISTENT_VOLUME_CLAIM.kind, claims, now)
    return decision


def _check_due(
    schedule: CaptureSchedule,
    captures: Sequence[Body],
    running: Sequence[Body],
    status: ScheduleStatus,
    now: datetime,
) -> tuple[ScheduleStatus, datetime | None, ScheduleEvent | None]:
    """Return the new status, the scheduled time of the capture to start, and the Event of a missed one."""
    handled = _time(status.last_schedule_time or status.since)
    # The operator may be killed before it writes the status. Without this, the last capture would be created again
    # once the history deletes it.
    made = [at for each in captures if (at := scheduled_at(each)) is not None and at <= now]
    if made and (latest := max(made)) > handled:
        status, handled = status.model_copy(update={"last_schedule_time": _text(latest)}), latest
    # Backwards from just after now, so that this second counts. Added in UTC: in the hour that autumn repeats,
    # arithmetic on local times loses which of the two it is. Earlier times are not made up for.
    local = (now + timedelta(seconds=1)).astimezone(zoneinfo.ZoneInfo(schedule.time_zone))
    due = next(CronSim(schedule.schedule, local, reverse=True)).astimezone(UTC)
    if due <= max(handled, _time(status.since)):
        return status, None, None
    done = status.model_copy(update={"last_schedule_time": _text(due)})
    if schedule.suspend:
        return done, None, None
    if now - due > timedelta(seconds=schedule.starting_deadline_seconds):
        late = f"more than {schedule.starting_deadline_seconds} s late (startingDeadlineSeconds)"
        return done, None, _missed(schedule.name, _text(due), late)
    if running and schedule.concurrency_policy is Concurrency.FORBID:
        return status, None, None
    return done, due, None


def _with_next(schedule: CaptureSchedule, status: ScheduleStatus, now: datetime) -> ScheduleStatus:
    if schedule.suspend:
        return status.model_copy(update={"next_schedule_time": None})
    local = now.astimezone(zoneinfo.ZoneInfo(schedule.time_zone))
    # In the hour that autumn repeats, the next local time may lie in the past.
    following = (each.astimezone(UTC) for each in CronSim(schedule.schedule, local))
    return status.model_copy(update={"next_schedule_time": _text(next(each for each in following if each > now))})


def _capture(key: Key, uid: str, schedule: CaptureSchedule, due: datetime) -> Body:
    """Return the capture of one scheduled time. The deployment owns it; its data outlives both."""
    # Unset fields stay unset, because rules distinguish an empty list from none.
    template = schedule.template.model_dump(by_alias=True, mode="json", exclude_unset=True)
    return {
        "apiVersion": base.API_VERSION,
        "kind": capture_api.KIND,
        "metadata": {
            "namespace": key.namespace,
            "name": run_name(key, uid, schedule.name, due),
            "labels": schedule_labels(schedule),
            "annotations": {resources.SCHEDULED_AT_ANNOTATION: _text(due)},
            "ownerReferences": [owner_reference(key, uid)],
        },
        "spec": {"deployment": key.name, **template},
    }


def run_name(key: Key, uid: str, schedule: str, due: datetime, longest: int = NAME_MAX_LENGTH) -> str:
    """Return the name of the capture of one scheduled time, and of a training on it."""
    # Schedule `prod-nightly` of `llama` and `nightly` of `llama-prod` would get one name without the digest.
    digest = hashlib.sha256(f"{uid}/{schedule}".encode()).hexdigest()[:8]
    suffix = f"-{schedule}-{digest}-{int(due.timestamp()) // 60}"
    return f"{key.name[: longest - len(suffix)].rstrip('-')}{suffix}"


def schedule_labels(schedule: CaptureSchedule) -> dict[str, str]:
    """Return the labels of a schedule's captures and trainings."""
    labels = {resources.MANAGED_BY_LABEL: resources.MANAGER, resources.SCHEDULE_LABEL: schedule.name}
    if schedule.queue is not None:
        labels[resources.QUEUE_LABEL] = schedule.queue.name
        if schedule.queue.priority_class:
            labels[resources.QUEUE_PRIORITY_LABEL] = schedule.queue.priority_class
    return labels


def scheduled_at(capture: Body) -> datetime | None:
    """Return the scheduled time of a capture; None if its annotation is missing or malformed."""
    return _annotated(capture, resources.SCHEDULED_AT_ANNOTATION)


def _too_old_captures(
    schedule: CaptureSchedule, captures: Sequence[Body], claims: Sequence[Body], now: datetime
) -> list[Body]:
    succeeded = [each for each in captures if _phase(each) == CapturePhase.SUCCEEDED]
    failed = [each for each in captures if _phase(each) in _OVER - {CapturePhase.SUCCEEDED}]
    limits = ((succeeded, schedule.successful_history_limit), (failed, schedule.failed_history_limit))
    beyond = [each for found, limit in limits for each in _newest_first(found, now)[limit:]]
    # After a successful capture is deleted, only the label of its claim says that its data is good.
    unlabelled = {_capture_of(each) for each in claims if not is_published(each)}
    return [each for each in beyond if each not in succeeded or each["metadata"]["name"] not in unlabelled]


def _by_count(
    schedule: CaptureSchedule, captures: Sequence[Body], claims: Sequence[Body], now: datetime
) -> tuple[list[Body], list[Body]]:
    """Return the claims that retention keeps by count, and those that it does not."""
    # Claims of unfinished captures are in neither list. Claims with published files are counted apart from all others,
    # so that failures never displace good data.
    retention = schedule.retention
    # A claim exists before its capture's status names it, so the label counts.
    in_use = {each["metadata"]["name"] for each in captures if _phase(each) not in _OVER}
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
    """Return the claims to delete for their age, and annotations to write on others.

    A claim is deleted after two checks, at least `OVER_AGE_FOR` apart, found it over age. The first is recorded on the
    claim, where it survives a restart. The record counts only if the claim was over age then. A record that was forged,
    restored from a backup, or written while a clock was ahead is replaced.
    """
    days, expired, notes = schedule.retention.days, [], []
    for each in claims:
        claim = {**each, "kind": resources.PERSISTENT_VOLUME_CLAIM.kind}
        noted = _annotated(claim, resources.OVER_AGE_ANNOTATION)
        due = None if days is None else _made(claim, now) + timedelta(days=days)
        if due is None or now <= due:
            if resources.OVER_AGE_ANNOTATION in (claim["metadata"].get("annotations") or {}):
                notes.append(Note(claim, resources.OVER_AGE_ANNOTATION, None))
        elif noted is None or not due <= noted <= now + AHEAD:
            notes.append(Note(claim, resources.OVER_AGE_ANNOTATION, _text(now)))
        elif now - noted >= OVER_AGE_FOR:
            expired.append(claim)
    return expired, notes


def _notes_of_future(kind: str, bodies: Sequence[Body], now: datetime) -> list[Note]:
    """Return annotations for objects with a future creation time, which would displace newer ones as the newest."""
    notes = []
    for body in bodies:
        if _time(_created(body)) > now + AHEAD and _counted_from(body, now) is None:
            told = told_ahead(f"{kind} {body['metadata']['name']}: metadata.creationTimestamp", _created(body), now)
            event = ScheduleEvent(TIME_IN_FUTURE, told, warns=True)
            notes.append(Note({**body, "kind": kind}, resources.COUNTED_FROM_ANNOTATION, _text(now), event))
    return notes


def _capture_of(claim: Body) -> str | None:
    name: str | None = claim["metadata"]["labels"].get(resources.CAPTURE_LABEL)
    return name


def _of_schedule(bodies: Sequence[Body], schedule: CaptureSchedule) -> list[Body]:
    return [
        each for each in bodies if (each["metadata"].get("labels") or {}).get(resources.SCHEDULE_LABEL) == schedule.name
    ]


def _newest_first(bodies: Sequence[Body], now: datetime) -> list[Body]:
    return sorted(bodies, key=lambda body: (_made(body, now), _created(body), body["metadata"]["name"]), reverse=True)


def _made(body: Body, now: datetime) -> datetime:
    """Return the creation time of an object, or when it was first found to be in the future."""
    created = _time(_created(body))
    return created if created <= now + AHEAD else _counted_from(body, now) or now


def _created(body: Body) -> str:
    return str(body["metadata"]["creationTimestamp"])


def _counted_from(body: Body, now: datetime) -> datetime | None:
    noted = _annotated(body, resources.COUNTED_FROM_ANNOTATION)
    return noted if noted is not None and noted <= now + AHEAD else None


def _annotated(body: Body, annotation: str) -> datetime | None:
    """Return the time in an annotation; None if it is missing or malformed, since annotations are untrusted."""
    try:
        return _time((body["metadata"].get("annotations") or {})[annotation])
    except (KeyError, TypeError, ValueError):
        return None


def _phase(capture: Body) -> str | None:
    phase: str | None = capture.get("status", {}).get("phase")
    return phase


def _text(time: datetime) -> str:
    return rfc3339(time.astimezone(UTC))


def _time(text: str) -> datetime:
    return datetime.strptime(text, RFC3339).replace(tzinfo=UTC)
