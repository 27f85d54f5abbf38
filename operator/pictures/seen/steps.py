"""What step statistics come to: drafting by position, by batch and over time; KV cache and preemptions over time."""

from typing import Final

import numpy as np

from specdecode_operator.capture.validation.rules import StepLine
from specdecode_operator.pictures.seen.sums import ByNumber, ByTime

_LARGEST_BATCH: Final = 8192
MOST_POSITIONS: Final = 256
_BATCH_STEPS: Final = 20_000


class StepSums:
    """Sums over all steps of all engines."""

    def __init__(self) -> None:
        self.steps = self.drafts = self.draft_tokens = self.accepted_tokens = 0
        self.accepted_per_position: list[int] = []
        self.by_running = ByNumber(_LARGEST_BATCH, 2)  # draft tokens, accepted tokens
        # Steps, draft tokens, accepted tokens, KV cache usage, running, waiting, preempted.
        self.by_time = ByTime(7)
        self._pending: list[tuple[float, ...]] = []

    def add(self, line: StepLine) -> None:
        """Take a step in."""
        scheduler = line.scheduler
        drafting = scheduler.spec_decoding_stats
        drafted, accepted = (drafting.num_draft_tokens, drafting.num_accepted_tokens) if drafting else (0, 0)
        preempted = scheduler.prefix_cache_stats.preempted_requests
        self.steps += 1
        if drafting is not None and drafted:
            self.drafts += drafting.num_drafts
            self.draft_tokens += drafted
            self.accepted_tokens += accepted
            self._add_positions(drafting.num_accepted_tokens_per_pos)
        running, waiting = scheduler.num_running_reqs, scheduler.num_waiting_reqs
        usage = max(0.0, min(scheduler.kv_cache_usage, 1.0))
        self._pending.append((line.ts_ms, drafted, accepted, usage, running, waiting, preempted))
        if len(self._pending) >= _BATCH_STEPS:
            self.flush()

    def _add_positions(self, accepted: list[int]) -> None:
        sums = self.accepted_per_position
        sums += [0] * (min(len(accepted), MOST_POSITIONS) - len(sums))
        for position, count in enumerate(accepted[:MOST_POSITIONS]):
            sums[position] += count

    def flush(self) -> None:
        """Add what waits to the sums: to be called once all steps are in."""
        if not self._pending:
            return
        rows = np.array(self._pending, dtype=np.float64)
        self._pending = []
        moments_ms, drafted, accepted, usage, running, waiting, preempted = rows.T
        self.by_time.add(moments_ms, np.ones(len(rows)), drafted, accepted, usage, running, waiting, preempted)
        batch = np.minimum(running, _LARGEST_BATCH).astype(np.int64)
        self.by_running.add(batch, drafted, accepted)

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the drafted tokens; None where nothing was drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def per_position(self) -> list[float]:
        """The share of drafts of which the token at each position was accepted."""
        return [count / self.drafts for count in self.accepted_per_position] if self.drafts else []
