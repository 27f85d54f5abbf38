"""Publication: whole or not there, whatever happens on the way."""

import errno
import gzip
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specdecode_operator.capture.files import publish as publishing
from specdecode_operator.capture.files.formats import CaptureError, FileEntry, Manifest, PartialManifest
from specdecode_operator.capture.files.publish import (
    file_entry,
    finish_publication,
    label_partial,
    publish,
    reject_finished,
    seal,
    verify,
)
from tests.support.manifests import published_manifest

NAMES = ("trace.jsonl", "step-stats.jsonl", "client.jsonl")
PARTIAL = PartialManifest(namespace="team", capture="demo", attempt="uid-1", reason="Unfinished", message="runs")


def manifest(files: dict[str, FileEntry], capture_uid: str = "capture-1") -> Manifest:
    return published_manifest(files=files, capture_uid=capture_uid)


def attempt(folder: Path) -> Path:
    """Make an attempt whose files are ready to be published."""
    made = folder / "1.part-uid-1"
    (made / "segments").mkdir(parents=True)
    (made / "segments" / "segment-a-1.jsonl").write_bytes(b"{}\n")
    for name in NAMES:
        (made / f"{name}.part").write_bytes(f'{{"in": "{name}"}}\n'.encode() * 3)
    label_partial(made, PARTIAL)
    return made


def publish_all(made: Path, final: Path) -> None:
    publish(made, final, manifest(seal(made)))


