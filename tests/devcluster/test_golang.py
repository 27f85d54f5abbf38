"""Programs and sources come from the Go module index alone: nothing that an earlier step left is needed."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from devcluster.builds import binaries, golang
from devcluster.host.errors import ClusterError
from devcluster.host.paths import TOOLS

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ("SPECDECODE_CACHE", "GOMODCACHE", "GOCACHE"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    yield
    # Gigabytes, which pytest would keep; Go makes its module cache read-only.
    subprocess.run(["chmod", "-R", "u+w", tmp_path], check=True)
    shutil.rmtree(tmp_path)


def test_leader_worker_sets_have_their_files() -> None:
    sources = binaries.lws_sources()
    assert sources.is_absolute()
    assert list((sources / "crd/bases").glob("*.yaml"))
    assert (sources / "webhook/manifests.yaml").exists()


def test_simulated_nodes_have_their_stages() -> None:
    stages = {path.name: path.read_text() for path in binaries.kwok_stages()}
    assert {"node-initialize.yaml", "pod-ready.yaml"} <= stages.keys()
    assert "containerID: " in stages["pod-ready.yaml"], "as kubelets say it"


@pytest.mark.parametrize(
    ("module", "package", "flags"),
    sorted({(each.name, package, each.flags) for each in binaries.GROUPS for package in each.packages.values()}),
)
def test_programs_are_built(module: str, package: str, flags: str, tmp_path: Path) -> None:
    golang.build(TOOLS / module, package, tmp_path / "program", flags)
    assert (tmp_path / "program").stat().st_mode & 0o111


def test_a_source_that_is_not_there_is_named() -> None:
    with pytest.raises(ClusterError, match=r"example\.invalid/none"):
        golang.module_dir(TOOLS / "lws", "example.invalid/none")
