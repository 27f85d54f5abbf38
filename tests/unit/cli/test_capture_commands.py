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
MINE = {
    "apiVersion": "specdecode.io/v1alpha1",
    "kind": "SpecDecodeCapture",
    "metadata": {"name": "demo", "namespace": "team"},
    "spec": {"deployment": "llama"},
}
FOLDER = "team/demo/as-deployed/1"
CONTENT = b"".join(b'{"line": %d}\n' % number for number in range(2000))
Body = dict[str, Any]


def capture(name: str = "demo", phase: str = "Succeeded", **status: Any) -> Body:
    return {
        "metadata": {"name": name, "namespace": "team", "generation": 1, "uid": f"{name}-uid"},
        "spec": {"deployment": "llama"},
        "status": {"phase": phase, "observedGeneration": 1, **status},
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

    def holds(self, *captures: Body, pod: Body | None = None, streams: Body | None = None, **more: Any) -> None:
        objects = {f"specdecodecapture/{each['metadata']['name']}": each for each in captures}
        objects |= {"persistentvolumeclaim/demo-capture": CLAIM, "job/demo-capture": JOB, **more}
        state: Body = {"objects": objects, **(streams or {})}
        if pod is not None:
            objects["pod/*"] = pod
            state["unready"] = True
        (self.folder / "objects.json").write_text(json.dumps(state))

    def publish(
        self,
        sha256: str = hashlib.sha256(CONTENT).hexdigest(),
        *,
        name: str = "trace.jsonl",
        size: int = len(CONTENT),
        **said: Any,
    ) -> None:
        (self.volume / "trace.jsonl").write_bytes(CONTENT)
        files = {name: {"bytes": size, "lines": 2000, "sha256": sha256}}
        (self.volume / "manifest.json").write_text(json.dumps({"files": files, **said}))

    def applied(self) -> list[Body]:
        """What was sent to be applied, or tried."""
        return [json.loads(each) for each in (self.folder / "applied.jsonl").read_text().splitlines()]

    def calls(self, verb: str) -> list[list[str]]:
        calls = self.folder / "calls.jsonl"
        lines = calls.read_text().splitlines() if calls.exists() else []
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
        cluster.holds(published(), streams={"cut_bytes": len(CONTENT) // 8})
        cluster.publish()
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 0, answer.stderr
        assert (tmp_path / "out" / "trace.jsonl").read_bytes() == CONTENT
        starts = [int(call[call.index("-c") + 1]) for call in cluster.calls("tail")]
        assert starts == sorted(set(starts)), "no byte is asked for twice"
        assert len(starts) > 8

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

    def test_an_api_server_that_is_away_for_a_while_is_waited_for(
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

    def test_what_came_of_a_stream_that_keeps_breaking_is_kept(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("specdecode_operator.cli.capture.fetch._SILENT_S", 0.0)
        cluster.holds(published(), streams={"away_after": len(CONTENT) // 2})
        cluster.publish()
        first = run("fetch", "demo", tmp_path / "out")
        assert first.exit_code == 1
        assert f"{len(CONTENT) // 2:,} of {len(CONTENT):,} bytes are here: fetch again" in first.stderr
        cluster.holds(published())
        second = run("fetch", "demo", tmp_path / "out")
        assert second.exit_code == 0, second.stderr
        assert (tmp_path / "out" / "trace.jsonl").read_bytes() == CONTENT

    @pytest.mark.parametrize("sha256", [None, "0" * 64])
    def test_a_pod_that_cannot_be_removed_hides_nothing(
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
        assert "is left (kubectl delete pod demo-fetch-" in answer.stdout
        if sha256:
            assert answer.stderr.startswith("error: trace.jsonl: ")
        else:
            assert answer.exit_code == 0, "the files are here and right"

    def test_stopped_it_says_how_to_go_on(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("specdecode_operator.cli.capture.commands.fetch", interrupted)
        cluster.holds(published())
        out = tmp_path / "out"
        for command in (("fetch", "demo", out), ("run", "demo", f"--out={out}")):
            answer = run(*command)
            assert answer.exit_code == 130
            said = f"\nstopped; what came is kept: specdecode capture fetch demo {out} goes on from there\n"
            assert answer.stderr == said, "the capture is over"

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

    @pytest.mark.parametrize(
        "name",
        ["..", ".", "", "/etc/x", "a/b", "manifest.json", "a.fetching", ".hidden", "-n", "a\nb", "a\u202eb", "a" * 129],
    )
    def test_a_name_that_is_none_of_a_file_is_refused(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path, name: str
    ) -> None:
        cluster.holds(published())
        cluster.publish(name=name)
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 1
        assert answer.stderr.count("\n") == 1
        assert answer.stderr.endswith(": is no name of a file of a capture\n")
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
    def test_a_manifest_that_is_none_is_refused_in_one_line(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path, manifest: bytes
    ) -> None:
        cluster.holds(published())
        (cluster.volume / "manifest.json").write_bytes(manifest)
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 1
        assert answer.stderr.startswith(f"error: {FOLDER}/manifest.json: ")
        assert answer.stderr.count("\n") == 1
        assert not (tmp_path / "out").exists()

    def test_a_link_to_something_endless_brings_no_more_than_the_manifest_says(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        cluster.holds(published())
        cluster.publish()
        (cluster.volume / "trace.jsonl").write_bytes(CONTENT * 3)
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 0, answer.stderr
        assert (tmp_path / "out" / "trace.jsonl").read_bytes() == CONTENT

    def test_what_does_not_fit_on_the_disk_is_not_begun(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        cluster.holds(published())
        cluster.publish(size=1 << 60)
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 1
        assert f"{1 << 60:,} bytes are to come, and " in answer.stderr
        assert not cluster.calls("tail")
        assert list((tmp_path / "out").iterdir()) == []

    def test_a_pod_that_does_not_start_is_told_in_the_clusters_words(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        words = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims"
        cluster.holds(published(), pod={"status": {"phase": "Pending", "conditions": [{"message": words}]}})
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 1
        assert words in answer.stderr
        assert cluster.calls("delete")

    def test_the_image_of_another_namespace_is_not_taken_for_the_operators(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        def labelled(namespace: str, image: str) -> Body:
            template = {"spec": {"containers": [{"image": image}]}}
            return {"metadata": {"name": "operator", "namespace": namespace}, "spec": {"template": template}}

        own, forged = labelled("specdecode-system", "operator:1"), labelled("aaa", "evil:1")
        gone = {"job/demo-capture": None}
        cluster.holds(published(), **gone, **{"deployment/forged": forged, "deployment/operator": own})
        cluster.publish()
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 1
        assert "several operators are seen, in the namespaces aaa, specdecode-system" in answer.stderr
        assert not cluster.calls("create"), "no pod is started"
        cluster.holds(published(), **gone, **{"deployment/operator": own})
        assert run("fetch", "demo", tmp_path / "out").exit_code == 0

    def test_a_run_that_failed_has_nothing_to_fetch_and_says_where_its_partial_files_are(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        failed = {"type": "Succeeded", "status": "False", "message": "the disk is full"}
        cluster.holds(capture(phase="Failed", claim="demo-capture", conditions=[failed]))
        answer = run("fetch", "demo", tmp_path / "out")
        assert answer.exit_code == 1
        assert "Failed: has no files" in answer.stderr
        assert "the disk is full" in answer.stderr


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


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
    def test_with_files_of_another_capture(
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
            f"error: {out}: holds files of capture team/other: name another folder for those of capture demo, or move"
            " these away\n"
        )

    def test_with_files_of_an_earlier_capture_of_the_name(self, run: Callable[..., Result], out: Path) -> None:
        (out / "manifest.json").write_text(json.dumps({"namespace": "team", "capture": "demo", "files": {}}))
        assert "holds files of capture team/demo, recorded at another time,: " in self.refused(run, out)

    @pytest.mark.parametrize("manifest", ["", "[]", "[" * 100_000, '{"capture": "\\u001b[2J"}'])
    def test_with_a_manifest_of_who_knows_whom(self, run: Callable[..., Result], out: Path, manifest: str) -> None:
        (out / "manifest.json").write_text(manifest)
        assert "\x1b" not in self.refused(run, out)

    @pytest.mark.parametrize("name", ["notes.txt", "trace.jsonl", "trace.jsonl.fetching", "client.jsonl", "a\nb"])
    def test_with_files_of_nobody(self, run: Callable[..., Result], out: Path, name: str) -> None:
        (out / name).write_text("mine")
        shown = name.encode("unicode_escape").decode()
        assert f"holds {shown}, which capture demo has not: name another folder, or move it away" in self.refused(
            run, out
        )

    @pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.fetching", "manifest.json.fetching"])
    def test_with_a_link_that_leads_out_of_it(
        self, cluster: Cluster, run: Callable[..., Result], out: Path, tmp_path: Path, name: str
    ) -> None:
        (tmp_path / "precious").write_bytes((cluster.volume / "manifest.json").read_bytes())
        (out / name).symlink_to(tmp_path / "precious")
        (out / "manifest.json").write_bytes((cluster.volume / "manifest.json").read_bytes())
        assert f"holds {name}, which" in self.refused(run, out)
        assert content(tmp_path)["precious"] == (cluster.volume / "manifest.json").read_bytes()

    def test_that_is_none(self, run: Callable[..., Result], out: Path) -> None:
        out.rmdir()
        out.write_text("a file")
        answer = run("fetch", "demo", out)
        assert (answer.exit_code, answer.stderr) == (1, f"error: {out}: is no folder: name another\n")

    def test_with_the_capture_s_own_files_is_completed(self, run: Callable[..., Result], out: Path) -> None:
        (out / "trace.jsonl").write_bytes(CONTENT)
        assert run("fetch", "demo", out).exit_code == 0, "right without a manifest"
        (out / "trace.jsonl").write_bytes(b"damaged")
        answer = run("fetch", "demo", out)
        assert answer.exit_code == 0, answer.stderr
        assert content(out).keys() == {"manifest.json", "trace.jsonl"}
        assert content(out)["trace.jsonl"] == CONTENT

    def test_is_looked_at_before_a_load_is_sent(self, cluster: Cluster, run: Callable[..., Result], out: Path) -> None:
        llama = {"metadata": {"name": "llama", "namespace": "team"}}
        (out / "manifest.json").write_text(json.dumps({"namespace": "a", "capture": "b", "capture_uid": "c"}))
        cluster.holds(**{"specdecodedeployment/llama": llama})
        answer = run("run", "new", "--create", f"--out={out}")
        assert (
            answer.stderr
            == f"error: {out}: holds files already: name another folder for those of capture new (--out)\n"
        )
        assert not cluster.calls("apply")
        cluster.holds(capture(phase="Loading"))
        assert "holds files of capture a/b" in run("run", "demo", f"--out={out}").stderr


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

    @pytest.mark.parametrize(
        ("there", "said"),
        [
            ([], "no captures here"),
            ([capture("demo"), capture("nightly")], "did you mean demo? captures here: demo, nightly"),
            ([capture("nightly")], "captures here: nightly"),
        ],
    )
    def test_a_name_that_is_mistyped_costs_nobody_a_gpu(
        self, cluster: Cluster, run: Callable[..., Result], there: list[Body], said: str
    ) -> None:
        llama = {"metadata": {"name": "llama", "namespace": "team"}}
        cluster.holds(*there, **{"specdecodedeployment/llama": llama})
        answer = run("run", "demmo")
        assert answer.exit_code == 1
        assert answer.stderr == (
            f"error: capture demmo: is not there ({said}): add --create to create it with the usual load\n"
        )
        assert not cluster.calls("apply")

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["new", "--deployment=llama"], "--deployment: llama: is that of a capture that is created: add --create"),
            (["--create"], "NAME: nothing: give the capture that is created a name"),
            (["demo", "--create", "--deployment=other"], "--deployment: other: capture demo is of llama: name another"),
        ],
    )
    def test_what_is_asked_of_a_creation_fits_together(
        self, cluster: Cluster, run: Callable[..., Result], arguments: list[str], said: str, tmp_path: Path
    ) -> None:
        cluster.holds(capture())
        answer = run("run", *arguments, f"--out={tmp_path / 'out'}")
        assert (answer.exit_code, answer.stderr) == (1, f"error: {said}\n")
        assert not cluster.calls("apply")

    def test_one_that_is_asked_for_is_created(
        self, cluster: Cluster, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("specdecode_operator.cli.capture.watch._PERIOD_S", 0.0)
        llama = {"metadata": {"name": "llama", "namespace": "team"}}
        cluster.holds(**{"specdecodedeployment/llama": llama, "specdecodecapture/demo": [{}, published()]})
        cluster.publish()
        answer = run("run", "demo", "--create", "--namespace=team")
        assert answer.exit_code == 0, answer.stderr
        (applied,) = cluster.applied()
        assert applied["spec"] == {"deployment": "llama"}
        assert content(tmp_path / "captures" / "demo")["trace.jsonl"] == CONTENT

    def test_a_deployment_that_is_not_there_is_named_before_anything_is_created(
        self, cluster: Cluster, run: Callable[..., Result]
    ) -> None:
        llama = {"metadata": {"name": "llama", "namespace": "team"}}
        cluster.holds(**{"specdecodedeployment/llama": llama})
        answer = run("run", "new", "--create", "--deployment=lama")
        assert answer.exit_code == 1
        assert answer.stderr == "error: --deployment: lama: is not here (SpecDecodeDeployments: llama): name another\n"
        assert not cluster.calls("apply")

    def test_an_api_server_that_is_away_for_a_moment_ends_nothing(
        self, cluster: Cluster, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr("specdecode_operator.cli.capture.watch._PERIOD_S", 0.0)
        loading = capture(phase="Loading", job="demo-capture")
        seen = [loading, loading, None, None, published()]
        cluster.holds(**{"specdecodecapture/demo": seen})
        cluster.publish()
        answer = run("run", "demo", f"--out={tmp_path / 'out'}")
        assert answer.exit_code == 0, answer.stderr
        assert answer.stdout.count("was refused") == 1, "it is told once"

    def test_one_that_stays_away_ends_it(
        self, cluster: Cluster, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("specdecode_operator.cli.capture.watch._OUTAGE_S", 0.0)
        cluster.holds(**{"specdecodecapture/demo": [capture(phase="Loading"), None]})
        answer = run("run", "demo")
        assert answer.exit_code == 1
        assert answer.stderr.startswith("error: The connection to the server")


class TestUp:
    """The capture is applied, and waits for its deployment; the command does not for long."""

    MISSING = "spec.deployment: llama: there is no SpecDecodeDeployment of this name"
    STUCK = "deployment llama has no plan in force (DoesNotFit: 3 GiB are missing); goes on when it has one"

    @pytest.mark.parametrize(
        ("documents", "said"),
        [
            ([MINE, {**MINE, "kind": "Pod"}], "document 2: kind: Pod: is no SpecDecodeCapture: apply it with kubectl"),
            ([{"kind": "List", "items": [MINE, {"kind": "Secret"}]}], "document 1, item 2: kind: Secret: is no"),
            ([{**MINE, "kind": "SpecDecodeDeployment"}], "document 1: kind: SpecDecodeDeployment: is no"),
            ([{**MINE, "apiVersion": "batch/v1"}], "document 1: apiVersion: batch/v1: use specdecode.io/v1alpha1"),
            ([{}], "document 1: kind: nothing: is no SpecDecodeCapture"),
            ([MINE, MINE], "document 2: metadata.name: demo: is there twice: rename one"),
            ([{**MINE, "metadata": {"generateName": "a-"}}], "document 1: metadata.name: nothing: name the object"),
            ([{**MINE, "metadata": []}], "document 1: metadata.name: nothing: name the object"),
            (
                [{**MINE, "metadata": {"name": "a", "namespace": [1]}}],
                "metadata.namespace: [1]: must be text",
            ),
            ([MINE, [MINE]], "capture.yaml: holds a list"),
            ([{"kind": "List", "items": [MINE, 7]}], "capture.yaml: holds a list without objects"),
            ([{**MINE, "spec": []}], "document 1: spec: must be an object"),
        ],
    )
    def test_a_file_with_anything_else_is_refused_as_a_whole(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path, documents: list[Body], said: str
    ) -> None:
        file = tmp_path / "capture.yaml"
        file.write_text("\n---\n".join(map(json.dumps, documents)))
        answer = run("up", file)
        assert answer.exit_code == 1
        assert answer.stderr.startswith("error: nothing was applied: ")
        assert said in answer.stderr
        assert not (cluster.folder / "calls.jsonl").exists(), "nobody was asked for anything"

    @pytest.mark.parametrize("how", ["file", "list", "folder", "stdin"])
    def test_of_several_all_are_applied_or_none(
        self, cluster: Cluster, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        both = [MINE, {**MINE, "metadata": {"name": "other", "namespace": "team"}}]
        folder = tmp_path / "captures"
        folder.mkdir()
        text = json.dumps({"kind": "List", "items": both}) if how == "list" else "\n---\n".join(map(json.dumps, both))
        if how == "folder":
            for number, body in enumerate(both):
                (folder / f"{number}.yaml").write_text(json.dumps(body))
            (folder / "README.md").write_text("about them")
            (folder / "below").mkdir()
            (folder / "below" / "pod.yaml").write_text("kind: Pod")
        else:
            (folder / "all.yaml").write_text(text)
        source = {"folder": str(folder), "stdin": "-"}.get(how, str(folder / "all.yaml"))
        cluster.holds(capture(phase="Loading"), capture("other", phase="Loading"))
        answer = CliRunner().invoke(app, ["capture", "up", source], input=text)
        assert answer.exit_code == 0, answer.stderr
        tried, applied = cluster.calls("apply")
        assert "--dry-run=server" in tried, "the API server takes every one, or it gets none"
        assert "--dry-run=server" not in applied
        assert [each["metadata"]["name"] for each in cluster.applied()[-1]["items"]] == ["demo", "other"]
        assert "capture other: Loading" in answer.stdout
        (cluster.folder / "calls.jsonl").unlink()
        monkeypatch.setenv("FAKE_REFUSES", "apply")
        assert CliRunner().invoke(app, ["capture", "up", source], input=text).exit_code == 1
        assert len(cluster.calls("apply")) == 1

    @pytest.mark.parametrize("what", ["missing", "empty folder", "empty file", "no name"])
    def test_where_there_is_no_capture_it_says_so(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path, what: str
    ) -> None:
        path = tmp_path / "input"
        if what == "empty folder":
            path.mkdir()
        elif what == "empty file":
            path.write_text("")
        answer = run("up", "" if what == "no name" else path)
        assert answer.exit_code == 1
        assert answer.stderr.startswith("error: " if what == "no name" else f"error: {path}: ")
        assert "Errno" not in answer.stderr
        assert answer.stderr.count("\n") == 1
        assert not (cluster.folder / "calls.jsonl").exists()

    @staticmethod
    def held(reason: str, message: str, stalled: str) -> Body:
        told = {"observedGeneration": 1, "reason": reason, "message": message}
        conditions = [
            {"type": "Ready", "status": "Unknown", **told},
            {"type": "Stalled", "status": stalled, **told},
            {"type": "Reconciling", "status": "False" if stalled == "True" else "True", **told},
        ]
        return capture(phase="Pending", observedGeneration=1, conditions=conditions)

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "capture.json"
        path.write_text(json.dumps(MINE))
        return path

    @pytest.mark.parametrize("command", ["up", "run"])
    def test_a_deployment_that_does_not_come_is_named_with_those_that_are_there(
        self, cluster: Cluster, run: Callable[..., Result], file: Path, command: str
    ) -> None:
        lama = {"metadata": {"name": "lama", "namespace": "team"}}
        waiting = self.held("DeploymentNotFound", self.MISSING, "False")
        cluster.holds(waiting, **{"specdecodedeployment/lama": lama})
        answer = run(command, file if command == "up" else "demo", "--deployment-timeout=0")
        assert answer.exit_code == 1
        assert answer.stderr == (
            "error: capture demo: deployment llama is not in namespace team (SpecDecodeDeployments there: lama): apply"
            " it, or create the capture for another one; the capture waits and goes on by itself then, with"
            " --deployment-timeout this command does too; kubectl delete sdc demo -n team removes it\n"
        )

    def test_a_deployment_that_cannot_be_launched_is_told_with_what_hinders_it(
        self, cluster: Cluster, run: Callable[..., Result], file: Path
    ) -> None:
        cluster.holds(self.held("DeploymentNotPlanned", self.STUCK, "True"))
        answer = run("up", file, "--deployment-timeout=0")
        assert answer.exit_code == 1
        assert answer.stderr.startswith(
            f"error: capture demo: {self.STUCK}: correct it (kubectl describe sdd llama -n team); the capture waits"
        )

    def test_a_deployment_on_its_way_is_waited_for(
        self, cluster: Cluster, run: Callable[..., Result], file: Path
    ) -> None:
        """Its model is being read, so it is not the deployment's time that counts."""
        cluster.holds(self.held("DeploymentNotPlanned", "ResolvingModel", "False"))
        answer = run("up", file, "--deployment-timeout=0", "--timeout=1")
        assert answer.stderr == "error: capture demo: after 1 s still Pending: ResolvingModel\n"

    @pytest.mark.parametrize(("reason", "stalled"), [("DeploymentNotFound", "False"), ("DeploymentNotPlanned", "True")])
    def test_who_asks_for_it_waits_longer(
        self, cluster: Cluster, run: Callable[..., Result], file: Path, reason: str, stalled: str
    ) -> None:
        cluster.holds(self.held(reason, "words", stalled))
        answer = run("up", file, "--deployment-timeout=3600", "--timeout=1")
        assert answer.stderr == "error: capture demo: after 1 s still Pending: words\n"

    def test_what_only_another_capture_mends_ends_it_at_once(
        self, cluster: Cluster, run: Callable[..., Result], file: Path
    ) -> None:
        cluster.holds(self.held("WorkloadTooLong", "the phases take 180 s", "True"))
        answer = run("up", file, "--deployment-timeout=3600")
        assert answer.stderr == "error: capture demo: Pending: the phases take 180 s\n"

    CANCELLED = "spec.suspend is true: no engine and no load"

    @classmethod
    def cancelled(cls, generation: int, **spec: Any) -> Body:
        """One whose status is of generation 2."""
        told = {"type": "Succeeded", "status": "Unknown", "reason": "Suspended", "message": cls.CANCELLED}
        body = capture(phase="Cancelled", observedGeneration=2, conditions=[told])
        body["metadata"]["generation"] = generation
        return {**body, "spec": {**body["spec"], **spec}}

    def test_what_down_has_cancelled_begins_anew(
        self, cluster: Cluster, run: Callable[..., Result], file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The file does not say suspend, so applying it leaves what `down` has set; and what the status says is old."""
        monkeypatch.setattr("specdecode_operator.cli.capture.watch._PERIOD_S", 0.0)
        suspended, old, loading = self.cancelled(2, suspend=True), self.cancelled(3), capture(phase="Loading")
        cluster.holds(**{"specdecodecapture/demo": [suspended, old, loading]})
        answer = run("up", file)
        assert answer.exit_code == 0, answer.stderr
        (patch,) = cluster.calls("patch")
        assert patch[-1] == '--patch={"spec":{"suspend":false}}'
        assert "Cancelled" not in answer.stdout

    def test_a_file_that_suspends_the_capture_is_not_overruled(
        self, cluster: Cluster, run: Callable[..., Result], file: Path
    ) -> None:
        body = json.loads(file.read_text())
        file.write_text(json.dumps({**body, "spec": {**body["spec"], "suspend": True}}))
        cluster.holds(self.cancelled(2, suspend=True))
        answer = run("up", file)
        assert answer.stderr == (
            "error: capture demo: the file says spec.suspend: true: remove it there to start the capture\n"
        )
        assert not cluster.calls("patch")

    def test_following_one_that_is_cancelled_says_how_it_goes_on(
        self, cluster: Cluster, run: Callable[..., Result]
    ) -> None:
        cluster.holds(self.cancelled(2, suspend=True))
        answer = run("run", "demo")
        assert answer.stderr == (
            f"error: capture demo: Cancelled: {self.CANCELLED}; it begins anew with: kubectl patch sdc demo -n team"
            """ --type=merge --patch='{"spec":{"suspend":false}}'\n"""
        )

    def test_a_capture_that_is_changed_late_is_given_time_to_be_looked_at(
        self, cluster: Cluster, run: Callable[..., Result], file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = iter(range(0, 10_000, 50))
        monkeypatch.setattr("specdecode_operator.cli.capture.watch.time.monotonic", lambda: next(clock))
        monkeypatch.setattr("specdecode_operator.cli.capture.watch._PERIOD_S", 0.0)
        starting, loading = capture(phase="Starting"), capture(phase="Loading")
        changed = {**starting, "metadata": {**starting["metadata"], "generation": 2}}
        cluster.holds(**{"specdecodecapture/demo": [starting, starting, starting, changed, loading]})
        answer = run("up", file)
        assert answer.exit_code == 0, answer.stderr

    def test_without_an_operator_it_says_so(
        self, cluster: Cluster, run: Callable[..., Result], file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("specdecode_operator.cli.capture.watch._SEEN_WITHIN_S", 0.0)
        cluster.holds({**capture(), "status": {}})
        answer = run("up", file)
        assert answer.stderr == "error: capture demo: no operator has looked at it: see specdecode doctor\n"


class TestDown:
    def test_only_what_is_not_over_is_cancelled(self, cluster: Cluster, run: Callable[..., Result]) -> None:
        cluster.holds(capture("a", "Loading"), capture("b", "Succeeded"))
        answer = run("down")
        assert answer.exit_code == 0
        (patch,) = cluster.calls("patch")
        assert "a" in patch
        assert "a: cancelled" in answer.stdout
        assert "b: Succeeded: holds no GPU" in answer.stdout

    def test_what_was_just_told_to_go_on_is_cancelled_again(self, cluster: Cluster, run: Callable[..., Result]) -> None:
        """Its status still says what it was before."""
        cluster.holds(TestUp.cancelled(3))
        answer = run("down", "demo")
        assert answer.exit_code == 0
        assert cluster.calls("patch")


_LOG = 'E1122 14:02:28.1 11257 memcache.go:265] "Unhandled Error" err="couldn\'t get current server API group list"\n'
SAID = {
    5 * _LOG + "The connection to the server localhost:8080 was refused - did you specify the right host or port?\n": (
        "KUBECONFIG: there: names no cluster: name a kubeconfig, or start a cluster"
    ),
    5 * _LOG + "The connection to the server 10.0.0.1:6443 was refused - did you specify the right host or port?\n": (
        "The connection to the server 10.0.0.1:6443 was refused: is it up, and is this the right one (--context,"
        " KUBECONFIG)?"
    ),
    "Unable to connect to the server: dial tcp: lookup nohost: no such host\n": (
        "Unable to connect to the server: dial tcp: lookup nohost: no such host: is it up, and is this the right one"
        " (--context, KUBECONFIG)?"
    ),
    "Error in configuration: context was not found for specified context: nope\n": (
        "--context: nope: the kubeconfig has no such context: kubectl config get-contexts lists them"
    ),
    'error: error loading config file "there": yaml: line 1: did not find expected node content\n': (
        'KUBECONFIG: there: error loading config file "there": yaml: line 1: did not find expected node content: name'
        " another kubeconfig"
    ),
    "error: timed out waiting for the condition\n": "timed out waiting for the condition",
    "Warning: old\n" + _LOG: "couldn't get current server API group list",
    "": "kubectl ended with exit code 1 and said nothing",
    'The SpecDecodeCapture "a" is invalid: \n* spec.seed: Invalid value\n* spec.record: Invalid value\n'
    "* <nil>: Invalid value: null: some validation rules were not checked because the object was invalid\n": (
        'The SpecDecodeCapture "a" is invalid: spec.seed: Invalid value; spec.record: Invalid value'
    ),
}


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("command", [["status"], ["run"], ["fetch", "demo", "out"], ["down"]])
@pytest.mark.usefixtures("cluster")
def test_what_kubectl_complains_of_is_one_line(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, said: str, command: list[str]
) -> None:
    monkeypatch.setenv("FAKE_SAYS", said)
    monkeypatch.setenv("KUBECONFIG", "there")
    answer = run(*command)
    assert (answer.exit_code, answer.stderr) == (1, f"error: {SAID[said]}\n")


def test_without_kubectl_one_line_says_so(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    answer = run("status")
    assert answer.exit_code == 1
    assert answer.stderr == "error: kubectl: not on PATH: install it, captures are driven through it\n"
