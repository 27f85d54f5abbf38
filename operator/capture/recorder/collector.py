"""Follow the requests of an API server through its messages, and queue samples for the writer.

This code runs on the engine's event loop, or in the thread that closes. It only appends to lists and never waits. It
reads plain attributes of vLLM's objects and does not import vllm.
"""

import threading
from array import array
from collections import deque
from collections.abc import Iterable
from typing import Any

# Upper bound for SchedulerStats of vLLM 0.32 with speculation and step details: a little over 1.4 KiB.
_STEP_BYTES = 2048
_REQUEST_BYTES = 1024
_CHUNK_BYTES = 16  # two references; all requests of a batch share a Moment
_TOKEN_ID_BYTES = 36


class StepSample:
    """An engine step that carried scheduler statistics."""

    __slots__ = ("engine", "monotonic_s", "scheduler_stats")
    size_bytes = _STEP_BYTES

    def __init__(self, engine: int, monotonic_s: float, scheduler_stats: Any) -> None:
        self.engine = engine
        self.monotonic_s = monotonic_s
        self.scheduler_stats = scheduler_stats


class Moment:
    """Common part of all chunks of one engine message."""

    __slots__ = ("monotonic_s", "num_running", "prefill_tokens")

    def __init__(self, monotonic_s: float, num_running: int) -> None:
        self.monotonic_s = monotonic_s  # when the engine made the message, on its clock
        # Requests that run after the step; at least 1, as the last one may just have ended.
        self.num_running = num_running if num_running > 0 else 1
        self.prefill_tokens = 0  # prompt tokens of the requests whose first token is in the message


class RequestSample:
    """A request of this API server, from its admission on."""

    def __init__(self, request: Any, arrival_monotonic_s: float, *, token_ids: bool) -> None:
        """Read an EngineCoreRequest."""
        parameters = request.sampling_params
        self.id: str = request.request_id
        self.external_id: str | None = request.external_req_id
        self.arrival_monotonic_s = arrival_monotonic_s
        self.arrival_wall_s: float = request.arrival_time
        self.concurrency = 1  # requests in flight at its arrival, itself included
        # 8 bytes a token instead of 40, until it is hashed; 0.14 ms for 8,000 of them.
        self.prompt_token_ids = array("q", request.prompt_token_ids or ())
        self.prompt_tokens = _prompt_tokens(request)
        self.prefill_tokens = tokens_to_prefill(request)
        self.temperature: float | None = getattr(parameters, "temperature", None)
        stop = getattr(parameters, "stop", None) or []
        self.stop_strings: list[str] = [stop] if isinstance(stop, str) else list(stop)
        self.engine: int | None = None
        self.queued_s: float | None = None
        self.scheduled_s: float | None = None
        self.preemptions = 0
        self.cached_tokens: int | None = None
        # One entry a chunk
        self.moments: list[Moment] = []
        self.counts: list[int] = []
        self.token_ids: list[int] | None = [] if token_ids else None  # generated tokens
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.ended_by = "unfinished"
        self.kept_tokens: int | None = None

    @property
    def size_bytes(self) -> int:
        """Approximate memory of a request with all its chunks."""
        ids = len(self.token_ids) if self.token_ids is not None else 0
        chunks_bytes = _CHUNK_BYTES * len(self.counts)
        prompt_bytes = self.prompt_token_ids.itemsize * len(self.prompt_token_ids)
        return _REQUEST_BYTES + prompt_bytes + chunks_bytes + _TOKEN_ID_BYTES * ids


def _prompt_tokens(request: Any) -> int:
    # The prompt may have been given as embeddings.
    prompt = request.prompt_token_ids if request.prompt_token_ids is not None else request.prompt_embeds
    return len(prompt) if prompt is not None else 0


def tokens_to_prefill(request: Any) -> int:
    """Return the prompt length of an EngineCoreRequest, or 0 if another engine processed the prompt."""
    # An engine that only prefills may have done so (vllm-vcr leaves those out too).
    transfer = (getattr(request.sampling_params, "extra_args", None) or {}).get("kv_transfer_params")
    # Clients may send anything under this name (vllm_xargs).
    is_remote = isinstance(transfer, dict) and transfer.get("do_remote_prefill")
    return 0 if is_remote else _prompt_tokens(request)


