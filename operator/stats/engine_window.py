"""Windows over the counters of engines: recent load, draft acceptance and step times.

`Window` holds the samples of the last seconds, for a policy. `Recent` is the last window with enough decode steps,
however long it takes, so idle engines provide no evidence. After an operator restart, the window starts at engine
start. A counter that decreases was reset.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Final

from specdecode_operator.vllm.engine_metrics import EngineReading, Reading, answering_engines

LOOK_STANDS_S: Final = 60.0
"""How long a look at engines stands for what they do: a few rounds of the operator's."""

_ENOUGH_OF_WINDOW: Final = 0.75
_ENOUGH_DRAFTED: Final = 1000
"""Tokens, before their acceptance is compared: so many err by a few percent."""

_DECAYED: Final = 0.5
"""Share of the accepted tokens a draft that the other replicas have, below which one has decayed."""


@dataclass(frozen=True)
class Drafting:
    """Counters of an engine, or how far they went."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: "Drafting") -> "Drafting":
        return Drafting(self.drafts + other.drafts, self.drafted + other.drafted, self.accepted + other.accepted)

    def since(self, before: "Drafting") -> "Drafting":
        """Return how far they went; a counter that is less than it was began anew."""
        if self.drafts < before.drafts or self.drafted < before.drafted or self.accepted < before.accepted:
            return self
        return Drafting(self.drafts - before.drafts, self.drafted - before.drafted, self.accepted - before.accepted)


@dataclass(frozen=True)
class Sample:
    """One look at the engines that answered."""

    at_s: float
    running: float
    """Requests running at once, of a replica on average."""

    engines: Mapping[str, Drafting]
    """Counters by pod."""


@dataclass(frozen=True)
class Window:
    """The looks of the last seconds."""

    length_s: float
    samples: Sequence[Sample] = ()

    def add(self, sample: Sample) -> "Window":
        """Return the window with one look more, and without what is too old."""
        kept = [each for each in self.samples if sample.at_s - self.length_s <= each.at_s < sample.at_s]
        return Window(self.length_s, (*kept, sample))

    def spans(self) -> list[tuple[float, float]]:
        """Return requests running, and how many seconds that stands for."""
        return [(each.running, min(after.at_s - each.at_s, LOOK_STANDS_S)) for each, after in pairwise(self.samples)]

    @property
    def enough(self) -> bool:
        """Whether the looks cover most of the window."""
        return sum(seconds for _, seconds in self.spans()) >= _ENOUGH_OF_WINDOW * self.length_s

    @property
    def idle(self) -> bool:
        """Whether no look saw a request."""
        return not any(each.running for each in self.samples)

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the drafted tokens; None where too few were drafted."""
        total = sum(self.drafted().values(), Drafting())
        return total.accepted / total.drafted if total.drafted >= _ENOUGH_DRAFTED else None

    def drafted(self) -> dict[str, Drafting]:
        """Return how far the counters of each engine of the last look went; one that came meanwhile began then."""
        grown = dict.fromkeys(self.samples[-1].engines if self.samples else (), Drafting())
        for before, after in pairwise(self.samples):
            for name in grown:
                if name in before.engines and name in after.engines:
                    grown[name] += after.engines[name].since(before.engines[name])
        return grown

    def decayed(self) -> tuple[str, float, float] | None:
        """Return the engine that has less than half of the others accepted, with tokens a draft of it and of them.

        All are compared under the same load, so other prompts or another K look alike in all of them. One engine alone
        has nothing to be compared with.
        """
        lengths = {
            name: each.accepted / each.drafts
            for name, each in self.drafted().items()
            if each.drafted >= _ENOUGH_DRAFTED
        }
        if len(lengths) <= 1:
            return None
        worst = min(lengths, key=lambda name: lengths[name])
        others = median(length for name, length in lengths.items() if name != worst)
        return (worst, lengths[worst], others) if lengths[worst] < _DECAYED * others else None


_WINDOW_STEPS: Final = 512
_MOST_MISSING: Final = 100
"""Engines that are remembered although they do not answer: they may be gone for good."""
_ENOUGH_DRAFTED_TOKENS: Final = 256
"""Of a window, before its acceptance is compared: so many accepted by chance alone never halve it."""


