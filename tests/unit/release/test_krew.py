"""The kubectl plugin of a release: its manifest, and the script that it installs."""

import hashlib
import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

from devcluster.release import krew
from devcluster.release.record import Release

RELEASE = Release("0.4.0", "r.io/team", f"sha256:{'a' * 64}", "base", "https://github.com/team/operator")


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """The folder that krew unpacks the archive into."""
    with tarfile.open(fileobj=io.BytesIO(krew.archive())) as tar:
        tar.extractall(tmp_path, filter="data")
    return tmp_path


def test_the_manifest_has_the_fields_that_krew_requires(tmp_path: Path, plugin: Path) -> None:
    krew.write(RELEASE, tmp_path)
    manifest = yaml.safe_load((tmp_path / krew.MANIFEST).read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("krew.googlecontainertools.github.com/v1alpha2", "Plugin")
    assert f"{manifest['metadata']['name']}.yaml" == krew.MANIFEST
    spec = manifest["spec"]
    assert spec["version"] == "v0.4.0"
    assert len(spec["shortDescription"]) <= 50
    assert spec["homepage"] == RELEASE.source
    (platform,) = spec["platforms"]
    archive = tmp_path / krew.archive_name(RELEASE)
    assert platform["uri"] == f"{RELEASE.source}/releases/download/v0.4.0/{archive.name}"
    assert platform["sha256"] == hashlib.sha256(archive.read_bytes()).hexdigest()
    assert {each["from"] for each in platform["files"]} == {"LICENSE", "kubectl-specdecode"}
    assert all((plugin / each["from"]).is_file() for each in platform["files"])
    assert os.access(plugin / platform["bin"], os.X_OK)


def test_manifest_without_a_repository_has_placeholder_urls() -> None:
    release = Release("0.4.0", "r.io/team", RELEASE.digest, "base")
    assert krew.manifest(release)["spec"]["homepage"] == "https://github.com/OWNER/REPOSITORY"


def run(plugin: Path, *arguments: str, path: Path | str) -> "subprocess.CompletedProcess[str]":
    command = ["/bin/sh", str(plugin / "kubectl-specdecode"), *arguments]
    return subprocess.run(command, env={"PATH": str(path)}, capture_output=True, text=True, check=False)


def test_the_plugin_runs_the_installed_command(plugin: Path) -> None:
    installed = plugin / "specdecode"
    installed.write_text('#!/bin/sh\nprintf "%s|" "$@"\nexit 5\n')
    installed.chmod(0o755)
    done = run(plugin, "plan", "-f", "two words.yaml", path=plugin)
    assert (done.returncode, done.stdout) == (5, "plan|-f|two words.yaml|")


def test_the_plugin_explains_how_to_install_the_command(plugin: Path) -> None:
    done = run(plugin, "plan", path="/nonexistent")
    assert done.returncode == 127
    assert "uv tool install ./specdecode_operator-*.whl" in done.stderr
