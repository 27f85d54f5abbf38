"""`specdecode capture run`, `fetch` and `down` where something is in the way; the e2e tests walk the good way."""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from specdecode_operator.cli.main import app

FAKE = Path(__file__).parents[2] / "support" / "fake_kubectl.py"
FOLDER = "team/demo/as-deployed/1"
CONTENT = b"".join(b'{"line": %d}\n' % number for number in range(2000))
Body = dict[str, Any]


def capture(name: str = "demo", phase: str = "Succeeded", **status: Any) -> Body:
    return {
        "metadata": {"name": name, "namespace": "team", "generation": 1},
        "spec": {"deployment": "llama"},
        "status": {"phase": phase, **status},
    }


def published(**status: Any) -> Body:
    return capture(claim="demo-capture", path=FOLDER, job="demo-capture", **status)


CLAIM = {"metadata": {"name": "demo-capture", "namespace": "team"}}
JOB = {"spec": {"template": {"spec": {"containers": [{"name": "load", "image": "operator:1"}]}}}}


class Cluster:
    """What the fake kubectl answers from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.volume = folder / "volume" / FOLDER
        self.volume.mkdir(parents=True)
        self.holds()

    def holds(self, *captures: Body, cut_bytes: int | None = None, pod: Body | None = None, **more: Body) -> None:
        objects = {f"specdecodecapture/{each['metadata']['name']}": each for each in captures}
        objects |= {"persistentvolumeclaim/demo-capture": CLAIM, "job/demo-capture": JOB, **more}
        state: Body = {"objects": objects, "cut_bytes": cut_bytes}
        if pod is not None:
            objects["pod/*"] = pod
            state["unready"] = True
        (self.folder / "objects.json").write_text(json.dumps(state))

    def publish(self, sha256: str = hashlib.sha256(CONTENT).hexdigest()) -> None:
        (self.volume / "trace.jsonl").write_bytes(CONTENT)
        files = {"trace.jsonl": {"bytes": len(CONTENT), "lines": 2000, "sha256": sha256}}
        (self.volume / "manifest.json").write_text(json.dumps({"files": files}))

    def calls(self, verb: str) -> list[list[str]]:
        lines = (self.folder / "calls.jsonl").read_text().splitlines()
        return [call for call in map(json.loads, lines) if verb in call]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n" + FAKE.read_text())
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_CLUSTER", str(tmp_path))
    return Cluster(tmp_path)


@pytest.fixture
def run() -> Callable[..., Result]:
    return lambda *arguments: CliRunner().invoke(app, ["capture", *map(str, arguments)])


class TestFetch:
    def test_a_stream_that_breaks_goes_on_where_it_ended(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        cluster.holds(published(), cut_bytes=len(CONTENT) // 3)
        cluster.publish()
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 0, answer.stderr
        assert (tmp_path / "out" / "trace.jsonl").read_bytes() == CONTENT
        starts = [int(call[call.index("-c") + 1]) for call in cluster.calls("tail")]
        assert starts == sorted(set(starts)), "no byte is asked for twice"
        assert len(starts) > 2

    def test_what_is_not_what_the_manifest_says_is_refused_and_leaves_no_manifest(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        cluster.holds(published())
        cluster.publish(sha256="0" * 64)
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 1
        assert answer.stderr.startswith(f"error: trace.jsonl: {len(CONTENT):,} bytes came that are not what")
        assert list((tmp_path / "out").iterdir()) == []
        assert cluster.calls("delete"), "the pod that reads the volume goes in every case"

    def test_what_came_of_a_stream_that_keeps_breaking_is_kept(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        cluster.holds(published(), cut_bytes=len(CONTENT) // 8)
        cluster.publish()
        first = run("fetch", "demo", tmp_path / "out")
        assert first.exit_code == 1
        assert "fetch again, it goes on from there" in first.stderr
        second = run("fetch", "demo", tmp_path / "out")
        assert second.exit_code == 0, second.stderr
        assert (tmp_path / "out" / "trace.jsonl").read_bytes() == CONTENT

    def test_an_empty_file_is_a_file(self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path) -> None:
        cluster.holds(published())
        files = {"step-stats.jsonl": {"bytes": 0, "lines": 0, "sha256": hashlib.sha256(b"").hexdigest()}}
        (cluster.volume / "manifest.json").write_text(json.dumps({"files": files}))
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 0, answer.stderr
        assert (tmp_path / "out" / "step-stats.jsonl").read_bytes() == b""

    def test_a_manifest_cannot_write_outside_of_the_folder(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        cluster.holds(published())
        cluster.publish()
        files = {"../escaped": {"bytes": 0, "lines": 0, "sha256": hashlib.sha256(b"").hexdigest()}}
        (cluster.volume / "manifest.json").write_text(json.dumps({"files": files}))
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 1
        assert answer.stderr == f"error: {FOLDER}/manifest.json: ../escaped: is no name of a file of a capture\n"
        assert not (tmp_path / "escaped").exists()

    def test_a_pod_that_does_not_start_is_told_in_the_clusters_words(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        words = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims"
        cluster.holds(published(), pod={"status": {"phase": "Pending", "conditions": [{"message": words}]}})
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 1
        assert words in answer.stderr
        assert cluster.calls("delete")

    def test_a_run_that_failed_has_nothing_to_fetch_and_says_where_its_partial_files_are(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        failed = {"type": "Succeeded", "status": "False", "message": "the disk is full"}
        cluster.holds(capture(phase="Failed", claim="demo-capture", conditions=[failed]))
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 1
        assert "Failed: has no files" in answer.stderr
        assert "the disk is full" in answer.stderr


class TestRun:
    @pytest.mark.parametrize(
        ("captures", "words"),
        [
            ([], "no capture is on its way"),
            ([capture("a", "Loading"), capture("b", "Pending")], "2 captures are not over (a, b)"),
        ],
    )
    def test_without_a_name_there_must_be_one_on_its_way(
        self, cluster: Cluster, run: Callable[..., Result], captures: list[Body], words: str
    ) -> None:
        cluster.holds(*captures)
        answer = run("run")
        assert answer.exit_code == 1
        assert answer.stderr == f"error: NAME: {words}: name one\n"

    def test_a_capture_that_failed_ends_it_with_the_reason(self, cluster: Cluster, run: Callable[..., Result]) -> None:
        stalled = {"type": "Stalled", "status": "True", "observedGeneration": 1, "message": "the engine was restarted"}
        cluster.holds(capture(phase="Failed", conditions=[stalled]))
        answer = run("run", "demo")
        assert answer.exit_code == 1
        assert answer.stderr == "error: capture demo: Failed: the engine was restarted\n"

    def test_a_deployment_that_is_not_there_is_named_before_anything_is_created(
        self, cluster: Cluster, run: Callable[..., Result]
    ) -> None:
        llama = {"metadata": {"name": "llama", "namespace": "team"}}
        cluster.holds(**{"specdecodedeployment/llama": llama})
        answer = run("run", "new", "--deployment=lama")
        assert answer.exit_code == 1
        assert answer.stderr == "error: --deployment: lama: is not here (SpecDecodeDeployments: llama): name another\n"
        assert not cluster.calls("apply")


class TestDown:
    def test_only_what_is_not_over_is_cancelled(self, cluster: Cluster, run: Callable[..., Result]) -> None:
        cluster.holds(capture("a", "Loading"), capture("b", "Succeeded"))
        answer = run("down")
        assert answer.exit_code == 0
        (patch,) = cluster.calls("patch")
        assert "a" in patch
        assert "a: cancelled" in answer.stdout
        assert "b: Succeeded: holds no GPU" in answer.stdout


def test_without_kubectl_one_line_says_so(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    answer = run("status")
    assert answer.exit_code == 1
    assert answer.stderr == "error: kubectl: not on PATH: install it, captures are driven through it\n"
