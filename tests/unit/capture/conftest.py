"""A recorder around stand-ins of vLLM's classes, pods of captures, and a server that answers as an engine does."""

import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specdecode_operator.capture.load import runner
from specdecode_operator.capture.recorder.collector import CAPACITY_BYTES, BoundedQueue, Collector
from specdecode_operator.capture.recorder.hooks import Hooks
from specdecode_operator.capture.recorder.segment_format import (
    RECORDER_VERSION,
    SCHEMA,
    EngineConfig,
    Header,
    SegmentLine,
)
from specdecode_operator.capture.recorder.writer import Segment, Writer
from tests.support.capture_pods import Pod, healthy_engine
from tests.support.completion_server import CompletionServer, completion_server
from tests.support.driven_clock import DrivenClock, driven_clock
from tests.support.engine_standins import ApiServer, OlderOutputProcessor, OutputProcessor, engine_classes

BLOCK_SIZE = 4
HEADER = Header(
    schema=SCHEMA,
    recorder=RECORDER_VERSION,
    vllm="0.32.0",
    boot="b007",
    host="node",
    pid=1,
    client_index=0,
    client_count=1,
    engines=[0],
    wall_s=1.0,
    monotonic_s=2.0,
    model="tiny",
    config=EngineConfig(max_num_seqs=8, block_size=BLOCK_SIZE, max_model_len=64, max_num_batched_tokens=64),
    gpu=None,
    token_ids=False,
    steps=True,
)


@dataclass
class Recorder:
    """All parts of a recorder but its thread: its writer takes its turns when a test says so."""

    path: Path
    queue: BoundedQueue
    collector: Collector
    writer: Writer
    hooks: Hooks
    server: ApiServer
    now_s: list[float]

    def lines(self, kind: str | None = None) -> list[Any]:
        """Return what is in the segment, decoded by those who read it."""
        decoder = msgspec.json.Decoder(SegmentLine)
        lines = [decoder.decode(line) for line in self.path.read_bytes().splitlines()]
        return [line for line in lines if kind is None or line.__struct_config__.tag == kind]

    def requests(self) -> dict[str, Any]:
        """Close, and return the records by request id."""
        self.writer.close("ordered")
        return {line.id: line for line in self.lines("request")}


@pytest.fixture
def make_recorder(tmp_path: Path) -> Iterator[Any]:
    made: list[Recorder] = []

    def make(
        *,
        token_ids: bool = False,
        steps: bool = True,
        capacity_bytes: int = CAPACITY_BYTES,
        processor: type[OlderOutputProcessor] = OutputProcessor,
    ) -> Recorder:
        path = tmp_path / "segment-b007-1.jsonl"
        queue = BoundedQueue(capacity_bytes)
        collector = Collector(queue, token_ids=token_ids, steps=steps)
        now_s = [0.0]
        writer = Writer(Segment(path), collector, queue, BLOCK_SIZE, clock=lambda: now_s[0])
        writer.begin(HEADER)
        classes = engine_classes(processor)
        hooks = Hooks(classes, collector)
        hooks.install()
        made.append(Recorder(path, queue, collector, writer, hooks, ApiServer(classes), now_s))
        return made[-1]

    yield make
    for each in made:
        if not each.writer.is_closed:
            each.writer.close("exit")


@pytest.fixture
def recorder(make_recorder: Any) -> Recorder:
    made: Recorder = make_recorder()
    return made


def synced_paths(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Return a set that grows by what is flushed to the disk from now on."""
    synced: set[Path] = set()
    fsync = os.fsync

    def follow(file: int) -> None:
        synced.add(Path(f"/proc/self/fd/{file}").readlink())
        fsync(file)

    monkeypatch.setattr(os, "fsync", follow)
    return synced


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    with healthy_engine() as url:
        yield url


@pytest.fixture
def pod(tmp_path: Path, engine_url: str) -> Iterator[Pod]:
    made = Pod(tmp_path, engine_url)
    yield made
    made.end()


@pytest.fixture
async def server() -> AsyncIterator[CompletionServer]:
    async with completion_server() as running:
        yield running


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a load wait after failures, and connect ahead, no longer than a test needs."""
    monkeypatch.setattr(runner, "FAILURE_PAUSE_S", 0.0)
    monkeypatch.setattr(runner, "CONNECT_AHEAD_S", 0.05)


@pytest.fixture
def clock() -> Iterator[DrivenClock]:
    """The clock, to be put forward."""
    with driven_clock() as driven:
        yield driven
