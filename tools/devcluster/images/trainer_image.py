"""The trainer's image for the CPU: that of the engine with speculators. Built only when something trains."""

import shutil
import subprocess
from pathlib import Path

from devcluster.host.errors import ClusterError
from devcluster.host.locks import exclusive
from devcluster.host.paths import REPOSITORY, cache_dir
from devcluster.host.progress import step
from devcluster.images import engine_image, store
from devcluster.images.base import base_reference, ensure_base
from devcluster.images.engine_environment import PYTHON_VERSION, READY, UV
from devcluster.images.fingerprint import fingerprint, forget_others

REFERENCE = f"localhost/specdecode/trainer-cpu:{engine_image.VLLM_VERSION}"
REQUIREMENTS = "requirements/trainer.txt"
CONTAINERFILE = "tools/devcluster/images/trainer-cpu/Containerfile"
ENGINE_CONTEXT = "tools/devcluster/images/engine-cpu"


def build_trainer_image() -> Path:
    """Return the archive of the trainer's image, built when one of its inputs changed."""
    images = cache_dir() / "images"
    inputs = (REQUIREMENTS, CONTAINERFILE, *(f"{ENGINE_CONTEXT}/{each}" for each in engine_image.INPUTS))
    archive = images / f"specdecode-trainer-cpu-{fingerprint(REPOSITORY, inputs, base_reference())}.tar"
    if archive.exists():
        return archive
    packages = install_trainer_packages()
    with exclusive(cache_dir() / "images.lock", "another image build"):
        base, context = ensure_base(), engine_image.CONTEXT
        with step(f"building {REFERENCE}"):
            # The engine's archive may be older than the store.
            store.build(context, context / "Containerfile", base, engine_image.REFERENCE, volumes={})
            containerfile = REPOSITORY / CONTAINERFILE
            volumes = {packages: "/packages"}
            store.build(containerfile.parent, containerfile, engine_image.REFERENCE, REFERENCE, volumes)
            store.export(REFERENCE, archive)
    forget_others(archive, "specdecode-trainer-cpu-*.tar")
    return archive


def install_trainer_packages() -> Path:
    """Return the folder of speculators and what it needs beside vLLM, installed when the requirements changed."""
    wanted = fingerprint(REPOSITORY, (REQUIREMENTS,), base_reference())
    folder = cache_dir() / "trainer" / wanted
    if (folder / READY).exists():
        return folder
    with exclusive(cache_dir() / "images.lock", "another image build"):
        if (folder / READY).exists():
            return folder
        shutil.rmtree(folder.parent, ignore_errors=True)
        python = store.run_in(ensure_base(), ["python3", "-c", PYTHON_VERSION], {}).strip()
        command = [*UV, "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--link-mode=copy"]
        command += [f"--python-version={python}", f"--target={folder}", f"--requirements={REPOSITORY / REQUIREMENTS}"]
        with step("installing the trainer's packages (220 MB; the first time they are downloaded)"):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ClusterError(f"uv could not install {REQUIREMENTS}:\n{done.stderr.strip()[-2000:]}")
        (folder / READY).touch()
    return folder
