"""Measures over engine metrics, as PromQL and as an equivalent computation on two scrapes.

A counter that decreases was reset. The cumulative buckets of a histogram are interpolated as `histogram_quantile`
does.
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Protocol

from specdecode_operator.problems import shown
from specdecode_operator.vllm.engine_metrics import Exposition, ExpositionError, Sample, read_exposition
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile

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
class GaugeValues:
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
    gauges: Mapping[str, GaugeValues]


@dataclass(frozen=True)
class Growth:
    """What several engines did meanwhile, each series with its labels."""

    rates: Mapping[str, list[tuple[Labels, float]]]
    """Of counters, each second."""
    gauges: Mapping[str, list[GaugeValues]]
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
    gauges: dict[str, GaugeValues] = {}
    for sample in (each for each in read.samples if each.name in names):
        value = _checked(sample.name, sample.value)
        if sample.name in read.gauges:
            said = gauges.get(sample.name, GaugeValues(0, 0))
            gauges[sample.name] = GaugeValues(said.total + value, max(said.largest, value))
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
    gauges: defaultdict[str, list[GaugeValues]] = defaultdict(list)
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


DEPLOYMENT_LABEL: Final = "specdecode_deployment"
"""The label that a series of an engine has from the label of its pod, ``specdecode.io/deployment``."""

DEPLOYMENT_LEVEL: Final = ("namespace", DEPLOYMENT_LABEL)
POD_LEVEL: Final = (*DEPLOYMENT_LEVEL, "pod")
_FEWEST_BUCKETS: Final = 2

Values = dict[str, float]
"""Of a figure: by the label that tells them apart, or one under the empty text. None where there is nothing to say."""


@dataclass(frozen=True)
class Scope:
    """Of which engines, by which labels, and over how long."""

    level: tuple[str, ...] = DEPLOYMENT_LEVEL
    window: str = "5m"
    namespace: str | None = None
    deployment: str | None = None
    """One deployment, by names of Kubernetes; None means all of the operator's."""

    def chosen(self) -> list[str]:
        """Return the matchers: a Prometheus may have engines of others."""
        if self.deployment is None:
            return [f'{DEPLOYMENT_LABEL}!=""']
        return [f'namespace="{self.namespace}"', f'{DEPLOYMENT_LABEL}="{self.deployment}"']

    def by(self, *labels: str) -> str:
        """Return the labels of a sum, with some more."""
        return ", ".join((*self.level, *labels))


class Measure(Protocol):
    """A way to take a figure."""

    def promql(self, scope: Scope) -> str:
        """Return the expression; it has no sample where there is nothing to divide by."""
        ...

    def values(self, growth: Growth) -> Values:
        """Return what the same expression comes to for the engines of one deployment."""
        ...

    def series(self) -> frozenset[str]:
        """Return the names of the series that it reads."""
        ...


@dataclass(frozen=True)
class Rate:
    """How fast a counter grows, each second."""

    counter: str
    matching: Mapping[str, str] = field(default_factory=dict)
    """Regular expressions that labels have to match."""

    def promql(self, scope: Scope) -> str:
        """Return the sum over pods and ranks."""
        return self.promql_by(scope)

    def promql_by(self, scope: Scope, *labels: str) -> str:
        """Return the sum by some more labels."""
        return f"sum by ({scope.by(*labels)}) (rate({_selected(self.counter, scope, self.matching)}[{scope.window}]))"

    def values(self, growth: Growth) -> Values:
        """Return the sum over pods and ranks."""
        return self.values_by(growth, None)

    def values_by(self, growth: Growth, label: str | None) -> Values:
        """Return the sum by a label."""
        sums: defaultdict[str, float] = defaultdict(float)
        for labels, rate in growth.rates.get(self.counter, ()):
            if all(re.fullmatch(pattern, labels.get(name, "")) for name, pattern in self.matching.items()):
                sums["" if label is None else labels.get(label, "")] += rate
        return dict(sums)

    def series(self) -> frozenset[str]:
        """Return the counter."""
        return frozenset({self.counter})


@dataclass(frozen=True)
class Ratio:
    """One counter's growth over another's; both summed first, so that each token counts alike."""

    over: Rate
    under: Rate
    plus: int = 0
    """What is added to the ratio."""

    by: str | None = None
    """A label of the first counter to tell apart."""

    def promql(self, scope: Scope) -> str:
        """Return the ratio where the second counter grew."""
        under = f"({self.under.promql(scope)} > 0)"
        added = f"{self.plus} + " if self.plus else ""
        if self.by is None:
            return f"{added}{self.over.promql(scope)} / {under}"
        return f"{added}{self.over.promql_by(scope, self.by)} / on ({scope.by()}) group_left () {under}"

    def values(self, growth: Growth) -> Values:
        """Return the ratio where the second counter grew."""
        under = self.under.values(growth).get("", 0)
        if under <= 0:
            return {}
        return {key: self.plus + over / under for key, over in self.over.values_by(growth, self.by).items()}

    def series(self) -> frozenset[str]:
        """Return both counters."""
        return self.over.series() | self.under.series()


