"""What the recorder costs an API server: CPU time of the event loop's thread, and of its own thread beside it.

Messages are objects of vLLM's own classes where the development cluster's vLLM is installed, stand-ins otherwise.
Each figure is the difference between a loop with the hooks and the same loop without them, so what vLLM itself
does with a message is in neither. CPU time of one thread does not depend on what else the machine does,
apart from what it leaves of the caches.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from bench.figures import Figure, at_most, growth
from devcluster.host.paths import engine_environment
from specdecode_operator.capture.recorder.block_hashes import block_hashes
from specdecode_operator.capture.recorder.collector import BoundedQueue, Collector
from specdecode_operator.capture.recorder.method_hooks import Hooks
from specdecode_operator.capture.recorder.vllm_internals import EngineClasses, find_classes
from specdecode_operator.capture.recorder.writer import Segment, Writer
from tests.support import engine_standins

BATCHES: Final = (1, 8, 64, 256)
STEPS: Final = 400
ROUNDS: Final = 9
STEPS_OF_A_REQUEST: Final = 100
TOKENS_OF_A_STEP: Final = 3
PROMPT_TOKENS: Final = 512
BLOCK_SIZE: Final = 16
FIRST_STAMP_S: Final = 34451.123456789
STEP_S: Final = 0.012345678
LONG_PROMPTS: Final = (512, 8192, 131_072)
TARGET_US: Final = 5.0
TARGET_EACH_US: Final = 0.3
STEPS_A_SECOND: Final = 80
"""About what a large model on H100s does."""

AT_ONCE: Final = 16


@dataclass(frozen=True)
class Load:
    """Steps of one batch size: what is admitted before each, and its message."""

    admitted: list[list[Any]]
    messages: list[Any]


@dataclass(frozen=True)
class Cost:
    """CPU time a step, in microseconds, and what is on the disk."""

    event_loop_us: float
    writer_us: float
    request_bytes: float
    step_bytes: float


def _classes() -> tuple[EngineClasses, str]:
    """Return the classes to make messages of, and what they are called in the table."""
    sys.path.append(str(engine_environment()))
    try:
        return find_classes(), "vLLM's own"
    except ImportError:
        return engine_standins.engine_classes(), "stand-in"


def _make_load(classes: EngineClasses, batch: int) -> Load:
    """Return a steady state: every request lives for a hundred steps, and another takes its place."""
    kinds = classes.messages
    admitted: list[list[Any]] = []
    messages = []
    for step in range(STEPS):
        new, outputs = [], []
        for place in range(batch):
            age = (step + place) % STEPS_OF_A_REQUEST
            name = f"cmpl-capture-phase-{place}-{(step + place) // STEPS_OF_A_REQUEST}-0-1234abcd"
            if age == 0 or step == 0:
                new.append(_request(kinds["EngineCoreRequest"], name))
            outputs.append(_output(classes, name, age))
        admitted.append(new)
        stats = kinds["SchedulerStats"](num_running_reqs=batch)
        messages.append(
            kinds["EngineCoreOutputs"](
                engine_index=0, outputs=outputs, scheduler_stats=stats, timestamp=FIRST_STAMP_S + step * STEP_S
            )
        )
    return Load(admitted, messages)


def _request(kind: Any, name: str) -> Any:
    fields = {
        "request_id": name,
        "external_req_id": name,
        "prompt_token_ids": list(range(PROMPT_TOKENS)),
        "sampling_params": engine_standins.SamplingParams(),
        "arrival_time": 1_700_000_000.123,
    }
    if kind is not engine_standins.EngineCoreRequest:
        others = ("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank")
        fields |= dict.fromkeys(others)
    return kind(**fields)


def _output(classes: EngineClasses, name: str, age: int) -> Any:
    kinds = classes.messages
    output = kinds["EngineCoreOutput"](request_id=name, new_token_ids=list(range(TOKENS_OF_A_STEP)))
    if age == 0:
        event = kinds["EngineCoreEvent"]
        types = classes.event_type
        output.events = [event(types.QUEUED, 999.0), event(types.SCHEDULED, 999.5)]
        output.prefill_stats = kinds["PrefillStats"]()
    if age == STEPS_OF_A_REQUEST - 1:
        output.finish_reason = classes.finish_reason.LENGTH
    return output


class _Client:
    """Has the next message at once."""

    def __init__(self, messages: Iterator[Any]) -> None:
        self._messages = messages

    async def get_output_async(self) -> Any:
        return next(self._messages)


class _Processor:
    """Does nothing."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}

    def add_request(self, request: Any, prompt: Any) -> None:
        """Do nothing."""

    def process_outputs(self, *_: Any) -> Any:
        return _NOTHING

    def abort_requests(self, *_: Any) -> list[str]:
        return []


