"""Where the parsers of the vLLM versions beside the development cluster's are installed, and how.

    .venv/bin/python -m tests.engine.engine_versions

Such a version borrows what it depends on, torch above all, from the
environment of the development cluster: its own package alone lies before that
on the path. It parses and configures; it is not meant to serve. One that the
package index has no CPU build of is asked through its build for GPUs, without
the kernels, which nothing here could load.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from devcluster.host.errors import ClusterError
from devcluster.host.locks import exclusive
from devcluster.host.paths import REPOSITORY, cache_dir
from devcluster.host.progress import step
from devcluster.images.engine_environment import UV, install_engine_environment
from devcluster.images.engine_image import VLLM_VERSION
from specdecode_operator.vllm.versions import release
from tests.engine.engine_process import Engine

REQUIREMENTS = REPOSITORY / "requirements" / "engine-versions"
SERVED = ".".join(VLLM_VERSION.split(".")[:2])
"""That of the development cluster, whose engines answer requests."""

BESIDE = tuple(sorted((path.stem for path in REQUIREMENTS.glob("*.txt")), key=release))
"""All others, oldest first."""

VERSIONS = tuple(sorted((*BESIDE, SERVED), key=release))
NEWEST = VERSIONS[-1]

OF_KERNELS = (".so", ".h", ".hpp", ".cuh", ".cu", ".inl")
ROUTER = "vllm-rs"
"""Of a build for GPUs, 0.8 GB that nothing here reads: kernels, what they are compiled of at run time, a program."""

READY = ".ready"
"""Written last, with the requirements that were installed."""


def find_packages(version: str) -> Path | None:
    """Return the folder that goes before the environment's packages, or None where it is not installed."""
    folder = _folder(version)
    return folder if _is_ready(folder, version) else None


def install(version: str) -> Path:
    """Return the same folder, made anew where it is missing or its requirements changed."""
    folder = _folder(version)
    with exclusive(cache_dir() / "engine-versions.lock", "another installation of engines"):
        if not _is_ready(folder, version):
            with step(f"installing the parser of vLLM {version} (0.3 to 0.5 GB to download)"):
                _install(folder, version)
    return folder


def at_version(engine: Engine, version: str) -> Engine:
    """Return an engine of a version, installed where it is missing, that borrows from the environment's."""
    return engine if version == SERVED else engine.beside(install(version))


def _folder(version: str) -> Path:
    return cache_dir() / "engine-versions" / version


def _requirements(version: str) -> Path:
    return REQUIREMENTS / f"{version}.txt"


def _is_ready(folder: Path, version: str) -> bool:
    ready = folder / READY
    return ready.exists() and ready.read_text() == _requirements(version).read_text()


def _install(folder: Path, version: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    command = [*UV, "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--no-cache"]
    command += [f"--target={folder}", f"--requirements={_requirements(version)}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"uv could not install {_requirements(version)}:\n{done.stderr.strip()[-2000:]}")
    for built_for_gpus in folder.glob("vllm-*.dist-info"):
        shutil.rmtree(built_for_gpus)
        for file in (folder / "vllm").rglob("*"):
            if file.suffix in OF_KERNELS or file.name == ROUTER:
                file.unlink()
    # As in tools/devcluster/images/engine_environment.py: vLLM reads its platform off this distribution's version.
    declared = folder / f"vllm-{version}.0+cpu.dist-info"
    declared.mkdir()
    (declared / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}.0+cpu\n")
    (folder / READY).write_text(_requirements(version).read_text())


if __name__ == "__main__":
    try:
        install_engine_environment()
        for each in BESIDE:
            install(each)
    except ClusterError as error:
        sys.exit(str(error))
