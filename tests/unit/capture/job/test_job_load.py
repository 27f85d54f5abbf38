"""The job and the load generator together, against a server on the loopback that records what it answers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdecode_operator.capture.files.validate import validate_capture
from specdecode_operator.capture.job.entrypoint import Job
from tests.support.capture_pods import PATIENT, environment
from tests.support.recording_engine import RecordingEngine
from tests.support.recordings import read_lines_of

PHASES = [
    {"name": "single", "pattern": "Closed", "concurrency": 1, "requests": 3},
    {"name": "steady", "pattern": "Constant", "requestsPerSecond": "100", "requests": 10},
]
WORKLOAD = {
    "prompts": {"synthetic": {"promptTokens": 12, "outputTokens": 6, "sharedPrefixTokens": 4}},
    "phases": PHASES,
    "warmupRequests": 2,
}


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
