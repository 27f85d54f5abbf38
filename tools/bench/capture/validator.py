"""What `specdecode capture validate` takes for files of a capture in which every request adds up."""

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench.figures import Figure, at_most, growth
from bench.processes import apart, run_command
from tests.support.drawn_captures import META, K, step
from tests.support.traces import record, write_trace

SIZES: Final = (10_000, 30_000, 90_000)
BURSTS: Final = 40


def figures() -> Iterator[Figure]:
    """Yield the rate for the largest capture, its memory, and how both grow."""
    runs, bytes_of = {}, {}
    with tempfile.TemporaryDirectory(prefix="specdecode-bench-") as name:
        for size in SIZES:
            folder = Path(name) / str(size)
            apart(_write, folder, size)
            bytes_of[size] = sum(path.stat().st_size for path in folder.iterdir())
            runs[size] = run_command("capture", "validate", str(folder))
    largest, size_mb = runs[SIZES[-1]], bytes_of[SIZES[-1]] / 1e6
    of = f"{SIZES[-1]:,} requests of {BURSTS} steps, {size_mb:.0f} MB of files; {largest.wall_s:.1f} s of wall time"
    yield Figure("validator", size_mb / largest.cpu_s, "MB/s of CPU", None, of)
    yield Figure("validator, requests", SIZES[-1] / largest.cpu_s, "1/s of CPU")
    yield Figure("validator, memory", largest.memory_mib, "MiB", at_most(500))
    yield growth("validator, CPU by requests", "s", {size: used.cpu_s for size, used in runs.items()})
    yield growth("validator, memory by requests", "MiB", {size: used.memory_mib for size, used in runs.items()})


def _write(folder: Path, requests: int) -> None:
    """Write what the engine recorded, its steps, and what the client saw, all of one mind."""
    folder.mkdir()
    chance = random.Random(requests)  # noqa: S311  not for secrets
    records, client, steps = [], [], []
    for index in range(requests):
        sizes = [chance.randint(1, K + 1) for _ in range(BURSTS)]
        at: dict[str, Any] = {"request_id": f"r-{index}", "phase": "one"}
        records.append(
            record(
                prompt_tokens=100,
                output_tokens=1 + sum(sizes),
                itl_ms=[10.0] * BURSTS,
                itl_tokens=sizes,
                itl_ctx={"num_running": [1] * BURSTS, "prefill_tokens": [0] * BURSTS},
                arrival_ms=40.0 * index,
                scheduled_ms=40.0 * index + 5,
                **at,
            )
        )
        seen = {"completion_tokens": 1 + sum(sizes), "chunks": 1 + BURSTS}
        client.append({"id": f"r-{index}", "phase": "one", "index": index, "outcome": "completed", **seen})
        accepted = [sum(size > place + 1 for size in sizes) for place in range(K)]
        steps.append(step(40.0 * index, accepted, running=BURSTS))
    write_trace(folder / "trace.jsonl", records, META)
    for name, lines in (("client", client), ("step-stats", steps)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
