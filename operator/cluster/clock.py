"""The API server's time: the one clock by which the operator judges ages.

The clock of the operator's node may be wrong, and replicas run on nodes with different clocks. Every answer of the API
server carries the server's time in its `Date` header, which costs neither a right nor a write. The time is kept as an
offset to a steady clock, which cannot be set, so that only the API server itself can make it jump.
"""

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final, NamedTuple

_HEADER_CUTS_S: Final = 1.0
"""The header has whole seconds."""

_ALIKE_S: Final = 10.0
"""API servers whose clocks differ by less agree."""

_STANDS_S: Final = 300.0
"""How long the known time outlives the last answer that confirms it, against answers that tell another time."""

_WORTH_A_WARNING_S: Final = 60.0

_logger = logging.getLogger(__name__)


class _Offset(NamedTuple):
    """Bounds of the API server's Unix time minus the steady clock, in seconds."""

    least: float
    most: float

    def agrees(self, other: "_Offset") -> bool:
        return self.least - _ALIKE_S <= other.most and other.least - _ALIKE_S <= self.most

    def narrowed(self, other: "_Offset") -> "_Offset":
        """Return what both allow; if they exclude each other, a clock has drifted, and the other is newer."""
        both = _Offset(max(self.least, other.least), min(self.most, other.most))
        return both if both.least <= both.most else other


class ServerTime:
    """Tells the API server's time, as learned from its answers.

    API servers behind one address may have different clocks. While answers confirm the known time, answers that tell
    another time change nothing, so that time does not jump back and forth. They are disputes, though, and whoever
    deletes by age asks for them. One event loop uses an instance.

    Parameters
    ----------
    steady
        A clock in seconds that is never set.
    local
        The clock of this machine as Unix time. It counts only until the first answer.
    """

    def __init__(self, steady: Callable[[], float] = time.monotonic, local: Callable[[], float] = time.time) -> None:
        self.steady_s = steady
        self._local = local
        self._offset: _Offset | None = None
        self._first_s = self._confirmed_s = 0.0
        self._disputed_s: float | None = None

    def hear(self, date: str | None, asked_s: float) -> None:
        """Learn from the `Date` header of an answer that was asked for at ``asked_s`` on the steady clock.

        A missing or unreadable header teaches nothing.
        """
        told_s, heard_s = _unix_seconds(date), self.steady_s()
        if told_s is None:
            return
        # The server wrote the header between question and answer.
        offset = _Offset(told_s - heard_s, told_s + _HEADER_CUTS_S - asked_s)
        if self._offset is None:
            self._first_s = heard_s
            self._adopt(offset)
        elif self._offset.agrees(offset):
            self._offset = self._offset.narrowed(offset)
        else:
            if not self.disputed_within(_STANDS_S):
                _logger.warning(
                    "the API server's answers disagree on the time by %.0f s: check the clocks of its nodes",
                    abs(offset.least - self._offset.least),
                )
            self._disputed_s = heard_s
            if heard_s - self._confirmed_s <= _STANDS_S:
                return
            self._adopt(offset)
        self._confirmed_s = heard_s

    def now(self) -> datetime:
        """Return the API server's time: the earliest that its answers allow, so that no age is overrated.

        Until the first answer it is the time of this machine.
        """
        known = self._offset
        return datetime.fromtimestamp(self._local() if known is None else self.steady_s() + known.least, UTC)

    def agreed_s(self) -> float:
        """Return for how many seconds all answers have told one time; 0 before the first answer."""
        if self._offset is None:
            return 0.0
        return self.steady_s() - max(self._first_s, self._disputed_s or self._first_s)

    def disputed_within(self, seconds: float) -> bool:
        """Whether an answer of the last so many seconds told another time than was known."""
        return self._disputed_s is not None and self.steady_s() - self._disputed_s < seconds

    @property
    def is_known(self) -> bool:
        """Whether an answer has told the time."""
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


def _unix_seconds(date: str | None) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp() if date else None
    except (ValueError, OverflowError, OSError):
        return None
