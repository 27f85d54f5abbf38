"""The suite's own runner: what it counts, and what makes a run fail."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.parts import Outcome, Part

BUSY = "import time\nwhile time.process_time() < 0.5: pass"
ORPHANED = f"""
import subprocess, sys
busy = subprocess.Popen([sys.executable, "-c", "import os, sys; os.fork() and sys.exit()\\n" + {BUSY!r}])
busy.wait()
"""


def reaped(tmp_path: Path, script: str) -> tuple[int, float]:
    """Exit status and CPU seconds of a script that the reaper runs."""
    result = tmp_path / "cpu"
    command = [sys.executable, "-m", "tests.support.reaper", str(result), sys.executable, "-c", script]
    return subprocess.run(command, check=False).returncode, float(result.read_text())


def test_cpu_time_of_an_orphaned_daemon_is_counted(tmp_path: Path) -> None:
    # It ends as the command does: its time counts once somebody has waited for it.
    status, cpu_s = reaped(tmp_path, ORPHANED + "import os, time\n" + WAIT_FOR_THE_ORPHAN)
    assert status == 0
    assert cpu_s >= 0.5


WAIT_FOR_THE_ORPHAN = """
def busy():
    children = open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read().split()
    return len(children) > 1
while busy():
    time.sleep(0.01)
"""
"""The reaper's children are this command and, until it ends, the orphan."""


@pytest.mark.parametrize(
    ("status", "output", "failure"),
    [
        (0, "= 3 passed, 1 skipped in 2.00s =", None),
        (0, "All checks passed!", None),
        (1, "= 1 failed, 3 passed in 2.00s =", "unit: exit status 1"),
        (0, "= 3 skipped in 2.00s =", "unit: no test has passed"),
    ],
)
def test_run_fails_on_exit_status_or_without_passed_tests(status: int, output: str, failure: str | None) -> None:
    assert Outcome(Part("unit", ()), status, 1, 1, output).failure == failure
