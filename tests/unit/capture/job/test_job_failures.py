"""A capture that fails inside its pod: the reason is said, and nothing is published."""

import asyncio
import errno
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from specdecode_operator.capture.files.segments import recorders_closed
from specdecode_operator.capture.job import finish as job_finish
from specdecode_operator.capture.job.entrypoint import Job
from specdecode_operator.capture.load.datasets import BadDatasetError
from specdecode_operator.capture.load.run_settings import RunSettings
from specdecode_operator.capture.load.shutdown import Stop
from tests.support.capture_pods import NONE, PATIENT, HealthyEngine, Pod, Result, environment
from tests.support.recordings import ZERO_S, closed, header, write_lines
from tests.unit.capture.job.test_job import MOMENT_S, failure_of, waits_for_stop


class TestFailures:
    def test_engine_that_is_not_ready(self, tmp_path: Path) -> None:
        pod = Pod(tmp_path, "http://127.0.0.1:9")
        pod.job = Job(environment(tmp_path, "http://127.0.0.1:9", deadline_seconds=MOMENT_S), NONE)
        pod.start()
        failure = failure_of(pod)
        pod.end()
        assert failure.reason == "EngineNotReady"

    def test_engine_that_records_nothing(self, pod: Pod) -> None:
        pod.start()
        for path in pod.places.segments.glob("*1.jsonl"):
            path.unlink()
        pod.job = Job(pod.environment, NONE)
        failure = failure_of(pod)
        assert failure.reason == "RecorderMissing"
        assert failure.message.startswith("1 API servers record")

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    def test_recorder_that_found_the_volume_full(self, pod: Pod, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        """It cannot say so: there is no room for its first line."""
        pod.start()
        for path in pod.places.segments.glob("*1.jsonl"):
            path.unlink()
        write_bytes = Path.write_bytes

        def full(path: Path, content: bytes) -> int:
            if path.parent == pod.places.segments:
                raise OSError(code, os.strerror(code))
            return write_bytes(path, content)

        monkeypatch.setattr(Path, "write_bytes", full)
        pod.job = Job(pod.environment, NONE)
        assert failure_of(pod).reason == "DiskFull"

    def test_recorder_that_does_not_know_the_engine(self, pod: Pod) -> None:
        pod.start(last_lines=False)
        for lines in pod.recording.segments:
            pod.append(lines[0], {"k": "off", "reason": "EngineCoreOutput lacks new_token_ids"})
            pod.append(lines[0], closed(0, 0, reason="unknown_shape"))
        failure = failure_of(pod)
        assert failure.reason == "RecorderOff"
        assert failure.message == (
            "the recorder switched itself off, the engine, vLLM 0.32.0, went on: EngineCoreOutput lacks new_token_ids:"
            " capture one that it was tried with, vLLM 0.28 to 0.33 (spec.engine of the deployment)"
        )

    @pytest.mark.parametrize(
        ("closed_by", "reason"),
        [("disk_full", "DiskFull"), ("exit", "EngineExited"), ("write_error", "RecorderOff")],
    )
    def test_recorder_that_ends_under_load(self, pod: Pod, closed_by: str, reason: str) -> None:
        async def load(_settings: RunSettings, folder: Path, stop: Stop) -> Result:
            pod.append(pod.recording.segments[1][0], closed(0, 0, reason=closed_by))
            return await waits_for_stop(pod, folder, stop)

        pod.start(last_lines=False)
        assert failure_of(pod, load).reason == reason

    def test_engine_that_starts_anew_under_load(self, pod: Pod) -> None:
        async def load(_settings: RunSettings, folder: Path, stop: Stop) -> Result:
            first = header(0, 2, boot="new", pid=500, monotonic_s=ZERO_S + 5)
            write_lines(pod.places.segments / "segment-new-500.jsonl", [first])
            return await waits_for_stop(pod, folder, stop)

        pod.start()
        assert failure_of(pod, load).reason == "EngineRestarted"

    def test_engine_that_is_killed_under_load(self, tmp_path: Path) -> None:
        """Its recorder had no time to say so, and no other one comes."""
        engine = HealthyEngine()
        pod = Pod(tmp_path, engine.url)

        async def load(_settings: RunSettings, folder: Path, stop: Stop) -> Result:
            await asyncio.to_thread(engine.kill)
            return await waits_for_stop(pod, folder, stop)

        pod.start(last_lines=False)
        failure = failure_of(pod, load)
        pod.end()
        assert failure.reason == "EngineExited"
        assert "nothing listens" in failure.message

    def test_segment_that_nobody_understands(self, pod: Pod) -> None:
        async def load(_settings: RunSettings, folder: Path, stop: Stop) -> Result:
            write_lines(pod.places.segments / "segment-other-1.jsonl", [{"k": "header", "schema": "two"}])
            return await waits_for_stop(pod, folder, stop)

        pod.start()
        assert failure_of(pod, load).reason == "SegmentUnreadable"

    def test_engine_that_starts_anew_in_the_last_moment(self, pod: Pod) -> None:
        async def load(settings: RunSettings, folder: Path, stop: Stop) -> Result:
            for server in range(2):
                first = header(server, 2, boot=f"new{server}", pid=500, monotonic_s=ZERO_S + 5)
                write_lines(pod.places.segments / f"segment-new{server}-500.jsonl", [first, closed(0, 0)])
            return await pod.load(settings, folder, stop)

        pod.start()
        assert failure_of(pod, load).reason == "EngineRestarted"

    def test_recorder_that_never_finishes(self, pod: Pod) -> None:
        pod.start(last_lines=False)
        pod.job = Job(pod.environment, NONE)
        assert failure_of(pod).reason == "RecorderNotClosed"

    def test_lost_lines_fail_the_capture(self, pod: Pod) -> None:
        pod.recording.segments[0][-1]["dropped"] = 5
        pod.start()
        failure = failure_of(pod)
        assert failure.reason == "ValidationFailed"
        assert "dropped: 5 lines that the recorder lost" in failure.message
        assert "trace.jsonl.part" in pod.label.files

    def test_request_that_is_unaccounted_for_is_named(self, pod: Pod) -> None:
        pod.recording.change("demo-closed-3", lambda _: None)
        pod.start()
        assert "demo-closed-3: the client has completed" in failure_of(pod).message

    @pytest.mark.parametrize(
        ("outcome", "status", "error", "why"),
        [
            (
                "http_rejected",
                401,
                "Unauthorized",
                "12 http rejected); the first one, demo-closed-3: HTTP 401, Unau",
            ),
            ("not_sent", None, "no connection", "12 not sent); the first one, demo-closed-3: no connection"),
            ("timed_out", None, None, "12 timed out); the first one, demo-closed-3: timed_out"),
        ],
    )
    def test_load_of_which_nothing_reached_the_engine(
        self, pod: Pod, outcome: str, status: int | None, error: str | None, why: str
    ) -> None:
        """With a wrong key, say: every request is accounted for, and there is nothing to publish."""
        for number, lines in enumerate(pod.recording.segments):
            lines[:] = [header(number, 2), closed(0, 0)]
        told = {"outcome": outcome, "http_status": status, "error": error, "ttft_ms": None, "first_token_ms": None}
        pod.recording.clients[:] = [line | told | {"chunks": 0} for line in pod.recording.clients]
        pod.start()
        failure = failure_of(pod)
        assert failure.reason == "NothingRecorded"
        assert why in failure.message

    def test_load_without_a_request(self, pod: Pod) -> None:
        for number, lines in enumerate(pod.recording.segments):
            lines[:] = [header(number, 2), closed(0, 0)]
        pod.recording.clients.clear()
        pod.start()
        failure = failure_of(pod)
        assert (failure.reason, failure.message) == ("NothingRecorded", "no request got a token (none was due)")

    def test_steps_that_were_lost(self, pod: Pod) -> None:
        for lines in pod.recording.segments:
            lines[:] = [line for line in lines if line["k"] != "step"]
            lines[-1]["steps"] = 0
        pod.start()
        assert "missing_steps: 12 requests without any step" in failure_of(pod).message

    def test_cancelled_by_a_signal(self, pod: Pod) -> None:
        async def load(_settings: RunSettings, folder: Path, stop: Stop) -> Result:
            os.kill(os.getpid(), signal.SIGTERM)
            return await waits_for_stop(pod, folder, stop)

        pod.start()
        pod.job = Job(pod.environment, replace(PATIENT, closed_anyway_s=60))
        failure = failure_of(pod, load)
        assert (failure.reason, failure.message) == ("Cancelled", "stopped before its end: SIGTERM received")
        assert recorders_closed(pod.places.segments), "what was recorded is whole nevertheless"
        assert pod.label.files["client.jsonl.part"] > 0

    def test_load_that_takes_too_long(self, tmp_path: Path, engine_url: str) -> None:
        pod = Pod(tmp_path, engine_url)
        pod.job = Job(environment(tmp_path, engine_url, deadline_seconds=MOMENT_S), NONE)
        pod.start()
        failure = failure_of(pod, lambda _settings, folder, stop: waits_for_stop(pod, folder, stop))
        pod.end()
        assert failure.reason == "DeadlineExceeded"

    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (BadDatasetError("prompts.jsonl: holds no prompt"), "InvalidDataset"),
            (OSError(errno.ENOSPC, "No space left on device"), "DiskFull"),
            (OSError("not all requests could be written"), "VolumeFailed"),
            (RuntimeError("a mistake"), "InternalError"),
        ],
    )
    def test_load_that_fails(self, pod: Pod, error: Exception, reason: str) -> None:
        async def load(_settings: RunSettings, _folder: Path, _stop: Stop) -> Result:
            raise error

        pod.start()
        failure = failure_of(pod, load)
        assert failure.reason == reason
        assert str(error) in failure.message or reason == "DiskFull"

    def test_log_of_the_client_on_a_full_disk(self, pod: Pod) -> None:
        """Its writing thread sets the stop with the reason, and closing it fails without a number."""

        async def load(_settings: RunSettings, _folder: Path, stop: Stop) -> Result:
            stop.set("/capture/client.jsonl.part: No space left on device")
            raise OSError("not all requests could be written")

        pod.start()
        assert failure_of(pod, load).reason == "DiskFull"

    def test_disk_that_is_full_when_merging(self, pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", "trace.jsonl.part")

        monkeypatch.setattr(job_finish, "merge", full)
        pod.start()
        failure = failure_of(pod)
        assert failure.reason == "DiskFull"
        assert "trace.jsonl.part" in failure.message
