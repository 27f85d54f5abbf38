"""Replay records unchanged (`--mode steps`): recorded bursts at recorded gaps, each record once."""

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache, partial
from itertools import cycle
from typing import Final

from specdecode_operator.capture.trace_reader import RecordedRequest, Recording
from specdecode_operator.replay.drafting import Drafting, assumed_drafting
from specdecode_operator.replay.engine import (
    Burst,
    Clock,
    Incoming,
    Load,
    ReplayEngine,
    Sink,
    Submission,
    Ticket,
    UnmatchedRequestError,
)

_NUMBER: Final = re.compile(r"-(\d{1,9})$")

Match = Callable[[Incoming], int | None]
"""Takes the record of a request: returns its place in the order of arrival, None if no unused record matches it."""


class Matching(StrEnum):
    """How requests find their records."""

    ARRIVAL = "arrival"
    REQUEST_ID = "request-id"
    PREFIX = "prefix"


class Unmatched(StrEnum):
    """How to treat requests without a record."""

    REPEAT = "repeat"
    REFUSE = "refuse"
    MODELLED = "modelled"


def matcher(matching: Matching, requests: Sequence[RecordedRequest]) -> Match:
    """Return a matcher of that kind, with all records unused."""
    if matching is Matching.REQUEST_ID:
        return _by_id(requests)
    if matching is Matching.PREFIX:
        return _by_prefix(requests)
    places = iter(range(len(requests)))
    return lambda _request: next(places, None)


def _by_id(requests: Sequence[RecordedRequest]) -> Match:
    """Match by recorded id, or by the number at the end of the id: the place in the order of arrival."""
    unused = [True] * len(requests)
    named: dict[str, deque[int]] = {}
    for place, request in enumerate(requests):
        if request.request_id is not None:
            named.setdefault(request.request_id, deque()).append(place)

    def take(request: Incoming) -> int | None:
        # The records of several answers to one request share an id.
        if request.request_id in named:
            return _first_unused(named[request.request_id], unused)
        number = _NUMBER.search(request.request_id)
        return _first_unused(deque([int(number[1])]), unused) if number and int(number[1]) < len(unused) else None

    return take


def _by_prefix(requests: Sequence[RecordedRequest]) -> Match:
    """Match by the longest common prefix: the hash of a block covers the prompt up to the end of the block."""
    unused = [True] * len(requests)
    by_block: dict[int, deque[int]] = {}
    for place, request in enumerate(requests):
        for block in request.block_hashes or ():
            by_block.setdefault(block, deque()).append(place)

    def take(request: Incoming) -> int | None:
        found = (_first_unused(by_block.get(block, deque()), unused) for block in reversed(request.block_hashes))
        return next((place for place in found if place is not None), None)

    return take


def _first_unused(places: deque[int], unused: list[bool]) -> int | None:
    """Use the first unused record of these, and drop the used ones before it."""
    while places:
        place = places.popleft()
        if unused[place]:
            unused[place] = False
            return place
    return None


def repeating(match: Match, requests: Sequence[RecordedRequest]) -> Match:
    """Return a matcher that cycles through the records by arrival if the other one has no records left."""
    places = cycle(range(len(requests)))

    def take(request: Incoming) -> int:
        place = match(request)
        return next(places) if place is None else place

    return take


@lru_cache(65536)
def _plain_burst(tokens: int, drafted: int, accepted: int) -> Burst:
    """Return a burst in the middle of an answer; few of them differ."""
    return Burst(tokens=tokens, drafted=drafted, accepted=accepted)


@dataclass(frozen=True, kw_only=True)
class StepsSettings:
    """How to play records."""

    kv_cache_tokens: int | None = None  # size of the KV cache; None for that of the largest batch
    accepted: Callable[[float], int] | None = None  # draws the accepted tokens of a step by its time in ms
    otherwise: ReplayEngine | None = None  # serves requests without a record; None rejects them


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
        # Updated by the requests in play.
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
            raise UnmatchedRequestError("no unused record matches it")
        record = self._requests[place]
        drafting = self._drafting[place] if self._drafting is not None else assumed_drafting(record, self.k)
        return _Playing(self, record, drafting, request, sink)

    def load(self) -> Load:
        """Return the current load."""
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
    """Return the tokens of the largest batch if all its requests are as long as the longest."""
    longest = max(each.prompt_tokens + each.output_tokens for each in recording.requests)
    return longest * (recording.meta.max_num_seqs or max(each.concurrency for each in recording.requests) or 1)


