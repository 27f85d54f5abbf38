"""What is measured of one recording, to be held against another."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdecode_operator.replay.recording.read import read_steps
from specdecode_operator.replay.recording.recording import RecordedRequest, Recording

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Measures:
    """One recording in numbers; empty where it has nothing of the kind."""

    k: int
    requests: int
    seconds: float  # from the first arrival to the last token; 0 without arrivals
    output_tokens: int
    ttft_ms: Floats
    tpot_ms: Floats  # of each request with more than one token
    gap_ms: Floats
    latency_ms: Floats
    bursts: dict[int, float]  # share of each size, without first chunks
    per_position: list[float]  # share of drafts of which each position was accepted
    acceptance: float | None  # share of drafted tokens that were accepted
    tokens_per_burst: Floats  # of each request, on average
    from_steps: bool  # acceptance is by the engine's own counters


@dataclass(frozen=True)
class _Drafting:
    """What was drafted, and what came of it."""

    drafts: int
    tokens: int
    accepted: list[int]  # drafts of which each position was accepted


def measured(recording: Recording) -> Measures:
    """Return the measures of a recording.

    Raises
    ------
    RecordingError
        At a line of its step statistics that cannot be read.
    """
    requests = recording.requests
    k = recording.num_speculative_tokens
    several = [request for request in requests if len(request.gaps_ms)]
    gaps_ms = _joined([np.asarray(request.gaps_ms) for request in several])
    sizes = _joined([np.asarray(request.chunk_tokens[1:]) for request in several])
    counted = _counters(recording, k)
    from_steps = bool(counted.drafts)
    drafting = counted if from_steps else _of_chunks(several, k)
    return Measures(
        k=k,
        requests=len(requests),
        seconds=_seconds(requests),
        output_tokens=sum(request.output_tokens for request in requests),
        ttft_ms=np.array([request.ttft_ms for request in requests]),
        tpot_ms=np.array([sum(each.gaps_ms) / (each.output_tokens - 1) for each in several if each.output_tokens > 1]),
        gap_ms=gaps_ms,
        latency_ms=np.array([request.ttft_ms + sum(request.gaps_ms) for request in requests]),
        bursts={int(size): float(np.mean(sizes == size)) for size in np.unique(sizes)},
        per_position=[count / drafting.drafts for count in drafting.accepted] if drafting.drafts else [],
        acceptance=sum(drafting.accepted) / drafting.tokens if drafting.tokens else None,
        tokens_per_burst=np.array([float(np.mean(request.chunk_tokens[1:])) for request in several]),
        from_steps=from_steps,
    )


def _joined(arrays: Sequence[NDArray[np.generic]]) -> Floats:
    return np.concatenate(arrays).astype(np.float64) if arrays else np.empty(0)


def _seconds(requests: Sequence[RecordedRequest]) -> float:
    arrived = [(request.arrival_ms, request.end_ms) for request in requests]
    whole = [(arrival, end) for arrival, end in arrived if arrival is not None and end is not None]
    return (max(end for _, end in whole) - min(arrival for arrival, _ in whole)) / 1000 if whole else 0.0


def _counters(recording: Recording, k: int) -> _Drafting:
    """Return what the step statistics say: an n-gram draft may have fewer tokens than K."""
    drafts, tokens, accepted = 0, 0, [0] * k
    for line in read_steps(recording.steps) if recording.steps is not None else ():
        stats = line.scheduler.spec_decoding_stats
        if stats is None:
            continue
        drafts += stats.num_drafts
        tokens += stats.num_draft_tokens
        for position, count in enumerate(stats.num_accepted_tokens_per_pos[:k]):
            accepted[position] += count
    return _Drafting(drafts, tokens, accepted)


def _of_chunks(requests: Sequence[RecordedRequest], k: int) -> _Drafting:
    """Return the same as chunks tell: every step drafts K, and last chunks, which may be cut, do not count."""
    sizes = _joined([np.asarray(request.chunk_tokens[1:-1]) for request in requests])
    drafts = len(sizes) if k else 0
    return _Drafting(drafts, drafts * k, [int((sizes > position).sum()) for position in range(1, k + 1)])
