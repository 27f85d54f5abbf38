"""`specdecode capture status`: what the cluster says, a line a capture."""

from collections.abc import Callable

from click.testing import Result

from tests.unit.cli.capture.conftest import Cluster, capture


def test_what_the_cluster_says_does_nothing_to_a_terminal(cluster: Cluster, run: Callable[..., Result]) -> None:
    """Whoever may write the status of a capture writes its words."""
    told = {
        "type": "Stalled",
        "status": "True",
        "observedGeneration": 1,
        "message": "a\x1b[2J\u202eb\nother: Succeeded",
    }
    cluster.holds(capture(phase="Pending", claim="c\x9b2K", path="p\nq", conditions=[told]))
    for command in ("status", "down", "run"):
        output = run(command, "demo").output
        assert output.replace("\n", "").isprintable()
        assert "\nother" not in output
        assert "\nq" not in output
