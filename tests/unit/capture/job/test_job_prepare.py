"""What comes before the engine in a capture's pod."""

import errno
import os
from pathlib import Path

import pytest

from specdecode_operator.capture.files.formats import CaptureError
from specdecode_operator.capture.job import pod_files as job_prepare
from specdecode_operator.capture.job.entrypoint import Job, prepare_job
from tests.support.capture_pods import Pod, environment
from tests.unit.capture.conftest import synced_paths


class TestPrepare:
    def test_folders_label_and_recorder(self, pod: Pod) -> None:
        pod.job.prepare(pod.recorder)
        assert pod.places.segments == pod.places.root / "team/demo/as-deployed/1.part-uid-1/segments"
        # The engine runs as another user.
        assert {path.stat().st_mode & 0o777 for path in (pod.places.folder, pod.places.segments)} == {0o777}
        assert pod.label.reason == "Unfinished"
        assert list(pod.recorder.glob("*.dist-info/entry_points.txt"))

    def test_names_of_new_folders_are_on_the_disk(self, pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file that is flushed is lost with the name of its folder all the same."""
        synced = synced_paths(monkeypatch)
        pod.job.prepare(pod.recorder)
        folder = pod.places.folder
        assert {folder, *list(folder.parents)[:4]} <= synced
        assert pod.places.root in synced

    def test_finished_capture_is_refused(self, pod: Pod) -> None:
        pod.places.final.mkdir(parents=True)
        with pytest.raises(CaptureError, match="never overwritten") as failure:
            pod.job.prepare(pod.recorder)
        assert failure.value.reason == "AlreadyPublished"

    def test_attempt_that_was_begun_is_not_begun_again(self, pod: Pod) -> None:
        pod.start()
        with pytest.raises(CaptureError) as failure:
            pod.job.prepare(pod.recorder)
        assert failure.value.reason == "AttemptInterrupted"

    def test_container_that_is_run_again_before_the_engine(self, pod: Pod) -> None:
        pod.job.prepare(pod.recorder)
        pod.job.prepare(pod.recorder)

    def test_another_attempt_stays_as_it_is(self, pod: Pod, engine_url: str) -> None:
        pod.start()
        second = Pod(pod.places.root, engine_url, attempt="uid-2")
        second.start()
        second.job.run(second.load)
        second.end()
        assert pod.label.reason == "Unfinished"
        assert len(list(pod.places.segments.glob("segment-*.jsonl"))) == 2

    def test_no_volume(self, tmp_path: Path, engine_url: str) -> None:
        with pytest.raises(CaptureError) as failure:
            Job(environment(tmp_path / "absent", engine_url)).prepare(tmp_path / "recorder")
        assert failure.value.reason == "VolumeMissing"

    def test_volume_that_is_too_small(self, pod: Pod) -> None:
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
    def test_volume_that_refuses(self, pod: Pod, monkeypatch: pytest.MonkeyPatch, code: int, reason: str) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(Path, "mkdir", refuse)
        with pytest.raises(CaptureError) as failure:
            pod.job.prepare(pod.recorder)
        assert failure.value.reason == reason

    def test_a_dataset_is_read_before_an_engine_starts_for_it(self, tmp_path: Path, engine_url: str) -> None:
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
    def test_bad_settings_are_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], named: str
    ) -> None:
        for name, value in (environment(tmp_path, "http://127.0.0.1:1") | changes).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(CaptureError, match=named) as failure:
            prepare_job(tmp_path / "recorder")
        assert failure.value.reason == "InvalidSettings"
