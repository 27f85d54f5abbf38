"""Where the parsers of the vLLM versions beside the development cluster's are installed, and how.

    .venv/bin/python -m tests.engine.engine_versions

An older version borrows what it depends on, torch above all, from the newest
version's environment: its own package alone, half a gigabyte, lies before that
on the path. It parses and configures; it is not meant to serve.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from devcluster.host.errors import ClusterError
from devcluster.host.paths import REPOSITORY, cache_dir
from devcluster.host.progress import step
from devcluster.images.engine_environment import UV, install_engine_environment
from devcluster.images.engine_image import VLLM_VERSION

REQUIREMENTS = REPOSITORY / "requirements" / "engine-versions"
NEWEST = ".".join(VLLM_VERSION.split(".")[:2])
OLDER = tuple(sorted((path.stem for path in REQUIREMENTS.glob("*.txt")), key=lambda version: int(version[2:])))
"""Oldest first; all of them are 0.x."""

READY = ".ready"
"""Written last, with the requirements that were installed."""


def find_packages(version: str) -> Path | None:
    """Return the folder that goes before the newest version's packages, or None where it is not installed."""
    folder = _folder(version)
    return folder if _is_ready(folder, version) else None


def install() -> None:
    """Install every older version that is missing or whose requirements changed."""
    install_engine_environment()
    for version in OLDER:
        folder = _folder(version)
        if not _is_ready(folder, version):
            with step(f"installing the parser of vLLM {version} (0.5 GB)"):
                _install(folder, version)


def _folder(version: str) -> Path:
    return cache_dir() / "engine-versions" / version


def _requirements(version: str) -> Path:
    return REQUIREMENTS / f"{version}.txt"


def _is_ready(folder: Path, version: str) -> bool:
    ready = folder / READY
    return ready.exists() and ready.read_text() == _requirements(version).read_text()


def _install(folder: Path, version: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    command = [*UV, "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--link-mode=hardlink"]
    command += [f"--target={folder}", f"--requirements={_requirements(version)}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"uv could not install {_requirements(version)}:\n{done.stderr.strip()[-2000:]}")
    # As in devcluster/images/engine_environment.py: vLLM reads its platform off this distribution's version.
    declared = folder / f"vllm-{version}.0+cpu.dist-info"
    declared.mkdir()
    (declared / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}.0+cpu\n")
    (folder / READY).write_text(_requirements(version).read_text())


if __name__ == "__main__":
    try:
        install()
    except ClusterError as error:
        sys.exit(str(error))
