"""Runs a command, and counts the CPU time of all that came of it: daemons that outlive their parents, too.

Linux gives the children of a process that has ended to the nearest subreaper above it (prctl(2)), and what that one
waits for is counted as its own children's time (getrusage(2)). A process in a container counts when it ends.

    python -m tests.support.reaper RESULT COMMAND...    exits as the command does; RESULT gets the CPU seconds

An interrupt is the command's business, which has clusters to remove; SIGTERM is passed on to it as one.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def main(result: str, *command: str) -> int:
    """Run the command to its end; return its exit status."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(command)
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGINT))
    status = None
    while status is None:
        pid, ended = os.wait()
        if pid == process.pid:
            status = os.waitstatus_to_exitcode(ended)
    with suppress(ChildProcessError):  # what ended just now
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    Path(result).write_text(f"{used.ru_utime + used.ru_stime:.1f}")
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
