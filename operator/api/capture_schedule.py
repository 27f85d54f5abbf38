"""Captures that a SpecDecodeDeployment starts by the clock."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StrictBool, StrictInt, StringConstraints

from specdecode_operator.api.base import ApiModel
from specdecode_operator.api.capture import CaptureRun
from specdecode_operator.api.patterns import CRON_LINE, OBJECT_NAME, SCHEDULE_NAME, TIME_ZONE

ScheduleName = Annotated[str, StringConstraints(max_length=20, pattern=SCHEDULE_NAME)]
CronLine = Annotated[str, StringConstraints(max_length=128, pattern=CRON_LINE)]
TimeZone = Annotated[str, StringConstraints(max_length=64, pattern=TIME_ZONE)]
# As long as a label's value may be, which is how Kueue is told.
QueueObject = Annotated[str, StringConstraints(max_length=63, pattern=OBJECT_NAME)]


class Concurrency(StrEnum):
    """What happens when a capture is due while an earlier one of its schedule runs."""

    FORBID = "Forbid"
    ALLOW = "Allow"
    REPLACE = "Replace"


class Retention(ApiModel):
    """Which claims of a schedule's captures are kept; others are deleted, and their files with them."""

    count: StrictInt | None = Field(default=None, ge=1, le=1000)
    """Claims with the files of captures that succeeded: the newest ones are kept. Absent: any number."""

    failed_count: StrictInt | None = Field(default=None, ge=0, le=1000)
    """Claims of captures that failed, were cancelled or deleted: the newest ones are kept. Absent: as many as count."""

    days: StrictInt | None = Field(default=None, ge=1, le=3650)
    """Age in days at which a claim is deleted, whatever is on it: when two looks, at least an hour apart, have found it
    older by the API server's time. Absent: never."""


class Queue(ApiModel):
    """The queue of Kueue that captures of a schedule wait in."""

    name: QueueObject
    """A LocalQueue of the namespace."""

    priority_class: QueueObject | None = None
    """A WorkloadPriorityClass. Absent: that of the pods."""


class CaptureSchedule(ApiModel):
    """Captures at certain times."""

    name: ScheduleName
    """Name of the schedule, part of the names of its captures."""

    schedule: CronLine
    """Minute, hour, day of month, month and day of week, as cron has them: 0 3 * * 1-5."""

    time_zone: TimeZone = "UTC"
    """Time zone of the schedule, such as Europe/Berlin."""

    concurrency_policy: Concurrency = Concurrency.FORBID
    """When an earlier capture still runs: Forbid waits for it, until startingDeadlineSeconds are over; Allow starts
    another; Replace cancels the earlier one."""

    starting_deadline_seconds: StrictInt = Field(default=300, ge=30, le=86_400)
    """How late a capture may start. One that is missed is left out, and an Event says so."""

    successful_history_limit: StrictInt = Field(default=3, ge=0, le=100)
    """Captures that succeeded and are kept as objects. Their claims follow retention."""

    failed_history_limit: StrictInt = Field(default=1, ge=0, le=100)
    """Captures that failed or were cancelled and are kept as objects."""

    retention: Retention = Retention()
    """Which claims of its captures are kept."""

    suspend: StrictBool = False
    """Start none until it is false again; those that run go on."""

    queue: Queue | None = None
    """The queue of Kueue that starts them, as label kueue.x-k8s.io/queue-name says it of a capture. Absent: none."""

    template: CaptureRun = CaptureRun()
    """The captures that are created."""


class ScheduleStatus(ApiModel):
    """What the operator knows of one schedule."""

    name: ScheduleName
    """Name of the schedule."""

    schedule: str = Field(max_length=256)
    """Schedule and time zone that the times speak of."""

    since: str = Field(max_length=64, json_schema_extra={"format": "date-time"})
    """When the operator first saw this schedule; earlier times are not made up for."""

    last_schedule_time: Annotated[str, StringConstraints(max_length=64)] | None = Field(
        default=None, json_schema_extra={"format": "date-time"}
    )
    """The last time that was due, whether a capture was started for it or it was missed."""

    next_schedule_time: Annotated[str, StringConstraints(max_length=64)] | None = Field(
        default=None, json_schema_extra={"format": "date-time"}
    )
    """When the next capture is due; absent while suspended."""
