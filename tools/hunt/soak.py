"""A soak: objects come, change and go for as long as is wanted, with faults on and off in turn; the oracles judge."""

import itertools
import math
import random
import time
from collections import Counter
from dataclasses import dataclass
from statistics import fmean, linear_regression
from typing import Final

from hunt.actions import Namespace
from hunt.oracles import Finding, judge
from hunt.records import Life, Moment
from hunt.rounds import Round
from hunt.stage import Stage
from hunt.states import States
from hunt.steps import Sequence, Step
from tests.support.faults.faults import Delay, EndWatch, Fault, Refuse, RepeatEvent, Reset

_CALM_S: Final = 45.0
_STORM_S: Final = 30.0
_PAUSE_S: Final = 0.5
_SAMPLE_S: Final = 5.0
_SLOPE_FROM_S: Final = 900.0
"""Minimum time since the operator's last start for a slope, because its caches fill first."""

_LAST_KILL_S: Final = 900.0
"""Time of the last kill at the latest. A slope needs a long time without a restart."""

_BLOCKS: Final = 10
"""Samples are averaged in this many blocks before a line is fitted, because neighboring samples are not independent."""

_T_95: Final = 2.306
"""97.5th percentile of Student's t distribution with ``_BLOCKS - 2`` degrees of freedom."""

_CAPTURES: Final = 3
"""Of one object; the oldest goes with its data then. As many objects at the end as at first: else memory grows with
them, and nothing can be said of what the operator keeps."""

_STORMS: Final = (
    (Fault(Delay(0.5), "[!w]*", share=0.3),),
    (Fault(Refuse(429, retry_after_s=1), "*", share=0.2), Fault(Refuse(500), "patch *", share=0.1)),
    (Fault(Reset(after=True), "patch *", share=0.15), Fault(Reset(), "create *", share=0.2)),
    (Fault(EndWatch(410), "watch *", share=0.2), Fault(RepeatEvent(), "watch *", share=0.3)),
    (),  # the operator is killed
)
"""Faults of the storms, in turn: slow calls, rejected calls, lost connections, broken watches, no operator."""


@dataclass(frozen=True)
class Sample:
    """The operator's process at one moment."""

    at_s: float
    memory_mib: float
    cpu_s: float


@dataclass
class Soaked:
    """What came of a soak."""

    findings: list[Finding]
    steps: Counter[str]
    samples: list[Sample]
    storms: int
    kills: int

    def __str__(self) -> str:
        steps = ", ".join(f"{count} {name}" for name, count in self.steps.most_common())
        memory, cpu = [each.memory_mib for each in self.samples], busy(self.samples)
        since = since_last_start(self.samples)
        minutes, needed = (since[-1].at_s - since[0].at_s) / 60, _SLOPE_FROM_S / 60
        slope = f"{slope_per_hour(self.samples)} in the {minutes:.0f} minutes since the last start"
        if minutes < needed:
            slope = f"no slope: only {minutes:.0f} minutes since the last start; at least {needed:.0f} needed"
        return (
            f"steps: {steps}\nstorms: {self.storms}, kills of the operator: {self.kills}\n"
            f"memory: {memory[0]:.0f} MiB at first, {max(memory):.0f} at most, {memory[-1]:.0f} at last;"
            f" {slope}\nCPU: {100 * cpu:.1f} % of a core"
        )