@dataclass(frozen=True)
class Difference:
    """One counter's growth less another's."""

    of: Rate
    less: Rate

    def promql(self, scope: Scope) -> str:
        """Return the difference."""
        return f"{self.of.promql(scope)} - {self.less.promql(scope)}"

    def values(self, growth: Growth) -> Values:
        """Return the difference."""
        of, less = self.of.values(growth), self.less.values(growth)
        return {key: of[key] - less[key] for key in of.keys() & less.keys()}

    def series(self) -> frozenset[str]:
        """Return both counters."""
        return self.of.series() | self.less.series()


@dataclass(frozen=True)
class Quantile:
    """A quantile of a histogram, as histogram_quantile interpolates it within a bucket."""

    histogram: str
    quantile: float

    def promql(self, scope: Scope) -> str:
        """Return the quantile of what was observed in the window."""
        # Without an observation it is NaN, which no comparison lets pass.
        return f"{self.interpolated(scope)} >= 0"

    def interpolated(self, scope: Scope) -> str:
        """Return the same, NaN where nothing was observed."""
        return f"histogram_quantile({self.quantile:g}, {self._buckets.promql_by(scope, 'le')})"

    def values(self, growth: Growth) -> Values:
        """Return the quantile as Prometheus takes it: linear within a bucket, and none beyond the last limit."""
        by_limit = {float(limit): rate for limit, rate in self._buckets.values_by(growth, "le").items() if limit}
        limits = sorted(by_limit)
        if len(limits) < _FEWEST_BUCKETS or limits[-1] != math.inf:
            return {}
        rank = self.quantile * by_limit[math.inf]
        if rank <= 0:
            return {}
        low, high = next(pair for pair in pairwise((0.0, *limits)) if by_limit[pair[1]] >= rank)
        if high == math.inf:
            return {"": low}
        below = by_limit.get(low, 0.0)
        return {"": low + (high - low) * (rank - below) / (by_limit[high] - below)}

    @property
    def _buckets(self) -> Rate:
        return Rate(f"{self.histogram}_bucket")

    def series(self) -> frozenset[str]:
        """Return the buckets."""
        return frozenset({f"{self.histogram}_bucket"})


@dataclass(frozen=True)
class Spread:
    """A high quantile of a histogram over its median."""

    histogram: str
    quantile: float

    def promql(self, scope: Scope) -> str:
        """Return the ratio of the two quantiles."""
        high, median = (Quantile(self.histogram, each).interpolated(scope) for each in (self.quantile, 0.5))
        return f"{high} / ({median} > 0)"

    def values(self, growth: Growth) -> Values:
        """Return the ratio of the two quantiles."""
        high, median = (Quantile(self.histogram, each).values(growth).get("", 0.0) for each in (self.quantile, 0.5))
        return {"": high / median} if median > 0 else {}

    def series(self) -> frozenset[str]:
        """Return the buckets."""
        return Quantile(self.histogram, self.quantile).series()


@dataclass(frozen=True)
class Within:
    """The share of a histogram's observations within a limit, which must be one of its buckets."""

    histogram: str
    limit: str

    def promql(self, scope: Scope) -> str:
        """Return the share of what was observed in the window."""
        return self._share.promql(scope)

    def values(self, growth: Growth) -> Values:
        """Return the share of what was observed."""
        return self._share.values(growth)

    @property
    def _share(self) -> Ratio:
        return Ratio(Rate(f"{self.histogram}_bucket", {"le": self.limit}), Rate(f"{self.histogram}_count"))

    def series(self) -> frozenset[str]:
        """Return buckets and count."""
        return frozenset({f"{self.histogram}_bucket", f"{self.histogram}_count"})


@dataclass(frozen=True)
class Gauge:
    """What engines say at this moment: the sum, or the largest."""

    gauge: str
    largest: bool = False

    def promql(self, scope: Scope) -> str:
        """Return the sum or maximum over pods and ranks."""
        return f"{'max' if self.largest else 'sum'} by ({scope.by()}) ({_selected(self.gauge, scope, {})})"

    def values(self, growth: Growth) -> Values:
        """Return the sum or maximum over pods and ranks."""
        said = growth.gauges.get(self.gauge, ())
        if not said:
            return {}
        return {"": max(each.largest for each in said) if self.largest else sum(each.total for each in said)}

    def series(self) -> frozenset[str]:
        """Return the gauge."""
        return frozenset({self.gauge})


def _selected(name: str, scope: Scope, matching: Mapping[str, str]) -> str:
    matchers = [*scope.chosen(), *(f'{label}=~"{pattern}"' for label, pattern in matching.items())]
    return f"{name}{{{', '.join(matchers)}}}"
