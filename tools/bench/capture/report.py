"""What `specdecode capture report` takes, and how large its page is."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.figures import Figure, at_most, growth
from bench.processes import Used, apart, run_command
from tests.support.drawn_captures import write_capture

SIZES: Final = (10_000, 30_000, 100_000)
BURSTS: Final = 40
"""Of each request; beside that two steps of the engine and a line of the client's log."""


def figures() -> Iterator[Figure]:
    """Yield time, memory and page of the largest capture, and how time grows."""
    with tempfile.TemporaryDirectory(prefix="specdecode-bench-") as name:
        folder = Path(name)
        runs = {size: _run(folder / str(size), size) for size in SIZES}
        largest = runs[SIZES[-1]]
        of = f"{SIZES[-1]:,} requests of {BURSTS} steps; {largest.wall_s:.1f} s of wall time"
        yield Figure("report, CPU time", largest.cpu_s, "s", at_most(20), of)
        yield Figure("report, memory", largest.memory_mib, "MiB", at_most(500))
        yield Figure("report, page", (folder / f"{SIZES[-1]}/report.html").stat().st_size / 2**20, "MiB", at_most(5))
        yield growth("report, CPU by requests", "s", {size: used.cpu_s for size, used in runs.items()})


def _run(folder: Path, requests: int) -> Used:
    apart(write_capture, folder, requests, bursts=BURSTS)
    return run_command("capture", "report", str(folder), "--out", str(folder / "report.html"))
