"""Commands of the documents that are for a cluster run against a real API server, page by page."""

from pathlib import Path

import pytest

from devcluster.cluster.cluster import Cluster
from tests.support.documented_commands import PAGES
from tests.support.page_run import run_page


@pytest.mark.long
@pytest.mark.parametrize("page", sorted(page for page, how in PAGES.items() if how.cluster))
def test_documented_cluster_commands_run(page: str, cluster: Cluster, programs: Path, tmp_path: Path) -> None:
    printed = run_page(page, tmp_path / "reader", cluster.kubeconfig, str(programs))
    for block, output in printed.items():
        assert "jsonpath" not in block.text or output.strip(), f"{block}: the path leads to nothing"
