"""Drafted tokens of each recorded burst, and acceptance rates that override the recorded ones.

Step statistics count drafted tokens per step, and traces do not count them at all.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Final

from specdecode_operator.capture.files.trace_rules import StepLine
from specdecode_operator.capture.trace_reader import RecordedRequest, Recording

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AcceptanceSchedule:
    """The accepted share of drafted tokens, from each time on. The first time is 0."""

    begins_ms: tuple[float, ...]
    shares: tuple[float, ...]  # 0 to 1

    @classmethod
    def parse(cls, text: str) -> "AcceptanceSchedule":
        """Parse ``0.7``, or ``0:0.8,60:0.3`` with the seconds from which a share holds, or raise ValueError."""
        pairs = [part.rpartition(":")[::2] for part in text.split(",")]
        try:
            begins_ms = tuple(float(begin or 0) * 1000 for begin, _ in pairs)
            shares = tuple(float(share) for _, share in pairs)
        except ValueError as error:
            raise ValueError(f"{text}: write a share such as 0.7, or shares by seconds such as 0:0.8,60:0.3") from error
        if not all(0 <= share <= 1 for share in shares):
            raise ValueError(f"{text}: a share must be between 0 and 1")
        if begins_ms[0] != 0 or list(begins_ms) != sorted(set(begins_ms)) or begins_ms[-1] == float("inf"):
            raise ValueError(f"{text}: the seconds must start at 0 and increase")
        return cls(begins_ms, shares)

    def at(self, now_ms: float) -> float:
        """Return the share at a time."""
        return self.shares[max(0, bisect_right(self.begins_ms, now_ms) - 1)]


def draw_accepted(share: float, num_speculative_tokens: int, random: Random) -> int:
    """Draw the accepted tokens of a draft, with this mean share of accepted tokens."""
    accepted, chance = 0, position_chance(share, num_speculative_tokens)
    while accepted < num_speculative_tokens and random.random() < chance:
        accepted += 1
    return accepted


@lru_cache(1024)
def position_chance(share: float, num_speculative_tokens: int) -> float:
    """Return the chance p of each position for which p + p^2 + … + p^K is that share of K."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        expected = sum(middle**position for position in range(1, num_speculative_tokens + 1))
        low, high = (middle, high) if expected < share * num_speculative_tokens else (low, middle)
    return high


_APART_MS: Final = 0.2  # most between a burst and the end of its step: the sum of rounded gaps adds an error
# Share of bursts that must have a step: with fewer, the statistics are of another run or incomplete.
_LEAST_SHARE: Final = 0.9


@dataclass(frozen=True, slots=True)
class Drafting:
    """Drafted and accepted tokens of one request."""

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
    """Return the drafting without step statistics: K tokens in every step after the first token."""
    sizes = request.chunk_tokens
    drafted = array("H", [k]) * len(sizes)
    if sizes[0] == 1:
        drafted[0] = 0
    return Drafting(drafted, array("H", [tokens - 1 if tokens <= k else k for tokens in sizes]))


_COLUMNS: Final = 4
"""Columns of an engine's steps: end in ms, drafts, drafted tokens and accepted tokens."""


def recorded_drafting(recording: Recording, steps: Iterator[StepLine]) -> Sequence[Drafting] | None:
    """Return the drafting of every request by step statistics; None if they do not fit the trace."""
    import numpy as np  # noqa: PLC0415  takes a tenth of a second, which a trace without statistics does not need

    of_engine: dict[int, array[float]] = {}
    for step in steps:
        stats = step.scheduler.spec_decoding_stats
        counts = (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) if stats else (0, 0, 0)
        of_engine.setdefault(step.engine, array("d")).extend((step.ts_ms, *counts))
    k = recording.num_speculative_tokens
    found = [assumed_drafting(request, k) for request in recording.requests]
    of_requests: dict[int, list[int]] = {}
    for number, request in enumerate(recording.requests):
        of_requests.setdefault(request.engine, []).append(number)
    bursts = placed = 0
    members: list[tuple[Floats, dict[int, list[_Member]]]] = []
    for engine, numbers in of_requests.items():
        known = np.frombuffer(of_engine.get(engine, array("d"))).reshape(-1, _COLUMNS)
        requests = [recording.requests[number] for number in numbers]
        places = _steps_of(requests, known[:, 0])
        bursts += len(places)
        placed += int((places >= 0).sum())
        members.append((known, _to_share(requests, [found[number] for number in numbers], known, places, k)))
    if placed < _LEAST_SHARE * bursts:
        return None
    for known, of_steps in members:
        for step_number, of_step in of_steps.items():
            _share_out(known[step_number].astype(int).tolist(), of_step, k)
    return found


