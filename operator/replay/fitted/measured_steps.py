"""The steps of a recording, with what was in each: of its step statistics, and of the chunks that ended with them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from specdecode_operator.capture.validation.rules import StepLine
from specdecode_operator.replay.recording.read import read_steps
from specdecode_operator.replay.recording.recording import RecordedRequest, Recording

Numbers = NDArray[np.float64]

SAME_MOMENT_MS: Final = 0.05
"""A chunk's moment is a sum of rounded gaps: it may lie so far from the step that it ended with, and steps of less
than twice that are not told apart."""


@dataclass(frozen=True)
class MeasuredSteps:
    """Arrays of one length, the fields of `StepShape` and how long each step took."""

    requests: Numbers
    scheduled_tokens: Numbers
    prefill_tokens: Numbers
    context_tokens: Numbers
    prefill_pairs: Numbers
    drafted: Numbers
    ms: Numbers  # from the end of the step before to its own; after a pause, its own time and the host's usual share
    host_ms: Numbers  # what of that lay between the steps, where both are known

    def __len__(self) -> int:
        """Return how many they are."""
        return len(self.ms)

    def every(self, stride: int) -> Self:
        """Return one of so many steps."""
        return replace(self, **{field.name: getattr(self, field.name)[::stride] for field in fields(self)})

    @classmethod
    def of(cls, recordings: Iterable[Recording]) -> Self:
        """Return all steps of some recordings of which it is known what was in them and how long they took."""
        found = [_of_engine(lines, requests, k) for lines, requests, k in _by_engine(recordings)]
        empty = np.zeros(0)
        return cls(
            **{field.name: np.concatenate([empty, *(each[field.name] for each in found)]) for field in fields(cls)}
        )


def _by_engine(recordings: Iterable[Recording]) -> Iterable[tuple[list[StepLine], list[RecordedRequest], int]]:
    for recording in recordings:
        if recording.steps is None:
            continue
        lines: dict[int, list[StepLine]] = {}
        for line in read_steps(recording.steps):
            lines.setdefault(line.engine, []).append(line)
        for engine, its_lines in lines.items():
            its_lines.sort(key=lambda line: line.ts_ms)
            requests = [each for each in recording.requests if each.engine == engine and each.arrival_ms is not None]
            yield its_lines, requests, recording.num_speculative_tokens


def _of_engine(lines: Sequence[StepLine], requests: Sequence[RecordedRequest], k: int) -> dict[str, Numbers]:
    ends_ms = np.array([line.ts_ms for line in lines])
    chunks = _chunks_by_step(ends_ms, requests)
    details = [_details(line) for line in lines]
    known = np.array([each is not None for each in details], dtype=bool)
    prefilling, prefill, decoding, decoded = np.array([each or (0,) * 5 for each in details], dtype=float).T[1:]
    period_ms, host_ms = _periods_ms(lines, details)
    own_ms = np.array([np.nan if line.duration_ms is None else line.duration_ms for line in lines])
    usual_ms = float(np.nanmedian(host_ms)) if np.isfinite(host_ms).any() else 0.0
    ms = np.where(np.isfinite(period_ms), period_ms, own_ms + usual_ms)
    # Of prompts that go on in the next step, only the tokens of this step are known.
    share = np.divide(prefill, chunks["uncached"], out=np.zeros_like(prefill), where=chunks["uncached"] > 0)
    rest = np.maximum(0, prefill - chunks["uncached"])
    columns = {
        "requests": prefilling + decoding,
        "scheduled_tokens": prefill + decoded,
        "prefill_tokens": prefill,
        "context_tokens": chunks["context"] + decoded + rest,
        "prefill_pairs": chunks["pairs"] * np.minimum(1, share) + rest * rest,
        "drafted": np.where(chunks["count"] > 0, float(k), 0.0),
        "ms": ms,
        "host_ms": host_ms,
    }
    wanted = known & np.isfinite(ms) & (ms > 0) & (columns["requests"] > 0)
    return {name: column[wanted] for name, column in columns.items()}


def _details(line: StepLine) -> tuple[int, int, int, int, int] | None:
    """Return index, prompts, their tokens, decoding requests and their tokens; None where vLLM did not say them."""
    given: Any = line.scheduler.iteration_details
    if not isinstance(given, dict):
        return None
    names = ("num_ctx_requests", "num_ctx_tokens", "num_generation_requests", "num_generation_tokens")
    found = [given.get(name) for name in ("iteration_index", *names)]
    if not all(isinstance(each, int) and 0 <= each < 2**40 for each in found):
        return None
    index, prompts, prompt_tokens, decoding, tokens = (int(each or 0) for each in found)
    return index, prompts, prompt_tokens, decoding, tokens


def _periods_ms(
    lines: Sequence[StepLine], details: Sequence[tuple[int, int, int, int, int] | None]
) -> tuple[Numbers, Numbers]:
    """Return the time since the step before, where the engine went on at once, and what of it was not the step's."""
    period_ms = np.full(len(lines), np.nan)
    host_ms = np.full(len(lines), np.nan)
    for index, ((before, at), (line, now)) in enumerate(pairwise(zip(lines, details, strict=True)), start=1):
        if at is None or now is None or now[0] != at[0] + 1 or not before.scheduler.num_running_reqs:
            continue
        period_ms[index] = line.ts_ms - before.ts_ms
        if line.duration_ms is not None:
            host_ms[index] = max(0.0, period_ms[index] - line.duration_ms)
    return period_ms, host_ms


def _chunks_by_step(ends_ms: Numbers, requests: Sequence[RecordedRequest]) -> dict[str, Numbers]:
    """Return, for each step, what is known of the requests that got a chunk with its end.

    ``count`` of them; ``context``: what they attend to, without the tokens that the step decodes; of those whose first
    chunk it is, ``uncached``: the tokens of their prompts that were computed, and ``pairs``: these times the prompt.
    """
    sums = {name: np.zeros(len(ends_ms)) for name in ("count", "context", "uncached", "pairs")}
    if not len(ends_ms):
        return sums
    for request in requests:
        chunks = np.frombuffer(request.chunk_tokens, dtype=np.uint32).astype(float)
        gaps_ms = np.frombuffer(request.gaps_ms, dtype=np.float64)
        moments_ms = (request.arrival_ms or 0.0) + request.ttft_ms + np.concatenate(([0.0], np.cumsum(gaps_ms)))
        step = _nearest(ends_ms, moments_ms)
        found = np.abs(ends_ms[step] - moments_ms) <= SAME_MOMENT_MS
        # The last token that is known is the first of those that the step decodes.
        context = request.prompt_tokens + np.concatenate(([0.0], np.cumsum(chunks)[:-1] - 1))
        np.add.at(sums["count"], step[found], 1.0)
        np.add.at(sums["context"], step[found], context[found])
        if found[0]:
            uncached = max(0, request.prompt_tokens - request.cached_tokens)
            sums["uncached"][step[0]] += uncached
            sums["pairs"][step[0]] += uncached * request.prompt_tokens
    return sums


def _nearest(ascending: Numbers, values: Numbers) -> NDArray[np.intp]:
    above = np.clip(np.searchsorted(ascending, values), 1, max(1, len(ascending) - 1))
    above = np.minimum(above, len(ascending) - 1)
    below = np.maximum(above - 1, 0)
    return np.where(values - ascending[below] <= ascending[above] - values, below, above)