@dataclass(frozen=True)
class Work:
    """Steps after a request's first token, and what was drafted for them."""

    steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    tokens: int = 0
    """What these steps brought; 0 where an engine does not say how long they took."""
    seconds: float = 0.0
    """How long they took, of all requests together: two at once take twice as long."""

    def since(self, begun: "Work") -> "Work":
        """Return what was done since; all of it where an engine began anew meanwhile."""
        if self.steps < begun.steps or self.drafts < begun.drafts:
            return self
        return Work(
            self.steps - begun.steps,
            self.drafts - begun.drafts,
            self.draft_tokens - begun.draft_tokens,
            self.accepted_tokens - begun.accepted_tokens,
            max(0, self.tokens - begun.tokens),
            max(0.0, self.seconds - begun.seconds),
        )

    def __add__(self, other: "Work") -> "Work":
        """Return both together."""
        return Work(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the drafted tokens; None where they are few."""
        few = self.draft_tokens < _ENOUGH_DRAFTED_TOKENS
        return None if few else self.accepted_tokens / self.draft_tokens


@dataclass(frozen=True)
class Recent:
    """The last whole window of an object's engines, and where the present one began."""

    begun: Mapping[str, Work] = field(default_factory=dict)
    """Counters of each engine, by pod."""

    last: Work | None = None
    """What all of them did in the last whole window."""

    best_acceptance: float = 0.0
    """Of a whole window of these engines."""

    begun_s: float | None = None
    """When the present window began, on the monotonic clock; None for the first, which began with the engines."""

    running: float | None = None
    """Requests that decoded at once in an engine in the last whole window, on average; None where nobody knows."""

    windows: int = 0
    """How many whole ones there were."""

    @property
    def stopped_drafting(self) -> bool:
        """Whether a whole window of steps had no draft."""
        return self.last is not None and self.last.drafts == 0

    @property
    def acceptance_collapsed(self) -> bool:
        """Whether less than half of what was accepted once is accepted now."""
        now = self.last.acceptance if self.last else None
        return now is not None and 2 * now < self.best_acceptance


NOTHING_RECENT: Final = Recent()


def update_recent(before: Recent, readings: Mapping[str, Reading], now_s: float = 0.0) -> Recent:
    """Return what engines did lately, with what they count now; other engines than before begin anew."""
    now = {name: _work(engine) for name, engine in answering_engines(readings).items()}
    if not now:
        return before
    if not before.begun.keys() & now.keys():
        before = NOTHING_RECENT
    window = sum((work.since(before.begun.get(name, Work())) for name, work in now.items()), Work())
    if window.steps < _WINDOW_STEPS:
        # One that began anew, or came, began with nothing.
        begun = {name: _begin(before.begun.get(name, Work()), work) for name, work in now.items()}
        return replace(before, begun=_with_missing(before.begun, begun))
    return Recent(
        _with_missing(before.begun, now),
        window,
        max(before.best_acceptance, window.acceptance or 0.0),
        now_s,
        _running(window, len(now), before.begun_s, now_s),
        before.windows + 1,
    )


def _with_missing(before: Mapping[str, Work], now: Mapping[str, Work]) -> Mapping[str, Work]:
    """Return the counters with those of engines that missed a question: theirs would begin with their start again."""
    missing = [(name, work) for name, work in before.items() if name not in now]
    return {**dict(missing[-_MOST_MISSING:]), **now}


def _running(window: Work, engines: int, begun_s: float | None, now_s: float) -> float | None:
    """Return how many requests were decoded at once: the time that they took together, over the time there was."""
    if begun_s is None or now_s <= begun_s or not window.seconds:
        return None
    return window.seconds / (now_s - begun_s) / engines


def _begin(begun: Work, now: Work) -> Work:
    return begun if now.since(begun) != now else Work()


def _work(engine: EngineReading) -> Work:
    """Return the counters of an engine; one that does not say its steps, as a replay of old, never fills a window."""
    seen, seconds, first = engine.speculation, engine.decode_seconds, engine.first_tokens
    drafted = (0, 0, 0) if seen is None else (seen.drafts, seen.draft_tokens, seen.accepted_tokens)
    timed = (0, 0.0) if seconds is None or first is None else (max(0, engine.generation_tokens - first), seconds)
    return Work(engine.decode_steps or 0, *drafted, *timed)
