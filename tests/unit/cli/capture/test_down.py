"""`specdecode capture down`: what is cancelled, and what is left alone."""

from collections.abc import Callable

from click.testing import Result

from tests.unit.cli.capture.conftest import Cluster, cancelled, capture


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
        cluster.holds(cancelled(3))
        answer = run("down", "demo")
        assert answer.exit_code == 0
        assert cluster.calls("patch")
