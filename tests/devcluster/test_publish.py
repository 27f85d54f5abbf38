"""A release as the workflow makes it, on this machine: pushed to a registry, signed, verified, installed from there."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from devcluster import chart
from devcluster.cluster.cluster import Cluster
from devcluster.images import store
from devcluster.images.base import ensure_base
from devcluster.release.package import CHECKSUMS, Release, make
from devcluster.release.publish import BUNDLE
from tests.support.kubectl import Kubectl, program
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.skipif(os.geteuid() != 0, reason="images and namespaces need root")]

REGISTRY = "127.0.0.1:5000"
"""In the cluster's own network, on the machine of its node: there HTTP will do."""

OFFLINE = ("--insecure-ignore-tlog=true",)
"""A key alone, as where there is no transparency log."""

HTTP = "--allow-http-registry"


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


def test_a_release_is_signed_verified_and_installed_from_its_registry(
    cluster: Cluster, dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = Release.of(dist)
    monkeypatch.setenv("COSIGN_PASSWORD", "between us")
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    for each in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"HELM_{each}_HOME", str(tmp_path / each))
    keys = {name: tmp_path / f"{name}.pub" for name in ("ours", "theirs")}
    for public in keys.values():
        ran(program("cosign"), "generate-key-pair", f"--output-key-prefix={public.with_suffix('')}")
    command = (sys.executable, "-m", "devcluster.release.publish", f"--folder={dist}")
    signed = (*command, f"--key={keys['ours'].with_suffix('.key')}")
    published = ran(*signed, cluster=cluster).split()
    assert published[0] == release.image
    assert len(published) == 3

    def cosign(what: str, *arguments: str, key: str = "ours") -> "subprocess.CompletedProcess[str]":
        return cluster.in_namespace([program("cosign"), what, f"--key={keys[key]}", *OFFLINE, *arguments])

    for name in published:
        assert cosign("verify", HTTP, name).returncode == 0, name
        assert cosign("verify", HTTP, name, key="theirs").returncode != 0, name
    told = cosign("verify-attestation", "--type=cyclonedx", HTTP, release.image)
    assert told.returncode == 0, told.stderr
    (envelope,) = map(json.loads, told.stdout.splitlines())
    assert json.loads(base64.b64decode(envelope["payload"]))["predicate"] == json.loads(
        (dist / release.sbom).read_text()
    )
    files = (f"--bundle={dist / BUNDLE}", str(dist / CHECKSUMS))
    assert cosign("verify-blob", *files).returncode == 0
    assert cosign("verify-blob", *files, key="theirs").returncode != 0

    assert ran(*command, cluster=cluster).split() == published, "what is there stays"

    for name in (chart.CRDS.name, chart.CHART.name):
        source = (f"oci://{release.registry}/charts/{name}", f"--version={release.version}", "--plain-http")
        where = (f"--namespace={chart.NAMESPACE}", "--create-namespace", "--wait", "--timeout=5m")
        ran(program("helm"), "install", name, *source, *where, cluster=cluster)
    (pod,) = Kubectl(cluster.kubeconfig, chart.NAMESPACE).objects("pods")
    (container,) = pod["status"]["containerStatuses"]
    assert container["ready"]
    assert pod["spec"]["containers"][0]["image"] == release.image
    assert container["imageID"].endswith(release.digest), "pulled by the node, as it was built"
