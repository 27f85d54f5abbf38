"""The network and mount namespace that a cluster with nodes lives in.

Every fixed port, path, route and firewall rule of Kubernetes exists inside it only, so several
clusters run side by side and all of it vanishes with the last process. One veth pair leads to
the machine; there is no default route, so nothing in a cluster reaches beyond the machine.
"""

import hashlib
import ipaddress
import shlex
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from devcluster.host import cgroups, processes
from devcluster.host.errors import ClusterError

HOLDER = "namespace"
"""The component whose only task is to keep the namespaces alive."""
MAX_CLUSTERS = 32

_FIXED_DIRECTORIES = {
    "/run": "run",
    "/var/log": "log",
    "/var/lib/cni": "cni-cache",
    "/var/lib/kubelet": "kubelet",
    "/tmp/hostpath_pv": "volumes",
}
"""Paths that are compiled into containerd, the CNI library, the kubelet and the volume provisioner -> state."""
_DEADLINE_S = 60
_PART_OF_EVERY_MACHINE = ("/run", "/var/log")

_KERNEL_SETTINGS = {
    "/proc/sys/vm/overcommit_memory": "1",
    "/proc/sys/vm/panic_on_oom": "0",
    "/proc/sys/kernel/panic": "10",
    "/proc/sys/kernel/panic_on_oops": "1",
    "/proc/sys/kernel/keys/root_maxkeys": "1000000",
    "/proc/sys/kernel/keys/root_maxbytes": "25000000",
}
"""What the kubelet would set for the whole machine (setupKernelTunables): it finds these values instead."""


@dataclass(frozen=True)
class Addresses:
    """The address ranges of the cluster with this index."""

    index: int

    @property
    def link(self) -> str:
        """Return the name of the machine's end of the veth pair."""
        return f"sdh{self.index}"

    @property
    def host(self) -> str:
        """Return the machine's address as the cluster sees it."""
        return f"10.201.{self.index}.1"

    @property
    def node(self) -> str:
        """Return the address of the API server and of the real node."""
        return f"10.201.{self.index}.2"

    @property
    def pods(self) -> str:
        """Return the range of the real node's pods."""
        return f"10.202.{self.index}.0/24"

    @property
    def services(self) -> str:
        """Return the range of Service addresses: more than 10,000, of which each object that is served takes one."""
        return f"10.{240 + self.index // 4}.{64 * (self.index % 4)}.0/18"

    @property
    def api_service(self) -> str:
        """Return the Service address of the API server: the first of the range."""
        return str(ipaddress.ip_network(self.services)[1])

    @property
    def fake_pods(self) -> str:
        """Return the range of simulated pods: a black hole."""
        return f"10.{208 + self.index}.0.0/16"

    @property
    def ranges(self) -> list[str]:
        """Return all ranges, to check that the machine does not use them."""
        return [f"{self.host}/30", self.pods, self.services, self.fake_pods]


def free_index(taken: set[int]) -> int:
    """Return an index whose ranges neither another cluster nor the machine's routes use."""
    routes = subprocess.check_output(["ip", "-4", "route", "show"], text=True).splitlines()
    used = []
    for line in routes:
        words = line.split()
        with suppress(ValueError):  # default, blackhole, …
            used.append(ipaddress.ip_network(words[0]))
    for index in sorted(set(range(MAX_CLUSTERS)) - taken):
        ranges = [ipaddress.ip_network(text, strict=False) for text in Addresses(index).ranges]
        if not any(mine.overlaps(theirs) for mine in ranges for theirs in used):
            return index
    raise ClusterError(f"all {MAX_CLUSTERS} address ranges are in use: take a cluster down first (status lists them)")


