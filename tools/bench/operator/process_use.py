"""Reads CPU time and memory of processes from /proc."""

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK")
_KIB: Final = 1024
_USER, _SYSTEM = 14, 15
"""Fields of /proc/PID/stat, numbered as in proc_pid_stat(5)."""


@dataclass(frozen=True)
class Memory:
    """Current and peak resident memory of a process."""

    now_bytes: int
    peak_bytes: int


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used so far."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(after_name[_USER - 3]) + int(after_name[_SYSTEM - 3])) / _TICKS_A_SECOND


def machine_cpu_s() -> float:
    """Return the CPU time that all processes of the machine have used."""
    # As in proc_stat(5): user, nice, system; idle, iowait; irq, softirq.
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]]
    return (sum(ticks) - ticks[3] - ticks[4]) / _TICKS_A_SECOND


def cpu_of_all_s(pids: Iterable[int]) -> float:
    """Return the CPU time of the processes that still run."""
    used = 0.0
    for pid in pids:
        with suppress(OSError):
            used += cpu_s(pid)
    return used


def memory(pid: int) -> Memory:
    """Return the resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines) if rest.strip()}
    return Memory(int(values["VmRSS"]) * _KIB, int(values["VmHWM"]) * _KIB)
