"""Measures commands of `specdecode` in their own processes, including the start of Python."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context

from bench.machine import ROOT


def apart(make: Callable[..., object], *arguments: object, **options: object) -> None:
    """Call a function in its own process, because a child inherits the peak memory of its parent."""
    process = get_context("spawn").Process(target=make, args=arguments, kwargs=options)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{make} ended with {process.exitcode}")


@dataclass(frozen=True)
class Used:
    """Resources that a process used, and its exit code."""

    wall_s: float
    cpu_s: float
    memory_mib: float
    exit_code: int


def run_command(*arguments: str, exit_code: int | None = 0) -> Used:
    """Run a command of `specdecode` in the root of the project, and discard its output.

    Raises
    ------
    RuntimeError
        When the exit code is not the expected one; None accepts every exit code.
    """
    began_s = time.perf_counter()
    process = subprocess.Popen(  # noqa: S603  our own command
        [sys.executable, "-m", "specdecode_operator", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if exit_code not in (None, process.returncode):
        raise RuntimeError(f"specdecode {' '.join(arguments)} ended with {process.returncode}")
    wall_s = time.perf_counter() - began_s
    return Used(wall_s, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**10, process.returncode)