class TestPublish:
    def test_published_files_have_final_names_and_checksums(self, tmp_path: Path) -> None:
        publish_all(attempt(tmp_path), tmp_path / "1")
        assert {path.name for path in (tmp_path / "1").iterdir()} == {*NAMES, "manifest.json"}
        assert [path.name for path in tmp_path.iterdir()] == ["1"]
        assert verify(tmp_path / "1") == []

    def test_manifest_lists_file_sizes(self, tmp_path: Path) -> None:
        publish_all(attempt(tmp_path), tmp_path / "1")
        files = msgspec.json.decode((tmp_path / "1" / "manifest.json").read_bytes(), type=Manifest).files
        assert files["trace.jsonl"] == file_entry(tmp_path / "1" / "trace.jsonl")
        assert files["trace.jsonl"].lines == 3

    def test_finished_capture_is_never_overwritten(self, tmp_path: Path) -> None:
        publish_all(attempt(tmp_path), tmp_path / "1")
        before = (tmp_path / "1" / "manifest.json").read_bytes()
        again = attempt(tmp_path)
        with pytest.raises(CaptureError, match="never overwritten") as failure:
            publish_all(again, tmp_path / "1")
        assert failure.value.reason == "AlreadyPublished"
        assert again.exists()
        assert (tmp_path / "1" / "manifest.json").read_bytes() == before

    def test_second_of_two_concurrent_attempts_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The other one appears after the check, in the last moment: the rename decides."""
        publish_all(attempt(tmp_path), tmp_path / "1")
        monkeypatch.setattr(publishing, "reject_finished", lambda _: None)
        second = attempt(tmp_path)
        with pytest.raises(CaptureError, match="never overwritten"):
            publish_all(second, tmp_path / "1")
        assert second.exists()
        assert verify(tmp_path / "1") == []

    def test_reject_finished_fails_if_capture_exists(self, tmp_path: Path) -> None:
        reject_finished(tmp_path / "1")
        (tmp_path / "1").mkdir()
        with pytest.raises(CaptureError):
            reject_finished(tmp_path / "1")


class _KilledError(BaseException):
    """Like a SIGKILL: nothing catches it."""


CALLS = ((os, "rename"), (os, "fsync"), (os, "open"), (os, "unlink"), (os, "rmdir"), (io, "open"))


@contextmanager
def failing(number: int, error: BaseException) -> Iterator[list[str]]:
    """Let the call of that number fail, of all that change the volume or flush it; yield what was called."""
    called: list[str] = []

    def wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            called.append(name)
            if len(called) == number:
                raise error
            return original(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in CALLS:
            patch.setattr(module, name, wrapped(name, getattr(module, name)))
        yield called


def steps_of_publication(folder: Path) -> int:
    made = attempt(folder)
    with failing(0, _KilledError()) as called:
        publish_all(made, folder / "1")
    return len(called)


class TestKilled:
    def test_publication_killed_at_any_step_is_whole_or_absent(self, tmp_path: Path) -> None:
        steps = steps_of_publication(tmp_path / "whole")
        assert steps > 20
        published = []
        for number in range(1, steps + 1):
            folder = tmp_path / str(number)
            made = attempt(folder)
            with pytest.raises(_KilledError), failing(number, _KilledError()):
                publish_all(made, folder / "1")
            assert_whole_or_absent(folder)
            published.append((folder / "1").exists())
            assert_another_attempt_can_follow(folder)
        # It appears once, late, and stays: nothing but the last flush and the label is left then.
        assert published == sorted(published)
        assert published[-1]
        assert published.count(True) <= 4

    def test_next_attempt_publishes_complete_killed_one(self, tmp_path: Path) -> None:
        """Killed at any step: from the manifest on, the next attempt publishes what is there."""
        steps = steps_of_publication(tmp_path / "whole")
        finished = []
        for number in range(1, steps + 1):
            folder = tmp_path / str(number)
            made = attempt(folder)
            with pytest.raises(_KilledError), failing(number, _KilledError()):
                publish_all(made, folder / "1")
            whole = (folder / "1").exists() or (made / "manifest.json").exists()
            finish_publication(folder / "1", "capture-1")
            finished.append((folder / "1").exists())
            assert finished[-1] == whole
            if whole:
                assert {path.name for path in (folder / "1").iterdir()} == {*NAMES, "manifest.json"}
                assert verify(folder / "1") == []
        assert finished.count(True) > 5

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
    def test_publication_is_whole_or_absent_after_volume_error(self, tmp_path: Path, code: int) -> None:
        steps = steps_of_publication(tmp_path / "whole")
        for number in range(1, steps + 1):
            folder = tmp_path / str(number)
            made = attempt(folder)
            with failing(number, OSError(code, os.strerror(code))), suppress(OSError):
                publish_all(made, folder / "1")
            assert_whole_or_absent(folder)


class TestFinishPublication:
    """Of an attempt that was killed just before the last rename."""

    @pytest.fixture
    def whole(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        made = attempt(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(publishing, "_appear", _killed)
            with pytest.raises(_KilledError):
                publish_all(made, tmp_path / "1")
        return made

    def test_attempt_of_another_capture_is_not_published(self, whole: Path) -> None:
        finish_publication(whole.with_name("1"), "capture-2")
        assert whole.exists()

    def test_damaged_attempt_is_not_published(self, whole: Path) -> None:
        (whole / "trace.jsonl").write_bytes(b"")
        finish_publication(whole.with_name("1"), "capture-1")
        assert (whole / "manifest.partial.json").exists()

    def test_attempt_is_not_published_over_existing_folder(self, whole: Path) -> None:
        whole.with_name("1").mkdir()
        finish_publication(whole.with_name("1"), "capture-1")
        assert whole.exists()


def _killed(*_: object) -> None:
    raise _KilledError


def assert_whole_or_absent(folder: Path) -> None:
    final, made = folder / "1", folder / "1.part-uid-1"
    assert final.exists() != made.exists()
    if final.exists():
        assert verify(final) == []
        assert {*NAMES, "manifest.json"} <= {path.name for path in final.iterdir()}
        assert not list(final.rglob("*.part"))
        return
    assert (made / "manifest.partial.json").exists()
    # What was recorded is there under one name or the other.
    for name in NAMES:
        assert (made / name).exists() != (made / f"{name}.part").exists()


def assert_another_attempt_can_follow(folder: Path) -> None:
    if (folder / "1").exists():
        return
    shutil.move(folder / "1.part-uid-1", folder / "1.part-uid-0")
    publish_all(attempt(folder), folder / "1")
    assert verify(folder / "1") == []


class TestVerify:
    @pytest.fixture
    def published(self, tmp_path: Path) -> Path:
        publish_all(attempt(tmp_path), tmp_path / "1")
        return tmp_path / "1"

    @pytest.mark.parametrize(
        ("change", "fault"),
        [
            (lambda folder: (folder / "trace.jsonl").unlink(), "trace.jsonl is missing"),
            (lambda folder: (folder / "trace.jsonl").write_bytes(b""), "has 0 bytes instead of"),
            (
                lambda folder: (folder / "trace.jsonl").write_bytes(
                    (folder / "trace.jsonl").read_bytes().replace(b"in", b"IN", 1)
                ),
                "does not match its checksum",
            ),
            (lambda folder: (folder / "aborted.jsonl").write_bytes(b"{}\n"), "aborted.jsonl is not in the manifest"),
            (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
            (lambda folder: (folder / "manifest.json").write_bytes(b"{"), "manifest.json cannot be read"),
            (lambda folder: (folder / "manifest.json").write_bytes(b"\xff"), "manifest.json cannot be read"),
            (lambda folder: (folder / "manifest.json").write_bytes(b"[" * 100_000), "manifest.json cannot be read"),
            (lambda folder: (folder / "manifest.json").write_bytes(b" " * (2**24 + 1)), "larger than 16 MiB"),
        ],
    )
    def test_differences_from_manifest_are_reported(
        self, published: Path, change: Callable[[Path], Any], fault: str
    ) -> None:
        change(published)
        (found,) = verify(published)
        assert fault in found

    def test_compressed_file_is_verified_by_its_content(self, published: Path) -> None:
        trace = published / "trace.jsonl"
        (published / "trace.jsonl.gz").write_bytes(gzip.compress(trace.read_bytes()))
        trace.unlink()
        assert verify(published) == []
        (published / "trace.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))
        assert len(verify(published)) == 1
        (published / "trace.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 100)[:-9])
        assert "cannot be read" in verify(published)[0]


class TestPartial:
    def test_label_has_reason_and_files(self, tmp_path: Path) -> None:
        made = attempt(tmp_path)
        label_partial(made, msgspec.structs.replace(PARTIAL, reason="Cancelled", message="deleted"))
        label = msgspec.json.decode((made / "manifest.partial.json").read_bytes(), type=PartialManifest)
        assert (label.reason, label.message) == ("Cancelled", "deleted")
        assert label.files["segments/segment-a-1.jsonl"] == 3
        assert "trace.jsonl.part" in label.files

    def test_label_is_updated_in_place_on_full_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made = attempt(tmp_path)

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        label_partial(made, msgspec.structs.replace(PARTIAL, reason="DiskFull"))
        label = msgspec.json.decode((made / "manifest.partial.json").read_bytes(), type=PartialManifest)
        assert label.reason == "DiskFull"
