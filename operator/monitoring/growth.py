"""How counters of engines grew between two looks at their /metrics, and what their gauges say."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from specdecode_operator.problems import shown

Labels = Mapping[str, str]
Series = tuple[str, frozenset[tuple[str, str]]]
"""Name and labels."""

_MOST_LINES: Final = 20_000
_LONGEST_LINE: Final = 16 * 1024
"""Far more than engines say: a line with thousands of labels takes seconds to read."""


class UnreadablePageError(ValueError):
    """The text is not what an engine's /metrics says."""


@dataclass(frozen=True)
class Page:
    """What one engine said at one moment."""

    at_s: float
    """On a clock that never goes back."""
    counters: Mapping[Series, float]
    gauges: Mapping[Series, float]


@dataclass(frozen=True)
class Growth:
    """What several engines did meanwhile, each series with its labels."""

    rates: Mapping[str, list[tuple[Labels, float]]]
    """Of counters, each second."""
    gauges: Mapping[str, list[tuple[Labels, float]]]


def read_page(text: str, names: Collection[str], at_s: float) -> Page:
    """Return the series of these names on a page.

    Raises
    ------
    UnreadablePageError
        It is not in Prometheus format, has none of them, or holds a number that cannot be.
    """
    counters: dict[Series, float] = {}
    gauges: dict[Series, float] = {}
    try:
        for family in text_string_to_metric_families(_readable(text, names)):
            kept = gauges if family.type == "gauge" else counters
            for sample in family.samples:
                if sample.name in names:
                    key = (sample.name, frozenset(sample.labels.items()))
                    kept[key] = _checked(sample.name, sample.value)
                    if sample.name.endswith("_bucket"):
                        _check_limit(sample.labels.get("le", ""))
    except (ValueError, KeyError, IndexError) as error:
        if isinstance(error, UnreadablePageError):
            raise
        raise UnreadablePageError(f"not in Prometheus format: {shown(str(error))}") from error
    if not counters:
        raise UnreadablePageError("no figure of vLLM is on it: this is not vLLM, or it runs with --disable-log-stats")
    return Page(at_s, counters, gauges)


def growth_between(looks: Collection[tuple[Page, Page]]) -> Growth:
    """Return what engines did between two looks at each.

    A counter that is less than it was began anew, and grew by what it says now, as Prometheus takes it. One that was
    not there before has nothing to compare with.
    """
    rates: defaultdict[str, list[tuple[Labels, float]]] = defaultdict(list)
    gauges: defaultdict[str, list[tuple[Labels, float]]] = defaultdict(list)
    for before, after in looks:
        seconds = after.at_s - before.at_s
        for series, value in after.counters.items():
            old = before.counters.get(series)
            if old is not None and seconds > 0:
                grown = value - old if value >= old else value
                rates[series[0]].append((dict(series[1]), grown / seconds))
        for series, value in after.gauges.items():
            gauges[series[0]].append((dict(series[1]), value))
    return Growth(rates, gauges)


def _readable(text: str, names: Collection[str]) -> str:
    """Return the lines that are read: the parser takes seconds for what a hostile engine may say."""
    families = {name.removesuffix(end) for name in names for end in ("", "_total", "_bucket", "_count", "_sum")}
    starts = (*names, *(f"# TYPE {family} " for family in families))
    lines = [line for line in text.splitlines() if line.startswith(starts)]
    if len(lines) > _MOST_LINES or max(map(len, lines), default=0) > _LONGEST_LINE:
        raise UnreadablePageError("more is said than an engine has to say: this is not vLLM")
    return "\n".join(lines)


def _check_limit(limit: str) -> None:
    """Refuse what is no limit of a time."""
    if not float(limit) > 0:
        raise UnreadablePageError(f"a bucket ends at {limit}, which cannot be")


def _checked(name: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise UnreadablePageError(f"{name} is {value}, which cannot be")
    return value
