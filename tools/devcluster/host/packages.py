"""Programs that come with the machine's own packages: container runtime, network tools, openssl."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from devcluster.host.errors import ClusterError
from devcluster.host.progress import say, step

CNI_DIRS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"), Path("/usr/libexec/cni"))
"""Where Debian, the upstream release and Fedora put the CNI plugins."""

DEBIAN_PACKAGES = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "cni-ptp": "containernetworking-plugins",
    "ip": "iproute2",
    "iptables": "iptables",
    "nft": "nftables",
    "conntrack": "conntrack",
    "openssl": "openssl",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
    "chromium-headless-shell": "chromium-headless-shell",
    "prometheus": "prometheus",
    "promtool": "prometheus",
}
CONTROL_PLANE = ("openssl",)
NAMESPACE = (*CONTROL_PLANE, "ip", "nsenter", "unshare")
REAL_NODE = (*NAMESPACE, "containerd", "ctr", "runc", "cni-ptp", "iptables", "nft", "conntrack")
IMAGE_BUILD = ("buildah", "mmdebstrap")

_ANOTHER_APT_S = 600
"""How long another is waited for: Ubuntu upgrades itself in the background, and tests run side by side."""

_SYSTEM_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])


def which(program: str) -> str | None:
    """Return a program's path; an ordinary user's PATH often lacks the sbin directories."""
    return shutil.which(program, path=_SYSTEM_PATH)


def cni_dir() -> Path:
    """Return the directory that holds the CNI plugins."""
    for directory in CNI_DIRS:
        if (directory / "ptp").exists():
            return directory
    raise ClusterError(_advice(["cni-ptp"]))


def ensure(programs: Iterable[str]) -> None:
    """Install what is missing through apt-get, or say what to install."""
    missing = [name for name in programs if not _present(name)]
    if not missing:
        return
    if not which("apt-get") or os.geteuid() != 0:
        raise ClusterError(_advice(missing))
    packages = sorted({DEBIAN_PACKAGES[name] for name in missing})
    say(f"what follows needs {', '.join(missing)}, which this machine lacks: installing {' '.join(packages)}")
    with step(f"apt-get install {' '.join(packages)}"):
        apt_get("update", "-qq")
        # A package that starts a service of its own must not: the cluster runs its own containerd.
        apt_get("install", "-y", "-qq", "--no-install-recommends", *packages)
    if still := [name for name in missing if not _present(name)]:
        raise ClusterError(_advice(still))


def _present(program: str) -> bool:
    if program == "cni-ptp":
        return any((directory / "ptp").exists() for directory in CNI_DIRS)
    return which(program) is not None


def apt_get(*arguments: str) -> str:
    """Run apt-get, after another that is at work, and return its standard output."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1", "LC_ALL": "C"}
    end, told = time.monotonic() + _ANOTHER_APT_S, False
    while True:
        done = subprocess.run(["apt-get", *arguments], env=environment, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout
        # Its own DPkg::Lock::Timeout does not hold for the lists that `update` writes.
        if "Could not get lock" not in done.stderr or time.monotonic() > end:
            raise ClusterError(f"apt-get {' '.join(arguments)} failed: {(done.stderr or done.stdout).strip()[-1000:]}")
        if not told:
            say("waiting: another apt is at work")
            told = True
        time.sleep(1)


def _advice(missing: Iterable[str]) -> str:
    named = sorted(missing)
    packages = " ".join(sorted({DEBIAN_PACKAGES[name] for name in named}))
    return (
        f"missing on this machine: {', '.join(named)}. As root on Debian or Ubuntu: apt-get install {packages}; "
        "elsewhere install the packages of the same purpose (containerd, runc, CNI plugins, iproute2, iptables, "
        "nftables, conntrack-tools, openssl, util-linux)"
    )
