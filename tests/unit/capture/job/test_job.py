"""A capture from inside its pod: what is published, and what is left where it fails."""

import asyncio
import errno
import json
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from specdecode_operator.api.capture_status import CaptureSummary
from specdecode_operator.capture.files.config_hash import engine_hash
from specdecode_operator.capture.files.errors import CaptureError
from specdecode_operator.capture.files.manifest import Manifest
from specdecode_operator.capture.files.publish import verify
from specdecode_operator.capture.files.segments import recorders_closed
from specdecode_operator.capture.job import finish as job_finish
from specdecode_operator.capture.job.finish import Published
from specdecode_operator.capture.job.main import Job, error_message, report, success_message
from specdecode_operator.capture.load.datasets import BadDatasetError
from specdecode_operator.capture.load.engine_ready import MetricsDelta
from specdecode_operator.capture.load.stop import Stop
from specdecode_operator.capture.load.workload import RunSettings
from specdecode_operator.capture.recorder.lines import Header
from specdecode_operator.capture.validation.validate import validate_capture
from specdecode_operator.engine.metrics import SpeculationReading
from tests.support.capture_pods import NONE, PATIENT, HealthyEngine, Pod, Result, environment
from tests.support.recordings import ZERO_S, Recording, Scenario, closed, header, read_lines_of, write_lines

MOMENT_S = 0.001
"""A deadline that is over as soon as it is looked at."""


def failure_of(pod: Pod, load: Callable[[RunSettings, Path, Stop], Awaitable[Result]] | None = None) -> CaptureError:
    """Return why a run failed; whatever it is, nothing is published and the files are labelled with it."""
    with pytest.raises(CaptureError) as failure:
        pod.job.run(load or pod.load)
    assert not pod.places.final.exists()
    assert (pod.label.reason, pod.label.message) == (failure.value.reason, failure.value.message)
    assert list(pod.places.segments.glob("segment-*.jsonl"))
    return failure.value


