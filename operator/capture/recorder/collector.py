"""What the hooks do: follow every request of this API server from message to message.

All of it runs on the engine's event loop (or the thread that closes), so it only appends to lists.
It takes plain attributes of vLLM's objects and imports nothing of vLLM.
"""

import threading
from collections.abc import Iterable
from typing import Any

from .bounded_queue import BoundedQueue
from .samples import Moment, RequestSample, StepSample

_QUEUED, _SCHEDULED, _PREEMPTED = 1, 2, 3
"""vllm/v1/engine/__init__.py EngineCoreEventType."""

TOO_MANY_ERRORS = 16
"""After so many the recorder is of no use: what it would write is full of holes."""


class Collector:
    """The requests that are on the way, and what has been seen of them."""

    def __init__(self, queue: BoundedQueue, *, token_ids: bool, steps: bool) -> None:
        self.errors = 0
        self.first_error: str | None = None
        self._queue = queue
        self._keeps_token_ids = token_ids
        self._keeps_steps = steps
        self._is_open = True
        self._live: dict[str, RequestSample] = {}
        self._finishing: list[tuple[RequestSample, Any]] = []
        # Held by every hook for as long as it takes, and by the writer once, to close. Free, it costs 0.1 us.
        self._lock = threading.Lock()

    @property
    def is_broken(self) -> bool:
        """Whether the hooks failed so often that recording has ended."""
        return self.errors >= TOO_MANY_ERRORS

    def fail(self, error: Exception) -> None:
        """Count an error of a hook."""
        self.errors += 1
        if self.first_error is None:
            self.first_error = f"{type(error).__name__}: {error}"
        if self.is_broken:
            self._is_open = False

    def admit(self, request: Any, arrival_monotonic_s: float) -> None:
        """Begin to follow a request.

        One that is followed already gets more input (a streamed prompt): it stays the same request.
        """
        with self._lock:
            if self._is_open and request.request_id not in self._live:
                sample = RequestSample(request, arrival_monotonic_s, token_ids=self._keeps_token_ids)
                self._live[request.request_id] = sample
                sample.concurrency = len(self._live)

    def take(self, message: Any) -> None:
        """Note the chunks of one message of an engine, whole and before vLLM trims what follows a stop string."""
        with self._lock:
            if not self._is_open:
                return
            stats = message.scheduler_stats
            if stats is not None and self._keeps_steps:
                self._queue.put(StepSample(message.engine_index, message.timestamp, stats))
            if message.outputs:
                # The statistics of a step go to one of its API servers only; the others know their own requests.
                running = len(self._live) if stats is None else stats.num_running_reqs
                self._take_outputs(message, Moment(message.timestamp, running))

    def _take_outputs(self, message: Any, moment: Moment) -> None:
        find = self._live.get
        for output in message.outputs:
            sample = find(output.request_id)
            if sample is None:
                continue  # it was aborted: the engine did not know yet
            tokens = output.new_token_ids
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
        """Note the requests that ended by a stop string, of which the engine does not know.

        Called after vLLM processed the outputs: 0.32 has cut off by then what follows the string
        (OutputProcessor._trim_surplus_tokens); older ones leave it.
        """
        with self._lock:
            stopped = set(request_ids)
            for output in outputs:
                sample = self._live.pop(output.request_id, None) if output.request_id in stopped else None
                if sample is not None:
                    _end_by_stop_string(sample, len(output.new_token_ids))
                    self._put(sample)

    def settle(self) -> None:
        """Hand over the requests that the engine finished in the last message, now that vLLM has processed it."""
        if not self._finishing:
            return
        with self._lock:
            self._settle()

    def _settle(self) -> None:
        finishing, self._finishing = self._finishing, []
        for sample, output in finishing:
            if self._live.pop(sample.id, None) is None:
                continue  # ended otherwise in between
            kept = len(output.new_token_ids)
            if sample.counts and 0 < kept < sample.counts[-1]:
                # The engine finished it in the very step in which a stop string cut it.
                _end_by_stop_string(sample, kept)
            else:
                sample.ended_by = "engine"
                sample.finish_reason = str(output.finish_reason)
                sample.stop_reason = output.stop_reason
            self._put(sample)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Note the requests that were given up, mostly as their client left."""
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
        # Which of several it was, only the detokenizer knew.
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