@dataclass(slots=True, eq=False)
class _Playing:
    """A record in play, and the ticket of its request."""

    engine: StepsEngine
    record: RecordedRequest
    drafting: Drafting
    request: Incoming
    sink: Sink
    place: int = 0  # of the next burst
    given: int = 0  # tokens so far
    running: bool | None = False  # None once it is over
    waited: float | None = None
    most: int = field(init=False)  # tokens of the answer
    cached_tokens: int = field(init=False)
    step: Callable[[], None] = field(init=False)
    when_ms: float = field(init=False)
    timer: Ticket = field(init=False)

    def __post_init__(self) -> None:
        engine, record = self.engine, self.record
        self.most = min(self.request.max_tokens, record.output_tokens)
        # As in any engine, the last token is always computed.
        self.cached_tokens = min(record.cached_tokens, max(0, self.request.prompt_tokens - 1))
        self.step = self._next_burst  # bound once instead of at every step
        engine.waiting += 1
        now_ms, queued_ms = engine.clock.now_ms(), 0.0
        if record.scheduled_ms is not None and record.arrival_ms is not None:
            queued_ms = min(max(record.scheduled_ms - record.arrival_ms, 0.0), record.ttft_ms)
        self.when_ms = now_ms + record.ttft_ms
        self.timer = engine.clock.call_at(now_ms + queued_ms, partial(self._begin, queued_ms))

    def cancel(self) -> None:
        self.timer.cancel()
        self._end()

    def waited_ms(self) -> float | None:
        return self.waited

    def _begin(self, waited_ms: float) -> None:
        engine, record = self.engine, self.record
        self.running, self.waited = True, waited_ms
        engine.waiting -= 1
        engine.running += 1
        engine.held_tokens += record.prompt_tokens
        engine.preemptions += record.preemptions
        engine.prefix_cache_queries += self.request.prompt_tokens
        engine.prefix_cache_hits += self.cached_tokens
        self.timer = engine.clock.call_at(self.when_ms, self.step)

    def _end(self) -> None:
        if self.running:
            self.engine.running -= 1
            self.engine.held_tokens -= self.record.prompt_tokens + self.given
        elif self.running is False:
            self.engine.waiting -= 1
        self.running = None

    def _next_burst(self) -> None:
        """Send the burst that is due, and set the timer for the one after it."""
        place, record, begin, draws = self.place, self.record, self.given, self.engine.settings.accepted
        if draws is None or place == 0:
            tokens = record.chunk_tokens[place]
            drafted, accepted = self.drafting.drafted[place], self.drafting.accepted[place]
        else:
            drafted, accepted = self.engine.k, draws(self.when_ms)
            tokens = 1 + accepted
        if begin + tokens >= self.most:
            self.engine.held_tokens += self.most - begin
            self.given = self.most
            self._end()
            self.sink(self._burst(begin, self.most, drafted, accepted))
            return
        self.given = begin + tokens
        self.engine.held_tokens += tokens
        gaps_ms = record.gaps_ms
        # Another acceptance may take more steps than were recorded: then their gaps start over.
        self.when_ms += gaps_ms[place] if draws is None else gaps_ms[place % len(gaps_ms)]
        self.place = place + 1
        self.timer = self.engine.clock.call_at(self.when_ms, self.step)
        if begin and record.token_ids is None:
            self.sink(_plain_burst(tokens, drafted, accepted))
        else:
            self.sink(self._burst(begin, begin + tokens, drafted, accepted))

    def _burst(self, begin: int, end: int, drafted: int, accepted: int) -> Burst:
        """Return the first or the last burst, or one with token ids."""
        record, finish_reason = self.record, None
        if end == self.most:
            finish_reason = "length" if end < record.output_tokens else record.finish_reason or "length"
        return Burst(
            tokens=end - begin,
            drafted=drafted,
            accepted=accepted,
            token_ids=record.token_ids[begin:end] if record.token_ids is not None else (),
            cached_tokens=0 if begin else self.cached_tokens,
            finish_reason=finish_reason,
        )
