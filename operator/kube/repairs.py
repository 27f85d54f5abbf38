"""How often objects were repaired: who writes a field again after each repair is not answered for ever."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

_AT_ONCE: Final = 3
"""Repairs without a wait: hands that try something out."""

_CONTESTED: Final = 5
_REMEMBERED_S: Final = 1800.0
_LONGEST_WAIT_S: Final = 300.0


@dataclass
class _Repaired:
    times_s: list[float] = field(default_factory=list)
    what: str = ""


class Repairs:
    """The repairs of the children of one object, by UID, with the times on a monotonic clock."""

    def __init__(self) -> None:
        self._repaired: defaultdict[str, _Repaired] = defaultdict(_Repaired)
        self._untold: list[str] = []

    def may_repair(self, uid: str, now_s: float) -> bool:
        """Whether an object may be repaired now: after the first times ever more slowly."""
        times_s = self._recent(uid, now_s)
        if len(times_s) < _AT_ONCE:
            return True
        return now_s - times_s[-1] >= min(2.0 ** len(times_s), _LONGEST_WAIT_S)

    def record(self, uid: str, what: str, now_s: float) -> None:
        """Remember a repair; ``what`` names object, fields and who wrote them."""
        for each in [uid for uid in self._repaired if not self._recent(uid, now_s)]:
            del self._repaired[each]
        repaired = self._repaired[uid]
        repaired.times_s, repaired.what = [*self._recent(uid, now_s), now_s], what
        self._untold.append(what)

    def untold(self) -> list[str]:
        """Return the repairs since the last call of this."""
        told, self._untold = self._untold, []
        return told

    def contested(self, now_s: float) -> list[str]:
        """Return what somebody writes again after each repair."""
        return [
            repaired.what for uid, repaired in self._repaired.items() if len(self._recent(uid, now_s)) >= _CONTESTED
        ]

    def forget(self, uid: str) -> None:
        """Drop what is remembered of an object that is gone."""
        self._repaired.pop(uid, None)

    def _recent(self, uid: str, now_s: float) -> list[float]:
        repaired = self._repaired.get(uid)
        return [] if repaired is None else [each for each in repaired.times_s if now_s - each < _REMEMBERED_S]
