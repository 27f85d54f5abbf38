"""A release as the workflow makes it, on this machine: pushed to a registry, signed, verified, installed from there."""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from devcluster import chart
from devcluster.cluster.cluster import Cluster
from devcluster.host.paths import REPOSITORY
from devcluster.images import store
from devcluster.images.base import ensure_base
from devcluster.release.package import CHECKSUMS, make
from devcluster.release.publish import BUNDLE
from devcluster.release.record import Release
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


@dataclass(frozen=True)
class Published:
    """A release in the registry, signed by us, and who reads of it: with its files, and our public key."""

    release: Release
    names: list[str]
    """Image and charts by digest."""
    again: Callable[[], list[str]]
    """Publishes once more."""
    folder: Path
    cluster: Cluster
    programs: Path

    def run(self, commands: str) -> "subprocess.CompletedProcess[str]":
        """Run commands as somebody with these files would, next to the registry."""
        variables = [f"PATH={self.programs}:{os.environ['PATH']}", f"KUBECONFIG={self.cluster.kubeconfig}"]
        variables += [f"HELM_{each}_HOME={self.programs / each}" for each in ("CACHE", "CONFIG", "DATA")]
        return self.cluster.in_namespace(["env", *variables, "bash", "-ec", f"cd {self.folder}\n{commands}"])


@pytest.fixture(scope="module")
def published(cluster: Cluster, dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Published:
    """The release, pushed and signed."""
    keys, programs, folder = (tmp_path_factory.mktemp(name) for name in ("keys", "programs", "reader"))
    variables = ("env", f"PYTHONPATH={REPOSITORY}", "COSIGN_PASSWORD=between us")
    for name in ("ours", "theirs"):
        ran(*variables, program("cosign"), "generate-key-pair", f"--output-key-prefix={keys / name}")
    publish = (*variables, sys.executable, "-m", "devcluster.release.publish", f"--folder={dist}")
    names = ran(*publish, f"--key={keys / 'ours.key'}", cluster=cluster).split()
    for name, more in ADDED.items():
        (programs / name).write_text(f'#!/bin/sh\n{more}\nexec {program(name)} "$@"\n')
        (programs / name).chmod(0o755)
    for file in dist.iterdir():
        (folder / file.name).symlink_to(file)
    shutil.copy(keys / "ours.pub", folder / "cosign.pub")
    shutil.copy(keys / "theirs.pub", folder)
    return Published(Release.of(dist), names, lambda: ran(*publish, cluster=cluster).split(), folder, cluster, programs)


def shown(document: str, *starts: str) -> str:
    """Return commands of a document, by how their blocks begin, for this registry."""
    of = [each.text for each in blocks() if each.document == document]
    texts = [next(text for text in of if text.startswith(start)) for start in starts]
    return "".join(texts).replace("registry.example.com", REGISTRY)


VERIFY = shown("SECURITY.md", "REGISTRY=registry", "for signed in")


def test_a_release_is_verified_as_the_page_says(published: Published) -> None:
    assert (published.names[0], len(published.names)) == (published.release.image, 3)
    done = published.run(VERIFY)
    assert done.returncode == 0, done.stderr
    asked = f"cosign verify-attestation --key=cosign.pub {OFFLINE} --type=cyclonedx {published.release.image}"
    (envelope,) = map(json.loads, published.run(asked).stdout.splitlines())
    sbom = json.loads((published.folder / published.release.sbom).read_text())
    assert json.loads(base64.b64decode(envelope["payload"]))["predicate"] == sbom


def test_what_another_key_signed_is_refused_one_by_one(published: Published) -> None:
    theirs = f"--key=theirs.pub {OFFLINE}"
    signed = [f"verify {theirs} {name}" for name in published.names]
    signed += [
        f"verify-attestation {theirs} --type=cyclonedx {published.release.image}",
        f"verify-blob {theirs} --bundle={BUNDLE} {CHECKSUMS}",
    ]
    taken = [each for each in signed if published.run(f"cosign {each}").returncode == 0]
    assert taken == []


def test_a_changed_file_is_refused(published: Published) -> None:
    file = published.folder / published.release.sbom
    original = file.readlink()
    file.unlink()
    file.write_text("{}")
    assert f"{file.name}: FAILED" in published.run(VERIFY).stdout
    file.unlink()
    file.symlink_to(original)


def test_what_is_published_stays(published: Published) -> None:
    assert published.again() == published.names


def test_a_release_is_installed_from_its_registry_as_the_pages_say(published: Published) -> None:
    done = published.run(shown("docs/install/install.md", "REGISTRY="))
    assert done.returncode == 0, done.stderr
    assert f"oci://{REGISTRY}/team/charts/specdecode-operator --version" in done.stdout, "told by the CRDs' chart"
    (pod,) = Kubectl(published.cluster.kubeconfig, chart.NAMESPACE).objects("pods")
    (container,) = pod["status"]["containerStatuses"]
    assert container["ready"]
    assert pod["spec"]["containers"][0]["image"] == published.release.image
    assert container["imageID"].endswith(published.release.digest), "pulled by the node, as it was built"
