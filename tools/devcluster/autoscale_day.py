"""The scripted day of `./just demo-autoscale`: its load, figures of how the replicas followed it, and a picture."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

HOURS = 24
RATES = (
    0.4,
    0.3,
    0.2,
    0.2,
    0.2,
    0.3,
    0.6,
    1.2,
    2.2,
    3.2,
    3.8,
    3.6,
    2.6,
    3.2,
    4.0,
    4.0,
    3.4,
    2.4,
    1.6,
    1.2,
    1.0,
    0.8,
    0.6,
    0.5,
)
"""Requests per second at each hour; in between, they change linearly."""

SURGE_FROM, SURGE_TO, SURGE = 20.0, 21.0, 3.0
"""Hours of a surge without warning, and the requests per second that it adds."""

_STEP_H = 0.05


@dataclass(frozen=True)
class Request:
    """One request of the day; times in hours."""

    sent_h: float
    seconds: float
    first_token_s: float | None = None  # None if it failed
    tokens: int = 0


@dataclass(frozen=True)
class Sample:
    """Replicas at one time, in hours: those that the autoscaler asked for, and those that were ready."""

    at_h: float
    wanted: int
    ready: int


def rate_at(hour: float) -> float:
    """Return the offered requests per second at an hour of the day."""
    before = int(hour) % HOURS
    share = hour - int(hour)
    usual = RATES[before] + share * (RATES[(before + 1) % HOURS] - RATES[before])
    return usual + (SURGE if SURGE_FROM <= hour < SURGE_TO else 0.0)


def arrivals(hour_s: float, seed: int = 0) -> list[float]:
    """Return the arrival times of a day in hours of ``hour_s`` seconds: a Poisson process."""
    draw, most, hour, found = random.Random(seed), max(RATES) + SURGE, 0.0, []
    while (hour := hour + draw.expovariate(most) / hour_s) < HOURS:
        if draw.random() < rate_at(hour) / most:
            found.append(hour)
    return found


@dataclass(frozen=True)
class Figures:
    """How well replicas followed the load of a day."""

    requests: int
    failed: int
    goodput_percent: float  # tokens in requests within the SLO
    needed_replica_hours: float
    used_replica_hours: float
    short_percent: float  # of the day with fewer ready replicas than needed
    overshoot: int  # most replicas beyond those that the last hours needed
    changes: int
    reversals: int  # scale-downs that were reversed within an hour

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values."""
        return [
            ("requests: total, failed", f"{self.requests:,}, {self.failed}"),
            ("tokens in requests within the SLO", f"{self.goodput_percent:.1f} %"),
            ("replica hours: needed, used", f"{self.needed_replica_hours:.0f}, {self.used_replica_hours:.0f}"),
            ("time with fewer ready replicas than needed", f"{self.short_percent:.0f} %"),
            ("overshoot: most replicas beyond those needed in the last 2 hours", str(self.overshoot)),
            ("changes of the number of replicas", str(self.changes)),
            ("oscillation: scale-downs that were reversed within an hour", str(self.reversals)),
        ]


@dataclass(frozen=True)
class Day:
    """A day that was played, for one autoscaler."""

    requests: Sequence[Request]
    samples: Sequence[Sample]
    target: int  # requests per replica
    most: int
    slo_s: float  # time to the first token

    def needed(self, hour: float) -> int:
        """Return the replicas that the offered load needs: by Little's law, with the usual time of a request."""
        return min(self.most, max(1, math.ceil(rate_at(hour) * self._usual_s / self.target)))

    @property
    def _usual_s(self) -> float:
        return median([each.seconds for each in self.requests if self.is_good(each)] or [0.0])

    def is_good(self, request: Request) -> bool:
        """Return whether a request was answered within the SLO."""
        return request.first_token_s is not None and request.first_token_s <= self.slo_s

    def replicas(self, hour: float) -> Sample:
        """Return the last sample before an hour."""
        return next((each for each in reversed(self.samples) if each.at_h <= hour), self.samples[0])

    def figures(self) -> Figures:
        """Return the figures of the day."""
        steps = [step * _STEP_H for step in range(int(HOURS / _STEP_H))]
        usual_s = self._usual_s
        needed = [min(self.most, max(1, math.ceil(rate_at(each) * usual_s / self.target))) for each in steps]
        seen = [self.replicas(each) for each in steps]
        back = int(2 / _STEP_H)
        tokens = sum(each.tokens for each in self.requests)
        good = sum(each.tokens for each in self.requests if self.is_good(each))
        changes = [
            (after.at_h, after.wanted - before.wanted)
            for before, after in pairwise(self.samples)
            if after.wanted != before.wanted
        ]
        return Figures(
            requests=len(self.requests),
            failed=sum(each.first_token_s is None for each in self.requests),
            goodput_percent=100 * good / tokens if tokens else 0.0,
            needed_replica_hours=sum(needed) * _STEP_H,
            used_replica_hours=sum(each.wanted for each in seen) * _STEP_H,
            short_percent=100 * sum(each.ready < least for each, least in zip(seen, needed, strict=True)) / len(steps),
            overshoot=max(
                each.wanted - max(needed[max(0, index - back) : index + 1]) for index, each in enumerate(seen)
            ),
            changes=len(changes),
            reversals=sum((at < 0 < then) and later_h - at_h <= 1 for (at_h, at), (later_h, then) in pairwise(changes)),
        )

    def draw(self, file: Path) -> None:
        """Write the picture: load, replicas and goodput over the day."""
        from matplotlib.figure import Figure  # noqa: PLC0415  takes a second, which other commands need not wait for

        steps = [step * _STEP_H for step in range(int(HOURS / _STEP_H))]
        usual_s = self._usual_s
        figure = Figure(figsize=(9, 6), layout="constrained")
        load, replicas, goodput = figure.subplots(3, 1, sharex=True)
        load.fill_between(steps, [rate_at(each) for each in steps], color="#9ecae1")
        load.set_ylabel("offered\nrequests/s")
        seen = [self.replicas(each) for each in steps]
        needed = [min(self.most, max(1, math.ceil(rate_at(each) * usual_s / self.target))) for each in steps]
        replicas.step(steps, needed, where="post", color="#999999", linestyle="--", label="needed")
        replicas.step(steps, [each.wanted for each in seen], where="post", color="#d95f02", label="autoscaler")
        replicas.step(steps, [each.ready for each in seen], where="post", color="#1b9e77", label="ready")
        replicas.set_ylabel("replicas")
        replicas.set_ylim(0, self.most + 0.5)
        replicas.legend(loc="upper left", ncols=3, fontsize="small")
        width_h = 0.25
        bins = [index * width_h for index in range(int(HOURS / width_h))]
        every, good = ([0.0] * len(bins) for _ in range(2))
        for each in self.requests:
            place = min(int(each.sent_h / width_h), len(bins) - 1)
            every[place] += each.tokens
            good[place] += each.tokens if self.is_good(each) else 0
        goodput.step(bins, every, where="post", color="#d95f02", label="all tokens")
        goodput.fill_between(bins, good, step="post", color="#1b9e77", alpha=0.6, label="within the SLO")
        goodput.set_ylabel("tokens per\nquarter hour")
        goodput.set_xlabel("hour of the day")
        goodput.legend(loc="upper left", ncols=2, fontsize="small")
        goodput.set_xlim(0, HOURS)
        goodput.set_xticks(range(0, HOURS + 1, 2))
        figure.savefig(file, format="svg", metadata={"Date": None})
