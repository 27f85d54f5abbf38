"""Times `specdecode capture report` for 100,000 requests, and measures its memory and its page."""

import tempfile
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

from bench.figures import Figure, at_most
from bench.processes import run_command
from tests.support.drawn_captures import write_capture

REQUESTS = 100_000
BURSTS = 40
"""Of each request; beside that two steps of the engine and a line of the client's log."""


def figures() -> Iterator[Figure]:
    """Yield time, memory, and size of the page."""
    with tempfile.TemporaryDirectory(prefix="specdecode-bench-") as folder:
        capture, page = Path(folder) / "capture", Path(folder) / "report.html"
        # In a process of its own: a child is said to have had as much memory as the one that started it.
        writer = get_context("spawn").Process(target=write_capture, args=(capture, REQUESTS), kwargs={"bursts": BURSTS})
        writer.start()
        writer.join()
        size_bytes = sum(path.stat().st_size for path in capture.iterdir())
        used = run_command("capture", "report", str(capture), "-o", str(page))
        of = f"{REQUESTS:,} requests of {BURSTS} steps, {size_bytes / 2**20:.0f} MiB of files"
        yield Figure("report, CPU time", used.cpu_s, "s", at_most(20), f"{of}; {used.wall_s:.1f} s of wall time")
        yield Figure("report, memory", used.memory_mib, "MiB", at_most(500))
        yield Figure("report, page", page.stat().st_size / 2**20, "MiB", at_most(5))
