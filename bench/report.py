"""Times `specdecode capture report` for 100,000 requests, and measures its memory and its page."""

import os
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

from tests.support.drawn_captures import write_capture

REQUESTS = 100_000
BURSTS = 40
"""Of each request; beside that two steps of the engine and a line of the client's log."""


def main(requests: int) -> None:
    """Print one line for each figure."""
    with tempfile.TemporaryDirectory(prefix="specdecode-bench-") as folder:
        capture, page = Path(folder) / "capture", Path(folder) / "report.html"
        # In a process of its own: a child is said to have had as much memory as the one that started it.
        writer = get_context("spawn").Process(target=write_capture, args=(capture, requests), kwargs={"bursts": BURSTS})
        writer.start()
        writer.join()
        size_bytes = sum(path.stat().st_size for path in capture.iterdir())
        command = [sys.executable, "-m", "specdecode_operator", "capture", "report", str(capture), "-o", str(page)]
        started_s = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603  our own command
        _, status, used = os.wait4(process.pid, 0)
        wall_s = time.monotonic() - started_s
        if status:
            sys.exit(f"specdecode capture report ended with {status}")
        print(f"report: {requests:,} requests of {BURSTS} steps, {size_bytes / 2**20:.0f} MiB of files")
        print(f"time: {wall_s:.1f} s, {used.ru_utime + used.ru_stime:.1f} s of CPU time (at most 20 s)")
        print(f"memory: {used.ru_maxrss / 2**10:.0f} MiB (at most 500)")
        print(f"page: {page.stat().st_size / 2**20:.2f} MiB (at most 5)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else REQUESTS)
