"""Commands of the documents that are for a cluster run against a real API server, page by page."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from devcluster.cluster.cluster import Cluster
from tests.support.documented_commands import PAGES
from tests.support.kubectl import program
from tests.support.page_run import run_page

PROGRAMS = ("cosign", "helm", "kubectl")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """An API server that has seen no page before."""
    cluster = Cluster(f"test-pages-{os.getpid()}")
    try:
        cluster.up("none")
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with what the pages call, for PATH."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in PROGRAMS:
        (folder / name).symlink_to(program(name))
    return folder


@pytest.mark.long
@pytest.mark.parametrize("page", sorted(page for page, how in PAGES.items() if how.cluster))
def test_commands_for_a_cluster_run(page: str, cluster: Cluster, programs: Path, tmp_path: Path) -> None:
    printed = run_page(page, tmp_path / "reader", cluster.kubeconfig, str(programs))
    for block, output in printed.items():
        assert "jsonpath" not in block.text or output.strip(), f"{block}: the path leads to nothing"
