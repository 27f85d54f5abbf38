"""An operator that is killed at one of its calls and started anew, and points at which it may be."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.support.faults.calls import Call, Moment
from tests.support.faults.forked_operator import ForkedOperator
from tests.support.faults.proxy import FaultProxy

_EVENTS = "create events"


@dataclass(frozen=True)
class CrashPoint:
    """One call of a life, such as the second ``patch deployments.apps tiny``."""

    calls: str
    """A pattern of verb, resource and name."""

    nth: int = 1
    moment: Moment = "after"

    def __str__(self) -> str:
        return f"{self.moment} {self.calls} #{self.nth}"


@contextmanager
def killed_at(
    points: Iterable[CrashPoint], proxy: FaultProxy, operator: ForkedOperator, namespace: str
) -> Iterator[set[CrashPoint]]:
    """Kill the operator once at each point, and start it anew at once; yield the points that are still to come.

    Points are calls about the namespace or the whole cluster.
    """
    left, seen = {*points}, Counter[tuple[str, Moment]]()

    def hook(call: Call, moment: Moment) -> bool:
        if call.namespace not in ("", namespace):
            return False
        about = {each.calls for each in left if fnmatchcase(words(call), each.calls)}
        seen.update((each, moment) for each in about)
        reached = {CrashPoint(each, seen[each, moment], moment) for each in about} & left
        if reached:
            left.difference_update(reached)
            operator.kill()
            operator.start()
        return bool(reached)

    proxy.hook = hook
    try:
        yield left
    finally:
        proxy.hook = None


def words(call: Call) -> str:
    """What a call is about, whatever its number."""
    return f"{call.permission} {call.name}".rstrip()


def points_of_writes(calls: Iterable[Call]) -> list[CrashPoint]:
    """Return both moments of each write, but of Events, of which one more or less harms nobody."""
    written = [words(call) for call in calls if call.writes and call.permission != _EVENTS]
    return [CrashPoint(*each, moment) for each in _numbered(written) for moment in ("before", "after")]


def points_of_reads(calls: Iterable[Call]) -> list[CrashPoint]:
    """Return each call that reads: it makes no difference whether the server has answered it."""
    return [CrashPoint(*each, "before") for each in _numbered(words(call) for call in calls if not call.writes)]


def _numbered(found: Iterable[str]) -> Iterator[tuple[str, int]]:
    seen = Counter[str]()
    for each in found:
        seen[each] += 1
        yield each, seen[each]
