"""The programs that build images, from the machine's own packages."""

import os
import subprocess

from devcluster.errors import ClusterError
from devcluster.packages import which
from devcluster.progress import say, step

PROGRAMS = ("buildah", "mmdebstrap")
"""Each is the name of its Debian package too."""


def ensure_programs() -> None:
    """Install what is missing through apt-get; without root, say what is needed instead."""
    if os.geteuid() != 0:
        message = (
            "building images without a container engine needs root: it makes a root file system and enters it. "
            "Run this as root, or build with the engine you have: docker build -f Containerfile ."
        )
        raise ClusterError(message)
    missing = [program for program in PROGRAMS if not which(program)]
    if not missing:
        return
    names = " ".join(missing)
    if not which("apt-get"):
        raise ClusterError(f"missing on this machine: {names}. Images are built on Debian or Ubuntu only")
    say(f"images are built without a container engine, with {names}, which this machine lacks: installing")
    with step(f"apt-get install {names}"):
        apt_get("update", "-qq")
        apt_get("install", "-y", "-qq", "--no-install-recommends", *missing)


def apt_get(*arguments: str) -> str:
    """Run apt-get and return its standard output."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(["apt-get", *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"apt-get {' '.join(arguments)} failed:\n{done.stderr.strip()[-1000:]}")
    return done.stdout
