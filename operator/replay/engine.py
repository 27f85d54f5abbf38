"""What replay's HTTP server and its engines agree on.

An engine gets requests and says at the right moments how many tokens each has; it knows nothing of HTTP, and time only
by a clock, so that the same engine serves clients in real time and forecasts hours of load in seconds (`VirtualClock`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A request as it comes to an engine."""

    request_id: str  # without what the API server puts around it
    prompt_tokens: int
    max_tokens: int
    block_hashes: Sequence[int] = ()  # chained FNV-1a of the prompt's full blocks, as a capture has them
    # And of those that its answer will fill, where a next turn of its conversation is known to have them.
    answer_hashes: Sequence[int] = ()
    temperature: float | None = None
    ignore_eos: bool = False  # it goes on to max_tokens, whatever the model says


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """What one step of the engine gave one request: its tokens come all at once, as they did when recorded."""

    tokens: int  # 0 only in a last one
    # Drafted tokens that this step verified for the request, and those accepted: tokens - 1, but in a last burst, which
    # max_tokens cuts and vLLM counts in full.
    drafted: int = 0
    accepted: int = 0
    token_ids: Sequence[int] = ()  # where they were recorded
    cached_tokens: int = 0  # of the prompt, found in the prefix cache: said with the first burst
    finish_reason: str | None = None  # with the last one: ``stop``, ``length``, ``abort``, ``error``, ``repetition``


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What an engine has to do now, and what it did since it began."""

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0  # share, 0 to 1
    preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens


Sink = Callable[[Burst], None]
"""Takes the bursts of one request, in order, on the event loop's thread."""


class Ticket(Protocol):
    """A request that an engine has taken, or a timer that is set."""

    def cancel(self) -> None:
        """Forget it, as of now; nothing happens where it is over."""


class Clock(Protocol):
    """Time as engines know it, in milliseconds since the clock began."""

    def now_ms(self) -> float:
        """Return what time it is."""

    def call_at(self, when_ms: float, callback: Callable[[], None]) -> Ticket:
        """Call back at that moment, or as soon as may be where it is over."""


class UnmatchedRequestError(Exception):
    """A request that no record is left for, where the engine is told to refuse such."""


class ReplayEngine(Protocol):
    """An engine without a model."""

    def submit(self, request: Incoming, sink: Sink) -> Ticket:
        """Take a request; its bursts go to the sink. Cancelled, it frees its place at once.

        Raises
        ------
        UnmatchedRequestError
            Where nothing is recorded for it, and that is to be refused.
        """

    def load(self) -> Load:
        """Return what it has to do."""


class Submission(Ticket, Protocol):
    """A request that an engine has taken and that knows how long it waited."""

    def waited_ms(self) -> float | None:
        """Return how long, until it first was part of a step; None where that has not come yet."""


class ServedEngine(ReplayEngine, Protocol):
    """An engine that can say what vLLM says of each request."""

    def submit(self, request: Incoming, sink: Sink) -> Submission:
        """Take a request, as any engine does."""
