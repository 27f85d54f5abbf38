"""What an engine served, as replay needs it: arrivals, chunks and gaps of every request.

A capture of 100,000 requests has tens of millions of gaps, so numbers are kept in arrays: 8 bytes each, not 32.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from specdecode_operator.capture.files.formats import TraceMeta

_OBJECT_BYTES: Final = 1024
"""Of a request without its numbers, with what is made of it while it is played."""

MOST_TOKENS_AT_ONCE: Final = 4096
"""Of a burst that may be a draft's: blocks of diffusion models have 256 at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """One request with at least one token. Times are milliseconds, moments since the recording's zero."""

    arrival_ms: float | None  # at the engine's client; absent in recordings that others made of a client's log
    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    ttft_ms: float  # from arrival to the first chunk
    chunk_tokens: "array[int]"  # tokens of every chunk, the first included
    gaps_ms: "array[float]"  # before each chunk after the first: one fewer than chunks
    # Parallel to the gaps, where the recorder knew them: requests that ran after the step that closed the gap, and
    # prompt tokens of the requests whose first token came in that step.
    num_running: "array[int] | None" = None
    prefill_tokens: "array[int] | None" = None
    concurrency: int = 1  # requests in flight at arrival, this one included
    request_id: str | None = None
    engine: int = 0  # data-parallel rank
    phase: str | None = None
    temperature: float | None = None
    scheduled_ms: float | None = None  # moment in which the engine first scheduled it
    preemptions: int = 0
    block_hashes: "array[int] | None" = None  # chained hashes of the prompt's full blocks
    token_ids: "array[int] | None" = None  # of the output, where they were recorded
    finish_reason: str | None = None

    @property
    def output_tokens(self) -> int:
        """All that it was given."""
        return sum(self.chunk_tokens)

    @property
    def held_bytes(self) -> int:
        """What it takes of the memory, about."""
        arrays = (self.chunk_tokens, self.gaps_ms, self.num_running, self.prefill_tokens, self.block_hashes)
        held = sum(len(each) * each.itemsize for each in (*arrays, self.token_ids) if each is not None)
        return held + len(self.request_id or "") + len(self.phase or "") + _OBJECT_BYTES

    @property
    def end_ms(self) -> float | None:
        """The moment of its last token."""
        return None if self.arrival_ms is None else self.arrival_ms + self.ttft_ms + sum(self.gaps_ms)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The requests of one trace, in order of arrival (those without one last, in the file's order)."""

    trace: Path
    steps: Path | None  # its step statistics, where there are any beside it
    meta: TraceMeta
    requests: Sequence[RecordedRequest]
    skipped_lines: int = 0  # that could not be read, where that was allowed

    @cached_property
    def num_speculative_tokens(self) -> int:
        """K: what the header says, or the largest burst without the target's own token. 0: it did not speculate.

        Without a header that tells, bursts of one size are the blocks of a diffusion model, which drafts nothing.
        """
        given = (self.meta.speculative or {}).get("num_speculative_tokens")
        if isinstance(given, int) and 0 < given < MOST_TOKENS_AT_ONCE:
            return given
        if self.meta.schema is not None and self.meta.speculative is None:
            return 0
        return 0 if self._of_blocks() else self._largest_burst() - 1

    def _largest_burst(self) -> int:
        """Return its tokens; a first chunk has what nobody knows the sizes of, where those are not there."""
        sizes = (max(each.chunk_tokens[1:], default=1) for each in self.requests)
        return min(max(sizes, default=1), MOST_TOKENS_AT_ONCE)

    def _of_blocks(self) -> bool:
        """Whether every burst but the last one of a request has the same size."""
        sizes = {tokens for each in self.requests for tokens in each.chunk_tokens[:-1]}
        return len(sizes) == 1 and all(each.chunk_tokens[-1] <= max(sizes) for each in self.requests)
