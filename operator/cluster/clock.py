"""The API server's clock, and status times that lie ahead of it.

The operator judges ages by the `Date` header of API responses, kept as an offset to a monotonic clock. The clock of
its node may be wrong, and replicas run on different nodes. A past event with a future timestamp was written by a
fast clock. Its time counts as now and is corrected in the status. Without this, age checks would stall until that
time.
"""

import logging
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple

from specdecode_operator.api.base import Body
from specdecode_operator.problems import printable

_HEADER_CUTS_S: Final = 1.0
"""Precision of the header."""

_ALIKE_S: Final = 10.0
"""Maximum difference of clocks that agree."""

_STANDS_S: Final = 300.0
"""How long responses with another time are ignored after the last one that confirmed the known time."""

_WORTH_A_WARNING_S: Final = 60.0

_logger = logging.getLogger(__name__)


RFC3339: Final = "%Y-%m-%dT%H:%M:%SZ"
"""Format of times in Kubernetes objects, in UTC."""


def rfc3339(time_: datetime) -> str:
    """Return a time in UTC as Kubernetes writes it."""
    return time_.strftime(RFC3339)


class _Offset(NamedTuple):
    """Bounds of the API server's Unix time minus the steady clock, in seconds."""

    least: float
    most: float

    def agrees(self, other: "_Offset") -> bool:
        return self.least - _ALIKE_S <= other.most and other.least - _ALIKE_S <= self.most

    def narrowed(self, other: "_Offset") -> "_Offset":
        # If they exclude each other, a clock has drifted, and the other is newer.
        both = _Offset(max(self.least, other.least), min(self.most, other.most))
        return both if both.least <= both.most else other


class ServerTime:
    """The API server's time, learned from its responses; for one event loop.

    API servers behind one address may have different clocks. While responses confirm the known time, a response with
    another time changes nothing, so that time does not jump back and forth. It counts as a dispute, which prevents
    deletions by age.

    Parameters
    ----------
    steady
        A monotonic clock in seconds.
    local
        The clock of this machine as Unix time, used until the first response.
    """

    def __init__(self, steady: Callable[[], float] = time.monotonic, local: Callable[[], float] = time.time) -> None:
        self.steady_s = steady
        self._local = local
        self._offset: _Offset | None = None
        self._first_s = self._confirmed_s = 0.0
        self._disputed_s: float | None = None

    def hear(self, date: str | None, asked_s: float) -> None:
        """Learn from the `Date` header of a response to a request that was sent at ``asked_s`` on the steady clock."""
        try:
            told_s = parsedate_to_datetime(date).timestamp() if date else None
        except (ValueError, OverflowError, OSError):
            told_s = None
        if told_s is None:
            return
        heard_s = self.steady_s()
        # The server wrote the header between request and response.
        offset = _Offset(told_s - heard_s, told_s + _HEADER_CUTS_S - asked_s)
        if self._offset is None:
            self._first_s = heard_s
            self._adopt(offset)
        elif self._offset.agrees(offset):
            self._offset = self._offset.narrowed(offset)
        else:
            if not self.disputed_within(_STANDS_S):
                _logger.warning(
                    "responses of the API server disagree on the time by %.0f s: check the clocks of its nodes",
                    abs(offset.least - self._offset.least),
                )
            self._disputed_s = heard_s
            if heard_s - self._confirmed_s <= _STANDS_S:
                return
            self._adopt(offset)
        self._confirmed_s = heard_s

    def now(self) -> datetime:
        """Return the earliest time that the responses allow, so that no age is overestimated."""
        known = self._offset
        return datetime.fromtimestamp(self._local() if known is None else self.steady_s() + known.least, UTC)

    def agreed_s(self) -> float:
        """Return for how many seconds all responses have agreed; 0 before the first one."""
        if self._offset is None:
            return 0.0
        return self.steady_s() - max(self._first_s, self._disputed_s or self._first_s)

    def disputed_within(self, seconds: float) -> bool:
        """Return whether a response of the last ``seconds`` had another time."""
        return self._disputed_s is not None and self.steady_s() - self._disputed_s < seconds

    @property
    def is_known(self) -> bool:
        """Whether a response had the time."""
        return self._offset is not None

    def _adopt(self, offset: _Offset) -> None:
        self._offset = offset
        ahead_s = self._local() - self.now().timestamp()
        if abs(ahead_s) > _WORTH_A_WARNING_S:
            side = "ahead of" if ahead_s > 0 else "behind"
            _logger.warning(
                "the clock of this node is %.0f s %s the API server's: the operator uses the API server's time",
                *(abs(ahead_s), side),
            )


AHEAD: Final = timedelta(minutes=1)
"""Usual difference of clocks: a time that is less far in the future is kept."""

TIME_IN_FUTURE: Final = "TimeInFuture"
"""Reason of the Event about a past time in the future."""

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
"""Status fields with times of past events. Others, such as nextScheduleTime, may be in the future."""

_LONGEST: Final = 64


def is_ahead(text: str | None, now: datetime) -> bool:
    """Return whether a text is a time in the future."""
    time_ = _parsed(text)
    return time_ is not None and time_ > now + AHEAD


def told_ahead(field: str, text: str, now: datetime) -> str:
    """Return the message about a past event with a time in the future."""
    time_ = _parsed(text)
    by_s = 0 if time_ is None else (time_ - now).total_seconds()
    return (
        f"{field}: {printable(text)} lies {by_s:.0f} s in the future, so a clock was ahead when it was written; it"
        " counts as now: check the clocks of the API server and of the operator's node"
    )


def without_times_ahead(status: Body, now: datetime | None) -> tuple[Body, tuple[str, ...]]:
    """Return a status with future times of past events set to ``now``, and a message for each; None keeps them."""
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
    return rfc3339(now) if is_past and isinstance(value, str) and is_ahead(value, now) else value


def _parsed(text: str | None) -> datetime | None:
    try:
        found = datetime.fromisoformat(text) if text and len(text) <= _LONGEST else None
    except ValueError:
        return None
    return found.replace(tzinfo=UTC) if found is not None and found.tzinfo is None else found