Sample = RequestSample | StepSample

CAPACITY_BYTES = 256 * 2**20  # minutes of steps on a hanging disk, or all requests of a large batch that end at once


class BoundedQueue:
    """A queue that drops and counts items beyond its capacity.

    The capacity is in bytes, because a request with a long prompt takes as much as hundreds of steps. The writer polls
    it several times a second: waking it for every item would cost the event loop more than everything else.
    """

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self.dropped = 0
        self._capacity_bytes = capacity_bytes
        self._items: deque[Sample] = deque()
        # One counter for each thread, because a shared one would need a lock.
        self._put_bytes = 0
        self._got_bytes = 0

    def put(self, item: Sample) -> None:
        """Append an item, or count it as dropped."""
        size_bytes = item.size_bytes
        if self._put_bytes + size_bytes - self._got_bytes <= self._capacity_bytes:
            self._put_bytes += size_bytes
            self._items.append(item)
        else:
            self.dropped += 1

    def get(self) -> Sample | None:
        """Return the oldest item, or None."""
        try:
            item = self._items.popleft()
        except IndexError:
            return None
        self._got_bytes += item.size_bytes
        return item

    def __len__(self) -> int:
        return len(self._items)


_QUEUED, _SCHEDULED, _PREEMPTED = 1, 2, 3  # vllm/v1/engine/__init__.py EngineCoreEventType
TOO_MANY_ERRORS = 16  # limit of errors, after which a recording has too many gaps to be useful


