"""Replay records as they are (`--mode steps`): recorded bursts at recorded gaps, each record once."""

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import cycle
from typing import Final

from specdecode_operator.capture.trace_reader import RecordedRequest, Recording
from specdecode_operator.replay.drafting import AcceptanceDraws, Drafting, assumed_drafting
from specdecode_operator.replay.engine import (
    Burst,
    Clock,
    Incoming,
    Load,
    ServedEngine,
    Sink,
    Submission,
    UnmatchedRequestError,
)

_NUMBER: Final = re.compile(r"-(\d{1,9})$")

Match = Callable[[Incoming], int | None]
"""Takes the record of a request: its place in the order of arrival, None where none is left for it."""


class Matching(StrEnum):
    """How requests find their records."""

    ARRIVAL = "arrival"
    REQUEST_ID = "request-id"
    PREFIX = "prefix"


class Unmatched(StrEnum):
    """What comes of requests that no record is left for."""

    REPEAT = "repeat"
    REFUSE = "refuse"
    MODELLED = "modelled"


def matcher(matching: Matching, requests: Sequence[RecordedRequest]) -> Match:
    """Return a matcher of that kind, with all records unused."""
    if matching is Matching.REQUEST_ID:
        return _ById(requests).take
    if matching is Matching.PREFIX:
        return _ByPrefix(requests).take
    places = iter(range(len(requests)))
    return lambda _request: next(places, None)


def repeating(match: Match, requests: Sequence[RecordedRequest]) -> Match:
    """Return a matcher that goes through the records by arrival, again and again, for what the other has none for."""
    places = cycle(range(len(requests)))

    def take(request: Incoming) -> int:
        place = match(request)
        return next(places) if place is None else place

    return take


class _ById:
    """By the id that the record has; else by the number at its end, which is the place in the order of arrival."""

    def __init__(self, requests: Sequence[RecordedRequest]) -> None:
        self._unused = [True] * len(requests)
        self._by_id: dict[str, deque[int]] = {}
        for place, request in enumerate(requests):
            if request.request_id is not None:
                self._by_id.setdefault(request.request_id, deque()).append(place)

    def take(self, request: Incoming) -> int | None:
        # Several answers to one request have records of one id.
        named = self._by_id.get(request.request_id)
        if named is not None:
            return _first_unused(named, self._unused)
        number = _NUMBER.search(request.request_id)
        place = int(number[1]) if number else len(self._unused)
        return _first_unused(deque([place]), self._unused) if place < len(self._unused) else None


class _ByPrefix:
    """By the deepest block that prompt and record have in common; of several records by arrival."""

    def __init__(self, requests: Sequence[RecordedRequest]) -> None:
        self._unused = [True] * len(requests)
        self._by_block: dict[int, deque[int]] = {}
        for place, request in enumerate(requests):
            for block in request.block_hashes or ():
                self._by_block.setdefault(block, deque()).append(place)

    def take(self, request: Incoming) -> int | None:
        # A block's hash is that of the whole prompt up to its end.
        for block in reversed(request.block_hashes):
            place = _first_unused(self._by_block.get(block, deque()), self._unused)
            if place is not None:
                return place
        return None


def _first_unused(places: deque[int], unused: list[bool]) -> int | None:
    """Use the first of some records that is left; what was used is forgotten."""
    while places:
        place = places.popleft()
        if unused[place]:
            unused[place] = False
            return place
    return None


_PLAIN_BURSTS: Final = 65536


@lru_cache(_PLAIN_BURSTS)
def _plain_burst(tokens: int, drafted: int, accepted: int) -> Burst:
    """Return a burst in the middle of an answer: there are few different ones, and millions of them."""
    return Burst(tokens=tokens, drafted=drafted, accepted=accepted)


@dataclass(frozen=True, kw_only=True)
class StepsSettings:
    """How records are played."""

    kv_cache_tokens: int | None = None  # that fit into the KV cache; None: what the largest batch takes
    acceptance: AcceptanceDraws | None = None  # in place of what was recorded
    otherwise: ServedEngine | None = None  # serves what no record is left for; None: that is refused


class StepsEngine:
    """The engine of ``--mode steps``."""

    def __init__(
        self,
        recording: Recording,
        clock: Clock,
        match: Match,
        settings: StepsSettings,
        drafting: Sequence[Drafting] | None = None,
    ) -> None:
        self.clock = clock
        self.settings = settings
        self.k = recording.num_speculative_tokens
        # What is there to do, and was done: told by the requests while they are played.
        self.running = 0
        self.waiting = 0
        self.held_tokens = 0
        self.preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._match = match
        self._requests = recording.requests
        self._drafting = drafting
        self._kv_cache_tokens = settings.kv_cache_tokens or largest_batch_tokens(recording)

    def submit(self, request: Incoming, sink: Sink) -> Submission:
        """Take a request; its bursts go to the sink."""
        place = self._match(request)
        if place is None:
            if self.settings.otherwise is not None:
                return self.settings.otherwise.submit(request, sink)
            raise UnmatchedRequestError("no record is left for it")
        record = self._requests[place]
        drafting = self._drafting[place] if self._drafting is not None else assumed_drafting(record, self.k)
        return _Playing(self, record, drafting, request, sink)

    def load(self) -> Load:
        """Return what there is to do."""
        of_others = self.settings.otherwise.load() if self.settings.otherwise is not None else Load()
        return Load(
            running=self.running + of_others.running,
            waiting=self.waiting + of_others.waiting,
            kv_cache_usage=min(1.0, self.held_tokens / self._kv_cache_tokens + of_others.kv_cache_usage),
            preemptions=self.preemptions + of_others.preemptions,
            prefix_cache_queries=self.prefix_cache_queries + of_others.prefix_cache_queries,
            prefix_cache_hits=self.prefix_cache_hits + of_others.prefix_cache_hits,
        )


