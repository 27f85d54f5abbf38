"""A folder of captures may hold folders."""

from collections.abc import Callable
from pathlib import Path

import yaml
from click.testing import Result

from tests.unit.cli.capture.conftest import MINE, Cluster, capture


def test_a_folder_that_is_called_like_a_file_is_passed_over(
    cluster: Cluster, run: Callable[..., Result], tmp_path: Path
) -> None:
    cluster.holds(capture())
    folder = tmp_path / "captures"
    (folder / "old.yaml").mkdir(parents=True)
    (folder / "demo.yaml").write_text(yaml.safe_dump(MINE))
    result = run("up", folder)
    assert "is a folder" not in result.output
    assert [each["metadata"]["name"] for each in cluster.applied()] == ["demo"], result.output
