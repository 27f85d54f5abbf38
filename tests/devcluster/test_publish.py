"""A release as the workflow makes it, on this machine: pushed to a registry, signed, verified, installed from there."""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from devcluster import chart
from devcluster.cluster.cluster import Cluster
from devcluster.host.paths import REPOSITORY
from devcluster.images import store
from devcluster.images.base import ensure_base
from devcluster.release.package import CHECKSUMS, Release, make
from devcluster.release.publish import BUNDLE
from tests.support.code_blocks import blocks
from tests.support.kubectl import Kubectl, program
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.skipif(os.geteuid() != 0, reason="images and namespaces need root")]

REGISTRY = "127.0.0.1:5000"
"""In the cluster's own network, on the machine of its node: there HTTP will do."""

OFFLINE = "--insecure-ignore-tlog"
"""A key alone, as where there is no transparency log."""

ADDED = {
    "cosign": 'case $1 in verify | verify-attestation) set -- "$@" --allow-http-registry ;; esac',
    "helm": 'set -- "$@" --plain-http --wait --timeout=5m',
}
"""To the commands of documents, which are for registries that speak TLS."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A real node, with a registry beside it."""
    cluster = Cluster(f"test-publish-{os.getpid()}")
    try:
        cluster.up("real")
        log = cluster.state / "logs" / "registry.log"
        serve = f"{program('crane')} registry serve --address={REGISTRY} >{log} 2>&1 </dev/null &"
        assert cluster.in_namespace(["sh", "-c", serve]).returncode == 0
        eventually(lambda: "serving on port" in log.read_text(), "the registry serves")
        yield cluster
    finally:
        cluster.down()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The images' base by its digest, as others would have it from a registry."""
    log = tmp_path_factory.mktemp("base") / "log"
    serve = [program("crane"), "registry", "serve", "--address=127.0.0.1:0"]
    with log.open("w") as written, subprocess.Popen(serve, stderr=written) as running:
        try:
            port = eventually(lambda: log.read_text().split("port ")[1].split()[0], "the registry serves")
            name = f"127.0.0.1:{port}/base"
            store.push(ensure_base(), f"{name}:1")
            yield f"{name}@{ran(program('crane'), 'digest', f'{name}:1').strip()}"
        finally:
            running.terminate()


@pytest.fixture(scope="module")
def dist(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release for the registry beside the node."""
    folder = tmp_path_factory.mktemp("release") / "dist"
    make(f"{REGISTRY}/team", base, None, folder)
    return folder


def ran(*command: str | Path, cluster: Cluster | None = None) -> str:
    """Return what a command says, which must succeed, in the cluster's network where one is given."""
    words = [*map(str, command)]
    done = (
        cluster.in_namespace(words) if cluster else subprocess.run(words, capture_output=True, text=True, check=False)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_releases_are_the_same_bytes(base: str, dist: Path, tmp_path: Path) -> None:
    make(f"{REGISTRY}/team", base, None, tmp_path / "dist")
    assert (tmp_path / "dist" / CHECKSUMS).read_text() == (dist / CHECKSUMS).read_text()


@pytest.fixture
def reader(dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the release, and programs that take HTTP and wait for what they install."""
    programs, folder = tmp_path / "programs", tmp_path / "reader"
    for each in (programs, folder):
        each.mkdir()
    for name, more in ADDED.items():
        (programs / name).write_text(f'#!/bin/sh\n{more}\nexec {program(name)} "$@"\n')
        (programs / name).chmod(0o755)
    for file in dist.iterdir():
        (folder / file.name).symlink_to(file)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("COSIGN_PASSWORD", "between us")
    for each in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"HELM_{each}_HOME", str(tmp_path / each))
    return folder


def shown(document: str, *starts: str) -> str:
    """Return commands of a document, by how their blocks begin, for this registry."""
    of = [each.text for each in blocks() if each.document == document]
    texts = [next(text for text in of if text.startswith(start)) for start in starts]
    return "".join(texts).replace("registry.example.com", REGISTRY)


def test_a_release_is_signed_verified_and_installed_from_its_registry(
    cluster: Cluster, dist: Path, reader: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = Release.of(dist)
    for name in ("ours", "theirs"):
        ran(program("cosign"), "generate-key-pair", f"--output-key-prefix={tmp_path / name}")
    publish = (sys.executable, "-m", "devcluster.release.publish", f"--folder={dist}")
    published = ran(*publish, f"--key={tmp_path / 'ours.key'}", cluster=cluster).split()
    assert (published[0], len(published)) == (release.image, 3)
    (reader / BUNDLE).symlink_to(dist / BUNDLE)

    def run(commands: str) -> "subprocess.CompletedProcess[str]":
        return cluster.in_namespace(["bash", "-ec", f"cd {reader}\n{commands}"])

    verify = shown("SECURITY.md", "REGISTRY=registry", "for signed in")
    shutil.copy(tmp_path / "ours.pub", reader / "cosign.pub")
    done = run(verify)
    assert done.returncode == 0, done.stderr
    told = run(f"cosign verify-attestation --key=cosign.pub {OFFLINE} --type=cyclonedx {release.image}")
    (envelope,) = map(json.loads, told.stdout.splitlines())
    sbom = json.loads((dist / release.sbom).read_text())
    assert json.loads(base64.b64decode(envelope["payload"]))["predicate"] == sbom
    (reader / release.sbom).unlink()
    (reader / release.sbom).write_text("{}")
    assert f"{release.sbom}: FAILED" in run(verify).stdout

    shutil.copy(tmp_path / "theirs.pub", reader / "cosign.pub")
    by_key = [f"verify --key=cosign.pub {OFFLINE} {name}" for name in published]
    by_key += [f"verify-attestation --key=cosign.pub {OFFLINE} --type=cyclonedx {release.image}",
               f"verify-blob --key=cosign.pub {OFFLINE} --bundle={BUNDLE} {CHECKSUMS}"]  # fmt: skip
    assert [each for each in by_key if run(f"cosign {each}").returncode == 0] == []

    assert ran(*publish, cluster=cluster).split() == published, "what is there stays"
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    done = run(shown("README.md", "REGISTRY="))
    assert done.returncode == 0, done.stderr
    assert shown("docs/how-to/install.md", "REGISTRY=") == shown("README.md", "REGISTRY=")
    (pod,) = Kubectl(cluster.kubeconfig, chart.NAMESPACE).objects("pods")
    (container,) = pod["status"]["containerStatuses"]
    assert container["ready"]
    assert pod["spec"]["containers"][0]["image"] == release.image
    assert container["imageID"].endswith(release.digest), "pulled by the node, as it was built"
