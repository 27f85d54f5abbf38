"""What the slowest tenth of reconciles was busy with, by what the operator says of each in its log."""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

OPTION: Final = "--log-reconciles-from=0"
"""Has the operator tell of all."""

_LINE: Final = re.compile(
    r"reconcile done in (\d+\.\d+) s: (\d+\.\d+) s for (\d+) calls of the API server, (\d+\.\d+) s for engines"
)


@dataclass(frozen=True)
class Look:
    """One reconcile."""

    took_s: float
    api_s: float
    calls: int
    engines_s: float


@dataclass(frozen=True)
class Slowest:
    """The slowest tenth, beside the others."""

    from_s: float
    """All of it took at least so long."""

    api_share: float
    engines_share: float
    calls: float
    """Of one look on average."""

    calls_of_others: float
    call_s: float
    """Of one call on average, as the operator sees it."""


def looks(log: str) -> list[Look]:
    """Return all that a log tells of."""
    return [Look(float(m[1]), float(m[2]), int(m[3]), float(m[4])) for m in _LINE.finditer(log)]


def slowest_tenth(seen: Sequence[Look]) -> Slowest | None:
    """Return what the slowest tenth of looks was busy with; None of fewer than ten."""
    tenth = len(seen) // 10
    if not tenth:
        return None
    ordered = sorted(seen, key=lambda look: look.took_s, reverse=True)
    slow, others = ordered[:tenth], ordered[tenth:]
    took_s, calls = sum(look.took_s for look in slow), sum(look.calls for look in slow)
    api_s = sum(look.api_s for look in slow)
    return Slowest(
        slow[-1].took_s,
        api_s / took_s,
        sum(look.engines_s for look in slow) / took_s,
        calls / tenth,
        statistics.fmean(look.calls for look in others),
        api_s / calls if calls else 0.0,
    )
