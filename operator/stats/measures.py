"""Measures over engine metrics, as PromQL and as an equivalent computation on two scrapes.

A counter that decreases was reset. The cumulative buckets of a histogram are interpolated as `histogram_quantile`
does.
"""

import math
import re
from abc import ABC, abstractmethod
from array import array
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final
from weakref import WeakValueDictionary

from specdecode_operator.problems import shown
from specdecode_operator.vllm.engine_metrics import Exposition, ExpositionError, read_exposition
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile

Labels = Mapping[str, str]
Series = tuple[str, tuple[tuple[str, str], ...]]
"""Name, and the labels that figures use."""

_LIMIT_LABEL: Final = "le"
_NAMES: Final = find_profile(KNOWN_VERSIONS[-1]).metrics
_READ: Final = (_LIMIT_LABEL, _NAMES.position_label, _NAMES.finished_reason_label)
"""Figures sum over all other labels, such as the rank, or take their largest value."""

_MOST_SERIES: Final = 128
"""Most series of a page: 43 buckets, up to 32 draft positions and about 20 more, regardless of the number of ranks."""
_LONGEST_VALUE: Final = 32
"""Longest value of a label that figures use: ``repetition`` is the longest of vLLM."""


class UnreadablePageError(ValueError):
    """The text is not an engine's /metrics page."""


class _PageNames:
    """Names and labels of a page. They take most of its memory, and engines of one model share them."""

    def __init__(self, counters: tuple[Series, ...], gauges: tuple[str, ...]) -> None:
        self.counters, self.gauges = counters, gauges


_KNOWN_NAMES: Final[WeakValueDictionary[tuple[tuple[Series, ...], tuple[str, ...]], _PageNames]] = WeakValueDictionary()


@dataclass(frozen=True)
class Page:
    """One scrape of one engine, in little memory."""

    at_s: float  # on the monotonic clock
    names: _PageNames  # shared by all pages with the same series
    values: "array[float]"

    @property
    def counters(self) -> dict[Series, float]:
        """Counters, summed over the engine's ranks."""
        return dict(zip(self.names.counters, self.values, strict=False))

    @property
    def gauges(self) -> dict[str, tuple[float, float]]:
        """Sum and maximum over the engine's ranks."""
        rest = self.values[len(self.names.counters) :]
        return dict(zip(self.names.gauges, zip(rest[::2], rest[1::2], strict=True), strict=True))


@dataclass(frozen=True)
class Growth:
    """Growth of several engines' counters between two scrapes, and their gauges at the second."""

    rates: Mapping[str, list[tuple[Labels, float]]]  # per second
    gauges: Mapping[str, list[tuple[float, float]]]


def read_page(text: str, names: Collection[str], at_s: float) -> Page:
    """Return the series of these names on a page.

    Raises
    ------
    UnreadablePageError
        If it is not in Prometheus format, lacks all of them, or has an impossible number.
    """
    try:
        return page_of(read_exposition(text, names), names, at_s)
    except ExpositionError as error:
        raise UnreadablePageError(str(error)) from error


def page_of(read: Exposition, names: Collection[str], at_s: float) -> Page:
    """Return the series of these names on a page that may have others.

    Raises
    ------
    UnreadablePageError
        If it lacks all names, or has an impossible number.
    """
    counters: defaultdict[Series, float] = defaultdict(float)
    gauges: dict[str, tuple[float, float]] = {}
    for sample in (each for each in read.samples if each.name in names):
        value = _checked(sample.name, sample.value)
        if sample.name in read.gauges:
            total, largest = gauges.get(sample.name, (0.0, 0.0))
            gauges[sample.name] = (total + value, max(largest, value))
            continue
        if sample.name.endswith("_bucket"):
            _check_limit(sample.labels.get(_LIMIT_LABEL, ""))
        labels = tuple((label, sample.labels[label]) for label in _READ if label in sample.labels)
        if any(len(text) > _LONGEST_VALUE for _, text in labels):
            raise UnreadablePageError(f"a label of {sample.name} is longer than an engine's: this is not vLLM")
        series = sample.name, labels
        counters[series] = _checked(sample.name, counters[series] + value)
        if len(counters) > _MOST_SERIES:
            raise UnreadablePageError("more series are said than an engine has: this is not vLLM")
    if not counters:
        raise UnreadablePageError("no figure of vLLM is on it: this is not vLLM, or it runs with --disable-log-stats")
    key = tuple(sorted(counters)), tuple(sorted(gauges))
    values = array("d", [counters[series] for series in key[0]])
    for name in key[1]:
        values.extend(gauges[name])
    return Page(at_s, _KNOWN_NAMES.setdefault(key, _PageNames(*key)), values)


