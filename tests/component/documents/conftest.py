"""An API server of its own for each page, and the programs that pages call."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from devcluster.cluster.cluster import Cluster
from tests.support.kubectl import program

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
