"""Shows how the slowest tenth of reconciles spent its time, from the operator's log."""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

OPTION: Final = "--log-reconciles-from=0"
"""Logs all reconciles."""

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
    """The slowest tenth of reconciles, compared with the rest."""

    from_s: float
    """Duration of the fastest reconcile of the tenth."""

    api_share: float
    engines_share: float
    calls: float
    """Mean number per reconcile."""

    calls_of_others: float
    call_s: float
    """Mean duration of a call, as measured by the operator."""


def looks(log: str) -> list[Look]:
    """Return all reconciles in a log."""
    return [Look(float(m[1]), float(m[2]), int(m[3]), float(m[4])) for m in _LINE.finditer(log)]


def slowest_tenth(seen: Sequence[Look]) -> Slowest | None:
    """Return how the slowest tenth of reconciles spent its time; None for fewer than ten reconciles."""
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
