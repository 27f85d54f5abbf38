"""Windows over the counters of engines: recent load, draft acceptance and step times.

`Window` holds the samples of the last seconds, for a policy. `Recent` is the last window with enough decode steps,
however long it takes, so idle engines provide no evidence. After an operator restart, the window starts at engine
start. A counter that decreases was reset.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from statistics import median
from typing import Final

from specdecode_operator.vllm.engine_metrics import Reading, answering_engines

LOOK_STANDS_S: Final = 60.0
"""A sample expires after this time: a few rounds of the operator."""

_ENOUGH_OF_WINDOW: Final = 0.75
_ENOUGH_DRAFTED: Final = 1000
"""Fewest drafted tokens before their acceptance is compared: the share of 1,000 is accurate to a few percent."""

_DECAYED: Final = 0.5
"""Share of the other replicas' accepted tokens per draft below which a replica has decayed."""


@dataclass(frozen=True)
class Work:
    """Counters of an engine, or their growth: steps after a request's first token, and the drafts for them."""

    steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    tokens: int = 0  # from these steps; 0 if the engine does not report their time
    seconds: float = 0.0  # summed over requests: two at once take twice as long

    def since(self, begun: "Work") -> "Work":
        """Return the growth; all of it if a counter was reset, as by an engine that restarted."""
        grown = [now - before for now, before in zip(_counters(self), _counters(begun), strict=True)]
        # Tokens and seconds are differences of counters that are not read at the same instant.
        return self if min(grown[:4]) < 0 else Work(*(max(0, each) for each in grown))

    def __add__(self, other: "Work") -> "Work":
        return Work(*(mine + theirs for mine, theirs in zip(_counters(self), _counters(other), strict=True)))

    def acceptance(self, enough: int) -> float | None:
        """Return the accepted share of the drafted tokens; None with fewer than `enough`."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens >= enough else None


# dataclasses.astuple copies each value deeply, which takes most of the time of a policy's decision.
_counters: Final = attrgetter("steps", "drafts", "draft_tokens", "accepted_tokens", "tokens", "seconds")


@dataclass(frozen=True)
class Sample:
    """One scrape of the engines that answered."""

    at_s: float
    running: float  # mean requests running per replica
    engines: Mapping[str, Work]  # by pod


@dataclass(frozen=True)
class Window:
    """The samples of the last seconds."""

    length_s: float
    samples: Sequence[Sample] = ()

    def add(self, sample: Sample) -> "Window":
        """Return the window with one more sample, without the expired ones."""
        kept = [each for each in self.samples if sample.at_s - self.length_s <= each.at_s < sample.at_s]
        return Window(self.length_s, (*kept, sample))

    def spans(self) -> list[tuple[float, float]]:
        """Return running requests with the seconds for which each sample stands."""
        return [(each.running, min(after.at_s - each.at_s, LOOK_STANDS_S)) for each, after in pairwise(self.samples)]

    @property
    def enough(self) -> bool:
        """Whether the samples cover most of the window."""
        return sum(seconds for _, seconds in self.spans()) >= _ENOUGH_OF_WINDOW * self.length_s

    @property
    def idle(self) -> bool:
        """Whether no sample has a request."""
        return not any(each.running for each in self.samples)

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the drafted tokens; None if too few were drafted."""
        return sum(self._growth.values(), Work()).acceptance(_ENOUGH_DRAFTED)

    @cached_property
    def _growth(self) -> dict[str, Work]:
        """Return the growth for each engine of the last sample; a new one starts at its first sample."""
        grown = dict.fromkeys(self.samples[-1].engines if self.samples else (), Work())
        for before, after in pairwise(self.samples):
            for name in grown.keys() & before.engines.keys() & after.engines.keys():
                grown[name] += after.engines[name].since(before.engines[name])
        return grown

    def decayed(self) -> tuple[str, float, float] | None:
        """Return the engine with less than half of the others' accepted tokens per draft, then both figures.

        All engines are under the same load, so a change of prompts or K affects all of them. A single engine has no
        other to be compared with.
        """
        lengths = {
            name: each.accepted_tokens / each.drafts
            for name, each in self._growth.items()
            if each.draft_tokens >= _ENOUGH_DRAFTED
        }
        if len(lengths) <= 1:
            return None
        worst = min(lengths, key=lambda name: lengths[name])
        others = median(length for name, length in lengths.items() if name != worst)
        return (worst, lengths[worst], others) if lengths[worst] < _DECAYED * others else None


_WINDOW_STEPS: Final = 512
_MOST_MISSING: Final = 100
"""Most engines that are kept although they do not answer: they may have been removed."""
ENOUGH_DRAFTED_TOKENS: Final = 256
"""Fewest drafted tokens of a window before its acceptance is compared: chance never halves the share of 256."""


@dataclass(frozen=True)
class Recent:
    """The last whole window of an object's engines, and the start of the present one."""

    begun: Mapping[str, Work] = field(default_factory=dict)  # counters at the start of the present window, by pod
    last: Work | None = None  # growth of all engines in the last whole window
    best_acceptance: float = 0.0  # of a whole window of these engines
    begun_s: float | None = None  # start of the present window, monotonic; None for the first, which began at start
    running: float | None = None  # mean requests decoding at once per engine in the last whole window, if known
    windows: int = 0  # number of whole windows

    @property
    def stopped_drafting(self) -> bool:
        """Whether a whole window of steps had no draft."""
        return self.last is not None and self.last.drafts == 0

    @property
    def acceptance_collapsed(self) -> bool:
        """Whether acceptance fell below half of its best."""
        now = self.last.acceptance(ENOUGH_DRAFTED_TOKENS) if self.last else None
        return now is not None and 2 * now < self.best_acceptance


NOTHING_RECENT: Final = Recent()


def update_recent(before: Recent, readings: Mapping[str, Reading], now_s: float = 0.0) -> Recent:
    """Return the recent window after a scrape; start a new window for a set of engines without one."""
    now: dict[str, Work] = {}
    for name, engine in answering_engines(readings).items():
        seen, seconds, first = engine.speculation, engine.decode_seconds, engine.first_tokens
        drafted = (0, 0, 0) if seen is None else (seen.drafts, seen.draft_tokens, seen.accepted_tokens)
        timed = (0, 0.0) if seconds is None or first is None else (max(0, engine.generation_tokens - first), seconds)
        # An engine that does not report its steps never fills a window.
        now[name] = Work(engine.decode_steps or 0, *drafted, *timed)
    if not now:
        return before
    if not before.begun.keys() & now.keys():
        before = NOTHING_RECENT
    # Keep engines that missed a scrape: without their counters, their return would count as growth since their start.
    missing = [(name, work) for name, work in before.begun.items() if name not in now][-_MOST_MISSING:]
    begun = {name: before.begun.get(name, Work()) for name in now}
    grown = {name: work.since(begun[name]) for name, work in now.items()}
    window = sum(grown.values(), Work())
    if window.steps < _WINDOW_STEPS:
        # A new or restarted engine starts at zero.
        begun = {name: begun[name] if grown[name] != work else Work() for name, work in now.items()}
        return replace(before, begun={**dict(missing), **begun})
    passed_s = 0.0 if before.begun_s is None else now_s - before.begun_s
    return Recent(
        begun={**dict(missing), **now},
        last=window,
        best_acceptance=max(before.best_acceptance, window.acceptance(ENOUGH_DRAFTED_TOKENS) or 0.0),
        begun_s=now_s,
        running=window.seconds / passed_s / len(now) if passed_s > 0 and window.seconds else None,
        windows=before.windows + 1,
    )
