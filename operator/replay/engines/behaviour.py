"""What an engine that goes step by step has to be told: how long a step takes, and what comes of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specdecode_operator.replay.emulated.step_time import StepShape
from specdecode_operator.replay.engines.engine import Incoming


class Course(Protocol):
    """How one request goes on."""

    output_tokens: int  # it ends with them
    finish_reason: str

    def first(self) -> int:
        """Return how many tokens come at the end of its prefill, or when it is computed again."""

    def planned(self) -> int:
        """Return how many drafted tokens its next step is planned with; what was drafted may be another number."""

    def next(self, output_tokens: int) -> tuple[int, int]:
        """Return how many tokens were drafted for its next step, and how many of them accepted.

        It has ``output_tokens`` already. What comes is one more than was accepted.
        """


class Behaviour(Protocol):
    """What is particular to an engine, where scheduling is the same in all."""

    num_speculative_tokens: int

    def lead_ms(self) -> float:
        """Return how long a request takes from its arrival until the scheduler sees it."""

    def begin(self, request: Incoming) -> Course:
        """Return how a new request will go."""

    def step_ms(self, step: StepShape, decoding: int) -> float:
        """Return how long the next step takes, in which so many requests have their next tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step of an engine, for those who record it."""

    index: int
    end_ms: float
    duration_ms: float
    shape: StepShape
    decoding: int
    prefilling: int
    first_prompt_tokens: int  # prompts of the requests whose first token came in it
    running: int  # after it, as are the others below
    waiting: int
    kv_cache_usage: float
    prefix_cache_queries: int  # tokens, in this step alone
    prefix_cache_hits: int
    drafted: Sequence[int]  # tokens drafted for each request that had a draft
    accepted: Sequence[int]  # and accepted, in the same order
    scheduled: Sequence[str]  # ids of requests that ran for the first time
    preempted: Sequence[str]


OnStep = Callable[[StepReport], None]
"""Is told of each step before its bursts go out."""
