"""The record of the GPUs that a capture borrows from its deployment, kept in the capture's status.

The deployment makes room exactly while the record says that the capture has the GPUs, so one write of the status
both borrows them and notes when: an operator that is killed at any step finds the time again.
"""

from datetime import datetime, timedelta
from typing import Final

from specdecode_operator.api.status.capture import BorrowStatus
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip

MOST_ATTEMPTS: Final = 5
"""Borrowings in vain after which a capture fails: each one costs serving time."""

_LONGEST_BACK_OFF_S: Final = 3600
_LONGEST_FAILURE: Final = 1024
_TIME: Final = "%Y-%m-%dT%H:%M:%SZ"


def is_held(record: BorrowStatus | None) -> bool:
    """Whether a capture has the GPUs of its deployment."""
    return record is not None and record.since is not None and record.returned_at is None


def borrowed(record: BorrowStatus | None, now: datetime) -> BorrowStatus:
    """Return the record of a capture that borrows the GPUs now."""
    record = record or BorrowStatus()
    without_s = record.seconds_without_serving
    if record.since is not None and record.served_at is None:
        without_s += _age_s(record.since, now)  # the deployment has not served in between
    return record.model_copy(
        update={
            "since": now.strftime(_TIME),
            "idle_since": None,
            "returned_at": None,
            "served_at": None,
            "next_attempt_at": None,
            "seconds_without_serving": without_s,
        }
    )


def watched(record: BorrowStatus, now: datetime, *, free: bool, in_use: bool) -> BorrowStatus:
    """Return the record with the time since when the GPUs are idle.

    ``free`` says that the deployment's engines are gone, ``in_use`` that the capture's engine runs.
    """
    if record.since is not None and _is_ahead(record.since, now):
        record = record.model_copy(update={"since": now.strftime(_TIME)})
    if in_use or not free:
        return record.model_copy(update={"idle_since": None})
    if record.idle_since is not None and not _is_ahead(record.idle_since, now):
        return record
    return record.model_copy(update={"idle_since": now.strftime(_TIME)})


def overdue(record: BorrowStatus, now: datetime, *, timeout_s: int, ending_s: int) -> str | None:
    """Return which time has passed so that the GPUs go back to the engines; None while there is time left.

    ``timeout_s`` is how long they may be idle, ``ending_s`` how long the engines may take to end.
    """
    if record.idle_since is not None:
        is_late = _age_s(record.idle_since, now) >= timeout_s
        return f"did not run within {timeout_s} s (spec.borrowTimeoutSeconds)" if is_late else None
    is_late = record.since is not None and _age_s(record.since, now) >= ending_s
    return f"did not get the GPUs within {ending_s} s" if is_late else None


def returned(record: BorrowStatus, now: datetime, failure: Blocked | None, timeout_s: int) -> BorrowStatus:
    """Return the record of a capture that gives the GPUs back.

    ``failure`` is why it had not started; None for one that ended or was suspended.
    """
    changes = {"idle_since": None, "returned_at": now.strftime(_TIME)}
    if failure is None:
        return record.model_copy(update={**changes, "failed_attempts": 0})
    attempts = record.failed_attempts + 1
    # It stays away for at least twice as long as it may hold GPUs that do nothing.
    back_off_s = min(timeout_s * 2.0 ** min(attempts, MOST_ATTEMPTS), _LONGEST_BACK_OFF_S)
    return record.model_copy(
        update={
            **changes,
            "failed_attempts": attempts,
            "last_failure": clip(printable(f"{failure.reason}: {failure.message}"), _LONGEST_FAILURE),
            "next_attempt_at": (now + timedelta(seconds=back_off_s)).strftime(_TIME),
        }
    )


def settled(record: BorrowStatus | None, now: datetime, *, serves: bool) -> BorrowStatus | None:
    """Return the record with the time without serving, once the deployment has engines that serve again."""
    if record is None or record.since is None or record.returned_at is None or record.served_at or not serves:
        return record
    without_s = record.seconds_without_serving + _age_s(record.since, now)
    return record.model_copy(update={"served_at": now.strftime(_TIME), "seconds_without_serving": without_s})


def is_unsettled(record: BorrowStatus | None) -> bool:
    """Whether the GPUs are back and the deployment has not been seen to serve since."""
    return record is not None and record.returned_at is not None and record.served_at is None


def backs_off(record: BorrowStatus | None, now: datetime) -> bool:
    """Whether the time of the next attempt is still to come.

    A time that is further ahead than the longest back-off comes from a clock that was wrong, and does not count.
    """
    at = None if record is None or record.next_attempt_at is None else _read(record.next_attempt_at)
    return at is not None and now < at <= now + timedelta(seconds=_LONGEST_BACK_OFF_S)


def due_at(record: BorrowStatus | None, timeout_s: int) -> datetime | None:
    """Return when a capture is to be looked at again without an event; None if no time matters to it."""
    if record is None:
        return None
    if record.idle_since is not None and (idle := _read(record.idle_since)):
        return idle + timedelta(seconds=timeout_s)
    return None if record.next_attempt_at is None or is_held(record) else _read(record.next_attempt_at)


def _age_s(time: str, now: datetime) -> int:
    """Return how long ago a time was; a time in the future counts as now."""
    at = _read(time)
    return 0 if at is None else max(0, int((now - at).total_seconds()))


def _is_ahead(time: str, now: datetime) -> bool:
    at = _read(time)
    return at is None or at > now


def _read(time: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(time)
    except ValueError:
        return None
    return found if found.tzinfo else None