def growth_between(looks: Collection[tuple[Page, Page]]) -> Growth:
    """Return the growth between two scrapes of each engine.

    A counter that decreased was reset: it grew by its present value, as in Prometheus. A counter without an earlier
    value is left out.
    """
    rates: defaultdict[str, list[tuple[Labels, float]]] = defaultdict(list)
    gauges: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for before, after in looks:
        seconds, old_values = after.at_s - before.at_s, before.counters
        for series, value in after.counters.items():
            old = old_values.get(series)
            if old is not None and seconds > 0:
                grown = value - old if value >= old else value
                rates[series[0]].append((dict(series[1]), grown / seconds))
        for name, found in after.gauges.items():
            gauges[name].append(found)
    return Growth(rates, gauges)


def _check_limit(limit: str) -> None:
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
"""Label of an engine's series, from the label ``specdecode.io/deployment`` of its pod."""

DEPLOYMENT_LEVEL: Final = ("namespace", DEPLOYMENT_LABEL)
POD_LEVEL: Final = (*DEPLOYMENT_LEVEL, "pod")
_FEWEST_BUCKETS: Final = 2

Values = dict[str, float]
"""Values of a figure by the label that distinguishes them, or one value under the empty text."""


@dataclass(frozen=True)
class Scope:
    """Engines to measure, labels to group by, and the window."""

    level: tuple[str, ...] = DEPLOYMENT_LEVEL
    window: str = "5m"
    namespace: str | None = None
    deployment: str | None = None  # None: all of the operator's

    def select(self, name: str, matching: Mapping[str, str]) -> str:
        """Return the selector of a metric; it excludes engines that this operator does not manage."""
        matchers = [f'{DEPLOYMENT_LABEL}!=""']
        if self.deployment is not None:
            matchers = [f'namespace="{self.namespace}"', f'{DEPLOYMENT_LABEL}="{self.deployment}"']
        matchers += (f'{label}=~"{pattern}"' for label, pattern in matching.items())
        return f"{name}{{{', '.join(matchers)}}}"

    def by(self, *labels: str) -> str:
        """Return the labels of a sum, including additional ones."""
        return ", ".join((*self.level, *labels))


class Measure(ABC):
    """A way to compute a figure."""

    @abstractmethod
    def promql(self, scope: Scope) -> str:
        """Return the expression; it has no sample if its denominator is zero."""

    @abstractmethod
    def values(self, growth: Growth) -> Values:
        """Return the value of the same expression for the engines of one deployment."""

    def series(self) -> frozenset[str]:
        """Return the names of the series that the expression selects."""
        return frozenset(re.findall(r"([\w:]+)\{", self.promql(Scope())))


@dataclass(frozen=True)
class Rate(Measure):
    """Growth of a counter per second, summed over pods and ranks."""

    counter: str
    matching: Mapping[str, str] = field(default_factory=dict)  # regular expressions by label

    def promql(self, scope: Scope, *labels: str) -> str:
        """Return the sum, by some more labels."""
        return f"sum by ({scope.by(*labels)}) (rate({scope.select(self.counter, self.matching)}[{scope.window}]))"

    def values(self, growth: Growth, label: str | None = None) -> Values:
        """Return the sum, by a label."""
        sums: defaultdict[str, float] = defaultdict(float)
        for labels, rate in growth.rates.get(self.counter, ()):
            if all(re.fullmatch(pattern, labels.get(name, "")) for name, pattern in self.matching.items()):
                sums["" if label is None else labels.get(label, "")] += rate
        return dict(sums)


