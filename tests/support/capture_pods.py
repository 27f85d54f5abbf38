"""A capture's pod without a cluster and without an engine: a job, and recorders that do as they are told."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from specdecode_operator.capture.files.formats import PartialManifest
from specdecode_operator.capture.job.entrypoint import Job
from specdecode_operator.capture.job.record_part import Timeouts
from specdecode_operator.capture.load.engine_ready import MetricsDelta, NoMetrics
from specdecode_operator.capture.load.run_settings import RunSettings
from specdecode_operator.capture.load.shutdown import Stop
from tests.support.recordings import ZERO_S, ZERO_WALL_S, Recording, Scenario, write_lines
from tests.support.waiting import DEADLINE_S

PATIENT = Timeouts(recording_s=DEADLINE_S, closed_s=DEADLINE_S, closed_anyway_s=0, image_id_s=DEADLINE_S)
NONE = Timeouts(recording_s=0, closed_s=0, closed_anyway_s=0)
"""For what never comes: a job looks once."""


class Result:
    """What a load says."""

    zero_monotonic_s = ZERO_S
    zero_wall_s = ZERO_WALL_S

    def __init__(self, metrics: MetricsDelta | NoMetrics | None = None) -> None:
        self.metrics = metrics or NoMetrics("not asked")


class _Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class HealthyEngine:
    """A server that answers an engine's /health, until it is killed."""

    def __init__(self) -> None:
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Pages)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def kill(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def healthy_engine() -> Iterator[str]:
    """Serve an engine's /health; yield its address."""
    engine = HealthyEngine()
    try:
        yield engine.url
    finally:
        engine.kill()


class Pod:
    """One attempt: its job, and recorders that do as they are told."""

    def __init__(
        self, root: Path, engine_url: str, recording: Recording | None = None, attempt: str = "uid-1", **changes: Any
    ) -> None:
        self.environment = environment(root, engine_url, attempt, **changes)
        self.job = Job(self.environment, PATIENT)
        self.recording = recording or Recording(Scenario(servers=2))
        self.places = self.job.places
        self.recorder = root / "emptydir"
        self._gone = threading.Event()
        self._thread = threading.Thread(target=self._close_when_ordered, daemon=True)

    def start(self, *, last_lines: bool = True) -> None:
        """Prepare, and begin to record; the last lines come when they are ordered."""
        self.job.prepare(self.recorder)
        self._last = [lines.pop() for lines in self.recording.segments]
        self.recording.write_segments(self.places.segments)
        if last_lines:
            self._thread.start()

    def end(self) -> None:
        self._gone.set()
        if self._thread.is_alive():
            self._thread.join()

    def _close_when_ordered(self) -> None:
        while not self._gone.wait(0.01):
            if self.places.close_file.exists():
                for lines, last in zip(self.recording.segments, self._last, strict=True):
                    self.append(lines[0], last)
                return

    def append(self, first: dict[str, Any], line: dict[str, Any]) -> None:
        path = self.places.segments / f"segment-{first['boot']}-{first['pid']}.jsonl"
        with path.open("ab") as stream:
            stream.write(msgspec.json.encode(line) + b"\n")

    async def load(self, _settings: RunSettings, folder: Path, _stop: Stop) -> Result:
        write_lines(folder / "client.jsonl.part", self.recording.clients)
        return Result()

    @property
    def label(self) -> PartialManifest:
        text = (self.places.folder / "manifest.partial.json").read_bytes()
        return msgspec.json.decode(text, type=PartialManifest)


def environment(root: Path, engine_url: str, attempt: str = "uid-1", **changes: Any) -> dict[str, str]:
    document = {
        "namespace": "team",
        "capture": "demo",
        "capture_uid": "capture-1",
        "root": str(root),
        "engine": {"url": engine_url, "model": "tiny", "max_model_len": 2048, "vocab_size": 1000},
        "workload": {"warmupRequests": 2},
        "seed": 3,
        "record": {"tokenIds": False, "stepStats": True},
        "deadline_seconds": DEADLINE_S,
        "context": {"image": "vllm:0.32", "recording_flags": ["--enable-logging-iteration-details"]},
    }
    return {
        "SPECDECODE_CAPTURE": json.dumps(document | changes),
        "SPECDECODE_ATTEMPT": attempt,
        "SPECDECODE_NODE": "node-1",
    }
