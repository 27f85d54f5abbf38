"""A capture from inside its pod: what is published, and what is left where it fails."""

import asyncio
import errno
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from specdecode_operator.api.capture_status import CaptureSummary
from specdecode_operator.capture.files.config_hash import engine_hash
from specdecode_operator.capture.files.formats import CaptureError, Manifest
from specdecode_operator.capture.files.publish import verify
from specdecode_operator.capture.files.validate import validate_capture
from specdecode_operator.capture.job.entrypoint import Job, error_message, report, success_message
from specdecode_operator.capture.job.finish import Published
from specdecode_operator.capture.load.engine_ready import MetricsDelta
from specdecode_operator.capture.load.run_settings import RunSettings
from specdecode_operator.capture.load.shutdown import Stop
from specdecode_operator.capture.recorder.segment_format import Header
from specdecode_operator.vllm.engine_metrics import SpeculationReading
from tests.support.capture_pods import NONE, PATIENT, Pod, Result, environment
from tests.support.recordings import Recording, Scenario, read_lines_of, write_lines

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

    @pytest.mark.parametrize(
        ("vllm", "tried", "planned", "told"),
        [
            ("0.33.0", True, "0.33", []),
            ("0.33.1.dev5+g1234", True, None, []),
            ("0.99.1", False, "0.99", ["nobody tried the recorder with vLLM 0.99.1"]),
            (
                "0.32.1+cpu",
                True,
                "0.33",
                ["is vLLM 0.32.1+cpu, and was planned and started as spec.engine.version 0.33"],
            ),
            ("0.1.dev1+g1234", False, "0.33", ["nobody tried the recorder with vLLM 0.1.dev1+g1234"]),
            ("9.9" + "\n" * 90, False, "0.33", ["nobody tried", "is vLLM 9.9\\n"]),
        ],
    )
    def test_a_version_that_is_in_doubt_is_told(
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

    def test_files_of_a_newer_operator_are_told(self, pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
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
    def test_acceptance_of_random_prompts_is_in_doubt(self, pod: Pod, prompts: dict[str, object], random: bool) -> None:
        pod.job.parts[0].asked.workload["prompts"] = prompts
        pod.start()
        published = pod.job.run(pod.load)
        notes = CaptureSummary.model_validate(json.loads(success_message(published))).prompt_notes or []
        assert len(notes) == random
        assert published.manifest.notes[: len(notes)] == notes
        assert all("random tokens" in note and "your own" in note for note in notes)

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

    def test_what_the_engine_allocated_is_kept(self, pod: Pod) -> None:
        async def load(settings: RunSettings, folder: Path, stop: Stop) -> Result:
            await pod.load(settings, folder, stop)
            return Result(MetricsDelta(240, None, num_gpu_blocks=70, kv_cache_tokens=1120))

        pod.start()
        counters = pod.job.run(load).manifest.engine_counters
        assert counters is not None
        assert (counters.num_gpu_blocks, counters.kv_cache_tokens) == (70, 1120)

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
