"""What a schedule of captures says that cron or the time zones do not know."""

import zoneinfo
from collections.abc import Sequence
from datetime import UTC, datetime

from cronsim import CronSim, CronSimError

from specdecode_operator.api.capture_schedule import CaptureSchedule
from specdecode_operator.api.patterns import CRON_FIX
from specdecode_operator.problems import Problem


def schedule_problems(schedules: Sequence[CaptureSchedule]) -> list[Problem]:
    """Report what a schedule says that cron or the time zones do not know."""
    problems = []
    for index, schedule in enumerate(schedules):
        where = f"spec.captures[{index}]"
        try:
            next(CronSim(schedule.schedule, datetime.now(UTC)))
        except (CronSimError, StopIteration) as error:
            fix = f"{error or 'it never comes'}: {CRON_FIX}"
            problems.append(Problem(f"{where}.schedule", schedule.schedule, fix))
        try:
            zoneinfo.ZoneInfo(schedule.time_zone)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
            fix = "is not known: use a name of the IANA database, such as UTC or Europe/Berlin"
            problems.append(Problem(f"{where}.timeZone", schedule.time_zone, fix))
    return problems
