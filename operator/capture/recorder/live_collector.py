"""Follow the requests of users during a live capture: record a sample, and count all as vLLM counts them."""

import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .canary import REQUEST_ID_PREFIX
from .collector import BoundedQueue, Collector, RequestSample, tokens_to_prefill
from .method_hooks import Switch
from .salting import Salt, http_request
from .segment_format import Counters, Tally

BOUNDARY_TIMEOUT_S = 30.0


class LiveCollector(Collector):
    """Samples of the selected requests in flight, and a tally of all requests."""

    def __init__(  # noqa: PLR0913 (settings of one capture, by name)
        self,
        queue: BoundedQueue,
        switch: Switch,
        read_counters: Callable[[], dict[str, float]],
        salt: Salt,
        *,
        sample_percent: int,
        token_ids: bool,
        steps: bool,
    ) -> None:
        super().__init__(queue, token_ids=token_ids, steps=steps)
        self.first: Counters | None = None
        self.last: Counters | None = None  # None if the event loop did not respond
        self._switch = switch
        self._read_counters = read_counters
        self._salt = salt
        self._sample_percent = sample_percent
        self._is_admitting = True
        self._admitted = self._sampled_out = self._older = self._after = 0
        self._finished = self._generated_tokens = self._in_flight_before = 0

    def begin(self) -> bool:
        """Read vLLM's counters and wake the hooks between two messages; return whether the event loop responded."""
        return self._switch.between_messages(self._begin, BOUNDARY_TIMEOUT_S)

    def _begin(self) -> None:
        if self._switch.processor is not None:
            states = self._switch.processor.request_states
            self._others = {request_id: _left_to_prefill(state) for request_id, state in states.items()}
        self._older = len(self._others)
        self.first = self._count()
        self._switch.collector = self

    def _count(self) -> Counters:
        return Counters(time.monotonic(), self._read_counters())

    def stop_admitting(self) -> None:
        """Start to drain: record no further requests."""
        with self._lock:
            self._is_admitting = False

    @property
    def is_drained(self) -> bool:
        """Whether no recorded request is in flight."""
        return not self._live

    def close(self) -> list[RequestSample]:
        """End recording between two messages, and read vLLM's counters there; return the unfinished requests."""
        unfinished: list[RequestSample] = []

        def end() -> None:
            self._switch.collector = None
            unfinished.extend(super(LiveCollector, self).close())
            self.last = self._count()

        if not self._switch.between_messages(end, BOUNDARY_TIMEOUT_S):
            # The event loop has ended, or is stuck.
            self._switch.collector = None
            unfinished.extend(super().close())
        self._others.clear()
        return unfinished

    def so_far(self) -> tuple[int, int]:
        """Return the number of requests in the window, and of those outside the sample."""
        with self._lock:
            return self._admitted, self._sampled_out

    def tally(self, recorded: int) -> Tally:
        """Return the counts of all requests, given the number of those that have a line."""
        return Tally(
            admitted=self._admitted,
            recorded=recorded,
            sampled_out=self._sampled_out,
            dropped=self._admitted - self._sampled_out - recorded,
            older=self._older,
            after=self._after,
            finished=self._finished,
            generated_tokens=self._generated_tokens,
        )

    def _described(self, error: Exception) -> str:
        # The message may contain text of a user.
        trace = traceback.extract_tb(error.__traceback__)
        place = f" at {Path(trace[-1].filename).name}:{trace[-1].lineno}" if trace else ""
        return f"{type(error).__name__}{place}"

    def admit(self, request: Any, arrival_monotonic_s: float) -> None:
        """Count a request, and follow it if it is selected."""
        with self._lock:
            request_id = request.request_id
            # More input of a request (a streamed prompt) is not another request.
            if not self._is_open or request_id in self._live or request_id in self._others:
                return
            if not self._is_admitting:
                self._after += 1
            else:
                self._admitted += 1
                http_id = http_request(request_id, request.external_req_id)
                if not http_id.startswith(REQUEST_ID_PREFIX) and self._salt.selects(http_id, self._sample_percent):
                    self._follow(request, arrival_monotonic_s)
                    return
                self._sampled_out += 1
            self._others[request_id] = tokens_to_prefill(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Record or forget aborted requests. vLLM does not count them as finished."""
        request_ids = list(request_ids)
        with self._lock:
            for request_id in request_ids:
                self._others.pop(request_id, None)
        super().abort(request_ids)

    def before_outputs(self, processor: Any, outputs: Iterable[Any]) -> None:
        """Count tokens before vLLM trims them after a stop string, as its own counter does."""
        states = processor.request_states
        tokens = 0
        for output in outputs:
            if output.request_id in states:  # otherwise aborted, and not counted
                tokens += len(output.new_token_ids)
        self._generated_tokens += tokens
        self._in_flight_before = len(states)

    def after_outputs(self, processor: Any, outputs: Iterable[Any]) -> None:
        """Count requests that vLLM has finished, by the engine's word or by a stop string."""
        states = processor.request_states
        finished = self._in_flight_before - len(states)
        if finished <= 0:
            return
        with self._lock:
            for output in outputs:
                request_id = output.request_id
                if request_id not in states:
                    known = self._others.pop(request_id, None) is not None or request_id in self._live
                    # Rejected by the engine (vLLM 0.33), which is not counted
                    finished -= known and getattr(output, "error", None) is not None
        self._finished += finished


def _left_to_prefill(state: Any) -> int:
    """Return the prompt length of vLLM's RequestState before the first token, then 0."""
    return getattr(state, "prompt_len", 0) if getattr(state, "is_prefilling", False) else 0
