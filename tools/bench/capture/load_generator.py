"""How much the load generator sends and reads before its own timing errs by a millisecond: requests/s, and streams.

It runs as in a capture, in this process, against the replay server in another, which notes when it sent what. Both go
before other processes where the kernel lets them; what a process that only sleeps errs by stands beside.
"""

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Final

from bench.figures import Figure, growth
from bench.replay.speed import go_first, naps, p99, replay_command, server_process, write_trace
from specdecode_operator.capture.load.run_settings import read_settings
from specdecode_operator.capture.load.runner import run_load
from specdecode_operator.capture.load.shutdown import Stop

MOST_ERROR_MS: Final = 1.0
RATES: Final = (50, 200, 800)
RATE_S: Final = 3
STREAMS: Final = (100, 300, 900)
GAP_MS: Final = 40.0
GAPS: Final = 75
FIRST_TOKENS: Final = 1
"""Of an answer, before its gaps, each of which brings one more."""


@dataclass(frozen=True)
class Load:
    """One load that was sent: how far off the generator was, and what it took."""

    error_ms: float  # P99
    cpu_s: float
    share: float  # Of a core


def figures() -> Iterator[Figure]:
    """Yield the largest loads at which the generator errs by less, and how its CPU time grows with them."""
    go_first()
    beside = f"a process that only sleeps: {naps()} ms"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rates = {rate: _at_rate(folder / f"rate-{rate}", rate) for rate in RATES}
        yield _largest(
            "requests/s sent within 1 ms of their time, P99",
            "requests/s",
            rates,
            f"timers of its event loop wake at whole ms; {beside}",
        )
        yield growth("CPU of sending, by requests/s", "s", {rate: load.cpu_s for rate, load in rates.items()})
        streams = {count: _at_streams(folder / f"streams-{count}", count) for count in STREAMS}
        of = f"{1000 / GAP_MS:.0f} events a second each; {beside}"
        yield _largest("streams whose tokens are timed within 1 ms, P99", "streams", streams, of)
        yield growth("CPU of reading, by streams", "s", {count: load.cpu_s for count, load in streams.items()})


def _largest(name: str, unit: str, loads: dict[int, Load], remark: str) -> Figure:
    within = [size for size, load in loads.items() if load.error_ms <= MOST_ERROR_MS]
    tried = ", ".join(f"{size:,}: {load.error_ms:.2f} ms at {100 * load.share:.0f} %" for size, load in loads.items())
    said = f"P99 and share of a core: {tried}; {remark}"
    return Figure(name, max(within, default=0), unit, None, said)


def _at_rate(folder: Path, rate: int) -> Load:
    """Send short requests at even times: it errs by how much later than due they leave."""
    phase = {"name": "rate", "pattern": "Constant", "requestsPerSecond": str(rate), "requests": rate * RATE_S}
    sent, _, cpu_s, wall_s = _send(folder, phase, rate * RATE_S, gaps=1, gap_ms=1.0)
    return Load(p99(sorted(each["late_ms"] for each in sent)), cpu_s, cpu_s / wall_s)


def _at_streams(folder: Path, count: int) -> Load:
    """Read answers side by side: it errs by how much longer or shorter they took than the server says."""
    phase = {"name": "streams", "pattern": "Closed", "concurrency": count, "requests": count}
    sent, served, cpu_s, wall_s = _send(folder, phase, count, gaps=GAPS, gap_ms=GAP_MS)
    spans_ms = {each["request_id"]: sum(each["itl_ms"]) for each in served}
    errors = [abs(each["last_token_ms"] - each["first_token_ms"] - spans_ms[each["id"]]) for each in sent]
    return Load(p99(sorted(errors)), cpu_s, cpu_s / wall_s)


def _send(
    folder: Path, phase: dict[str, Any], requests: int, *, gaps: int, gap_ms: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], float, float]:
    """Return what the client and the server wrote of each request, CPU time of this process, and wall time."""
    (client := folder / "client").mkdir(parents=True)
    draw = random.Random(1)  # noqa: S311  not for secrets
    gaps_ms = [[draw.uniform(gap_ms / 2, gap_ms * 1.5) for _ in range(gaps)] for _ in range(requests)]
    trace = write_trace(folder / "trace.jsonl", gaps_ms, [1])
    with server_process(*replay_command(trace, "--record", str(folder / "server"))) as (_, port, _):
        engine = {"url": f"http://127.0.0.1:{port}", "model": "bench", "max_model_len": 4096, "vocab_size": 32_000}
        prompts = {"synthetic": {"promptTokens": 8, "outputTokens": FIRST_TOKENS + gaps}}
        workload = {"prompts": prompts, "warmupRequests": 0, "timeoutSeconds": 60, "phases": [phase]}
        run = {"namespace": "bench", "capture": "bench", "seed": 1, "engine": {**engine, "api_key_variable": None}}
        settings = json.dumps({**run, "workload": workload})

        async def load() -> None:
            await run_load(read_settings(settings), client, Stop())

        cpu_s, wall_s = time.process_time(), time.monotonic()
        with redirect_stdout(StringIO()):  # its progress
            asyncio.run(load())
        cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
    sent = [json.loads(line) for line in (client / "client.jsonl.part").read_text().splitlines()]
    served = [json.loads(line) for line in (folder / "server/trace.jsonl").read_text().splitlines()[1:]]
    return sent, served, cpu_s, wall_s
