"""The control groups of a cluster's pods: one directory of its own below every hierarchy."""

import os
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def create(name: str) -> None:
    """Make the cluster's cgroup in every hierarchy (version 1) or in the only one (version 2)."""
    for parent in _hierarchies():
        directory = parent / name
        directory.mkdir(exist_ok=True)
        controllers = directory / "cgroup.controllers"
        if controllers.exists():
            for controller in controllers.read_text().split():
                with suppress(OSError):
                    (directory / "cgroup.subtree_control").write_text(f"+{controller}")
        # A cpuset of version 1 starts empty, and no process may enter it.
        for file in ("cpuset.cpus", "cpuset.mems"):
            if (parent / file).exists() and not controllers.exists():
                (directory / file).write_text((parent / file).read_text())


def pids(name: str) -> set[int]:
    """Return the processes in the cluster's cgroups: its pods."""
    found: set[int] = set()
    for directory in (directory for top in _existing(name) for directory in _deepest_first(top)):
        with suppress(OSError):
            found |= {int(pid) for pid in (directory / "cgroup.procs").read_text().split()}
    return found


def remove(name: str) -> bool:
    """Remove the cluster's cgroups; False where one is still busy (its last process is ending)."""
    done = True
    for top in _existing(name):
        for directory in _deepest_first(top):
            try:
                directory.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                done = False
    return done


def _deepest_first(top: Path) -> list[Path]:
    """Return a cgroup and those below it. A pod that ends meanwhile disturbs nobody: rglob would raise."""
    return [Path(directory) for directory, _, _ in os.walk(top, topdown=False)]


def _hierarchies() -> list[Path]:
    if (_ROOT / "cgroup.controllers").exists():
        return [_ROOT]
    return [path for path in _ROOT.iterdir() if path.is_dir() and not path.is_symlink()]


def _existing(name: str) -> list[Path]:
    return [parent / name for parent in _hierarchies() if (parent / name).is_dir()]