class TestPublished:
    def test_files_are_complete_and_pass(self, pod: Pod) -> None:
        pod.start()
        pod.job.run(pod.load)
        assert {path.name for path in pod.places.final.iterdir()} == {
            "trace.jsonl",
            "step-stats.jsonl",
            "client.jsonl",
            "manifest.json",
        }
        assert not pod.places.folder.exists()
        assert verify(pod.places.final) == []
        assert validate_capture(pod.places.final).problems == []

    def test_manifest_says_everything(self, pod: Pod) -> None:
        pod.start()
        published = pod.job.run(pod.load)
        written = msgspec.json.decode((pod.places.final / "manifest.json").read_bytes(), type=Manifest)
        assert written == published.manifest
        assert (written.namespace, written.capture, written.capture_uid) == ("team", "demo", "capture-1")
        assert (written.attempt, written.node) == ("uid-1", "node-1")
        assert (written.vllm, written.gpu, written.seed) == ("0.32.0", "NVIDIA H200", 3)
        assert written.workload == {"warmupRequests": 2}
        assert written.context["recording_flags"] == ["--enable-logging-iteration-details"]
        assert written.accounting.sent == 12
        assert written.accounting.warmup == 2
        assert [(each.client_index, each.closed, each.dropped) for each in written.segments] == [
            (0, "ordered", 0),
            (1, "ordered", 0),
        ]
        assert all(gate.passed for gate in written.gates.values())
        assert "2 warm-up requests left out of trace and step statistics" in written.notes
        assert len(written.config_hash) == len(written.engine_hash) == 64

    def test_termination_message_is_the_status(self, pod: Pod) -> None:
        pod.start()
        published = pod.job.run(pod.load)
        message = success_message(published)
        assert len(message) <= 4096
        status = CaptureSummary.model_validate(json.loads(message))
        assert status.requests.completed == 12
        assert status.path == "team/demo/as-deployed/1"
        assert status.files is not None
        assert {file.name for file in status.files} == {"trace.jsonl", "step-stats.jsonl", "client.jsonl"}

    def test_log_ends_with_summary_equation_and_place(self, pod: Pod) -> None:
        pod.start()
        lines = report(pod.job.run(pod.load)).splitlines()
        assert lines[-2:] == [
            "12 sent = 0 HTTP-rejected + 0 never admitted + 12 in the engine (completed 12)",
            "team/demo/as-deployed/1",
        ]

    def test_counters_of_the_engine_are_kept_and_compared(self, pod: Pod) -> None:
        async def load(settings: RunSettings, folder: Path, stop: Stop) -> Result:
            await pod.load(settings, folder, stop)
            return Result(MetricsDelta(240, SpeculationReading(1, 4, 3, (2, 1))))

        pod.start()
        failure = failure_of(pod, load)
        assert failure.reason == "ValidationFailed"
        assert "(1, 4, 3) on /metrics" in failure.message

    def test_why_there_are_no_counters_is_noted(self, pod: Pod) -> None:
        pod.start()
        assert any("not compared: not asked" in note for note in pod.job.run(pod.load).manifest.notes)

    def test_steps_that_were_not_asked_for_are_not_missed(self, tmp_path: Path, engine_url: str) -> None:
        pod = Pod(tmp_path, engine_url, record={"tokenIds": False, "stepStats": False})
        for lines in pod.recording.segments:
            lines[:] = [line for line in lines if line["k"] != "step"]
            lines[0]["steps"], lines[-1]["steps"] = False, 0
        pod.start()
        gates = pod.job.run(pod.load).manifest.gates
        pod.end()
        assert not {"missing_steps", "step_counters"} & set(gates)
        assert validate_capture(pod.places.final).passed

    def test_image_that_the_node_runs(self, pod: Pod, tmp_path: Path) -> None:
        pod.start()
        file = tmp_path / "engine-image-id"
        image_id = f"docker.io/vllm/vllm-openai@sha256:{'a' * 64}"
        file.write_text(f"uid-1 {image_id}\n")
        pod.job = Job(pod.environment, PATIENT, file)
        manifest = pod.job.run(pod.load).manifest
        assert manifest.image_id == image_id
        assert not any("digest" in note for note in manifest.notes)
        written = read_lines_of(pod.places.final / "trace.jsonl")[0]["meta"]
        assert written["engine_hash"] == manifest.engine_hash
        first = msgspec.convert(pod.recording.segments[0][0], Header)
        assert manifest.engine_hash == engine_hash(first, manifest.context, image_id)

    def test_image_that_nobody_says_in_time(self, pod: Pod, tmp_path: Path) -> None:
        pod.start()
        (tmp_path / "engine-image-id").write_text("uid-0 docker.io/vllm/vllm-openai@sha256:0")
        pod.job = Job(pod.environment, replace(PATIENT, image_id_s=0), tmp_path / "engine-image-id")
        manifest = pod.job.run(pod.load).manifest
        assert manifest.image_id is None
        assert any("the digest of the engine's image is not known" in note for note in manifest.notes)

    def test_settings_go_to_the_load(self, pod: Pod) -> None:
        given: list[RunSettings] = []

        async def load(settings: RunSettings, folder: Path, stop: Stop) -> Result:
            given.append(settings)
            return await pod.load(settings, folder, stop)

        pod.start()
        pod.job.run(load)
        assert given[0].workload.warmup_requests == 2


async def waits_for_stop(pod: Pod, folder: Path, stop: Stop) -> Result:
    """A load that goes on until it is told to end."""
    write_lines(folder / "client.jsonl.part", pod.recording.clients)
    async with asyncio.timeout(60):
        await stop.wait()
    return Result()


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
        assert "EngineCoreOutput lacks new_token_ids: capture an engine that it knows" in failure.message

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


