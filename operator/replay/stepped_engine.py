"""Simulate vLLM's scheduler step by step: one batch, chunked prefill, KV cache blocks and preemption.

Scheduling follows vLLM's V1. Running requests go first and prompts take the rest of the token budget. Waiting requests
are admitted while blocks are free; if the cache is full, the last one admitted is preempted and recomputed. `Behaviour`
decides the duration of a step and the number of its tokens.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

from specdecode_operator.replay.emulated.engine_model import StepShape
from specdecode_operator.replay.engine import Burst, Clock, Incoming, Load, Sink, Submission
from specdecode_operator.replay.model_file import BLOCK_TOKENS, Limits


class Course(Protocol):
    """Progress of one request."""

    output_tokens: int  # at which it ends
    finish_reason: str

    def first(self) -> int:
        """Return the tokens at the end of its prefill, or of a recomputation."""

    def planned(self) -> int:
        """Return the drafted tokens that its next step is planned with; the actual number may differ."""

    def next(self, output_tokens: int) -> tuple[int, int]:
        """Return the drafted and the accepted tokens of its next step, which yields one more than accepted.

        It has ``output_tokens`` already.
        """


class Behaviour(Protocol):
    """Behaviour that differs between engines with the same scheduler."""

    num_speculative_tokens: int

    def lead_ms(self) -> float:
        """Return the time from the arrival of a request until the scheduler sees it."""

    def begin(self, request: Incoming) -> Course:
        """Return the course of a new request."""

    def step_ms(self, step: StepShape, decoding: int) -> float:
        """Return the duration of the next step, with this many decoding requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step of an engine, for recorders."""

    index: int
    end_ms: float
    duration_ms: float
    shape: StepShape
    decoding: int
    prefilling: int
    first_prompt_tokens: int  # prompts of the requests that got their first token
    load: Load  # after the step; tokens of the prefix cache in this step alone
    drafted: Sequence[int]  # tokens drafted for each request that had a draft
    accepted: Sequence[int]  # and accepted, in the same order
    scheduled: Sequence[str]  # ids of requests that ran for the first time
    preempted: Sequence[str]


OnStep = Callable[[StepReport], None]
"""Called with each step before its bursts are sent."""


MOST_KEPT: Final = 1_000_000
"""Unused blocks that a cache of unknown size keeps."""


class KvCache:
    """KV cache: counts of used and kept blocks, which are identified by the hashes of prompts."""

    def __init__(self, num_blocks: int | None, *, prefix_caching: bool) -> None:
        """Create an empty cache; without a number of blocks it never fills up, and its usage is 0."""
        self.num_blocks = num_blocks
        self._prefix_caching = prefix_caching
        self._users: dict[int, int] = {}  # requests that use the block of each hash
        self._kept: OrderedDict[int, None] = OrderedDict()  # hashes of unused blocks, least recently freed first
        self._anonymous = 0  # blocks in use without a hash: ends of prompts, outputs

    @property
    def usage(self) -> float:
        """The share of blocks in use."""
        return (self._anonymous + len(self._users)) / self.num_blocks if self.num_blocks else 0.0

    def found(self, hashes: Sequence[int]) -> int:
        """Return the number of cached blocks at the beginning of a prompt."""
        if not self._prefix_caching:
            return 0
        missing = (place for place, each in enumerate(hashes) if each not in self._users and each not in self._kept)
        return next(missing, len(hashes))

    def admit(self, hashes: Sequence[int], found: int, fresh: int) -> bool:
        """Take a request's found blocks and fresh ones; return False without taking any if there is no room."""
        used = hashes[:found]
        revived = sum(1 for each in used if each in self._kept)
        if not self._has_room(fresh + revived):
            return False
        for each in used:
            self._kept.pop(each, None)
            self._users[each] = self._users.get(each, 0) + 1
        return self.grow(fresh)

    def grow(self, blocks: int) -> bool:
        """Take fresh blocks; return False without taking any if there is no room."""
        if not self._has_room(blocks):
            return False
        self._anonymous += blocks
        self._evict()
        return True

    def name(self, hashes: Sequence[int], named: int) -> int:
        """Identify a request's blocks after the first ``named`` by their hashes; return how many are identified."""
        if not self._prefix_caching:
            return named
        for each in hashes[named:]:
            self._kept.pop(each, None)
            self._users[each] = self._users.get(each, 0) + 1
        self._anonymous -= max(0, len(hashes) - named)
        return max(named, len(hashes))

    def release(self, hashes: Sequence[int], anonymous: int) -> None:
        """Release blocks; those with a hash stay cached. The end of a prompt is evicted before its beginning."""
        self._anonymous -= anonymous
        for each in reversed(hashes):
            left = self._users[each] - 1
            if left:
                self._users[each] = left
            else:
                del self._users[each]
                self._kept[each] = None
        self._evict()

    def _has_room(self, blocks: int) -> bool:
        return self.num_blocks is None or self._anonymous + len(self._users) + blocks <= self.num_blocks

    def _evict(self) -> None:
        most = MOST_KEPT if self.num_blocks is None else self.num_blocks - self._anonymous - len(self._users)
        while len(self._kept) > most:
            self._kept.popitem(last=False)


