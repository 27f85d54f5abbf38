"""Stand-ins for the objects of vLLM that the recorder touches, with the same names and habits.

That they are like the real ones is shown by tests/engine/test_recorder.py and test_recorder_shapes.py.
"""

import asyncio
import itertools
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from specdecode_operator.capture.recorder.vllm_internals import EngineClasses

SLICE = 128
"""vllm/envs.py VLLM_V1_OUTPUT_PROC_CHUNK_SIZE."""


class FinishReason(IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreEventType(IntEnum):
    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


@dataclass
class EngineCoreEvent:
    type: EngineCoreEventType
    timestamp: float


@dataclass
class PrefillStats:
    num_cached_tokens: int = 0


@dataclass
class SpecDecodingStats:
    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)


@dataclass
class SchedulerStats:
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    spec_decoding_stats: SpecDecodingStats | None = None
    kv_connector_stats: Any = None


@dataclass
class SamplingParams:
    temperature: float = 0.0
    stop: list[str] = field(default_factory=list)
    extra_args: dict[str, Any] | None = None


@dataclass
class EngineCoreRequest:
    request_id: str
    prompt_token_ids: list[int] | None
    sampling_params: SamplingParams | None
    external_req_id: str | None = None
    prompt_embeds: list[list[float]] | None = None
    arrival_time: float = 1_700_000_000.0
    client_index: int = 0


@dataclass
class EngineCoreOutput:
    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    prefill_stats: PrefillStats | None = None


@dataclass
class EngineCoreOutputs:
    engine_index: int = 0
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0


@dataclass
class OutputProcessorOutput:
    request_outputs: list[Any]
    reqs_to_abort: list[str]


@dataclass
class RequestState:
    """What vLLM knows of a request in flight."""

    prompt_len: int
    is_prefilling: bool = True
    tokens: int = 0


class IterationStats:
    """What vLLM counts in one message."""

    def __init__(self) -> None:
        self.num_generation_tokens = 0
        self.finished = 0


class OlderOutputProcessor:
    """As in vLLM 0.28 to 0.31: finds stop strings, and leaves what follows them.

    Attributes
    ----------
    stop_at
        Tokens of a request at which its stop string is complete.
    """

    def __init__(self) -> None:
        self.request_states: dict[str, RequestState] = {}
        self.stop_at: dict[str, int] = {}

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: Any,
        parent_req: Any = None,
        request_index: int = 0,
        queue: Any = None,
    ) -> None:
        state = RequestState(len(request.prompt_token_ids or ()))
        self.request_states.setdefault(request.request_id, state)

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: Any = None,
        iteration_stats: Any = None,
    ) -> OutputProcessorOutput:
        to_abort = []
        for output in engine_core_outputs:
            if output.request_id not in self.request_states:
                continue
            if iteration_stats is not None:
                iteration_stats.num_generation_tokens += len(output.new_token_ids)
            state = self.request_states[output.request_id]
            before = state.tokens
            state.tokens += len(output.new_token_ids)
            state.is_prefilling = False
            stop_at = self.stop_at.get(output.request_id, 0)
            is_stopped = before < stop_at <= before + len(output.new_token_ids)
            if is_stopped:
                self._trim(output, stop_at - before)
            if is_stopped or output.finish_reason is not None:
                del self.request_states[output.request_id]
                if iteration_stats is not None:
                    iteration_stats.finished += 1
                if output.finish_reason is None:
                    to_abort.append(output.request_id)
        return OutputProcessorOutput([], to_abort)

    def _trim(self, output: Any, kept: int) -> None:
        """Leave it all."""

    def abort_requests(self, request_ids: Any, internal: bool) -> list[str]:
        return [each for each in request_ids if self.request_states.pop(each, None) is not None]


