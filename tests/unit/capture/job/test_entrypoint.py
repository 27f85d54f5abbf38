"""The Job of a capture, from its start to published files."""

import asyncio
import errno
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specdecode_operator.api.capture import Regressed, RegressionStatus
from specdecode_operator.api.capture_status import CaptureSummary
from specdecode_operator.capture.comparison import regression
from specdecode_operator.capture.comparison.regression import AGAINST_VARIABLE, regression_status, with_regression
from specdecode_operator.capture.files.config_hash import engine_hash
from specdecode_operator.capture.files.formats import MESSAGE_BYTES, CaptureError, Manifest
from specdecode_operator.capture.files.publish import verify
from specdecode_operator.capture.files.segments import recorders_closed
from specdecode_operator.capture.files.validate import validate_capture
from specdecode_operator.capture.job import finish as job_finish
from specdecode_operator.capture.job import pod_files as job_prepare
from specdecode_operator.capture.job.entrypoint import Job, error_message, prepare_job, report, success_message
from specdecode_operator.capture.job.finish import Published
from specdecode_operator.capture.job_status import read_regression, read_summary
from specdecode_operator.capture.load.datasets import BadDatasetError
from specdecode_operator.capture.load.engine_ready import MetricsDelta
from specdecode_operator.capture.load.run_settings import RunSettings
from specdecode_operator.capture.load.shutdown import Stop
from specdecode_operator.capture.recorder.segment_format import Header
from specdecode_operator.vllm.engine_metrics import SpeculationReading
from tests.support.capture_pods import NONE, PATIENT, HealthyEngine, Pod, Result, environment
from tests.support.captures import capture_pod, ended
from tests.support.compared_captures import rewrite
from tests.support.recording_engine import RecordingEngine
from tests.support.recordings import ZERO_S, Recording, Scenario, closed, header, read_lines_of, write_lines
from tests.support.unchanged_pairs import ServedEngine, published, with_step_time

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
    def test_published_files_are_complete_and_valid(self, pod: Pod) -> None:
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

    def test_manifest_describes_the_run(self, pod: Pod) -> None:
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

    @pytest.mark.parametrize(
        ("vllm", "tried", "planned", "told"),
        [
            ("0.33.0", True, "0.33", []),
            ("0.33.1.dev5+g1234", True, None, []),
            ("0.99.1", False, "0.99", ["the recorder is not tested with vLLM 0.99.1"]),
            (
                "0.32.1+cpu",
                True,
                "0.33",
                ["is vLLM 0.32.1+cpu, but was planned and started as version 0.33"],
            ),
            ("0.1.dev1+g1234", False, "0.33", ["the recorder is not tested with vLLM 0.1.dev1+g1234"]),
            ("9.9" + "\n" * 90, False, "0.33", ["is not tested with", "is vLLM 9.9\\n"]),
        ],
    )
    def test_untested_or_unplanned_vllm_version_is_noted(
        self, pod: Pod, vllm: str, tried: bool, planned: str | None, told: list[str]
    ) -> None:
        for lines in pod.recording.segments:
            lines[0] |= {"vllm": vllm, "recorder_tried": tried}
        pod.job.parts[0].asked.context["engine_version"] = planned
        pod.start()
        published = pod.job.run(pod.load)
        assert (published.manifest.vllm, published.manifest.recorder_tried) == (vllm, tried)
        status = CaptureSummary.model_validate(json.loads(success_message(published)))
        written = vllm.replace("\n", "\\n")
        assert status.engine_version == (written if len(written) <= 64 else f"{written[:63]}…")
        notes = status.engine_notes or []
        assert len(notes) == len(told)
        assert all(part in note for part, note in zip(told, notes, strict=True))
        assert published.manifest.notes[: len(notes)] == notes
        assert validate_capture(pod.places.final).files[0].notes == notes

    def test_files_of_newer_operator_are_noted(self, pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
        pod.start()
        made_by = pod.job.run(pod.load).manifest.specdecode
        assert validate_capture(pod.places.final).files[0].notes == []
        monkeypatch.setattr("specdecode_operator.capture.files.validate.__version__", "0.0.9")
        (note,) = validate_capture(pod.places.final).files[0].notes
        assert note.startswith(f"made by {made_by}, newer than this 0.0.9")

    @pytest.mark.parametrize(
        ("prompts", "random"),
        [
            ({"synthetic": {"promptTokens": 12}}, True),
            ({"dataset": {"path": "a", "format": "Trace"}}, True),
            ({"dataset": {"path": "a.jsonl", "format": "JSONL"}}, False),
        ],
    )
    def test_random_prompts_are_noted(self, pod: Pod, prompts: dict[str, object], random: bool) -> None:
        pod.job.parts[0].asked.workload["prompts"] = prompts
        pod.start()
        published = pod.job.run(pod.load)
        notes = CaptureSummary.model_validate(json.loads(success_message(published))).prompt_notes or []
        assert len(notes) == random
        assert published.manifest.notes[: len(notes)] == notes
        assert all("random tokens" in note and "your own" in note for note in notes)

    def test_termination_message_parses_as_capture_summary(self, pod: Pod) -> None:
        pod.start()
        published = pod.job.run(pod.load)
        message = success_message(published)
        assert len(message) <= 4096
        status = CaptureSummary.model_validate(json.loads(message))
        assert status.requests.completed == 12
        assert status.path == "team/demo/as-deployed/1"
        assert status.files is not None
        assert {file.name for file in status.files} == {"trace.jsonl", "step-stats.jsonl", "client.jsonl"}

    def test_log_ends_with_accounting_equation_and_path(self, pod: Pod) -> None:
        pod.start()
        lines = report(pod.job.run(pod.load)).splitlines()
        assert lines[-2:] == [
            "12 sent = 0 HTTP-rejected + 0 never admitted + 12 in the engine (completed 12)",
            "team/demo/as-deployed/1",
        ]

    def test_different_engine_counters_fail_validation(self, pod: Pod) -> None:
        async def load(settings: RunSettings, folder: Path, stop: Stop) -> Result:
            await pod.load(settings, folder, stop)
            return Result(MetricsDelta(240, SpeculationReading(1, 4, 3, (2, 1))))

        pod.start()
        failure = failure_of(pod, load)
        assert failure.reason == "ValidationFailed"
        assert "(1, 4, 3) on /metrics" in failure.message

    def test_manifest_has_kv_cache_size_of_engine(self, pod: Pod) -> None:
        async def load(settings: RunSettings, folder: Path, stop: Stop) -> Result:
            await pod.load(settings, folder, stop)
            return Result(MetricsDelta(240, None, num_gpu_blocks=70, kv_cache_tokens=1120))

        pod.start()
        counters = pod.job.run(load).manifest.engine_counters
        assert counters is not None
        assert (counters.num_gpu_blocks, counters.kv_cache_tokens) == (70, 1120)

    def test_missing_engine_counters_are_noted_with_reason(self, pod: Pod) -> None:
        pod.start()
        assert any("not compared: not asked" in note for note in pod.job.run(pod.load).manifest.notes)

    def test_capture_without_step_stats_passes_without_step_gates(self, tmp_path: Path, engine_url: str) -> None:
        pod = Pod(tmp_path, engine_url, record={"tokenIds": False, "stepStats": False})
        for lines in pod.recording.segments:
            lines[:] = [line for line in lines if line["k"] != "step"]
            lines[0]["steps"], lines[-1]["steps"] = False, 0
        pod.start()
        gates = pod.job.run(pod.load).manifest.gates
        pod.end()
        assert not {"missing_steps", "step_counters"} & set(gates)
        assert validate_capture(pod.places.final).passed

    def test_image_id_of_node_is_in_manifest_and_engine_hash(self, pod: Pod, tmp_path: Path) -> None:
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

    def test_settings_are_passed_to_load(self, pod: Pod) -> None:
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


class TestAttemptAfterPublication:
    """A pod that dies after the renaming has said nothing, and another one is started."""

    @pytest.fixture
    def published(self, pod: Pod) -> Published:
        pod.start()
        return pod.job.run(pod.load)

    @staticmethod
    async def never(_settings: RunSettings, _folder: Path, _stop: Stop) -> Result:
        raise AssertionError("nothing is sent again")

    def test_later_attempt_reports_published_capture(self, pod: Pod, published: Published) -> None:
        # No engine answers: there is nothing to ask it.
        second = Job(environment(pod.places.root, "http://127.0.0.1:9", "uid-2"), NONE)
        second.prepare(pod.recorder)
        found = second.run(self.never)
        assert success_message(found) == success_message(published)
        assert report(found) == report(published)
        assert not second.places.folder.exists(), "it is no attempt"
        assert verify(pod.places.final) == []

    def test_later_attempt_publishes_complete_earlier_one(self, pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
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
    def test_published_files_of_another_capture_are_refused(self, pod: Pod, uid: str | None) -> None:
        second = Job(environment(pod.places.root, "http://127.0.0.1:9", "uid-2", capture_uid=uid), NONE)
        with pytest.raises(CaptureError) as failure:
            second.prepare(pod.recorder)
        assert failure.value.reason == "AlreadyPublished"

    def test_published_folder_with_unreadable_manifest_is_refused(self, pod: Pod) -> None:
        pod.places.final.mkdir(parents=True)
        (pod.places.final / "manifest.json").write_text("{")
        with pytest.raises(CaptureError) as failure:
            pod.job.prepare(pod.recorder)
        assert failure.value.reason == "AlreadyPublished"


def test_concurrent_captures_on_one_volume_are_independent(tmp_path: Path, engine_url: str) -> None:
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
    def test_error_message_is_json_of_at_most_4096_bytes(self) -> None:
        message = error_message(CaptureError("Failed", "ü\n\"'" * 5000))
        assert len(message) <= 4096
        assert json.loads(message)["error"]["reason"] == "Failed"


# A capture that fails inside its pod: the reason is said, and nothing is published.


class TestFailures:
    def test_unready_engine_fails_capture(self, tmp_path: Path) -> None:
        pod = Pod(tmp_path, "http://127.0.0.1:9")
        pod.job = Job(environment(tmp_path, "http://127.0.0.1:9", deadline_seconds=MOMENT_S), NONE)
        pod.start()
        failure = failure_of(pod)
        pod.end()
        assert failure.reason == "EngineNotReady"

    def test_missing_recorder_fails_capture(self, pod: Pod) -> None:
        pod.start()
        for path in pod.places.segments.glob("*1.jsonl"):
            path.unlink()
        pod.job = Job(pod.environment, NONE)
        failure = failure_of(pod)
        assert failure.reason == "RecorderMissing"
        assert failure.message.startswith("1 API servers record")

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    def test_full_volume_at_recorder_start_is_disk_full(
        self, pod: Pod, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
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

    def test_recorder_off_for_unknown_engine_fails_capture(self, pod: Pod) -> None:
        pod.start(last_lines=False)
        for lines in pod.recording.segments:
            pod.append(lines[0], {"k": "off", "reason": "EngineCoreOutput lacks new_token_ids"})
            pod.append(lines[0], closed(0, 0, reason="unknown_shape"))
        failure = failure_of(pod)
        assert failure.reason == "RecorderOff"
        assert failure.message == (
            "the recorder turned itself off, but the engine (vLLM 0.32.0) kept running: EngineCoreOutput lacks"
            " new_token_ids: capture a version that it is tested with, vLLM 0.28 to 0.33 (spec.engine of the"
            " deployment)"
        )

    @pytest.mark.parametrize(
        ("closed_by", "reason"),
        [("disk_full", "DiskFull"), ("exit", "EngineExited"), ("write_error", "RecorderOff")],
    )
    def test_recorder_ending_under_load_fails_capture(self, pod: Pod, closed_by: str, reason: str) -> None:
        async def load(_settings: RunSettings, folder: Path, stop: Stop) -> Result:
            pod.append(pod.recording.segments[1][0], closed(0, 0, reason=closed_by))
            return await waits_for_stop(pod, folder, stop)

        pod.start(last_lines=False)
        assert failure_of(pod, load).reason == reason

    def test_engine_restart_under_load_fails_capture(self, pod: Pod) -> None:
        async def load(_settings: RunSettings, folder: Path, stop: Stop) -> Result:
            first = header(0, 2, boot="new", pid=500, monotonic_s=ZERO_S + 5)
            write_lines(pod.places.segments / "segment-new-500.jsonl", [first])
            return await waits_for_stop(pod, folder, stop)

        pod.start()
        assert failure_of(pod, load).reason == "EngineRestarted"

    def test_engine_killed_under_load_fails_capture(self, tmp_path: Path) -> None:
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
        assert "its port is closed" in failure.message

    def test_unreadable_segment_fails_capture(self, pod: Pod) -> None:
        async def load(_settings: RunSettings, folder: Path, stop: Stop) -> Result:
            write_lines(pod.places.segments / "segment-other-1.jsonl", [{"k": "header", "schema": "two"}])
            return await waits_for_stop(pod, folder, stop)

        pod.start()
        assert failure_of(pod, load).reason == "SegmentUnreadable"

    def test_recorder_that_never_finishes_fails_capture(self, pod: Pod) -> None:
        pod.start(last_lines=False)
        pod.job = Job(pod.environment, NONE)
        assert failure_of(pod).reason == "RecorderNotClosed"

    def test_lost_lines_fail_the_capture(self, pod: Pod) -> None:
        pod.recording.segments[0][-1]["dropped"] = 5
        pod.start()
        failure = failure_of(pod)
        assert failure.reason == "ValidationFailed"
        assert "dropped: 5 lines lost, counted by the recorder" in failure.message
        assert "trace.jsonl.part" in pod.label.files

    def test_unaccounted_request_is_named_in_failure(self, pod: Pod) -> None:
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
    def test_load_without_answered_requests_is_nothing_recorded(
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

    def test_load_without_requests_is_nothing_recorded(self, pod: Pod) -> None:
        for number, lines in enumerate(pod.recording.segments):
            lines[:] = [header(number, 2), closed(0, 0)]
        pod.recording.clients.clear()
        pod.start()
        failure = failure_of(pod)
        assert (failure.reason, failure.message) == ("NothingRecorded", "no request got a token (none was due)")

    def test_lost_steps_fail_capture(self, pod: Pod) -> None:
        for lines in pod.recording.segments:
            lines[:] = [line for line in lines if line["k"] != "step"]
            lines[-1]["steps"] = 0
        pod.start()
        assert "missing_steps: 12 requests without engine steps" in failure_of(pod).message

    def test_sigterm_cancels_capture(self, pod: Pod) -> None:
        async def load(_settings: RunSettings, folder: Path, stop: Stop) -> Result:
            os.kill(os.getpid(), signal.SIGTERM)
            return await waits_for_stop(pod, folder, stop)

        pod.start()
        pod.job = Job(pod.environment, replace(PATIENT, closed_anyway_s=60))
        failure = failure_of(pod, load)
        assert (failure.reason, failure.message) == ("Cancelled", "stopped before its end: SIGTERM received")
        assert recorders_closed(pod.places.segments), "what was recorded is whole nevertheless"
        assert pod.label.files["client.jsonl.part"] > 0

    def test_load_beyond_deadline_fails_capture(self, tmp_path: Path, engine_url: str) -> None:
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
    def test_load_error_fails_capture_with_its_reason(self, pod: Pod, error: Exception, reason: str) -> None:
        async def load(_settings: RunSettings, _folder: Path, _stop: Stop) -> Result:
            raise error

        pod.start()
        failure = failure_of(pod, load)
        assert failure.reason == reason
        assert str(error) in failure.message or reason == "DiskFull"

    def test_full_disk_while_writing_client_log_is_disk_full(self, pod: Pod) -> None:
        """Its writing thread sets the stop with the reason, and closing it fails without a number."""

        async def load(_settings: RunSettings, _folder: Path, stop: Stop) -> Result:
            stop.set("/capture/client.jsonl.part: No space left on device")
            raise OSError("not all requests could be written")

        pod.start()
        assert failure_of(pod, load).reason == "DiskFull"

    def test_full_disk_while_merging_is_disk_full(self, pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", "trace.jsonl.part")

        monkeypatch.setattr(job_finish, "merge", full)
        pod.start()
        failure = failure_of(pod)
        assert failure.reason == "DiskFull"
        assert "trace.jsonl.part" in failure.message


# The job and the load generator together, against a server on the loopback that records what it answers.

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


def test_sent_requests_are_published(tmp_path: Path, recording_engine: RecordingEngine) -> None:
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


# What comes before the engine in a capture's pod.


class TestPrepare:
    def test_prepare_makes_folders_label_and_recorder(self, pod: Pod) -> None:
        pod.job.prepare(pod.recorder)
        assert pod.places.segments == pod.places.root / "team/demo/as-deployed/1.part-uid-1/segments"
        # The engine runs as another user.
        assert {path.stat().st_mode & 0o777 for path in (pod.places.folder, pod.places.segments)} == {0o777}
        assert pod.label.reason == "Unfinished"
        assert list(pod.recorder.glob("*.dist-info/entry_points.txt"))

    def test_finished_capture_is_refused(self, pod: Pod) -> None:
        pod.places.final.mkdir(parents=True)
        with pytest.raises(CaptureError, match="never overwritten") as failure:
            pod.job.prepare(pod.recorder)
        assert failure.value.reason == "AlreadyPublished"

    def test_interrupted_attempt_is_not_restarted(self, pod: Pod) -> None:
        pod.start()
        with pytest.raises(CaptureError) as failure:
            pod.job.prepare(pod.recorder)
        assert failure.value.reason == "AttemptInterrupted"

    def test_prepare_can_run_again_before_engine_starts(self, pod: Pod) -> None:
        pod.job.prepare(pod.recorder)
        pod.job.prepare(pod.recorder)

    def test_files_of_earlier_attempt_are_kept(self, pod: Pod, engine_url: str) -> None:
        pod.start()
        second = Pod(pod.places.root, engine_url, attempt="uid-2")
        second.start()
        second.job.run(second.load)
        second.end()
        assert pod.label.reason == "Unfinished"
        assert len(list(pod.places.segments.glob("segment-*.jsonl"))) == 2

    def test_missing_volume_is_refused(self, tmp_path: Path, engine_url: str) -> None:
        with pytest.raises(CaptureError) as failure:
            Job(environment(tmp_path / "absent", engine_url)).prepare(tmp_path / "recorder")
        assert failure.value.reason == "VolumeMissing"

    def test_too_small_volume_is_refused(self, pod: Pod) -> None:
        with pytest.raises(CaptureError, match="MiB free of the") as failure:
            job_prepare.look_at_volume(pod.places, smallest_free_bytes=2**60)
        assert failure.value.reason == "VolumeTooSmall"

    @pytest.mark.parametrize(
        ("code", "reason"),
        [
            (errno.EROFS, "VolumeReadOnly"),
            (errno.EACCES, "VolumeNotWritable"),
            (errno.ENOSPC, "DiskFull"),
            (errno.EDQUOT, "DiskFull"),
            (errno.EIO, "VolumeFailed"),
        ],
    )
    def test_unwritable_volume_is_refused_with_reason(
        self, pod: Pod, monkeypatch: pytest.MonkeyPatch, code: int, reason: str
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(Path, "mkdir", refuse)
        with pytest.raises(CaptureError) as failure:
            pod.job.prepare(pod.recorder)
        assert failure.value.reason == reason

    def test_invalid_dataset_is_refused_before_engine_starts(self, tmp_path: Path, engine_url: str) -> None:
        dataset = {"path": "prompts.jsonl", "format": "JSONL", "promptField": "text"}
        workload = {"prompts": {"dataset": dataset}}
        pod = Pod(tmp_path / "volume", engine_url, workload=workload)
        pod.places.root.mkdir()
        mount = tmp_path / "dataset"
        mount.mkdir()
        for content, complaint in ((None, "does not exist"), ('{"prompt": "a"}\n', "set promptField to one of them")):
            if content is not None:
                (mount / "prompts.jsonl").write_text(content)
            with pytest.raises(CaptureError, match=complaint) as failure:
                pod.job.prepare(pod.recorder, mount)
            assert failure.value.reason == pod.label.reason == "InvalidDataset"
        (mount / "prompts.jsonl").write_text('{"text": "a"}\n')
        pod.job.prepare(pod.recorder, mount)
        assert pod.label.reason == "Unfinished"

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"SPECDECODE_CAPTURE": ""}, "SPECDECODE_CAPTURE"),
            ({"SPECDECODE_ATTEMPT": ""}, "SPECDECODE_ATTEMPT"),
            ({"SPECDECODE_CAPTURE": "{"}, "Invalid JSON"),
            ({"SPECDECODE_CAPTURE": '{"namespace": "a"}'}, "capture"),
        ],
    )
    def test_invalid_settings_are_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], named: str
    ) -> None:
        for name, value in (environment(tmp_path, "http://127.0.0.1:1") | changes).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(CaptureError, match=named) as failure:
            prepare_job(tmp_path / "recorder")
        assert failure.value.reason == "InvalidSettings"


