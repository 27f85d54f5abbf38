"""Interface between replay's server and its engines: requests, bursts, load and step statistics."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


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


def scheduler_stats(
    load: Load, begun: int, drafted: Sequence[int], accepted: Sequence[int], num_speculative_tokens: int
) -> dict[str, Any]:
    """Return the statistics of one step.

    Parameters
    ----------
    load
        After the step; tokens of the prefix cache in this step alone.
    begun
        Requests that ran for the first time.
    drafted, accepted
        Of each request that had a draft, in the same order.
    num_speculative_tokens
        K; 0 without speculation.
    """
    return {
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "step_counter": 0,
        "current_wave": 0,
        "kv_cache_usage": round(load.kv_cache_usage, 6),
        "prefix_cache_stats": {
            "reset": False,
            "requests": begun,
            "queries": load.prefix_cache_queries,
            "hits": load.prefix_cache_hits,
            "preempted_requests": 0,
            "preempted_queries": 0,
            "preempted_hits": 0,
        },
        "kv_cache_eviction_events": [],
        "spec_decoding_stats": _spec_decoding_stats(drafted, accepted, num_speculative_tokens),
        "encoder_cache_usage": 0.0,
        "waiting_lora_adapters": {},
        "running_lora_adapters": {},
    }


def _spec_decoding_stats(drafted: Sequence[int], accepted: Sequence[int], k: int) -> dict[str, Any] | None:
    if not drafted:
        return None
    return {
        "num_spec_tokens": k,
        "num_drafts": len(drafted),
        "num_draft_tokens": sum(drafted),
        "num_accepted_tokens": sum(accepted),
        "num_accepted_tokens_per_pos": _reached(Counter(accepted), k),
        "num_draft_tokens_per_pos": _reached(Counter(drafted), k),
    }


def _reached(counts: Counter[int], k: int) -> list[int]:
    return [sum(count for value, count in counts.items() if value >= position) for position in range(1, k + 1)]
