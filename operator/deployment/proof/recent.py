"""What engines did lately: in counters since their start, what ended an hour ago is not seen for days.

A window ends when it holds enough steps, however long that takes, so that idle engines prove nothing. An operator that
starts anew begins with what engines did since their own start.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from specdecode_operator.deployment.proof.observed import answering_engines
from specdecode_operator.engine.metrics import EngineReading, Reading

_WINDOW_STEPS: Final = 512
_ENOUGH_DRAFTED_TOKENS: Final = 256
"""Of a window, before its acceptance is compared: so many accepted by chance alone never halve it."""


@dataclass(frozen=True)
class Work:
    """Steps after a request's first token, and what was drafted for them."""

    steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def since(self, begun: "Work") -> "Work":
        """Return what was done since; all of it where an engine began anew meanwhile."""
        if self.steps < begun.steps or self.drafts < begun.drafts:
            return self
        return Work(
            self.steps - begun.steps,
            self.drafts - begun.drafts,
            self.draft_tokens - begun.draft_tokens,
            self.accepted_tokens - begun.accepted_tokens,
        )

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


def update_recent(before: Recent, readings: Mapping[str, Reading]) -> Recent:
    """Return what engines did lately, with what they count now; other engines than before begin anew."""
    now = {name: _work(engine) for name, engine in answering_engines(readings).items()}
    if not now:
        return before
    if not before.begun.keys() & now.keys():
        before = NOTHING_RECENT
    done = [work.since(before.begun.get(name, Work())) for name, work in now.items()]
    window = Work(
        sum(each.steps for each in done),
        sum(each.drafts for each in done),
        sum(each.draft_tokens for each in done),
        sum(each.accepted_tokens for each in done),
    )
    if window.steps < _WINDOW_STEPS:
        # One that began anew, or came, began with nothing.
        begun = {name: _begin(before.begun.get(name, Work()), work) for name, work in now.items()}
        return Recent(begun, before.last, before.best_acceptance)
    return Recent(now, window, max(before.best_acceptance, window.acceptance or 0.0))


def _begin(begun: Work, now: Work) -> Work:
    return begun if now.since(begun) != now else Work()


def _work(engine: EngineReading) -> Work:
    """Return the counters of an engine; one that does not say its steps, as a replay of old, never fills a window."""
    seen = engine.speculation
    if seen is None:
        return Work(engine.decode_steps or 0)
    return Work(engine.decode_steps or 0, seen.drafts, seen.draft_tokens, seen.accepted_tokens)