class TestAttemptAfterPublication:
    """A pod that dies after the renaming has said nothing, and another one is started."""

    @pytest.fixture
    def published(self, pod: Pod) -> Published:
        pod.start()
        return pod.job.run(pod.load)

    @staticmethod
    async def never(_settings: RunSettings, _folder: Path, _stop: Stop) -> Result:
        raise AssertionError("nothing is sent again")

    def test_it_says_what_was_published(self, pod: Pod, published: Published) -> None:
        # No engine answers: there is nothing to ask it.
        second = Job(environment(pod.places.root, "http://127.0.0.1:9", "uid-2"), NONE)
        second.prepare(pod.recorder)
        found = second.run(self.never)
        assert success_message(found) == success_message(published)
        assert report(found) == report(published)
        assert not second.places.folder.exists(), "it is no attempt"
        assert verify(pod.places.final) == []

    def test_it_gives_a_whole_one_its_name(self, pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
        """Killed just before the renaming: nothing is loaded again, and nothing is lost."""
        rename = os.rename

        def dies(before: Path, after: Path) -> None:
            if after == pod.places.final:
                raise KeyboardInterrupt
            rename(before, after)

        pod.start()
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", dies)
            with pytest.raises(KeyboardInterrupt):
                pod.job.run(pod.load)
        assert pod.label.reason == "Unfinished"
        second = Job(environment(pod.places.root, "http://127.0.0.1:9", "uid-2"), NONE)
        second.prepare(pod.recorder)
        assert second.run(self.never).summary.records == 12
        assert validate_capture(pod.places.final).problems == []
        assert not second.places.folder.exists(), "it is no attempt"

    @pytest.mark.parametrize("uid", ["capture-2", None], ids=["another", "unknown"])
    @pytest.mark.usefixtures("published")
    def test_files_of_another_capture_of_that_name_are_not_its_own(self, pod: Pod, uid: str | None) -> None:
        second = Job(environment(pod.places.root, "http://127.0.0.1:9", "uid-2", capture_uid=uid), NONE)
        with pytest.raises(CaptureError) as failure:
            second.prepare(pod.recorder)
        assert failure.value.reason == "AlreadyPublished"

    def test_a_folder_that_nobody_understands_is_not_its_own(self, pod: Pod) -> None:
        pod.places.final.mkdir(parents=True)
        (pod.places.final / "manifest.json").write_text("{")
        with pytest.raises(CaptureError) as failure:
            pod.job.prepare(pod.recorder)
        assert failure.value.reason == "AlreadyPublished"


def test_captures_that_share_a_volume_do_not_touch_each_other(tmp_path: Path, engine_url: str) -> None:
    """Both are under way at once; one is published, and the other fails."""
    first = Pod(tmp_path, engine_url)
    second = Pod(
        tmp_path, engine_url, Recording(Scenario(servers=2, capture="other")), attempt="uid-2", capture="other"
    )

    async def fails(settings: RunSettings, folder: Path, stop: Stop) -> Result:
        # The other one begins, is loaded and ends while this one is under load.
        await asyncio.to_thread(first.start)
        await first.load(settings, first.places.folder, stop)
        raise OSError(errno.ENOSPC, "No space left on device")

    second.start()
    assert failure_of(second, fails).reason == "DiskFull"
    first.job.run(first.load)
    first.end()
    second.end()
    assert validate_capture(first.places.final).problems == []
    assert verify(first.places.final) == []
    assert second.label.capture == "other"
    assert len(list(second.places.segments.glob("segment-*.jsonl"))) == 2


class TestMessages:
    def test_error_fits_and_is_json(self) -> None:
        message = error_message(CaptureError("Failed", "ü\n\"'" * 5000))
        assert len(message) <= 4096
        assert json.loads(message)["error"]["reason"] == "Failed"

    def test_short_error_is_whole(self) -> None:
        message = json.loads(error_message(CaptureError("Failed", "why")))
        assert message == {"error": {"reason": "Failed", "message": "why"}}