class Soak(Round):
    """One round whose beats are churn."""

    def __init__(self, stage: Stage, name: str, seed: int, objects: int) -> None:
        super().__init__(stage, name, [Sequence(())] * objects, ())
        self._random = random.Random(seed)  # noqa: S311  a seed that repeats a run is no secret
        self._states = States(seed)
        self.counted: Counter[str] = Counter()
        self.samples: list[Sample] = []
        self.storms = 0

    def soak(self, minutes: float) -> Soaked:
        """Churn for so long, and judge what is left of it."""
        self._minutes = minutes
        record = self.run()
        return Soaked(judge(record), self.counted, self.samples, self.storms, self.operator.kills)

    def drive(self) -> None:
        """Do something to some object all the time, with storms now and then; then heal all and let it come to rest."""
        began_s = turn_s = time.monotonic()
        stormy, kills_until_s = False, min(30 * self._minutes, _LAST_KILL_S)
        while (now_s := time.monotonic()) - began_s < 60 * self._minutes:
            if now_s - turn_s > (_STORM_S if stormy else _CALM_S):
                stormy, turn_s = not stormy, now_s
                self._turn(stormy=stormy, may_kill=now_s - began_s < kills_until_s)
            memory = f", {self.samples[-1].memory_mib:.0f} MiB" if self.samples else ""
            self.say(f"{self.counted.total()} steps, {self.storms} storms, {self._minutes:g} minutes planned{memory}")
            self._churn(self._random.choice(self.lives))
            self._sample(now_s - began_s)
            time.sleep(_PAUSE_S)
        self._turn(stormy=False, may_kill=False)
        for life in self.lives:
            self.heal(life)
        seen = self.settled()
        for life in self.lives:
            life.moments.append(Moment(0, Step("wait"), tuple(seen.get(life.namespace, ()))))

    def _turn(self, *, stormy: bool, may_kill: bool) -> None:
        """Begin a storm, or end it."""
        storms = _STORMS if may_kill else [storm for storm in _STORMS if storm]
        storm = storms[self.storms % len(storms)] if stormy else ()
        self.storms += stormy
        self.stage.proxy.faults = storm
        if stormy and not storm:
            self.operator.kill()

    def _churn(self, life: Life) -> None:
        """Do one thing to an object."""
        place: Namespace = self.places[life.namespace]
        step = next_step(life.sequence, self._random, self._states)
        place.do(step)
        self.counted[step.kind] += 1
        life.sequence = Sequence((*life.sequence.steps, step))

    def _sample(self, at_s: float) -> None:
        if not self.samples or at_s - self.samples[-1].at_s > _SAMPLE_S:
            self.operator.note()
            memory = self.operator.life.memory_mib
            self.samples.append(Sample(at_s, memory[-1] if memory else 0.0, self.operator.cpu_s()))


def next_step(sequence: Sequence, chance: random.Random, states: States) -> Step:
    """Return what is done to an object next, by what was done before."""
    kinds = [step.kind for step in sequence.steps]
    number = len(kinds)
    if not kinds or kinds[-1] == "delete":
        return Step("apply", states.good())
    (kind,) = chance.choices(
        ("apply", "scale", "capture", "delete", "drift", "remove", "podkill"), (4, 4, 1, 1, 2, 2, 2)
    )
    last = sequence.last or states.good()
    if kind == "apply":
        return Step("apply", states.near(last))
    if kind == "scale":
        return Step("apply", last.with_field(("replicas",), number % 3))
    captures = [step.number for step in sequence.steps if step.kind == "capture"][kinds.count("discard") :]
    if kind == "capture" and len(captures) == _CAPTURES:
        return Step("discard", number=captures[0])
    return Step(kind, number=number)


def busy(samples: list[Sample]) -> float:
    """Return how much of a core the operator took; a process that was started anew counts from nothing."""
    pairs = list(itertools.pairwise(samples))
    took = sum(after.cpu_s - (before.cpu_s if after.cpu_s >= before.cpu_s else 0.0) for before, after in pairs)
    return took / (samples[-1].at_s - samples[0].at_s) if pairs else 0.0


def since_last_start(samples: list[Sample]) -> list[Sample]:
    """Return those of the process that runs at the end."""
    starts = [n for n in range(1, len(samples)) if samples[n].cpu_s < samples[n - 1].cpu_s]
    return samples[starts[-1] :] if starts else samples


@dataclass(frozen=True)
class Slope:
    """Growth of the operator's memory, in MiB per hour, and half the width of its 95 % confidence interval."""

    growth: float
    margin: float

    @property
    def is_flat(self) -> bool:
        """Whether the growth cannot be distinguished from 0."""
        return abs(self.growth) <= self.margin

    def __str__(self) -> str:
        verdict = "flat" if self.is_flat else "grows" if self.growth > 0 else "falls"
        return f"slope {self.growth:+.1f} ± {self.margin:.1f} MiB/h ({verdict})"


def slope_per_hour(samples: list[Sample]) -> Slope:
    """Fit a line to the memory since the operator's last start, without the first third, in which its caches fill."""
    since = since_last_start(samples)
    since = since[len(since) // 3 :]
    if len(since) < _BLOCKS:
        return Slope(0.0, math.inf)
    blocks = [since[len(since) * n // _BLOCKS : len(since) * (n + 1) // _BLOCKS] for n in range(_BLOCKS)]
    hours = [fmean(each.at_s for each in block) / 3600 for block in blocks]
    memory = [fmean(each.memory_mib for each in block) for block in blocks]
    line = linear_regression(hours, memory)
    residuals = [mib - line.slope * at - line.intercept for at, mib in zip(hours, memory, strict=True)]
    deviation = math.sqrt(sum(each**2 for each in residuals) / (_BLOCKS - 2))
    spread = math.sqrt(sum((at - fmean(hours)) ** 2 for at in hours))
    return Slope(line.slope, _T_95 * deviation / spread)
