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


def test_a_daemon_that_outlives_its_parent_is_counted(tmp_path: Path) -> None:
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


def test_the_status_is_that_of_the_command(tmp_path: Path) -> None:
    assert reaped(tmp_path, "raise SystemExit(3)")[0] == 3
    assert reaped(tmp_path, "import os; os.kill(os.getpid(), 9)")[0] == 128 + 9


@pytest.mark.parametrize(
    ("status", "output", "failure"),
    [
        (0, "= 3 passed, 1 skipped in 2.00s =", None),
        (0, "All checks passed!", None),
        (1, "= 1 failed, 3 passed in 2.00s =", "unit: exit status 1"),
        (0, "= 3 passed in 61.00s (0:01:01) =", None),
        (0, "= 3 skipped in 2.00s =", "unit: no test has passed"),
    ],
)
def test_what_fails_a_run(status: int, output: str, failure: str | None) -> None:
    assert Outcome(Part("unit", ()), status, 1, 1, output).failure == failure


def test_counts_are_those_of_pytests_last_summary() -> None:
    output = "= 9 failed in 1.00s =\nnoise: 7 passed\n== 12 passed, 2 failed, 3 deselected in 64.20s (0:01:04) ==\nbye"
    assert Outcome(Part("unit", ()), 0, 1, 1, output).counts == {"passed": 12, "failed": 2}
