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
        path.write_text(json.dumps(capture() | {"kind": "SpecDecodeCapture"}))
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


def test_without_kubectl_one_line_says_so(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    answer = run("status")
    assert answer.exit_code == 1
    assert answer.stderr == "error: kubectl: not on PATH: install it, captures are driven through it\n"
