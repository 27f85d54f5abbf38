"""What goes wrong between a client and the API server, as data."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Delay:
    """The call is passed on later."""

    seconds: float


@dataclass(frozen=True)
class Reset:
    """The connection is reset: before the call is passed on, or after the server has done it, unanswered."""

    after: bool = False


@dataclass(frozen=True)
class Refuse:
    """The call is answered with an error and not passed on: 401, 409, 410, 429, 500, 503."""

    status: int
    retry_after_s: int | None = None


@dataclass(frozen=True)
class Stale:
    """A get or list is answered as it was before, as by a server that lags behind; the first one is passed on."""


@dataclass(frozen=True)
class Truncate:
    """Only the first half of the answer arrives."""

    is_noticed: bool = True
    """Whether the answer says how long it is; else it looks whole, as some proxies leave it."""


@dataclass(frozen=True)
class DropEvent:
    """An event of a watch does not arrive."""


@dataclass(frozen=True)
class RepeatEvent:
    """An event of a watch arrives twice."""


@dataclass(frozen=True)
class DelayEvent:
    """An event of a watch, and all behind it, arrive later."""

    seconds: float


@dataclass(frozen=True)
class Silence:
    """From an event on nothing more arrives by that watch, which stays open."""


@dataclass(frozen=True)
class EndWatch:
    """A watch ends with an error in place of an event: 410 where its resource version is too old."""

    status: int = 410


OfCall = Delay | Reset | Refuse | Stale | Truncate
OfEvent = DropEvent | RepeatEvent | DelayEvent | Silence | EndWatch


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, and with which calls, or events of which watches, it does.

    ``Fault(Refuse(409), "patch deployments.apps", skip=1, times=1)`` refuses the second apply of a Deployment.
    """

    what: OfCall | OfEvent
    calls: str = "*"
    """A pattern of verb and resource, such as ``patch */status``, ``watch pods``, ``[!gw]*`` for all that write."""

    name: str = "*"
    """A pattern of the object's name; lists and watches have none."""

    skip: int = 0
    """So many go well first."""

    times: int | None = None
    """So often it happens at most; None: for ever."""

    share: float = 1.0
    """How probable it is each time."""

    seed: int = 0


@dataclass
class _Armed:
    """A fault and how often it had its chance."""

    fault: Fault
    chance: random.Random = field(init=False)
    seen: int = 0
    happened: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.fault.seed)

    def happens(self, permission: str, name: str) -> bool:
        """Whether it happens this time."""
        fault = self.fault
        if not (fnmatchcase(permission, fault.calls) and fnmatchcase(name, fault.name)):
            return False
        self.seen += 1
        if self.seen <= fault.skip or self.happened == fault.times or self.chance.random() >= fault.share:
            return False
        self.happened += 1
        return True


class Armed:
    """Faults that are in force, in their order."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults = tuple(faults)
        self._calls = [_Armed(fault) for fault in self.faults if isinstance(fault.what, OfCall)]
        self._events = [_Armed(fault) for fault in self.faults if isinstance(fault.what, OfEvent)]

    def of_call(self, permission: str, name: str) -> list[OfCall]:
        """Return what goes wrong with a call."""
        return [each.fault.what for each in self._calls if each.happens(permission, name)]  # type: ignore[misc]

    def of_event(self, permission: str) -> list[OfEvent]:
        """Return what goes wrong with the next event of a watch."""
        return [each.fault.what for each in self._events if each.happens(permission, "")]  # type: ignore[misc]
