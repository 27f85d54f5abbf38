"""Interface between replay's server and its engines: requests, bursts, load and step statistics."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A request to an engine."""

    request_id: str  # without the prefix of the API server
    prompt_tokens: int
    max_tokens: int
    block_hashes: Sequence[int] = ()  # chained FNV-1a of the prompt's full blocks, as a capture has them
    answer_hashes: Sequence[int] = ()  # of the blocks that its answer will fill, if the next turn is known
    temperature: float | None = None
    ignore_eos: bool = False  # generate max_tokens in any case


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Tokens of one request from one step of the engine."""

    tokens: int  # 0 only in a last one
    drafted: int = 0  # tokens that this step verified for the request
    accepted: int = 0  # tokens - 1, or more in a last burst: vLLM counts those that max_tokens cuts
    token_ids: Sequence[int] = ()  # if they were recorded
    cached_tokens: int = 0  # of the prompt, in the prefix cache; only in the first burst
    finish_reason: str | None = None  # in the last one: ``stop``, ``length``, ``abort``, ``error``, ``repetition``


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Current load of an engine, and totals since it started."""

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0  # share, 0 to 1
    preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens


Sink = Callable[[Burst], None]
"""Takes the bursts of one request, in order, on the event loop's thread."""


class Ticket(Protocol):
    """A submitted request, or a timer."""

    def cancel(self) -> None:
        """Cancel it; no effect if it is over."""


class Clock(Protocol):
    """Clock of an engine, in milliseconds since it started."""

    def now_ms(self) -> float:
        """Return the current time."""

    def call_at(self, when_ms: float, callback: Callable[[], None]) -> Ticket:
        """Call back at that time, or as soon as possible if it has passed."""


class UnmatchedRequestError(Exception):
    """A request without a record, in an engine that rejects such requests."""


class Submission(Ticket, Protocol):
    """A submitted request with its waiting time."""

    def waited_ms(self) -> float | None:
        """Return the time until it was first part of a step; None before that."""


class ReplayEngine(Protocol):
    """An engine without a model."""

    def submit(self, request: Incoming, sink: Sink) -> Submission:
        """Submit a request; its bursts go to the sink. A cancelled request frees its slot immediately."""

    def load(self) -> Load:
        """Return the current load."""


def scheduler_stats(
    load: Load, begun: int, drafted: Sequence[int], accepted: Sequence[int], num_speculative_tokens: int
) -> dict[str, Any]:
    """Return the statistics of one step.

    Parameters
    ----------
    load
        Load after the step, with the prefix cache tokens of this step only.
    begun
        Requests that ran for the first time.
    drafted, accepted
        Tokens of each request with a draft, in the same order.
    num_speculative_tokens
        K; 0 without speculation.
    """
    speculation = None
    if drafted:
        accepted_per_pos, drafted_per_pos = (
            [
                sum(count for value, count in counts.items() if value >= position)
                for position in range(1, num_speculative_tokens + 1)
            ]
            for counts in (Counter(accepted), Counter(drafted))
        )
        speculation = {
            "num_spec_tokens": num_speculative_tokens,
            "num_drafts": len(drafted),
            "num_draft_tokens": sum(drafted),
            "num_accepted_tokens": sum(accepted),
            "num_accepted_tokens_per_pos": accepted_per_pos,
            "num_draft_tokens_per_pos": drafted_per_pos,
        }
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
        "spec_decoding_stats": speculation,
        "encoder_cache_usage": 0.0,
        "waiting_lora_adapters": {},
        "running_lora_adapters": {},
    }
