"""Daemons without pid files: each one carries its cluster and its name in its environment.

A mark in the environment is there from the first instruction to the last, is inherited by
children (containerd's shims too), and cannot be confused with a stranger's process that got
a recycled pid. So a cluster can be found and removed however its parts, or the command that
started them, were killed.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from devcluster.host.errors import ClusterError

CLUSTER_MARK = "SPECDECODE_DEVCLUSTER"
COMPONENT_MARK = "SPECDECODE_DEVCLUSTER_COMPONENT"
GO_SETTINGS = {"GOGC": "400", "GOMEMLIMIT": "1GiB"}
"""For programs in Go: they look for garbage a quarter as often, which saves a tenth of a control plane's work.

What the caller's environment says goes before it.
"""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LOOKS_AT_NOTHING = 10
"""How often an environment is read that seems to be empty: exec may just have ended, or the next one begun."""

# Each daemon gets its own standard streams (a pipe on the caller's would never end) and
# becomes an orphan at once, so that no caller has to reap it.
_LAUNCH = 'log=$1; shift; setsid "$@" </dev/null >>"$log" 2>&1 & echo $!'


def start(state: Path, component: str, argv: Sequence[str], log: Path) -> int:
    """Start a daemon in the background and return its pid."""
    go_settings = {name: os.environ.get(name, usual) for name, usual in GO_SETTINGS.items()}
    environment = {"PATH": _PATH, **go_settings, CLUSTER_MARK: str(state), COMPONENT_MARK: component}
    launched = subprocess.run(
        ["/bin/sh", "-c", _LAUNCH, "sh", str(log), *argv],
        env=environment,
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    pid = int(launched.stdout)
    while alive(pid) and not _leads_session(pid):  # setsid has not run yet
        time.sleep(0.001)
    return pid


def marked(state: Path) -> set[int]:
    """Return the pids of all processes that carry the cluster's mark."""
    mark = f"{CLUSTER_MARK}={state}".encode()
    return {pid for pid in _pids() if mark in _environment(pid)}


def find(state: Path, component: str) -> int | None:
    """Return the pid of a component, or None where it does not run."""
    marks = {f"{CLUSTER_MARK}={state}".encode(), f"{COMPONENT_MARK}={component}".encode()}
    for pid in _pids():
        # Children inherit the marks, but only the daemon itself leads a session.
        if marks <= set(_environment(pid)) and _leads_session(pid):
            return pid
    return None


def alive(pid: int) -> bool:
    """Decide whether a process exists and has not ended (a zombie has)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(") ")[2][0] not in "ZX"


def sharing_network(pids: Iterable[int]) -> set[int]:
    """Return all processes in the network namespaces of `pids`, except the machine's own."""
    own = _network(os.getpid())
    spaces = {_network(pid) for pid in pids} - {own, None}
    return {pid for pid in _pids() if _network(pid) in spaces} if spaces else set()


def kill_all(find_pids: Callable[[], set[int]], deadline_s: float = 60.0) -> int:
    """Kill what `find_pids` returns until it returns nothing; return how many were killed."""
    killed: set[int] = set()
    deadline = time.monotonic() + deadline_s
    while pids := {pid for pid in find_pids() if alive(pid)}:
        if time.monotonic() > deadline:
            message = f"processes {sorted(pids)} do not end after SIGKILL: see what they wait for in /proc/PID/stack"
            raise ClusterError(message)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= pids
        time.sleep(0.02)
    return len(killed)


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    with suppress(FileNotFoundError, PermissionError, ProcessLookupError):
        for _ in range(_LOOKS_AT_NOTHING):
            if variables := Path(f"/proc/{pid}/environ").read_bytes():
                return variables.split(b"\0")
            if not _is_becoming_a_program(pid):
                break
    return []


def _is_becoming_a_program(pid: int) -> bool:
    """Wait while a process is in the middle of exec, where the kernel knows no environment of it.

    False for what has no memory of its own: zombies and threads of the kernel. The fields of /proc/PID/stat are
    counted as in proc_pid_stat(5): 23 is the size of the memory, 51 the end of the environment.
    """
    while True:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        memory_bytes, environment_end = (int(after_name[number - 3]) for number in (23, 51))
        if memory_bytes == 0 or environment_end != 0:
            return memory_bytes > 0
        time.sleep(0.001)


def _leads_session(pid: int) -> bool:
    with suppress(ProcessLookupError):
        return os.getsid(pid) == pid
    return False


def _network(pid: int) -> Path | None:
    with suppress(FileNotFoundError, PermissionError, ProcessLookupError):
        return Path(f"/proc/{pid}/ns/net").readlink()
    return None
