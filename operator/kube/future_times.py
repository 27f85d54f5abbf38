"""Times of the past that lie in the future: a clock was ahead when they were written.

Left alone, such a time stops whatever waits for an age, for as long as the clock was ahead. So it counts as now, and
that is written back, so that time goes on from there.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.problems import printable

AHEAD: Final = timedelta(minutes=1)
"""Clocks that differ by less are usual; a time so near in the future is left as it is."""

TIME_IN_FUTURE: Final = "TimeInFuture"
"""Reason of the Event that tells of one."""

_PAST_FIELDS: Final = frozenset(
    {
        "at",
        "finishedAt",
        "idleSince",
        "lastScheduleTime",
        "lastTransitionTime",
        "restarts",
        "returnedAt",
        "saidUntil",
        "servedAt",
        "since",
        "startedAt",
    }
)
"""Fields of our statuses with times of what has happened. Others, such as nextScheduleTime, are meant to be ahead."""

_FORMAT: Final = "%Y-%m-%dT%H:%M:%SZ"
_LONGEST: Final = 64


def is_ahead(text: str | None, now: datetime) -> bool:
    """Whether a text is a time that lies in the future."""
    moment = _moment(text)
    return moment is not None and moment > now + AHEAD


def told_ahead(field: str, text: str, now: datetime) -> str:
    """Return the message about a time of the past that lies in the future."""
    moment = _moment(text)
    by_s = 0 if moment is None else (moment - now).total_seconds()
    return (
        f"{field}: {printable(text)} lies {by_s:.0f} s in the future, so a clock was ahead when it was written; it"
        " counts as now: check the clocks of the API server and of the operator's node"
    )


def without_times_ahead(status: Body, now: datetime | None) -> tuple[Body, tuple[str, ...]]:
    """Return a status in which times of the past that lie in the future are now, and a message for each of them.

    A status without any is returned as it is, and so is every status if ``now`` is None.
    """
    if now is None:
        return status, ()
    found = tuple(_found(status, "status", now))
    return (_corrected(status, now), found) if found else (status, ())


def _found(value: Any, path: str, now: datetime, *, is_past: bool = False) -> Iterator[str]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _found(each, f"{path}.{name}", now, is_past=name in _PAST_FIELDS)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _found(each, f"{path}[{number}]", now, is_past=is_past)
    elif is_past and isinstance(value, str) and is_ahead(value, now):
        yield told_ahead(path, value, now)


def _corrected(value: Any, now: datetime, *, is_past: bool = False) -> Any:
    if isinstance(value, dict):
        return {name: _corrected(each, now, is_past=name in _PAST_FIELDS) for name, each in value.items()}
    if isinstance(value, list):
        return [_corrected(each, now, is_past=is_past) for each in value]
    return now.strftime(_FORMAT) if is_past and isinstance(value, str) and is_ahead(value, now) else value


def _moment(text: str | None) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text) if text and len(text) <= _LONGEST else None
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC) if moment is not None and moment.tzinfo is None else moment
