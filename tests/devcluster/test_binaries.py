import re
import stat
from pathlib import Path

import pytest

from devcluster.builds import binaries
from devcluster.cluster.cluster import Cluster
from devcluster.host.errors import ClusterError
from devcluster.host.paths import TOOLS


def program(directory: Path, name: str, says: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


GO = """#!/bin/sh
[ "$1" = env ] && exec echo go1.99.0
echo "${PWD##*/}" >>"$SPECDECODE_CACHE/../builds"
while [ "$1" != -o ]; do shift; done
echo "#!/bin/sh" >"$2"
"""
"""A compiler that writes down which modules it builds."""


@pytest.fixture(autouse=True)
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDECODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)


def test_kubebuilder_assets_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "path", "etcd", "etcd Version: 3.6.1")
    wanted = program(tmp_path / "assets", "etcd", "etcd Version: 3.6.4")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path / "assets"))
    assert binaries.find("etcd") == {"etcd": wanted}


def test_path_comes_before_the_cache(tmp_path: Path) -> None:
    wanted = program(tmp_path / "path", "kube-apiserver", "Kubernetes v1.34.1")
    program(tmp_path / "cache/bin/kubernetes-1.34.4", "kube-apiserver", "Kubernetes v1.34.4")
    assert binaries.find("kube-apiserver") == {"kube-apiserver": wanted}


@pytest.mark.parametrize("minor", binaries.CONTROL_PLANES)
def test_other_minors_have_a_control_plane_and_the_rest_of_the_usual_one(minor: str, tmp_path: Path) -> None:
    own, usual = (f"{each.name}-{each.version}" for each in (binaries.CONTROL_PLANES[minor], binaries.GROUPS[0]))
    for folder in (usual, own):
        for name in ("kube-apiserver", "kubelet"):
            program(tmp_path / "cache/bin" / folder, name, "of no version")
    found = binaries.find("kube-apiserver", "kubelet", kubernetes=minor)
    assert [found[name].parent.name for name in ("kube-apiserver", "kubelet")] == [own, usual]


@pytest.mark.parametrize(
    ("nodes", "kubernetes", "said"),
    [
        ("none", "1.29", "--kubernetes 1.29: use one of 1.37, 1.34, 1.30"),
        ("real", "1.30", "--kubernetes 1.30 has no kubelet"),
    ],
)
def test_what_cannot_be_started_is_told(nodes: str, kubernetes: str, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        Cluster("test-binaries").up(nodes, kubernetes)


def test_a_version_that_does_not_fit_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(tmp_path / "assets", "kube-apiserver", "Kubernetes v1.29.0")
    program(tmp_path / "path", "kube-apiserver", "Kubernetes v1.35.0")
    wanted = program(tmp_path / "cache/bin/kubernetes-1.34.4", "kube-apiserver", "Kubernetes v1.34.4")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path / "assets"))
    assert binaries.find("kube-apiserver") == {"kube-apiserver": wanted}
    assert "KUBEBUILDER_ASSETS: kube-apiserver is 1.29, not used" in capsys.readouterr().err


@pytest.mark.parametrize("group", [*binaries.GROUPS, *binaries.CONTROL_PLANES.values()], ids=lambda group: group.name)
def test_versions_are_those_of_the_go_modules(group: binaries.Group) -> None:
    module = (TOOLS / group.name / "go.mod").read_text()
    if group.version != "1":  # ours has no version
        assert re.search(rf"\bv{re.escape(group.version)}( // indirect)?$", module, re.MULTILINE)


def test_etcd_has_the_version_of_its_go_module() -> None:
    assert f"go.etcd.io/etcd/server/v3 v{binaries.ETCD}\n" in (TOOLS / "kubernetes" / "go.mod").read_text()


def test_one_build_gives_all_programs_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = program(tmp_path / "cache/bin/kubernetes-1.34.4", "kubelet", "of an earlier build")
    program(tmp_path / "path", "go", "go1.99.0").write_text(GO)
    found = binaries.find("etcd", "kube-apiserver", "kubelet", "pause")
    assert (tmp_path / "builds").read_text().splitlines() == ["kubernetes", "pause"]
    assert found["etcd"].samefile(found["kube-apiserver"])
    assert found["kubelet"] == old
    assert "earlier" in old.read_text(), "a program that may run is not replaced"
    assert not list(found["etcd"].parent.glob(".*"))
