"""What engines did lately: in counters since their start, what ended an hour ago is not seen for days.

A window ends when it holds enough steps, however long that takes, so that idle engines prove nothing. An operator that
starts anew begins with what engines did since their own start.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Final

from specdecode_operator.deployment.proof.observed import answering_engines
from specdecode_operator.engine.metrics import EngineReading, Reading

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
