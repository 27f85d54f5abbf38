"""The job and the load generator together, against a server on the loopback that records what it answers."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from specdecode_operator.capture.job.main import Job
from specdecode_operator.capture.validation.validate import validate_capture
from tests.support.capture_pods import PATIENT, environment
from tests.support.completion_server import (
    Received,
    answer_in_full,
    answered_tokens,
    completion_server,
    rejection,
)
from tests.support.recordings import closed, header, read_lines_of

PHASES = [
    {"name": "single", "pattern": "Closed", "concurrency": 1, "requests": 3},
    {"name": "steady", "pattern": "Constant", "requestsPerSecond": "100", "requests": 10},
]
WORKLOAD = {
    "prompts": {"synthetic": {"promptTokens": 12, "outputTokens": 6, "sharedPrefixTokens": 4}},
    "phases": PHASES,
    "warmupRequests": 2,
}


class RecordingEngine:
    """A server that answers two tokens a chunk, refuses one request, and writes a segment without steps."""

    def __init__(self) -> None:
        self.segment: Path | None = None
        self.records = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)

    def start(self) -> str:
        self._thread.start()
        assert self._ready.wait(20)
        return self.server.url

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        async with completion_server() as self.server:
            self.server.answer = self._answer
            self.server.pages["/health"] = (200, "")
            self._ready.set()
            while not self._end.is_set():
                await asyncio.sleep(0.02)
                self._close_if_ordered()

    async def _answer(self, request: Received, writer: asyncio.StreamWriter) -> None:
        if request.id.endswith("steady-4"):
            writer.write(rejection(400, b"too long"))
            return
        arrival_s = time.monotonic()
        tokens = len(answered_tokens(request))
        chunks = [2] * (tokens // 2)
        line = {
            "k": "request",
            "id": f"cmpl-{request.id}-0-1f2e3d4c",
            "external_id": f"cmpl-{request.id}-0",
            "engine": 0,
            "arrival_monotonic_s": arrival_s,
            "arrival_wall_s": time.time(),
            "prompt_tokens": len(request.body["prompt"]),
            "concurrency": 1,
            "temperature": 0.0,
            "queued_s": arrival_s,
            "scheduled_s": arrival_s,
            "preemptions": 0,
            "cached_tokens": 0,
            "block_hashes": [],
            "stop_reason": None,
            "chunk_s": [arrival_s + 0.001 * (number + 1) for number in range(len(chunks))],
            "chunk_tokens": chunks,
            "num_running": [1] * len(chunks),
            "prefill_tokens": [0] * len(chunks),
            "finish_reason": "length",
            "ended_by": "engine",
        }
        self._append(line)
        self.records += 1
        await answer_in_full(request, writer)

    def begin_segment(self, folder: Path) -> None:
        self.segment = folder / "segment-a-1.jsonl"
        self._append(header(boot="a", monotonic_s=time.monotonic(), steps=False))

    def _append(self, line: dict[str, object]) -> None:
        assert self.segment is not None
        with self.segment.open("ab") as stream:
            stream.write(msgspec.json.encode(line) + b"\n")

    def _close_if_ordered(self) -> None:
        if self.segment is not None and (self.segment.parent / "close").exists():
            self._append(closed(self.records, 0))
            self.segment = None


@pytest.fixture
def recording_engine() -> Iterator[RecordingEngine]:
    engine = RecordingEngine()
    yield engine
    engine.end()


def test_what_was_sent_is_published(tmp_path: Path, recording_engine: RecordingEngine) -> None:
    url = recording_engine.start()
    job = Job(environment(tmp_path, url, workload=WORKLOAD, record={"tokenIds": False, "stepStats": False}), PATIENT)
    job.prepare(tmp_path / "emptydir")
    recording_engine.begin_segment(job.places.segments)
    published = job.run()

    assert published.manifest.accounting.equation == (
        "13 sent = 1 HTTP-rejected + 0 never admitted + 12 in the engine (completed 12)"
    )
    assert validate_capture(job.places.final).problems == []
    records = read_lines_of(job.places.final / "trace.jsonl")[1:]
    clients = {line["id"]: line for line in read_lines_of(job.places.final / "client.jsonl")}
    assert {record["request_id"] for record in records} == {
        name for name, line in clients.items() if line["outcome"] == "completed" and not line.get("warmup")
    }
    for record in records:
        # Both by the clock of this host, from the same zero.
        assert 0 < record["arrival_ms"] < clients[record["request_id"]]["finished_ms"]
    refused = clients["demo-steady-4"]
    assert (refused["outcome"], refused["http_status"]) == ("http_rejected", 400)
    assert list(published.summary.phases) == ["single", "steady"]
    assert json.loads((job.places.final / "manifest.json").read_bytes())["workload"] == WORKLOAD
