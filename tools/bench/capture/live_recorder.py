"""What the hooks of live captures cost an API server of vLLM while they sleep.

The same steps run through vLLM's own OutputProcessor with and without hooks, in pairs and in both orders. It has no
tokenizer here, so its share of a step is smaller than in a real server, and the share of the hooks is larger.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from bench.capture.recorder_overhead import change_percent
from bench.figures import Figure, at_most
from devcluster.host.paths import engine_environment
from specdecode_operator.capture.recorder.method_hooks import Hooks
from specdecode_operator.capture.recorder.vllm_internals import EngineClasses, find_classes
from tests.engine.engine_versions import SERVED

BATCHES: Final = (8, 64)
STEPS: Final = {1: 4000, 8: 1000, 64: 200}
PAIRS: Final = 40
PROMPT_TOKENS: Final = 512
TOKENS_OF_A_STEP: Final = 3
MOST_NS: Final = 1000.0
MOST_TIMES: Final = 1.03


class _Client:
    """Has the next message at once."""

    def __init__(self, message: Any) -> None:
        self._message = message

    async def get_output_async(self) -> Any:
        return self._message


class _Nothing:
    """An OutputProcessor that does nothing."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}

    def add_request(self, request: Any, prompt: Any) -> None:
        """Do nothing."""

    def process_outputs(self, *_: Any, weight_version: Any = None) -> None:
        """Do nothing."""

    def abort_requests(self, *_: Any) -> list[str]:
        """Do nothing."""
        return []


@contextmanager
def _asleep(classes: EngineClasses) -> Iterator[None]:
    hooks = Hooks(classes)
    hooks.install()
    try:
        yield
    finally:
        hooks.remove()


def _message(classes: EngineClasses, batch: int) -> Any:
    kinds = classes.messages
    outputs = [
        kinds["EngineCoreOutput"](request_id=f"cmpl-{place}-0-1234abcd", new_token_ids=list(range(TOKENS_OF_A_STEP)))
        for place in range(batch)
    ]
    return kinds["EngineCoreOutputs"](engine_index=0, outputs=outputs, timestamp=time.monotonic())


def _real_processor(classes: EngineClasses, message: Any) -> tuple[Any, list[Any]]:
    """Return vLLM's processor with a request for each output, and the queues of their answers."""
    from vllm import SamplingParams  # noqa: PLC0415 (only where an engine is)
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415
    from vllm.v1.engine.output_processor import RequestOutputCollector  # noqa: PLC0415

    processor, queues = classes.output_processor(None, log_stats=True), []
    for output in message.outputs:
        parameters = SamplingParams(max_tokens=10**6, output_kind=RequestOutputKind.DELTA)
        others = ("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank")
        request = classes.messages["EngineCoreRequest"](
            request_id=output.request_id,
            external_req_id=output.request_id,
            prompt_token_ids=list(range(PROMPT_TOKENS)),
            sampling_params=parameters,
            arrival_time=time.time(),
            **dict.fromkeys(others),
        )
        queues.append(RequestOutputCollector(RequestOutputKind.DELTA, output.request_id))
        processor.add_request(request, None, None, 0, queues[-1])
    return processor, queues


async def _serve(client: Any, processor: Any, queues: list[Any], make_stats: Any, steps: int) -> int:
    """Return the CPU time of the middle of an API server's loop, in nanoseconds."""
    start_ns = 0
    for step in range(-steps // 4, steps):
        if step == 0:  # warm: setting a method of a class empties the interpreter's caches
            start_ns = time.thread_time_ns()
        message = await client.get_output_async()
        processor.process_outputs(message.outputs, message.timestamp, make_stats(), weight_version=None)
        for queue in queues:
            queue.get_nowait()
    return time.thread_time_ns() - start_ns


def _pairs(classes: EngineClasses, processor: Any, queues: list[Any], message: Any, make_stats: Any) -> list[Any]:
    """Return the CPU times of a step with and without sleeping hooks, in nanoseconds."""
    hooked = replace(classes, output_processor=type(processor), client=_Client)
    steps = STEPS[len(message.outputs)]
    client, found = _Client(message), []
    for number in range(PAIRS):
        times: dict[bool, float] = {}
        for is_hooked in (True, False) if number % 2 else (False, True):
            if is_hooked:
                with _asleep(hooked):
                    taken_ns = asyncio.run(_serve(client, processor, queues, make_stats, steps))
            else:
                taken_ns = asyncio.run(_serve(client, processor, queues, make_stats, steps))
            times[is_hooked] = taken_ns / steps
        found.append((times[True], times[False]))
    return found


def figures() -> Iterator[Figure]:
    """Yield what the hooks add to a step while they sleep, and the ratio to vLLM's own work."""
    sys.path.append(str(engine_environment()))
    try:
        classes = find_classes()
    except ImportError as error:
        yield Figure("live recorder asleep", None, remark=str(error))
        return
    from vllm.v1.metrics.stats import IterationStats  # noqa: PLC0415 (only where an engine is)

    message = _message(classes, 1)
    pairs = _pairs(classes, _Nothing(), [], message, lambda: None)
    added_ns = statistics.median(asleep - plain for asleep, plain in pairs)
    remark = f"both hooks of a step around methods that do nothing, thread CPU time, median of {PAIRS} x {STEPS[1]}"
    yield Figure("live recorder asleep, a step", added_ns, "ns", at_most(MOST_NS), remark)
    for batch in BATCHES:
        message = _message(classes, batch)
        processor, queues = _real_processor(classes, message)
        pairs = _pairs(classes, processor, queues, message, IterationStats)
        change, low, high = (1 + percent / 100 for percent in change_percent([on / off for on, off in pairs]))
        plain_us = statistics.median(plain for _, plain in pairs) / 1000
        remark = f"{plain_us:.1f} us without hooks; 95 % interval {low:.3f} to {high:.3f}, {PAIRS} pairs"
        name = f"live recorder asleep, a step of {batch}, relative to vLLM without it"
        yield Figure(name, change, "times", at_most(MOST_TIMES), remark, (f"vLLM {SERVED} on the CPU",))