class Collector:
    """Samples of the requests in flight."""

    def __init__(self, queue: BoundedQueue, *, token_ids: bool, steps: bool) -> None:
        self.errors = 0
        self.first_error: str | None = None
        self._queue = queue
        self._keeps_token_ids = token_ids
        self._keeps_steps = steps
        self._is_open = True
        self._live: dict[str, RequestSample] = {}
        # Requests in flight that are not recorded (live captures only), and their prompt tokens until the first chunk
        self._others: dict[str, int] = {}
        self._finishing: list[tuple[RequestSample, Any]] = []
        # Held by every hook while it runs, and by the writer once, to close. Uncontended it costs 0.1 us.
        self._lock = threading.Lock()

    @property
    def is_broken(self) -> bool:
        """Whether the limit of errors is reached and recording has ended."""
        return self.errors >= TOO_MANY_ERRORS

    def fail(self, error: Exception) -> None:
        """Count an error of a hook."""
        self.errors += 1
        if self.first_error is None:
            self.first_error = self._described(error)
        if self.is_broken:
            self._is_open = False

    def _described(self, error: Exception) -> str:
        return f"{type(error).__name__}: {error}"

    def admit(self, request: Any, arrival_monotonic_s: float) -> None:
        """Start to follow a request; a followed one with more input (a streamed prompt) stays the same request."""
        with self._lock:
            if self._is_open and request.request_id not in self._live:
                self._follow(request, arrival_monotonic_s)

    def _follow(self, request: Any, arrival_monotonic_s: float) -> None:
        sample = RequestSample(request, arrival_monotonic_s, token_ids=self._keeps_token_ids)
        self._live[request.request_id] = sample
        sample.concurrency = self._in_flight

    @property
    def _in_flight(self) -> int:
        return len(self._live) + len(self._others)

    def before_outputs(self, processor: Any, outputs: Iterable[Any]) -> None:
        """Count outputs that vLLM is about to process. Only live captures do."""

    def after_outputs(self, processor: Any, outputs: Iterable[Any]) -> None:
        """Count outputs that vLLM has processed. Only live captures do."""

    def take(self, message: Any) -> None:
        """Record the chunks of one message of an engine, before vLLM trims them after a stop string."""
        with self._lock:
            if not self._is_open:
                return
            stats = message.scheduler_stats
            if stats is not None and self._keeps_steps:
                self._queue.put(StepSample(message.engine_index, message.timestamp, stats))
            if message.outputs:
                # Only one API server gets the statistics of a step; the others count their own requests.
                running = self._in_flight if stats is None else stats.num_running_reqs
                self._take_outputs(message, Moment(message.timestamp, running))

    def _take_outputs(self, message: Any, moment: Moment) -> None:
        find = self._live.get
        for output in message.outputs:
            sample = find(output.request_id)
            tokens = output.new_token_ids
            if sample is None:
                # Not recorded, or aborted, which the engine did not know yet
                if tokens and self._others.get(output.request_id):
                    moment.prefill_tokens += self._others[output.request_id]
                    self._others[output.request_id] = 0
                continue
            if tokens:
                if not sample.counts:
                    sample.engine = message.engine_index
                    moment.prefill_tokens += sample.prefill_tokens
                sample.moments.append(moment)
                sample.counts.append(len(tokens))
                if sample.token_ids is not None:
                    sample.token_ids.extend(tokens)
            if output.events:
                _note_events(sample, output.events)
            if output.prefill_stats is not None and sample.cached_tokens is None:
                sample.cached_tokens = output.prefill_stats.num_cached_tokens
            if output.finish_reason is not None:
                self._finishing.append((sample, output))

    def stop(self, request_ids: Iterable[str], outputs: Iterable[Any]) -> None:
        """Record requests that ended by a stop string, which the engine does not see."""
        # Called after vLLM processed the outputs. By then 0.32 has trimmed them after the string
        # (OutputProcessor._trim_surplus_tokens); older versions do not.
        with self._lock:
            stopped = set(request_ids)
            for output in outputs:
                sample = self._live.pop(output.request_id, None) if output.request_id in stopped else None
                if sample is not None:
                    _end_by_stop_string(sample, len(output.new_token_ids))
                    self._put(sample)

    def settle(self) -> None:
        """Queue the requests that the engine finished in the last message, after vLLM has processed it."""
        if not self._finishing:
            return
        with self._lock:
            self._settle()

    def _settle(self) -> None:
        finishing, self._finishing = self._finishing, []
        for sample, output in finishing:
            if self._live.pop(sample.id, None) is None:
                continue  # ended in another way in between
            kept = len(output.new_token_ids)
            if sample.counts and 0 < kept < sample.counts[-1]:
                # The engine finished it in the same step in which a stop string cut it.
                _end_by_stop_string(sample, kept)
            else:
                sample.ended_by = "engine"
                sample.finish_reason = str(output.finish_reason)
                sample.stop_reason = output.stop_reason
            self._put(sample)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Record aborted requests, mostly those whose client disconnected."""
        with self._lock:
            for request_id in request_ids:
                sample = self._live.pop(request_id, None)
                if sample is not None:
                    sample.ended_by = sample.finish_reason = "abort"
                    self._put(sample)

    def _put(self, sample: RequestSample) -> None:
        if self._is_open:
            self._queue.put(sample)

    def close(self) -> list[RequestSample]:
        """End recording; return the requests that have not ended."""
        with self._lock:
            self._settle()
            self._is_open = False
            unfinished = list(self._live.values())
            self._live.clear()
        return unfinished


def _end_by_stop_string(sample: RequestSample, kept_tokens: int) -> None:
    sample.ended_by, sample.finish_reason = "stop_string", "stop"
    if len(sample.stop_strings) == 1:
        # Only the detokenizer knows which of several it was.
        sample.stop_reason = sample.stop_strings[0]
    if sample.counts and kept_tokens < sample.counts[-1]:
        sample.kept_tokens = kept_tokens


def _note_events(sample: RequestSample, events: Iterable[Any]) -> None:
    for event in events:
        kind = event.type
        if kind == _QUEUED and sample.queued_s is None:
            sample.queued_s = event.timestamp
        elif kind == _SCHEDULED and sample.scheduled_s is None:
            sample.scheduled_s = event.timestamp
        elif kind == _PREEMPTED:
            sample.preemptions += 1
