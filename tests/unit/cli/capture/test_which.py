"""Nobody's GPUs are taken by a guess, and a capture that is cancelled already is left as it is."""

from collections.abc import Callable

from click.testing import Result

from tests.unit.cli.capture.conftest import Cluster, cancelled


def test_of_several_deployments_none_is_taken(cluster: Cluster, run: Callable[..., Result]) -> None:
    both = {f"specdecodedeployment/{name}": {"metadata": {"name": name}} for name in ("chat", "code")}
    cluster.holds(**both)
    result = run("run", "demo", "--create")
    assert result.exit_code == 1
    assert "SpecDecodeDeployments here are: chat, code; name one" in result.output
    assert not cluster.calls("apply")


def test_what_is_cancelled_already_is_not_cancelled_again(cluster: Cluster, run: Callable[..., Result]) -> None:
    cluster.holds(cancelled(3, suspend=True))
    result = run("down", "demo")
    assert "demo: suspended: holds no GPU" in result.output
    assert not cluster.calls("patch")


def test_where_no_capture_is_no_claim_is_named(cluster: Cluster, run: Callable[..., Result]) -> None:
    result = run("down")
    assert result.exit_code == 0
    assert "nothing to free" in result.output
    assert "data:" not in result.output