_NOTHING: Final = engine_standins.OutputProcessorOutput([], [])


async def _serve(load: Load) -> int:
    """Return the CPU time that the loop of an API server takes for all steps, in nanoseconds."""
    client, processor = _Client(iter(load.messages)), _Processor()
    start_ns = time.thread_time_ns()
    for new in load.admitted:
        for request in new:
            processor.add_request(request, None)
        message = await client.get_output_async()
        for start in range(0, len(message.outputs), engine_standins.SLICE):
            part = message.outputs[start : start + engine_standins.SLICE]
            processor.process_outputs(part, message.timestamp, None)
    return time.thread_time_ns() - start_ns


def _measure(classes: EngineClasses, batch: int) -> Cost:
    load = _make_load(classes, batch)
    hooked = replace(classes, output_processor=_Processor, client=_Client)
    costs = [_round(hooked, load) for _ in range(ROUNDS)]
    return Cost(*(statistics.median(column) for column in zip(*costs, strict=True)))


def _round(classes: EngineClasses, load: Load) -> tuple[float, float, float, float]:
    without_ns = asyncio.run(_serve(load))
    queue = BoundedQueue()
    collector = Collector(queue, token_ids=False, steps=True)
    hooks = Hooks(classes, collector)
    with tempfile.TemporaryDirectory() as folder:
        segment = Segment(Path(folder) / "segment.jsonl")
        writer = Writer(segment, collector, queue, BLOCK_SIZE)
        hooks.install()
        try:
            with_ns = asyncio.run(_serve(load))
        finally:
            hooks.remove()
        start_ns = time.thread_time_ns()
        writer.close("ordered")
        writer_ns = time.thread_time_ns() - start_ns
        request_bytes, step_bytes = _line_bytes(segment.path)
    if collector.errors:
        raise RuntimeError(collector.first_error)
    per_step = 1000 * STEPS
    return (with_ns - without_ns) / per_step, writer_ns / per_step, request_bytes, step_bytes


def _line_bytes(path: Path) -> tuple[float, float]:
    """Return the mean length of the lines of finished requests, and of steps."""
    lines = path.read_bytes().splitlines(keepends=True)
    requests = [len(line) for line in lines if b'"ended_by":"engine"' in line]
    steps = [len(line) for line in lines if line.startswith(b'{"k":"step"')]
    return statistics.mean(requests), statistics.mean(steps)


def _hash_ms(tokens: int) -> float:
    """Return the CPU time of hashing a prompt of large ids, in milliseconds."""
    prompt = list(range(100_000, 100_000 + tokens))
    stamps = [time.thread_time_ns()]
    for _ in range(3):
        block_hashes(prompt, BLOCK_SIZE, lambda: None)
        stamps.append(time.thread_time_ns())
    return min(after - before for before, after in pairwise(stamps)) / 1e6


def _hour_mb(cost: Cost) -> float:
    """Return what an hour of such steps writes, in 10^6 bytes: a step line each, and a chunk of each request."""
    chunk_bytes = cost.request_bytes / STEPS_OF_A_REQUEST
    return 3600 * STEPS_A_SECOND * (cost.step_bytes + AT_ONCE * chunk_bytes) / 1e6


def figures() -> Iterator[Figure]:
    """Yield the cost of a step, what is written, and the cost of hashing prompts."""
    classes, origin = _classes()
    of = f"{origin} messages of {TOKENS_OF_A_STEP} tokens, median of {ROUNDS} x {STEPS} steps"
    for batch in BATCHES:
        cost = _measure(classes, batch)
        limit = at_most(TARGET_US + TARGET_EACH_US * batch, f"our aim: {TARGET_US} + {TARGET_EACH_US} a request")
        remark = f"thread CPU time; writer's thread {cost.writer_us:.1f} us; {of}"
        yield Figure(f"recorder in the event loop, a step of {batch}", cost.event_loop_us, "us", limit, remark)
    yield Figure("recorder's line of a step", cost.step_bytes, "bytes")
    of = f"{STEPS_OF_A_REQUEST} chunks, {PROMPT_TOKENS} prompt tokens"
    yield Figure("recorder's line of a request", cost.request_bytes, "bytes", None, of)
    rate = f"{STEPS_A_SECOND} steps a second, {AT_ONCE} requests at once, not compressed"
    yield Figure("recorder's files of an hour", _hour_mb(cost), "MB", None, rate)
    hashes = {tokens: _hash_ms(tokens) for tokens in LONG_PROMPTS}
    yield growth("block hashes of a prompt, in the writer's thread", "ms", hashes)
