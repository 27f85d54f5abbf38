"""Facts of a run: the machine, its load, and the measured commit."""

import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]


def facts() -> dict[str, Any]:
    """Return the facts of this machine. Call it before the first measurement, because they include the load."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _git("describe", "--always", "--dirty"),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _value(Path("/proc/cpuinfo"), "model name"),
        "memory_gib": round(int(_value(Path("/proc/meminfo"), "MemTotal").split()[0]) / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_at_start": [round(load, 1) for load in os.getloadavg()],
    }


def described(machine: dict[str, Any], parts: Iterable[str]) -> str:
    """Return the facts as a line of text."""
    load = " ".join(map(str, machine["load_at_start"]))
    line = (
        f"{machine['date']}, commit {machine['commit']}: {machine['cores']} cores of {machine['cpu']}, "
        f"{machine['memory_gib']} GiB, kernel {machine['kernel']}, Python {machine['python']}, load at start {load}"
    )
    return ", ".join([line, *sorted(set(parts))])


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  our own words
    return done.stdout.strip() or "unknown"


def _value(file: Path, key: str) -> str:
    """Return the value of the first line `key : value`."""
    lines = (line.partition(":") for line in file.read_text().splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), "unknown")
