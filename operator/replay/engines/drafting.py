"""How many tokens were drafted for each burst: step statistics say it of whole steps, traces do not say it.

A burst belongs to the step at whose end it was sent. Where every running request drafted K tokens, that is all; else a
step's drafts go to the requests that got most of it, and its drafted tokens to all of these alike.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from specdecode_operator.capture.validation.rules import SpeculationStats, StepLine
from specdecode_operator.replay.recording.recording import RecordedRequest, Recording

_APART_MS: Final = 0.2
"""Between a burst and the end of its step: both are the engine's stamp, but gaps were rounded and are summed up."""
_LEAST_SHARE: Final = 0.9
"""Of bursts that must have a step: else the statistics are of another run, or half of them are missing."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """What was drafted for one request."""

    drafted: "array[int]"  # for every burst
    accepted: "array[int]"  # the same; in a request's last burst they may be more than its further tokens


@dataclass(slots=True)
class _Member:
    """A burst that may have verified a draft."""

    drafting: Drafting
    place: int  # among the bursts of its request
    further: int  # its tokens without the target's own
    is_last: bool


def assumed_drafting(request: RecordedRequest, k: int) -> Drafting:
    """Return a drafting without step statistics: K tokens in every step after the first token."""
    drafted, accepted = array("H"), array("H")
    for place, tokens in enumerate(request.chunk_tokens):
        drafted.append(k if place or tokens > 1 else 0)
        accepted.append(min(tokens - 1, k))
    return Drafting(drafted, accepted)


def recorded_drafting(recording: Recording, steps: Iterator[StepLine]) -> Sequence[Drafting] | None:
    """Return the drafting of every request as step statistics have it; None where they do not fit the trace."""
    of_engine: dict[int, tuple[array[float], list[SpeculationStats | None]]] = {}
    for step in steps:
        moments, stats = of_engine.setdefault(step.engine, (array("d"), []))
        moments.append(step.ts_ms)
        stats.append(step.scheduler.spec_decoding_stats)
    k, found = recording.num_speculative_tokens, list[Drafting]()
    members: dict[tuple[int, int], list[_Member]] = {}
    bursts = placed = 0
    for request in recording.requests:
        found.append(assumed_drafting(request, k))
        moments, _ = of_engine.get(request.engine, (array("d"), []))
        places = _steps_of(request, moments)
        bursts += len(places)
        for place, number in enumerate(places):
            if number is not None:
                placed += 1
                last = place == len(places) - 1
                member = _Member(found[-1], place, request.chunk_tokens[place] - 1, last)
                members.setdefault((request.engine, number), []).append(member)
    if placed < _LEAST_SHARE * bursts:
        return None
    for (engine, number), of_step in members.items():
        _share_out(of_engine[engine][1][number], of_step, k)
    return found


def _steps_of(request: RecordedRequest, moments: "array[float]") -> list[int | None]:
    """Return which step each burst came of."""
    import numpy as np  # noqa: PLC0415  takes a tenth of a second, which a trace without statistics does not need

    if request.arrival_ms is None or not moments:
        return [None] * len(request.chunk_tokens)
    first_ms = request.arrival_ms + request.ttft_ms
    bursts_ms = np.fromiter(accumulate(request.gaps_ms, initial=first_ms), float, len(request.chunk_tokens))
    ends_ms = np.frombuffer(moments)
    after = np.searchsorted(ends_ms, bursts_ms - _APART_MS).clip(max=len(ends_ms) - 1)
    near = np.abs(ends_ms[after] - bursts_ms) <= _APART_MS
    return [int(step) if fits else None for step, fits in zip(after, near, strict=True)]


def _share_out(stats: SpeculationStats | None, members: list[_Member], k: int) -> None:
    """Give a step's drafts to its bursts."""
    drafts = stats.num_drafts if stats is not None else 0
    tokens = stats.num_draft_tokens if stats is not None else 0
    later = [member for member in members if member.place or member.further]
    # Those that came of no draft of this step, as of a request's first tokens, are the smallest.
    later.sort(key=lambda member: -member.further)
    for member in later[drafts:]:
        member.drafting.drafted[member.place] = member.drafting.accepted[member.place] = 0
    drafters = later[:drafts]
    left = tokens if drafts <= len(later) else round(tokens * len(later) / drafts)
    for number, member in enumerate(drafters):
        even = -(-left // (len(drafters) - number))
        drafted = min(max(even, member.further), k)
        member.drafting.drafted[member.place] = drafted
        member.drafting.accepted[member.place] = min(member.further, drafted)
        left = max(0, left - drafted)
    accepted = stats.num_accepted_tokens if stats is not None else 0
    if drafts <= len(later):
        _add_cut(accepted - sum(member.further for member in drafters), drafters)


def _add_cut(tokens: int, drafters: list[_Member]) -> None:
    """Give tokens that were accepted and then cut, as ``max_tokens`` was reached, to requests that ended here."""
    for member in drafters:
        if member.is_last and tokens > 0:
            accepted = member.drafting.accepted
            more = min(tokens, member.drafting.drafted[member.place] - accepted[member.place])
            accepted[member.place] += more
            tokens -= more