# vLLM's defaults, for limits that a capture does not have.
MAX_NUM_SEQS: Final = 256
MAX_NUM_BATCHED_TOKENS: Final = 8192


@dataclass(slots=True, eq=False)
class _Request:
    engine: "SteppedEngine"
    incoming: Incoming
    sink: Sink
    course: Course
    length: int  # tokens of the prompt and of the output so far
    most_output: int
    computed: int = 0  # tokens in the KV cache
    blocks: int = 0
    named: int = 0  # of the blocks, those at the beginning that other requests may share
    output: int = 0
    cached: int = 0
    decoding: bool = False
    ready_step: int = 0
    submitted_ms: float = 0.0
    begun_ms: float | None = None
    over: bool = False

    @property
    def hashes(self) -> Sequence[int]:
        """Hashes of all known blocks, including the answer."""
        incoming = self.incoming
        return [*incoming.block_hashes, *incoming.answer_hashes] if incoming.answer_hashes else incoming.block_hashes

    def waited_ms(self) -> float | None:
        return None if self.begun_ms is None else self.begun_ms - self.submitted_ms

    def cancel(self) -> None:
        if not self.over:
            self.engine.forget(self)


class SteppedEngine:
    """Engine that sends each request its tokens at the end of a step."""

    def __init__(self, clock: Clock, behaviour: Behaviour, limits: Limits, on_step: OnStep | None = None) -> None:
        """Create an idle engine."""
        self._clock = clock
        self._behaviour = behaviour
        self._on_step = on_step
        self._max_num_seqs = limits.max_num_seqs or MAX_NUM_SEQS
        self._max_num_batched_tokens = limits.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS
        self._max_model_len = limits.max_model_len
        self._block_size = limits.block_size or BLOCK_TOKENS
        self._draft_slots = limits.draft_slots or 0
        self._steps_ahead = 2 if limits.async_scheduling else 1
        self._kv = KvCache(limits.num_gpu_blocks, prefix_caching=limits.enable_prefix_caching is not False)
        self._running: list[_Request] = []
        self._waiting: deque[_Request] = deque()
        self._batch: list[tuple[_Request, int]] = []
        self._busy = False
        self._step = 0
        self._end_ms = 0.0
        self._shape = StepShape(0, 0)
        self._decoding = 0
        self._duration_ms = 0.0
        self._preemptions = self._queries = self._hits = 0
        # Of the current step:
        self._scheduled: list[str] = []
        self._preempted: list[str] = []
        self._step_queries = self._step_hits = 0

    def submit(self, request: Incoming, sink: Sink) -> Submission:
        """Submit a request; its bursts go to the sink. A cancelled request frees its slot immediately."""
        course = self._behaviour.begin(request)
        most = min(request.max_tokens, course.output_tokens)
        if self._max_model_len is not None:
            most = min(most, self._max_model_len - request.prompt_tokens)
        now_ms = self._clock.now_ms()
        mine = _Request(self, request, sink, course, max(1, request.prompt_tokens), max(1, most), submitted_ms=now_ms)
        lead_ms = self._behaviour.lead_ms()
        if lead_ms > 0:
            self._clock.call_at(now_ms + lead_ms, partial(self._enqueue, mine))
        else:
            self._enqueue(mine)
        return mine

    def load(self) -> Load:
        """Return the current load."""
        return Load(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_cache_usage=self._kv.usage,
            preemptions=self._preemptions,
            prefix_cache_queries=self._queries,
            prefix_cache_hits=self._hits,
        )

    def forget(self, request: _Request) -> None:
        """Remove a request."""
        request.over = True
        if request in self._running:
            self._running.remove(request)
            self._release(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    def _enqueue(self, request: _Request) -> None:
        if request.over:
            return
        # An asynchronous scheduler has planned the next step already.
        request.ready_step = self._step + self._steps_ahead if self._busy else 0
        self._waiting.append(request)
        if not self._busy:
            self._begin(self._clock.now_ms())

    def _begin(self, start_ms: float) -> None:
        """Plan a step and wait for its end; return immediately without requests."""
        self._busy = True
        self._plan(start_ms)
        while not self._batch:
            if not self._waiting:
                self._busy = False
                return
            # Nothing runs: the waiting requests missed this step, or the first one is too large.
            first = self._waiting[0]
            if first.ready_step > self._step:
                for each in self._waiting:
                    each.ready_step = 0
            else:
                self._waiting.popleft()
                first.over = True
                first.sink(Burst(tokens=0, finish_reason="error"))
            self._plan(start_ms)
        self._measure()
        self._duration_ms = self._behaviour.step_ms(self._shape, self._decoding)
        self._end_ms = start_ms + self._duration_ms
        self._clock.call_at(self._end_ms, self._finish)

    def _plan(self, start_ms: float) -> None:
        self._step += 1
        self._batch, self._scheduled, self._preempted = [], [], []
        self._step_queries = self._step_hits = 0
        budget = self._schedule_running(self._max_num_batched_tokens)
        if not self._preempted:
            self._admit(budget, start_ms)

    def _schedule_running(self, budget: int) -> int:
        """Schedule the running requests; return the rest of the token budget."""
        running, batch = self._running, self._batch
        block_size, slots = self._block_size, self._draft_slots
        index = 0
        while index < len(running) and budget > slots:
            request = running[index]
            wanted = 1 + request.course.planned() if request.decoding else request.length - request.computed
            tokens = min(wanted, budget - slots)
            missing = -(-(request.computed + tokens) // block_size) - request.blocks
            if missing > 0:
                if not self._kv.grow(missing):
                    last = running.pop()
                    self._release(last)
                    last.computed, last.decoding, last.ready_step = 0, False, 0
                    self._preemptions += 1
                    self._preempted.append(last.incoming.request_id)
                    self._waiting.appendleft(last)
                    continue
                request.blocks += missing
            budget -= tokens + slots
            batch.append((request, tokens))
            index += 1
        return budget

    def _release(self, request: _Request) -> None:
        self._kv.release(request.hashes[: request.named], request.blocks - request.named)
        request.blocks = request.named = 0

    def _admit(self, budget: int, start_ms: float) -> None:
        """Admit waiting requests in order, while there is room and the step has tokens left."""
        block_size, slots, waiting, kv = self._block_size, self._draft_slots, self._waiting, self._kv
        while waiting and budget > slots and len(self._running) < self._max_num_seqs:
            request = waiting[0]
            hashes = request.incoming.block_hashes
            # The last token is always computed, as the next one follows from it.
            found = min(kv.found(hashes), (request.length - 1) // block_size)
            tokens = min(request.length - found * block_size, budget - slots)
            fresh = -(-(found * block_size + tokens) // block_size) - found
            if request.ready_step > self._step or not kv.admit(hashes, found, fresh):
                break
            waiting.popleft()
            request.computed, request.blocks, request.named = found * block_size, found + fresh, found
            self._running.append(request)
            self._batch.append((request, tokens))
            budget -= tokens + slots
            if request.begun_ms is None:
                request.begun_ms, request.cached = start_ms, request.computed
                self._scheduled.append(request.incoming.request_id)
                self._step_queries += request.length
                self._step_hits += request.cached
        self._queries += self._step_queries
        self._hits += self._step_hits

    def _measure(self) -> None:
        """Add up the content of the step."""
        decoding = scheduled = prefill = context = pairs = 0
        for request, tokens in self._batch:
            scheduled += tokens
            attended = request.computed + tokens
            context += attended
            if request.decoding:
                decoding += 1
            else:
                prefill += tokens
                pairs += tokens * attended
        drafts = self._behaviour.num_speculative_tokens
        self._shape = StepShape(len(self._batch), scheduled, prefill, context, pairs, drafts)
        self._decoding = decoding

    def _finish(self) -> None:
        """Send the tokens of the step, and start the next one."""
        bursts: list[tuple[_Request, Burst]] = []
        first_prompt_tokens = 0
        for request, tokens in self._batch:
            if request.over:
                continue
            if request.decoding:
                drafted, accepted = request.course.next(request.output)
                burst = self._burst(request, accepted + 1, drafted, accepted)
            else:
                request.computed += tokens
                if request.computed < request.length:
                    continue
                request.named = self._kv.name(request.incoming.block_hashes, request.named)
                first_prompt_tokens += 0 if request.output else request.incoming.prompt_tokens
                burst = self._burst(request, request.course.first())
            bursts.append((request, burst))
        if any(request.over for request, _ in bursts):
            self._running = [request for request in self._running if not request.over]
        if self._on_step is not None:
            self._on_step(self._report(bursts, first_prompt_tokens))
        for request, burst in bursts:
            if not request.over or burst.finish_reason is not None:
                request.sink(burst)
        self._begin(self._end_ms)

    def _burst(self, request: _Request, tokens: int, drafted: int = 0, accepted: int = 0) -> Burst:
        is_first = not request.output
        tokens = min(tokens, request.most_output - request.output)
        request.output += tokens
        request.length += tokens
        request.computed, request.decoding = request.length - 1, True
        reason = None
        if request.output >= request.most_output:
            reason = request.course.finish_reason if request.output >= request.course.output_tokens else "length"
            request.over = True
            if request.incoming.answer_hashes:
                # The next turn of the conversation finds the blocks of the answer.
                known = request.hashes[: request.computed // self._block_size]
                request.named = self._kv.name(known, request.named)
            self._release(request)
        return Burst(
            tokens=tokens,
            drafted=drafted,
            accepted=accepted if drafted else 0,
            cached_tokens=request.cached if is_first else 0,
            finish_reason=reason,
        )

    def _report(self, bursts: list[tuple[_Request, Burst]], first_prompt_tokens: int) -> StepReport:
        drafts = [burst for _, burst in bursts if burst.drafted]
        return StepReport(
            index=self._step,
            end_ms=self._end_ms,
            duration_ms=self._duration_ms,
            shape=self._shape,
            decoding=self._decoding,
            prefilling=len(self._batch) - self._decoding,
            first_prompt_tokens=first_prompt_tokens,
            load=replace(self.load(), prefix_cache_queries=self._step_queries, prefix_cache_hits=self._step_hits),
            drafted=[burst.drafted for burst in drafts],
            accepted=[burst.accepted for burst in drafts],
            scheduled=self._scheduled,
            preempted=self._preempted,
        )
