"""An engine that goes step by step, as vLLM does: one batch for all, so that what slows one request slows every one.

Scheduling is vLLM's V1 in short: what runs goes first, prompts take what is left of the step's tokens (chunked), what
waits is admitted while there is room for it, and who came last is preempted and computed again where the KV cache is
full. How long a step takes and what it brings is the `Behaviour`'s.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from specdecode_operator.replay.emulated.step_time import StepShape
from specdecode_operator.replay.engines.behaviour import Behaviour, Course, OnStep, StepReport
from specdecode_operator.replay.engines.engine import Burst, Clock, Incoming, Load, Sink, Ticket
from specdecode_operator.replay.engines.kv_cache import KvCache
from specdecode_operator.replay.fitted.model import Limits

# vLLM's defaults, for what a capture does not say.
MAX_NUM_SEQS: Final = 256
MAX_NUM_BATCHED_TOKENS: Final = 8192
BLOCK_SIZE: Final = 16


@dataclass(slots=True, eq=False)
class _Request:
    incoming: Incoming
    sink: Sink
    course: Course
    length: int  # tokens of the prompt and of the output so far
    most_output: int
    computed: int = 0  # tokens whose KV is there
    blocks: int = 0
    named: int = 0  # of the blocks, those at the beginning that others may find
    output: int = 0
    cached: int = 0
    decoding: bool = False
    ready_step: int = 0
    begun: bool = False
    over: bool = False
    engine: "SteppedEngine | None" = None

    @property
    def hashes(self) -> Sequence[int]:
        """Of all blocks that are known, those of the answer, too."""
        incoming = self.incoming
        return [*incoming.block_hashes, *incoming.answer_hashes] if incoming.answer_hashes else incoming.block_hashes

    def cancel(self) -> None:
        if self.engine is not None and not self.over:
            self.engine.forget(self)


@dataclass(slots=True)
class _Tally:
    """What a step adds up for those who record it."""

    scheduled: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    queries: int = 0
    hits: int = 0


class SteppedEngine:
    """Takes requests, and gives them their tokens at the end of each step."""

    def __init__(self, clock: Clock, behaviour: Behaviour, limits: Limits, on_step: OnStep | None = None) -> None:
        """Begin without anything to do."""
        self._clock = clock
        self._behaviour = behaviour
        self._on_step = on_step
        self._max_num_seqs = limits.max_num_seqs or MAX_NUM_SEQS
        self._max_num_batched_tokens = limits.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS
        self._max_model_len = limits.max_model_len
        self._block_size = limits.block_size or BLOCK_SIZE
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
        self._tally = _Tally()

    def submit(self, request: Incoming, sink: Sink) -> Ticket:
        """Take a request; its bursts go to the sink. Cancelled, it frees its place at once."""
        course = self._behaviour.begin(request)
        most = min(request.max_tokens, course.output_tokens)
        if self._max_model_len is not None:
            most = min(most, self._max_model_len - request.prompt_tokens)
        mine = _Request(request, sink, course, max(1, request.prompt_tokens), max(1, most), engine=self)
        lead_ms = self._behaviour.lead_ms()
        if lead_ms > 0:
            self._clock.call_at(self._clock.now_ms() + lead_ms, partial(self._enqueue, mine))
        else:
            self._enqueue(mine)
        return mine

    def load(self) -> Load:
        """Return what it has to do."""
        return Load(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_cache_usage=self._kv.usage,
            preemptions=self._preemptions,
            prefix_cache_queries=self._queries,
            prefix_cache_hits=self._hits,
        )

    def forget(self, request: _Request) -> None:
        """Have nothing more to do with a request."""
        request.over = True
        if request in self._running:
            self._running.remove(request)
            self._release(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    def _enqueue(self, request: _Request) -> None:
        if request.over:
            return
        # A scheduler that is a step ahead has planned the next one already.
        request.ready_step = self._step + self._steps_ahead if self._busy else 0
        self._waiting.append(request)
        if not self._busy:
            self._begin(self._clock.now_ms())

    def _begin(self, start_ms: float) -> None:
        """Plan a step, and wait for its end; nothing where there is nothing to do."""
        self._busy = True
        self._plan()
        while not self._batch:
            if not self._waiting:
                self._busy = False
                return
            self._unblock()
            self._plan()
        self._measure()
        self._duration_ms = self._behaviour.step_ms(self._shape, self._decoding)
        self._end_ms = start_ms + self._duration_ms
        self._clock.call_at(self._end_ms, self._finish)

    def _plan(self) -> None:
        self._step += 1
        self._batch, self._tally = [], _Tally()
        budget = self._schedule_running(self._max_num_batched_tokens)
        if not self._tally.preempted:
            self._admit(budget)

    def _unblock(self) -> None:
        """Do something about who waits while nothing runs: it came too late for this step, or is too large."""
        first = self._waiting[0]
        if first.ready_step > self._step:
            for each in self._waiting:
                each.ready_step = 0
        else:
            self._waiting.popleft()
            first.over = True
            first.sink(Burst(tokens=0, finish_reason="error"))

    def _schedule_running(self, budget: int) -> int:
        """Give what runs its tokens of the step; return how many are left."""
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
                    self._preempt(running.pop())
                    continue
                request.blocks += missing
            budget -= tokens + slots
            batch.append((request, tokens))
            index += 1
        return budget

    def _preempt(self, request: _Request) -> None:
        self._release(request)
        request.computed, request.decoding, request.ready_step = 0, False, 0
        self._preemptions += 1
        self._tally.preempted.append(request.incoming.request_id)
        self._waiting.appendleft(request)

    def _release(self, request: _Request) -> None:
        self._kv.release(request.hashes[: request.named], request.blocks - request.named)
        request.blocks = request.named = 0

    def _admit(self, budget: int) -> None:
        """Let in who waits, in order, while there is room and the step has tokens left."""
        block_size, slots, waiting, kv = self._block_size, self._draft_slots, self._waiting, self._kv
        while waiting and budget > slots and len(self._running) < self._max_num_seqs:
            request = waiting[0]
            hashes = request.incoming.block_hashes
            # The last token is computed in any case: its successor is asked for.
            found = min(kv.found(hashes), (request.length - 1) // block_size)
            tokens = min(request.length - found * block_size, budget - slots)
            fresh = -(-(found * block_size + tokens) // block_size) - found
            if request.ready_step > self._step or not kv.admit(hashes, found, fresh):
                return
            waiting.popleft()
            request.computed, request.blocks, request.named = found * block_size, found + fresh, found
            self._running.append(request)
            self._batch.append((request, tokens))
            budget -= tokens + slots
            if not request.begun:
                self._count_begun(request)

    def _count_begun(self, request: _Request) -> None:
        request.begun, request.cached = True, request.computed
        self._tally.scheduled.append(request.incoming.request_id)
        self._tally.queries += request.length
        self._tally.hits += request.cached
        self._queries += request.length
        self._hits += request.cached

    def _measure(self) -> None:
        """Add up what is in the step."""
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
        """Give everybody what the step brought, and begin the next."""
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
            self._keep_answer(request)
            self._release(request)
        return Burst(
            tokens=tokens,
            drafted=drafted,
            accepted=accepted if drafted else 0,
            cached_tokens=request.cached if is_first else 0,
            finish_reason=reason,
        )

    def _keep_answer(self, request: _Request) -> None:
        """Have the blocks of an answer found by the next turn of its conversation."""
        if request.incoming.answer_hashes:
            hashes = request.hashes
            request.named = self._kv.name(hashes[: request.computed // self._block_size], request.named)

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
            running=len(self._running),
            waiting=len(self._waiting),
            kv_cache_usage=self._kv.usage,
            prefix_cache_queries=self._tally.queries,
            prefix_cache_hits=self._tally.hits,
            drafted=[burst.drafted for burst in drafts],
            accepted=[burst.accepted for burst in drafts],
            scheduled=self._tally.scheduled,
            preempted=self._tally.preempted,
        )
