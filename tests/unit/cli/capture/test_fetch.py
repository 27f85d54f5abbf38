"""`specdecode capture fetch`."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result

from specdecode_operator.cli.options import ExitCode
from specdecode_operator.cluster.resources import CAPTURE_LABEL
from tests.unit.cli.capture.conftest import (
    CLAIM,
    CONTENT,
    FOLDER,
    Cluster,
    capture,
    content,
    published,
)


class TestFetch:
    def test_broken_stream_resumes_where_it_ended(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        cluster.holds(published(), streams={"cut_bytes": len(CONTENT) // 8})
        cluster.publish()
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 0, answer.stderr
        assert (tmp_path / "out" / "trace.jsonl").read_bytes() == CONTENT
        starts = [int(call[call.index("-c") + 1]) for call in cluster.calls("tail")]
        assert starts == sorted(set(starts)), "no byte is asked for twice"
        assert len(starts) > 8

    def test_checksum_mismatch_is_refused_and_leaves_no_files(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        cluster.holds(published())
        cluster.publish(sha256="0" * 64)
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 1
        assert answer.stderr.startswith(f"error: trace.jsonl: {len(CONTENT):,} bytes fetched, which do not match")
        assert list((tmp_path / "out").iterdir()) == []
        assert cluster.calls("delete"), "the pod that reads the volume goes in every case"

    def test_fetch_waits_for_an_unreachable_api_server(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The streams bring nothing until the fourth pause is over."""
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 4:
                cluster.holds(published())

        monkeypatch.setattr("specdecode_operator.cli.capture.fetch.time.sleep", pause)
        cluster.holds(published(), streams={"away_after": len(CONTENT) // 2})
        cluster.publish()
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 0, answer.stderr
        assert (tmp_path / "out" / "trace.jsonl").read_bytes() == CONTENT
        assert len(pauses) == 4
        assert pauses == sorted(set(pauses)), "each is longer than the one before"
        assert pauses[0] > 0

    def test_partial_file_is_kept_and_resumed_by_the_next_fetch(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("specdecode_operator.cli.capture.fetch._SILENT_S", 0.0)
        cluster.holds(published(), streams={"away_after": len(CONTENT) // 2})
        cluster.publish()
        first = run("fetch", "demo", tmp_path / "out")
        assert first.exit_code == 1
        assert f"{len(CONTENT) // 2:,} of {len(CONTENT):,} bytes fetched: fetch again" in first.stderr
        cluster.holds(published())
        second = run("fetch", "demo", tmp_path / "out")
        assert second.exit_code == 0, second.stderr
        assert (tmp_path / "out" / "trace.jsonl").read_bytes() == CONTENT

    @pytest.mark.parametrize("sha256", [None, "0" * 64])
    def test_undeletable_pod_is_reported_without_hiding_the_result(
        self,
        cluster: Cluster,
        run: Callable[..., Result],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        sha256: str | None,
    ) -> None:
        monkeypatch.setenv("FAKE_REFUSES", "delete")
        cluster.holds(published())
        cluster.publish(**({"sha256": sha256} if sha256 else {}))
        answer = run("fetch", "demo", tmp_path / "out")
        assert "was not deleted: " in answer.stdout
        if sha256:
            assert answer.stderr.startswith("error: trace.jsonl: ")
        else:
            assert answer.exit_code == 0, "the files are here and right"

    def test_interrupted_fetch_says_how_to_resume(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("specdecode_operator.cli.capture.commands.fetch", interrupted)
        cluster.holds(published())
        out = tmp_path / "my files"
        for command in (("fetch", "demo", out), ("run", "demo", f"--out={out}")):
            answer = run(*command)
            assert answer.exit_code == 130
            said = f"\nstopped; fetched files are kept: specdecode capture fetch demo '{out}' resumes\n"
            assert answer.stderr == said, "the capture is over"

    def test_empty_file_is_fetched(self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path) -> None:
        cluster.holds(published())
        files = {"step-stats.jsonl": {"bytes": 0, "lines": 0, "sha256": hashlib.sha256(b"").hexdigest()}}
        (cluster.volume / "manifest.json").write_text(json.dumps({"files": files}))
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 0, answer.stderr
        assert (tmp_path / "out" / "step-stats.jsonl").read_bytes() == b""

    def test_manifest_cannot_write_outside_the_folder(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        cluster.holds(published())
        cluster.publish()
        files = {"../escaped": {"bytes": 0, "lines": 0, "sha256": hashlib.sha256(b"").hexdigest()}}
        (cluster.volume / "manifest.json").write_text(json.dumps({"files": files}))
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 1
        assert answer.stderr == f"error: {FOLDER}/manifest.json: ../escaped: is not a valid file name\n"
        assert not (tmp_path / "escaped").exists()

    @pytest.mark.parametrize(
        "name",
        ["..", ".", "", "/etc/x", "a/b", "manifest.json", "a.fetching", ".hidden", "-n", "a\nb", "a\u202eb", "a" * 129],
    )
    def test_invalid_file_name_in_the_manifest_is_refused(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path, name: str
    ) -> None:
        cluster.holds(published())
        cluster.publish(name=name)
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 1
        assert answer.stderr.count("\n") == 1
        assert answer.stderr.endswith(": is not a valid file name\n")
        assert "\u202e" not in answer.stderr
        assert not (tmp_path / "out").exists(), "nothing was begun"

    @pytest.mark.parametrize(
        "manifest",
        [
            b"[" * 100_000,
            b"\xff",
            b"[]",
            b'{"files": []}',
            b'{"files": {"trace.jsonl": {"bytes": -1, "sha256": "%s"}}}' % (b"0" * 64),
            b'{"files": {"trace.jsonl": {"bytes": true, "sha256": "%s"}}}' % (b"0" * 64),
            b'{"files": {"trace.jsonl": {"bytes": 1, "sha256": "\\u001b[2J"}}}',
            b" " * (16 << 20) + b"{}",
        ],
        ids=["deep", "no text", "a list", "no files", "negative", "a boolean", "no checksum", "endless"],
    )
    def test_invalid_manifest_is_refused_in_one_line(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path, manifest: bytes
    ) -> None:
        cluster.holds(published())
        (cluster.volume / "manifest.json").write_bytes(manifest)
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 1
        assert answer.stderr.startswith(f"error: {FOLDER}/manifest.json: ")
        assert answer.stderr.count("\n") == 1
        assert not (tmp_path / "out").exists()

    def test_file_longer_than_the_manifest_says_is_truncated(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        cluster.holds(published())
        cluster.publish()
        (cluster.volume / "trace.jsonl").write_bytes(CONTENT * 3)
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 0, answer.stderr
        assert (tmp_path / "out" / "trace.jsonl").read_bytes() == CONTENT

    def test_capture_larger_than_the_disk_is_not_fetched(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        cluster.holds(published())
        cluster.publish(size=1 << 60)
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 1
        assert f"needs {1 << 60:,} bytes, but only " in answer.stderr
        assert not cluster.calls("tail")
        assert list((tmp_path / "out").iterdir()) == []

    def test_pending_pod_is_reported_with_the_message_of_the_cluster(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        words = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims"
        cluster.holds(published(), pod={"status": {"phase": "Pending", "conditions": [{"message": words}]}})
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 1
        assert words in answer.stderr
        assert cluster.calls("delete")

    def test_pod_runs_the_recorded_operator_image_and_fetch_prints_it(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        cluster.holds(published(operatorImage="registry.example/operator@sha256:1"))
        cluster.publish()
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 0, answer.stderr
        assert "registry.example/operator@sha256:1 (status.operatorImage" in answer.stdout
        assert [pod["spec"]["containers"][0]["image"] for pod in cluster.created()] == [
            "registry.example/operator@sha256:1"
        ]

    def test_image_option_overrides_the_recorded_image(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        cluster.holds(published())
        cluster.publish()
        answer = run("fetch", "demo", tmp_path / "out", "--image", "mine:2")
        assert answer.exit_code == 0, answer.stderr
        assert "mine:2 (--image)" in answer.stdout
        assert [pod["spec"]["containers"][0]["image"] for pod in cluster.created()] == ["mine:2"]

    @pytest.mark.parametrize("is_gone", [False, True])
    def test_image_of_a_deployment_labelled_like_the_operator_is_not_used(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path, *, is_gone: bool
    ) -> None:
        template = {"spec": {"containers": [{"name": "load", "image": "evil:1"}]}}
        forged = {"metadata": {"name": "operator", "namespace": "aaa"}, "spec": {"template": template}}
        captures = [] if is_gone else [published(operatorImage=None)]
        cluster.holds(*captures, **{"deployment/operator": forged})
        cluster.publish()
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == ExitCode.INVALID
        assert answer.stderr.startswith("error: --image is missing")
        assert not cluster.calls("create"), "no pod is started"

    @pytest.mark.parametrize("own_is_there", [True, False])
    def test_claim_labelled_like_that_of_the_capture_is_not_read(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path, *, own_is_there: bool
    ) -> None:
        forged = {"metadata": {"name": "aaa", "namespace": "team", "labels": {CAPTURE_LABEL: "demo"}}}
        own = {"persistentvolumeclaim/demo-capture": CLAIM} if own_is_there else {}
        objects = {"persistentvolumeclaim/aaa": forged, **own}
        (cluster.folder / "objects.json").write_text(json.dumps({"objects": objects}))
        cluster.publish()
        answer = run("fetch", "demo", tmp_path / "out", "--image=mine:2")
        assert answer.exit_code == (ExitCode.OK if own_is_there else ExitCode.INVALID), answer.stderr
        created = cluster.created() if cluster.calls("create") else []
        volumes = [volume for pod in created for volume in pod["spec"]["volumes"]]
        assert [each["persistentVolumeClaim"]["claimName"] for each in volumes] == ["demo-capture"] * own_is_there

    def test_failed_capture_without_files_is_refused_with_its_reason(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        failed = {"type": "Ready", "status": "False", "message": "the disk is full"}
        cluster.holds(capture(phase="Failed", claim="demo-capture", conditions=[failed]))
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == ExitCode.INVALID
        assert "Failed: no files yet" in answer.stderr
        assert "the disk is full" in answer.stderr


# `specdecode capture fetch` of several arms: a folder for each repetition, and what they come to beside.

ROOT = "team/demo"
PARTS = ("deployed/1", "deployed/2", "plain/1", "plain/2")


def publish(cluster: Cluster, *parts: str, **said: str) -> None:
    for part in parts:
        folder = cluster.folder / "volume" / ROOT / part
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "trace.jsonl").write_bytes(CONTENT)
        files = {"trace.jsonl": {"bytes": len(CONTENT), "sha256": hashlib.sha256(CONTENT).hexdigest()}}
        manifest = {"namespace": "team", "capture": "demo", "capture_uid": "demo-uid", "files": files, "part": part}
        (folder / "manifest.json").write_text(json.dumps({**manifest, **said}))


@pytest.fixture
def volume(cluster: Cluster) -> Path:
    """A volume with two arms, each measured twice, and an attempt that failed."""
    cluster.holds(published(path=ROOT))
    cluster.volume.rmdir()
    cluster.volume.parent.rmdir()
    publish(cluster, *PARTS)
    folder = cluster.folder / "volume" / ROOT
    (folder / "plain" / "3.part-uid").mkdir()
    (folder / "comparison.json").write_text('{"arms": []}')
    return folder


def there(out: Path) -> set[str]:
    return {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}


WHOLE = {f"{part}/{name}" for part in PARTS for name in ("manifest.json", "trace.jsonl")} | {"comparison.json"}


def test_each_arm_and_repetition_has_its_own_folder(volume: Path, run: Callable[..., Result], tmp_path: Path) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        answer = run("fetch", "demo", out)
        assert answer.exit_code == 0, answer.stderr
        assert there(out) == WHOLE, "nothing of an attempt that failed"
        assert (out / "plain/2/trace.jsonl").read_bytes() == CONTENT


def test_all_arms_are_fetched_after_the_capture_is_deleted(
    volume: Path, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
) -> None:
    cluster.holds()
    answer = run("fetch", "demo", tmp_path / "out", "--image=operator:1")
    assert answer.exit_code == 0, answer.stderr
    assert there(tmp_path / "out") == WHOLE


@pytest.mark.parametrize("stranger", ["notes.txt", "deployed/1/notes.txt"])
def test_folder_with_foreign_files_is_refused(
    volume: Path, run: Callable[..., Result], tmp_path: Path, stranger: str
) -> None:
    path = tmp_path / "out" / stranger
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    answer = run("fetch", "demo", tmp_path / "out")
    assert answer.exit_code == 1
    assert "contains notes.txt, not part of capture demo: use another folder" in answer.stderr
    assert there(tmp_path / "out") == {stranger}


def test_invalid_folder_names_on_the_volume_are_ignored(
    volume: Path, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
) -> None:
    (volume / "..x" / "1").mkdir(parents=True)
    (volume / "plain" / "one").mkdir()
    answer = run("fetch", "demo", tmp_path / "out")
    assert answer.exit_code == 0, answer.stderr
    assert there(tmp_path / "out") == WHOLE


def test_files_of_an_earlier_capture_with_the_name_are_kept(
    volume: Path, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
) -> None:
    assert run("fetch", "demo", tmp_path / "out").exit_code == 0
    publish(cluster, *PARTS, capture_uid="another")
    answer = run("fetch", "demo", tmp_path / "out")
    assert answer.exit_code == 1
    assert "contains files of an earlier capture team/demo" in answer.stderr
    cluster.holds({**published(path=ROOT), "metadata": {"name": "demo", "namespace": "team", "uid": "another"}})
    answer = run("run", "demo", f"--out={tmp_path / 'out'}")
    assert "files of an earlier capture" in answer.stderr, "before any load is sent"


def test_status_shows_the_pays_verdict(cluster: Cluster, run: Callable[..., Result]) -> None:
    pays = {"type": "Pays", "status": "False", "reason": "DoesNotPay", "message": "ngram against plain: goodput -9 %"}
    cluster.holds(capture(conditions=[pays]))
    assert "  DoesNotPay: ngram against plain: goodput -9 %" in run("status", "demo").stdout
    cluster.holds(capture(conditions=[{**pays, "status": "Unknown", "reason": "NotCompared"}]))
    assert "NotCompared" not in run("status", "demo").stdout


def figures(sent: int) -> str:
    return json.dumps(
        {"phase": "closed-2", "sent": sent, "recorded": sent, "completed": sent, "failed": 0, "rate": 2.0}
    )


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ([], "  0 of 4 runs published; no request in the next run yet"),
        ([figures(3)], "  0 of 4 runs published; closed-2        sent      3"),
        ([figures(3), '{"published": "team/demo/plain/1"}'], "  1 of 4 runs published; no request in the next run"),
        (['{"published": "team/demo/plain/1"}', "no JSON", "[]", figures(5)], "  1 of 4 runs published; closed-2"),
    ],
)
def test_status_shows_the_progress_of_several_arms(
    cluster: Cluster, run: Callable[..., Result], log: list[str], said: str
) -> None:
    measured = capture(phase="Loading", job="demo-capture")
    measured["spec"]["arms"] = [{"name": "plain", "speculation": {"method": "none"}}, {"name": "deployed"}]
    cluster.holds(measured, streams={"log": "\n".join(log)})
    assert said in run("status", "demo").stdout


@pytest.mark.parametrize("figure", ["sent", "recorded", "completed", "failed", "rate", "eta_s"])
def test_progress_line_with_a_missing_figure_is_shown(
    cluster: Cluster, run: Callable[..., Result], figure: str
) -> None:
    line = json.dumps({**json.loads(figures(7)), "eta_s": 2.0, figure: None})
    cluster.holds(capture(phase="Loading", job="demo-capture"), streams={"log": line})
    answer = run("status", "demo")
    assert answer.exit_code == 0, answer.exception
    assert "closed-2" in answer.stdout


def test_status_shows_the_progress_of_the_load_until_it_ends(cluster: Cluster, run: Callable[..., Result]) -> None:
    cluster.holds(capture(phase="Loading", job="demo-capture"), streams={"log": figures(7)})
    assert "  closed-2        sent      7" in run("status", "demo").stdout
    cluster.holds(capture(phase="Succeeded", job="demo-capture"), streams={"log": figures(7)})
    assert "sent" not in run("status", "demo").stdout


# Files that outlive their capture are fetched too, and what just fits on the disk is.


def test_deleted_capture_is_found_by_its_claim(cluster: Cluster, run: Callable[..., Result], tmp_path: Path) -> None:
    cluster.publish()
    cluster.holds()
    result = run("fetch", "demo", tmp_path / "out", "--image", "operator:1")
    assert result.exit_code == 0, result.output
    assert "of claim demo-capture" in result.output
    assert content(tmp_path / "out")["trace.jsonl"] == CONTENT


def test_fetch_needs_exactly_the_free_space_of_its_files(
    cluster: Cluster, run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.publish()
    cluster.holds(published())
    usage = SimpleNamespace(free=len(CONTENT) - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    refused = run("fetch", "demo", tmp_path / "out")
    assert refused.exit_code == 1
    assert "use a folder with more space" in refused.output
    usage.free += 1
    assert run("fetch", "demo", tmp_path / "out").exit_code == 0
