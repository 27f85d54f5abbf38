"""`specdecode capture up`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from specdecode_operator.cli.main import app
from specdecode_operator.cli.options import ExitCode
from tests.unit.cli.capture.conftest import CANCELLED, MINE, Body, Cluster, cancelled, capture


class TestUp:
    """The capture is applied, and waits for its deployment; the command does not for long."""

    MISSING = "spec.deployment: llama: there is no SpecDecodeDeployment of this name"
    STUCK = "deployment llama has no plan in force (DoesNotFit: 3 GiB are missing); continues when it has one"

    @pytest.mark.parametrize(
        ("documents", "said"),
        [
            (
                [MINE, {**MINE, "kind": "Pod"}],
                "document 2: kind: Pod: is not a SpecDecodeCapture: apply it with kubectl",
            ),
            ([{"kind": "List", "items": [MINE, {"kind": "Secret"}]}], "document 1, item 2: kind: Secret: is no"),
            ([{**MINE, "kind": "SpecDecodeDeployment"}], "document 1: kind: SpecDecodeDeployment: is no"),
            ([{**MINE, "apiVersion": "batch/v1"}], "document 1: apiVersion: batch/v1: use specdecode.io/v1alpha1"),
            ([{}], "document 1: kind: is missing: is not a SpecDecodeCapture"),
            ([MINE, MINE], "document 2: metadata.name: demo: duplicate name: rename one"),
            ([{**MINE, "metadata": {"generateName": "a-"}}], "document 1: metadata.name: is missing: name the object"),
            ([{**MINE, "metadata": []}], "document 1: metadata.name: is missing: name the object"),
            (
                [{**MINE, "metadata": {"name": "a", "namespace": [1]}}],
                "metadata.namespace: [1]: must be text",
            ),
            ([MINE, [MINE]], "capture.yaml: contains a list"),
            ([{"kind": "List", "items": [MINE, 7]}], "capture.yaml: contains a list without objects"),
            ([{**MINE, "spec": []}], "document 1: spec: must be an object"),
        ],
    )
    def test_file_with_another_kind_is_refused_as_a_whole(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path, documents: list[Body], said: str
    ) -> None:
        file = tmp_path / "capture.yaml"
        file.write_text("\n---\n".join(map(json.dumps, documents)))
        answer = run("up", file)
        assert answer.exit_code == ExitCode.INVALID
        assert answer.stderr.startswith("error: nothing was applied: ")
        assert said in answer.stderr
        assert not (cluster.folder / "calls.jsonl").exists(), "nobody was asked for anything"

    @pytest.mark.parametrize("how", ["file", "list", "folder", "stdin"])
    def test_several_captures_are_applied_together_or_not_at_all(
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
        assert CliRunner().invoke(app, ["capture", "up", source], input=text).exit_code == ExitCode.INVALID
        assert len(cluster.calls("apply")) == 1

    @pytest.mark.parametrize("what", ["missing", "empty folder", "empty file", "no name"])
    def test_input_without_a_capture_is_refused_in_one_line(
        self, cluster: Cluster, run: Callable[..., Result], tmp_path: Path, what: str
    ) -> None:
        path = tmp_path / "input"
        if what == "empty folder":
            path.mkdir()
        elif what == "empty file":
            path.write_text("")
        answer = run("up", "" if what == "no name" else path)
        assert answer.exit_code == ExitCode.INVALID
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
    def test_missing_deployment_is_named_with_the_existing_ones(
        self, cluster: Cluster, run: Callable[..., Result], file: Path, command: str
    ) -> None:
        lama = {"metadata": {"name": "lama", "namespace": "team"}}
        waiting = self.held("DeploymentNotFound", self.MISSING, "False")
        cluster.holds(waiting, **{"specdecodedeployment/lama": lama})
        answer = run(command, file if command == "up" else "demo", "--deployment-timeout=0")
        assert answer.exit_code == 1
        assert answer.stderr.startswith(
            "error: capture demo: deployment llama not found in namespace team (SpecDecodeDeployments there: lama): "
        )
        assert "--deployment-timeout" in answer.stderr
        assert answer.stderr.endswith("kubectl delete sdc demo -n team\n")

    def test_deployment_that_cannot_launch_is_reported_with_the_reason(
        self, cluster: Cluster, run: Callable[..., Result], file: Path
    ) -> None:
        cluster.holds(self.held("DeploymentNotPlanned", self.STUCK, "True"))
        answer = run("up", file, "--deployment-timeout=0")
        assert answer.exit_code == 1
        assert answer.stderr.startswith(
            f"error: capture demo: {self.STUCK}: fix the deployment (kubectl describe sdd llama -n team); "
        )

    def test_deployment_in_progress_is_not_bound_by_deployment_timeout(
        self, cluster: Cluster, run: Callable[..., Result], file: Path
    ) -> None:
        """Its model is being read, so it is not the deployment's time that counts."""
        cluster.holds(self.held("DeploymentNotPlanned", "ResolvingModel", "False"))
        answer = run("up", file, "--deployment-timeout=0", "--timeout=1")
        assert answer.stderr == "error: capture demo: after 1 s still Pending: ResolvingModel\n"

    @pytest.mark.parametrize(("reason", "stalled"), [("DeploymentNotFound", "False"), ("DeploymentNotPlanned", "True")])
    def test_deployment_timeout_extends_the_wait(
        self, cluster: Cluster, run: Callable[..., Result], file: Path, reason: str, stalled: str
    ) -> None:
        cluster.holds(self.held(reason, "words", stalled))
        answer = run("up", file, "--deployment-timeout=3600", "--timeout=1")
        assert answer.stderr == "error: capture demo: after 1 s still Pending: words\n"

    def test_invalid_capture_ends_the_wait_at_once(
        self, cluster: Cluster, run: Callable[..., Result], file: Path
    ) -> None:
        cluster.holds(self.held("WorkloadTooLong", "the phases take 180 s", "True"))
        answer = run("up", file, "--deployment-timeout=3600")
        assert answer.stderr == "error: capture demo: Pending: the phases take 180 s\n"

    def test_capture_cancelled_by_down_is_started_again(
        self, cluster: Cluster, run: Callable[..., Result], file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The file does not say suspend, so applying it leaves what `down` has set; and what the status says is old."""
        monkeypatch.setattr("specdecode_operator.cli.capture.watch._PERIOD_S", 0.0)
        suspended, old, loading = cancelled(2, suspend=True), cancelled(3), capture(phase="Loading")
        cluster.holds(**{"specdecodecapture/demo": [suspended, old, loading]})
        answer = run("up", file)
        assert answer.exit_code == 0, answer.stderr
        (patch,) = cluster.calls("patch")
        assert patch[-1] == '--patch={"spec":{"suspend":false}}'
        assert "Cancelled" not in answer.stdout

    def test_suspend_in_the_file_is_not_overridden(
        self, cluster: Cluster, run: Callable[..., Result], file: Path
    ) -> None:
        body = json.loads(file.read_text())
        file.write_text(json.dumps({**body, "spec": {**body["spec"], "suspend": True}}))
        cluster.holds(cancelled(2, suspend=True))
        answer = run("up", file)
        assert answer.stderr == (
            "error: capture demo: spec.suspend is true in the file: remove it to start the capture\n"
        )
        assert not cluster.calls("patch")

    def test_run_of_a_cancelled_capture_says_how_to_resume(self, cluster: Cluster, run: Callable[..., Result]) -> None:
        cluster.holds(cancelled(2, suspend=True))
        answer = run("run", "demo")
        assert answer.stderr == (
            f"error: capture demo: Cancelled: {CANCELLED}; to start it again, run: kubectl patch sdc demo -n team"
            """ --type=merge --patch='{"spec":{"suspend":false}}'\n"""
        )

    def test_changed_capture_gets_new_time_to_be_reconciled(
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

    def test_capture_without_an_operator_is_reported(
        self, cluster: Cluster, run: Callable[..., Result], file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("specdecode_operator.cli.capture.watch._SEEN_WITHIN_S", 0.0)
        cluster.holds({**capture(), "status": {}})
        answer = run("up", file)
        assert answer.stderr == "error: capture demo: not reconciled by any operator: run specdecode doctor\n"


# A folder of captures may hold folders.


def test_subfolder_named_like_a_yaml_file_is_ignored(
    cluster: Cluster, run: Callable[..., Result], tmp_path: Path
) -> None:
    cluster.holds(capture())
    folder = tmp_path / "captures"
    (folder / "old.yaml").mkdir(parents=True)
    (folder / "demo.yaml").write_text(yaml.safe_dump(MINE))
    result = run("up", folder)
    assert "is a folder" not in result.output
    assert [each["metadata"]["name"] for each in cluster.applied()] == ["demo"], result.output


def test_recursive_option_reads_subfolders(cluster: Cluster, run: Callable[..., Result], tmp_path: Path) -> None:
    cluster.holds(capture(), capture("other"))
    below = tmp_path / "captures" / "below"
    below.mkdir(parents=True)
    (below / "demo.yaml").write_text(yaml.safe_dump(MINE))
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({**MINE, "metadata": {"name": "other"}}))
    folder, file = tmp_path / "captures", tmp_path / "other.yaml"
    assert run("up", "-f", folder).exit_code == ExitCode.INVALID
    answer = run("up", "-R", "-f", folder, "-f", file)
    assert answer.exit_code == 0, answer.stderr
    assert [each["metadata"]["name"] for each in cluster.applied()[-1]["items"]] == ["demo", "other"]
