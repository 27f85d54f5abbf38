"""Image building with buildah: no daemon, and a store of our own inside the cache."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from devcluster.host.errors import ClusterError
from devcluster.host.packages import IMAGE_BUILD, ensure
from devcluster.host.paths import cache_dir

LOG_TAIL_LINES = 40
"""How much of a failed build's log the error shows."""

Volumes = Mapping[Path, str]
"""What a build or a command sees of this machine: path here, path inside."""


def ensure_builders() -> None:
    """Install the programs that build images; without root, say what to do instead."""
    if os.geteuid() != 0:
        raise ClusterError(
            "building images without a container engine needs root: it makes a root file system and enters it. "
            "Run this as root, or build with the engine you have: docker build -f Containerfile ."
        )
    ensure(IMAGE_BUILD)


def has_image(reference: str) -> bool:
    """Return whether the store holds an image."""
    return _run("inspect", "--type=image", reference).returncode == 0


def import_root(archive: Path, reference: str) -> None:
    """Make a one-layer image of a root file system in a tar archive."""
    container = _call("from", "scratch").strip()
    try:
        _call("add", "--quiet", container, str(archive), "/")
        _call("commit", "--quiet", container, reference)
    finally:
        _run("rm", container)


def build(  # noqa: PLR0913
    context: Path, containerfile: Path, base: str, reference: str, volumes: Volumes, *, anew: bool = False
) -> None:
    """Build a Containerfile on `base`; the volumes are there during RUN and in no layer.

    What earlier builds have made is taken, unless it is to be made ``anew``.
    """
    mounts = [f"--volume={here}:{inside}:ro" for here, inside in volumes.items()]
    _call(
        "build",
        "--isolation=chroot",
        # One layer a step, however it is built: else what is built anew is another image.
        "--layers",
        *(["--no-cache"] if anew else []),
        "--pull-never",
        # Two builds of the same files are the same image, bit for bit.
        "--timestamp=0",
        f"--build-arg=BASE={base}",
        f"--file={containerfile}",
        f"--tag={reference}",
        *mounts,
        str(context),
    )


def digest(reference: str) -> str:
    """Return the digest of an image's manifest."""
    return _call("inspect", "--type=image", "--format={{.FromImageDigest}}", reference).strip()


def export(reference: str, archive: Path) -> None:
    """Write an image as an OCI archive that containerd imports under exactly that reference."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    _call("push", "--quiet", reference, f"oci-archive:{partial}:{reference}")
    partial.replace(archive)


def push(reference: str, destination: str) -> None:
    """Push an image to a registry; one on this machine may speak plain HTTP."""
    _call("push", "--quiet", _verification(destination), reference, f"docker://{destination}")


def pull(reference: str) -> None:
    """Get an image from a registry; one on this machine may speak plain HTTP."""
    _call("pull", "--quiet", _verification(reference), f"docker://{reference}")


def speaks_http(reference: str) -> bool:
    """Whether the registry of an image is on this machine, where it need not speak TLS."""
    return reference.partition("/")[0].partition(":")[0] in {"localhost", "127.0.0.1"}


def _verification(reference: str) -> str:
    return f"--tls-verify={str(not speaks_http(reference)).lower()}"


def run_in(image: str, command: Sequence[str], volumes: Volumes) -> str:
    """Run a command in a throw-away container and return its standard output."""
    mounts = [f"--volume={here}:{inside}" for here, inside in volumes.items()]
    container = _call("from", "--pull-never", image).strip()
    try:
        return _call("run", "--isolation=chroot", *mounts, container, "--", *command)
    finally:
        _run("rm", container)


def _call(*arguments: str) -> str:
    done = _run(*arguments)
    if done.returncode != 0:
        log = "\n".join((done.stdout + done.stderr).strip().splitlines()[-LOG_TAIL_LINES:])
        raise ClusterError(f"buildah {arguments[0]} failed:\n{log}")
    return done.stdout


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*_buildah(), *arguments]
    # A umask of 077 would make files in the image that its user cannot read.
    return subprocess.run(command, capture_output=True, text=True, check=False, umask=0o022)


@cache
def _buildah() -> tuple[str, ...]:
    """Return buildah's command line, with overlay storage where the kernel allows it (copies take time)."""
    ensure_builders()
    for driver in ("overlay", "vfs"):
        store = cache_dir() / "buildah" / driver
        command = (
            "buildah",
            f"--root={store / 'root'}",
            f"--runroot={store / 'run'}",
            f"--storage-driver={driver}",
        )
        done = subprocess.run([*command, "info"], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return command
    raise ClusterError(f"buildah cannot use {store}: {done.stderr.strip()}")
