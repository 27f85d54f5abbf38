"""How a figure is taken from vLLM's counters, as PromQL: over a window, for each deployment or each pod."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

DEPLOYMENT_LABEL: Final = "specdecode_deployment"
"""The label that a series of an engine has from the label of its pod, ``specdecode.io/deployment``."""

DEPLOYMENT_LEVEL: Final = ("namespace", DEPLOYMENT_LABEL)
POD_LEVEL: Final = (*DEPLOYMENT_LEVEL, "pod")


class Measure(Protocol):
    """A way to take a figure."""

    def promql(self, level: tuple[str, ...], window: str) -> str:
        """Return the expression; it has no sample where there is nothing to divide by."""
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

    def promql(self, level: tuple[str, ...], window: str) -> str:
        """Return the sum over pods and ranks."""
        return f"sum by ({', '.join(level)}) (rate({_selected(self.counter, self.matching)}[{window}]))"

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

    def promql(self, level: tuple[str, ...], window: str) -> str:
        """Return the ratio where the second counter grew."""
        under = f"({self.under.promql(level, window)} > 0)"
        added = f"{self.plus} + " if self.plus else ""
        if self.by is None:
            return f"{added}{self.over.promql(level, window)} / {under}"
        over = self.over.promql((*level, self.by), window)
        return f"{added}{over} / on ({', '.join(level)}) group_left () {under}"

    def series(self) -> frozenset[str]:
        """Return both counters."""
        return self.over.series() | self.under.series()


@dataclass(frozen=True)
class Difference:
    """One counter's growth less another's."""

    of: Rate
    less: Rate

    def promql(self, level: tuple[str, ...], window: str) -> str:
        """Return the difference."""
        return f"{self.of.promql(level, window)} - {self.less.promql(level, window)}"

    def series(self) -> frozenset[str]:
        """Return both counters."""
        return self.of.series() | self.less.series()


@dataclass(frozen=True)
class Quantile:
    """A quantile of a histogram, as histogram_quantile interpolates it within a bucket."""

    histogram: str
    quantile: float

    def promql(self, level: tuple[str, ...], window: str) -> str:
        """Return the quantile of what was observed in the window."""
        # Without an observation it is NaN, which no comparison lets pass.
        return f"{self.interpolated(level, window)} >= 0"

    def interpolated(self, level: tuple[str, ...], window: str) -> str:
        """Return the same, NaN where nothing was observed."""
        buckets = Rate(f"{self.histogram}_bucket").promql((*level, "le"), window)
        return f"histogram_quantile({self.quantile:g}, {buckets})"

    def series(self) -> frozenset[str]:
        """Return the buckets."""
        return frozenset({f"{self.histogram}_bucket"})


@dataclass(frozen=True)
class Spread:
    """A high quantile of a histogram over its median."""

    histogram: str
    quantile: float

    def promql(self, level: tuple[str, ...], window: str) -> str:
        """Return the ratio of the two quantiles."""
        high, median = (Quantile(self.histogram, each).interpolated(level, window) for each in (self.quantile, 0.5))
        return f"{high} / ({median} > 0)"

    def series(self) -> frozenset[str]:
        """Return the buckets."""
        return Quantile(self.histogram, self.quantile).series()


@dataclass(frozen=True)
class Within:
    """The share of a histogram's observations within a limit, which must be one of its buckets."""

    histogram: str
    limit: str

    def promql(self, level: tuple[str, ...], window: str) -> str:
        """Return the share of what was observed in the window."""
        within = Rate(f"{self.histogram}_bucket", {"le": self.limit})
        return Ratio(within, Rate(f"{self.histogram}_count")).promql(level, window)

    def series(self) -> frozenset[str]:
        """Return buckets and count."""
        return frozenset({f"{self.histogram}_bucket", f"{self.histogram}_count"})


@dataclass(frozen=True)
class Gauge:
    """What engines say at this moment: the sum, or the largest."""

    gauge: str
    largest: bool = False

    def promql(self, level: tuple[str, ...], window: str) -> str:  # noqa: ARG002  a gauge has no window
        """Return the sum or maximum over pods and ranks."""
        return f"{'max' if self.largest else 'sum'} by ({', '.join(level)}) ({_selected(self.gauge, {})})"

    def series(self) -> frozenset[str]:
        """Return the gauge."""
        return frozenset({self.gauge})


def _selected(name: str, matching: Mapping[str, str]) -> str:
    """Select series of the operator's engines: a Prometheus may have those of others."""
    matchers = [f'{DEPLOYMENT_LABEL}!=""', *(f'{label}=~"{pattern}"' for label, pattern in matching.items())]
    return f"{name}{{{', '.join(matchers)}}}"
