"""How counters of engines grew between two looks at their /metrics, and what their gauges say."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from specdecode_operator.engine.exposition import Exposition, ExpositionError, Sample, read_exposition
from specdecode_operator.engine.profiles import KNOWN_VERSIONS, find_profile
from specdecode_operator.problems import shown

Labels = Mapping[str, str]
Series = tuple[str, tuple[tuple[str, str], ...]]
"""Name, and those labels that figures read."""

_LIMIT_LABEL: Final = "le"
_NAMES: Final = find_profile(KNOWN_VERSIONS[-1]).metrics
_READ: Final = (_LIMIT_LABEL, _NAMES.position_label, _NAMES.finished_reason_label)
"""What else tells series apart, such as the rank, figures sum up or take the largest of."""

_MOST_SERIES: Final = 128
"""Of a page: 43 buckets, up to 32 draft positions, and some 20 more, however many ranks there are."""
_LONGEST_VALUE: Final = 32
"""Of a label that figures read: the longest is ``repetition``."""


class UnreadablePageError(ValueError):
    """The text is not what an engine's /metrics says."""


@dataclass(frozen=True)
class Said:
    """What the ranks of an engine say of one gauge."""

    total: float
    largest: float


@dataclass(frozen=True)
class Page:
    """What one engine said at one moment."""

    at_s: float
    """On a clock that never goes back."""
    counters: Mapping[Series, float]
    """Summed over its ranks."""
    gauges: Mapping[str, Said]


@dataclass(frozen=True)
class Growth:
    """What several engines did meanwhile, each series with its labels."""

    rates: Mapping[str, list[tuple[Labels, float]]]
    """Of counters, each second."""
    gauges: Mapping[str, list[Said]]
    """Of each engine."""


def read_page(text: str, names: Collection[str], at_s: float) -> Page:
    """Return the series of these names on a page.

    Raises
    ------
    UnreadablePageError
        It is not in Prometheus format, has none of them, or holds a number that cannot be.
    """
    try:
        return page_of(read_exposition(text, names), names, at_s)
    except ExpositionError as error:
        raise UnreadablePageError(str(error)) from error


def page_of(read: Exposition, names: Collection[str], at_s: float) -> Page:
    """Return the series of these names on a page of which others are read, too.

    Raises
    ------
    UnreadablePageError
        It has none of them, or holds a number that cannot be.
    """
    counters: defaultdict[Series, float] = defaultdict(float)
    gauges: dict[str, Said] = {}
    for sample in (each for each in read.samples if each.name in names):
        value = _checked(sample.name, sample.value)
        if sample.name in read.gauges:
            said = gauges.get(sample.name, Said(0, 0))
            gauges[sample.name] = Said(said.total + value, max(said.largest, value))
            continue
        if sample.name.endswith("_bucket"):
            _check_limit(sample.labels.get(_LIMIT_LABEL, ""))
        series = sample.name, _read_labels(sample)
        counters[series] = _checked(sample.name, counters[series] + value)
        if len(counters) > _MOST_SERIES:
            raise UnreadablePageError("more series are said than an engine has: this is not vLLM")
    if not counters:
        raise UnreadablePageError("no figure of vLLM is on it: this is not vLLM, or it runs with --disable-log-stats")
    # In one order, however a page is ordered: what is kept of it is shared with pages that have the same series.
    return Page(at_s, dict(sorted(counters.items())), dict(sorted(gauges.items())))


def growth_between(looks: Collection[tuple[Page, Page]]) -> Growth:
    """Return what engines did between two looks at each.

    A counter that is less than it was began anew, and grew by what it says now, as Prometheus takes it. One that was
    not there before has nothing to compare with.
    """
    rates: defaultdict[str, list[tuple[Labels, float]]] = defaultdict(list)
    gauges: defaultdict[str, list[Said]] = defaultdict(list)
    for before, after in looks:
        seconds = after.at_s - before.at_s
        for series, value in after.counters.items():
            old = before.counters.get(series)
            if old is not None and seconds > 0:
                grown = value - old if value >= old else value
                rates[series[0]].append((dict(series[1]), grown / seconds))
        for name, said in after.gauges.items():
            gauges[name].append(said)
    return Growth(rates, gauges)


def _read_labels(sample: Sample) -> tuple[tuple[str, str], ...]:
    """Return the labels that figures read."""
    read = tuple((label, sample.labels[label]) for label in _READ if label in sample.labels)
    if any(len(value) > _LONGEST_VALUE for _, value in read):
        raise UnreadablePageError(f"a label of {sample.name} is longer than an engine's: this is not vLLM")
    return read


def _check_limit(limit: str) -> None:
    """Refuse what is no limit of a time."""
    try:
        possible = float(limit) > 0
    except ValueError:
        possible = False
    if not possible:
        raise UnreadablePageError(f"a bucket ends at {shown(limit)}, which cannot be")


def _checked(name: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise UnreadablePageError(f"{name} is {value}, which cannot be")
    return value
