"""`specdecode capture run` where something is in the way; the e2e tests walk the good way."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from tests.unit.cli.capture.conftest import CONTENT, Body, Cluster, capture, content, published


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
            (["--create"], "NAME: is missing: give the capture that is created a name"),
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