@dataclass(frozen=True)
class Ratio(Measure):
    """One counter's growth over another's; both are summed first, so that each token has the same weight."""

    over: Rate
    under: Rate
    plus: int = 0  # added to the ratio
    by: str | None = None  # label of the first counter to tell apart

    def promql(self, scope: Scope) -> str:
        """Return the ratio if the second counter grew."""
        under = f"({self.under.promql(scope)} > 0)"
        added = f"{self.plus} + " if self.plus else ""
        if self.by is None:
            return f"{added}{self.over.promql(scope)} / {under}"
        return f"{added}{self.over.promql(scope, self.by)} / on ({scope.by()}) group_left () {under}"

    def values(self, growth: Growth) -> Values:
        """Return the ratio if the second counter grew."""
        under = self.under.values(growth).get("", 0)
        if under <= 0:
            return {}
        return {key: self.plus + over / under for key, over in self.over.values(growth, self.by).items()}


@dataclass(frozen=True)
class Difference(Measure):
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


@dataclass(frozen=True)
class Quantile(Measure):
    """A quantile of a histogram, or its ratio to the median."""

    histogram: str
    quantile: float
    over_median: bool = False

    def promql(self, scope: Scope) -> str:
        """Return the quantile of the observations in the window."""
        buckets = Rate(f"{self.histogram}_bucket").promql(scope, _LIMIT_LABEL)
        found = f"histogram_quantile({self.quantile:g}, {buckets})"
        # Without an observation it is NaN, which no comparison lets pass.
        return f"{found} / (histogram_quantile(0.5, {buckets}) > 0)" if self.over_median else f"{found} >= 0"

    def values(self, growth: Growth) -> Values:
        """Return the quantile as Prometheus computes it: linear within a bucket, capped at the last limit."""
        rates = Rate(f"{self.histogram}_bucket").values(growth, _LIMIT_LABEL)
        by_limit = {float(limit): rate for limit, rate in rates.items() if limit}
        limits = sorted(by_limit)
        if len(limits) < _FEWEST_BUCKETS or limits[-1] != math.inf or self.quantile * by_limit[math.inf] <= 0:
            return {}

        def quantile(share: float) -> float:
            rank = share * by_limit[math.inf]
            low, high = next(pair for pair in pairwise((0.0, *limits)) if by_limit[pair[1]] >= rank)
            if high == math.inf:
                return low
            below = by_limit.get(low, 0.0)
            return low + (high - low) * (rank - below) / (by_limit[high] - below)

        if not self.over_median:
            return {"": quantile(self.quantile)}
        return {"": quantile(self.quantile) / median} if (median := quantile(0.5)) > 0 else {}


@dataclass(frozen=True)
class Within(Measure):
    """The share of a histogram's observations within a limit, which must be one of its buckets."""

    histogram: str
    limit: str

    def promql(self, scope: Scope) -> str:
        """Return the share of the observations in the window."""
        return self._share().promql(scope)

    def values(self, growth: Growth) -> Values:
        """Return the share of the observations."""
        return self._share().values(growth)

    def _share(self) -> Ratio:
        return Ratio(Rate(f"{self.histogram}_bucket", {_LIMIT_LABEL: self.limit}), Rate(f"{self.histogram}_count"))


@dataclass(frozen=True)
class Gauge(Measure):
    """The present value of a gauge: its sum over pods and ranks, or the largest."""

    gauge: str
    largest: bool = False

    def promql(self, scope: Scope) -> str:
        """Return the sum or maximum."""
        return f"{'max' if self.largest else 'sum'} by ({scope.by()}) ({scope.select(self.gauge, {})})"

    def values(self, growth: Growth) -> Values:
        """Return the sum or maximum."""
        found = growth.gauges.get(self.gauge, ())
        if not found:
            return {}
        return {"": max(largest for _, largest in found) if self.largest else sum(total for total, _ in found)}
