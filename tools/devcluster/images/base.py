"""The root file system that both images start from, made of the machine's own packages."""

import hashlib
import platform
import subprocess
from pathlib import Path

from devcluster.host.errors import ClusterError
from devcluster.host.packages import apt_get
from devcluster.host.paths import cache_dir
from devcluster.host.progress import step
from devcluster.images import store

PACKAGES = (
    "ca-certificates",
    "libgomp1",  # OpenMP, for torch
    "libnuma1",  # vLLM's CPU kernels
    "python3",
    "python3-venv",
    "util-linux",  # lscpu, which vLLM calls at start
)
ORIGINS = ("Debian", "Ubuntu")
"""Package sources that make a base; other sources of the machine are left out."""

OS_RELEASE = Path("/etc/os-release")


def base_reference() -> str:
    """Return the name of the base image: it changes with the distribution and the packages."""
    wanted = "\n".join([_codename(), platform.machine(), *PACKAGES])
    return f"localhost/specdecode/base:{_codename()}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"


def ensure_base() -> str:
    """Return the name of the base image, which is now in the store."""
    reference = base_reference()
    if store.has_image(reference):
        return reference
    archive = cache_dir() / "images" / f"base-{reference.rpartition(':')[2]}.tar"
    if not archive.exists():
        with step(f"making the images' base of {_codename()} packages, once (about 0.2 GB)"):
            make_root(archive)
    with step("importing the base"):
        store.import_root(archive, reference)
    return reference


def make_root(archive: Path) -> None:
    """Write a minimal root file system of the machine's own distribution as a tar archive."""
    store.ensure_builders()
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_name(archive.stem + ".partial.tar")
    command = [
        "mmdebstrap",
        "--quiet",
        "--variant=minbase",
        f"--include={','.join(PACKAGES)}",
        _codename(),
        str(partial),
        "-",
    ]
    done = subprocess.run(command, input=package_sources(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"mmdebstrap failed:\n{done.stderr.strip()[-2000:]}")
    partial.replace(archive)


def package_sources() -> str:
    """Return the distribution's own sources among those that this machine's apt uses."""
    lines = _source_lines()
    if not lines:
        apt_get("update", "-qq")
        lines = _source_lines()
    if not lines:
        raise ClusterError("apt knows no Debian or Ubuntu source: check /etc/apt/sources.list")
    return "\n".join(lines) + "\n"


def _source_lines() -> list[str]:
    form = "$(ORIGIN) deb $(REPO_URI) $(RELEASE) $(COMPONENT)"
    targets = apt_get("indextargets", "--format", form, "Created-By: Packages").splitlines()
    origins_and_sources = [target.partition(" ") for target in targets]
    # dict.fromkeys: each line once (a source is listed for each architecture), order kept
    return list(dict.fromkeys(line for origin, _, line in origins_and_sources if origin in ORIGINS))


def _codename() -> str:
    for line in OS_RELEASE.read_text().splitlines():
        if line.startswith("VERSION_CODENAME="):
            return line.partition("=")[2].strip('"')
    raise ClusterError(f"{OS_RELEASE} has no VERSION_CODENAME: images are built on Debian or Ubuntu only")