def _steps_of(requests: Sequence[RecordedRequest], ends_ms: "Floats") -> "npt.NDArray[np.int64]":
    """Return the step of each burst, request by request; -1 for a burst without a step."""
    import numpy as np  # noqa: PLC0415

    of_requests = [
        np.cumsum([(request.arrival_ms or 0.0) + request.ttft_ms, *request.gaps_ms])
        if request.arrival_ms is not None
        else np.full(len(request.chunk_tokens), np.inf)
        for request in requests
    ]
    bursts_ms = np.concatenate(of_requests)
    if not len(ends_ms):
        return np.full(len(bursts_ms), -1)
    after = np.searchsorted(ends_ms, bursts_ms - _APART_MS).clip(max=len(ends_ms) - 1)
    return np.where(np.abs(ends_ms[after] - bursts_ms) <= _APART_MS, after, -1)


def _to_share(
    requests: Sequence[RecordedRequest],
    found: Sequence[Drafting],
    steps: "Floats",
    places: "npt.NDArray[np.int64]",
    k: int,
) -> dict[int, list[_Member]]:
    """Return the bursts of each step whose drafts differ from the assumed K tokens for each request."""
    import numpy as np  # noqa: PLC0415

    further = np.concatenate([np.frombuffer(each.chunk_tokens, np.uint32) for each in requests]).astype(np.int64) - 1
    begins = np.concatenate(([0], np.cumsum([len(each.chunk_tokens) for each in requests])))
    is_later = further > 0
    is_later |= np.isin(np.arange(len(further)), begins, invert=True)
    counted, count = (places >= 0) & is_later, len(steps)
    later = np.bincount(places[counted], minlength=count)
    most = np.bincount(places[counted], weights=further[counted], minlength=count)
    _, drafts, tokens, accepted = steps.T
    is_other = (later > 0) & ~((drafts == later) & (tokens == k * drafts) & (accepted <= most))
    members: dict[int, list[_Member]] = {}
    shared = np.flatnonzero((places >= 0) & is_other[places]) if count else np.empty(0, np.int64)
    numbers = np.searchsorted(begins, shared, "right") - 1
    columns = (places[shared], numbers, shared - begins[numbers], further[shared], shared + 1 == begins[numbers + 1])
    for step, number, place, more, is_last in zip(*(each.tolist() for each in columns), strict=True):
        members.setdefault(step, []).append(_Member(found[number], place, more, is_last))
    return members


def _share_out(step: Sequence[int], members: list[_Member], k: int) -> None:
    """Divide a step's drafts among its bursts."""
    _, drafts, tokens, all_accepted = step
    later = [member for member in members if member.place or member.further]
    # Bursts without a draft in this step, such as a request's first tokens, are the smallest.
    later.sort(key=lambda member: -member.further)
    for member in later[drafts:]:
        member.drafting.drafted[member.place] = member.drafting.accepted[member.place] = 0
    drafters = later[:drafts]
    left = tokens if drafts <= len(later) else round(tokens * len(later) / drafts)
    for place, member in enumerate(drafters):
        even = -(-left // (len(drafters) - place))
        drafted = min(max(even, member.further), k)
        member.drafting.drafted[member.place] = drafted
        member.drafting.accepted[member.place] = min(member.further, drafted)
        left = max(0, left - drafted)
    if drafts > len(later):
        return
    # Tokens that were accepted and then cut at ``max_tokens`` belong to requests that ended in this step.
    cut = all_accepted - sum(member.further for member in drafters)
    for member in drafters:
        if member.is_last and cut > 0:
            accepted = member.drafting.accepted
            more = min(cut, member.drafting.drafted[member.place] - accepted[member.place])
            accepted[member.place] += more
            cut -= more