# A capture that is held against a golden one judges itself at its end, and says so in its termination message.

WORKLOAD_JOB_AGAINST = {"phases": [{"name": "closed-1"}]}
ARM = Path("default/golden/as-deployed/1")
ZERO = {"bytes": 1, "lines": 1, "sha256": "0" * 64}
SLOWER = with_step_time(1.05)
TOLD = '{"capture": "golden", "folder": "default/golden", "limits": {"goodput": %d, "step_time": %d, "latency": 60}}'


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The volume of the golden capture, with its files."""
    published(ServedEngine().serve(tmp_path / "golden" / ARM, 1, requests=240), WORKLOAD_JOB_AGAINST)
    monkeypatch.setattr(regression, "AGAINST_MOUNT", str(tmp_path / "golden"))
    return tmp_path / "golden"


def _judged(folder: Path, limits: tuple[int, int] = (5, 5)) -> RegressionStatus:
    status = regression_status({AGAINST_VARIABLE: TOLD % limits}, folder)
    return RegressionStatus.parse(status)


def _new(tmp_path: Path, engine: ServedEngine = SLOWER, seed: int = 0, **workload: Any) -> Path:
    folder = tmp_path / "new" / "default" / "new" / "as-deployed" / "1"
    return published(engine.serve(folder, 2, requests=240), {**WORKLOAD_JOB_AGAINST, **workload}, seed).parent


def test_capture_without_golden_capture_is_not_judged() -> None:
    assert regression_status({}, Path("nowhere")) is None
    assert with_regression(b"{}", None) == b"{}"


def test_regression_lists_regressed_figures_first(volume: Path, tmp_path: Path) -> None:
    found = _judged(_new(tmp_path))
    assert (found.against, found.verdict) == ("golden", Regressed.REGRESSED)
    assert found.figures[0].verdict is Regressed.REGRESSED
    assert found.figures[-1].verdict is not Regressed.REGRESSED
    slow = next(each for each in found.figures if each.name == "step time with 1 running")
    assert (slow.golden[:4], slow.found[:3], slow.change[:2]) == ("10.5", "11.", "+5")


def test_regression_uses_given_limits(volume: Path, tmp_path: Path) -> None:
    assert _judged(_new(tmp_path), (40, 40)).verdict is Regressed.HOLDS


def test_golden_capture_of_another_workload_or_seed_is_not_comparable(volume: Path, tmp_path: Path) -> None:
    for name, folder in (
        ("workload", _new(tmp_path / "a", ServedEngine(), phases=[])),
        ("seed", _new(tmp_path / "b", ServedEngine(), 7)),
    ):
        found = _judged(folder)
        assert found.verdict is Regressed.NOT_COMPARABLE
        assert f"was made with another {name}: take a new golden capture" in found.message


def test_modified_or_missing_golden_files_are_not_comparable(volume: Path, tmp_path: Path) -> None:
    new = _new(tmp_path, ServedEngine())
    with (volume / ARM / "trace.jsonl").open("a") as trace:
        trace.write("\n")
    changed = _judged(new)
    assert changed.verdict is Regressed.NOT_COMPARABLE
    assert "trace.jsonl has" in changed.message
    assert changed.message.endswith("the golden capture was modified: record it again")
    for file in (volume / ARM).iterdir():
        file.unlink()
    assert "holds no capture" in _judged(new).message


def test_error_while_judging_is_not_comparable(volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(regression, "judge", breaks)
    found = _judged(_new(tmp_path, ServedEngine()))
    assert found.verdict is Regressed.NOT_COMPARABLE
    assert found.message == "judging failed: ZeroDivisionError: oops"


def test_termination_message_with_regression_fits_limit() -> None:
    figure = {"name": "n" * 90, "golden": "1" * 60, "found": "2" * 60, "change": "3" * 60, "verdict": "Regressed"}
    regression = {"against": "g" * 200, "verdict": "Regressed", "message": "m" * 1000, "figures": [figure] * 12}
    summary = {
        "requests": {"sent": 8, "completed": 8},
        "files": [{"name": "trace.jsonl", "bytes": 12, "lines": 9, "sha256": "0" * 64}] * 8,
        "path": "p" * 300,
    }
    message = with_regression(msgspec.json.encode(summary), regression)
    assert len(message) <= MESSAGE_BYTES
    pod = capture_pod(containerStatuses=[ended("load", 0, msgspec.json.decode(message))])
    kept, judged = read_summary(pod), read_regression(pod)
    assert kept is not None
    assert judged is not None
    assert (kept.requests.sent, kept.path, kept.files) == (8, "p" * 300, None)
    assert 0 < len(judged.figures) < 12


def test_golden_files_must_be_regular_files_of_the_capture(volume: Path, tmp_path: Path) -> None:
    new = _new(tmp_path, ServedEngine())
    rewrite(volume / ARM / "manifest.json", lambda each: {**each, "files": each["files"] | {"../zero": ZERO}})
    assert "../zero in manifest.json is not the name of a capture file" in _judged(new).message
    (volume / ARM / "zero").symlink_to("/dev/zero")
    rewrite(volume / ARM / "manifest.json", lambda each: {**each, "files": {"zero": ZERO}})
    assert "zero is not a regular file" in _judged(new).message
