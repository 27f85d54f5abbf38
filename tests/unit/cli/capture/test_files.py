"""Files of a capture."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from tests.unit.cli.capture.conftest import (
    CONTENT,
    Cluster,
    capture,
    content,
    published,
)


class TestFolder:
    """A folder that holds anything else than files of this capture gets none of them, and loses nothing."""

    @pytest.fixture
    def out(self, cluster: Cluster, tmp_path: Path) -> Path:
        cluster.holds(published())
        cluster.publish(namespace="team", capture="demo", capture_uid="demo-uid")
        folder = tmp_path / "out"
        folder.mkdir()
        return folder

    @staticmethod
    def refused(run: Callable[..., Result], out: Path) -> str:
        before = content(out)
        answer = run("fetch", "demo", out)
        assert answer.exit_code == 1
        assert content(out) == before, "nothing is replaced, and nothing half-fetched"
        assert answer.stderr.count("\n") == 1
        return str(answer.stderr)

    @pytest.mark.parametrize("half", [False, True])
    def test_folder_with_files_of_another_capture_is_refused(
        self,
        run: Callable[..., Result],
        out: Path,
        half: bool,
    ) -> None:
        other = json.dumps({"namespace": "team", "capture": "other", "files": {}})
        (out / ("manifest.json.fetching" if half else "manifest.json")).write_text(other)
        (out / "trace.jsonl").write_text("theirs")
        said = self.refused(run, out)
        assert said == (
            f"error: {out}: contains files of capture team/other: use another folder for capture demo, or move"
            " these away\n"
        )

    def test_folder_with_files_of_an_earlier_capture_is_refused(self, run: Callable[..., Result], out: Path) -> None:
        (out / "manifest.json").write_text(json.dumps({"namespace": "team", "capture": "demo", "files": {}}))
        assert "contains files of an earlier capture team/demo: " in self.refused(run, out)

    @pytest.mark.parametrize("manifest", ["", "[]", "[" * 100_000, '{"capture": "\\u001b[2J"}'])
    def test_folder_with_an_unreadable_manifest_is_refused(
        self, run: Callable[..., Result], out: Path, manifest: str
    ) -> None:
        (out / "manifest.json").write_text(manifest)
        assert "\x1b" not in self.refused(run, out)

    @pytest.mark.parametrize("name", ["notes.txt", "trace.jsonl", "trace.jsonl.fetching", "client.jsonl", "a\nb"])
    def test_folder_with_files_of_no_capture_is_refused(self, run: Callable[..., Result], out: Path, name: str) -> None:
        (out / name).write_text("mine")
        shown = name.encode("unicode_escape").decode()
        assert f"contains {shown}, not part of capture demo: use another folder, or move these away" in self.refused(
            run, out
        )

    @pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.fetching", "manifest.json.fetching"])
    def test_folder_with_a_symlink_to_another_file_is_refused(
        self, cluster: Cluster, run: Callable[..., Result], out: Path, tmp_path: Path, name: str
    ) -> None:
        (tmp_path / "precious").write_bytes((cluster.volume / "manifest.json").read_bytes())
        (out / name).symlink_to(tmp_path / "precious")
        (out / "manifest.json").write_bytes((cluster.volume / "manifest.json").read_bytes())
        assert f"contains {name}, not part" in self.refused(run, out)
        assert content(tmp_path)["precious"] == (cluster.volume / "manifest.json").read_bytes()

    def test_path_that_is_no_folder_is_refused(self, run: Callable[..., Result], out: Path) -> None:
        out.rmdir()
        out.write_text("a file")
        answer = run("fetch", "demo", out)
        assert (answer.exit_code, answer.stderr) == (1, f"error: {out}: is not a folder: use another path\n")

    def test_folder_with_files_of_the_capture_is_completed(self, run: Callable[..., Result], out: Path) -> None:
        (out / "trace.jsonl").write_bytes(CONTENT)
        assert run("fetch", "demo", out).exit_code == 0, "right without a manifest"
        (out / "trace.jsonl").write_bytes(b"damaged")
        answer = run("fetch", "demo", out)
        assert answer.exit_code == 0, answer.stderr
        assert content(out).keys() == {"manifest.json", "trace.jsonl"}
        assert content(out)["trace.jsonl"] == CONTENT

    def test_folder_is_checked_before_load_is_sent(
        self, cluster: Cluster, run: Callable[..., Result], out: Path
    ) -> None:
        llama = {"metadata": {"name": "llama", "namespace": "team"}}
        (out / "manifest.json").write_text(json.dumps({"namespace": "a", "capture": "b", "capture_uid": "c"}))
        cluster.holds(**{"specdecodedeployment/llama": llama})
        answer = run("run", "new", "--create", f"--out={out}")
        assert answer.stderr == f"error: {out}: contains other files: use another folder for capture new (--out)\n"
        assert not cluster.calls("apply")
        cluster.holds(capture(phase="Loading"))
        assert "contains files of capture a/b" in run("run", "demo", f"--out={out}").stderr