class Sandbox:
    """The namespaces of the cluster whose state is in `state`."""

    def __init__(self, state: Path, addresses: Addresses) -> None:
        self._state = state
        self._addresses = addresses

    @property
    def cgroup(self) -> str:
        """Return the name of the cgroup that holds the cluster's pods: one for each state directory."""
        return f"specdecode-{self._state.name}-{hashlib.sha256(bytes(self._state)).hexdigest()[:8]}"

    def exists(self) -> bool:
        """Decide whether the namespaces are alive."""
        return processes.find(self._state, HOLDER) is not None

    def enter(self) -> list[str]:
        """Return the command prefix that runs a program inside the namespaces."""
        holder = processes.find(self._state, HOLDER)
        if holder is None:
            raise ClusterError("the cluster's namespaces are gone: run up again")
        return ["nsenter", "-t", str(holder), "-n", "-m", "--"]

    def create(self) -> None:
        """Make the namespaces, the mounts in them and the link to the machine."""
        for forbidden in ("/run", "/var/log", "/proc", "/sys", "/dev"):
            if self._state.is_relative_to(forbidden):
                message = f"SPECDECODE_STATE: {self._state} cannot lie in {forbidden}, which a cluster replaces"
                raise ClusterError(message)
        command = ["unshare", "--net", "--mount", "--propagation", "private", "--", "sleep", "infinity"]
        holder = processes.start(self._state, HOLDER, command, self._state / "logs" / f"{HOLDER}.log")
        _wait_for_namespaces(holder)
        cgroups.create(self.cgroup)
        a = self._addresses
        _sh(
            f"ip link add {a.link} type veth peer name eth0 netns {holder}",
            f"ip link set {a.link} alias {shlex.quote(self._alias)}",
            f"ip addr add {a.host}/30 dev {a.link}",
            f"ip link set {a.link} up",
        )
        _sh("mount --make-rshared /", *self._mounts(), *self._inner_network(), enter=self.enter())
        _sh(*(f"ip route add {target} via {a.node}" for target in (a.pods, a.services, a.fake_pods)))

    def destroy(self) -> None:
        """Kill everything in the namespaces and remove what the kernel does not remove with them."""
        processes.kill_all(self._members)
        if self._link_alias() == self._alias:
            subprocess.run(["ip", "link", "del", self._addresses.link], capture_output=True, check=False)
        deadline = time.monotonic() + _DEADLINE_S
        while not cgroups.remove(self.cgroup):
            if time.monotonic() > deadline:
                raise ClusterError(f"cgroup {self.cgroup} below /sys/fs/cgroup stays busy")
            processes.kill_all(self._members)
            time.sleep(0.02)
        for target in _FIXED_DIRECTORIES:
            if target not in _PART_OF_EVERY_MACHINE and not _mounted_somewhere(target):
                with suppress(OSError):  # not empty: somebody else's
                    Path(target).rmdir()

    def _members(self) -> set[int]:
        marked = processes.marked(self._state)
        return marked | processes.sharing_network(marked) | cgroups.pids(self.cgroup)

    @property
    def _alias(self) -> str:
        return f"specdecode-devcluster {self._state}"[:255]

    def _link_alias(self) -> str | None:
        with suppress(OSError):
            return Path(f"/sys/class/net/{self._addresses.link}/ifalias").read_text().rstrip("\n")
        return None

    def _mounts(self) -> list[str]:
        lines = []
        for target, name in _FIXED_DIRECTORIES.items():
            source = self._state / name
            source.mkdir(exist_ok=True)
            Path(target).mkdir(parents=True, exist_ok=True)
            lines.append(f"mount --bind {shlex.quote(str(source))} {target}")
        settings = self._state / "kernel-settings"
        settings.mkdir(exist_ok=True)
        for target, value in _KERNEL_SETTINGS.items():
            if Path(target).exists():
                source = settings / Path(target).name
                source.write_text(f"{value}\n")
                lines.append(f"mount --bind {shlex.quote(str(source))} {target}")
        return lines

    def _inner_network(self) -> list[str]:
        a = self._addresses
        return [
            "ip link set lo up",
            f"ip addr add {a.node}/30 dev eth0",
            "ip link set eth0 up",
            # The kernel wants a route before kube-proxy's rules rewrite a Service address.
            f"ip route add {a.services} dev eth0",
            f"ip route add blackhole {a.fake_pods}",
            "echo 1 >/proc/sys/net/ipv4/ip_forward",
        ]


def _wait_for_namespaces(pid: int) -> None:
    """Wait until the process has left the machine's namespaces."""
    deadline = time.monotonic() + _DEADLINE_S
    while Path(f"/proc/{pid}/ns/mnt").readlink() == Path("/proc/self/ns/mnt").readlink():
        if time.monotonic() > deadline:
            raise ClusterError("the machine does not allow new network and mount namespaces (unshare failed)")
        time.sleep(0.005)


def _sh(*lines: str, enter: Iterable[str] = ()) -> None:
    """Run shell lines, stop at the first that fails."""
    done = subprocess.run(
        [*enter, "/bin/sh", "-euc", "\n".join(lines)], capture_output=True, text=True, check=False, cwd="/"
    )
    if done.returncode != 0:
        raise ClusterError(f"setting up the cluster's namespaces failed: {done.stderr.strip()}")


def _mounted_somewhere(target: str) -> bool:
    """Decide whether any process on the machine sees a mount at `target`."""
    for mounts in Path("/proc").glob("[0-9]*/mountinfo"):
        with suppress(OSError):
            if any(line.split(" ", 5)[4] == target for line in mounts.read_text().splitlines()):
                return True
    return False