class OutputProcessor(OlderOutputProcessor):
    """As in vLLM 0.32: cuts what follows a stop string, in place."""

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: Any = None,
        iteration_stats: Any = None,
        weight_version: Any = None,
    ) -> OutputProcessorOutput:
        return super().process_outputs(engine_core_outputs, engine_core_timestamp, iteration_stats)

    def _trim(self, output: Any, kept: int) -> None:
        del output.new_token_ids[kept:]


def engine_classes(processor: type[OlderOutputProcessor] = OutputProcessor) -> EngineClasses:
    """Return classes that may be hooked without another test's seeing it."""

    class AsyncMPClient:
        def __init__(self) -> None:
            self.messages: asyncio.Queue[Any] = asyncio.Queue()

        async def get_output_async(self) -> EngineCoreOutputs:
            message: EngineCoreOutputs = await self.messages.get()
            return message

    read = (
        EngineCoreEvent,
        EngineCoreOutput,
        EngineCoreOutputs,
        EngineCoreRequest,
        OutputProcessorOutput,
        PrefillStats,
        SchedulerStats,
        SpecDecodingStats,
    )
    return EngineClasses(
        output_processor=type(processor.__name__, (processor,), {}),
        client=AsyncMPClient,
        messages={each.__name__: each for each in read},
        event_type=EngineCoreEventType,
        finish_reason=FinishReason,
    )


class ApiServer:
    """The loop of vLLM's API server (vllm/v1/engine/async_llm.py), a message at a time."""

    def __init__(self, classes: EngineClasses) -> None:
        self.processor = classes.output_processor()
        self.client = classes.client()
        self.counters = {"requests_finished": 0.0, "generation_tokens": 0.0}
        self._clock = itertools.count(100)
        self._pending: asyncio.Task[Any] | None = None

    def add(self, request_id: str, prompt: list[int] | None = None, **more: Any) -> None:
        """Admit a request."""
        parameters = more.pop("sampling_params", SamplingParams())
        prompt = [1, 2, 3] if prompt is None else prompt
        external_id = more.pop("external_req_id", request_id)
        self.processor.add_request(EngineCoreRequest(request_id, prompt, parameters, external_id, **more), None)

    def abort(self, *request_ids: str) -> None:
        """Give requests up."""
        self.processor.abort_requests(list(request_ids), internal=True)

    async def step(self, *outputs: EngineCoreOutput, running: int | None = 1, engine: int = 0) -> float:
        """Let an engine finish a step; return its stamp. Without ``running`` the statistics went elsewhere."""
        stats = None if running is None else SchedulerStats(num_running_reqs=running)
        stamp_s = float(next(self._clock))
        await self.deliver(EngineCoreOutputs(engine, list(outputs), stats, stamp_s))
        return stamp_s

    async def deliver(self, message: Any) -> None:
        """Take a message through the loop, up to where the next one is asked for."""
        task = self._pending or asyncio.create_task(self.client.get_output_async())
        self.client.messages.put_nowait(message)
        received = await task
        stats = IterationStats()
        for start in range(0, len(received.outputs), SLICE):
            part = received.outputs[start : start + SLICE]
            self.processor.process_outputs(part, received.timestamp, stats)
            await self.between_slices()
        self.counters["generation_tokens"] += stats.num_generation_tokens
        self.counters["requests_finished"] += stats.finished
        await self.wait()

    async def between_slices(self) -> None:
        """Do what other tasks do between two slices of a message: nothing, unless a test replaces this."""

    async def wait(self) -> None:
        """Ask for the next message."""
        self._pending = asyncio.create_task(self.client.get_output_async())
        await asyncio.sleep(0)


def chunk(request_id: str, tokens: int = 1, **more: Any) -> EngineCoreOutput:
    """Return an output with so many tokens."""
    return EngineCoreOutput(request_id, list(range(tokens)), **more)


def last_chunk(request_id: str, tokens: int = 1, reason: FinishReason = FinishReason.LENGTH) -> EngineCoreOutput:
    """Return an output that ends its request."""
    return chunk(request_id, tokens, finish_reason=reason)