def largest_batch_tokens(recording: Recording) -> int:
    """Return the tokens of the largest batch, all of its requests as long as the longest: what a cache must hold."""
    longest = max(each.prompt_tokens + each.output_tokens for each in recording.requests)
    return longest * (recording.meta.max_num_seqs or max(each.concurrency for each in recording.requests) or 1)


class _Playing:
    """A record that is being played, and the ticket of its request."""

    __slots__ = (
        "_cached_tokens",
        "_call_at",
        "_drafting",
        "_draws",
        "_engine",
        "_given",
        "_most",
        "_place",
        "_prompt_tokens",
        "_record",
        "_running",
        "_sink",
        "_step",
        "_timer",
        "_waited_ms",
        "_when_ms",
    )

    def __init__(
        self, engine: StepsEngine, record: RecordedRequest, drafting: Drafting, request: Incoming, sink: Sink
    ) -> None:
        self._engine = engine
        self._record = record
        self._drafting = drafting
        self._sink = sink
        self._draws = engine.settings.acceptance
        self._place = 0  # of the next burst
        self._given = 0  # tokens, so far
        self._most = min(request.max_tokens, record.output_tokens)
        self._prompt_tokens = request.prompt_tokens
        # As in any engine, the last token is computed in any case.
        self._cached_tokens = min(record.cached_tokens, max(0, request.prompt_tokens - 1))
        # Made once, not at every step.
        self._step = self._next_burst
        self._call_at = engine.clock.call_at
        self._running: bool | None = False  # None: it is over
        engine.waiting += 1
        now_ms = engine.clock.now_ms()
        self._when_ms = now_ms + record.ttft_ms
        self._waited_ms: float | None = None
        self._timer = engine.clock.call_at(now_ms + _queued_ms(record), self._begin)

    def cancel(self) -> None:
        """End it, as of now."""
        self._timer.cancel()
        self._end()

    def waited_ms(self) -> float | None:
        """Return how long it waited until it first ran."""
        return self._waited_ms

    def _begin(self) -> None:
        engine, record = self._engine, self._record
        self._running = True
        self._waited_ms = _queued_ms(record)
        engine.waiting -= 1
        engine.running += 1
        engine.held_tokens += record.prompt_tokens
        engine.preemptions += record.preemptions
        engine.prefix_cache_queries += self._prompt_tokens
        engine.prefix_cache_hits += self._cached_tokens
        self._timer = engine.clock.call_at(self._when_ms, self._step)

    def _end(self) -> None:
        engine = self._engine
        if self._running:
            engine.running -= 1
            engine.held_tokens -= self._record.prompt_tokens + self._given
        elif self._running is False:
            engine.waiting -= 1
        self._running = None

    def _next_burst(self) -> None:
        """Give the burst that is due, and set the timer for the one after it."""
        place, record, begin = self._place, self._record, self._given
        draws = self._draws
        if draws is None or place == 0:
            tokens = record.chunk_tokens[place]
            drafted, accepted = self._drafting.drafted[place], self._drafting.accepted[place]
        else:
            drafted, accepted = self._engine.k, draws.accepted(self._when_ms)
            tokens = 1 + accepted
        if begin + tokens >= self._most:
            self._engine.held_tokens += self._most - begin
            self._given = self._most
            self._end()
            self._sink(self._burst(begin, self._most, drafted, accepted))
            return
        self._given = begin + tokens
        self._engine.held_tokens += tokens
        gaps_ms = record.gaps_ms
        # Another acceptance may take more steps than were recorded: then their gaps begin again.
        self._when_ms += gaps_ms[place] if draws is None else gaps_ms[place % len(gaps_ms)]
        self._place = place + 1
        self._timer = self._call_at(self._when_ms, self._step)
        if begin and record.token_ids is None:
            self._sink(_plain_burst(tokens, drafted, accepted))
        else:
            self._sink(self._burst(begin, begin + tokens, drafted, accepted))

    def _burst(self, begin: int, end: int, drafted: int, accepted: int) -> Burst:
        """Return a burst that is the first or the last, or has token ids."""
        record, finish_reason = self._record, None
        if end == self._most:
            cut = end < record.output_tokens
            finish_reason = "length" if cut else record.finish_reason or "length"
        return Burst(
            tokens=end - begin,
            drafted=drafted,
            accepted=accepted,
            token_ids=record.token_ids[begin:end] if record.token_ids is not None else (),
            cached_tokens=0 if begin else self._cached_tokens,
            finish_reason=finish_reason,
        )


def _queued_ms(record: RecordedRequest) -> float:
    """Return how long it waited until the engine first scheduled it, where that was recorded."""
    if record.scheduled_ms is None or record.arrival_ms is None:
        return 0.0
    return min(max(record.scheduled_ms - record.arrival_ms, 0.0), record.ttft_ms)
