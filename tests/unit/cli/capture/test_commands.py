"""`specdecode capture` beside up and fetch."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from specdecode_operator.cli.options import ExitCode
from tests.unit.cli.capture.conftest import CONTENT, Body, Cluster, cancelled, capture, content, published


class TestRun:
    @pytest.mark.parametrize(
        ("captures", "words"),
        [
            ([], "no unfinished captures"),
            ([capture("a", "Loading"), capture("b", "Pending")], "2 unfinished captures (a, b)"),
        ],
    )
    def test_run_without_a_name_needs_exactly_one_unfinished_capture(
        self, cluster: Cluster, run: Callable[..., Result], captures: list[Body], words: str
    ) -> None:
        cluster.holds(*captures)
        answer = run("run")
        assert answer.exit_code == ExitCode.INVALID
        assert answer.stderr == f"error: NAME: {words}: set NAME\n"

    def test_run_of_a_failed_capture_ends_with_the_reason(self, cluster: Cluster, run: Callable[..., Result]) -> None:
        ready = {"type": "Ready", "status": "False", "observedGeneration": 1, "message": "the engine was restarted"}
        cluster.holds(capture(phase="Failed", conditions=[ready]))
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
    def test_run_with_an_unknown_name_creates_nothing(
        self, cluster: Cluster, run: Callable[..., Result], there: list[Body], said: str
    ) -> None:
        llama = {"metadata": {"name": "llama", "namespace": "team"}}
        cluster.holds(*there, **{"specdecodedeployment/llama": llama})
        answer = run("run", "demmo")
        assert answer.exit_code == ExitCode.INVALID
        assert answer.stderr == (
            f"error: capture demmo: not found ({said}): add --create to create it with the default load\n"
        )
        assert not cluster.calls("apply")

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["new", "--deployment=llama"], "--deployment: llama: only used with --create: add it"),
            (["--create"], "NAME is missing"),
            (["demo", "--create", "--deployment=other"], "--deployment: other: capture demo belongs to llama"),
        ],
    )
    def test_run_refuses_contradictory_create_options(
        self, cluster: Cluster, run: Callable[..., Result], arguments: list[str], said: str, tmp_path: Path
    ) -> None:
        cluster.holds(capture())
        answer = run("run", *arguments, f"--out={tmp_path / 'out'}")
        assert answer.exit_code == ExitCode.INVALID
        assert answer.stderr.startswith(f"error: {said}")
        assert not cluster.calls("apply")

    def test_run_with_create_creates_the_capture(
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

    def test_run_with_an_unknown_deployment_creates_nothing(self, cluster: Cluster, run: Callable[..., Result]) -> None:
        llama = {"metadata": {"name": "llama", "namespace": "team"}}
        cluster.holds(**{"specdecodedeployment/llama": llama})
        answer = run("run", "new", "--create", "--deployment=lama")
        assert answer.exit_code == ExitCode.INVALID
        assert answer.stderr == "error: --deployment: lama: not found (SpecDecodeDeployments in the namespace: llama)\n"
        assert not cluster.calls("apply")

    def test_run_survives_a_short_api_server_outage(
        self, cluster: Cluster, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr("specdecode_operator.cli.capture.watch._PERIOD_S", 0.0)
        loading = capture(phase="Loading", job="demo-capture")
        seen = [loading, loading, None, None, published()]
        cluster.holds(**{"specdecodecapture/demo": seen})
        cluster.publish()
        answer = run("run", "demo", f"--out={tmp_path / 'out'}")
        assert answer.exit_code == 0, answer.stderr
        assert answer.stdout.count("Connection refused") == 1, "it is told once"

    def test_run_ends_after_a_long_api_server_outage(
        self, cluster: Cluster, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("specdecode_operator.cli.capture.watch._OUTAGE_S", 0.0)
        cluster.holds(**{"specdecodecapture/demo": [capture(phase="Loading"), None]})
        answer = run("run", "demo")
        assert answer.exit_code == ExitCode.INVALID
        assert answer.stderr.startswith("error: cannot reach the API server at 127.0.0.1:6443 (Connection refused)")


# What kubectl complains of, in the words of `specdecode capture`.

_LOG = 'E1122 14:02:28.1 11257 memcache.go:265] "Unhandled Error" err="couldn\'t get current server API group list"\n'
SAID = {
    5 * _LOG + "The connection to the server 10.0.0.1:6443 was refused - did you specify the right host or port?\n": (
        "cannot reach the API server at 10.0.0.1:6443 (Connection refused)"
    ),
    "Unable to connect to the server: dial tcp: lookup nohost: no such host\n": (
        "cannot reach the API server (dial tcp: lookup nohost: no such host)"
    ),
    'error: error loading config file "there": yaml: line 1: did not find expected node content\n': (
        'KUBECONFIG: there: cannot be read (error loading config file "there": yaml: line 1: did not find expected node'
        " content)"
    ),
    "error: timed out waiting for the condition\n": "timed out waiting for the condition",
    "Warning: old\n" + _LOG: "couldn't get current server API group list",
    "": "kubectl exited with code 1 and no message",
    'The SpecDecodeCapture "a" is invalid: \n* spec.seed: Invalid value\n* spec.record: Invalid value\n'
    "* <nil>: Invalid value: null: some validation rules were not checked because the object was invalid\n": (
        'The SpecDecodeCapture "a" is invalid: spec.seed: Invalid value; spec.record: Invalid value'
    ),
}


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("command", [["status"], ["run"], ["fetch", "demo", "out"], ["down"]])
@pytest.mark.usefixtures("cluster")
def test_kubectl_errors_are_shown_in_one_line(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, command: list[str]
) -> None:
    monkeypatch.setenv("FAKE_SAYS", said)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").touch()
    monkeypatch.setenv("KUBECONFIG", "there")
    answer = run(*command)
    assert answer.exit_code == ExitCode.INVALID
    assert answer.stderr.startswith(f"error: {SAID[said]}")
    assert answer.stderr.count("\n") == 1


def test_missing_kubectl_is_reported_in_one_line(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    answer = run("status")
    assert answer.exit_code == ExitCode.INVALID
    assert answer.stderr.startswith("error: kubectl: not found on PATH: ")


# `specdecode capture down`: what is cancelled, and what is left alone.


class TestDown:
    def test_down_cancels_only_unfinished_captures(self, cluster: Cluster, run: Callable[..., Result]) -> None:
        cluster.holds(capture("a", "Loading"), capture("b", "Succeeded"))
        answer = run("down")
        assert answer.exit_code == 0
        (patch,) = cluster.calls("patch")
        assert "a" in patch
        assert "a: cancelled" in answer.stdout
        assert "b: Succeeded: uses no GPUs" in answer.stdout

    def test_down_cancels_a_capture_that_was_just_resumed(self, cluster: Cluster, run: Callable[..., Result]) -> None:
        """Its status still says what it was before."""
        cluster.holds(cancelled(3))
        answer = run("down", "demo")
        assert answer.exit_code == 0
        assert cluster.calls("patch")


# `specdecode capture status`: what the cluster says, a line a capture.


def test_control_characters_from_the_cluster_are_escaped(cluster: Cluster, run: Callable[..., Result]) -> None:
    """Whoever may write the status of a capture writes its words."""
    told = {"status": "True", "observedGeneration": 1, "message": "a\x1b[2J\u202eb\nother: Succeeded"}
    conditions = [{"type": type_, **told} for type_ in ("Ready", "Stalled")]
    cluster.holds(capture(phase="Pending", claim="c\x9b2K", path="p\nq", conditions=conditions))
    for command in ("status", "down", "run"):
        output = run(command, "demo").output
        assert output.replace("\n", "").isprintable()
        assert "\nother" not in output
        assert "\nq" not in output


# Nobody's GPUs are taken by a guess, and a capture that is cancelled already is left as it is.


def test_create_with_several_deployments_needs_a_choice(cluster: Cluster, run: Callable[..., Result]) -> None:
    both = {f"specdecodedeployment/{name}": {"metadata": {"name": name}} for name in ("chat", "code")}
    cluster.holds(**both)
    result = run("run", "demo", "--create")
    assert result.exit_code == ExitCode.INVALID
    assert "SpecDecodeDeployments in the namespace: chat, code" in result.output
    assert not cluster.calls("apply")


# Options of kubectl.


@pytest.mark.parametrize("command", ["status", "down"])
def test_a_selector_that_looks_like_an_option_stays_a_selector(
    cluster: Cluster, run: Callable[..., Result], command: str
) -> None:
    cluster.holds(capture())
    answer = run(command, "-l", "--all-namespaces", "-n", "-A", "--context", "--kubeconfig=x", "--kubeconfig", "-f")
    assert answer.exit_code == 0, answer.stderr
    (call,) = cluster.calls("get")
    chosen = ["--kubeconfig=-f", "--context=--kubeconfig=x", "--namespace=-A"]
    assert call[:3] == chosen
    assert "--selector=--all-namespaces" in call
    assert "--all-namespaces" not in call


def test_status_of_all_namespaces_shows_the_namespace(cluster: Cluster, run: Callable[..., Result]) -> None:
    cluster.holds(capture("a", "Loading"), capture("b"))
    answer = run("status", "-A")
    assert [line.partition(": ")[0] for line in answer.stdout.splitlines()] == ["team/a", "team/b"]
    assert "--all-namespaces" in cluster.calls("get")[0]


@pytest.mark.parametrize("option", ["-A", "-l=x"])
def test_name_excludes_selector_and_all_namespaces(cluster: Cluster, run: Callable[..., Result], option: str) -> None:
    cluster.holds(capture())
    answer = run("status", "demo", option)
    assert answer.exit_code == ExitCode.INVALID
    assert not cluster.calls("get")


def test_watch_prints_a_capture_again_when_it_changes(
    cluster: Cluster, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdecode_operator.cli.terminal._POLL_S", 0.0)
    cluster.holds(**{"specdecodecapture/demo": [capture(phase="Pending")] * 3 + [capture(), None]})
    answer = run("status", "demo", "-w")
    assert answer.exit_code == ExitCode.INVALID, "the API server is away"
    assert [line.split(": ")[1] for line in answer.stdout.split("\n") if line] == ["Pending", "Succeeded"]
